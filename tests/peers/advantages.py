"""Advantages, critics and rewards of verl 0.9.1, and TRL's from beside.

verl gives a group of one its raw reward, sums rewards without the mask, and
counts empty rows; `_verl_group` puts those choices together from ours. Outside
the mask its arrays hold leftovers that nothing reads; `_standardized` and
`spans.carry` compute them too.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rljax.core import groups, masked
from rljax.objectives import (
  advantages,
  attempts,
  credit,
  divergences,
  shaping,
  spans,
  token_baselines,
  values,
  weights,
)
from tests.peers import golden, trl_rewards

Outputs = dict[str, Any]


def _padded(adapter: golden.Adapter) -> golden.Adapter:
  """Returns `adapter` on rows padded to one shape, so as to compile it once.

  Padding has mask 0 and group -1, that is none; 'there' says which are rows.
  """

  def adapt(case: golden.Case, file: golden.File) -> golden.Outputs:
    shapes = [x.shape for x in case.inputs.values() if x.ndim == 2]
    rows, tokens = shapes[0]
    inputs = {'there': np.ones(rows, bool), **case.inputs}
    if 'index' in inputs:
      ids = np.unique(inputs['index'], return_inverse=True)[1]
      inputs['index'] = ids.astype(np.int32) + 1
    widths = (0, max(16 - rows, 0)), (0, max(48 - tokens, 0))
    inputs = {k: np.pad(x, widths[: x.ndim]) for k, x in inputs.items()}
    if 'index' in inputs:
      inputs['index'] -= 1
    out = adapter(dataclasses.replace(case, inputs=inputs), file)
    cut = slice(rows), slice(tokens)
    return {k: np.asarray(x)[cut[: np.ndim(x)]] for k, x in out.items()}

  return adapt


def _rewards(case: golden.Case) -> np.ndarray:
  name = 'dense_rewards' if 'dense_rewards' in case.inputs else 'tok_rewards'
  return case.inputs[name]


@functools.partial(jax.jit, static_argnums=0)
def _by_group(fn: Callable, ids: jax.Array, *rows: jax.Array) -> jax.Array:
  """Returns `fn` of each group, at its rows, [B, ...]."""
  size = ids.shape[0]
  return groups.apply(fn, groups.from_ids(ids, size, size), *rows)


# One object for each setting, so that it is compiled once a shape.
_partial = functools.cache(functools.partial)


@functools.cache
def _verl_group(fn: Callable) -> Callable:
  """Returns `fn` of a group, and the raw reward of a group of one."""

  def group(reward, *data_and_valid):
    valid = data_and_valid[-1]
    alone = advantages.singleton(reward, valid)
    return fn(reward, *data_and_valid) + alone

  return group


def _outcome(fn: Callable, case: golden.Case, *rows: Any) -> jax.Array:
  """Returns the advantage of each row by verl's rules, [B]."""
  reward = _rewards(case).sum(1)
  return _by_group(_verl_group(fn), case.inputs['index'], reward, *rows)


def _spread(adv: jax.Array, case: golden.Case) -> Outputs:
  out = _broadcast(adv, case.inputs['mask'])
  return {'advantages': out, 'returns': out}


_broadcast = jax.jit(credit.broadcast)
_rpp_baseline_of = jax.jit(credit.reinforce_plus_plus_baseline)
_gpg_of = jax.jit(advantages.gpg)


def _grpo(case: golden.Case, file: golden.File) -> Outputs:
  del file
  fn = advantages.center
  if case.kwargs['norm_adv_by_std_in_grpo']:
    fn = _partial(advantages.zscore, ddof=1, eps=case.kwargs['epsilon'])
  return _spread(_outcome(fn, case), case)


def _passk(case: golden.Case, file: golden.File) -> Outputs:
  del file
  fn, scaled = attempts.best_margin, attempts.best_margin_zscore
  if case.kwargs['norm_adv_by_std_in_grpo']:
    fn = _partial(scaled, ddof=1, eps=case.kwargs['epsilon'])
  reward = _rewards(case).sum(1)
  return _spread(_by_group(fn, case.inputs['index'], reward), case)


def _rloo(case: golden.Case, file: golden.File) -> Outputs:
  del file
  return _spread(_outcome(advantages.leave_one_out, case), case)


def _rloo_vectorized(case: golden.Case, file: golden.File) -> Outputs:
  del file
  reward = _rewards(case).sum(1)
  adv = _by_group(advantages.leave_one_out, case.inputs['index'], reward)
  return _spread(adv, case)


def _opo(case: golden.Case, file: golden.File) -> Outputs:
  del file
  length = case.inputs['mask'].sum(1)
  return _spread(_outcome(advantages.opo, case, length), case)


def _gpg(case: golden.Case, file: golden.File) -> Outputs:
  del file
  adv, reward = _outcome(advantages.center, case), _rewards(case).sum(1)
  return _spread(_gpg_of(adv, reward, case.inputs['there']), case)


