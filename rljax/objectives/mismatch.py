"""Meters of the difference between the policy that learns and the sampler.

Each reads a batch and returns one number, f32 [], or one per row; none has a
gradient. An empty mask gives 0. Call them where the whole batch is at hand: the
mean over tokens of parts is not the mean of the parts' means.

What to look at first: with one policy and one engine `largest` is 0 to
rounding, `effective_share` 1 and `masked_share` 0. If they are not at step 0,
sampler and scorer disagree about temperature, truncation or tokens.

`log_ratio` is old over behavior throughout, see `ratios`; bound it there.
"""

import jax
import jax.numpy as jnp

from rljax.core import masked
from rljax.core.types import Array
from rljax.objectives import arguments


def kl(old_logp: Array, behavior_logp: Array, mask: Array) -> Array:
  """Returns the mean of log π_behavior - log π_old: unbiased, may be negative.

  Estimates KL(behavior ‖ old) per token, since behavior drew the tokens.

  Args:
    old_logp: f32 [...].
    behavior_logp: f32 [...].
    mask: f32 [...].

  Returns:
    f32 [], nats.
  """
  return _mean(_of(behavior_logp, mask) - _of(old_logp, mask), mask)


def k3(log_ratio: Array, mask: Array) -> Array:
  """Returns the mean of ρ - 1 - log ρ: unbiased, never negative.

  Estimates KL(behavior ‖ old) as `kl` does, with less variance while the two
  are close; one token with a large ρ dominates it otherwise.

  Args:
    log_ratio: f32 [...], old over behavior; ρ is its exponential.
    mask: f32 [...].

  Returns:
    f32 [], nats.

  Reference: Schulman, "Approximating KL Divergence", 2020,
    http://joschu.net/blog/kl-approx.html.
  """
  x = _of(log_ratio, mask)
  return _mean(jnp.maximum(jnp.expm1(x) - x, 0.0), mask)


def chi_square(log_ratio: Array, mask: Array) -> Array:
  """Returns the mean of ρ² over tokens, minus 1.

  Estimates χ²(old ‖ behavior), the variance of the importance weights; of
  tokens, or of rows when given one log-ratio per row. For ratios of a finite
  sample it may be negative.

  Args:
    log_ratio: f32 [...], old over behavior, at most 44 in absolute value.
    mask: f32 [...].

  Returns:
    f32 [].
  """
  excess = _mean(jnp.exp(2.0 * _of(log_ratio, mask)), mask) - 1.0
  return jnp.where(masked.count(mask) > 0.0, excess, 0.0)


def log_perplexity(logp: Array, mask: Array) -> Array:
  """Returns minus the mean log-prob of each row, f32 [B], nats.

  Its exponential is the perplexity of the row; the difference between two
  policies' is the log of the geometric mean of their ratio, per row. Means
  over rows are the caller's: `masked.mean` with the rows that have tokens, or
  verl's, which counts empty rows with perplexity 1.

  Args:
    logp: f32 [B, T].
    mask: f32 [B, T].

  Returns:
    f32 [B], 0 for rows without tokens.
  """
  return -masked.mean(jax.lax.stop_gradient(logp), mask, 1)


def largest(log_ratio: Array, mask: Array) -> Array:
  """Returns the largest absolute log-ratio of a token, f32 [].

  Args:
    log_ratio: f32 [...].
    mask: f32 [...].
  """
  return masked.max(jnp.abs(_of(log_ratio, mask)), mask)


def effective_share(weight: Array, mask: Array) -> Array:
  """Returns (Σ w)² / (n Σ w²), the effective sample size over the sample's.

  1 for equal weights, 1 / n if one token has all the weight, and 0 if none has
  any, where verl divides by zero.

  Args:
    weight: f32 [...], not negative.
    mask: f32 [...].

  Returns:
    f32 [] in [0, 1].

  Reference: Kong, "A Note on Importance Sampling Using Standardized Weights",
    1992.
  """
  weight = _of(weight, mask)
  # Over the largest first: squares of large weights overflow.
  most = masked.max(weight, mask)
  weight = weight / jnp.where(most > 0.0, most, 1.0)
  squares = _mean(jnp.square(weight), mask)
  share = jnp.square(_mean(weight, mask))
  return share / jnp.where(squares > 0.0, squares, 1.0)


def masked_share(kept: Array, mask: Array) -> Array:
  """Returns the share of sampled tokens that a correction took out.

  Args:
    kept: f32 [...], a smaller mask or a weight; 0 means taken out.
    mask: f32 [...].

  Returns:
    f32 [] in [0, 1].
  """
  return _mean((_of(kept, mask) == 0.0).astype(jnp.float32), mask)


def touched_share(kept: Array, mask: Array) -> Array:
  """Returns the share of rows that lost at least one token.

  Args:
    kept: f32 [B, T], a smaller mask or a weight; 0 means taken out.
    mask: f32 [B, T].

  Returns:
    f32 [] in [0, 1], of the rows with tokens.
  """
  lost = (_of(kept, mask) == 0.0) & mask.astype(bool)
  touched = jnp.any(lost, axis=1).astype(jnp.float32)
  return _mean(touched, masked.count(mask, 1))


def outside_share(
  log_ratio: Array,
  mask: Array,
  *,
  low: float | Array = 0.5,
  high: float | Array = 2.0,
) -> Array:
  """Returns the share of tokens whose ratio is outside [low, high].

  Args:
    log_ratio: f32 [...].
    mask: f32 [...].
    low: a ratio, not negative.
    high: a ratio.

  Returns:
    f32 [] in [0, 1].

  Raises:
    ValueError: if a bound is negative.
  """
  arguments.nonnegative(low=low, high=high)
  ratio = jnp.exp(_of(log_ratio, mask))
  outside = (ratio < low) | (ratio > high)
  return _mean(outside.astype(jnp.float32), mask)


def kept_mass(full_logp: Array, drawn_logp: Array, mask: Array) -> Array:
  """Returns the mean probability that top-p, top-k or min-p kept.

  A token's probability over all of the vocabulary, divided by its probability
  over the kept part, is the mass of that part: the factor by which an
  importance weight with the wrong one of the two is off.

  Args:
    full_logp: f32 [...], of the sampler's policy without truncation.
    drawn_logp: f32 [...], under the distribution that was drawn from.
    mask: f32 [...].

  Returns:
    f32 [] in (0, 1]; 1 without truncation.
  """
  gap = jnp.minimum(_of(full_logp, mask) - _of(drawn_logp, mask), 0.0)
  return _mean(jnp.exp(gap), mask)


def _of(x: Array, mask: Array) -> Array:
  """Returns `x` without gradient, 0 where the mask is zero."""
  return jax.lax.stop_gradient(masked.fill(x, mask))


def _mean(x: Array, mask: Array) -> Array:
  return masked.mean(jax.lax.stop_gradient(x), mask)
