"""Divergences of the policy from another model at sampled tokens.

Each takes `(logp, other_logp)`, nats, of tokens drawn from the policy, and
estimates reverse_kl = KL(policy ‖ other) per token, elementwise, f32. The value
and the gradient are two questions: an unbiased value does not give an unbiased
gradient once the sampling distribution moves with the parameters. Each
docstring names the gradient that the penalty has in expectation, on-policy:

| | value | gradient as a penalty | times a differentiable ratio |
|---|---|---|---|
| `k1` | unbiased | none | reverse_kl |
| `k2` | biased, >= 0 | reverse_kl | another |
| `k3` | unbiased, >= 0 | forward_kl | reverse_kl |
| `absolute` | biased, >= 0 | twice the total variation | another |
| `..._straight_through` | of its estimator | reverse_kl | another |

`ratio_corrected` is the last column, `k3_ratio_corrected` that of `k3` without
its cancellation. verl calls the second-last row `k1+`,
`k3+`, `abs+`; its `kl`, `mse` and `low_var_kl` are `k1`, `k2` and `k3`, the
latter with cap = 10. TRL has `k3`, ratio-corrected unless told otherwise.
Divergences over the whole vocabulary, or its likeliest part, are in
`distillation` and `tilting`, where the policy is the student; their gradients
need no expectation.
"""

import jax
import jax.numpy as jnp

from rljax.core.types import Array
from rljax.objectives import arguments

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
  return _difference(logp, other_logp)


def k2(logp: Array, other_logp: Array) -> Array:
  """Returns ½ (logp - other_logp)²: biased, never negative.

  Expected gradient as a penalty: exactly that of reverse_kl.

  Args:
    logp: f32 [...], the policy.
    other_logp: f32 [...], the other model.

  Returns:
    f32 [...].
  """
  return 0.5 * jnp.square(_difference(logp, other_logp))


def absolute(logp: Array, other_logp: Array) -> Array:
  """Returns |logp - other_logp|: biased, never negative.

  Expected gradient as a penalty: that of twice the total variation, which is
  Σ |policy - other|. At equality it is 0.

  Args:
    logp: f32 [...], the policy.
    other_logp: f32 [...], the other model.

  Returns:
    f32 [...].
  """
  return jnp.abs(_difference(logp, other_logp))


def k3(
  logp: Array,
  other_logp: Array,
  *,
  limit: float = LIMIT,
  cap: float = float('inf'),
) -> Array:
  """Returns exp(x) - 1 - x, x = other_logp - logp: unbiased, never negative.

  Expected gradient as a penalty: that of forward_kl = KL(other ‖ policy), not
  of reverse_kl. Multiplied by a differentiable ratio it gives that of
  reverse_kl.

  Args:
    logp: f32 [...], the policy.
    other_logp: f32 [...], the other model.
    limit: bound on |x|, at most 80; the gradient is zero beyond it.
    cap: bound on the value; verl has 10, where the gradient ends too.

  Returns:
    f32 [...].

  Reference: Schulman, "Approximating KL Divergence", 2020,
    http://joschu.net/blog/kl-approx.html.
  """
  arguments.positive(limit=limit, cap=cap)
  x = jnp.clip(-_difference(logp, other_logp), -limit, limit)
  small = jnp.abs(x) < SMALL
  near = jnp.where(small, x, 0.0)
  series = near * near * (0.5 + near * (1.0 / 6.0 + near / 24.0))
  far = jnp.where(small, 1.0, x)
  value = jnp.where(small, series, jnp.expm1(far) - far)
  return jnp.minimum(value, cap)


def k1_straight_through(logp: Array, other_logp: Array) -> Array:
  """Returns `k1` with the gradient of `k2`: both unbiased on-policy.

  Expected gradient as a penalty: that of reverse_kl.

  Args:
    logp: f32 [...], the policy.
    other_logp: f32 [...], the other model.

  Returns:
    f32 [...].
  """
  return _straight_through(k1(logp, other_logp), logp, other_logp)


