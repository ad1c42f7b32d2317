"""Log-ratios and importance weights between two named policies.

Three policies meet here: *behavior* drew the tokens, *old* is the policy when
credit was assigned, and the current one is being differentiated. Each function
says which two it compares. Results are f32 [B, T] in nats, 0 where the mask is
zero, whatever stands there.

With top-p, top-k or min-p sampling the behavior log-prob is over the kept
tokens only and the policy's is over all: their ratio is off by the kept mass.
Compare like with like: both untruncated, or both on the same kept set.
"""

import jax
import jax.numpy as jnp

from rljax.core import masked
from rljax.core.types import Array


def token(
  logp: Array, old_logp: Array, mask: Array, *, clamp: float = 20.0
) -> Array:
  """Returns log π(token) - log π_old(token) of each token.

  Args:
    logp: f32 [B, T], the current policy; differentiated.
    old_logp: f32 [B, T], the policy at credit time.
    mask: f32 [B, T].
    clamp: bound on the absolute value; exp(89) overflows in float32. The
      gradient is zero beyond it. 20 is verl's.

  Returns:
    f32 [B, T].
  """
  return jnp.clip(_difference(logp, old_logp, mask), -clamp, clamp)


def sequence(
  logp: Array, old_logp: Array, mask: Array, *, clamp: float = 10.0
) -> Array:
  """Returns the mean log-ratio of each row at each of its tokens (GSPO).

  sᵢ = (1 / |yᵢ|) Σₜ (log πₜ - log π_oldₜ); the gradient flows through the
  mean to every token of the row. With `weights.sequence_mean_token_mean` the
  loss is that of the paper.

  Args:
    logp: f32 [B, T], the current policy; differentiated.
    old_logp: f32 [B, T], the policy at credit time.
    mask: f32 [B, T].
    clamp: bound on the absolute value, after the mean; the gradient is zero
      beyond it. 10 is verl's.

  Returns:
    f32 [B, T], constant along a row.

  Reference: Zheng et al., "Group Sequence Policy Optimization", 2025,
    arXiv:2507.18071.
  """
  each = _difference(logp, old_logp, mask)
  row = jnp.clip(masked.mean(each, mask, 1, keepdims=True), -clamp, clamp)
  return masked.fill(jnp.broadcast_to(row, mask.shape), mask)


def truncated_importance(
  old_logp: Array, behavior_logp: Array, mask: Array, *, cap: float = 2.0
) -> Array:
  """Returns min(π_old / π_behavior, cap) of each token, without gradient.

  A factor on the weight of a token when sampler and trainer disagree. It
  never sees the current policy: the change since credit time is the business
  of the surrogate's ratio.

  Args:
    old_logp: f32 [B, T], the policy at credit time, read by the scorer.
    behavior_logp: f32 [B, T], the sampler's own.
    mask: f32 [B, T].
    cap: the largest weight.

  Returns:
    f32 [B, T], 0 where the mask is zero.

  Reference: Yao et al., "Your Efficient RL Framework Secretly Brings You
    Off-Policy RL Training", 2025.
  """
  log_ratio = token(old_logp, behavior_logp, mask)
  weight = masked.fill(jnp.minimum(jnp.exp(log_ratio), cap), mask)
  return jax.lax.stop_gradient(weight)


def _difference(logp: Array, other_logp: Array, mask: Array) -> Array:
  """Returns the difference where the mask is not zero, else 0, f32 [B, T]."""
  return masked.fill(logp, mask) - masked.fill(other_logp, mask)
