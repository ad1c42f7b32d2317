"""Divergences of the policy from another model at sampled tokens.

Each takes `(logp, other_logp)`, nats, of tokens drawn from the policy, and
estimates reverse_kl = KL(policy ‖ other) per token, elementwise. The value and
the gradient are two questions: an unbiased value does not give an unbiased
gradient once the sampling distribution moves with the parameters. Each
docstring names the gradient that the penalty has in expectation, on-policy.
"""

import jax.numpy as jnp

from rljax.core.types import Array

# exp(20) is 4.9e8; beyond it the estimate is constant, with gradient zero.
LIMIT = 20.0

# Below this |x|, exp(x) - 1 - x cancels in float32 worse than its series.
SMALL = 0.03


def k1(logp: Array, other_logp: Array) -> Array:
  """Returns logp - other_logp: unbiased, may be negative.

  Expected gradient as a penalty: zero, since E[∇ log π] = 0; it only adds
  noise. Subtracted from the reward, or multiplied by a differentiable
  ratio, it gives that of reverse_kl.

  Args:
    logp: f32 [...], the policy.
    other_logp: f32 [...], the other model.

  Returns:
    f32 [...].
  """
  return logp - other_logp


def k2(logp: Array, other_logp: Array) -> Array:
  """Returns ½ (logp - other_logp)²: biased, never negative.

  Expected gradient as a penalty: exactly that of reverse_kl.

  Args:
    logp: f32 [...], the policy.
    other_logp: f32 [...], the other model.

  Returns:
    f32 [...].
  """
  return 0.5 * jnp.square(logp - other_logp)


def k3(logp: Array, other_logp: Array) -> Array:
  """Returns exp(x) - 1 - x, x = other_logp - logp: unbiased, never negative.

  Expected gradient as a penalty: that of forward_kl = KL(other ‖ policy), not
  of reverse_kl. Multiplied by a differentiable ratio it gives that of
  reverse_kl.

  Args:
    logp: f32 [...], the policy.
    other_logp: f32 [...], the other model.

  Returns:
    f32 [...].

  Reference: Schulman, "Approximating KL Divergence", 2020,
    http://joschu.net/blog/kl-approx.html.
  """
  x = jnp.clip(other_logp - logp, -LIMIT, LIMIT)
  small = jnp.abs(x) < SMALL
  near = jnp.where(small, x, 0.0)
  series = near * near * (0.5 + near * (1.0 / 6.0 + near / 24.0))
  far = jnp.where(small, 1.0, x)
  return jnp.where(small, series, jnp.expm1(far) - far)
