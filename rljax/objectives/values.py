"""Losses of a critic, per token.

Each takes the critic's output and its targets, [B, T], and the mask, and
returns f32 [B, T], 0 where the mask is zero; the loss is Σ loss · weight with a
weight from `weights`. Targets are data: `credit.lambda_return`, or the reward
of the row.
"""

import jax
import jax.numpy as jnp

from rljax.core import masked
from rljax.core.types import Array
from rljax.objectives import arguments


def squared(value: Array, target: Array, mask: Array) -> Array:
  """Returns ½ (V - R)².

  Args:
    value: f32 [B, T].
    target: f32 [B, T].
    mask: f32 [B, T].

  Returns:
    f32 [B, T].
  """
  return 0.5 * _square(value, target, mask)


def clipped(
  value: Array, old_value: Array, target: Array, mask: Array, *, clip: float
) -> Array:
  """Returns ½ max((V - R)², (clip(V, V_old ± clip) - R)²), the loss of PPO.

  A value that went past the range, and towards the target, has no gradient.
  PPO's code has clip = 0.2, verl 0.5; without limit it is `squared`.

  Args:
    value: f32 [B, T].
    old_value: f32 [B, T], before the first update on these rows.
    target: f32 [B, T].
    mask: f32 [B, T].
    clip: how far a value may move, in units of reward; not negative.

  Returns:
    f32 [B, T].

  Reference: Schulman et al., "Proximal Policy Optimization Algorithms", 2017,
    arXiv:1707.06347, for the algorithm; the clipped value is its code's.
  """
  near = _near(value, old_value, mask, clip)
  far = _square(value, target, mask)
  return 0.5 * jnp.maximum(far, _square(near, target, mask))


def clipping(
  value: Array, old_value: Array, target: Array, mask: Array, *, clip: float
) -> Array:
  """Returns 1 where the clipped term of `clipped` is the larger one.

  Its mean over tokens is verl's `vf_clipfrac`.

  Args:
    value: f32 [B, T].
    old_value: f32 [B, T].
    target: f32 [B, T].
    mask: f32 [B, T].
    clip: as for `clipped`.

  Returns:
    f32 [B, T], without gradient.
  """
  near = _square(_near(value, old_value, mask, clip), target, mask)
  return (near > _square(value, target, mask)).astype(jnp.float32)


def cross_entropy(logit: Array, target: Array, mask: Array) -> Array:
  """Returns -R log σ(x) - (1 - R) log(1 - σ(x)), for rewards in [0, 1].

  The critic's value is σ(x), the chance of success from here.

  Args:
    logit: f32 [B, T], x.
    target: f32 [B, T], R, in [0, 1].
    mask: f32 [B, T].

  Returns:
    f32 [B, T]; least where σ(x) = R.
  """
  x, target = masked.fill(logit, mask), masked.fill(target, mask)
  return masked.fill(jax.nn.softplus(x) - target * x, mask)


def _near(value: Array, old_value: Array, mask: Array, clip: float) -> Array:
  """Returns the value within `clip` of the old one, f32 [B, T]."""
  arguments.nonnegative(clip=clip)
  old = masked.fill(old_value, mask)
  return jnp.clip(masked.fill(value, mask), old - clip, old + clip)


def _square(value: Array, target: Array, mask: Array) -> Array:
  """Returns (V - R)², 0 where the mask is zero."""
  return jnp.square(masked.fill(value, mask) - masked.fill(target, mask))
