"""Policy losses and aggregations of verl 0.9.1.

Each of its losses is a surrogate times gates and weights without gradient,
summed with the weights of an aggregation. Where verl clamps no log-ratio, 80 is
where float32 still holds what follows. `gpg`, `cispo` and `dppo_*` report the
objective of log-probs in place of log-ratios.
"""

from collections.abc import Mapping
import functools
from typing import Any

import jax
import jax.numpy as jnp

from rljax.core import masked
from rljax.objectives import (
  corrections,
  divergences,
  ratios,
  surrogates,
  trust_regions,
  weights,
)
from tests.peers import correction, golden

_FAR = 80.0
_clamped = functools.partial(ratios.token, clamp=20.0)
_unclamped = functools.partial(ratios.token, clamp=_FAR)


def _vanilla(logp, old, adv, mask, numbers):
  """Returns the objective of each token, and verl's metrics."""
  log_ratio, clip = _clamped(logp, old, mask), _clip(numbers)
  free = surrogates.clip(log_ratio, adv, **clip)
  objective = surrogates.dual_clip(log_ratio, adv, **clip, cap=numbers['cap'])
  return objective, {
    'pg_clipfrac': _share(log_ratio, adv, mask, numbers),
    'ppo_kl': masked.mean(-log_ratio, mask),
    'pg_clipfrac_lower': masked.mean(free != objective, mask),
  }


def _gspo(logp, old, adv, mask, numbers):
  """Returns as `_vanilla`."""
  log_ratio = ratios.sequence_token(logp, old, mask, clamp=10.0)
  objective = surrogates.clip(log_ratio, adv, **_clip(numbers))
  return objective, {
    'pg_clipfrac': _share(log_ratio, adv, mask, numbers),
    'ppo_kl': masked.mean(-_unclamped(logp, old, mask), mask),
    'pg_clipfrac_lower': 0.0,
  }


def _sapo(logp, old, adv, mask, numbers):
  """Returns as `_vanilla`."""
  log_ratio = _clamped(logp, old, mask)
  tau = {name: numbers[name] for name in ('tau_pos', 'tau_neg')}
  return surrogates.sapo(log_ratio, adv, **tau), {
    'pg_clipfrac': 0.0,
    'ppo_kl': masked.mean(-log_ratio, mask),
    'pg_clipfrac_lower': 0.0,
  }


def _gpg(logp, old, adv, mask, numbers):
  """Returns as `_vanilla`; verl has no metrics here."""
  del old, numbers
  return surrogates.reinforce(masked.fill(logp, mask), adv), {}


def _cispo(logp, old, adv, mask, numbers):
  """Returns as `_vanilla`."""
  log_ratio = _clamped(logp, old, mask)
  band = 1.0 - numbers['low'], 1.0 + numbers['high']
  weight = corrections.truncate(log_ratio, mask, floor=band[0], cap=band[1])
  inside = corrections.keep_ratio(log_ratio, mask, low=band[0], high=band[1])
  return weight * surrogates.reinforce(masked.fill(logp, mask), adv), {
    'pg_clipfrac': masked.mean(1.0 - inside, mask),
    'ppo_kl': masked.mean(-log_ratio, mask),
    'pg_clipfrac_lower': 0.0,
  }


def _dppo(gate, logp, old, adv, mask, numbers):
  """Returns as `_vanilla`, with the gate of total variation or of KL."""
  log_ratio, cap = _clamped(logp, old, mask), numbers['cap']
  limits = {name: numbers[name] for name in ('low', 'high')}
  near = gate(logp, old, adv, mask, **limits)
  factor = near * corrections.truncate(log_ratio, mask, cap=cap)
  within = corrections.keep_ratio(log_ratio, mask, low=0.0, high=cap)
  return factor * surrogates.reinforce(masked.fill(logp, mask), adv), {
    'pg_clipfrac': masked.mean(1.0 - near, mask),
    'ppo_kl': masked.mean(-log_ratio, mask),
    'pg_clipfrac_lower': masked.mean((1.0 - within) * near, mask),
  }


