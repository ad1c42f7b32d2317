"""Runs the contract of its family on every public function."""

import functools
import importlib
import pkgutil
import types

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp

from rljax import objectives
from rljax.core import masked
from rljax.objectives import (
  advantages,
  distillation,
  divergences,
  ratios,
  surrogates,
  weights,
)
from tests import (
  contracts,
  correction_contracts,
  credit_contracts,
  evaluation_contracts,
  masking_contracts,
  preference_contracts,
)
from tests.credit_contracts import ADVANTAGES, check_advantage, check_credit

FAMILIES = (
  *credit_contracts.FAMILIES,
  *contracts.FAMILIES,
  *correction_contracts.FAMILIES,
  *preference_contracts.FAMILIES,
  *evaluation_contracts.FAMILIES,
  *masking_contracts.FAMILIES,
)
MODULES = tuple(
  importlib.import_module(f'{objectives.__name__}.{found.name}')
  for found in pkgutil.iter_modules(objectives.__path__)
)


class ContractsTest(parameterized.TestCase):
  @parameterized.named_parameters(*contracts.cases(FAMILIES))
  def test_contract(self, fn, claim, check):
    check(fn, claim)

  @parameterized.parameters(*MODULES)
  def test_every_function_has_claims(self, module):
    missing = contracts.unclaimed(module, FAMILIES)
    self.assertEmpty(missing, f'add the claims of {missing} to tests/')

  def test_every_claim_has_a_function(self):
    for module, table, _ in FAMILIES:
      self.assertContainsSubset(table, contracts.public(module))

  @parameterized.parameters(
    'def fresh(reward, valid):\n  return reward',
    'fresh = functools.partial(grpo)',
    'fresh = jax.jit(lambda reward, valid: reward)',
  )
  def test_a_new_function_does_not_escape(self, text):
    module = types.ModuleType(advantages.__name__)
    vars(module).update(vars(advantages), functools=functools)
    exec(text, vars(module))
    families = [
      (module if owner is advantages else owner, table, check)
      for owner, table, check in FAMILIES
    ]
    self.assertEqual(contracts.unclaimed(module, families), {'fresh'})


def _ignores_valid(reward, valid):
  return masked.center(reward, jnp.isfinite(reward))


def _one_pass(reward, valid):
  present = valid & jnp.isfinite(reward)
  mean = masked.mean(reward, present)
  variance = masked.mean(jnp.square(reward), present) - jnp.square(mean)
  scale = jnp.sqrt(jnp.maximum(variance, 0.0)) + 1e-6
  return masked.fill((reward - mean[None]) / scale[None], present)


def _mean_of_means(mask):
  return weights.sequence_mean_token_mean(mask)


def _overflows(log_ratio, adv):
  ratio = jnp.exp(log_ratio)
  return jnp.minimum(ratio * adv, jnp.clip(ratio, 0.8, 1.2) * adv)


def _cancels(logp, other_logp):
  x = other_logp - logp
  return jnp.exp(x) - x - 1.0


def _moves_rows(reward, mask):
  return masked.fill(reward[::-1], mask)


def _unmasked(logp, old_logp, mask):
  return jnp.clip(logp - old_logp, -20.0, 20.0) * mask


_TOKENS = masking_contracts.Masking(('token', 'mask'))


class ChecksCanFailTest(parameterized.TestCase):
  """Each check refuses a plausible mistake."""

  @parameterized.parameters(
    (check_advantage, _ignores_valid, ADVANTAGES['center']),
    (check_advantage, _one_pass, ADVANTAGES['zscore']),
    (
      check_advantage,
      advantages.center,
      ADVANTAGES['leave_one_out'],
    ),
    (
      contracts.check_aggregation,
      _mean_of_means,
      contracts.AGGREGATIONS['sequence_mean_token_sum'],
    ),
    (check_credit, _moves_rows, credit_contracts.Credit(('tokens',))),
    (contracts.check_ratio, _unmasked, contracts.RATIOS['token']),
    (
      contracts.check_ratio,
      ratios.sequence_token,
      contracts.RATIOS['sequence'],
    ),
    (
      correction_contracts.check_correction,
      lambda x, mask: jnp.exp(x) * mask,
      correction_contracts.CORRECTIONS['truncate'],
    ),
    (contracts.check_surrogate, _overflows, contracts.SURROGATES['clip']),
    (
      contracts.check_surrogate,
      surrogates.reinforce,
      contracts.SURROGATES['clip'],
    ),
    (contracts.check_divergence, _cancels, contracts.DIVERGENCES['k3']),
    (
      preference_contracts.check_pair,
      lambda chosen, rejected: -jnp.log(jax.nn.sigmoid(chosen - rejected)),
      preference_contracts.REWARDS['bradley_terry'],
    ),
    (
      preference_contracts.check_over_vocabulary,
      distillation.reverse_kl,
      preference_contracts.OVER_VOCABULARY['forward_kl'],
    ),
    (
      contracts.check_divergence,
      divergences.k3,
      contracts.Divergence('reverse'),
    ),
    (
      masking_contracts.check_masking,
      lambda x, mask: jnp.exp(jnp.clip(x, -20.0, 20.0)) * mask,
      _TOKENS,
    ),
    (
      masking_contracts.check_masking,
      lambda x, mask: jnp.where(mask > 0, jnp.exp(jnp.minimum(x, 9.0)), 0.0),
      _TOKENS,
    ),
    (
      masking_contracts.check_masking,
      lambda x, mask: jnp.exp(masked.fill(x, mask)),
      _TOKENS,
    ),
    (
      masking_contracts.check_masking,
      lambda x, mask: masked.fill(x, mask) / masked.count(mask)[None, None],
      _TOKENS,
    ),
  )
  def test_refuses(self, check, fn, claim):
    with self.assertRaises(AssertionError):
      check(fn, claim)


if __name__ == '__main__':
  absltest.main()
