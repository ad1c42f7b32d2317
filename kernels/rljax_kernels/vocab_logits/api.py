"""Logits of a few ids a row: the largest ones, or given ones."""

import functools
import numbers
from typing import Any

import jax
import jax.numpy as jnp

from rljax_kernels import checks, logits
from rljax_kernels.layout import Layout

# Logits a block: few, large products, and far from all of them.
_BLOCK_LOGITS = 1 << 20


def vocab_topk(
  hidden: jax.Array,
  unembed: jax.Array,
  k: int,
  *,
  temperature: jax.Array | float = 1.0,
  softcap: float | None = None,
  valid: int | None = None,
  layout: Layout | None = None,
  block: int | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Returns the k likeliest ids of each row, without all logits.

  Logits of a block of ids at a time: about 2^20 of them, but 256 ids at least.
  It is data: no gradient passes; pass the ids to `gather_logits` for one.

  Args:
    hidden: [N, D], float32 or bfloat16; N may be 0.
    unembed: [V, D] or [D, V]; a square one is [V, D].
    k: an integer from 1 to the number of real ids.
    temperature: scalar or [N], positive; divides the logits.
    softcap: None or c, for logits c * tanh(x / c).
    valid: None or the number of real ids; the rest of V is padding.
    layout: how the arrays are split, or None for one device.
    block: ids a block, or None to choose.

  Returns:
    Ids i32 [N, k], the likeliest first and the smaller id first among equal
    ones, and their log-probs f32 [N, k] under the whole softmax.

  Raises:
    ValueError: for shapes, dtypes or values that do not fit.
  """
  form = logits.make_form(hidden, unembed, softcap, valid, layout)
  real = valid or form.width(unembed)
  if not isinstance(k, numbers.Integral) or not 0 < k <= real:
    raise ValueError(f'k={k} must be an integer in [1, {real}].')
  checks.positive(block=block)
  inverse = logits.inverse_of(temperature, hidden.shape[0])
  run = functools.partial(_topk, k=k, form=form, block=block)
  if layout is not None:
    rows, vocab = logits.specs(layout, form)
    run = layout.spread(run, (rows, vocab, rows), rows)
  hidden, unembed = jnp.asarray(hidden), jnp.asarray(unembed)
  return run(*jax.lax.stop_gradient((hidden, unembed)), inverse)


def _topk(hidden, unembed, inverse, *, k, form, block):
  value, index, top, total = _scan(hidden, unembed, inverse, k, form, block)
  index = index + form.offset(unembed)
  if form.axis is not None:
    whole = jax.lax.pmax(top, form.axis)
    total = jax.lax.psum(total * jnp.exp((top - whole) * inverse), form.axis)
    top = whole
    # In the order of the shards, so that among equal ones the smaller id wins.
    value, index = (
      jax.lax.all_gather(x, form.axis, axis=1, tiled=True)
      for x in (value, index)
    )
    value, index = _largest(value, index, k)
  logp = (value - top[:, None]) * inverse[:, None] - jnp.log(total)[:, None]
  return index, logp


def _scan(hidden, unembed, inverse, k, form, block):
  """Returns this shard's largest logits, their ids, and its softmax sums."""
  count, vocab = hidden.shape[0], form.width(unembed)
  width = min(block or max(_BLOCK_LOGITS // max(count, 1), 256), vocab)

  def body(i, carry):
    value, index, top, total = carry
    # The last block lies over the one before it, and counts only the rest.
    start = jnp.minimum(i * width, vocab - width)
    ids = start + jnp.arange(width)[None]
    z = logits.of_range(hidden, unembed, start, width, form)
    z = jnp.where(ids >= i * width, z, -jnp.inf)
    new = jnp.maximum(top, jnp.max(z, axis=1))
    mass = jnp.sum(jnp.exp((z - new[:, None]) * inverse[:, None]), axis=1)
    total = total * jnp.exp((top - new) * inverse) + mass
    best, place = jax.lax.top_k(z, min(k, width))
    value = jnp.concatenate([value, best], axis=1)
    index = jnp.concatenate([index, start + place], axis=1)
    return *_largest(value, index, k), new, total

  row = jnp.full(count, logits.LOW)
  empty = jnp.full((count, k), -jnp.inf), jnp.zeros((count, k), jnp.int32)
  carry = (*empty, row, jnp.zeros_like(row))
  return jax.lax.fori_loop(0, -(-vocab // width), body, carry)


def _largest(value, index, k):
  value, place = jax.lax.top_k(value, k)
  return value, jnp.take_along_axis(index, place, axis=1)


def gather_logits(
  hidden: jax.Array,
  unembed: jax.Array,
  ids: jax.Array,
  *,
  temperature: jax.Array | float = 1.0,
  softcap: float | None = None,
  valid: int | None = None,
  layout: Layout | None = None,
) -> jax.Array:
  """Returns the logits of given ids, f32 [N, K].

  Differentiable in `hidden` and `unembed`, in reverse mode; no gradient reaches
  the temperature. Cotangents are added up in float32, those of ids that come
  twice too, and rounded to the type of their array at the end. An id outside
  the vocabulary, or a banned one, has the logit -inf; whatever its cotangent
  is, it has no gradient, and nothing is read for it.

  What is formed: the rows of one id of each token at a time, [N, D], never
  [N, K, D]. The backward pass adds up in f32 [N, D] and, as large as the
  unembedding, f32 [V, D].

  Args:
    hidden: [N, D], float32 or bfloat16; N may be 0.
    unembed: [V, D] or [D, V]; a square one is [V, D].
    ids: integers [N, K]; K may be 0.
    temperature: scalar or [N], positive; divides the logits.
    softcap: None or c, for logits c * tanh(x / c).
    valid: None or the number of real ids; the rest of V is banned.
    layout: how the arrays are split, or None for one device.

  Raises:
    ValueError: for shapes, dtypes or values that do not fit.
  """
  form = logits.make_form(hidden, unembed, softcap, valid, layout)
  checks.arrays(ids=ids)
  if ids.ndim != 2 or ids.shape[0] != hidden.shape[0]:
    raise ValueError(f'ids {ids.shape} must be [N, K]; hidden {hidden.shape}.')
  ids = checks.ids(ids=ids)
  inverse = logits.inverse_of(temperature, hidden.shape[0])
  hidden, unembed = jnp.asarray(hidden), jnp.asarray(unembed)
  return _gathered(hidden, unembed, ids, inverse, form, layout)


# The rule lies outside shard_map: inside it, cotangents of replicated outputs
# would arrive divided by the size of the vocabulary axis.
@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _gathered(hidden, unembed, ids, inverse, form, layout):
  run = functools.partial(_local_logits, form=form)
  if layout is not None:
    rows, vocab = logits.specs(layout, form)
    run = layout.spread(run, (rows, vocab, rows, rows), rows)
  return run(hidden, unembed, ids, inverse)


def _gathered_fwd(hidden, unembed, ids, inverse, form, layout):
  out = _gathered(hidden, unembed, ids, inverse, form, layout)
  return out, (hidden, unembed, ids, inverse)


def _gathered_bwd(form, layout, saved, cotangent):
  split = layout.rows if layout else ()
  run: Any = functools.partial(_local_cotangents, form=form, split=split)
  if layout is not None:
    rows, vocab = logits.specs(layout, form)
    run = layout.spread(run, (rows, vocab, rows, rows, rows), (rows, vocab))
  return *run(*saved, cotangent), None, None


_gathered.defvjp(_gathered_fwd, _gathered_bwd)


def _local_ids(ids, unembed, form: logits.Form):
  """Returns ids inside this shard, clipped, and which of them are its own."""
  local, width = ids - form.offset(unembed), form.width(unembed)
  here = (ids >= 0) & (local >= 0) & (local < width)
  if form.valid is not None:
    here &= ids < form.valid
  return jnp.clip(local, 0, width - 1), here


def _local_logits(hidden, unembed, ids, inverse, *, form):
  """Returns the logits [N, K] of ids of all shards."""
  local, here = _local_ids(ids, unembed, form)
  z = jax.lax.map(lambda i: logits.of_ids(hidden, unembed, i, form), local.T).T
  z = jnp.where(here, z * inverse[:, None], -jnp.inf)
  return z if form.axis is None else jax.lax.pmax(z, form.axis)


def _local_cotangents(hidden, unembed, ids, inverse, cotangent, *, form, split):
  """Returns the cotangents of hidden [N, D] and of this shard's unembedding."""
  local, here = _local_ids(ids, unembed, form)
  dz = jnp.where(here, cotangent * inverse[:, None], 0.0)
  axis = 1 if form.columns else 0

  def body(carry, column):
    d_hidden, d_unembed = carry
    at, g = column
    if form.softcap is not None:
      z = logits.of_ids(hidden, unembed, at, form) / form.softcap
      g = jnp.where(g == 0, 0.0, g * (1.0 - z * z))
    rows = jnp.take(unembed, at, axis=axis)
    rows = rows.T if form.columns else rows
    new = g[:, None] * hidden.astype(jnp.float32)
    place = (slice(None), at) if form.columns else at
    d_unembed = d_unembed.at[place].add(new.T if form.columns else new)
    # Padding of the unembedding may be anything.
    rows = jnp.where(g[:, None] == 0, 0.0, g[:, None] * rows)
    return (d_hidden + rows, d_unembed), None

  zero = tuple(jnp.zeros(x.shape, jnp.float32) for x in (hidden, unembed))
  (d_hidden, d_unembed), _ = jax.lax.scan(body, zero, (local.T, dz.T))
  if form.axis is not None:
    d_hidden = jax.lax.psum(d_hidden, form.axis)
  if split:
    d_unembed = jax.lax.psum(d_unembed, split)
  return d_hidden.astype(hidden.dtype), d_unembed.astype(unembed.dtype)
