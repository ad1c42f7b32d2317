"""Exact sampling from a softmax by inverse CDF, one uniform a row."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Drawn(NamedTuple):
  """A sampled id and what is known about it; everything [N]."""

  token: jax.Array  # i32
  logp: jax.Array  # f32, under the distribution it was drawn from
  logp_full: jax.Array  # f32, without truncation
  kept: jax.Array  # f32, probability mass that truncation kept


def vocab_sample(
  logits: jax.Array,
  uniform: jax.Array | None,
  *,
  forced: jax.Array | None = None,
  top_k: int = 0,
  top_p: float = 1.0,
  min_p: float = 0.0,
) -> Drawn:
  """Returns one id a row, drawn from softmax(logits) after truncation.

  Args:
    logits: f32 [N, V], already divided by the temperature.
    uniform: f32 [N] in [0, 1); None takes the most likely id.
    forced: i32 [N], ids to take instead of drawing; -1 where free. Their
      `logp` is that of the untruncated distribution.
    top_k: keep the k largest; 0 keeps all. Ties with the k-th stay.
    top_p: keep the smallest set of largest probabilities that reaches this
      mass; 1 keeps all.
    min_p: keep probabilities of at least this share of the largest.
  """
  top = jnp.max(logits, axis=1, keepdims=True)
  mass = jnp.exp(logits - top)
  total = jnp.sum(mass, axis=1)
  kept, kept_total = mass, total
  if top_k or top_p < 1.0 or min_p > 0.0:
    kept = jnp.where(_keep(mass, total, top_k, top_p, min_p), mass, 0.0)
    kept_total = jnp.sum(kept, axis=1)
  if uniform is None:
    token = jnp.argmax(logits, axis=1).astype(jnp.int32)
  else:
    token = pick(kept, uniform)
  drawn_total = kept_total
  if forced is not None:
    token = jnp.where(forced >= 0, forced, token)
    drawn_total = jnp.where(forced >= 0, total, kept_total)
  chosen = _at(logits, token) - top[:, 0]
  return Drawn(
    token,
    chosen - jnp.log(drawn_total),
    chosen - jnp.log(total),
    kept_total / total,
  )


def _keep(mass, total, top_k, top_p, min_p):
  """Returns which ids stay, bool [N, V]."""
  floor = jnp.full(mass.shape[:1], min_p)  # the largest mass is 1
  if top_k or top_p < 1.0:
    ordered = -jnp.sort(-mass, axis=1)
    if top_k:
      floor = jnp.maximum(floor, ordered[:, min(top_k, mass.shape[1]) - 1])
    if top_p < 1.0:
      before = jnp.cumsum(ordered, axis=1) - ordered
      inside = before < top_p * total[:, None]
      last = jnp.min(jnp.where(inside, ordered, jnp.inf), axis=1)
      floor = jnp.maximum(floor, last)
  return mass >= floor[:, None]


def pick(mass: jax.Array, uniform: jax.Array) -> jax.Array:
  """Returns the id at which the running sum of `mass` passes `uniform`.

  Two levels, so that no running sum over the whole vocabulary is formed: sums
  of blocks first, then the one block that holds the uniform.

  Args:
    mass: f32 [N, V], non-negative, not all zero in a row.
    uniform: f32 [N] in [0, 1).

  Returns:
    i32 [N]; always an id of positive mass.
  """
  rows, vocab = mass.shape
  width = 1 << ((vocab.bit_length() + 1) // 2)
  blocks = -(-vocab // width)
  padded = jnp.pad(mass, ((0, 0), (0, blocks * width - vocab)))
  padded = padded.reshape(rows, blocks, width)
  sums = jnp.sum(padded, axis=2)
  running = jnp.cumsum(sums, axis=1)
  goal = uniform * running[:, -1]
  block = _first(running, sums, goal)
  before = jnp.where(block > 0, _at(running, jnp.maximum(block - 1, 0)), 0.0)
  inner = jnp.take_along_axis(padded, block[:, None, None], axis=1)[:, 0]
  index = _first(jnp.cumsum(inner, axis=1), inner, goal - before)
  return (block * width + index).astype(jnp.int32)


def _at(x, index):
  return jnp.take_along_axis(x, index[:, None], axis=1)[:, 0]


def _first(running, mass, goal):
  """Returns the first index where `running` exceeds `goal` with mass > 0."""
  index = jnp.arange(mass.shape[1])[None]
  # Rounding may leave the goal at the very end: then the last id with mass.
  last = jnp.max(jnp.where(mass > 0, index, 0), axis=1)
  hit = (running > goal[:, None]) & (mass > 0)
  first = jnp.argmax(hit, axis=1)
  return jnp.where(jnp.any(hit, axis=1), first, last)
