"""Dynamic sampling: a batch filled with groups to learn from.

Groups of equal rewards teach nothing. They are replaced by groups of further
batches: those that pass take the places of a batch in the order in which they
were drawn, on any mesh, and what is over when no place is left is dropped. All
shapes are those of one batch.

Yu et al., "DAPO: An Open-Source LLM Reinforcement Learning System at Scale",
2025, arXiv:2503.14476.
"""

from collections.abc import Callable
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rljax.core import groups, masked
from rljax.core.types import Array, Mean, Rewards, Rollout
from rljax.engine import seams
from rljax.objectives import selection
from rljax.objectives import targets as targets_lib


class Filled(NamedTuple):
  """A batch that is being filled, and what the last groups were like."""

  rollout: Rollout
  rewards: Rewards
  passed: Array  # i32 [], groups of the last batch that passed
  reward: Mean  # of all rows of the last batch


def by_group(
  rule: Callable[[Array, Array], Array] = selection.varies,
) -> seams.Keep:
  """Returns a rule of one group's rewards as a rule of rollouts.

  Args:
    rule: (reward f32 [G], valid bool [G]) -> bool []; rows without a reward or
      a token are not valid.
  """

  def keep(rollout: Rollout, rewards: Rewards) -> Array:
    valid = targets_lib.usable(rollout, rewards)
    return groups.reduce(rule, rollout.groups, rewards['task'], valid=valid)

  return keep


def fill(
  keep: seams.Keep,
  held: tuple[Rollout, Rewards],
  drawn: tuple[Rollout, Rewards],
  taken: Array,
) -> Filled:
  """Puts the groups that pass where places are left.

  Rows must be contiguous by prompt and of equal number. A batch of which all
  groups pass fills an empty one as it is.

  Args:
    keep: which groups pass.
    held: P groups, of which the first `taken` stay; others have no meaning.
    drawn: P groups.
    taken: i32 [].

  Returns:
    The batch; its first `taken + passed` places are filled, at most P.
  """
  passes = keep(*drawn)
  passed = jnp.sum(passes.astype(jnp.int32))
  prompts = passes.shape[0]
  place = jnp.arange(prompts, dtype=jnp.int32) - taken
  fresh = (place >= 0) & (place < passed)
  order = jnp.argsort(~passes, stable=True)
  source = order[jnp.clip(place, 0, prompts - 1)]
  rollout, rewards = _merge(fresh, source, held, drawn)
  column = drawn[1]['task']
  there = jnp.isfinite(column)
  reward = Mean(
    total=masked.sum(column, there), count=jnp.sum(there.astype(jnp.float32))
  )
  return Filled(rollout, rewards, passed, reward)


def _merge(fresh: Array, source: Array, held, drawn):
  """Returns `held` with the groups `source` of `drawn` where `fresh`, [P]."""
  prompts = fresh.shape[0]

  def by_prompt(old: Array, new: Array) -> Array:
    where = fresh.reshape(-1, *(1,) * (old.ndim - 1))
    return jnp.where(where, new[source], old)

  def by_row(old: Array, new: Array) -> Array:
    shape = prompts, old.shape[0] // prompts, *old.shape[1:]
    found = by_prompt(old.reshape(shape), new.reshape(shape))
    return found.reshape(old.shape)

  old, new = held[0], drawn[0]
  rows = jax.tree.map(by_row, _rows(old), _rows(new))
  rollout = dataclasses.replace(
    rows,
    prompts=jax.tree.map(by_prompt, old.prompts, new.prompts),
    data=jax.tree.map(by_prompt, dict(old.data), dict(new.data)),
    groups=old.groups,
    prompt_of=old.prompt_of,
  )
  return rollout, jax.tree.map(by_row, dict(held[1]), dict(drawn[1]))


def _rows(rollout: Rollout) -> Any:
  """Returns a rollout with its arrays [B, ...] alone."""
  absent: dict[str, Any] = {'prompts': None, 'groups': None, 'prompt_of': None}
  return dataclasses.replace(rollout, data={}, **absent)
