"""Factors that hold a policy near the one that sampled: masks and weights.

Each returns data, f32 of the shape of its arguments, through which no gradient
flows; it multiplies the objective of a token. Functions with a mask return 0
where that is zero, whatever stands there.

`clip_cov` and `kl_cov` compare a token with all others: give them the whole
batch, or they act on each part by itself.
"""

import jax
import jax.numpy as jnp

from rljax.core import masked
from rljax.core.types import Array
from rljax.objectives import arguments

# exp(20) is 4.9e8: far past every clip range, and its square still fits f32.
LIMIT = 20.0

# exp(80) is 5.5e34, the difference of two of which is finite.
_HUGE = 80.0


def clipped(
  log_ratio: Array,
  adv: Array,
  *,
  low: float | Array = 0.2,
  high: float | Array = 0.2,
) -> Array:
  """Returns 1 where `surrogates.clip` passes no gradient, else 0.

  Its mean is the clip fraction of a log.

  Args:
    log_ratio: f32 [...], nats.
    adv: f32 [...].
    low: as in `surrogates.clip`.
    high: as in `surrogates.clip`.

  Returns:
    f32 [...] in {0, 1}.
  """
  arguments.one_shape(log_ratio=log_ratio, adv=adv)
  ratio = jnp.exp(jnp.clip(log_ratio, -LIMIT, LIMIT))
  bound = jnp.clip(ratio, 1.0 - low, 1.0 + high)
  held = bound * adv < ratio * adv
  return jax.lax.stop_gradient(held.astype(jnp.float32))


def dppo_tv(
  logp: Array,
  old_logp: Array,
  adv: Array,
  mask: Array,
  *,
  low: float | Array = 0.2,
  high: float | Array = 0.2,
) -> Array:
  """Returns 1 where the token's probability has not moved too far (DPPO-TV).

  With d = π - π_old, a good token is dropped once d > high and another once
  d < -low. Unlike a bound on the ratio this leaves rare tokens free. verl
  multiplies it with sg(min(ρ, 20)) · adv · logp, which is `surrogates.cispo`
  with cap = 20; prime-rl masks the ratio itself.

  Args:
    logp: f32 [B, T], the current policy.
    old_logp: f32 [B, T], the policy that sampled.
    adv: f32 [B, T].
    mask: f32 [B, T].
    low: largest loss of probability.
    high: largest gain.

  Returns:
    f32 [B, T] in {0, 1}.

  Reference: Qi et al., "Rethinking the Trust Region in LLM Reinforcement
    Learning", 2026, arXiv:2602.04879.
  """
  arguments.nonnegative(low=low, high=high)
  logp, old_logp, adv = _present(logp, old_logp, adv, mask)
  # A log-prob above 0 is none, but moves all the same.
  now, before = (jnp.exp(jnp.minimum(x, _HUGE)) for x in (logp, old_logp))
  moved = now - before
  return _keep(jnp.where(adv > 0.0, moved <= high, moved >= -low), mask)


def dppo_kl(
  logp: Array,
  old_logp: Array,
  adv: Array,
  mask: Array,
  *,
  low: float | Array = 0.2,
  high: float | Array = 0.2,
) -> Array:
  """Returns 1 where the token's binary KL is small (DPPO-KL).

  The KL is that of (π_old, 1 - π_old) from (π, 1 - π), a lower bound of
  KL(π_old ‖ π). A good token is dropped once it has risen and its KL exceeds
  `high`, another once it has fallen and its KL exceeds `low`.

  Args:
    logp: f32 [B, T], the current policy.
    old_logp: f32 [B, T], the policy that sampled.
    adv: f32 [B, T].
    mask: f32 [B, T].
    low: largest KL of a bad token that falls, nats.
    high: largest KL of a good token that rises, nats.

  Returns:
    f32 [B, T] in {0, 1}.

  Reference: as `dppo_tv`.
  """
  arguments.nonnegative(low=low, high=high)
  logp, old_logp, adv = _present(logp, old_logp, adv, mask)
  # A log-prob above 0 is rounding.
  logp, old_logp = jnp.minimum(logp, 0.0), jnp.minimum(old_logp, 0.0)
  p, old = jnp.exp(logp), jnp.exp(old_logp)
  # The constant is verl's; it bounds the logarithm where a token is certain. Of
  # 1 - p + 1e-8 compilers make (1 + 1e-8) - p, which is 0 there.
  rest = jnp.log((1e-8 - jnp.expm1(old_logp)) / (1e-8 - jnp.expm1(logp)))
  kl = old * (old_logp - logp) + (1.0 - old) * rest
  good = (kl <= high) | (p <= old)
  bad = (kl <= low) | (p >= old)
  return _keep(jnp.where(adv > 0.0, good, bad), mask)


