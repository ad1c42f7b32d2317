"""Changes of the reward before credit, and which rows and groups to keep.

Arrays in, arrays out. What is subtracted here is optimized like reward; a
penalty in the loss is another thing, see `divergences`.
"""

from collections.abc import Sequence

import jax.numpy as jnp

from rljax.core import masked
from rljax.core.types import Array, Stop
from rljax.objectives import arguments


def penalize_kl(
  reward: Array, kl: Array, mask: Array, *, coefficient: float | Array
) -> Array:
  """Returns the reward of each token less coefficient · kl.

  With `divergences.k1` its expected gradient is that of reverse_kl.

  Args:
    reward: f32 [B, T]; outside the mask it stays if it is finite, else is 0.
    kl: f32 [B, T], a sampled divergence from the reference.
    mask: f32 [B, T].
    coefficient: nats to reward, not negative.

  Returns:
    f32 [B, T].

  Raises:
    ValueError: if the coefficient is a negative number.

  Reference: Ziegler et al., "Fine-Tuning Language Models from Human
    Preferences", 2019, arXiv:1909.08593.
  """
  arguments.nonnegative(coefficient=coefficient)
  paid = masked.fill(reward, mask.astype(bool) | jnp.isfinite(reward))
  return paid - coefficient * masked.fill(kl, mask)


def penalize_row_kl(
  reward: Array, kl: Array, mask: Array, *, coefficient: float | Array
) -> Array:
  """Returns the reward of each row less coefficient · Σₜ kl (RLOO, TRL).

  Args:
    reward: f32 [B]; missing rewards stay missing.
    kl: f32 [B, T], `divergences.k1` from the reference.
    mask: f32 [B, T].
    coefficient: nats to reward, not negative.

  Returns:
    f32 [B].

  Raises:
    ValueError: if the coefficient is a negative number.
  """
  arguments.nonnegative(coefficient=coefficient)
  return reward - coefficient * masked.sum(kl, mask, 1)


def adapt_coefficient(
  coefficient: float | Array,
  kl: float | Array,
  rows: float | Array,
  *,
  target: float,
  horizon: float = 10_000.0,
  limit: float = 0.2,
) -> Array:
  """Returns the next coefficient of a KL penalty, drawn towards a target.

  c · (1 + clip(kl / target - 1, ± limit) · rows / horizon). The value to carry
  between steps is the coefficient alone; a fixed one is not passed through.

  Args:
    coefficient: f32 [].
    kl: f32 [], measured on this batch; verl takes the mean over rows of the
      mean over tokens, the paper the mean over rows of the sum.
    rows: how many rows the batch had.
    target: nats, in the same unit as `kl`.
    horizon: rows after which the limit would double the coefficient, times
      `limit`.
    limit: of the relative error.

  Returns:
    f32 [].

  Raises:
    ValueError: if target or horizon is not positive.

  Reference: Ziegler et al., "Fine-Tuning Language Models from Human
    Preferences", 2019, arXiv:1909.08593.
  """
  arguments.positive(target=target, horizon=horizon)
  arguments.nonnegative(limit=limit)
  away = jnp.clip(jnp.asarray(kl, jnp.float32) / target - 1.0, -limit, limit)
  share = jnp.asarray(rows, jnp.float32) / horizon
  return jnp.asarray(coefficient, jnp.float32) * (1.0 + away * share)


def overlong(length: Array, *, limit: int, buffer: int) -> Array:
  """Returns the soft overlong punishment, from 0 down to -1.

  0 up to limit - buffer tokens, then linear to -1 at the limit, and -1 past it.
  The paper's equation 13, and TRL's `get_soft_overlong_punishment`.

  Args:
    length: i32 or f32 [B], tokens of each response.
    limit: the longest that is not punished in full.
    buffer: over how many tokens before it the punishment grows.

  Returns:
    f32 [B], to be added to the reward.

  Raises:
    ValueError: unless 0 < buffer <= limit.

  Reference: Yu et al., "DAPO: An Open-Source LLM Reinforcement Learning System
    at Scale", 2025, arXiv:2503.14476.
  """
  return jnp.maximum(overlong_unbounded(length, limit=limit, buffer=buffer), -1)