def _rpp_baseline(case: golden.Case, file: golden.File) -> Outputs:
  del file
  adv = _outcome(advantages.center, case)
  out = _rpp_baseline_of(adv, case.inputs['mask'])
  return {'advantages': out, 'returns': out}


def _gdpo(case: golden.Case, file: golden.File) -> Outputs:
  del file
  fn = _partial(advantages.gdpo, weights=(1.0,))
  reward = _rewards(case).sum(1)
  adv = _by_group(fn, case.inputs['index'], reward[:, None])
  adv = adv + _by_group(advantages.singleton, case.inputs['index'], reward)
  out = _rpp_baseline_of(adv, case.inputs['mask'])  # the same last step
  return {'advantages': out, 'returns': out}


def _rpp(case: golden.Case, file: golden.File) -> Outputs:
  del file
  mask, discount = case.inputs['mask'], case.kwargs['gamma']
  adv, returns = _rpp_of(_rewards(case), mask, discount)
  return {'advantages': adv, 'returns': returns}


@jax.jit
def _rpp_of(reward, mask, discount):
  adv = credit.reinforce_plus_plus(reward, mask, discount=discount)
  return adv, credit.reward_to_go(reward, mask, discount=discount)


def _remax(case: golden.Case, file: golden.File) -> Outputs:
  del file
  data = case.inputs
  return _remax_of(_rewards(case), data['reward_baselines'], data['mask'])


@jax.jit
def _remax_of(reward, baseline, mask):
  # verl drops rewards off the mask, and shows the return between turns.
  reward = masked.fill(reward, mask)
  returns = spans.carry(credit.reward_to_go(reward, mask), mask)
  adv = credit.remax(reward, baseline, mask)
  off = masked.fill(returns, mask == 0)
  return {'advantages': adv + off, 'returns': returns}


def _gae(case: golden.Case, file: golden.File) -> Outputs:
  del file
  data, kwargs = case.inputs, case.kwargs
  rest = data['mask'], kwargs['gamma'], kwargs['lam']
  return _gae_of(_rewards(case), data['values'], *rest)


@jax.jit
def _gae_of(reward, value, mask, discount, decay):
  adv = credit.gae(reward, value, mask, discount=discount, decay=decay)
  raw = spans.carry(adv, mask)
  returns = credit.lambda_return(
    reward, value, mask, discount=discount, decay=decay
  )
  off = masked.fill(raw + value, mask == 0)
  white = credit.whiten(adv, mask) + masked.fill(
    _standardized(raw, mask), mask == 0
  )
  return {
    'advantages': white,
    'returns': returns + off,
    'raw_advantages': raw,
  }


def _standardized(x: jax.Array, mask: jax.Array) -> jax.Array:
  """Returns what verl's whitening leaves outside the mask, [B, T]."""
  x = masked.fill(x, jnp.isfinite(x))
  away = x - masked.mean(x, mask)
  return away / jnp.sqrt(masked.variance(x, mask, ddof=1) + 1e-8)


def _token_baseline(case: golden.Case, file: golden.File) -> Outputs:
  del file
  return _optimal(case, packed=False)


def _turn_baseline(case: golden.Case, file: golden.File) -> Outputs:
  del file
  return _optimal(case, packed=True)


def _optimal(case: golden.Case, *, packed: bool) -> Outputs:
  data = case.inputs
  rollout = data['rollout_lp'] if case.kwargs['is_weights'] else data['old_lp']
  return _optimal_of(
    packed,
    bool(case.kwargs['handle_zero_tail']),
    case.inputs['index'],
    _rewards(case),
    data['old_lp'],
    rollout,
    data['sum_pi_sq'],
    data['mask'],
  )


@functools.partial(jax.jit, static_argnums=(0, 1))
def _optimal_of(packed, tail, ids, reward, logp, rollout, collision, mask):
  gap = masked.fill(logp, mask) - masked.fill(rollout, mask)
  energy = token_baselines.score_energy(logp, collision, mask)
  energy = energy * jnp.square(jnp.minimum(jnp.exp(gap), 2.0))
  returns = credit.reward_to_go(masked.fill(reward, mask), mask)
  size = ids.shape[0]
  # The multi-turn form leaves out rows without a token.
  valid = masked.count(mask, 1) > 0.0 if packed else jnp.ones(size, bool)
  fn = token_baselines.optimal_token_with_tail if tail else _no_tail
  fn = token_baselines.by_turn(fn) if packed else fn
  layout = groups.from_ids(ids, size, size)
  adv = token_baselines.apply(fn, layout, returns, energy, mask, valid=valid)
  return {'advantages': adv, 'returns': spans.carry(returns, mask)}


def _no_tail(returns, energy, mask, valid):
  """Returns verl's form without the tail: a group of one keeps its return."""
  baseline = token_baselines.optimal_baseline(returns, energy, mask, valid)
  alone = masked.count(valid) == 1.0
  return masked.fill(returns, mask) - jnp.where(alone, 0.0, baseline)


def _mean(case: golden.Case, file: golden.File) -> Outputs:
  del file
  return _mean_of(case.inputs['values'], case.inputs['mask'])


