"""Group advantages of other aims than the mean reward.

The best of several attempts (pass@k) and the log of the success rate (maximum
likelihood). Signature and rules are those of `advantages`.
"""

import jax.numpy as jnp

from rljax.core import masked
from rljax.core.types import Array
from rljax.objectives import advantages


def best_margin(reward: Array, valid: Array) -> Array:
  """Returns, for the best member alone, its lead over the second best.

  The best of the group less the best of the others: the policy gradient of
  E[max of n], with a leave-one-out baseline. Ties for the first place give 0.
  verl's `grpo_passk` without `norm_adv_by_std`; for a group of one it raises.

  Args:
    reward: f32 [G].
    valid: bool [G].

  Returns:
    f32 [G], nowhere negative.

  Reference: Tang et al., "Optimizing Language Models for Inference Time
    Objectives using Reinforcement Learning", 2025, arXiv:2503.19595.
  """
  here = advantages.present(reward, valid)
  place = jnp.arange(reward.shape[0], dtype=jnp.int32)
  first = here & (place == jnp.argmax(masked.fill(reward, here, -jnp.inf)))
  lead = masked.max(reward, first) - masked.max(reward, here & ~first)
  lead = jnp.where(masked.count(here) > 1.0, lead, 0.0)
  return masked.fill(jnp.broadcast_to(lead, reward.shape), first)


def best_margin_zscore(
  reward: Array,
  valid: Array,
  *,
  ddof: int = 1,
  eps: float = advantages.EPS,
) -> Array:
  """Returns `best_margin` over the group's standard deviation plus eps.

  The default of verl's `grpo_passk`; the division is verl's, not the paper's.

  Args:
    reward: f32 [G].
    valid: bool [G].
    ddof: of the standard deviation.
    eps: added to it.

  Returns:
    f32 [G].
  """
  lead = best_margin(reward, valid)
  return advantages.scale(lead, reward, valid, ddof=ddof, eps=eps)


def best_of_k(
  reward: Array, valid: Array, *, k: int, eps: float = 0.0
) -> Array:
  """Returns how much a member raises the best of k, over its deviation.

  Over all sets S of k of the n members, with M the best reward in S:
  Aᵢ = (E[M | i in S] - E[M]) / (std(M) + eps). With rewards 0 and 1 it is the
  paper's analytic pass@k; other rewards are ours. k = 1 is `zscore` with ddof
  0. Groups of fewer than k members, or of k, get 0: all sets are alike.

  Args:
    reward: f32 [G].
    valid: bool [G].
    k: attempts, from 1 to G.
    eps: added to the standard deviation.

  Returns:
    f32 [G] that sums to 0.

  Raises:
    ValueError: unless 1 <= k <= G.

  Reference: Chen et al., "Pass@k Training for Adaptively Balancing Exploration
    and Exploitation of Large Reasoning Models", 2025, arXiv:2508.10751.
  """
  here = advantages.present(reward, valid)
  size = reward.shape[0]
  if not 1 <= k <= size:
    raise ValueError(
      f'k = {k} attempts of a group of {size}: 1 <= k <= {size}.'
    )
  away = masked.center(reward, here)
  # The absent come first; `rank` counts the present members below.
  order = jnp.argsort(masked.fill(reward, here, -jnp.inf))
  n = masked.count(here)
  rank = jnp.arange(size, dtype=jnp.float32) - (size - n)
  value = away[order]
  # Chances that the member of a rank is the best of a set that holds it, and
  # that it is the best of a set that holds a given one below.
  own = jnp.where(rank < 0.0, 0.0, _choose(rank, n - 1.0, k - 1))
  above = _choose(rank - 1.0, n - 2.0, k - 2) * (k - 1) / jnp.maximum(n - 1, 1)
  after = jnp.cumsum((value * above)[::-1])[::-1] - value * above
  mean = k / jnp.maximum(n, 1.0) * jnp.sum(own * value)
  square = k / jnp.maximum(n, 1.0) * jnp.sum(own * jnp.square(value - mean))
  spread = jnp.sqrt(square)
  gain = jnp.zeros_like(value).at[order].set(own * value + after - mean)
  gain = gain / jnp.where(spread > 0.0, spread + eps, 1.0)
  return masked.fill(gain, here & (n > k) & (spread > 0.0))


def maxrl(reward: Array, valid: Array) -> Array:
  """Returns the reward's distance from the mean, over the mean: rᵢ / mean - 1.

  For rewards 0 and 1 and n members, the expected gradient is
  (1 - (1 - p)ⁿ⁻¹) ∇ log p: that of maximum likelihood up to a factor that goes
  to 1. Groups without success get 0. TRL's, SkyRL's and prime-rl's MaxRL.

  Args:
    reward: f32 [G], not negative.
    valid: bool [G].

  Returns:
    f32 [G]; 0 where the mean is not positive.

  Reference: Tajwar et al., "Maximum Likelihood Reinforcement Learning", 2026,
    arXiv:2602.02710.
  """
  here = advantages.present(reward, valid)
  mean = masked.mean(reward, here)
  share = masked.center(reward, here) / jnp.where(mean > 0.0, mean, 1.0)
  return masked.fill(share, here & (mean > 0.0))


def maxrl_every_group(reward: Array, valid: Array) -> Array:
  """Returns rᵢ / mean - 1, and -1 in groups without success.

  The mean of ∇ log π over successes, less its mean over all members as a
  control variate, which has expectation 0 only if it is there in every group.
  The expected gradient is (1 - (1 - p)ⁿ) ∇ log p, with the n of the paper's
  estimator where `maxrl` has n - 1.

  Args:
    reward: f32 [G], not negative.
    valid: bool [G].

  Returns:
    f32 [G]; equal to `maxrl` if there is a success. One member alone gets 0
    for a success and -1 for a failure.

  Reference: Tajwar et al., "Maximum Likelihood Reinforcement Learning", 2026,
    arXiv:2602.02710.
  """
  here = advantages.present(reward, valid)
  none = masked.mean(reward, here) <= 0.0
  failed = masked.fill(-jnp.ones_like(reward), here & none)
  return maxrl(reward, valid) + failed


def _choose(count: Array, total: Array, k: int) -> Array:
  """Returns C(count, k) / C(total, k), f32 [G]; 0 if k is negative."""
  if k < 0:
    return jnp.zeros_like(count)
  drawn = jnp.arange(k, dtype=jnp.float32)
  top = jnp.maximum(count[:, None] - drawn[None, :], 0.0)
  return jnp.prod(top / jnp.maximum(total - drawn, 1.0)[None, :], axis=1)
