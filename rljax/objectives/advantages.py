"""Group advantages: functions of the rewards of one group.

Each takes `(reward f32 [G], valid bool [G])` and returns f32 [G];
`groups.apply` lifts it to rows. A reward that is not finite is missing: its
row leaves the statistics and gets 0. Advantages are data; no gradient is
meant to flow through them.

Rules for small groups: a group of equal rewards gets exactly 0, and so does a
group with one valid member, except under `reinforce`, which has no baseline.
"""

import jax.numpy as jnp

from rljax.core import masked
from rljax.core.types import Array

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
  return masked.fill(reward, _present(reward, valid))


def center(reward: Array, valid: Array) -> Array:
  """Returns the reward minus the group's mean: Aᵢ = rᵢ - mean(r).

  The baseline holds the row's own reward, so the expected policy gradient is
  (1 - 1/n) times the true one.

  Args:
    reward: f32 [G].
    valid: bool [G].

  Returns:
    f32 [G].

  Reference: Liu et al., "Understanding R1-Zero-Like Training: A Critical
    Perspective" (Dr. GRPO), 2025, arXiv:2503.20783.
  """
  return masked.center(reward, _present(reward, valid))


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
  present = _present(reward, valid)
  n = masked.count(present)
  return masked.center(reward, present) * n / jnp.maximum(n - 1.0, 1.0)


def zscore(
  reward: Array, valid: Array, *, ddof: int, eps: float = EPS
) -> Array:
  """Returns the standardized reward: Aᵢ = (rᵢ - mean(r)) / (std(r) + eps).

  Args:
    reward: f32 [G].
    valid: bool [G].
    ddof: 0 for the standard deviation of these rewards, 1 for the square root
      of the unbiased variance of the policy's reward.
    eps: added to the standard deviation.

  Returns:
    f32 [G].
  """
  present = _present(reward, valid)
  scale = masked.std(reward, present, 0, keepdims=True, ddof=ddof)
  # Equal rewards are centered to exactly 0, and stay so with eps = 0.
  scale = jnp.where(scale > 0.0, scale + eps, 1.0)
  return masked.center(reward, present, 0) / scale


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


def _present(reward: Array, valid: Array) -> Array:
  """Returns which members have a reward that counts, bool [G]."""
  if reward.ndim != 1:
    # On [P, G] a mean over all would mix prompts without a word.
    raise ValueError(
      f'reward{list(reward.shape)} is not one group [G]: lift with'
      ' groups.apply, or with jax.vmap.'
    )
  return valid.astype(bool) & jnp.isfinite(reward)
