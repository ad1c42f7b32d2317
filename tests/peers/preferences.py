"""Cases of preferences and distillation: TRL's DPO and GKD, verl's top-k."""

from collections.abc import Callable, Mapping
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rljax.objectives import (
  distillation,
  preferences,
  scores,
  supervised,
  weights,
)
from tests.peers import golden

# TRL's names of losses that are functions of a pair of scores.
_PAIRS: Mapping[str, Callable[..., jax.Array]] = {
  'sigmoid': preferences.dpo,
  'sigmoid_norm': preferences.dpo,
  'hinge': preferences.hinge,
  'ipo': preferences.ipo,
  'exo_pair': preferences.exo,
  'nca_pair': preferences.nca,
  'robust': preferences.robust,
  'bco_pair': preferences.bco,
  'sppo_hard': preferences.sppo,
  'apo_zero': preferences.apo_zero,
  'apo_down': preferences.apo_down,
  'discopop': preferences.discopop,
}
_PER_TOKEN = ('ipo', 'sigmoid_norm')
_SMOOTHED = ('exo_pair', 'robust', 'aot', 'aot_unpaired')


def dpo(case: golden.Case, file: golden.File) -> golden.Outputs:
  """Returns a DPO loss, its gradient, and TRL's metrics."""
  del file
  mask = case.inputs['completion_mask'][:, 1:]
  arrays = case.inputs['logps'], case.inputs['ref_logps'], mask
  loss, grad = _dpo_program(tuple(sorted(case.kwargs.items())))(*arrays)
  return {'loss': loss, 'grad_logps': grad, **_rewards(case, *arrays)}


@functools.cache
def _dpo_program(kwargs: tuple[tuple[str, Any], ...]):
  return jax.jit(jax.value_and_grad(functools.partial(_dpo, dict(kwargs))))


def _dpo(kwargs: Mapping[str, Any], logp, ref_logp, mask) -> jax.Array:
  """Returns TRL's mean loss of rows that are [chosen, rejected]."""
  kind, half = kwargs['loss_type'], len(mask) // 2
  if kind == 'sft':
    chosen, mask = logp[:half], mask[:half]
    return jnp.sum(supervised.sft(chosen, mask) * weights.token_mean(mask))
  settings = {'beta': kwargs['beta']}
  if kind in _SMOOTHED:
    settings['flipped'] = kwargs['label_smoothing']
  if kind.startswith('aot'):
    return jnp.mean(_aot(kind, logp, ref_logp, settings))
  score = scores.score(logp, ref_logp, _weight(kwargs, mask))
  score = _generator(kwargs)(score)
  if kind in _PER_TOKEN:
    score = scores.per_token(score, mask)
  return jnp.mean(_PAIRS[kind](score[:half], score[half:], **settings))


def _weight(kwargs: Mapping[str, Any], mask):
  """Returns the weight that the peer gives to each position.

  It sums over padding, where it puts log-probs of 0, so that its gradient goes
  there too; with `ld_alpha` a short row's padding counts like its last token.
  """
  decay = kwargs.get('ld_alpha')
  if decay is None:
    return jnp.ones_like(mask)
  half = len(mask) // 2
  partner = jnp.concatenate([mask[half:], mask[:half]])
  weight = scores.length_decay(mask, partner, decay=decay)
  longer = mask.sum(1, keepdims=True) > partner.sum(1, keepdims=True)
  padding = (jnp.cumsum(mask, axis=1) > 0) & (mask == 0)
  return jnp.where(padding, jnp.where(longer, decay, 1.0), weight)


def _generator(kwargs: Mapping[str, Any]) -> Callable[[jax.Array], jax.Array]:
  order = kwargs.get('f_alpha_divergence_coef', 0.5)
  return {
    'reverse_kl': lambda score: score,
    'forward_kl': scores.forward_kl,
    'js_divergence': scores.js,
    'alpha_divergence': functools.partial(scores.alpha, order=order),
  }[kwargs.get('f_divergence_type', 'reverse_kl')]


