"""Tests of GRPO's credit and loss: each coefficient is applied, as it says."""

import dataclasses
import functools
import inspect

from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from rljax.core import types
from rljax.engine import grpo, scoring, seams
from rljax.objectives import advantages, divergences, weights
from tests.engine import small

CTL = seams.Ctl(jnp.int32(3), jnp.int32(2), jnp.float32(0.25))
N = 64


@functools.cache
def statistics():
  """Returns statistics and data [N] whose ratios pass both clips."""
  r = np.random.default_rng(0)
  logp = -r.uniform(0.1, 3.0, N)
  stats = {'logp': logp, 'lse': r.normal(size=N), 'entropy': r.uniform(size=N)}
  data = {
    'advantage': r.normal(size=N),
    'old_logp': logp + 0.5 * r.normal(size=N),
    'ref_logp': logp + 0.5 * r.normal(size=N),
    'behavior_logp': logp + 0.5 * r.normal(size=N),
  }
  return jax.tree.map(jnp.float32, (stats, data))


def objective(ctl=CTL, data=None, **options):
  stats, plain = statistics()
  found, seen = grpo.loss(**options).fn(stats, {**plain, **(data or {})}, ctl)
  return np.asarray(found), seen


def rollout(rows=8, size=4):
  """Returns two groups of four rows of different length; one is cut off."""
  length = np.array([4, 2, 1, 4, 3, 3, 4, 1])
  inside = np.arange(size)[None] < length[:, None]
  zero = jnp.zeros((rows, size))
  return types.Rollout(
    prompts=small.batch(2).prompts,
    prompt_of=jnp.arange(rows) // 4,
    response=zero.astype(jnp.int32),
    length=jnp.asarray(length),
    mask=jnp.asarray(inside, jnp.float32),
    logp=zero, logp_full=zero, logp_unit=zero,
    unit=zero.astype(jnp.int32),
    seat=jnp.zeros(rows, jnp.int32),
    temperature=jnp.ones(rows),
    groups=types.Groups(
      index=jnp.arange(rows).reshape(2, 4), valid=jnp.ones((2, 4), bool)
    ),
    stop=jnp.where(jnp.arange(rows) == 3, types.Stop.LENGTH, types.Stop.TOKEN),
    version=zero.astype(jnp.int32),
    data={},
  )  # fmt: skip


REWARDS = {'task': jnp.array([1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0])}


def assign(signals=None, rewards=REWARDS, **options):
  return grpo.credit(**options)(rollout(), rewards, signals or {}, CTL)


class LossTest(parameterized.TestCase):
  def test_no_coefficient_is_forgotten(self):
    names = set(inspect.signature(grpo.loss).parameters)
    self.assertEqual(names, {'low', 'high', 'beta', 'divergence'})

  def test_beta_is_a_penalty(self):
    without, seen = objective(beta=0.0)
    full, _ = objective(beta=1.0)
    stats, data = statistics()
    kl = np.asarray(divergences.k3(stats['logp'], data['ref_logp']))
    self.assertGreater(kl.min(), 0)
    np.testing.assert_allclose(full, without - kl, atol=1e-5)
    np.testing.assert_allclose(seen['kl/ref'], kl, rtol=1e-6)
    third, _ = objective(beta=0.3)
    np.testing.assert_allclose(third, without - 0.3 * kl, atol=1e-5)

  def test_beta_may_follow_the_run(self):
    along, _ = objective(beta=lambda progress: 4.0 * progress)
    np.testing.assert_allclose(along, objective(beta=1.0)[0], atol=1e-6)

  def test_divergence_is_the_one_that_was_asked(self):
    found, _ = objective(beta=1.0, divergence=divergences.k2)
    stats, data = statistics()
    kl = divergences.k2(stats['logp'], data['ref_logp'])
    np.testing.assert_allclose(
      found, objective(beta=0.0)[0] - np.asarray(kl), atol=1e-5
    )

  @parameterized.parameters('low', 'high')
  def test_clips_on_their_own_side(self, side):
    stats, data = statistics()
    ratio = np.exp(np.asarray(stats['logp'] - data['old_logp']))
    adv = np.asarray(data['advantage'])
    wide = {'low': 0.9999, 'high': 100.0}
    tight, seen = objective(**{**wide, side: 0.0})
    loose, _ = objective(**wide)
    np.testing.assert_allclose(loose, ratio * adv, rtol=1e-4)
    clipped = (ratio > 1) & (adv > 0)
    if side == 'low':
      clipped = (ratio < 1) & (adv < 0)
    self.assertGreater(clipped.sum(), 5)
    np.testing.assert_array_equal(tight != loose, clipped)
    np.testing.assert_allclose(tight[clipped], adv[clipped], rtol=1e-5)
    np.testing.assert_array_equal(seen[f'clip/{side}'], clipped)

  def test_the_ratio_is_to_the_old_policy_alone(self):
    plain, _ = objective()
    far = statistics()[1]['behavior_logp'] + 3.0
    np.testing.assert_array_equal(
      objective(data={'behavior_logp': far})[0], plain
    )
    far = statistics()[1]['old_logp'] + 3.0
    self.assertFalse(
      np.array_equal(objective(data={'old_logp': far})[0], plain)
    )

  def test_a_ratio_of_e_to_the_89(self):
    stats = {'logp': jnp.array([-2.0, -2.0]), 'entropy': jnp.ones(2)}
    data = {
      'advantage': jnp.array([1.0, -1.0]), 'old_logp': jnp.array([-91.0] * 2)
    }  # fmt: skip

    def total(logp):
      found, _ = grpo.loss().fn({**stats, 'logp': logp}, data, CTL)
      return jnp.sum(found)

    value, slope = jax.value_and_grad(total)(stats['logp'])
    self.assertTrue(np.isfinite(value))
    self.assertTrue(np.isfinite(slope).all())


