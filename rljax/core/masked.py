"""Reductions over the positions where a mask is not zero.

Every function takes `(x, mask)` of equal shape, an `axis` that is an integer
or None for all axes, and computes in float32. An empty mask gives 0. NaN and
infinity at masked positions change neither the value nor the gradient: the
mask is applied to the input, because a gradient of zero times an infinite
derivative is NaN when only the output is masked.
"""

import jax
import jax.numpy as jnp

from rljax.core.types import Array


def fill(x: Array, mask: Array, value: float = 0.0) -> Array:
  """Returns `x` in float32 with `value` where `mask` is zero.

  Args:
    x: [...], any numeric type; may hold NaN where the mask is zero.
    mask: [...], the same shape; zero or False means absent.
    value: what absent positions hold; no gradient flows from there.

  Raises:
    ValueError: if the shapes differ.
  """
  if x.shape != mask.shape:
    raise ValueError(f'x has shape {x.shape}, its mask has {mask.shape}')
  return jnp.where(mask.astype(bool), x.astype(jnp.float32), value)


def count(
  mask: Array, axis: int | None = None, keepdims: bool = False
) -> Array:
  """Returns how many positions of `mask` [...] are not zero, f32."""
  present = mask.astype(bool).astype(jnp.float32)
  return jnp.sum(present, axis=axis, keepdims=keepdims)


def sum(
  x: Array, mask: Array, axis: int | None = None, keepdims: bool = False
) -> Array:
  """Returns the sum of `x` [...] where `mask` [...] is not zero."""
  return jnp.sum(fill(x, mask), axis=axis, keepdims=keepdims)


def mean(
  x: Array, mask: Array, axis: int | None = None, keepdims: bool = False
) -> Array:
  """Returns the mean of `x` [...] where `mask` [...] is not zero."""
  total = sum(x, mask, axis, keepdims)
  return total / jnp.maximum(count(mask, axis, keepdims), 1.0)


def center(x: Array, mask: Array, axis: int | None = None) -> Array:
  """Returns `x` minus its masked mean, and 0 where `mask` is zero.

  Equal values give exactly 0: they are shifted by their maximum first, because
  the rounded mean of three times 0.1 is not 0.1 in float32.

  Args:
    x: [...].
    mask: [...].
    axis: the axis of the mean, None for all.

  Returns:
    f32 [...].
  """
  shift = jax.lax.stop_gradient(max(x, mask, axis, keepdims=True))
  shifted = fill(x, mask) - shift
  return fill(shifted - mean(shifted, mask, axis, keepdims=True), mask)


def variance(
  x: Array,
  mask: Array,
  axis: int | None = None,
  keepdims: bool = False,
  *,
  ddof: int = 0,
) -> Array:
  """Returns the variance of `x` where `mask` is not zero.

  It takes two passes; E[x²] - E[x]² cancels in float32. Equal values give
  exactly 0, and so do `ddof` or fewer values.

  Args:
    x: [...].
    mask: [...].
    axis: the axis to reduce, None for all.
    keepdims: whether reduced axes stay, with size 1.
    ddof: subtracted from the count; 1 gives the unbiased variance.
  """
  free = count(mask, axis, keepdims) - float(ddof)
  squares = jnp.square(center(x, mask, axis))
  total = jnp.sum(squares, axis=axis, keepdims=keepdims)
  return jnp.where(free > 0.0, total, 0.0) / jnp.maximum(free, 1.0)


def std(
  x: Array,
  mask: Array,
  axis: int | None = None,
  keepdims: bool = False,
  *,
  ddof: int = 0,
) -> Array:
  """Returns the standard deviation of `x`, the root of its `variance`.

  Where it is 0, so is its gradient.

  Args:
    x: [...].
    mask: [...].
    axis: the axis to reduce, None for all.
    keepdims: whether reduced axes stay, with size 1.
    ddof: subtracted from the count; 1 gives the unbiased variance.
  """
  spread = variance(x, mask, axis, keepdims, ddof=ddof)
  positive = spread > 0.0
  root = jnp.sqrt(jnp.where(positive, spread, 1.0))
  return jnp.where(positive, root, 0.0)


