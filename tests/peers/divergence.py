"""Divergences and statistics of the vocabulary: verl's and TRL's cases."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from rljax.core import masked
from rljax.objectives import distillation, divergences, ratios, weights
import rljax_kernels
from tests.peers import correction, golden

_CAPPED = {'limit': 20.0, 'cap': 10.0}
_SAMPLED = {
  'k1': divergences.k1,
  'k2': divergences.k2,
  'k3': functools.partial(divergences.k3, **_CAPPED),
  'abs': divergences.absolute,
  'k1+': divergences.k1_straight_through,
  'k2+': divergences.k2,
  'k3+': functools.partial(divergences.k3_straight_through, **_CAPPED),
  'abs+': divergences.absolute_straight_through,
}
_OLD_NAMES = {'kl': 'k1', 'mse': 'k2', 'low_var_kl': 'k3'}


def penalty(case: golden.Case, file: golden.File) -> golden.Outputs:
  """kl_penalty, of tokens or enumerated over three of them."""
  del file
  name = case.kwargs['kl_penalty']
  base = str(name).removesuffix('+')
  name = _OLD_NAMES.get(base, base) + name[len(base) :]
  if 'theta' in case.inputs:
    corrected = case.kwargs['times_exp_lp_minus_sg_lp']
    arrays = case.inputs['theta'], case.inputs['ref_logits']
    return {'expected_grad': _enumerated(name, corrected, *arrays)}
  arrays = case.inputs['logprob'], case.inputs['ref_logprob']
  if name == 'full':
    # Not implemented there: the last axis would hold the vocabulary.
    return _full(*arrays)
  (_, *wide), cut = correction.padded(*arrays)
  # Of what is not finite no penalty is taken; verl has the slope of `k1`.
  spoiled = ~np.isfinite(arrays[0] - arrays[1])
  mark = {golden.SPOILED: {'grad_lp': spoiled}} if spoiled.any() else {}
  return cut(_penalty(name, *wide)) | mark


@functools.partial(jax.jit, static_argnums=0)
def _penalty(name: str, logp, other):
  """Returns values and gradients; verl knows no mask here."""
  known = jnp.isfinite(logp) & jnp.isfinite(other)
  other = masked.fill(other, known)

  def total(logp):
    each = _SAMPLED[name](masked.fill(logp, known), other)
    return jnp.sum(each), each

  slope, each = jax.grad(total, has_aux=True)(logp)
  return {'kl': each, 'grad_lp': slope}


@functools.partial(jax.jit, static_argnums=(0, 1))
def _enumerated(name: str, corrected: bool, theta, other):
  """Returns the gradient of a penalty in expectation over all tokens."""
  reference = jax.nn.log_softmax(other)[None]

  def total(theta):
    logp = jax.nn.log_softmax(theta)[None]
    fixed = jax.lax.stop_gradient(logp)
    each = _SAMPLED[name](logp, reference)
    if corrected:
      ratio = ratios.token(logp, fixed, jnp.ones_like(logp))
      each = divergences.ratio_corrected(each, ratio)
    return jnp.sum(jnp.exp(fixed) * each)

  return jax.grad(total)(theta)


@jax.jit
def _full(logits, other):
  """Returns the reverse KL of each row of logits, and its gradient."""
  known = jnp.isfinite(logits) & jnp.isfinite(other)
  # Far below all others, an unknown token has no probability in either.
  logits, other = (masked.fill(x, known, -1e9) for x in (logits, other))

  def total(logits):
    there = jnp.ones(logits.shape[:-1])
    each = distillation.reverse_kl(logits, other, there)
    return jnp.sum(each), each

  slope, each = jax.grad(total, has_aux=True)(logits)
  return {'kl': each, 'grad': slope}


def true_kl(case: golden.Case, file: golden.File) -> golden.Outputs:
  """Reverse KL over the vocabulary, by automatic differentiation."""
  del case
  data = file.fixture('kl_enum')
  found = _full(data['theta'], data['ref_logits'])
  return {'kl': found['kl'], 'grad': found['grad']}


def statistics(case: golden.Case, file: golden.File) -> golden.Outputs:
  """logprobs_from_logits, entropy_from_logits and their kin."""
  del file
  logits, labels = case.inputs['logits'], case.inputs['labels']
  mask = case.inputs['mask']
  found = _statistics(logits, labels, mask, case.kwargs['temperature'])
  weight = weights.token_mean(jnp.asarray(mask))
  return {
    **found,
    'logprob_v2': found['logprob'],
    'entropy_chunk': found['entropy'],
    'entropy_loss': np.sum(found['entropy'] * weight),
  }


@jax.jit
def _statistics(logits, labels, mask, temperature):
  """Returns statistics of logits [B, T, V]: hidden states of an identity."""
  shape, vocab = labels.shape, logits.shape[-1]
  identity, names = jnp.eye(vocab), ('logp', 'entropy', 'collision')

  def read(rows):
    # No gradient reaches the temperature of the statistics, nor must it.
    return rljax_kernels.vocab_stats(
      rows, identity, labels.reshape(-1), temperature=temperature, want=names
    )

  rows = logits.reshape(-1, vocab)
  stats, pull = jax.vjp(read, rows)
  zeros, out = jax.tree.map(jnp.zeros_like, stats), {}
  for ours, theirs in (('logp', 'logprob'), ('entropy', 'entropy')):
    (slope,) = pull({**zeros, ours: mask.reshape(-1)})
    out[f'grad_{theirs}_sum'] = slope.reshape(logits.shape)
    out[theirs] = stats[ours].reshape(shape)
  return {**out, 'sum_pi_sq': stats['collision'].reshape(shape)}


ADAPTERS = {
  'kl_penalty': penalty,
  'autograd': true_kl,
  'logprobs_from_logits_naive/entropy_from_logits/…': statistics,
  'selective_log_softmax/entropy_from_logits': statistics,
}
_CANCELLED = golden.Declared(
  ('entropy', 'grad_entropy_sum'),
  'verl takes the entropy as lse - sum p z in float32, where lse and the sum'
  ' are some 60 or 90 and nearly equal: it is 4e-6 to 8e-6 off float64, of'
  ' 0.003 or less at some tokens. Ours is within 6e-7, as is that of TRL.',
)
DECLARED = {
  f'verl/logits/{temperature}/{logits}': _CANCELLED
  for temperature in ('t1.0', 't0.7')
  for logits in ('logits1', 'logits3')
}
