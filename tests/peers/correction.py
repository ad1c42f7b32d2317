"""Corrections of the sampler and meters of mismatch: verl's cases.

verl's rejection tests named `*_k1` hold -log ρ in a band, so the numbers of
the band bound 1 / ρ; the composition here does the same. Its means over rows
count empty rows, with ratio and perplexity 1.
"""

from collections.abc import Callable
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rljax.core import masked
from rljax.objectives import (
  corrections,
  divergences,
  mismatch,
  ratios,
  surrogates,
  weights,
)
from tests.peers import golden

_LEVELS = {'token': ratios.token, 'sequence': ratios.sequence_sum}
_NORMALIZED = {
  'token': corrections.normalize_tokens,
  'sequence': corrections.normalize_rows,
}
_SPREADS = {
  'token': lambda statistic, mask: masked.fill(statistic, mask),
  'seq_sum': corrections.sequence_sum,
  'seq_mean': corrections.sequence_mean,
  'seq_max': corrections.sequence_max,
}
_ESTIMATES = {'k2': divergences.k2, 'k3': divergences.k3}
_ROWS, _TOKENS = 16, 48


def padded(*arrays: np.ndarray) -> tuple[list[np.ndarray], Callable]:
  """Returns arrays [B, T] at a common shape, and what cuts outputs back.

  A program is compiled once for all fixtures: padding has mask 0, and the first
  returned array, bool [B], says which rows there are.
  """
  rows, tokens = arrays[0].shape
  wide = (-rows % _ROWS, -tokens % _TOKENS)
  out = [np.pad(x, ((0, wide[0]), (0, wide[1]))) for x in arrays]
  there = np.arange(rows + wide[0]) < rows

  def cut(outputs):
    at = (slice(rows), slice(tokens))
    return {k: np.asarray(x)[at[: np.ndim(x)]] for k, x in outputs.items()}

  return [there, *out], cut


def _band(spec: str | float) -> tuple[float | None, float]:
  """Returns (low or None, high) of '0.5_5.0', '2.0' or 2.0."""
  low, _, high = str(spec).rpartition('_')
  return (float(low) if low else None), float(high)


def _weight(log_ratio, mask, low, high):
  """Returns verl's weights: truncated, or IcePop for a band."""
  if low is None:
    return corrections.truncate(log_ratio, mask, cap=high)
  return corrections.icepop(log_ratio, mask, low=low, high=high)


def _tests(names: str, specs: str | float):
  """Returns names of tests, and (low, high) of each."""
  each, bands = names.split(','), str(specs).split(',')
  bands = bands * len(each) if len(bands) == 1 else bands
  return tuple(each), [_band(band) for band in bands]


def _rejected(log_ratio, mask, names: tuple[str, ...], bands):
  """Returns the mask after all rejection tests."""
  kept = mask
  for name, (low, high) in zip(names, bands, strict=True):
    kept *= _kept(log_ratio, mask, name, low, high)
  return kept


def _kept(log_ratio, mask, name: str, low, high):
  """Returns the mask after one rejection test."""
  spread = _SPREADS[name[:-3]]
  if name.endswith('k1'):
    # 1 / ρ in [low, high], where low is 1 / high if it is not given.
    most = high if low is None else 1.0 / low
    level = spread(log_ratio, mask)
    return corrections.keep_ratio(level, mask, low=1.0 / high, high=most)
  statistic = _ESTIMATES[name[-2:]](jnp.zeros_like(log_ratio), log_ratio)
  return corrections.keep_below(spread(statistic, mask), mask, limit=high)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _importance(level: str, normalize: bool, low, high, old, behavior, mask):
  log_ratio = _LEVELS[level](old, behavior, mask)
  weight = _weight(log_ratio, mask, low, high)
  out = {
    'rollout_is_mean': masked.mean(weight, mask),
    'rollout_is_eff_sample_size': mismatch.effective_share(weight, mask),
  }
  if low is not None:
    out['rollout_is_oob_ratio'] = mismatch.outside_share(
      log_ratio, mask, low=low, high=high
    )
  out['weights'] = _NORMALIZED[level](weight, mask) if normalize else weight
  return out


def importance(case: golden.Case, file: golden.File) -> golden.Outputs:
  """compute_rollout_correction_weights."""
  del file
  (_, *arrays), cut = padded(
    case.inputs['old_log_prob'],
    case.inputs['rollout_log_prob'],
    case.inputs['response_mask'],
  )
  level = case.kwargs['rollout_is']
  normalize = case.kwargs['rollout_is_batch_normalize']
  band = _band(case.kwargs['rollout_is_threshold'])
  return cut(_importance(level, normalize, *band, *arrays))