def k3_straight_through(
  logp: Array,
  other_logp: Array,
  *,
  limit: float = LIMIT,
  cap: float = float('inf'),
) -> Array:
  """Returns `k3` with the gradient of `k2`: both unbiased on-policy.

  Expected gradient as a penalty: that of reverse_kl. The clamps hold the value
  alone.

  Args:
    logp: f32 [...], the policy.
    other_logp: f32 [...], the other model.
    limit: as in `k3`.
    cap: as in `k3`.

  Returns:
    f32 [...].
  """
  value = k3(logp, other_logp, limit=limit, cap=cap)
  return _straight_through(value, logp, other_logp)


def absolute_straight_through(logp: Array, other_logp: Array) -> Array:
  """Returns `absolute` with the gradient of `k2`.

  Expected gradient as a penalty: that of reverse_kl.

  Args:
    logp: f32 [...], the policy.
    other_logp: f32 [...], the other model.

  Returns:
    f32 [...].
  """
  return _straight_through(absolute(logp, other_logp), logp, other_logp)


def ratio_corrected(
  divergence: Array, log_ratio: Array, *, limit: float = LIMIT
) -> Array:
  """Returns divergence · ρ, ρ the ratio of the policy to the one that sampled.

  Value and gradient of `k1` and `k3` become those of reverse_kl in
  expectation, on-policy and off it; those of `k2` and of the straight-through
  forms do not. On-policy ρ is 1 and still has a gradient: logp - sg(logp).
  The gradient of corrected `k3` is ρ · k1 · ∇ log π at each token, not in
  expectation alone; that of corrected `k1` is ρ · (k1 + 1) · ∇ log π.
  TRL's `use_bias_correction_kl`, on by default; DeepSeek-V3.2's unbiased KL.

  Args:
    divergence: f32 [...], an estimate of this module.
    log_ratio: f32 [...], nats, differentiated; see `ratios`.
    limit: bound on |log_ratio|, at most 80; its gradient is zero beyond it.

  Returns:
    f32 [...].

  Reference: DeepSeek-AI, "DeepSeek-V3.2: Pushing the Frontier of Open Large
    Language Models", 2025, arXiv:2512.02556.
  """
  arguments.one_shape(divergence=divergence, log_ratio=log_ratio)
  arguments.positive(limit=limit)
  return divergence * jnp.exp(jnp.clip(log_ratio, -limit, limit))


def k3_ratio_corrected(
  logp: Array, other_logp: Array, old_logp: Array, *, limit: float = LIMIT
) -> Array:
  """Returns ρ · `k3`, ρ = exp(logp - old_logp), with its gradient in one term.

  `ratio_corrected` of `k3` adds up ρ (exp(x) - 1 - x) and ρ (1 - exp(x)),
  x = other_logp - logp, to a gradient of -ρ · x. In float32 nothing is left of
  it for x beyond 17, as in TRL. Here -ρ · x is
  the gradient: in expectation that of reverse_kl, on-policy and off it. For
  tokens that the policy itself drew give `stop_gradient(logp)` as the old one.

  Args:
    logp: f32 [...], the policy; differentiated.
    other_logp: f32 [...], the other model.
    old_logp: f32 [...], the policy that sampled.
    limit: bound on |x| and on |log ρ|; values and slopes beyond are those at
      the bound, which still point to the other model. Above 40 the product may
      overflow.

  Returns:
    f32 [...], never negative.

  Reference: as `ratio_corrected`.
  """
  arguments.one_shape(logp=logp, other_logp=other_logp, old_logp=old_logp)
  arguments.positive(limit=limit)
  gap = jnp.clip(_difference(logp, other_logp), -limit, limit)
  ratio = jnp.exp(jnp.clip(logp - old_logp, -limit, limit))
  value = jax.lax.stop_gradient(k3(logp, other_logp, limit=limit) * ratio)
  slope = jax.lax.stop_gradient(ratio * gap)
  return value + slope * (logp - jax.lax.stop_gradient(logp))


def _difference(logp: Array, other_logp: Array) -> Array:
  arguments.one_shape(logp=logp, other_logp=other_logp)
  return logp - other_logp


def _straight_through(value: Array, logp: Array, other_logp: Array) -> Array:
  """Returns `value` with the gradient of `k2` in `logp`."""
  # d k2 is the difference times d logp; of logp - sg(logp) the value is 0, so
  # nothing large is added and taken away again.
  slope = jax.lax.stop_gradient(_difference(logp, other_logp))
  moving = slope * (logp - jax.lax.stop_gradient(logp))
  return jax.lax.stop_gradient(value) + moving
