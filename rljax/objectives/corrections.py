"""Corrections for tokens that another policy drew: weights, masks, gates.

The trainer's *old* policy and the *behavior* policy that sampled differ, by
numerics, by staleness or by a replay buffer. A correction has two independent
parts, and each function here is one choice of one part:

  level   the log-ratio of old to behavior, from `ratios`: per token (`token`),
          of the row (`sequence_sum`, unbiased), its geometric mean per token
          (`sequence`)
  use     a weight on the objective (`truncate`, `discard`, `icepop`, with
          `normalize_tokens` or `normalize_rows`), a smaller mask (`keep_ratio`,
          `keep_below`, `drop_outlier_rows`), or a gate of rows
          (`off_policy_rows`)

  weight = corrections.truncate(ratios.sequence_sum(old, behavior, mask), mask)

Nothing here has a gradient, and nothing here may see the current policy in
place of the old one: the change since credit time is the business of the
surrogate's ratio. (Without a separate old policy, as in verl's bypass mode, the
weight compares current with behavior and the objective is advantage · logp.)

Whether rejected tokens stay in the denominator is the caller's choice: give the
smaller mask to the aggregation and they leave it (verl), multiply the finished
weights by it and they stay (TRL).
"""

import jax
import jax.numpy as jnp

from rljax.core import masked
from rljax.core.types import Array
from rljax.objectives import arguments


def truncate(
  log_ratio: Array,
  mask: Array,
  *,
  cap: float | Array = 2.0,
  floor: float | Array = 0.0,
) -> Array:
  """Returns min(ρ, cap), the truncated importance weight (TIS).

  verl has cap 2, TRL 3, SkyRL 2 per token and 5 per row; OpenRLHF clamps to
  [0.5, 5].

  Args:
    log_ratio: f32 [B, T], old over behavior; ρ is its exponential.
    mask: f32 [B, T].
    cap: the largest weight.
    floor: the smallest weight of a sampled token.

  Returns:
    f32 [B, T], 0 where the mask is zero; ρ itself for a large cap.

  Raises:
    ValueError: unless 0 <= floor <= cap and cap > 0.

  Reference: Yao et al., "Your Efficient RL Framework Secretly Brings You
    Off-Policy RL Training", 2025; Ionides, "Truncated Importance Sampling",
    2008.
  """
  _check_band('floor', floor, 'cap', cap)
  ratio = _ratio(log_ratio, mask)
  return _data(jnp.clip(ratio, floor, cap), mask)


def discard(
  log_ratio: Array, mask: Array, *, cap: float | Array = 3.0
) -> Array:
  """Returns ρ up to `cap` and 0 above it: masked importance weights (MIS).

  TRL's `token_mask` and `sequence_mask`, the latter its default, with cap 3.

  Args:
    log_ratio: f32 [B, T], old over behavior.
    mask: f32 [B, T].
    cap: the largest weight.

  Returns:
    f32 [B, T]; equal to `icepop` with low = 0.

  Raises:
    ValueError: unless cap > 0.

  Reference: Liu et al., "When Speed Kills Stability: Demystifying RL Collapse
    from the Training-Inference Mismatch", 2025.
  """
  return icepop(log_ratio, mask, low=0.0, high=cap)


def icepop(
  log_ratio: Array,
  mask: Array,
  *,
  low: float | Array = 0.5,
  high: float | Array = 5.0,
) -> Array:
  """Returns ρ within [low, high] and 0 outside (IcePop).

  The paper's is per token; verl applies the same band to rows as well.

  Args:
    log_ratio: f32 [B, T], old over behavior.
    mask: f32 [B, T].
    low: the smallest ratio that is kept.
    high: the largest.

  Returns:
    f32 [B, T]; all 0 if every ratio is outside, where verl divides by zero.

  Raises:
    ValueError: unless 0 <= low <= high and high > 0.

  Reference: Ling Team, "Every Step Evolves: Scaling Reinforcement Learning
    for Trillion-Scale Thinking Model", 2025, arXiv:2510.18855.
  """
  kept = keep_ratio(log_ratio, mask, low=low, high=high)
  return _data(_ratio(log_ratio, mask), kept)


