"""Log-ratios between two named policies.

Three policies meet here: *behavior* drew the tokens, *old* is the policy when
credit was assigned, and the current one is being differentiated. Each function
takes `(logp, other_logp, mask)`, each f32 [B, T], and returns f32 [B, T] in
nats, 0 where the mask is zero, whatever stands there. The arguments are called
`logp` and `old_logp`, but any two policies may be compared: (current, old) for
a surrogate, (old, behavior) for a correction, see `corrections`.

With top-p, top-k or min-p sampling the behavior log-prob is over the kept
tokens only and the policy's is over all: their ratio is off by the kept mass.
Compare like with like: both untruncated, or both on the same kept set.

Every clamp is an argument, since peers differ: verl clamps tokens at ±20 and
GSPO's mean from above at 10, TRL clamps nothing. exp(89) overflows in float32.
"""

import jax
import jax.numpy as jnp

from rljax.core import masked
from rljax.core.types import Array
from rljax.objectives import arguments

# exp(80) is 5.5e34: with an advantage and a weight it still fits float32.
LIMIT = 80.0


def token(
  logp: Array, old_logp: Array, mask: Array, *, clamp: float | Array = 20.0
) -> Array:
  """Returns log π(token) - log π_old(token) of each token.

  Args:
    logp: f32 [B, T], the current policy; differentiated.
    old_logp: f32 [B, T], the policy at credit time.
    mask: f32 [B, T].
    clamp: bound on the absolute value; the gradient is zero beyond it. 20 is
      verl's.

  Returns:
    f32 [B, T].

  Raises:
    ValueError: if a shape differs from the mask's or `clamp` is not positive.
  """
  arguments.positive(clamp=clamp)
  each = _difference(logp, old_logp, mask)
  return jnp.clip(each, -clamp, clamp)


def sequence(
  logp: Array, old_logp: Array, mask: Array, *, clamp: float | Array = 10.0
) -> Array:
  """Returns the mean log-ratio of each row at each of its tokens (GSPO).

  sᵢ = (1 / |yᵢ|) Σₜ (log πₜ - log π_oldₜ); the gradient flows through the
  mean to every token of the row. With `weights.sequence_mean_token_mean` the
  loss is that of the paper. TRL's sequence level is this one, without clamp.

  Args:
    logp: f32 [B, T], the current policy; differentiated.
    old_logp: f32 [B, T], the policy at credit time.
    mask: f32 [B, T].
    clamp: upper bound on the mean; the gradient is zero beyond it. 10 is
      verl's. Below nothing can overflow.

  Returns:
    f32 [B, T], constant along a row; for rows of one token equal to `token`.

  Raises:
    ValueError: if a shape differs from the mask's or `clamp` is not positive.

  Reference: Zheng et al., "Group Sequence Policy Optimization", 2025,
    arXiv:2507.18071.
  """
  arguments.positive(clamp=clamp)
  each = _difference(logp, old_logp, mask)
  row = masked.mean(each, mask, 1, keepdims=True)
  return _spread(jnp.minimum(row, clamp), mask)


def sequence_token(
  logp: Array, old_logp: Array, mask: Array, *, clamp: float | Array = 10.0
) -> Array:
  """Returns the mean log-ratio, with each token's own gradient (GSPO-token).

  sᵢₜ = sg(sᵢ) + log πₜ - sg(log πₜ), with sᵢ of `sequence`. The value is the
  same; the gradient at a token is that of its own log-prob, not 1 / |yᵢ| of
  it. With equal advantages in a row and `weights.sequence_mean_token_mean` the
  loss has the gradient of `sequence`; with advantages per token it is
  GSPO-token of the paper. verl's `gspo` is this form.

  Args:
    logp: f32 [B, T], the current policy; differentiated.
    old_logp: f32 [B, T], the policy at credit time.
    mask: f32 [B, T].
    clamp: upper bound; the gradient is zero beyond it. 10 is verl's.

  Returns:
    f32 [B, T], constant along a row.

  Raises:
    ValueError: if a shape differs from the mask's or `clamp` is not positive.

  Reference: Zheng et al., "Group Sequence Policy Optimization", 2025,
    arXiv:2507.18071, section 4.3.
  """
  arguments.positive(clamp=clamp)
  own = masked.fill(logp, mask)
  each = jax.lax.stop_gradient(own - masked.fill(old_logp, mask))
  row = masked.mean(each, mask, 1, keepdims=True)
  moving = row + own - jax.lax.stop_gradient(own)
  return masked.fill(jnp.minimum(moving, clamp), mask)


