"""Losses, masks and weights of TRL 1.16.0.

Its losses are compositions: a level of the ratio, a surrogate, gates that leave
the denominator alone, a KL penalty outside the gates, and weights. TRL clamps
no log-ratio; 80 is where float32 still holds what follows.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rljax.core import masked, types
from rljax.models import decoder, families
from rljax.objectives import (
  corrections,
  credit,
  divergences,
  mismatch,
  ratios,
  selection,
  surrogates,
  trust_regions,
  weights,
)
import rljax_kernels
from tests.peers import advantages, correction, golden

_FAR = 80.0
_LEVELS = {
  'token': functools.partial(ratios.token, clamp=_FAR),
  'sequence': functools.partial(ratios.sequence, clamp=_FAR),
}
_sum = functools.partial(ratios.sequence_sum, clamp=_FAR)
_CORRECTIONS = {
  'token_truncate': (_LEVELS['token'], corrections.truncate),
  'token_mask': (_LEVELS['token'], corrections.discard),
  'sequence_truncate': (_sum, corrections.truncate),
  'sequence_mask': (_sum, corrections.discard),
}


def _surrogate(kind: str, log_ratio, logp, old, adv, mask, numbers):
  """Returns the objective of each token, whose value holds adv · logp."""
  high = numbers['high']
  if kind == 'cispo':
    factor = corrections.truncate(log_ratio, mask, cap=high)
    return factor * surrogates.reinforce(masked.fill(logp, mask), adv)
  if kind == 'vespo':
    factor = trust_regions.vespo(logp, old, adv, mask)
    return factor * surrogates.reinforce(masked.fill(logp, mask), adv)
  if kind == 'sapo':
    return surrogates.sapo(log_ratio, adv, limit=_FAR)
  clip = {'low': numbers['low'], 'high': high, 'limit': _FAR}
  if 'delta' in numbers:
    clip['delta'] = numbers['delta']
    return surrogates.two_sided_clip(log_ratio, adv, **clip)
  return surrogates.clip(log_ratio, adv, **clip)


def _penalties(level: str, logp, ref, old, mask):
  """Returns k3 of each token, plain and times the ratio of the level."""
  present = [masked.fill(x, mask) for x in (logp, ref, old)]
  plain = divergences.k3(*present[:2], limit=_FAR)
  if level == 'token':
    return plain, divergences.k3_ratio_corrected(*present, limit=_FAR)
  ratio = _LEVELS[level](logp, old, mask)
  return plain, divergences.ratio_corrected(plain, ratio, limit=_FAR)


def _weight(kind: str, mask, rows, numbers):
  """Returns the weight of each token; TRL counts rows without tokens."""
  if kind in ('grpo', 'sapo'):
    return weights.sequence_token_mean(mask, sequences=rows)
  if kind == 'bnpo':
    return weights.token_mean(mask)
  if kind == 'dr_grpo':
    return weights.constant(mask, denominator=rows * numbers['max_tokens'])
  if kind == 'luspo':
    return weights.constant(mask, denominator=rows)
  # dapo, cispo, vespo: the tokens of the generation batch, given from outside.
  return weights.constant(mask, denominator=numbers['tokens'])


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _grpo(kind: str, level: str, vllm: str | None, numbers, arrays):
  there, mask = arrays['there'], arrays['mask']
  behavior, adv = arrays['rollout_lp'], arrays['adv']
  rows = masked.count(there)

  def loss(logp, entropy):
    fixed = jax.lax.stop_gradient(logp)
    old = jnp.where(numbers['on_policy'], fixed, arrays['old_lp'])
    log_ratio = _LEVELS[level](logp, old, mask)
    each = credit.broadcast(adv[:, 0], mask)
    objective = _surrogate(kind, log_ratio, logp, old, each, mask, numbers)
    out = {'entropy': masked.mean(entropy, mask)}
    # Gates: what they drop stays in the denominator.
    keep = corrections.off_policy_rows(
      _LEVELS['token'](logp, behavior, mask),
      adv[:, 0],
      mask,
      limit=numbers['drift'],
    )
    chosen = selection.top_entropy(entropy, mask, share=numbers['share'])
    objective *= weights.keep_rows(chosen, keep)
    if vllm:
      measure, bound = _CORRECTIONS[vllm]
      weight = bound(measure(old, behavior, mask), mask, cap=numbers['cap'])
      out['is_ratio'] = jnp.where(mask > 0, weight, 1.0)
      objective *= weight
    kl, corrected = _penalties(level, logp, arrays['ref_lp'], old, mask)
    kl = jnp.where(numbers['corrected'], corrected, kl)
    out['kl'] = masked.mean(kl, mask)
    objective -= numbers['beta'] * kl
    weight = _weight(kind, mask, rows, numbers) / numbers['accumulation']
    bonus = masked.mean(entropy, chosen) / numbers['steps']
    bonus *= numbers['entropy_coef']
    return -jnp.sum(objective * weight) - bonus, out

  differentiate = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
  (value, out), slopes = differentiate(arrays['lp'], arrays['entropy'])
  slopes = {'grad_lp': slopes[0], 'grad_entropy': slopes[1]}
  return {'loss': value, **slopes, **out}


def _numbers(kwargs, mask: np.ndarray) -> dict[str, Any]:
  """Returns the numbers of a configuration, to be traced."""
  steps = kwargs['grad_accum'] if kwargs['training'] else 1
  window = steps / (kwargs['steps_per_generation'] if kwargs['training'] else 1)
  by_tokens = kwargs['loss_type'] in ('dapo', 'cispo', 'vespo')
  high = kwargs['epsilon_high']
  drift = kwargs['off_policy_mask_threshold']
  numbers = {
    'low': kwargs['epsilon'],
    'high': kwargs['epsilon'] if high is None else high,
    'beta': kwargs['beta'],
    'corrected': kwargs['use_bias_correction_kl'],
    'on_policy': kwargs['old'] == 'lp.detach()',
    'share': kwargs['top_entropy_quantile'],
    'drift': np.inf if drift is None else drift,
    'cap': kwargs['vllm_clip_max'],
    'entropy_coef': kwargs['entropy_coef'],
    'max_tokens': float(kwargs['max_completion_length']),
    'tokens': max(float(mask.sum()), 1.0) / kwargs['num_processes'] * window,
    'accumulation': 1.0 if by_tokens else float(steps),
    'steps': float(steps),
  }
  if kwargs['delta'] is not None:
    numbers['delta'] = kwargs['delta']
  return numbers


def grpo(case: golden.Case, file: golden.File) -> golden.Outputs:
  """GRPOTrainer._compute_loss."""
  del file
  names, kwargs = tuple(case.inputs), case.kwargs
  padded, cut = correction.padded(*case.inputs.values())
  arrays = dict(zip(('there', *names), padded, strict=True))
  settings = kwargs['loss_type'], kwargs['importance_sampling_level']
  numbers = _numbers(kwargs, case.inputs['mask'])
  out = cut(_grpo(*settings, kwargs['vllm_is'], numbers, arrays))
  if kwargs['vllm_is'] in ('sequence_truncate', 'sequence_mask'):
    out['is_ratio'] = _column(out['is_ratio'], case.inputs['mask'])
  if kwargs['loss_type'] == 'vespo':
    # TRL gives the factor 0 to a row with NaN anywhere, outside its mask too.
    out |= golden.spoiled_rows(case.inputs['lp'] - case.inputs['old_lp'])
  return out


def _column(ratio: np.ndarray, mask: np.ndarray) -> np.ndarray:
  """Returns weights of rows as [B, 1]; rows without tokens have 1."""
  first = np.argmax(mask > 0, axis=1)[:, None]
  column = np.take_along_axis(ratio, first, axis=1)
  return np.where((mask > 0).any(1, keepdims=True), column, 1.0)


@jax.jit
def _rloo(there, logp, old, mask, adv, epsilon):
  adv = adv[:, 0]

  def loss(logp):
    objective = surrogates.clip(
      _sum(logp, old, mask),
      credit.broadcast(adv, mask),
      low=epsilon,
      high=epsilon,
      limit=_FAR,
    )
    rows = masked.count(there)
    weight = weights.sequence_token_mean(mask, sequences=rows)
    return -jnp.sum(objective * weight)

  value, slope = jax.value_and_grad(loss)(logp)
  # The ratio of a row without tokens is 1 there: its advantage, no gradient.
  empty = there & (masked.count(mask, 1) == 0)
  value -= masked.sum(adv, empty) / masked.count(there)
  return {'loss': value, 'grad_lp': slope}


def rloo(case: golden.Case, file: golden.File) -> golden.Outputs:
  """RLOOTrainer._compute_loss."""
  del file
  arrays, cut = correction.padded(
    case.inputs['lp'],
    case.inputs['old_lp'],
    case.inputs['mask'],
    case.inputs['adv0'],
  )
  return cut(_rloo(*arrays, case.kwargs['epsilon']))


@jax.jit
def _off_policy(logp, behavior, mask, adv, limit):
  log_ratio = _LEVELS['token'](logp, behavior, mask)
  keep = corrections.off_policy_rows(log_ratio, adv[:, 0], mask, limit=limit)
  return {'y': keep[:, None].astype(jnp.float32)}


def off_policy(case: golden.Case, file: golden.File) -> golden.Outputs:
  """get_off_policy_mask."""
  del file
  (_, *arrays), cut = correction.padded(
    case.inputs['lp'],
    case.inputs['sampling'],
    case.inputs['mask'],
    case.inputs['adv0'],
  )
  return cut(_off_policy(*arrays, case.kwargs['thr']))


@jax.jit
def _entropy(entropy, mask, share):
  return {'y': selection.top_entropy(entropy, mask, share=share)}


def entropy_mask(case: golden.Case, file: golden.File) -> golden.Outputs:
  """get_high_entropy_mask."""
  del file
  (_, *arrays), cut = correction.padded(
    case.inputs['entropy'], case.inputs['mask']
  )
  return cut(_entropy(*arrays, 1.0 - case.kwargs['threshold']))


@functools.partial(jax.jit, static_argnums=0)
def _sampled(mode: str, old, behavior, mask, cap):
  measure, bound = _CORRECTIONS[mode]
  each = _LEVELS['token'](old, behavior, mask)
  weight = bound(measure(old, behavior, mask), mask, cap=cap)
  name = 'sampling/sampling_logp_difference'
  return {
    'is_ratio': jnp.where(mask > 0, weight, 1.0),
    'old_per_token_logps': masked.fill(old, mask),
    f'{name}/mean': masked.mean(jnp.abs(each), mask),
    f'{name}/max': mismatch.largest(each, mask),
  }


@functools.partial(jax.jit, static_argnums=0)
def _read(model: decoder.Model, params, prompt, response):
  """Returns the log-probs [B, T] of the responses."""
  rows, size = prompt.shape
  prompts = types.Prompts(
    tokens=prompt,
    length=jnp.full(rows, size),
    uid=jnp.arange(rows),
  )
  hidden = model.hidden(params, prompts, response)
  stats = rljax_kernels.vocab_stats(
    hidden.reshape(-1, hidden.shape[-1]),
    model.head(params, jnp.ones(rows)).weight,
    response.reshape(-1),
    want=('logp',),
  )
  return stats['logp'].reshape(response.shape)


def sampled(case: golden.Case, file: golden.File) -> golden.Outputs:
  """Returns scores and importance weights of tokens that are given."""
  data, kwargs = file.fixture('trl_tiny'), case.kwargs
  if kwargs['clip_min'] is not None:
    raise ValueError(f'clip_min={kwargs["clip_min"]}')
  response, mode = data['completion_ids'], kwargs['mode']
  mask = np.arange(response.shape[1]) < data['comp_len'][:, None]
  mask = mask.astype(np.float32)
  config = families.config_from_hf(file.index['tables']['tiny_qwen2_config'])
  params = families.params_from_hf(config, file.fixture('tiny_qwen2'))
  old = _read(decoder.Model(config), params, data['prompt_ids'], response)
  behavior = data['sampling_logps']
  out = dict(_sampled(mode, old, behavior, mask, kwargs['clip_max']))
  if mode.startswith('sequence'):
    out['is_ratio'] = _column(np.asarray(out['is_ratio']), mask)
  return out | {'completion_mask': mask}


_SCORING = 'GRPOTrainer._generate_and_score_completions'


def scored(case: golden.Case, file: golden.File) -> golden.Outputs:
  """One function of the peer, of which cases keep weights or advantages."""
  if 'mode' in case.kwargs:
    return sampled(case, file)
  return advantages.ADAPTERS[_SCORING](case, file)


ADAPTERS = {
  _SCORING: scored,
  'GRPOTrainer._compute_loss': grpo,
  'RLOOTrainer._compute_loss': rloo,
  'get_off_policy_mask': off_policy,
  'get_high_entropy_mask': entropy_mask,
}
_NOISE = golden.Declared(
  ('grad_lp',),
  'The gradient of ρ · (e^x - 1 - x), x = ref_logp - logp, is -ρ · x. TRL adds'
  ' ρ · (e^x - 1 - x) and ρ · (1 - e^x), which here reach 1e24 and cancel: what'
  ' it returns is rounding, such as 3.6e16 where float64 gives 730, as we do.'
  ' Loss and all other cases with this penalty agree.',
)
DECLARED = {
  f'trl/grpo/{kind}/token/kl_bias/big': _NOISE
  for kind in (
    'grpo',
    'bnpo',
    'dr_grpo',
    'dapo',
    'cispo',
    'sapo',
    'luspo',
    'vespo',
  )
}
