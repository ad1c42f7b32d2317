"""Rewards with penalties, and which rows and groups stay."""

import functools

from absl.testing import absltest, parameterized
import jax
import numpy as np

from rljax.core import groups
from rljax.objectives import divergences, shaping
from tests import contracts

# Of verl 0.9.1: KL, rows, and the coefficient after them, from 0.2.
_ADAPTED = (
  (5.0, 64, 0.19978666666666667),
  (9.0, 64, 0.20004239359999998),
  (6.0, 128, 0.20004239359999998),
  (0.5, 256, 0.19901817654476797),
  (100.0, 512, 0.2010561226725864),
)


def _softmax(x):
  return np.exp(x) / np.exp(x).sum()


class ShapingTest(parameterized.TestCase):
  def test_the_coefficient_follows_verl(self):
    fn = functools.partial(shaping.adapt_coefficient, target=6.0)
    coefficient = np.float32(0.2)
    for kl, rows, expected in _ADAPTED:
      args = (np.float32(x) for x in (coefficient, kl, rows))
      coefficient = contracts.call(fn, *args)
      self.assertAlmostEqual(float(coefficient), expected, delta=1e-7)

  def test_k1_in_the_reward_has_the_gradient_of_reverse_kl(self):
    theta, ref = np.array([0.3, -0.2, 0.5]), np.array([0.0, 0.1, -0.4])
    p, q = _softmax(theta), _softmax(ref)
    logp, other = (np.log(x)[:, None].astype(np.float32) for x in (p, q))
    ones = np.ones((3, 1), np.float32)
    kl = np.asarray(divergences.k1(logp, other))
    fn = functools.partial(shaping.penalize_kl, coefficient=1.0)
    reward = contracts.call(fn, 0 * ones, kl, ones)[:, 0]
    # The policy gradient of the reward: E[r d log p], and r is data.
    gradient = (p * reward) @ (np.eye(3) - p)
    contracts.close(-gradient, [-0.046132, -0.156667, 0.202799], 2e-6)

  def test_a_coefficient_acts_in_its_direction(self):
    ones = np.ones((1, 2), np.float32)
    for name in ('penalize_kl', 'penalize_row_kl'):
      fn = contracts.public(shaping)[name]
      reward = ones if name == 'penalize_kl' else ones[:, 0]
      none = np.sum(fn(reward, ones, ones, coefficient=0.0))
      self.assertLess(np.sum(fn(reward, ones, ones, coefficient=1.0)), none)
      with self.assertRaisesRegex(ValueError, 'coefficient=-0.001'):
        fn(reward, ones, ones, coefficient=-0.001)

  def test_the_two_overlong_penalties_agree_up_to_the_limit(self):
    length = np.arange(101, dtype=np.int32)
    setting = {'limit': 100, 'buffer': 20}
    soft, free = (
      contracts.call(functools.partial(fn, **setting), length)
      for fn in (shaping.overlong, shaping.overlong_unbounded)
    )
    np.testing.assert_array_equal(soft, free)
    self.assertEqual(soft[[80, 90, 100]].tolist(), [0.0, -0.5, -1.0])
    self.assertTrue((np.diff(soft) <= 0).all())

  @parameterized.parameters(0, 21)
  def test_a_buffer_must_fit(self, buffer):
    with self.assertRaisesRegex(ValueError, f'buffer = {buffer}, limit = 20'):
      shaping.overlong(np.ones(2), limit=20, buffer=buffer)

  def test_groups_that_can_teach(self):
    reward = np.array([1, 0, 1, 1, 0.1, np.nan], np.float32)
    layout = groups.uniform(3, 2)
    reduce = jax.jit(lambda r: groups.reduce(shaping.mixed, layout, r))
    self.assertEqual(reduce(reward).tolist(), [True, False, False])

  def test_swapped_limits_are_refused(self):
    with self.assertRaisesRegex(ValueError, 'low = 5 is above high = 4'):
      shaping.within(np.ones(2), low=5, high=4)

  def test_a_weight_for_each_reward(self):
    with self.assertRaisesRegex(ValueError, r'reward\[2, 3\].*weights\[2\]'):
      shaping.weighted_sum(np.ones((2, 3)), weights=(1.0, 2.0))


if __name__ == '__main__':
  absltest.main()
