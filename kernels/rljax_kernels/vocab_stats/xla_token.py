"""Token blocks in plain XLA: `[block, V]` logits at a time."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rljax_kernels.vocab_stats import algebra, program
from rljax_kernels.vocab_stats.program import Inputs, Plan, Side

# Logits of a block, 28 MiB: the more rows, the better a product of few rows
# uses the CPU (256 against 128 rows of V 32,768: a tenth of the loss), and two
# blocks are the memory that is needed.
_BLOCK_VALUES = 7 << 20
# Ids of the unembedding's cotangent at a time: what is added to stays in the
# cache, an eighth faster than the whole at V 32,768.
_SLICE = 4096


def block_size(plan: Plan, tokens: int, vocab: int) -> int:
  """Returns how many tokens a block holds, two or more."""
  size = plan.block
  if size is None:
    # As many blocks as are needed, of one size.
    count = -(-tokens // max(32, _BLOCK_VALUES // vocab))
    size = -(-tokens // max(1, count))
  # XLA adds up a product of one row in sequence: for a vocabulary of 151,936
  # the gradient in the hidden state was 5e-5 off, of two rows 2e-6.
  return max(2, min(size, tokens))


def _size(plan: Plan, x: Inputs) -> int:
  vocab = program.vocab_size(x.policy.unembed, plan.wide)
  return block_size(plan, x.targets.shape[0], vocab)


def _tile(plan: Plan, x: Inputs):
  vocab = program.vocab_size(x.policy.unembed, plan.wide)
  begin = program.offset(plan, x)
  t = program.tile(plan, x, begin + jnp.arange(vocab)[None])
  # All local ids are here, so that the target's place is known.
  return t._replace(at=x.targets - begin)


def _per_row(x: Inputs) -> Any:
  """Returns the arrays that have a row for each token."""
  q = x.reference
  ref = None if q is None else (q.hidden, q.inverse)
  return (x.policy.hidden, x.policy.inverse), x.targets, ref


def _with_rows(x: Inputs, rows: Any) -> Inputs:
  """Returns the inputs with other rows; see `_per_row`."""
  policy, targets, ref = rows

  def side(old: Side, new) -> Side:
    return Side(new[0], old.unembed, new[1])

  reference = None if x.reference is None else side(x.reference, ref)
  return Inputs(side(x.policy, policy), targets, reference)


def _split(tree: Any, size: int) -> Any:
  """Pads and reshapes each [N, ...] into blocks [ceil(N / size), size, ...].

  Padded rows have inverse temperature 0: uniform, finite, cut off later.
  """

  def blocks(a):
    count = -(-a.shape[0] // size)
    width = [(0, count * size - a.shape[0])] + [(0, 0)] * (a.ndim - 1)
    return jnp.pad(a, width).reshape(count, size, *a.shape[1:])

  return jax.tree.map(blocks, tree)


def _joined(tree: Any, rows: int) -> Any:
  """Undoes `_split`."""
  return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:])[:rows], tree)


def sweep(plan: Plan, x: Inputs, stats: algebra.Columns | None):
  """Returns the moments of all local ids; see `Implementation`."""

  def one(block):
    rows, stats = block
    return program.collect(plan, _tile(plan, _with_rows(x, rows)), stats)

  blocks = _split((_per_row(x), stats), _size(plan, x))
  return _joined(jax.lax.map(one, blocks), x.targets.shape[0])


def pull(plan: Plan, x: Inputs, constants: algebra.Columns):
  """Returns cotangents of hidden and unembed; see `Implementation`."""
  unembed = x.policy.unembed

  def one(total, block):
    rows, constants = block
    part = _with_rows(x, rows)
    dz = program.raw_slopes(plan, _tile(plan, part), constants)
    d_hidden = program.hidden_product(dz, unembed, plan.wide)
    return _plus(total, dz, part.policy.hidden, plan.wide), d_hidden

  blocks = _split((_per_row(x), constants), _size(plan, x))
  zero = program.varying_as(
    jnp.zeros(unembed.shape, jnp.float32), *jax.tree.leaves((x, constants))
  )
  total, d_hidden = jax.lax.scan(one, zero, blocks)
  return _joined(d_hidden, x.targets.shape[0]), total.astype(unembed.dtype)


def _plus(total, dz, hidden, wide: bool):
  """Returns the cotangent of the unembedding with that of more slopes.

  Args:
    total: f32 [V, D], or [D, V] if wide.
    dz: f32 [n, V].
    hidden: [n, D].
    wide: see `total`.
  """
  axis, count = (1 if wide else 0), dz.shape[1] // _SLICE
  if count < 2:
    return total + program.unembed_product(dz, hidden, wide)

  def add(start, size: int, total):
    part = jax.lax.dynamic_slice_in_dim(dz, start, size, 1)
    old = jax.lax.dynamic_slice_in_dim(total, start, size, axis)
    new = old + program.unembed_product(part, hidden, wide)
    return jax.lax.dynamic_update_slice_in_dim(total, new, start, axis)

  def body(number, total):
    return add(number * _SLICE, _SLICE, total)

  total = jax.lax.fori_loop(0, count, body, total)
  rest = dz.shape[1] - count * _SLICE
  return add(count * _SLICE, rest, total) if rest else total


class Sums(NamedTuple):
  """What a token loss adds up over the live tokens of a shard."""

  loss: jax.Array  # f32 [], -sum of weight * objective
  aux: Any  # f32 [] each, sums over live tokens
  d_hidden: jax.Array  # [N, D]
  d_unembed: jax.Array  # as unembed
  stats: dict[str, jax.Array]  # f32 [N] each, 0 at dead tokens


Objective = Callable[[dict, dict], tuple[jax.Array, dict]]


def loss_and_gradients(
  plan: Plan, fn: Objective, x: Inputs, weight, data
) -> Sums:
  """Returns the loss, its gradients and the statistics, in one pass.

  Tokens of weight 0 are never read: live tokens are gathered in front and the
  loop runs over the blocks that hold them.

  Args:
    plan: of the program.
    fn: (statistics, data), each a mapping of f32 [n], to the objective f32
      [n] and a mapping of f32 [n] to be summed over live tokens.
    x: inputs.
    weight: f32 [N].
    data: mapping of f32 [N].
  """
  count, size = weight.shape[0], _size(plan, x)
  order = jnp.argsort(weight == 0, stable=True)
  live = jnp.sum(weight != 0)
  blocks = -(-count // size)
  # Padding reads row 0 and is dropped by the out-of-range scatter.
  order = jnp.pad(order, (0, blocks * size - count), constant_values=count)

  def block(i, carry: Sums) -> Sums:
    at = jax.lax.dynamic_slice(order, (i * size,), (size,))
    alive = i * size + jnp.arange(size) < live

    def take(a):
      return a.at[at].get(mode='clip')

    part = _with_rows(x, _alive(alive, jax.tree.map(take, _per_row(x))))
    one = _loss_block(
      plan, fn, part, jnp.where(alive, take(weight), 0.0), alive,
      jax.tree.map(take, data), carry.d_unembed,
    )  # fmt: skip

    def put(old, new):
      return old.at[at].set(new.astype(old.dtype), mode='drop')

    return Sums(
      carry.loss + one.loss,
      jax.tree.map(jnp.add, carry.aux, one.aux),
      put(carry.d_hidden, one.d_hidden),
      one.d_unembed,
      jax.tree.map(put, carry.stats, one.stats),
    )

  start = _empty(plan, fn, x, data)
  sums = jax.lax.fori_loop(0, -(-live // size), block, start)
  dtype = x.policy.unembed.dtype
  return sums._replace(d_unembed=sums.d_unembed.astype(dtype))


def _alive(alive, rows):
  """Returns rows with zeros in place of dead tokens' hidden states."""

  def cut(side):
    hidden, inverse = side
    return jnp.where(alive[:, None], hidden, 0), inverse

  policy, targets, ref = rows
  return cut(policy), targets, None if ref is None else cut(ref)