def _aot(kind: str, logp, ref_logp, settings) -> jax.Array:
  half = len(logp) // 2
  each = jnp.ones_like(logp)
  own = scores.score(logp, jnp.zeros_like(logp), each)
  ref = scores.score(ref_logp, jnp.zeros_like(logp), each)
  if kind == 'aot':
    better, worse = own[:half] - own[half:], ref[:half] - ref[half:]
  else:
    better, worse = own[:half] - ref[:half], own[half:] - ref[half:]
  return preferences.aot(better, worse, jnp.ones(half), **settings)


def _rewards(case: golden.Case, logp, ref_logp, mask) -> golden.Outputs:
  """Returns TRL's metrics of the implicit rewards."""
  half = len(mask) // 2
  weight = _weight(case.kwargs, jnp.asarray(mask))
  policy = scores.score(logp, jnp.zeros_like(logp), weight)
  reward = case.kwargs['beta'] * scores.score(logp, ref_logp, weight)
  chosen, rejected = reward[:half], reward[half:]
  return {
    'rewards/chosen': jnp.mean(chosen),
    'rewards/rejected': jnp.mean(rejected),
    'rewards/margins': jnp.mean(chosen - rejected),
    'rewards/accuracies': jnp.mean(chosen > rejected),
    'logps/chosen': jnp.mean(policy[:half]),
    'logps/rejected': jnp.mean(policy[half:]),
  }


def gkd(case: golden.Case, file: golden.File) -> golden.Outputs:
  """Returns the loss of GKD and its gradient in the student's logits."""
  student, teacher = case.inputs['student'], case.inputs['teacher']
  name = case.kwargs['labels']
  mask = np.ones(student.shape[:-1], np.float32)
  count = float(len(student))  # without labels the peer divides by the rows
  if name is not None:
    mask = (file.fixture(case.fixture or '')[name] != -100).astype(np.float32)
    count = max(float(mask.sum()), 1.0)
  settings = case.kwargs['beta'], case.kwargs['temperature']
  loss, grad = _gkd_program(*settings)(student, teacher, mask, count)
  return {'loss': loss, 'grad_student': grad}


@functools.cache
def _gkd_program(beta: float, temperature: float):
  each = functools.partial(distillation.jsd, beta=beta)
  if beta in (0.0, 1.0):  # GKD means the divergences at the ends
    each = distillation.reverse_kl if beta else distillation.forward_kl

  def loss(student, teacher, mask, count):
    kl = each(student, teacher, mask, temperature=temperature)
    return jnp.sum(kl) / count

  return jax.jit(jax.value_and_grad(loss))


def opd_topk(case: golden.Case, file: golden.File) -> golden.Outputs:
  """Returns verl's top-k distillation losses, meters and gradient."""
  del file
  arrays = (
    case.inputs['student_logits'],
    case.inputs['teacher_topk_log_probs'],
    case.inputs['teacher_topk_ids'],
  )
  return _topk_program(case.kwargs['log_prob_min_clamp'])(*arrays)


@functools.cache
def _topk_program(floor: float | None):
  def losses(logits, teacher_logp, ids):
    mask = jnp.ones(logits.shape[:-1])
    logp = distillation.topk_logp(logits, ids)
    kl = distillation.topk_forward_kl(logp, teacher_logp, mask, floor=floor)
    return jnp.sum(kl), (kl, logp)

  def run(logits, teacher_logp, ids):
    grad, (kl, logp) = jax.grad(losses, has_aux=True)(logits, teacher_logp, ids)
    _, own = jax.lax.top_k(logits, ids.shape[-1])
    count, gain = distillation.topk_overlap(
      own, ids, logp, teacher_logp, floor=floor
    )
    return {
      'distillation_losses': kl,
      'student_mass': distillation.topk_mass(logp),
      'teacher_mass': distillation.topk_mass(teacher_logp),
      'overlap_count': count,
      'overlap_token_advantage': gain,
      'grad_student': grad,
    }

  return jax.jit(run)


ADAPTERS = {
  'DPOTrainer._compute_loss': dpo,
  'GKDTrainer.generalized_jsd_loss': gkd,
  'compute_forward_kl_topk': opd_topk,
}
DECLARED = {}
