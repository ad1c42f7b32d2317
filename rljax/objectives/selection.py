"""Which tokens, rows and groups learn: masks and keep rules.

A rule of a group is `(reward f32 [G], valid bool [G]) -> bool []`, lifted with
`groups.reduce`; a rule of a row returns bool [B], for `weights.keep_rows`; a
rule of a token returns a mask f32 [B, T]. A mask that goes into an aggregation
shrinks its denominator; multiplied with the finished weights it does not.
Nothing here has a gradient.
"""

import jax
import jax.numpy as jnp

from rljax.core import masked
from rljax.core.types import Array
from rljax.objectives import arguments

# OpenRLHF's distance from the bounds of a mean.
ROUNDING = 1e-6


def top_entropy(
  entropy: Array, mask: Array, *, share: float | Array = 0.2
) -> Array:
  """Returns the mask of the tokens with the highest entropy.

  Those at or above the (1 - share)-quantile of the batch's tokens, which is
  linear between neighbors; equal entropies are kept together, so more than
  `share` may be. TRL's `top_entropy_quantile` is `share`, and TRL leaves the
  others in the denominator.

  Args:
    entropy: f32 [B, T], nats, of the whole batch.
    mask: f32 [B, T].
    share: of the tokens to keep, in [0, 1]; 1 keeps all.

  Returns:
    f32 [B, T] in {0, 1}.

  Raises:
    ValueError: if `share` is outside [0, 1].

  Reference: Wang et al., "Beyond the 80/20 Rule: High-Entropy Minority Tokens
    Drive Effective Reinforcement Learning for LLM Reasoning", 2025,
    arXiv:2506.01939.
  """
  arguments.shares(share=share)
  entropy = jax.lax.stop_gradient(masked.fill(entropy, mask))
  bound = masked.quantile(entropy, mask, 1.0 - share)
  return masked.fill(entropy >= bound, mask)


def varies(reward: Array, valid: Array) -> Array:
  """Returns whether a group's rewards differ (dynamic sampling, DAPO).

  Groups of equal rewards have advantage 0. DAPO keeps a group if some but not
  all of its answers are right, which is this for rewards of two values; verl
  tests the standard deviation, which rounding makes positive for equal rewards
  such as 0.1.

  Args:
    reward: f32 [G].
    valid: bool [G].

  Returns:
    bool []; False for a group with fewer than two rewards.

  Reference: Yu et al., "DAPO: An Open-Source LLM Reinforcement Learning System
    at Scale", 2025, arXiv:2503.14476.
  """
  present = _present(reward, valid)
  return masked.max(reward, present) > masked.min(reward, present)


def mean_between(
  reward: Array,
  valid: Array,
  *,
  low: float | Array = 0.0,
  high: float | Array = 1.0,
) -> Array:
  """Returns whether low < mean reward < high: neither too hard nor too easy.

  For rewards 0 and 1 the mean is the pass rate, and the defaults are `varies`.
  OpenRLHF's dynamic filtering; a band such as (0.2, 0.8) keeps problems of
  medium difficulty.

  Args:
    reward: f32 [G].
    valid: bool [G].
    low: exclusive.
    high: exclusive.

  Returns:
    bool []; False for a group without rewards.

  Raises:
    ValueError: unless low < high.
  """
  if _known(low, high) and not low < high:
    raise ValueError(f'low={low}, high={high}: no mean lies between them')
  present = _present(reward, valid)
  # A mean of rewards that equal a bound must not pass it by rounding.
  above = masked.mean(reward - low, present) > ROUNDING
  below = masked.mean(high - reward, present) > ROUNDING
  return above & below


def length_between(
  mask: Array, *, low: int | Array = 1, high: int | Array
) -> Array:
  """Returns which rows have low to high sampled tokens, both inclusive.

  The length filter: rows outside leave the loss. A penalty in the reward is
  the alternative, which tells the policy why.

  Args:
    mask: f32 [B, T].
    low: tokens; 1 drops empty rows.
    high: tokens.

  Returns:
    bool [B].

  Raises:
    ValueError: unless 0 <= low <= high.
  """
  arguments.nonnegative(low=low, high=high)
  if _known(low, high) and not low <= high:
    raise ValueError(f'low={low}, high={high}: no length lies between them')
  length = masked.count(mask, 1)
  return (length >= low) & (length <= high)


def _present(reward: Array, valid: Array) -> Array:
  """Returns which members have a reward that counts, bool [G]."""
  if reward.ndim != 1:
    raise ValueError(
      f'reward{list(reward.shape)} is not one group [G]: lift with'
      ' groups.reduce, or with jax.vmap.'
    )
  return valid.astype(bool) & jnp.isfinite(reward)


def _known(*numbers: float | Array) -> bool:
  """Returns whether all numbers are fixed, not traced."""
  return all(arguments.is_known(number) for number in numbers)
