"""Scores of whole responses: what losses over preferences are made of.

`score` sums the log-ratio of the policy to a reference over the tokens of a
response. What others do to it is composed: `per_token` divides it by the
length, a generator (`forward_kl`, `js`, `alpha`) replaces the reverse KL that
direct preference optimization regularizes with by another f-divergence, and
`length_decay` is a weight to sum with. Results are f32; no `x [B, T]` is read
where its mask or weight is zero.
"""

import math

import jax
import jax.numpy as jnp

from rljax.core import masked
from rljax.core.types import Array

# exp(80) is 5.5e34, near the end of float32. Whole responses reach log-ratios
# of 30 in honest training, so a bound that suits tokens would stop learning.
LIMIT = 80.0


def score(logp: Array, ref_logp: Array, weight: Array) -> Array:
  """Returns Σₜ weightₜ (log πₜ - log π_refₜ) of each row.

  Args:
    logp: f32 [B, T], nats, the policy; differentiated.
    ref_logp: f32 [B, T], nats, the reference; zeros for losses without one.
    weight: f32 [B, T]: the mask, or `length_decay` of it.

  Returns:
    f32 [B], nats; 0 for an empty response.
  """
  ratio = masked.fill(logp, weight) - masked.fill(ref_logp, weight)
  return jnp.sum(ratio * weight, axis=1)


def per_token(total: Array, mask: Array) -> Array:
  """Returns a score divided by the tokens of its response.

  Args:
    total: f32 [B].
    mask: f32 [B, T].

  Returns:
    f32 [B]; the score itself for an empty response, whose score is 0.
  """
  return total / jnp.maximum(masked.count(mask, 1), 1.0)


def length_decay(mask: Array, partner: Array, *, decay: float) -> Array:
  """Returns weights that count the surplus of the longer response less.

  A token is worth 1 up to the length of the shorter response of the pair and
  `decay` beyond it. With decay = 1 it is the mask.

  Args:
    mask: f32 [B, T].
    partner: f32 [B, T'], the mask of the other response of the pair.
    decay: in [0, 1]; the paper tunes it, TRL calls it `ld_alpha`.

  Returns:
    f32 [B, T].

  Raises:
    ValueError: if decay is not in [0, 1].

  Reference: Liu et al., "Length Desensitization in Direct Preference
    Optimization" (LD-DPO), 2024, arXiv:2409.06411.
  """
  if not 0.0 <= decay <= 1.0:
    raise ValueError(f'decay={decay} must be in [0, 1]: 1 changes nothing.')
  present = masked.fill(jnp.ones_like(mask), mask)
  shared = masked.count(partner, 1, keepdims=True)
  inside = jnp.cumsum(present, axis=1) <= shared
  return masked.fill(jnp.where(inside, 1.0, decay), mask)


def agreement(logp: Array, collision: Array, mask: Array) -> Array:
  """Returns how much the policy itself would write each response (WPO).

  exp of the mean over tokens of log πₜ - log Σ π², without gradient: near 1
  where the tokens are those that the policy would draw. The weight of a pair
  is the product of its two.

  Args:
    logp: f32 [B, T], nats.
    collision: f32 [B, T], Σ π² of each position; `rljax_kernels.vocab_stats`
      calls it so.
    mask: f32 [B, T].

  Returns:
    f32 [B]; 1 for an empty response.

  Reference: Zhou et al., "WPO: Enhancing RLHF with Weighted Preference
    Optimization", 2024, arXiv:2406.11827.
  """
  usual = jnp.log(masked.fill(collision, mask, 1.0))
  mean = masked.mean(masked.fill(logp, mask) - usual, mask, 1)
  return jax.lax.stop_gradient(_exp(mean))


def forward_kl(total: Array) -> Array:
  """Returns 1 - exp(-score), the generator of KL(reference ‖ policy).

  Each generator is f'(t) of the divergence at t = π / π_ref; scores below
  -80 count as -80. Near 0 all of them are the score itself.

  Args:
    total: f32 [B], a score.

  Returns:
    f32 [B].

  Reference: Wang et al., "Beyond Reverse KL: Generalizing Direct Preference
    Optimization with Diverse Divergence Constraints", 2023, arXiv:2309.16240.
  """
  return 1.0 - _exp(-total)


def js(total: Array) -> Array:
  """Returns log 2 + log σ(score), the generator of Jensen-Shannon.

  Args:
    total: f32 [B], a score.

  Returns:
    f32 [B], at most log 2; ½ score near 0.

  Reference: as `forward_kl`.
  """
  return math.log(2.0) + jax.nn.log_sigmoid(total)


def alpha(total: Array, *, order: float) -> Array:
  """Returns (exp((order - 1) score) - 1) / (order - 1), of alpha-divergence.

  Args:
    total: f32 [B], a score.
    order: not 1, where the limit is the score itself (reverse KL); 0 gives
      `forward_kl`. TRL's default is 0.5.

  Returns:
    f32 [B].

  Raises:
    ValueError: if order is 1.

  Reference: as `forward_kl`.
  """
  if order == 1.0:
    raise ValueError('order=1.0 is the score itself: leave out `alpha`.')
  power = jnp.clip((order - 1.0) * total, -LIMIT, LIMIT)
  return jnp.expm1(power) / (order - 1.0)


def _exp(x: Array) -> Array:
  """Returns exp(x) with x clamped to ±LIMIT."""
  return jnp.exp(jnp.clip(x, -LIMIT, LIMIT))