def normalize_tokens(weight: Array, mask: Array) -> Array:
  """Returns the weights over their mean over tokens, so that it becomes 1.

  Takes out the part of a correction that is a change of learning rate. It is
  made after truncation, so a weight may exceed the cap. Call it on the whole
  batch.

  Args:
    weight: f32 [B, T], not negative.
    mask: f32 [B, T].

  Returns:
    f32 [B, T]; all 0 if all weights are.
  """
  return _over(weight, mask, masked.mean(weight, mask))


def normalize_rows(weight: Array, mask: Array) -> Array:
  """Returns the weights over the mean over rows of their mean in a row.

  For weights of whole rows: long rows count no more than short ones. Rows
  without tokens are not counted. Call it on the whole batch.

  Args:
    weight: f32 [B, T], not negative.
    mask: f32 [B, T].

  Returns:
    f32 [B, T]; all 0 if all weights are.
  """
  row = masked.mean(weight, mask, 1)
  return _over(weight, mask, masked.mean(row, masked.count(mask, 1)))


def keep_ratio(
  log_ratio: Array,
  mask: Array,
  *,
  low: float | Array = 0.5,
  high: float | Array = 2.0,
) -> Array:
  """Returns the mask without tokens whose ρ is outside [low, high].

  With `ratios.sequence_sum` or `ratios.sequence` whole rows are kept or not:
  SkyRL's product mask, [0.5, 2], and geometric mask, [0.99, 1.01]. verl's
  `*_k1` tests bound 1 / ρ by the numbers that its documentation calls bounds of
  ρ; give low = 1 / high and high = 1 / low for its behavior.

  Args:
    log_ratio: f32 [B, T], old over behavior.
    mask: f32 [B, T].
    low: the smallest ratio that is kept.
    high: the largest.

  Returns:
    f32 [B, T] in {0, 1}.

  Raises:
    ValueError: unless 0 <= low <= high and high > 0.
  """
  _check_band('low', low, 'high', high)
  ratio = _ratio(log_ratio, mask)
  return _data((ratio >= low) & (ratio <= high), mask)


def keep_below(statistic: Array, mask: Array, *, limit: float | Array) -> Array:
  """Returns the mask without tokens whose statistic exceeds `limit`.

  The rejection tests of verl are `divergences.k2` or `k3` of (behavior, old),
  which estimate KL(behavior ‖ old), per token or through `sequence_sum`,
  `sequence_mean` or `sequence_max`. Several tests compose: give the mask that
  one returns to the aggregation after multiplying it with that of the other.

  Args:
    statistic: f32 [B, T].
    mask: f32 [B, T].
    limit: the largest value that is kept.

  Returns:
    f32 [B, T] in {0, 1}; a statistic that is NaN is not kept.
  """
  return _data(masked.fill(statistic, mask) <= limit, mask)


def drop_outlier_rows(
  log_ratio: Array,
  mask: Array,
  *,
  low: float | Array = 1e-4,
  high: float | Array = 100.0,
) -> Array:
  """Returns the mask without rows that hold one token outside [low, high].

  One token that the old policy holds for impossible spoils what follows it.
  The bounds are SkyRL's.

  Args:
    log_ratio: f32 [B, T] of each token, old over behavior.
    mask: f32 [B, T].
    low: the smallest ratio of a token that is kept.
    high: the largest.

  Returns:
    f32 [B, T] in {0, 1}.

  Raises:
    ValueError: unless 0 <= low <= high and high > 0.
  """
  kept = keep_ratio(log_ratio, mask, low=low, high=high)
  lost = masked.count(mask, 1) - masked.count(kept, 1)
  return _data(jnp.broadcast_to(lost[:, None] == 0.0, mask.shape), mask)


