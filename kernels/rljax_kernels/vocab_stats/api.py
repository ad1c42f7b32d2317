"""Per-token vocabulary statistics of `hidden @ unembed.T`, and token losses."""

from collections.abc import Mapping, Sequence
import dataclasses
import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from rljax_kernels import checks
from rljax_kernels.layout import Layout
from rljax_kernels.vocab_stats import (
  algebra,
  arguments,
  choice,
  program,
  reference,
  xla_token,
)
from rljax_kernels.vocab_stats.arguments import Reference
from rljax_kernels.vocab_stats.program import Inputs, Plan, Side


def vocab_stats(
  hidden: jax.Array,
  unembed: jax.Array,
  targets: jax.Array,
  *,
  temperature: jax.Array | float = 1.0,
  softcap: float | None = None,
  valid: int | None = None,
  reference: Reference | None = None,
  want: Sequence[str] = ('logp',),
  beta: float = 0.5,
  layout: Layout | None = None,
  vocab_axis: str | None = None,
  block: int | None = None,
  implementation: str | None = None,
  explain: bool = False,
) -> Any:
  """Returns per-token statistics of the softmax over the vocabulary.

  Differentiable in `hidden` and `unembed`, in any combination of the
  statistics; the backward pass recomputes the logits block by block.
  Statistics are float32 whatever the inputs are. With p the softmax of
  `hidden @ unembed.T / temperature`, q that of the reference and
  u = log p + entropy, `want` names among

    logp            log p of the target
    lse             log of the normalizer
    entropy         -sum p log p
    varentropy      sum p u^2
    top_logp        log of the largest p
    collision       sum p^2
    entropy_drift   sum p^2 u
    polarity        entropy_drift - p u at the target: what a policy-gradient
                    step on this token does to the entropy, per unit of
                    advantage and step
    ref_logp        log q of the target
    kl_pq, kl_qp    KL(p || q) and KL(q || p); inf, without a gradient, where
                    the second bans an id that the first may draw
    js              (1 - beta) KL(p || m) + beta KL(q || m) with the mixture
                    m = (1 - beta) p + beta q; two passes

  Args:
    hidden: [N, D], float32 or bfloat16.
    unembed: [V, D] or [D, V]; a square one is [V, D].
    targets: integers [N]. Where an id is banned or not in [0, V), logp and
      ref_logp are -inf and pass no gradient.
    temperature: scalar or [N], positive; a traced one that is not makes NaN. No
      gradient reaches it.
    softcap: None or c, for logits c * tanh(x / c) before the temperature.
    valid: None or the number of real ids; the rest of V is padding, whose
      weights must be finite.
    reference: the other model, for ref_logp, the KLs and js.
    want: names of the statistics.
    beta: in (0, 1), see js.
    layout: how the arrays are split over a mesh, or None.
    vocab_axis: inside a `shard_map` with `check_vma=True`: the mesh axis that
      splits the vocabulary.
    block: tokens or ids a block, or None to choose.
    implementation: 'pallas_tpu', 'xla_vocab', 'xla_token', 'reference', or
      None to choose by the platform the program is compiled for.
    explain: return the `Choice` (name and reason) and compute nothing.

  Returns:
    A mapping of f32 [N], in nats; `Choice` with `explain`.

  Raises:
    ValueError: for shapes, dtypes, names or numbers that do not fit.
    NotImplementedError: an implementation that was asked for cannot serve.
  """
  vocab = arguments.ids_of(hidden, unembed, vocab_axis, layout)
  spec = arguments.spec_of(vocab, want, softcap, valid, reference, beta)
  plan = arguments.plan_of(
    hidden, unembed, targets, reference,
    spec=spec, vocab_axis=vocab_axis, block=block,
  )  # fmt: skip
  paired = reference if spec.reference else None
  x = arguments.inputs(hidden, unembed, targets, temperature, paired)
  picked = choice.choose(plan, x, layout, implementation)
  if explain:
    return picked
  form = _Program(plan, picked, layout)
  x = arguments.folded(x, spec)
  stats = algebra.with_derived(form.differentiable(x))
  return {name: stats[name] for name in want}