def overlong_unbounded(
  length: Array, *, limit: int, buffer: int, factor: float = 1.0
) -> Array:
  """Returns `overlong` without its floor: past the limit it keeps falling.

  verl's DAPO reward manager. Responses never pass the limit if it is that of
  sampling, and then the two agree at factor 1.

  Args:
    length: i32 or f32 [B], tokens of each response.
    limit: where the penalty is -factor.
    buffer: over how many tokens before it the penalty grows.
    factor: not negative.

  Returns:
    f32 [B], to be added to the reward.

  Raises:
    ValueError: unless 0 < buffer <= limit and factor is not negative.
  """
  if not 0 < buffer <= limit:
    raise ValueError(
      f'buffer = {buffer}, limit = {limit}: 0 < buffer <= limit.'
    )
  arguments.nonnegative(factor=factor)
  excess = length.astype(jnp.float32) - float(limit - buffer)
  return jnp.minimum(-excess / float(buffer) * factor, 0.0)


def rescale(reward: Array, mask: Array) -> Array:
  """Returns rewards over the standard deviation of the batch's tokens.

  Around their mean, which stays: the reward whitening of PPO in TRL. With less
  than two tokens nothing changes.

  Args:
    reward: f32 [B, T] of the whole batch.
    mask: f32 [B, T].

  Returns:
    f32 [B, T], 0 where the mask is zero.
  """
  mean = masked.mean(reward, mask)
  return masked.whiten(reward, mask) + masked.fill(
    jnp.broadcast_to(mean, mask.shape), mask
  )


def weighted_sum(reward: Array, *, weights: Sequence[float] | Array) -> Array:
  """Returns Σₖ wₖ rₖ over the rewards that are not missing.

  Args:
    reward: f32 [B, R]; what is not finite is missing.
    weights: f32 [R].

  Returns:
    f32 [B]; NaN, a missing reward, where all are missing.

  Raises:
    ValueError: if there is not one weight for each reward.
  """
  each = jnp.asarray(weights, jnp.float32)
  if reward.ndim != 2 or each.shape != reward.shape[1:]:
    raise ValueError(
      f'reward{list(reward.shape)} with weights{list(each.shape)}: stack the'
      ' rewards as [B, R] and give each of the R a weight.'
    )
  there = jnp.isfinite(reward)
  total = masked.fill(reward, there) @ each
  return jnp.where(jnp.any(there, axis=1), total, jnp.nan)


def finished(stop: Array) -> Array:
  """Returns which rows ended by themselves, and not at the token limit.

  As `keep` of `targets`, it takes truncated rows out of the loss and its
  denominator; as `valid` of `groups.apply`, out of the statistics. TRL's
  `mask_truncated_completions` does the first alone.

  Args:
    stop: i32 [B], a `Stop` each.

  Returns:
    bool [B].
  """
  return stop == int(Stop.TOKEN)


def within(length: Array, *, low: int = 1, high: int) -> Array:
  """Returns which responses have between `low` and `high` tokens, inclusive.

  Args:
    length: i32 [B].
    low: fewest tokens.
    high: most tokens.

  Returns:
    bool [B].

  Raises:
    ValueError: if low is above high.
  """
  if low > high:
    raise ValueError(f'low = {low} is above high = {high}: nothing is between.')
  return (length >= low) & (length <= high)


def mixed(reward: Array, valid: Array) -> Array:
  """Returns whether the rewards of a group differ, so that it can teach.

  What dynamic sampling keeps, lifted by `groups.reduce`. verl asks whether
  `np.std` is 0, which rounding can answer otherwise.

  Args:
    reward: f32 [G].
    valid: bool [G].

  Returns:
    bool [].

  Reference: Yu et al., "DAPO: An Open-Source LLM Reinforcement Learning System
    at Scale", 2025, arXiv:2503.14476.
  """
  here = valid.astype(bool) & jnp.isfinite(reward)
  return masked.min(reward, here) < masked.max(reward, here)