def whiten(
  x: Array,
  mask: Array,
  axis: int | None = None,
  *,
  ddof: int = 1,
  eps: float = 1e-8,
) -> Array:
  """Returns (x - mean) / sqrt(variance + eps), and 0 where `mask` is zero.

  Equal values, one value alone among them, give exactly 0. verl and TRL's PPO
  use these defaults; verl raises for fewer than two values.

  Args:
    x: [...].
    mask: [...].
    axis: the axis of the statistics, None for all.
    ddof: subtracted from the count in the variance.
    eps: added to the variance.

  Returns:
    f32 [...].
  """
  spread = variance(x, mask, axis, keepdims=True, ddof=ddof) + eps
  root = jnp.sqrt(jnp.where(spread > 0.0, spread, 1.0))
  return center(x, mask, axis) / root


def max(
  x: Array, mask: Array, axis: int | None = None, keepdims: bool = False
) -> Array:
  """Returns the maximum of `x` [...] where `mask` [...] is not zero."""
  highest = jnp.max(fill(x, mask, -jnp.inf), axis=axis, keepdims=keepdims)
  return jnp.where(count(mask, axis, keepdims) > 0.0, highest, 0.0)


def min(
  x: Array, mask: Array, axis: int | None = None, keepdims: bool = False
) -> Array:
  """Returns the minimum of `x` [...] where `mask` [...] is not zero."""
  lowest = jnp.min(fill(x, mask, jnp.inf), axis=axis, keepdims=keepdims)
  return jnp.where(count(mask, axis, keepdims) > 0.0, lowest, 0.0)


def softmax(x: Array, mask: Array, axis: int | None = None) -> Array:
  """Returns softmax weights over the positions where `mask` is not zero.

  Args:
    x: [...].
    mask: [...].
    axis: the axis along which the weights sum to 1, None for all.

  Returns:
    f32 [...], 0 where the mask is zero; all 0 for an empty mask.
  """
  highest = jax.lax.stop_gradient(max(x, mask, axis, keepdims=True))
  power = fill(jnp.exp(fill(x, mask) - highest), mask)
  total = jnp.sum(power, axis=axis, keepdims=True)
  return power / jnp.where(total > 0.0, total, 1.0)


def rank(x: Array, mask: Array, axis: int | None = None) -> Array:
  """Returns ranks from 0 (smallest) among the present; ties share their mean.

  Compares all pairs, so memory grows with the square of the axis. The
  gradient is zero.

  Args:
    x: [...].
    mask: [...].
    axis: the axis along which to rank, None for all.

  Returns:
    f32 [...], 0 where the mask is zero.
  """
  if axis is None:
    return rank(x.reshape(-1), mask.reshape(-1), 0).reshape(x.shape)
  value = jnp.moveaxis(fill(x, mask), axis, -1)
  present = jnp.moveaxis(mask.astype(bool), axis, -1)
  mine, other = value[..., :, None], value[..., None, :]
  others = jnp.broadcast_to(
    present[..., None, :], (*value.shape, value.shape[-1])
  )
  below = count((other < mine) & others, -1)
  tied = count((other == mine) & others, -1)
  ranks = below + 0.5 * (tied - 1.0)
  return jnp.moveaxis(fill(ranks, present), -1, axis)


def quantile(
  x: Array, mask: Array, q: float | Array, axis: int | None = None
) -> Array:
  """Returns the `q`-quantile of `x`, linear between neighbors.

  Args:
    x: [...].
    mask: [...].
    q: one quantile in [0, 1]; values outside are clamped.
    axis: the axis to reduce, None for all.
  """
  if axis is None:
    return quantile(x.reshape(-1), mask.reshape(-1), q, 0)
  # Absent positions hold the maximum: they sort last and stay finite.
  highest = jax.lax.stop_gradient(max(x, mask, axis, keepdims=True))
  value = jnp.where(mask.astype(bool), fill(x, mask), highest)
  value = jnp.sort(value, axis=axis)
  last = jnp.maximum(count(mask, axis, keepdims=True) - 1.0, 0.0)
  place = jnp.clip(q, 0.0, 1.0) * last
  low, high = jnp.floor(place), jnp.ceil(place)
  lower = jnp.take_along_axis(value, low.astype(jnp.int32), axis=axis)
  upper = jnp.take_along_axis(value, high.astype(jnp.int32), axis=axis)
  between = lower + (place - low) * (upper - lower)
  return jnp.squeeze(between, axis=axis)