def vocab_js(
  hidden: jax.Array,
  unembed: jax.Array,
  temperatures: tuple[jax.Array | float, jax.Array | float],
  *,
  beta: float = 0.5,
  softcap: float | None = None,
  valid: int | None = None,
  layout: Layout | None = None,
  vocab_axis: str | None = None,
  block: int | None = None,
  implementation: str | None = None,
) -> jax.Array:
  """Returns how far apart one model is at two temperatures, f32 [N].

  The generalized Jensen-Shannon divergence of `vocab_stats`, in nats, between
  p at the first temperature and q at the second: at most log 2 for beta = 0.5,
  and 0 where the temperatures are equal or the logits are. The logits are made
  once. It is data: no gradient passes.

  Args:
    hidden: [N, D], float32 or bfloat16.
    unembed: [V, D] or [D, V].
    temperatures: two of scalar or [N], positive.
    beta: in (0, 1), the weight of the second.
    softcap: None or c, for logits c * tanh(x / c) before the temperatures.
    valid: None or the number of real ids; the rest of V is padding.
    layout: how the arrays are split over a mesh, or None.
    vocab_axis: see `vocab_stats`.
    block: tokens or ids a block, or None to choose.
    implementation: see `vocab_stats`.

  Raises:
    ValueError: for shapes, dtypes or numbers that do not fit.
    NotImplementedError: an implementation that was asked for cannot serve.
  """
  checks.arrays(hidden=hidden, unembed=unembed)
  hidden, unembed = jax.lax.stop_gradient((hidden, unembed))
  arguments.check_beta(beta)
  vocab = arguments.ids_of(hidden, unembed, vocab_axis, layout)
  bend = arguments.bend_of(softcap, valid, vocab)
  spec = algebra.Spec(('logp', 'lse', 'js'), bend, bend, beta)
  targets = jnp.zeros(hidden.shape[:1], jnp.int32)
  plan = arguments.plan_of(
    hidden, unembed, targets, None,
    spec=spec, vocab_axis=vocab_axis, block=block,
  )  # fmt: skip
  first, second = _two(temperatures)
  x = arguments.inputs(hidden, unembed, targets, first, None)
  other = Side(None, None, arguments.inverse(second, hidden.shape[0]))
  x = x._replace(reference=other)
  picked = choice.choose(plan, x, layout, implementation)
  js = _Program(plan, picked, layout).differentiable(x)['js']
  return jnp.maximum(js, 0.0)  # rounding may take 0 below it


def _two(temperatures):
  """Returns two temperatures; raises for another number of them."""
  if not isinstance(temperatures, tuple | list) or len(temperatures) != 2:
    raise ValueError(
      f'temperatures={temperatures!r} must be two, each a scalar or [N].'
    )
  return temperatures


def token_loss(
  fn: xla_token.Objective,
  hidden: jax.Array,
  unembed: jax.Array,
  targets: jax.Array,
  weight: jax.Array,
  data: Mapping[str, jax.Array],
  *,
  temperature: jax.Array | float = 1.0,
  softcap: float | None = None,
  valid: int | None = None,
  reference: Reference | None = None,
  want: Sequence[str] = ('logp', 'lse', 'entropy'),
  beta: float = 0.5,
  layout: Layout | None = None,
  block: int | None = None,
  implementation: str | None = None,
) -> xla_token.Sums:
  """Returns -sum(weight * objective) with its gradients, in one pass.

  For objectives that are separable over tokens. In token blocks (a CPU's
  choice) the gradients are computed beside the value and tokens of weight 0
  are skipped; elsewhere a forward and a backward sweep are made. `jax.grad` of
  `loss` gives the same gradients in `hidden` and `unembed`; everything else,
  `weight`, `data` and `temperature` too, is constant to it.

  Args:
    fn: (statistics, data) to (objective f32 [n], mapping of f32 [n] that is
      summed over live tokens); separable over tokens.
    hidden: [N, D].
    unembed: [V, D] or [D, V].
    targets: i32 [N].
    weight: f32 [N]; 0 marks a dead token, whose `data` may be anything.
    data: mapping of f32 [N].
    temperature: scalar or [N], positive.
    softcap: None or c, for logits c * tanh(x / c).
    valid: None or the number of real ids; the rest of V is padding.
    reference: the other model, see `vocab_stats`.
    want: the statistics that `fn` reads; 'logp' and 'lse' are always there.
    beta: see `vocab_stats`.
    layout: how the arrays are split, or None for one device.
    block: tokens or ids a block, or None to choose.
    implementation: see `vocab_stats`.

  Returns:
    `Sums`: loss, aux, d_hidden [N, D], d_unembed as unembed, and the
    statistics f32 [N] of live tokens.

  Raises:
    ValueError: for shapes, dtypes, names or numbers that do not fit.
    NotImplementedError: an implementation that was asked for cannot serve.
  """
  vocab = arguments.ids_of(hidden, unembed, None, layout)
  spec = arguments.spec_of(vocab, want, softcap, valid, reference, beta)
  plan = arguments.plan_of(
    hidden, unembed, targets, reference, spec=spec, block=block
  )
  checks.rows(hidden.shape[0], weight=weight, **data)
  weight = jnp.asarray(weight, jnp.float32)
  data = {name: jnp.asarray(x) for name, x in data.items()}
  _check_objective(fn, spec, data)
  paired = reference if spec.reference else None
  x = arguments.inputs(hidden, unembed, targets, temperature, paired)
  picked = choice.choose(plan, x, layout, implementation)
  form = _Program(plan, picked, layout)
  whole, inverse = arguments.folded(x, spec), x.policy.inverse
  # A loop as long as there are live tokens has no gradient of its own.
  sums = form.loss(fn, *jax.lax.stop_gradient((whole, weight, data)))
  if inverse is not None and whole is not x:
    sums = sums._replace(d_hidden=sums.d_hidden * inverse)
  gradients = sums.d_hidden, sums.d_unembed
  loss = _with_gradients(sums.loss, gradients, *x.policy[:2])
  return sums._replace(loss=loss)