@functools.partial(jax.jit, static_argnums=0)
def _rejection(names: tuple[str, ...], bands, there, old, behavior, mask):
  log_ratio = ratios.token(old, behavior, mask)
  kept = _rejected(log_ratio, mask, names, bands)
  share = masked.count(masked.count(mask, 1)) / masked.count(there)
  return {
    'mask': kept,
    'rollout_rs_masked_fraction': mismatch.masked_share(kept, mask),
    'rollout_rs_seq_masked_fraction': (
      mismatch.touched_share(kept, mask) * share
    ),
  }


def rejection(case: golden.Case, file: golden.File) -> golden.Outputs:
  """compute_rollout_rejection_mask."""
  del file
  arrays, cut = padded(
    case.inputs['old_log_prob'],
    case.inputs['rollout_log_prob'],
    case.inputs['response_mask'],
  )
  tests = _tests(case.kwargs['rollout_rs'], case.kwargs['rollout_rs_threshold'])
  return cut(_rejection(*tests, *arrays))


@jax.jit
def _meters(there, old, behavior, mask):
  bounded = ratios.token(old, behavior, mask)
  unbounded = ratios.token(old, behavior, mask, clamp=80.0)
  sums = masked.sum(unbounded, mask, 1)
  mine = mismatch.log_perplexity(old, mask)
  other = mismatch.log_perplexity(behavior, mask)
  gap = mine - other
  return {
    'training_ppl': masked.mean(jnp.exp(mine), there),
    'training_log_ppl': masked.mean(mine, there),
    'rollout_ppl': masked.mean(jnp.exp(other), there),
    'rollout_log_ppl': masked.mean(other, there),
    'kl': mismatch.kl(old, behavior, mask),
    'k3_kl': mismatch.k3(unbounded, mask),
    'log_ppl_diff': masked.mean(gap, there),
    'log_ppl_abs_diff': masked.mean(jnp.abs(gap), there),
    'log_ppl_diff_max': masked.max(gap, there),
    'log_ppl_diff_min': masked.min(gap, there),
    'ppl_ratio': masked.mean(jnp.exp(gap), there),
    'chi2_token': mismatch.chi_square(bounded, mask),
    'chi2_seq': mismatch.chi_square(jnp.clip(sums, -20.0, 20.0), there),
  }


def meters(case: golden.Case, file: golden.File) -> golden.Outputs:
  """compute_offpolicy_metrics."""
  del file
  arrays, cut = padded(
    case.inputs['old_log_prob'],
    case.inputs['rollout_log_prob'],
    case.inputs['response_mask'],
  )
  return cut(_meters(*arrays))


@functools.cache
def _bypass(settings: tuple[tuple[str, Any], ...]):
  """Returns the loss and gradient without a separate old policy."""
  config = dict(settings)

  def objective(log_ratio, logp, behavior, adv, mask):
    if config['loss_type'] == 'ppo_clip':
      clip, cap = config['clip'], config['c']
      return surrogates.dual_clip(log_ratio, adv, low=clip, high=clip, cap=cap)
    found = surrogates.reinforce(masked.fill(logp, mask), adv)
    if config.get('rollout_is') is None:
      return found
    level = _LEVELS[config['rollout_is']](logp, behavior, mask)
    low, high = _band(config['rollout_is_threshold'])
    return found * _weight(level, mask, low, high)

  def loss(logp, behavior, adv, mask):
    log_ratio, kept = ratios.token(logp, behavior, mask), mask
    if config.get('rollout_rs'):
      tests = _tests(config['rollout_rs'], config['rollout_rs_threshold'])
      kept = _rejected(log_ratio, mask, *tests)
    adv = masked.fill(adv, mask)
    found = objective(log_ratio, logp, behavior, adv, mask)
    return -jnp.sum(found * weights.token_mean(kept))

  return jax.jit(jax.value_and_grad(loss))


def bypass(case: golden.Case, file: golden.File) -> golden.Outputs:
  """compute_policy_loss_bypass_mode."""
  del file
  if case.kwargs['loss_agg_mode'] != 'token-mean':
    raise ValueError(f'loss_agg_mode={case.kwargs["loss_agg_mode"]}')
  (there, logp, behavior, adv, mask), cut = padded(
    case.inputs['log_prob'],
    case.inputs['old_log_prob(=rollout)'],
    case.inputs['advantages'],
    case.inputs['response_mask'],
  )
  compute = _bypass(tuple(sorted(case.kwargs.items())))
  loss, slope = compute(logp, behavior, adv, mask)
  found = _meters(there, logp, behavior, mask)
  named = {f'rollout_corr/{name}': value for name, value in found.items()}
  return cut({**named, 'loss': loss, 'grad_lp': slope})


ADAPTERS = {
  'compute_rollout_correction_weights': importance,
  'compute_rollout_rejection_mask': rejection,
  'compute_offpolicy_metrics': meters,
  'compute_policy_loss_bypass_mode': bypass,
}
DECLARED = {}