def _clip_cov(logp, old, adv, mask, numbers):
  """Returns as `_vanilla`; all of `share` = 1 leaves nothing to chance."""
  log_ratio = _unclamped(logp, old, mask)
  kept = trust_regions.clip_cov(
    logp,
    old,
    adv,
    mask,
    scores=jnp.zeros_like(mask),
    share=numbers['clip_cov_ratio'],
    floor=numbers['clip_cov_lb'],
    cap=numbers['clip_cov_ub'],
    low=numbers['low'],
    high=numbers['high'],
  )
  objective = kept * surrogates.clip(log_ratio, adv, **_clip(numbers))
  return objective, {
    'pg_clipfrac': masked.mean(1.0 - kept, mask),
    'ppo_kl': masked.mean(-log_ratio, mask),
  }


def _kl_cov(logp, old, adv, mask, numbers):
  """Returns as `_vanilla`."""
  log_ratio = _unclamped(logp, old, mask)
  chosen = trust_regions.kl_cov(logp, adv, mask, share=numbers['kl_cov_ratio'])
  moved = divergences.absolute(masked.fill(logp, mask), masked.fill(old, mask))
  objective = surrogates.importance(log_ratio, adv, limit=_FAR)
  objective -= numbers['ppo_kl_coef'] * chosen * moved
  return objective, {'ppo_kl': masked.mean(moved, mask)}


def _geo_mean(logp, old, adv, mask, numbers):
  """Returns as `_vanilla`; its fractions count both sides of the range."""
  low, high = numbers['low'], numbers['high']
  mean = ratios.geometric_mean(logp, old, mask, adv, low=low, high=high)
  each = _unclamped(logp, old, mask)
  band = {'low': jnp.exp(-low), 'high': jnp.exp(high)}
  outside = 1.0 - corrections.keep_ratio(each, mask, **band)
  return surrogates.importance(mean, adv, limit=_FAR), {
    'pg_clipfrac': masked.mean(outside * (adv > 0.0), mask),
    'ppo_kl': masked.mean(-each, mask),
    'pg_clipfrac_lower': masked.mean(outside * (adv < 0.0), mask),
  }


def _dro(logp, old, adv, mask, numbers):
  """Returns as `_vanilla`."""
  log_ratio = _unclamped(logp, old, mask)
  objective = surrogates.dro(log_ratio, adv, beta=numbers['dro_beta'])
  objective += surrogates.reinforce(masked.fill(old, mask), adv)
  return objective, {'ppo_kl': masked.mean(-log_ratio, mask)}


def _clip(numbers) -> dict[str, Any]:
  return {'low': numbers['low'], 'high': numbers['high'], 'limit': _FAR}


def _share(log_ratio, adv, mask, numbers):
  """Returns the share of tokens that the clip holds."""
  limits = {name: numbers[name] for name in ('low', 'high')}
  return masked.mean(trust_regions.clipped(log_ratio, adv, **limits), mask)


_LOSSES = {
  'vanilla': _vanilla,
  'gspo': _gspo,
  'sapo': _sapo,
  'gpg': _gpg,
  'cispo': _cispo,
  'dppo_tv': functools.partial(_dppo, trust_regions.dppo_tv),
  'dppo_kl': functools.partial(_dppo, trust_regions.dppo_kl),
  'clip_cov': _clip_cov,
  'kl_cov': _kl_cov,
  'geo_mean': _geo_mean,
  'dro': _dro,
}


@functools.partial(jax.jit, static_argnums=0)
def _compute(kind: str, numbers, logp, old, behavior, adv, mask, weight):
  """Returns loss, gradient and metrics under the weights of an aggregation."""
  adv = masked.fill(adv, mask)
  drawn = _unclamped(old, behavior, mask)
  if kind == 'geo_mean':
    # The geometric mean of the row's truncated weights.
    drawn = jnp.minimum(drawn, jnp.log(numbers['is_cap']))
    drawn = corrections.sequence_mean(drawn, mask)
  factor = corrections.truncate(drawn, mask, cap=numbers['is_cap'])
  factor = jnp.where(numbers['corrected'], factor, 1.0)

  def loss(logp):
    objective, metrics = _LOSSES[kind](logp, old, adv, mask, numbers)
    return -jnp.sum(objective * factor * weight), metrics

  (value, metrics), slope = jax.value_and_grad(loss, has_aux=True)(logp)
  named = {f'actor/{name}': metric for name, metric in metrics.items()}
  return {'loss': value, 'grad_lp': slope, **named}