@jax.custom_vjp
def _with_gradients(loss, gradients, hidden, unembed):
  """Returns the loss, whose gradients in hidden and unembed are known."""
  return loss


def _with_gradients_fwd(loss, gradients, hidden, unembed):
  return loss, gradients


def _with_gradients_bwd(gradients, cotangent):
  given = (cotangent.astype(x.dtype) * x for x in gradients)
  none: Any = None
  return none, none, *given


_with_gradients.defvjp(_with_gradients_fwd, _with_gradients_bwd)


def _check_objective(fn: xla_token.Objective, spec: algebra.Spec, data):
  """Raises ValueError unless fn gives f32 [n] and a mapping of f32 [n]."""
  row = jax.ShapeDtypeStruct((3,), jnp.float32)
  rows = {k: jax.ShapeDtypeStruct((3,), x.dtype) for k, x in data.items()}
  found = jax.eval_shape(fn, dict.fromkeys(algebra.names(spec), row), rows)
  if not isinstance(found, tuple) or len(found) != 2:
    raise ValueError(
      'fn must return (objective [n], {name: [n]}); {} where nothing is to be'
      f' summed. It returned {found}.'
    )
  objective, aux = found
  for name, x in {'objective': objective, **dict(aux)}.items():
    if getattr(x, 'shape', None) != row.shape or x.dtype != row.dtype:
      raise ValueError(
        f'fn returned {name} {x} for tokens {row}; it must be f32 [n], one'
        ' number for each token.'
      )


