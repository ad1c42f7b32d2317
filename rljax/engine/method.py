"""A method: what to sample, how to assign credit, what to maximize.

Every field defaults to GRPO, so that another method is the difference.
"""

from collections.abc import Callable, Mapping
import dataclasses
from typing import NamedTuple

import jax.numpy as jnp

from rljax.core import groups
from rljax.core.types import (
  Array,
  Metrics,
  Rewards,
  Rollout,
  Signals,
  Stop,
  Targets,
)
from rljax.engine.sampling import Phase
from rljax.objectives import advantages, divergences, surrogates, weights
from rljax.objectives import targets as targets_lib


class Ctl(NamedTuple):
  """Where a run stands; what schedules of a method read."""

  step: Array  # i32 [], rollout batches begun
  update: Array  # i32 [], optimizer updates applied
  progress: Array  # f32 [], step over the run's total, in [0, 1]


Coefficient = float | Callable[[Array], Array]  # a function of progress
CreditFn = Callable[[Rollout, Rewards, Signals, Ctl], Targets]
Stats = Mapping[str, Array]


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


def group_credit(
  advantage: Callable = advantages.grpo,
  aggregate: Callable[[Array], Array] = weights.sequence_mean_token_mean,
  *,
  ref: bool = False,
  mask_truncated: bool = False,
) -> CreditFn:
  """Returns credit by a group advantage, equal at all tokens of a row.

  Args:
    advantage: (reward [G], valid [G]) -> [G].
    aggregate: mask [B, T] -> weight [B, T], of the whole batch.
    ref: also read the reference's log-probs, for a KL penalty.
    mask_truncated: leave rows that hit the length limit out of the loss.
  """

  def assign(rollout, rewards, signals, ctl):
    del ctl
    adv = groups.apply(
      advantage,
      rollout.groups,
      rewards['task'],
      valid=targets_lib.usable(rollout, rewards),
    )
    return targets_lib.targets(
      rollout,
      rewards,
      adv,
      aggregate,
      keep=rollout.stop == Stop.TOKEN if mask_truncated else None,
      extra={'ref_logp': signals['ref'].logp} if ref else {},
    )

  return assign


def clipped(
  *,
  low: float = 0.2,
  high: float = 0.2,
  beta: Coefficient = 0.0,
  divergence: Callable[[Array, Array], Array] = divergences.k3,
) -> TokenLoss:
  """Returns the clipped surrogate minus beta times a sampled divergence.

  Args:
    low: how far below 1 the ratio may go.
    high: how far above 1.
    beta: coefficient of the divergence from 'ref'; 0 reads no reference.
    divergence: (logp [N], ref_logp [N]) -> [N].
  """

  def fn(stats, data, ctl):
    log_ratio = stats['logp'] - data['old_logp']
    adv = data['advantage']
    objective = surrogates.clip(log_ratio, adv, low=low, high=high)
    seen = {
      'clip/high': (log_ratio > jnp.log1p(high)) & (adv > 0),
      'clip/low': (log_ratio < jnp.log1p(-low)) & (adv < 0),
    }
    seen = {k: v.astype(jnp.float32) for k, v in seen.items()}
    if 'ref_logp' in data:
      kl = divergence(stats['logp'], data['ref_logp'])
      objective -= value_of(beta, ctl) * kl
      seen['kl/ref'] = kl
    return objective, seen

  return TokenLoss(fn)


@dataclasses.dataclass(frozen=True)
class Method:
  """What distinguishes one reinforcement-learning method from another.

  Attributes:
    phase: how rows are sampled.
    credit: rollout and rewards to targets; data, no gradient.
    loss: what `learn` differentiates.
    views: other readings of the responses that credit or loss may use.
    epochs: passes over each rollout.
    minibatches: updates per pass; prompts are dealt anew in each.
  """

  phase: Phase = Phase(max_tokens=64)
  credit: CreditFn = group_credit()
  loss: TokenLoss | RowLoss = clipped()
  views: Mapping[str, View] = dataclasses.field(default_factory=dict)
  epochs: int = 1
  minibatches: int = 1

  @property
  def updates(self) -> int:
    """Optimizer updates per rollout."""
    return self.epochs * self.minibatches
