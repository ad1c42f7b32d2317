"""Token blocks in plain XLA: `[block, V]` logits at a time, never `[N, V]`.

Every function here sees one shard: local rows and, when `vocab_axis` names a
mesh axis, a local slice of the vocabulary.
"""

from collections.abc import Callable
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

# A block's logits should stay near the last-level cache: 4M float32 values
# (16 MiB) was the fastest of 1M to 32M on CPU at V 2,048 and 32,768.
_BLOCK_VALUES = 1 << 22


@dataclasses.dataclass(frozen=True)
class Options:
  """What is fixed when a program is traced."""

  softcap: float | None = None
  valid: int | None = None
  vocab_axis: str | None = None
  block: int | None = None


class _Block(NamedTuple):
  z: jax.Array  # [n, v], scaled logits
  slope: jax.Array | float  # d z / d raw logit, [n, v] or [n, 1]
  exp: jax.Array  # [n, v], exp(z - max)
  top: jax.Array  # [n], max over the whole vocabulary
  total: jax.Array  # [n], sum of exp over the whole vocabulary
  local: jax.Array  # [n], target id inside this shard, clipped
  here: jax.Array | None  # bool [n], whether this shard owns the target


def block_size(tokens: int, vocab: int, options: Options) -> int:
  """Returns how many tokens a block holds."""
  if options.block is not None:
    return min(options.block, tokens)
  size = 1 << max(5, (_BLOCK_VALUES // vocab).bit_length() - 1)
  return min(size, tokens)


def _sum(x, options):
  axis = options.vocab_axis
  return x if axis is None else jax.lax.psum(x, axis)


def _logits(hidden, unembed, inverse, options):
  """Returns scaled logits and their slope in the raw logits."""
  z = jnp.einsum(
    'nd,vd->nv', hidden, unembed, preferred_element_type=jnp.float32
  )
  inverse = inverse[:, None]
  slope = inverse
  if options.softcap is not None:
    bent = jnp.tanh(z / options.softcap)
    z, slope = options.softcap * bent, inverse * (1.0 - bent * bent)
  z = z * inverse
  if options.valid is not None:
    z = jnp.where(_ids(z, options)[None] < options.valid, z, -jnp.inf)
  return z, slope


def _ids(z, options):
  offset = 0
  if options.vocab_axis is not None:
    offset = jax.lax.axis_index(options.vocab_axis) * z.shape[1]
  return offset + jnp.arange(z.shape[1])


def _block(hidden, unembed, targets, inverse, options):
  z, slope = _logits(hidden, unembed, inverse, options)
  top = jnp.max(z, axis=1)
  local, here = targets, None
  if options.vocab_axis is not None:
    top = jax.lax.pmax(top, options.vocab_axis)
    local = targets - _ids(z, options)[0]
    here = (local >= 0) & (local < z.shape[1])
  local = jnp.clip(local, 0, z.shape[1] - 1)
  exp = jnp.exp(z - top[:, None])
  return _Block(z, slope, exp, top, _sum(exp.sum(1), options), local, here)


def _statistics(b: _Block, options: Options):
  chosen = jnp.take_along_axis(b.z, b.local[:, None], axis=1)[:, 0]
  if b.here is not None:
    chosen = _sum(jnp.where(b.here, chosen, 0.0), options)
  shifted = jnp.where(b.exp > 0, b.z - b.top[:, None], 0.0)
  spread = _sum((b.exp * shifted).sum(1), options)
  log_total = jnp.log(b.total)
  lse = b.top + log_total
  # No cancellation of large numbers: both terms are at most log V.
  entropy = log_total - spread / b.total
  return {'logp': chosen - lse, 'lse': lse, 'entropy': entropy}


def _raw_cotangent(b: _Block, entropy, cotangent):
  """Returns d/d raw logit [n, v] of statistics with these cotangents [n]."""
  p = b.exp / b.total[:, None]
  mean = cotangent['lse'] - cotangent['logp']
  if 'entropy' in cotangent:
    g = cotangent['entropy']
    log_p = jnp.where(b.exp > 0, b.z - (b.top + jnp.log(b.total))[:, None], 0.0)
    dz = p * ((mean - g * entropy)[:, None] - g[:, None] * log_p)
  else:
    dz = p * mean[:, None]
  own = cotangent['logp']
  if b.here is not None:
    own = jnp.where(b.here, own, 0.0)
  dz = dz.at[jnp.arange(dz.shape[0]), b.local].add(own)
  # Not where exp is 0: an unlikely target underflows and has a gradient.
  return jnp.where(b.z > -jnp.inf, dz * b.slope, 0.0)


def _pad(x, size):
  return jnp.pad(x, [(0, size - x.shape[0])] + [(0, 0)] * (x.ndim - 1))


def _split(arrays, size):
  """Pads and reshapes each [N, ...] into blocks [ceil(N / size), size, ...]."""
  total = arrays[0].shape[0]
  blocks = -(-total // size)
  return tuple(
    _pad(x, blocks * size).reshape(blocks, size, *x.shape[1:]) for x in arrays
  )


def forward(hidden, unembed, targets, inverse, options: Options):
  """Returns the statistics of all tokens, each f32 [N]."""
  size = block_size(hidden.shape[0], unembed.shape[0], options)

  def one(rows):
    h, t, i = rows
    return _statistics(_block(h, unembed, t, i, options), options)

  # Padded rows have inverse temperature 0: uniform, finite, cut off below.
  blocks = _split((hidden, targets, inverse), size)
  out = jax.lax.map(one, blocks)
  return {k: v.reshape(-1)[: hidden.shape[0]] for k, v in out.items()}


def backward(hidden, unembed, targets, inverse, cotangent, options: Options):
  """Returns cotangents of hidden [N, D] and unembed [V, D], recomputing."""
  size = block_size(hidden.shape[0], unembed.shape[0], options)

  def one(total, rows):
    h, t, i, g = rows
    b = _block(h, unembed, t, i, options)
    dz = _raw_cotangent(b, _statistics(b, options)['entropy'], g)
    return total + _outer(dz, h), _sum(_inner(dz, unembed), options)

  zero = jnp.zeros(unembed.shape, jnp.float32)
  names = sorted(cotangent)
  blocks = _split(
    (hidden, targets, inverse, *(cotangent[k] for k in names)), size
  )
  rows = (*blocks[:3], dict(zip(names, blocks[3:], strict=True)))
  d_unembed, d_hidden = jax.lax.scan(one, zero, rows)
  d_hidden = d_hidden.reshape(-1, hidden.shape[1])[: hidden.shape[0]]
  return d_hidden.astype(hidden.dtype), d_unembed.astype(unembed.dtype)


def _inner(dz, unembed):
  dz = dz.astype(unembed.dtype)
  return jnp.einsum(
    'nv,vd->nd', dz, unembed, preferred_element_type=jnp.float32
  )


def _outer(dz, hidden):
  dz = dz.astype(hidden.dtype)
  return jnp.einsum('nv,nd->vd', dz, hidden, preferred_element_type=jnp.float32)


class Sums(NamedTuple):
  """What `loss_and_gradients` adds up over the live tokens of a shard."""

  loss: jax.Array  # f32 [], -sum of weight * objective
  aux: Any  # f32 [] each, sums over live tokens
  d_hidden: jax.Array  # [N, D]
  d_unembed: jax.Array  # [V, D]
  stats: dict[str, jax.Array]  # f32 [N] each, 0 at dead tokens


def loss_and_gradients(
  fn: Callable[[dict, dict], tuple[jax.Array, dict]],
  hidden,
  unembed,
  targets,
  weight,
  data,
  inverse,
  options: Options,
) -> Sums:
  """Returns the loss, its gradients and the statistics, in one pass.

  Tokens of weight 0 are never read: live tokens are gathered in front and the
  loop runs over the blocks that hold them.

  Args:
    fn: (statistics, data), each a mapping of f32 [n], to the objective f32
      [n] and a mapping of f32 [n] to be summed over live tokens.
    hidden: [N, D].
    unembed: [V, D].
    targets: i32 [N].
    weight: f32 [N].
    data: mapping of f32 [N].
    inverse: f32 [N], 1 / temperature.
    options: shapes and axes.
  """
  count = hidden.shape[0]
  size = block_size(count, unembed.shape[0], options)
  order = jnp.argsort(weight == 0, stable=True)
  live = jnp.sum(weight != 0)
  blocks = -(-count // size)
  # Padding reads row 0 and is dropped by the out-of-range scatter.
  order = jnp.pad(order, (0, blocks * size - count), constant_values=count)

  def block(i, carry):
    at = jax.lax.dynamic_slice(order, (i * size,), (size,))
    alive = (i * size + jnp.arange(size) < live).astype(jnp.float32)

    def take(x):
      return x.at[at].get(mode='clip')

    one = _loss_block(
        fn, jnp.where(alive[:, None] > 0, take(hidden), 0), unembed,
        take(targets), take(weight) * alive, alive,
        jax.tree.map(take, data), take(inverse), options,
    )  # fmt: skip
    loss, aux, d_hidden, d_unembed, stats = one

    def put(x, y):
      return x.at[at].set(y.astype(x.dtype), mode='drop')

    return Sums(
      carry.loss + loss,
      jax.tree.map(jnp.add, carry.aux, aux),
      put(carry.d_hidden, d_hidden),
      carry.d_unembed + d_unembed,
      jax.tree.map(put, carry.stats, stats),
    )

  start = _empty(fn, hidden, unembed, data)
  sums = jax.lax.fori_loop(0, -(-live // size), block, start)
  return sums._replace(d_unembed=sums.d_unembed.astype(unembed.dtype))


def _empty(fn, hidden, unembed, data) -> Sums:
  row = jax.ShapeDtypeStruct((1,), jnp.float32)
  stats = {k: row for k in ('logp', 'lse', 'entropy')}
  _, aux = jax.eval_shape(fn, stats, {k: row for k in data})
  per_row = jnp.zeros(hidden.shape[0], jnp.float32)
  return Sums(
    jnp.float32(0),
    {k: jnp.float32(0) for k in aux},
    jnp.zeros_like(hidden),
    jnp.zeros(unembed.shape, jnp.float32),
    {k: per_row for k in stats},
  )


def _loss_block(
  fn, hidden, unembed, targets, weight, alive, data, inverse, options
):
  b = _block(hidden, unembed, targets, inverse, options)
  stats = _statistics(b, options)
  objective, pull, aux = jax.vjp(lambda s: fn(s, data), stats, has_aux=True)
  # Dead rows may hold NaN in `data`: their cotangent is cut, not multiplied.
  (cotangent,) = pull(-weight)
  cotangent = {k: jnp.where(alive > 0, v, 0.0) for k, v in cotangent.items()}
  dz = _raw_cotangent(b, stats['entropy'], cotangent)

  def kept(x):
    return jnp.where(alive > 0, x, 0.0)

  return (
    -jnp.sum(kept(objective * weight)),
    {k: jnp.sum(kept(v)) for k, v in aux.items()},
    _sum(_inner(dz, unembed), options),
    _outer(dz, hidden),
    {k: kept(v) for k, v in stats.items()},
  )