def off_policy_rows(
  log_ratio: Array, adv: Array, mask: Array, *, limit: float
) -> Array:
  """Returns which rows are good, or have drifted little (OPSM).

  Keeps a row if its advantage is not negative or the mean of
  log π_behavior - log π over its tokens is at most `limit`: pushing down what
  the policy no longer says destabilizes, pulling up does not. Apply it to
  finished weights with `weights.keep_rows`; dropped rows then stay in the
  denominator, as in the paper and in TRL.

  Args:
    log_ratio: f32 [B, T], the current policy over behavior, per token.
    adv: f32 [B], the advantage of the row.
    mask: f32 [B, T].
    limit: nats per token.

  Returns:
    bool [B]; True for rows without tokens.

  Raises:
    ValueError: if `adv` is not [B].

  Reference: DeepSeek-AI, "DeepSeek-V3.2: Pushing the Frontier of Open Large
    Language Models", 2025, arXiv:2512.02556.
  """
  if adv.shape != mask.shape[:1]:
    raise ValueError(
      f'adv{list(adv.shape)} is not one per row of mask{list(mask.shape)};'
      ' give the advantages [B], before they are spread over tokens'
    )
  drift = masked.mean(-jax.lax.stop_gradient(log_ratio), mask, 1)
  return (adv >= 0.0) | (drift <= limit)


def sequence_sum(statistic: Array, mask: Array) -> Array:
  """Returns the sum over a row at each of its tokens, f32 [B, T]."""
  return _spread(masked.sum(statistic, mask, 1, keepdims=True), mask)


def sequence_mean(statistic: Array, mask: Array) -> Array:
  """Returns the mean over a row at each of its tokens, f32 [B, T]."""
  return _spread(masked.mean(statistic, mask, 1, keepdims=True), mask)


def sequence_max(statistic: Array, mask: Array) -> Array:
  """Returns the maximum over a row at each of its tokens, f32 [B, T]."""
  return _spread(masked.max(statistic, mask, 1, keepdims=True), mask)


def fill_unscored(behavior_logp: Array, old_logp: Array) -> Array:
  """Returns the behavior log-prob, and the old one where it is not finite.

  Samplers return NaN or nothing for tokens that they could not score. Their
  ratio becomes exactly 1, no correction, as in TRL.

  Args:
    behavior_logp: f32 [B, T], may hold NaN or infinity.
    old_logp: f32 [B, T].

  Returns:
    f32 [B, T], without gradient.
  """
  scored = jnp.isfinite(behavior_logp)
  return jax.lax.stop_gradient(jnp.where(scored, behavior_logp, old_logp))


def _ratio(log_ratio: Array, mask: Array) -> Array:
  """Returns exp(log_ratio), 1 where the mask is zero, f32 [B, T]."""
  return jnp.exp(masked.fill(log_ratio, mask))


def _data(x: Array, mask: Array) -> Array:
  """Returns `x` without gradient, 0 where the mask is zero, f32 [B, T]."""
  return jax.lax.stop_gradient(masked.fill(x, mask))


def _spread(row: Array, mask: Array) -> Array:
  """Returns [B, 1] at each token of the row, without gradient, f32 [B, T]."""
  return _data(jnp.broadcast_to(row, mask.shape), mask)


def _over(weight: Array, mask: Array, mean: Array) -> Array:
  """Returns `weight` over a positive `mean`; a mean of 0 has only zeros."""
  scale = jax.lax.stop_gradient(jnp.where(mean > 0.0, mean, 1.0))
  return _data(weight, mask) / scale


def _check_band(
  low_name: str, low: float | Array, high_name: str, high: float | Array
) -> None:
  """Raises ValueError for an empty band of ratios; schedules pass."""
  if not (arguments.is_known(low) and arguments.is_known(high)):
    return
  if not 0.0 <= low <= high or high <= 0.0:
    raise ValueError(
      f'{low_name}={low}, {high_name}={high}: a band of ratios needs'
      f' 0 <= {low_name} <= {high_name}; 1 is on-policy'
    )
