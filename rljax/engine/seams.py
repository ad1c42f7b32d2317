"""The seams of a method: the types of what it may replace."""

from collections.abc import Callable, Mapping
import dataclasses
from typing import NamedTuple

import jax.numpy as jnp

from rljax.core.types import Array, Metrics, Rewards, Rollout, Signals, Targets


class Ctl(NamedTuple):
  """Where a run stands; what schedules of a method read."""

  step: Array  # i32 [], rollout batches begun
  update: Array  # i32 [], optimizer updates applied
  progress: Array  # f32 [], step over the run's total, in [0, 1]


Coefficient = float | Callable[[Array], Array]  # a function of progress
CreditFn = Callable[[Rollout, Rewards, Signals, Ctl], Targets]
Stats = Mapping[str, Array]
Keep = Callable[[Rollout, Rewards], Array]  # -> bool [P], groups that may stay


@dataclasses.dataclass(frozen=True)
class View:
  """A reading of the responses by another model: `params` names it."""

  params: str


@dataclasses.dataclass(frozen=True)
class TokenLoss:
  """An objective that is separable over tokens.

  `fn(stats, data, ctl)` gets mappings of f32 [N]: the statistics `logp`, `lse`
  and `entropy` of the policy, and as data `advantage`, `old_logp`,
  `behavior_logp` and the [B, T] arrays of `Targets.extra`. It returns the
  objective, f32 [N], to be maximized, and a mapping of f32 [N] whose means are
  logged. Gradients are taken in the forward pass; tokens of weight 0 are not
  read.
  """

  fn: Callable[[Stats, Stats, Ctl], tuple[Array, dict[str, Array]]]


@dataclasses.dataclass(frozen=True)
class RowLoss:
  """A loss over whole rows, or coupled over rows or the vocabulary.

  `fn(signals, targets, ctl)` returns the loss, a **sum** f32 [], and metrics.
  It is differentiated in `signals['policy']`.
  """

  fn: Callable[[Signals, Targets, Ctl], tuple[Array, Metrics]]


def value_of(coefficient: Coefficient, ctl: Ctl) -> Array:
  """Returns the coefficient at this point of the run, f32 []."""
  if callable(coefficient):
    return coefficient(ctl.progress)
  return jnp.float32(coefficient)
