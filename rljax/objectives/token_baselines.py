"""Baselines of least variance for each token of a group.

The baseline of token t weights the returns of the group's members by the
squared norm of the gradient up to t, for which probabilities stand in:
bₜ = Σᵢ Wᵢₜ Gᵢₜ / Σᵢ Wᵢₜ, Wᵢₜ = Σ_{j<=t} (1 - 2 πᵢⱼ + Σᵥ πᵢⱼ(v)²).

The functions of a group take `(returns [G, T], energy [G, T], mask [G, T],
valid [G])` and compare tokens at one place; `apply` lifts them to rows. Where
the environment writes between them, `by_turn` compares the i-th sampled tokens
instead: the multi-turn form is `apply(by_turn(optimal_token), ...)`.

Reference: Li et al., "The Optimal Token Baseline: Variance Reduction for
  Long-Horizon LLM-RL", 2026, arXiv:2602.07078.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from rljax.core import masked
from rljax.core.types import Array, Groups
from rljax.objectives import spans

# Added to the sum of weights, which is 0 where every token was certain.
EPS = 1e-8


def score_energy(logp: Array, collision: Array, mask: Array) -> Array:
  """Returns 1 - 2π + Σᵥ π(v)², the squared norm of d log π / d logits.

  For rows of another policy, multiply by the square of the importance weight.

  Args:
    logp: f32 [B, T], nats, of the sampled tokens.
    collision: f32 [B, T], Σᵥ π(v)², the chance that two draws are equal.
    mask: f32 [B, T].

  Returns:
    f32 [B, T], 0 where the mask is zero.
  """
  chance = jnp.exp(masked.fill(logp, mask))
  return masked.fill(1.0 - 2.0 * chance + masked.fill(collision, mask), mask)


def optimal_baseline(
  returns: Array, energy: Array, mask: Array, valid: Array
) -> Array:
  """Returns bₜ, the mean return at each place, weighted by energy so far.

  Args:
    returns: f32 [G, T], rewards to go.
    energy: f32 [G, T], from `score_energy`.
    mask: f32 [G, T].
    valid: bool [G].

  Returns:
    f32 [G, T], 0 where the mask is zero; 0 where all energy is 0. With equal
    energies along all rows it is the mean of the rewards to go.
  """
  here = _here(returns, mask, valid)
  weight = masked.fill(jnp.cumsum(masked.fill(energy, here), axis=1), here)
  total = jnp.sum(weight, axis=0, keepdims=True) + EPS
  paid = jnp.sum(weight * masked.fill(returns, here), axis=0, keepdims=True)
  mean = paid / jnp.where(total == 0.0, 1.0, total)
  return masked.fill(jnp.broadcast_to(mean, mask.shape), here)


def optimal_token(
  returns: Array, energy: Array, mask: Array, valid: Array
) -> Array:
  """Returns the return less `optimal_baseline`; alone, a token gets 0.

  Where one member alone has a token, the baseline is its own return: as for a
  group of one, there is nothing to compare with.

  Args:
    returns: f32 [G, T], rewards to go.
    energy: f32 [G, T], from `score_energy`.
    mask: f32 [G, T].
    valid: bool [G].

  Returns:
    f32 [G, T], 0 where the mask is zero.
  """
  here = _here(returns, mask, valid)
  several = masked.count(here, 0, keepdims=True) > 1.0
  adv = masked.fill(returns, here)
  adv = adv - optimal_baseline(returns, energy, mask, valid)
  return masked.fill(adv, here & several)


def optimal_token_with_tail(
  returns: Array, energy: Array, mask: Array, valid: Array
) -> Array:
  """Returns the return less `optimal_baseline`, whole at the longest's tail.

  The tail is what the longest member has beyond the length of the second
  longest; it has no baseline there. A group of one is all tail and keeps its
  returns. verl's default (`handle_zero_tail`).

  Args:
    returns: f32 [G, T], rewards to go.
    energy: f32 [G, T], from `score_energy`.
    mask: f32 [G, T].
    valid: bool [G].

  Returns:
    f32 [G, T], 0 where the mask is zero.
  """
  here = _here(returns, mask, valid)
  length = masked.count(here, 1)
  others = ~jnp.eye(length.shape[0], dtype=bool)
  longest = masked.max(
    jnp.broadcast_to(length[None, :], others.shape), others, 1
  )
  place = jnp.arange(mask.shape[1], dtype=jnp.float32)
  tail = (place[None, :] >= longest[:, None]) & (length > longest)[:, None]
  baseline = optimal_baseline(returns, energy, mask, valid)
  return masked.fill(returns, here) - masked.fill(baseline, ~tail)


def by_turn(fn: Callable[..., Array]) -> Callable[..., Array]:
  """Returns `fn` of a group whose tokens are aligned without environment's.

  Args:
    fn: (returns, energy, mask [G, T], valid [G]) -> [G, T].

  Returns:
    The same signature; equal to `fn` where all rows are without gaps.
  """

  def packed(returns: Array, energy: Array, mask: Array, valid: Array) -> Array:
    moved = (spans.pack(x, mask) for x in (returns, energy, mask))
    return spans.unpack(fn(*moved, valid), mask)

  return packed


def apply(
  fn: Callable[..., Array],
  groups: Groups,
  returns: Array,
  energy: Array,
  mask: Array,
  *,
  valid: Array | None = None,
) -> Array:
  """Returns `fn` of each group, at the tokens of its rows.

  `groups.apply` for tokens, one group after the other: all at once would hold
  several copies of the batch.

  Args:
    fn: (returns, energy, mask [G, T], valid [G]) -> [G, T].
    groups: [P, G].
    returns: f32 [B, T], rewards to go.
    energy: f32 [B, T], from `score_energy`.
    mask: f32 [B, T].
    valid: bool [B], rows that enter the baselines; None means all.

  Returns:
    f32 [B, T]; 0 for rows that are not valid or in no group.
  """
  rows = mask.shape[0]
  every = jnp.ones(rows, bool) if valid is None else jnp.asarray(valid, bool)
  data = [jnp.asarray(x) for x in (returns, energy, mask)]

  def one(out: Array, group: tuple[Array, Array]) -> tuple[Array, None]:
    index, there = group
    there = there & every[index]
    value = fn(*(x[index] for x in data), there)
    # Absent members point past the last row, where `drop` discards them.
    return out.at[jnp.where(there, index, rows)].set(value, mode='drop'), None

  empty = jnp.zeros(mask.shape, jnp.float32)
  return jax.lax.scan(one, empty, (groups.index, groups.valid))[0]


def _here(returns: Array, mask: Array, valid: Array) -> Array:
  """Returns which tokens count, bool [G, T]."""
  if returns.shape != mask.shape or valid.shape != mask.shape[:1]:
    raise ValueError(
      f'returns{list(returns.shape)}, mask{list(mask.shape)} and valid'
      f'{list(valid.shape)} are not one group [G, T], [G, T], [G]: lift with'
      ' groups.apply.'
    )
  return mask.astype(bool) & valid.astype(bool)[:, None]
