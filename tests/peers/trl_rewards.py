"""Advantages of TRL 1.16.0's GRPO and RLOO trainers, from their rewards."""

from collections.abc import Mapping
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rljax.core import groups, masked
from rljax.objectives import advantages, divergences, shaping
from tests.peers import golden

Outputs = dict[str, Any]
_EPS = 1e-4  # added to TRL's standard deviations


def _nanstd(case: golden.Case, file: golden.File) -> Outputs:
  del file
  x = jnp.asarray(case.outputs['x'])  # the peer's input, kept as an output
  there = jnp.isfinite(x)
  return {'x': masked.fill(x, there), 'y': masked.std(x, there, ddof=1)}


def grpo_advantages(case: golden.Case, file: golden.File) -> Outputs:
  """Returns the advantages of TRL's GRPO trainer from its rewards."""
  del file
  kwargs, reward = case.kwargs, case.outputs['rewards']
  out = _advantages_of(
    kwargs['multi_objective_aggregation'],
    kwargs['scale_rewards'],
    tuple(kwargs['reward_weights']),
    kwargs['num_generations'],
    reward,
  )
  out['rewards'] = np.where(np.isfinite(reward), reward, 0.0)
  return out


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _advantages_of(aggregation, scaling, weight, size, reward):
  each = shaping.weighted_sum(reward, weights=weight)
  valid = jnp.isfinite(each)
  layout = groups.uniform(reward.shape[0] // size, size)
  settings: Mapping[str, Any] = {'ddof': 1, 'eps': _EPS}
  if aggregation == 'normalize_then_sum':
    fn = functools.partial(advantages.gdpo, weights=weight, **settings)
    adv = groups.apply(fn, layout, reward, valid=valid)
    adv = advantages.zscore(adv, valid, **settings)
  elif scaling == 'group':
    fn = functools.partial(advantages.zscore, **settings)
    adv = groups.apply(fn, layout, each)
  else:
    adv = groups.apply(advantages.center, layout, each)
    if scaling == 'batch':
      adv = advantages.scale(adv, each, valid, **settings)
  return {
    'advantages': adv,
    'reward': masked.mean(each, valid),
    'reward_std': masked.std(each, valid, ddof=1),
  }


def _rloo(case: golden.Case, file: golden.File) -> Outputs:
  kwargs = case.kwargs
  scored = case
  if 'per_token_logps' not in case.outputs:
    # Without a penalty the peer keeps the log-probs of rows alone.
    scored = next(
      other
      for other in file.cases
      if other.fn == case.fn and 'per_token_logps' in other.outputs
    )
  logp, ref, mask = (
    scored.outputs[name]
    for name in ('per_token_logps', 'ref_per_token_logps', 'completion_mask')
  )
  reward = np.array(kwargs['rewards'], np.float32)
  if kwargs['reward_clip_range']:
    reward = np.clip(reward, *kwargs['reward_clip_range'])
  out = _rloo_of(
    kwargs['normalize_advantages'],
    float(kwargs['beta']),
    kwargs['num_generations'],
    reward,
    logp,
    ref,
    mask,
  )
  return {
    **out,
    'per_token_logps': logp,
    'ref_per_token_logps': ref,
    'completion_mask': mask,
  }


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _rloo_of(normalize, beta, size, reward, logp, ref, mask):
  kl = divergences.k1(logp, ref)
  reward = shaping.penalize_row_kl(reward, kl, mask, coefficient=beta)
  layout = groups.uniform(reward.shape[0] // size, size)
  adv = groups.apply(advantages.leave_one_out, layout, reward)
  if normalize:
    # A row without peers leaves the statistics of the batch.
    ones = jnp.where(jnp.isfinite(reward), 1.0, jnp.nan)
    alone = groups.apply(advantages.singleton, layout, ones)
    valid = jnp.isfinite(reward) & (alone == 0.0)
    adv = advantages.zscore(adv, valid, ddof=1, eps=_EPS)
  out = {'advantages': adv, 'old_logps': masked.sum(logp, mask, 1)}
  return {**out, 'kl': masked.mean(kl, mask)} if beta else out


ADAPTERS = {
  'nanstd': _nanstd,
  'GRPOTrainer._generate_and_score_completions': grpo_advantages,
  'RLOOTrainer._generate_and_score_completions': _rloo,
}
_MEAN = golden.Declared(
  ('advantages',),
  'TRL takes the mean of 0.3, 0.3, 0.3 and 0.30001 in float32, 7.5e-9 off;'
  ' over a deviation of 5.0e-6 + 1e-4 that is 7.1e-5. float64 of the same'
  ' rewards gives -0.0237727 and 0.0713182, as we do.',
)
_EQUAL = golden.Declared(
  ('advantages',),
  'TRL takes the baseline as (sum - r) / 3 in float32, so that the mean of all'
  ' advantages is 5e-9 off; over a deviation of 3.4e-6 + 1e-4 that is 4.8e-5,'
  ' also for groups of equal rewards. float64 of the same rewards gives 0,'
  ' -0.0321614 and 0.0964841, as we do.',
)
_GROUP = 'trl/adv/float_equal/group/sum_then_normalize/w1.0'
_RLOO = 'trl/rloo_adv/float_equal/norm1/beta0.0'
DECLARED = {
  _GROUP: _MEAN,
  f'{_RLOO}/clip0': _EQUAL,
  f'{_RLOO}/clip1': _EQUAL,
}