@jax.jit
def _mean_of(x, mask):
  return {'y': masked.mean(x, mask), 'y_axis': masked.mean(x, mask, -1)}


def _variance(case: golden.Case, file: golden.File) -> Outputs:
  del file
  return _variance_of(case.inputs['values'], case.inputs['mask'])


@jax.jit
def _variance_of(x, mask):
  return {'y': masked.variance(x, mask, ddof=1)}


def _whiten(case: golden.Case, file: golden.File) -> Outputs:
  del file
  return _whiten_of(case.inputs['values'], case.inputs['mask'])


@jax.jit
def _whiten_of(x, mask):
  off = masked.fill(_standardized(x, mask), mask == 0)
  mean = jnp.broadcast_to(masked.mean(x, mask), x.shape)
  shifted = off + masked.fill(mean, mask == 0)
  return {
    'y': masked.whiten(x, mask) + off,
    'y_noshift': shaping.rescale(x, mask) + shifted,
  }


_AGGREGATIONS = {
  'token-mean': weights.token_mean,
  'seq-mean-token-mean': weights.sequence_mean_token_mean,
}


def _value_loss(case: golden.Case, file: golden.File) -> Outputs:
  del file
  data, kwargs = case.inputs, case.kwargs
  target = data['values'] + data['dense_rewards']
  return _value_loss_of(
    kwargs['loss_agg_mode'],
    kwargs['cliprange_value'],
    data['vpreds'],
    data['values'],
    target,
    data['response_mask'],
  )


@functools.partial(jax.jit, static_argnums=(0, 1))
def _value_loss_of(mode, clip, value, old_value, target, mask):
  weight = _AGGREGATIONS[mode](mask)

  def loss(value):
    each = values.clipped(value, old_value, target, mask, clip=clip)
    return jnp.sum(each * weight)

  total, slope = jax.value_and_grad(loss)(value)
  active = values.clipping(value, old_value, target, mask, clip=clip)
  return {
    'loss': total,
    'grad_vpreds': slope,
    'clipfrac': masked.mean(active, mask),
  }


def _compute_rewards(case: golden.Case, file: golden.File) -> Outputs:
  del file
  data = case.inputs
  gap = data['old_log_prob'], data['ref_log_prob']
  # verl knows no mask here; what is not finite is left out.
  mask = np.isfinite(gap[0]) & np.isfinite(gap[1])
  reward = data['token_level_scores']
  return {'y': _penalized('kl', reward, *gap, mask, case.kwargs['kl_ratio'])[0]}


_KL = {
  'kl': divergences.k1,
  'abs': lambda logp, other: jnp.abs(divergences.k1(logp, other)),
  'mse': divergences.k2,
  'low_var_kl': lambda logp, other: jnp.minimum(
    divergences.k3(logp, other), 10.0
  ),
}


def _apply_kl_penalty(case: golden.Case, file: golden.File) -> Outputs:
  del file
  data, beta = case.inputs, case.kwargs['beta']
  reward, kl = _penalized(
    case.kwargs['kl_penalty'],
    data['token_level_scores'],
    data['old'],
    data['ref'],
    data['mask'],
    beta,
  )
  return {
    'token_level_rewards': reward,
    'actor/reward_kl_penalty': np.asarray(kl)[data['there']].mean(),
    'actor/reward_kl_penalty_coeff': beta,
  }


@functools.partial(jax.jit, static_argnums=0)
def _penalized(name, reward, logp, other, mask, beta):
  kl = _KL[name](logp, other)
  out = shaping.penalize_kl(reward, kl, mask, coefficient=beta)
  return out, masked.mean(kl, mask, 1)


_OF_ROWS = {
  'compute_grpo_outcome_advantage': _grpo,
  'compute_grpo_vectorized_outcome_advantage': _grpo,
  'compute_grpo_passk_outcome_advantage': _passk,
  'compute_rloo_outcome_advantage': _rloo,
  'compute_rloo_vectorized_outcome_advantage': _rloo_vectorized,
  'compute_opo_outcome_advantage': _opo,
  'compute_gpg_outcome_advantage': _gpg,
  'compute_reinforce_plus_plus_baseline_outcome_advantage': _rpp_baseline,
  'compute_reinforce_plus_plus_outcome_advantage': _rpp,
  'compute_remax_outcome_advantage': _remax,
  'compute_gae_advantage_return': _gae,
  'compute_gdpo_outcome_advantage': _gdpo,
  'compute_optimal_token_baseline_advantage': _token_baseline,
  'compute_multi_turn_optimal_token_baseline_advantage': _turn_baseline,
  'masked_mean': _mean,
  'masked_var': _variance,
  'masked_whiten': _whiten,
  'compute_value_loss': _value_loss,
  'compute_rewards': _compute_rewards,
  'apply_kl_penalty': _apply_kl_penalty,
}
ADAPTERS = {
  **{name: _padded(adapter) for name, adapter in _OF_ROWS.items()},
  **trl_rewards.ADAPTERS,
}
DECLARED = trl_rewards.DECLARED
