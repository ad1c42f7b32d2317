"""Where sampled tokens stand among those of the environment.

A token with mask 0 inside a response was written by the environment. These
functions move values [B, T] between rows as they are and rows without such
tokens, without a loop; if there are none, they change nothing at a token.
"""

import jax
import jax.numpy as jnp

from rljax.core import masked
from rljax.core.types import Array


def pack(x: Array, mask: Array) -> Array:
  """Returns the values of sampled tokens, moved to the front of their rows.

  Args:
    x: f32 [B, T].
    mask: f32 [B, T].

  Returns:
    f32 [B, T]; place i of a row holds its i-th sampled token, 0 past the last.
  """
  rows, size = x.shape
  start = jnp.arange(rows, dtype=jnp.int32)[:, None] * size
  # One flat index: a scatter for each row would hold twice as many. What the
  # environment wrote points past the end and is dropped.
  target = jnp.where(mask.astype(bool), start + _place(mask), rows * size)
  flat = jnp.zeros(rows * size, jnp.float32)
  flat = flat.at[target.reshape(-1)].set(
    masked.fill(x, mask).reshape(-1), mode='drop'
  )
  return flat.reshape(rows, size)


def unpack(x: Array, mask: Array) -> Array:
  """Returns the inverse of `pack`: values back at the sampled tokens.

  Args:
    x: f32 [B, T], place i of a row belongs to its i-th sampled token.
    mask: f32 [B, T].

  Returns:
    f32 [B, T], 0 where the mask is zero.
  """
  place = jnp.maximum(_place(mask), 0)
  return masked.fill(jnp.take_along_axis(x, place, axis=1), mask)


def carry(x: Array, mask: Array) -> Array:
  """Returns each token's value, and before it that of the next sampled token.

  A return, advantage or value does not change while the environment writes.

  Args:
    x: f32 [B, T].
    mask: f32 [B, T].

  Returns:
    f32 [B, T]; 0 past the last sampled token.
  """
  size = x.shape[1]
  place = jnp.arange(size, dtype=jnp.int32)[None, :]
  place = jnp.where(mask.astype(bool), place, size)
  following = jax.lax.cummin(place, axis=1, reverse=True)
  found = following < size
  values = masked.fill(x, mask)
  near = jnp.take_along_axis(values, jnp.where(found, following, 0), axis=1)
  return masked.fill(near, found)


def _place(mask: Array) -> Array:
  """Returns how many sampled tokens stand before each, i32 [B, T]."""
  return jnp.cumsum(mask.astype(bool).astype(jnp.int32), axis=1) - 1
