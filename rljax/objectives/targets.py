"""From advantages to Targets: masks and missing rows, handled once.

The rules: a row whose reward is missing (not finite) and a row without a
sampled token leave the group statistics, the loss and its denominator; they
are counted in `observed`. Groups of equal rewards stay in, with advantage 0.
"""

from collections.abc import Callable, Mapping

import jax.numpy as jnp

from rljax.core import groups, masked
from rljax.core.types import Array, Rewards, Rollout, Targets
from rljax.objectives import credit, weights


def usable(rollout: Rollout, rewards: Rewards) -> Array:
  """Returns which rows have a sampled token and all of their rewards.

  Pass it as `valid` to `groups.apply`, so that statistics and loss agree.

  Args:
    rollout: B rows.
    rewards: columns [B] or [B, U].

  Returns:
    bool [B].
  """
  return ~_missing(rewards) & ~_empty(rollout)


def targets(
  rollout: Rollout,
  rewards: Rewards,
  advantage: Array,
  aggregate: Callable[[Array], Array] = weights.token_mean,
  *,
  keep: Array | None = None,
  old_logp: Array | None = None,
  extra: Mapping[str, Array] | None = None,
) -> Targets:
  """Returns what `learn` needs, with the mask applied once.

  Args:
    rollout: B rows of the whole batch.
    rewards: columns [B] or [B, U]; 'task' always.
    advantage: f32 [B] or [B, T].
    aggregate: mask [B, T] of the whole batch -> weight [B, T].
    keep: bool [B], further rows to leave out when False, for example
      truncated ones (`rollout.stop != Stop.LENGTH`); they leave the
      denominator too.
    old_logp: f32 [B, T]; None takes the loss's own first reading.
    extra: statistics for the loss, [B, ...] each.

  Returns:
    Targets; `observed` holds 0/1 per row under 'reward/missing' and
    'response/empty', and per group under 'groups/zero_variance'.
  """
  if advantage.ndim == 1:
    advantage = credit.broadcast(advantage, rollout.mask)
  valid = usable(rollout, rewards)
  kept = valid if keep is None else valid & keep
  mask = weights.keep_rows(rollout.mask, kept)
  observed = {
    'reward/missing': _missing(rewards).astype(jnp.float32),
    'response/empty': _empty(rollout).astype(jnp.float32),
    'groups/zero_variance': groups.reduce(
      _constant, rollout.groups, rewards['task'], valid=valid
    ),
  }
  return Targets(
    rollout=rollout,
    advantage=masked.fill(advantage, mask),
    weight=aggregate(mask),
    old_logp=old_logp,
    extra=extra or {},
    rewards=rewards,
    observed=observed,
  )


def _missing(rewards: Rewards) -> Array:
  """Returns which rows lack a reward in some column, bool [B]."""
  columns = [
    jnp.all(jnp.isfinite(column.reshape(column.shape[0], -1)), axis=1)
    for column in rewards.values()
  ]
  return ~jnp.all(jnp.stack(columns), axis=0)


def _empty(rollout: Rollout) -> Array:
  """Returns which rows have no token of the policy, bool [B]."""
  return masked.count(rollout.mask, 1) == 0.0


def _constant(reward: Array, valid: Array) -> Array:
  """Returns 1 if the valid rewards [G] are all equal, else 0."""
  low, high = masked.min(reward, valid), masked.max(reward, valid)
  return (low == high).astype(jnp.float32)
