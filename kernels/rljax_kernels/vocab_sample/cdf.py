"""Inverse CDFs over given masses, in two levels."""

import jax
import jax.numpy as jnp

from rljax_kernels import checks

WIDTH = 128  # ids a sub-block; part of which id a uniform means


def pick(mass: jax.Array, uniform: jax.Array) -> jax.Array:
  """Returns the id at which the running sum of `mass` passes `uniform`.

  Two levels, so that no running sum over the whole vocabulary is formed: sums
  of sub-blocks first, then the one that holds the uniform. It is data: no
  gradient passes.

  Args:
    mass: [N, V], floating; used as float32. Not negative, finite; the scale
      of a row does not matter.
    uniform: f32 [N] in [0, 1). Below 0 counts as 0; 1, more or NaN as the
      largest number below 1.

  Returns:
    i32 [N]; always an id of positive mass, and 0 where a row has none.

  Raises:
    ValueError: for shapes or dtypes that do not fit.
  """
  checks.arrays(mass=mass)
  if mass.ndim != 2 or not mass.shape[1]:
    raise ValueError(f'mass {mass.shape} must be [N, V] with V at least 1.')
  if not jnp.issubdtype(mass.dtype, jnp.floating):
    raise ValueError(f'mass is {mass.dtype}; it must be floating, as float32.')
  uniform = checked(uniform, mass.shape[0])
  mass = jax.lax.stop_gradient(jnp.asarray(mass, jnp.float32))
  blocks = split(mass, 0.0)
  block, share = locate(jnp.sum(blocks, axis=2), uniform)
  inner = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
  index, _ = locate(inner, share)
  return (block * WIDTH + index).astype(jnp.int32)


def checked(uniform: jax.Array, tokens: int) -> jax.Array:
  """Returns uniforms as f32 [N] without a gradient.

  Raises:
    ValueError: for another shape or type; narrow ones hold too few numbers.
  """
  checks.rows(tokens, uniform=uniform)
  if uniform.dtype not in (jnp.float32, jnp.float64):
    raise ValueError(
      f'uniform is {uniform.dtype}; draw it as float32, jax.random.uniform(key,'
      f' ({tokens},)).'
    )
  return jax.lax.stop_gradient(jnp.asarray(uniform, jnp.float32))


def split(x: jax.Array, filler: float) -> jax.Array:
  """Returns x [N, V] as sub-blocks [N, ceil(V / 128), 128]."""
  rows, vocab = x.shape
  blocks = -(-vocab // WIDTH)
  space = ((0, 0), (0, blocks * WIDTH - vocab))
  x = jnp.pad(x, space, constant_values=filler)
  return x.reshape(rows, blocks, WIDTH)


def locate(mass: jax.Array, uniform: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns where the running sum passes `uniform` of the total.

  Args:
    mass: f32 [N, S].
    uniform: f32 [N]; see `pick` for numbers outside of [0, 1).

  Returns:
    i32 [N], an index of positive mass (0 where there is none), and f32 [N],
    how far into its mass the uniform lies, in [0, 1] or NaN as the uniform.
  """
  running = jnp.cumsum(mass, axis=1)
  goal = uniform * running[:, -1]
  index = jnp.arange(mass.shape[1])[None]
  # Rounding may leave the goal at the very end: then the last id with mass.
  last = jnp.max(jnp.where(mass > 0, index, 0), axis=1)
  hit = (running > goal[:, None]) & (mass > 0)
  found = jnp.where(jnp.any(hit, axis=1), jnp.argmax(hit, axis=1), last)
  own = take(mass, found)
  before = jnp.where(found > 0, take(running, jnp.maximum(found - 1, 0)), 0.0)
  share = jnp.clip((goal - before) / own, 0.0, 1.0)
  return found.astype(jnp.int32), share


def take(x: jax.Array, index: jax.Array) -> jax.Array:
  """Returns x[n, index[n]], [N]."""
  return jnp.take_along_axis(x, index[:, None], axis=1)[:, 0]