@dataclasses.dataclass(frozen=True)
class _Program:
  """One implementation on one layout."""

  plan: Plan
  picked: choice.Choice
  layout: Layout | None

  def differentiable(self, x: Inputs) -> dict[str, jax.Array]:
    """Returns the statistics of the plan, f32 [N] each."""
    if self.picked.name == 'reference':
      return reference.vocab_stats(self.plan, x)
    if self.layout is not None:
      # Here, so that cotangents leave the rule where its inputs lie.
      x = self.layout.place(x, self.inputs(x))
    return _recomputed(self, x)

  def spread(self, run, in_specs, out_specs):
    """Returns `run`, over the mesh if there is one."""
    # Rules lie outside shard_map: inside, cotangents of replicated outputs
    # would arrive divided by the size of the vocabulary axis.
    if self.layout is None:
      return run
    return self.layout.spread(run, in_specs, out_specs)

  @property
  def local(self) -> Plan:
    """The plan inside the mesh."""
    if self.layout is None or self.layout.vocab is None:
      return self.plan
    return dataclasses.replace(self.plan, vocab_axis=self.layout.vocab)

  @property
  def rows(self) -> PartitionSpec:
    """Where arrays with a row for each token live."""
    return PartitionSpec(self.layout.rows if self.layout else ())

  def unembed(self, wide: bool) -> PartitionSpec:
    """Where an unembedding lives."""
    axis = self.layout.vocab if self.layout else None
    return PartitionSpec(None, axis) if wide else PartitionSpec(axis)

  def inputs(self, x: Inputs) -> Inputs:
    """The specs of all inputs."""
    ref, rows = None, cast(Any, self.rows)
    if x.reference is not None:
      ref = self._side(self.plan.ref_wide)
    if len(x.models) == 1 and ref is not None:
      ref = Side(None, None, rows)
    return Inputs(self._side(self.plan.wide), rows, ref)

  def _side(self, wide: bool) -> Side:
    specs: Any = (self.rows, self.unembed(wide), self.rows)
    return Side(*specs)

  def forward(self, x: Inputs) -> dict[str, jax.Array]:
    """Returns the statistics and what the gradient needs, f32 [N, 1] each."""

    def run(x: Inputs):
      sweep = functools.partial(choice.sweep, self.picked, self.local, x)
      return program.statistics(self.local, x, sweep)

    return self.spread(run, (self.inputs(x),), self.rows)(x)

  def backward(self, x: Inputs, constants: algebra.Columns):
    """Returns cotangents of hidden and unembed."""
    plan, layout = self.local, self.layout

    def run(x: Inputs, constants):
      dh, dw = choice.pull(self.picked, plan, x, constants)
      if plan.vocab_axis is not None:
        dh = jax.lax.psum(dh, plan.vocab_axis)
      rows = (
        layout.rows if layout else program.varying_more(dw, x.policy.unembed)
      )
      if rows:
        dw = jax.lax.psum(dw, rows)
      return dh.astype(x.policy.hidden.dtype), dw

    specs = (self.inputs(x), self.rows)
    out = (self.rows, self.unembed(self.plan.wide))
    return self.spread(run, specs, out)(x, constants)

  def loss(self, fn, x: Inputs, weight, data) -> xla_token.Sums:
    """Returns a token loss with its gradients."""
    if self.picked.name == 'by_platform':
      kernel = dataclasses.replace(self, picked=self.picked.on('tpu'))
      vocab = dataclasses.replace(self, picked=self.picked.on('gpu'))
      token = dataclasses.replace(self, picked=self.picked.on('cpu'))
      return jax.lax.platform_dependent(
        x, weight, data,
        tpu=functools.partial(kernel.loss, fn),
        cuda=functools.partial(vocab.loss, fn),
        rocm=functools.partial(vocab.loss, fn),
        default=functools.partial(token.loss, fn),
      )  # fmt: skip
    if self.picked.name != 'xla_token':
      return self._two_sweeps(fn, x, weight, data)
    rows, none = self.rows, PartitionSpec()
    run = functools.partial(self._one_pass, fn)
    out: Any = (none, none, rows, self.unembed(self.plan.wide), rows)
    specs = (self.inputs(x), rows, rows)
    return self.spread(run, specs, xla_token.Sums(*out))(x, weight, data)

  def _one_pass(self, fn, x: Inputs, weight, data) -> xla_token.Sums:
    sums = xla_token.loss_and_gradients(self.local, fn, x, weight, data)
    if self.layout is None or not self.layout.rows:
      return sums
    loss, aux, d_unembed = jax.lax.psum(
      (sums.loss, sums.aux, sums.d_unembed), self.layout.rows
    )
    return sums._replace(loss=loss, aux=aux, d_unembed=d_unembed)

  def _two_sweeps(self, fn, x: Inputs, weight, data) -> xla_token.Sums:
    live = weight != 0
    x = _only(live, x)

    def basic(hidden, unembed):
      policy = x.policy._replace(hidden=hidden, unembed=unembed)
      return self.differentiable(x._replace(policy=policy))

    found, pull_logits = jax.vjp(basic, *x.policy[:2])
    objective, pull, (stats, aux) = jax.vjp(
      lambda s: xla_token.objective_of(fn, s, data), found, has_aux=True
    )
    # Dead rows may hold NaN in `data`: their cotangent is cut, not multiplied.
    (g,) = pull(-weight)
    g = {k: jnp.where(live, v, 0.0) for k, v in g.items()}
    d_hidden, d_unembed = pull_logits(g)

    def kept(a):
      return jnp.where(live, a, 0.0)

    return xla_token.Sums(
      -jnp.sum(kept(objective * weight)),
      {k: jnp.sum(kept(v)) for k, v in aux.items()},
      d_hidden,
      d_unembed,
      {k: kept(v) for k, v in stats.items()},
    )


def _only(live, x: Inputs) -> Inputs:
  """Returns inputs with zeros in place of dead tokens' hidden states."""

  def cut(side: Side) -> Side:
    if side.hidden is None:
      return side
    return side._replace(hidden=jnp.where(live[:, None], side.hidden, 0))

  ref = None if x.reference is None else cut(x.reference)
  return x._replace(policy=cut(x.policy), reference=ref)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _recomputed(form: _Program, x: Inputs) -> dict[str, jax.Array]:
  found = form.forward(x)
  return {k: found[k][:, 0] for k in form.plan.spec.names}


def _recomputed_fwd(form: _Program, x: Inputs):
  found = form.forward(x)
  out = {k: found[k][:, 0] for k in form.plan.spec.names}
  return out, (x, found)


def _recomputed_bwd(form: _Program, saved, cotangent):
  x, found = saved
  g = {k: v[:, None] for k, v in cotangent.items() if k != 'ref_logp'}
  constants = algebra.constants(form.plan.spec, found, g)
  d_hidden, d_unembed = form.backward(x, constants)
  zero = jax.tree.map(jnp.zeros_like, x.reference)
  none: Any = None
  return (Inputs(Side(d_hidden, d_unembed, none), none, zero),)


_recomputed.defvjp(_recomputed_fwd, _recomputed_bwd)