def _empty(plan: Plan, fn: Objective, x: Inputs, data) -> Sums:
  count = x.targets.shape[0]
  row = jax.ShapeDtypeStruct((1,), jnp.float32)
  _, aux = jax.eval_shape(
    fn,
    dict.fromkeys(algebra.names(plan.spec), row),
    {k: jax.ShapeDtypeStruct((1,), v.dtype) for k, v in data.items()},
  )
  return Sums(
    jnp.float32(0),
    {k: jnp.float32(0) for k in aux},
    jnp.zeros_like(x.policy.hidden),
    jnp.zeros(x.policy.unembed.shape, jnp.float32),
    dict.fromkeys(algebra.names(plan.spec), jnp.zeros(count, jnp.float32)),
  )


def _loss_block(
  plan: Plan, fn: Objective, x: Inputs, weight, alive, data, total
):
  """Returns the sums of one block; d_hidden and stats are its rows.

  Its d_unembed is added to `total`, as unembed in f32.
  """
  t = _tile(plan, x)
  found = program.statistics(
    plan, x, lambda stats: program.collect(plan, t, stats)
  )
  shown = {k: found[k][:, 0] for k in plan.spec.names}
  objective, pull_back, (stats, aux) = jax.vjp(
    lambda s: objective_of(fn, s, data), shown, has_aux=True
  )
  # Dead rows may hold NaN in `data`: their cotangent is cut, not multiplied.
  (g,) = pull_back(-weight)
  g = {k: jnp.where(alive, v, 0.0)[:, None] for k, v in g.items()}
  c = algebra.constants(plan.spec, found, g)
  dz = program.raw_slopes(plan, t, c)
  d_hidden = program.hidden_product(dz, x.policy.unembed, plan.wide)
  if plan.vocab_axis is not None:
    d_hidden = jax.lax.psum(d_hidden, plan.vocab_axis)

  def kept(a):
    return jnp.where(alive, a, 0.0)

  return Sums(
    -jnp.sum(kept(objective * weight)),
    {k: jnp.sum(kept(v)) for k, v in aux.items()},
    d_hidden,
    _plus(total, dz, x.policy.hidden, plan.wide),
    {k: kept(v) for k, v in stats.items()},
  )


def objective_of(fn: Objective, basic: dict, data):
  """Returns the objective, with all statistics and its sums as aux."""
  stats = algebra.with_derived(basic)
  objective, aux = fn(stats, data)
  return objective, (stats, aux)
