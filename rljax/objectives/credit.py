"""Credit of tokens: how the advantage of a row reaches its tokens.

Plain arrays in, plain arrays out: f32 [B, T], 0 where the mask is zero. A
token with mask 0 inside a response was written by the environment. Returns
pass through it without decay, and a reward that lies on it belongs to the last
token before it that the policy sampled. A reward on a row without a sampled
token, or before the first, is nobody's.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from rljax.core import masked
from rljax.core.types import Array
from rljax.objectives import arguments


def broadcast(adv: Array, mask: Array) -> Array:
  """Returns the advantage of each row at all of its sampled tokens.

  Keeps the sign; the sum over a row grows with its length.

  Args:
    adv: f32 [B].
    mask: f32 [B, T].

  Returns:
    f32 [B, T].
  """
  return masked.fill(jnp.broadcast_to(adv[:, None], mask.shape), mask)


def reward_to_go(reward: Array, mask: Array, *, discount: float = 1.0) -> Array:
  """Returns the discounted sum of rewards from each sampled token on.

  Rₜ = rₜ + discount · R of the next sampled token. Without discount, one
  reward at the end of a row is `broadcast` of it.

  Args:
    reward: f32 [B, T]; 0 where nothing is paid.
    mask: f32 [B, T].
    discount: per sampled token, in [0, 1].

  Returns:
    f32 [B, T].
  """
  arguments.shares(discount=discount)

  def back(carry, now):
    following, pending = carry
    paid_t, sampled_t = now
    pending = pending + paid_t
    total = pending + discount * following
    carry = (
      jnp.where(sampled_t, total, following),
      jnp.where(sampled_t, 0.0, pending),
    )
    return carry, jnp.where(sampled_t, total, 0.0)

  return _from_the_end(back, 2, _paid(reward, mask), mask.astype(bool))


def gae(
  reward: Array, value: Array, mask: Array, *, discount: float, decay: float
) -> Array:
  """Returns generalized advantage estimates over the sampled tokens.

  With t+1 the next sampled token (value and advantage 0 past the last):
  δₜ = rₜ + discount · Vₜ₊₁ - Vₜ and Aₜ = δₜ + discount · decay · Aₜ₊₁.
  The result is that of the sequence without environment tokens; their values
  are never read. It is not whitened.

  Args:
    reward: f32 [B, T]; 0 where nothing is paid.
    value: f32 [B, T], the critic's value before each token.
    mask: f32 [B, T].
    discount: γ, per sampled token.
    decay: λ.

  Returns:
    f32 [B, T].

  Reference: Schulman et al., "High-Dimensional Continuous Control Using
    Generalized Advantage Estimation", 2015, arXiv:1506.02438.
  """
  arguments.shares(discount=discount, decay=decay)
  sampled = mask.astype(bool)

  def back(carry, now):
    adv_next, value_next, pending = carry
    paid_t, value_t, sampled_t = now
    pending = pending + paid_t
    delta = pending + discount * value_next - value_t
    adv = delta + discount * decay * adv_next
    carry = (
      jnp.where(sampled_t, adv, adv_next),
      jnp.where(sampled_t, value_t, value_next),
      jnp.where(sampled_t, 0.0, pending),
    )
    return carry, jnp.where(sampled_t, adv, 0.0)

  paid, value = _paid(reward, mask), masked.fill(value, mask)
  return _from_the_end(back, 3, paid, value, sampled)


def lambda_return(
  reward: Array, value: Array, mask: Array, *, discount: float, decay: float
) -> Array:
  """Returns what the critic should have said: `gae` plus the value.

  Rₜ = rₜ + discount · ((1 - decay) · Vₜ₊₁ + decay · Rₜ₊₁) over the sampled
  tokens. With decay 1 it is `reward_to_go`, with decay 0 the one-step target.

  Args:
    reward: f32 [B, T]; 0 where nothing is paid.
    value: f32 [B, T], the critic's value before each token.
    mask: f32 [B, T].
    discount: γ, per sampled token.
    decay: λ.

  Returns:
    f32 [B, T].
  """
  adv = gae(reward, value, mask, discount=discount, decay=decay)
  return adv + masked.fill(value, mask)


def remax(reward: Array, baseline: Array, mask: Array) -> Array:
  """Returns the reward to go, less the reward of the greedy response.

  Args:
    reward: f32 [B, T]; 0 where nothing is paid.
    baseline: f32 [B], the reward of a greedy response to the same prompt.
    mask: f32 [B, T].

  Returns:
    f32 [B, T].

  Reference: Li et al., "ReMax: A Simple, Effective, and Efficient Reinforcement
    Learning Method for Aligning Large Language Models", 2023,
    arXiv:2310.10505.
  """
  return reward_to_go(reward, mask) - broadcast(baseline, mask)


def whiten(adv: Array, mask: Array) -> Array:
  """Returns advantages with mean 0 and variance 1 over the batch's tokens.

  `masked.whiten` of all tokens, the last step of PPO, REINFORCE++ and of GDPO
  in verl. Long rows count more than short ones. No token, or one alone, gives
  0, where verl raises; verl's GAE leaves the negative mean outside the mask.

  Args:
    adv: f32 [B, T] of the whole batch.
    mask: f32 [B, T].

  Returns:
    f32 [B, T].
  """
  return masked.whiten(adv, mask)


def reinforce_plus_plus(
  reward: Array, mask: Array, *, discount: float = 1.0
) -> Array:
  """Returns the reward to go, whitened over the batch's tokens.

  The paper has the penalty of `shaping.penalize_kl` in the reward.

  Args:
    reward: f32 [B, T] of the whole batch; 0 where nothing is paid.
    mask: f32 [B, T].
    discount: per sampled token.

  Returns:
    f32 [B, T].

  Reference: Hu et al., "REINFORCE++: An Efficient RLHF Algorithm with
    Robustness to Both Prompt and Reward Models", 2025, arXiv:2501.03262.
  """
  return whiten(reward_to_go(reward, mask, discount=discount), mask)


def reinforce_plus_plus_baseline(adv: Array, mask: Array) -> Array:
  """Returns centered advantages at all tokens, whitened over the batch.

  Args:
    adv: f32 [B] of the whole batch, from `advantages.center`.
    mask: f32 [B, T].

  Returns:
    f32 [B, T].

  Reference: Hu et al., "REINFORCE++: An Efficient RLHF Algorithm with
    Robustness to Both Prompt and Reward Models", 2025, arXiv:2501.03262.
  """
  return whiten(broadcast(adv, mask), mask)


def _paid(reward: Array, mask: Array) -> Array:
  """Returns rewards with 0 for what is not finite outside the mask."""
  return masked.fill(reward, mask.astype(bool) | jnp.isfinite(reward))


def _from_the_end(step: Callable, carried: int, *tokens: Array) -> Array:
  """Returns `step` of each token, the last first, [B, T].

  Args:
    step: (carried f32 [B] each, tokens [B] each) -> (carried, f32 [B]).
    carried: how many numbers each row carries; they start at 0.
    *tokens: [B, T].
  """
  zero = jnp.zeros(tokens[0].shape[:1], jnp.float32)
  columns = tuple(x.T for x in tokens)
  _, out = jax.lax.scan(step, (zero,) * carried, columns, reverse=True)
  return out.T