class ReferenceTest(parameterized.TestCase):
  def test_a_penalty_without_a_reference_is_refused(self):
    row = jnp.zeros(3)
    data = {'old_logp': row, 'advantage': row}
    with self.assertRaisesRegex(ValueError, r'beta=0.5 needs a reference'):
      grpo.loss(beta=0.5).fn({'logp': row, 'entropy': row}, data, CTL)

  def test_a_view_that_is_missing_is_named(self):
    signals = scoring.Lazy({'policy': lambda: None})
    with self.assertRaisesRegex(KeyError, "reads 'ref', but the method has"):
      grpo.credit(ref=True)(rollout(), REWARDS, signals, CTL)


class CreditTest(parameterized.TestCase):
  def test_no_coefficient_is_forgotten(self):
    names = set(inspect.signature(grpo.credit).parameters)
    wanted = {'advantage', 'aggregate', 'ref', 'mask_truncated'}
    self.assertEqual(names, wanted)

  def test_by_hand(self):
    found = assign()
    # Rewards 1 0 0 1: mean 1/2, deviation sqrt(1/3). 1 0 0 0: 1/4 and 1/2.
    half, quarter = np.sqrt(3) / 2, [1.5, -0.5, -0.5, -0.5]
    wanted = np.array([half, -half, -half, half, *quarter])
    mask = np.asarray(rollout().mask)
    np.testing.assert_allclose(
      found.advantage, wanted[:, None] * mask, rtol=1e-4
    )
    rows = mask / mask.sum(1, keepdims=True) / 8
    np.testing.assert_allclose(found.weight, rows, rtol=1e-6)
    self.assertIsNone(found.old_logp)
    self.assertEmpty(found.extra)

  def test_advantage_and_aggregate_are_used(self):
    found = assign(advantage=advantages.reinforce, aggregate=weights.token_mean)
    np.testing.assert_array_equal(found.advantage[:, 0], REWARDS['task'])
    np.testing.assert_allclose(found.weight, rollout().mask / 22.0, rtol=1e-6)

  def test_rows_that_were_cut_off_may_be_left_out(self):
    found = assign(mask_truncated=True)
    np.testing.assert_array_equal(found.weight[3], 0)
    np.testing.assert_array_equal(found.advantage[3], 0)
    self.assertAlmostEqual(float(found.weight.sum()), 1.0, places=6)
    self.assertAlmostEqual(float(found.weight[2, 0]), 1 / 7, places=6)

  def test_the_reference_is_read_when_asked(self):
    calls = []

    def read():
      calls.append(1)
      zero = jnp.zeros((8, 4))
      head = types.Head(weight=zero, temperature=zero)
      return types.Scores(logp=zero - 1, entropy=zero, hidden=zero, head=head)

    signals = scoring.Lazy({'ref': read})
    self.assertEmpty(assign(signals).extra)
    self.assertEmpty(calls)
    found = assign(signals, ref=True)
    np.testing.assert_array_equal(found.extra['ref_logp'], -1)
    self.assertLen(calls, 1)

  def test_missing_rewards_leave_their_group(self):
    rewards = {'task': REWARDS['task'].at[0].set(jnp.nan)}
    found = assign(rewards=rewards)
    np.testing.assert_array_equal(found.weight[0], 0)
    # 0 0 1 remain: mean 1/3, deviation sqrt(1/3).
    wanted = np.array([0, -1, -1, 2]) / 3 * np.sqrt(3)
    np.testing.assert_allclose(found.advantage[:4, 0], wanted, rtol=1e-4)
    kept = dataclasses.replace(assign(), rewards={}, observed={})
    np.testing.assert_array_equal(kept.advantage[4:], found.advantage[4:])

  def test_an_empty_response_is_no_member_of_its_group(self):
    # Its reward of 10 must not move those of the others.
    empty = rollout()
    empty = dataclasses.replace(
      empty,
      length=empty.length.at[1].set(0),
      mask=empty.mask.at[1].set(0.0),
    )
    rewards = {'task': REWARDS['task'].at[1].set(10.0)}
    found = grpo.credit()(empty, rewards, {}, CTL)
    wanted = np.array([1, 0, -2, 1]) / 3 * np.sqrt(3)  # of 1, 0 and 1
    np.testing.assert_allclose(found.advantage[:4, 0], wanted, rtol=1e-4)
    np.testing.assert_array_equal(found.weight[1], 0)
    self.assertAlmostEqual(float(found.weight.sum()), 1.0, places=6)