def sequence_sum(
  logp: Array, old_logp: Array, mask: Array, *, clamp: float | Array = 20.0
) -> Array:
  """Returns the log-ratio of whole rows, Σₜ (log πₜ - log π_oldₜ).

  The only level at which an importance weight is unbiased, and the one with
  the largest variance: it grows with the length. verl and TRL use it for
  corrections, TRL's RLOO trainer in the surrogate.

  Args:
    logp: f32 [B, T], the current policy; differentiated.
    old_logp: f32 [B, T], the policy at credit time.
    mask: f32 [B, T].
    clamp: bound on the absolute value of the sum; the gradient is zero beyond
      it. 20 is verl's.

  Returns:
    f32 [B, T], constant along a row; for rows of one token equal to `token`.

  Raises:
    ValueError: if a shape differs from the mask's or `clamp` is not positive.
  """
  arguments.positive(clamp=clamp)
  each = _difference(logp, old_logp, mask)
  row = jnp.sum(each, axis=1, keepdims=True)
  return _spread(jnp.clip(row, -clamp, clamp), mask)


def geometric_mean(
  logp: Array,
  old_logp: Array,
  mask: Array,
  adv: Array,
  *,
  low: float | Array = 0.4,
  high: float | Array = 0.4,
) -> Array:
  """Returns the mean of pessimistically clipped log-ratios (GMPO).

  (1 / |yᵢ|) Σₜ sₜ · min(sₜ xₜ, sₜ clip(xₜ, -low, high)), with xₜ the token's
  log-ratio and sₜ the sign of its advantage. The clip is in log space and per
  token, the exponential of the result is the clipped geometric mean, and the
  objective is exp(result) · adv, see `surrogates`. verl's default range is
  0.2. verl averages over all rows, empty ones too.

  Args:
    logp: f32 [B, T], the current policy; differentiated.
    old_logp: f32 [B, T], the policy at credit time.
    mask: f32 [B, T].
    adv: f32 [B, T]; only its sign is read.
    low: how far below 0 the log-ratio of a bad token may go.
    high: how far above 0 that of a good token may go.

  Returns:
    f32 [B, T], constant along a row; `sequence` inside the range.

  Raises:
    ValueError: if a shape differs from the mask's or a bound is negative.

  Reference: Zhao et al., "Geometric-Mean Policy Optimization", 2025,
    arXiv:2507.20673.
  """
  arguments.nonnegative(low=low, high=high)
  each = _difference(logp, old_logp, mask)
  sign = jnp.sign(masked.fill(adv, mask))
  each = sign * jnp.minimum(sign * each, sign * jnp.clip(each, -low, high))
  # A good token may fall and a bad one rise without limit; exp may not.
  row = jnp.minimum(masked.mean(each, mask, 1, keepdims=True), LIMIT)
  return _spread(row, mask)


def _difference(logp: Array, other_logp: Array, mask: Array) -> Array:
  """Returns the difference where the mask is not zero, else 0, f32 [B, T]."""
  return masked.fill(logp, mask) - masked.fill(other_logp, mask)


def _spread(row: Array, mask: Array) -> Array:
  """Returns [B, 1] at each token of the row, f32 [B, T]."""
  return masked.fill(jnp.broadcast_to(row, mask.shape), mask)
