"""Group advantages: functions of the rewards of one group.

Each takes `(reward f32 [G], valid bool [G])`, some also data of the members in
between, and returns f32 [G]; `groups.apply` lifts it to rows. With all rows of
the batch as one group it is the same statistic over the batch. Advantages are
data; no gradient is meant to flow through them.

The rules, here and in `attempts`:
  Missing rewards, those that are not finite, leave the statistics and get 0.
  Incomplete groups take their statistics over the members that are there.
  Groups of equal rewards get exactly 0; they still count in denominators.
  Groups with one valid member get 0, since there is nothing to compare with.
  Empty responses are not valid (`targets.usable`) and get 0.
  Truncated rows count like others; leave them out with `shaping.finished`.
Exceptions are `reinforce`, which has no baseline, `singleton`, and
`attempts.maxrl_every_group`.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from rljax.core import masked
from rljax.core.types import Array
from rljax.objectives import arguments

# Below this, reward differences within a group are taken for rounding. It is
# added to the standard deviation, never to a variance.
EPS = 1e-6


def reinforce(reward: Array, valid: Array) -> Array:
  """Returns the reward itself: no baseline, no scale.

  Args:
    reward: f32 [G].
    valid: bool [G].

  Returns:
    f32 [G]; missing rewards give 0.
  """
  return masked.fill(reward, present(reward, valid))


def center(reward: Array, valid: Array) -> Array:
  """Returns the reward minus the group's mean: Aᵢ = rᵢ - mean(r).

  The baseline holds the row's own reward, so the expected policy gradient is
  (1 - 1/n) times the true one. verl without `norm_adv_by_std`, TRL with
  `scale_rewards='none'`, prime-rl and tinker use it.

  Args:
    reward: f32 [G].
    valid: bool [G].

  Returns:
    f32 [G].

  Reference: Liu et al., "Understanding R1-Zero-Like Training: A Critical
    Perspective" (Dr. GRPO), 2025, arXiv:2503.20783.
  """
  return masked.center(reward, present(reward, valid))


def leave_one_out(reward: Array, valid: Array) -> Array:
  """Returns the reward minus the mean of the others: Aᵢ = rᵢ - mean(r₋ᵢ).

  The expected policy gradient is the true one. A single valid member has no
  others and gets 0; verl's `rloo` returns its raw reward, its `rloo_vectorized`
  returns 0.

  Args:
    reward: f32 [G].
    valid: bool [G].

  Returns:
    f32 [G]; equal to n / (n - 1) times `center`.

  Reference: Ahmadian et al., "Back to Basics: Revisiting REINFORCE Style
    Optimization for Learning from Human Feedback in LLMs" (RLOO), 2024,
    arXiv:2402.14740.
  """
  here = present(reward, valid)
  n = masked.count(here)
  return masked.center(reward, here) * n / jnp.maximum(n - 1.0, 1.0)


def leave_one_out_zscore(
  reward: Array, valid: Array, *, ddof: int = 1, eps: float = EPS
) -> Array:
  """Returns (rᵢ - mean(r₋ᵢ)) / (std(r₋ᵢ) + eps); unscaled where the std is 0.

  NeMo-RL's default for GRPO. Its one-pass variance is 2.6e-8 where the others
  are equal, which makes a distance of 0.35 an advantage of -2154; here it takes
  two passes over each set of others, [G, G].

  Args:
    reward: f32 [G].
    valid: bool [G].
    ddof: of the others' standard deviation; 1 needs three valid members.
    eps: added to the standard deviation.

  Returns:
    f32 [G].
  """
  _check(ddof, eps)
  here = present(reward, valid)
  size = reward.shape[0]
  others = here[None, :] & ~jnp.eye(size, dtype=bool)
  each = jnp.broadcast_to(reward[None, :], (size, size))
  scale = masked.std(each, others, 1, ddof=ddof)
  return leave_one_out(reward, valid) / jnp.where(scale > 0.0, scale + eps, 1.0)


def zscore(
  reward: Array, valid: Array, *, ddof: int, eps: float = EPS
) -> Array:
  """Returns the standardized reward: Aᵢ = (rᵢ - mean(r)) / (std(r) + eps).

  On all rows of the batch, with group advantages in the place of rewards, it is
  the normalization of TRL's RLOO and the last step of GDPO.

  Args:
    reward: f32 [G].
    valid: bool [G].
    ddof: 0 for the standard deviation of these rewards, 1 for the square root
      of the unbiased variance of the policy's reward.
    eps: added to the standard deviation.

  Returns:
    f32 [G].

  Raises:
    ValueError: if `ddof` is neither 0 nor 1.
  """
  return scale(center(reward, valid), reward, valid, ddof=ddof, eps=eps)


def grpo(reward: Array, valid: Array) -> Array:
  """Returns the z-score of GRPO with the unbiased variance and eps = 1e-6.

  The group is a sample of the policy's rewards, and the scale that is wanted
  is that of the policy; hence ddof = 1. verl, SkyRL, slime and ROLL use the
  same two values; TRL has eps = 1e-4, OpenRLHF 1e-9, open-instruct ddof = 0
  with 1e-8. For a group of one verl returns the raw reward; here it is 0.

  Args:
    reward: f32 [G].
    valid: bool [G].

  Returns:
    f32 [G].

  Reference: Shao et al., "DeepSeekMath: Pushing the Limits of Mathematical
    Reasoning in Open Language Models", 2024, arXiv:2402.03300.
  """
  return zscore(reward, valid, ddof=1)


def opo(reward: Array, length: Array, valid: Array) -> Array:
  """Returns the reward minus its mean weighted by length: rᵢ - Σ lⱼ rⱼ / Σ lⱼ.

  The baseline of least variance if the squared norm of a row's gradient grows
  with its length. If all lengths are equal it is `center`.

  Args:
    reward: f32 [G].
    length: f32 [G], sampled tokens of each member.
    valid: bool [G].

  Returns:
    f32 [G].

  Reference: Hao et al., "On-Policy RL with Optimal Reward Baseline", 2025,
    arXiv:2505.23585.
  """
  here = present(reward, valid)
  # Differences, so that equal rewards give exactly 0.
  away = masked.center(reward, here)
  weight = masked.fill(length, here & jnp.isfinite(length))
  total = jnp.sum(weight)
  mean = jnp.sum(weight * away) / jnp.where(total > 0.0, total, 1.0)
  return masked.fill(away - mean, here)


def gdpo(
  reward: Array,
  valid: Array,
  *,
  weights: Sequence[float] | Array,
  ddof: int = 1,
  eps: float = EPS,
) -> Array:
  """Returns the weighted sum of z-scores of several rewards: Σₖ wₖ zscore(rₖ).

  The first half of GDPO; the second normalizes over the batch: `zscore` of all
  rows in TRL (`normalize_then_sum`) and the paper, `credit.whiten` of all
  tokens in verl. A reward that is missing leaves its column alone.

  Args:
    reward: f32 [G, R].
    valid: bool [G].
    weights: f32 [R].
    ddof: of each standard deviation.
    eps: added to each standard deviation.

  Returns:
    f32 [G]; with one reward and weight 1, its `zscore`.

  Reference: Liu et al., "GDPO: Group reward-Decoupled Normalization Policy
    Optimization for Multi-reward RL Optimization", 2026, arXiv:2601.05242.
  """
  each = jnp.asarray(weights, jnp.float32)
  if reward.ndim != 2 or each.shape != reward.shape[1:]:
    raise ValueError(
      f'reward{list(reward.shape)} is not one group [G, R] for weights'
      f'{list(each.shape)}: stack the rewards on the last axis, give each a'
      ' weight, and lift with groups.apply.'
    )

  def column(one: Array) -> Array:
    return zscore(one, valid, ddof=ddof, eps=eps)

  return jax.vmap(column, 1, 1)(reward) @ each


def singleton(reward: Array, valid: Array) -> Array:
  """Returns the reward of a group's only valid member, and 0 in other groups.

  verl and SkyRL give a group of one its raw reward, without a baseline; add
  this to an advantage to do the same.

  Args:
    reward: f32 [G].
    valid: bool [G].

  Returns:
    f32 [G].
  """
  here = present(reward, valid)
  return masked.fill(reward, here & (masked.count(here) == 1.0))


def scale(
  adv: Array, reward: Array, valid: Array, *, ddof: int, eps: float = EPS
) -> Array:
  """Returns `adv` over the standard deviation of the rewards plus eps.

  On a group it turns `center` into `zscore`. On all rows of the batch, with
  centered advantages, it is TRL's `scale_rewards='batch'`.

  Args:
    adv: f32 [G].
    reward: f32 [G].
    valid: bool [G].
    ddof: of the standard deviation.
    eps: added to it.

  Returns:
    f32 [G]; `adv` itself if all rewards are equal.

  Raises:
    ValueError: if `ddof` is neither 0 nor 1.
  """
  _check(ddof, eps)
  here = present(reward, valid)
  spread = masked.std(reward, here, ddof=ddof)
  return masked.fill(adv, here) / jnp.where(spread > 0.0, spread + eps, 1.0)


def gpg(adv: Array, signal: Array, valid: Array) -> Array:
  """Returns `adv` times n over the number of rows with a signal.

  A mean over the batch's n rows becomes one over the rows that teach. In the
  paper these are the rows of groups with unequal rewards: give the centered
  advantages twice, over the whole batch. verl counts rewards that are not 0.

  Args:
    adv: f32 [B].
    signal: f32 [B], which rows count: those where it is not 0.
    valid: bool [B].

  Returns:
    f32 [B]; 0 if no row has a signal and no advantage.

  Reference: Chu et al., "GPG: A Simple and Strong Reinforcement Learning
    Baseline for Model Reasoning", 2025, arXiv:2504.02546.
  """
  here = present(signal, valid)
  active = masked.count(here & (signal != 0.0))
  factor = masked.count(here) / jnp.maximum(active, 1.0)
  return masked.fill(adv, here) * factor


def present(reward: Array, valid: Array) -> Array:
  """Returns which members have a reward that counts, bool [G].

  Args:
    reward: f32 [G].
    valid: bool [G].

  Raises:
    ValueError: if `reward` is not one group.
  """
  if reward.ndim != 1:
    # On [P, G] a mean over all would mix prompts without a word.
    raise ValueError(
      f'reward{list(reward.shape)} is not one group [G]: lift with'
      ' groups.apply, or with jax.vmap.'
    )
  return valid.astype(bool) & jnp.isfinite(reward)


def _check(ddof: int, eps: float) -> None:
  """Raises ValueError for a ddof or eps that leaves a scale undefined."""
  arguments.nonnegative(eps=eps)
  if ddof not in (0, 1):
    raise ValueError(f'ddof={ddof}: use 0, or 1 for the unbiased variance.')
