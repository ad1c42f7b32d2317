"""Surrogate objectives of one token, to be maximized.

Each takes `(log_ratio, adv)` of equal shape, f32, where `log_ratio` is the
log-ratio of the current policy to the old one (see `ratios`), and returns
f32 of the same shape. At log-ratio 0 the gradient of each is `adv`, that of
the policy gradient. Log-ratios beyond ±20 are clamped inside the exponential,
so values and gradients are finite for any finite input.
"""

import jax
import jax.numpy as jnp

from rljax.core.types import Array

# exp(20) is 4.9e8: far past every clip range, and its square still fits f32.
LIMIT = 20.0


def reinforce(log_ratio: Array, adv: Array) -> Array:
  """Returns adv · log_ratio: the plain policy gradient, uncorrected.

  Its gradient is that of adv · logp; the value is 0 on-policy.

  Args:
    log_ratio: f32 [B, T], nats.
    adv: f32 [B, T].

  Returns:
    f32 [B, T].
  """
  return log_ratio * adv


def clip(
  log_ratio: Array, adv: Array, *, low: float = 0.2, high: float = 0.2
) -> Array:
  """Returns min(ρ · adv, clip(ρ, 1 - low, 1 + high) · adv) (PPO, GRPO).

  Args:
    log_ratio: f32 [B, T], nats; ρ is its exponential.
    adv: f32 [B, T].
    low: how far below 1 the ratio may push a bad token down.
    high: how far above 1 it may push a good one up; 0.28 in DAPO.

  Returns:
    f32 [B, T].

  Reference: Schulman et al., "Proximal Policy Optimization Algorithms", 2017,
    arXiv:1707.06347.
  """
  ratio = _ratio(log_ratio)
  return jnp.minimum(ratio * adv, jnp.clip(ratio, 1.0 - low, 1.0 + high) * adv)


def dual_clip(
  log_ratio: Array,
  adv: Array,
  *,
  low: float = 0.2,
  high: float = 0.2,
  cap: float = 3.0,
) -> Array:
  """Returns the clipped objective, at least cap · adv where adv < 0.

  Bounds what a token that became far more likely can cost.

  Args:
    log_ratio: f32 [B, T], nats.
    adv: f32 [B, T].
    low: as in `clip`.
    high: as in `clip`.
    cap: more than 1; verl's default is 3.

  Returns:
    f32 [B, T].

  Reference: Ye et al., "Mastering Complex Control in MOBA Games with Deep
    Reinforcement Learning", 2020, arXiv:1912.09729.
  """
  objective = clip(log_ratio, adv, low=low, high=high)
  return jnp.where(adv < 0.0, jnp.maximum(objective, cap * adv), objective)


def cispo(log_ratio: Array, adv: Array, *, cap: float = 5.0) -> Array:
  """Returns sg(min(ρ, cap)) · adv · log_ratio: the weight is clipped alone.

  Every token keeps its gradient, weighted by the truncated ratio. The value
  differs from the paper's by terms in the old policy, which have no gradient.
  Peers differ in the bounds: 1.2 with a lower bound 0.8 (verl, NeMo-RL,
  slime), 5 without one (SkyRL, TRL's advice).

  Args:
    log_ratio: f32 [B, T], nats.
    adv: f32 [B, T].
    cap: the largest weight.

  Returns:
    f32 [B, T].

  Reference: MiniMax, "MiniMax-M1: Scaling Test-Time Compute Efficiently with
    Lightning Attention", 2025, arXiv:2506.13585.
  """
  weight = jax.lax.stop_gradient(jnp.minimum(_ratio(log_ratio), cap))
  return weight * adv * log_ratio


def _ratio(log_ratio: Array) -> Array:
  """Returns exp(log_ratio) with the log-ratio clamped to ±LIMIT."""
  return jnp.exp(jnp.clip(log_ratio, -LIMIT, LIMIT))
