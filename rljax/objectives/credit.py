"""Credit of tokens: how the advantage of a row reaches its tokens.

Plain arrays in, plain arrays out: f32 [B, T], 0 where the mask is zero. A
token with mask 0 inside a response was written by the environment. Returns
pass through it without decay, and a reward that lies on it belongs to the last
token before it that the policy sampled.
"""

import jax
import jax.numpy as jnp

from rljax.core import masked
from rljax.core.types import Array


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
  value = jnp.zeros(mask.shape, jnp.float32)
  return gae(reward, value, mask, discount=discount, decay=1.0)


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
  sampled = mask.astype(bool)
  paid = masked.fill(reward, sampled | jnp.isfinite(reward))
  value = masked.fill(value, sampled)

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

  zero = jnp.zeros(mask.shape[:1], jnp.float32)
  steps = (paid.T, value.T, sampled.T)
  _, adv = jax.lax.scan(back, (zero, zero, zero), steps, reverse=True)
  return adv.T
