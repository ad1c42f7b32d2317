"""Methods of `objectives.presets`, on the seams of the step."""

from typing import Any

import jax
import jax.numpy as jnp

from rljax.core import groups as groups_lib
from rljax.core import masked
from rljax.core.types import Array, Mean, Rewards, Rollout, Signals
from rljax.engine import seams
from rljax.engine.method import Method
from rljax.objectives import divergences, presets, weights
from rljax.objectives import targets as targets_lib


def method(preset: presets.Preset, **fields: Any) -> Method:
  """Returns a preset as a method, whose views name a reference if it has one.

  Args:
    preset: what to assign and to maximize.
    **fields: others of `Method`, such as phase or epochs.
  """
  views = {'ref': seams.View('ref')} if reads_reference(preset) else {}
  return Method(credit=credit(preset), loss=loss(preset), views=views, **fields)


def reads_reference(preset: presets.Preset) -> bool:
  """Returns whether credit or loss reads the log-probs of 'ref'."""
  return preset.reward_kl or bool(preset.penalty and preset.beta)


def credit(preset: presets.Preset) -> seams.CreditFn:
  """Returns the credit of a preset.

  Where it corrects for the sampler or has a divergence in the reward, the
  policy is read; with one update and one micro-batch that is the reading of the
  loss.
  """

  def assign(rollout: Rollout, rewards: Rewards, signals: Signals, ctl):
    del ctl
    valid, reward = targets_lib.usable(rollout, rewards), rewards['task']
    if preset.shape is not None:
      reward += preset.shape(rollout.length)
    adv = preset.credit(
      reward,
      rollout.groups,
      valid,
      weights.keep_rows(rollout.mask, valid),
      _reward_kl(preset, signals),
    )
    return targets_lib.targets(
      rollout,
      rewards,
      adv,
      lambda mask: preset.aggregate(mask, rollout.groups),
      keep=_keep(preset, rollout, rewards, valid),
      extra=_extra(preset, rollout, signals),
    )

  return assign


def loss(preset: presets.Preset) -> seams.TokenLoss | seams.RowLoss:
  """Returns the loss of a preset, over tokens if its ratio lets it."""
  return _row_loss(preset) if preset.rows else _token_loss(preset)


def _token_loss(preset: presets.Preset) -> seams.TokenLoss:
  def fn(stats, data, ctl):
    del ctl
    objective, kl = preset.objective(
      stats['logp'],
      data['old_logp'],
      data['advantage'],
      jnp.ones_like(stats['logp']),
      ref_logp=data.get('ref_logp'),
      factor=data.get('factor'),
    )
    return objective, {'kl/ref': kl} if 'ref_logp' in data else {}

  return seams.TokenLoss(fn)


def _row_loss(preset: presets.Preset) -> seams.RowLoss:
  def fn(signals, targets, ctl):
    del ctl
    read, mask = signals['policy'], targets.weight != 0
    old = targets.old_logp
    objective, kl = preset.objective(
      read.logp,
      # On the first update the old policy is the one that is being read.
      jax.lax.stop_gradient(read.logp) if old is None else old,
      targets.advantage,
      mask,
      ref_logp=targets.extra.get('ref_logp'),
      factor=targets.extra.get('factor'),
    )
    seen = {'entropy': read.entropy}
    if 'ref_logp' in targets.extra:
      seen['kl/ref'] = kl
    count = masked.count(mask)
    metrics = {
      name: Mean(total=masked.sum(x, mask), count=count)
      for name, x in seen.items()
    }
    return -jnp.sum(objective * targets.weight), metrics

  return seams.RowLoss(fn)


def _reward_kl(preset: presets.Preset, signals: Signals) -> Array | None:
  """Returns k1 of the policy from the reference, f32 [B, T], if it is read."""
  if not preset.reward_kl:
    return None
  return divergences.k1(signals['policy'].logp, signals['ref'].logp)


def _keep(
  preset: presets.Preset, rollout: Rollout, rewards: Rewards, valid: Array
) -> Array | None:
  """Returns which rows are of groups that count, bool [B]."""
  rule = preset.keep
  if rule is None:
    return None

  def members(reward: Array, valid: Array) -> Array:
    return jnp.broadcast_to(rule(reward, valid), valid.shape)

  return groups_lib.apply(members, rollout.groups, rewards['task'], valid=valid)


def _extra(
  preset: presets.Preset, rollout: Rollout, signals: Signals
) -> dict[str, Array]:
  """Returns what the loss reads beside advantages, f32 [B, T] each."""
  extra = {}
  if preset.penalty and preset.beta:
    extra['ref_logp'] = signals['ref'].logp
  if preset.correct is not None:
    extra['factor'] = preset.correct(
      signals['policy'].logp, rollout.logp_full, rollout.mask
    )
  return extra