def vespo(
  logp: Array,
  old_logp: Array,
  adv: Array,
  mask: Array,
  *,
  k_pos: float | Array = 2.0,
  lambda_pos: float | Array = 3.0,
  k_neg: float | Array = 3.0,
  lambda_neg: float | Array = 2.0,
  log_correction: Array | None = None,
) -> Array:
  """Returns w^k · exp(λ · (1 - w)) of each row's importance weight w.

  w is the *product* of the row's ratios, held in [1e-8, e^20]; (k, λ) is the
  pair of the sign of the advantage, with 0 counted as good. The factor is 1 at
  w = 1, largest at w = k / λ, and vanishes for w far on either side. The
  objective is this times `surrogates.reinforce`.

  Args:
    logp: f32 [B, T], the current policy.
    old_logp: f32 [B, T], the policy at credit time.
    adv: f32 [B, T], equal along a row.
    mask: f32 [B, T].
    k_pos: power for good rows; this and the next three are TRL's values.
    lambda_pos: decay for good rows.
    k_neg: power for the others.
    lambda_neg: decay for the others.
    log_correction: f32 [B], added to log w: the summed log-ratio of the old
      policy to the one that sampled, or None where they are one.

  Returns:
    f32 [B, T].

  Reference: "VESPO: Variational Sequence-Level Soft Policy
    Optimization for Stable Off-Policy LLM Training", 2026, arXiv:2602.10693.
  """
  arguments.nonnegative(
    k_pos=k_pos, lambda_pos=lambda_pos, k_neg=k_neg, lambda_neg=lambda_neg
  )
  logp, old_logp, adv = _present(logp, old_logp, adv, mask)
  each = jnp.clip(logp - old_logp, -LIMIT, LIMIT)
  log_w = masked.sum(each, mask, 1, keepdims=True)
  if log_correction is not None:
    log_w += log_correction[:, None]
  log_w = jnp.clip(log_w, jnp.log(1e-8), LIMIT)
  k = jnp.where(adv >= 0.0, k_pos, k_neg)
  decay = jnp.where(adv >= 0.0, lambda_pos, lambda_neg)
  log_phi = decay + k * log_w - decay * jnp.exp(log_w)
  return _keep(jnp.exp(log_phi), mask)


def clip_cov(
  logp: Array,
  old_logp: Array,
  adv: Array,
  mask: Array,
  *,
  scores: Array,
  share: float = 0.0002,
  floor: float | Array = 1.0,
  cap: float | Array = 5.0,
  low: float | Array = 0.2,
  high: float | Array = 0.2,
) -> Array:
  """Returns 0 at a few tokens of high covariance and 1 at the others.

  The covariance of a token is (adv - mean adv) · (logp - mean logp). Among
  those between `floor` and `cap` that `surrogates.clip` does not hold already,
  max(⌊share · N⌋, 1) of the batch's N tokens are dropped, those of the largest
  scores. Multiply `surrogates.clip` with it.

  Args:
    logp: f32 [B, T], the current policy.
    old_logp: f32 [B, T], the policy at credit time.
    adv: f32 [B, T].
    mask: f32 [B, T].
    scores: f32 [B, T]; `jax.random.uniform(key, mask.shape)` draws at random,
      as the paper and verl do.
    share: of the batch's tokens, in [0, 1].
    floor: the least covariance that is dropped.
    cap: the greatest.
    low: as in `surrogates.clip`.
    high: as in `surrogates.clip`.

  Returns:
    f32 [B, T] in {0, 1}.

  Reference: Cui et al., "The Entropy Mechanism of Reinforcement Learning for
    Reasoning Language Models", 2025, arXiv:2505.22617.
  """
  arguments.shares(share=share)
  logp, old_logp, adv = _present(logp, old_logp, adv, mask)
  held = clipped(logp - old_logp, adv, low=low, high=high)
  covariance = _covariance(logp, adv, mask)
  among = (covariance > floor) & (covariance < cap)
  among &= (held == 0.0) & mask.astype(bool)
  dropped = _largest(scores, among, _part(mask, share))
  return _keep(~dropped, mask)


def kl_cov(
  logp: Array, adv: Array, mask: Array, *, share: float = 0.0002
) -> Array:
  """Returns 1 at the tokens of highest covariance, 0 at the others.

  The covariance is that of `clip_cov`; max(⌊share · N⌋, 1) of the batch's N
  tokens are chosen, the first among equal ones. The objective is
  `surrogates.importance` minus coefficient · `divergences.absolute` of the
  old policy at these tokens.

  Args:
    logp: f32 [B, T], the current policy.
    adv: f32 [B, T].
    mask: f32 [B, T].
    share: of the batch's tokens, in [0, 1].

  Returns:
    f32 [B, T] in {0, 1}.

  Reference: as `clip_cov`.
  """
  arguments.shares(share=share)
  logp, adv = _present(logp, adv, mask)
  covariance = _covariance(logp, adv, mask)
  return _keep(
    _largest(covariance, mask.astype(bool), _part(mask, share)), mask
  )


def _present(*arrays: Array) -> list[Array]:
  """Returns all but the last, 0 where the last, the mask, is zero."""
  *values, mask = arrays
  return [masked.fill(value, mask) for value in values]


def _keep(factor: Array, mask: Array) -> Array:
  return jax.lax.stop_gradient(masked.fill(factor, mask))


def _covariance(logp: Array, adv: Array, mask: Array) -> Array:
  return masked.center(adv, mask) * masked.center(logp, mask)


def _part(mask: Array, share: float) -> Array:
  """Returns max(⌊share · N⌋, 1) for N tokens, i32 []."""
  part = jnp.floor(masked.count(mask) * share)
  return jnp.maximum(part, 1.0).astype(jnp.int32)


def _largest(score: Array, among: Array, count: Array) -> Array:
  """Returns which `count` of `among` have the largest scores, bool.

  Among equal scores the first are taken. Sorts values alone: an argsort and
  its inverse would need twice the memory.
  """
  flat = masked.fill(score, among, -jnp.inf).reshape(-1)
  count = jnp.minimum(count, jnp.sum(among))
  last = jnp.sort(flat)[jnp.maximum(flat.size - count, 0)]
  above = flat > last
  tied = (flat == last) & among.reshape(-1)
  room = count - jnp.sum(above)
  first = jnp.cumsum(tied.astype(jnp.int32)) <= room
  return ((above | (tied & first)) & (count > 0)).reshape(score.shape)
