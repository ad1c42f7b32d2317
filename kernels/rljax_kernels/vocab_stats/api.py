"""Per-token vocabulary statistics of `hidden @ unembed.T`, and token losses."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from rljax_kernels.vocab_stats import reference, xla

_WANT = ('logp', 'lse', 'entropy')
_IMPLEMENTATIONS = ('xla_token', 'reference')


@dataclasses.dataclass(frozen=True)
class Layout:
  """How rows and vocabulary are split over a mesh.

  Attributes:
    mesh: the device mesh.
    rows: mesh axes that split the N tokens.
    vocab: mesh axis that splits the vocabulary, or None.
  """

  mesh: Mesh
  rows: tuple[str, ...] = ()
  vocab: str | None = None


def vocab_stats(
  hidden: jax.Array,
  unembed: jax.Array,
  targets: jax.Array,
  *,
  temperature: jax.Array | float = 1.0,
  softcap: float | None = None,
  valid: int | None = None,
  want: Sequence[str] = ('logp',),
  layout: Layout | None = None,
  block: int | None = None,
  implementation: str | None = None,
) -> dict[str, jax.Array]:
  """Returns per-token statistics of the softmax over the vocabulary.

  Differentiable in `hidden` and `unembed`; the backward pass recomputes the
  logits block by block. Statistics are float32 whatever the inputs are.

  Args:
    hidden: [N, D], float32 or bfloat16.
    unembed: [V, D].
    targets: i32 [N], ids in [0, V).
    temperature: scalar or [N], positive.
    softcap: None or c, for logits c * tanh(x / c).
    valid: None or the number of real ids; the rest of V is padding.
    want: names among 'logp', 'lse' and 'entropy'.
    layout: how the arrays are split, or None for one device.
    block: tokens a block, or None to choose by the vocabulary's size.
    implementation: 'xla_token', 'reference' or None to choose.

  Returns:
    A mapping of f32 [N], in nats.

  Raises:
    ValueError: for shapes, dtypes or names that do not fit.
  """
  _check(hidden, unembed, targets, want, implementation)
  inverse = _inverse(temperature, hidden.shape[0])
  if implementation == 'reference':
    found = reference.vocab_stats(
      hidden, unembed, targets, 1.0 / inverse, softcap=softcap, valid=valid
    )
  else:
    options = xla.Options(softcap, valid, layout and layout.vocab, block)
    args = (hidden, unembed, targets, inverse, options, layout)
    found = cast(dict[str, jax.Array], _recomputed(*args))
  return {name: found[name] for name in want}


def token_loss(
  fn: Callable[[dict, dict], tuple[jax.Array, dict]],
  hidden: jax.Array,
  unembed: jax.Array,
  targets: jax.Array,
  weight: jax.Array,
  data: Mapping[str, jax.Array],
  *,
  temperature: jax.Array | float = 1.0,
  softcap: float | None = None,
  valid: int | None = None,
  layout: Layout | None = None,
  block: int | None = None,
) -> xla.Sums:
  """Returns -sum(weight * objective) with its gradients, in one pass.

  For objectives that are separable over tokens the gradients are computed
  beside the value, block by block, and tokens of weight 0 are skipped.

  Args:
    fn: (statistics, data) to (objective f32 [n], mapping of f32 [n] that is
      summed over live tokens); separable over tokens.
    hidden: [N, D].
    unembed: [V, D].
    targets: i32 [N].
    weight: f32 [N]; 0 marks a dead token, whose `data` may be anything.
    data: mapping of f32 [N].
    temperature: scalar or [N], positive.
    softcap: None or c, for logits c * tanh(x / c).
    valid: None or the number of real ids; the rest of V is padding.
    layout: how the arrays are split, or None for one device.
    block: tokens a block, or None to choose by the vocabulary's size.

  Returns:
    `Sums`: loss, aux, d_hidden [N, D], d_unembed [V, D], and the statistics
    f32 [N] of live tokens.
  """
  _check(hidden, unembed, targets, (), None)
  options = xla.Options(softcap, valid, layout and layout.vocab, block)
  run = functools.partial(_token_loss, fn, options=options)
  inverse = _inverse(temperature, hidden.shape[0])
  args = (hidden, unembed, targets, weight, dict(data), inverse)
  if layout is None:
    return run(*args)
  rows, vocab = PartitionSpec(layout.rows), PartitionSpec(layout.vocab)
  none = PartitionSpec()
  out_specs: Any = (none, none, rows, vocab, rows)
  return jax.shard_map(
    functools.partial(run, rows=layout.rows),
    mesh=layout.mesh,
    in_specs=(rows, vocab, rows, rows, rows, rows),
    out_specs=xla.Sums(*out_specs),
    check_vma=False,
  )(*args)


def _token_loss(
  fn, hidden, unembed, targets, weight, data, inverse, *, options, rows=()
):
  sums = xla.loss_and_gradients(
    fn, hidden, unembed, targets, weight, data, inverse, options
  )
  if not rows:
    return sums
  loss, aux, d_unembed = jax.lax.psum(
    (sums.loss, sums.aux, sums.d_unembed), rows
  )
  return sums._replace(loss=loss, aux=aux, d_unembed=d_unembed)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _recomputed(hidden, unembed, targets, inverse, options, layout):
  return _forward(hidden, unembed, targets, inverse, options, layout)


def _forward(hidden, unembed, targets, inverse, options, layout):
  run = functools.partial(xla.forward, options=options)
  if layout is not None:
    rows, vocab = PartitionSpec(layout.rows), PartitionSpec(layout.vocab)
    run = jax.shard_map(
      run,
      mesh=layout.mesh,
      in_specs=(rows, vocab, rows, rows),
      out_specs=rows,
      check_vma=False,
    )
  return run(hidden, unembed, targets, inverse)


def _recomputed_fwd(hidden, unembed, targets, inverse, options, layout):
  out = _forward(hidden, unembed, targets, inverse, options, layout)
  return out, (hidden, unembed, targets, inverse)


def _recomputed_bwd(options, layout, saved, cotangent):
  run: Any = functools.partial(_backward, options=options)
  if layout is not None:
    rows, vocab = PartitionSpec(layout.rows), PartitionSpec(layout.vocab)
    # The rule lies outside shard_map: inside it, cotangents of replicated
    # outputs would arrive divided by the size of the vocabulary axis.
    run = jax.shard_map(
      functools.partial(run, rows=layout.rows),
      mesh=layout.mesh,
      in_specs=(rows, vocab, rows, rows, rows),
      out_specs=(rows, vocab),
      check_vma=False,
    )
  d_hidden, d_unembed = run(*saved, cotangent)
  return d_hidden, d_unembed, None, None


def _backward(
  hidden, unembed, targets, inverse, cotangent, *, options, rows=()
):
  d_hidden, d_unembed = xla.backward(
    hidden, unembed, targets, inverse, cotangent, options
  )
  return d_hidden, jax.lax.psum(d_unembed, rows) if rows else d_unembed


_recomputed.defvjp(_recomputed_fwd, _recomputed_bwd)


def _inverse(temperature, rows: int) -> jax.Array:
  if isinstance(temperature, int | float) and temperature <= 0:
    raise ValueError(f'temperature is {temperature}; it must be positive.')
  inverse = 1.0 / jnp.asarray(temperature, jnp.float32)
  return jnp.broadcast_to(inverse, (rows,))


def _check(hidden, unembed, targets, want, implementation):
  shapes = f'hidden {hidden.shape}, unembed {unembed.shape}'
  if hidden.ndim != 2 or unembed.ndim != 2:
    raise ValueError(f'Need hidden [N, D] and unembed [V, D], got {shapes}.')
  if hidden.shape[1] != unembed.shape[1]:
    raise ValueError(f'Model widths differ: {shapes}; unembed is [V, D].')
  if targets.shape != hidden.shape[:1]:
    raise ValueError(f'targets {targets.shape} must be [N]; {shapes}.')
  if jnp.float16 in (hidden.dtype, unembed.dtype):
    raise ValueError('float16 is not supported; use bfloat16 or float32.')
  unknown = [name for name in want if name not in _WANT]
  if unknown:
    raise ValueError(f'want={unknown} is not among {_WANT}.')
  if implementation not in (None, *_IMPLEMENTATIONS):
    raise ValueError(
      f'implementation={implementation!r} is not among {_IMPLEMENTATIONS}.'
    )