def _numbers(kwargs: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the numbers of a configuration, to be traced."""
  skipped = ('loss_agg_mode', 'global_batch_info', 'rollout_is_weights')
  names = {
    'clip_ratio_low': 'low',
    'clip_ratio_high': 'high',
    'clip_ratio_c': 'cap',
  }
  numbers = {
    names.get(name, name): value
    for name, value in kwargs.items()
    if name not in skipped
  }
  corrected = kwargs['rollout_is_weights']
  if corrected not in (None, 'clip(exp(old_lp-rollout_lp),max=2)*mask'):
    raise ValueError(f'rollout_is_weights={corrected}')
  return {**numbers, 'corrected': corrected is not None, 'is_cap': 2.0}


def loss(case: golden.Case, file: golden.File) -> golden.Outputs:
  """Any of the functions compute_policy_loss_*."""
  del file
  names = ('log_prob', 'old_log_prob', 'rollout_lp', 'advantages')
  mask, kwargs = case.inputs['response_mask'], case.kwargs
  (there, *arrays, wide), cut = correction.padded(
    *(case.inputs[name] for name in names), mask
  )
  kind = case.fn.removeprefix('compute_policy_loss_')
  mode, size = kwargs['loss_agg_mode'], mask.shape[1]
  if kind == 'geo_mean':
    # verl averages over all rows, whatever the configuration says.
    weight = _of_all_rows(there, wide)
  else:
    mode = 'seq-mean-token-mean' if kind == 'sapo' else mode
    weight = _weight(mode, wide, size, **kwargs['global_batch_info'])
  out = cut(_compute(kind, _numbers(kwargs), *arrays, wide, weight))
  if kind == 'gspo':
    # verl multiplies with the mask: NaN outside it spoils the mean of a row.
    out |= golden.spoiled_rows(
      case.inputs['log_prob'] - case.inputs['old_log_prob']
    )
  return out


@jax.jit
def _of_all_rows(there, mask):
  return weights.sequence_token_mean(mask, sequences=masked.count(there))


def _weight(
  mode: str,
  mask,
  size: int,
  *,
  dp_size: int = 1,
  batch_num_tokens: int | None = None,
  global_batch_size: int | None = None,
  loss_scale_factor: int | None = None,
):
  """Returns the weights of a part of a batch whose gradients are averaged.

  Without global counts those of the part count, where verl refuses to have
  more than one part.
  """
  if mode == 'token-mean':
    count = batch_num_tokens
  else:
    count = global_batch_size
  if mode == 'token-sum':
    count = 1.0
  scale = float(loss_scale_factor or size)
  if count is None:
    return _of_part(mode, mask, scale) * dp_size
  return _of_whole(mode, mask, count / dp_size, scale)


@functools.partial(jax.jit, static_argnums=0)
def _of_part(mode: str, mask, scale):
  """Returns the weights with the counts of the mask."""
  if mode == 'seq-mean-token-sum-norm':
    return weights.sequence_mean_token_sum_norm(mask, scale=scale)
  return {
    'token-mean': weights.token_mean,
    'seq-mean-token-sum': weights.sequence_mean_token_sum,
    'seq-mean-token-mean': weights.sequence_mean_token_mean,
  }[mode](mask)


@functools.partial(jax.jit, static_argnums=0)
def _of_whole(mode: str, mask, count, scale):
  """Returns the weights with given counts."""
  if mode == 'seq-mean-token-mean':
    return weights.sequence_token_mean(mask, sequences=count)
  if mode == 'seq-mean-token-sum-norm':
    count *= scale
  return weights.constant(mask, denominator=count)


@jax.jit
def _sum(values, mask, weight):
  return masked.sum(masked.fill(values, mask) * weight, mask)


def aggregate(case: golden.Case, file: golden.File) -> golden.Outputs:
  """agg_loss."""
  del file
  values, mask = case.inputs['loss_mat'], case.inputs['loss_mask']
  (_, values, wide), _ = correction.padded(values, mask)
  settings = dict(case.kwargs)
  mode = settings.pop('loss_agg_mode')
  weight = _weight(mode, wide, mask.shape[1], **settings)
  return {'loss': _sum(values, wide, weight)}


ADAPTERS = {
  'agg_loss': aggregate,
  **{f'compute_policy_loss_{kind}': loss for kind in _LOSSES},
}
DECLARED = {}
