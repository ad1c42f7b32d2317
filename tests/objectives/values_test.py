"""Critic losses where clipping acts, and the best critic."""

import functools

from absl.testing import absltest
import numpy as np

from rljax.objectives import values, weights
from tests import contracts

_clipped = functools.partial(values.clipped, clip=0.5)
_clipping = functools.partial(values.clipping, clip=0.5)


def _f32(*rows):
  return np.array(rows, np.float32)


class ValuesTest(absltest.TestCase):
  def test_past_the_range_towards_the_target_there_is_no_gradient(self):
    # From 0 to 1 of 2: clipped to 0.5, whose error is larger.
    args = _f32([1, -1, 0.25]), _f32([0, 0, 0]), _f32([2, 2, 2])
    mask = _f32([1, 1, 1])
    loss = contracts.call(_clipped, *args, mask)
    contracts.close(loss, [[1.5**2 / 2, 3**2 / 2, 1.75**2 / 2]])
    slope = contracts.gradient(_clipped, *args, mask)
    spread = np.array([1.0, 1.1, 1.2])
    contracts.close(slope, [np.array([0, -3, -1.75]) * spread])
    active = contracts.call(_clipping, *args, mask)
    self.assertEqual(active.tolist(), [[1.0, 0.0, 0.0]])

  def test_without_a_limit_it_is_the_square(self):
    rng = np.random.default_rng(0)
    value, old, target = rng.normal(size=(3, 2, 4)).astype(np.float32)
    mask = np.ones((2, 4), np.float32)
    free = functools.partial(values.clipped, clip=1e6)
    contracts.close(
      contracts.call(free, value, old, target, mask),
      contracts.call(values.squared, value, target, mask),
    )

  def test_the_best_chance_of_success_is_the_mean_reward(self):
    # Three successes of four from one state.
    reward, mask = _f32([1, 1, 1, 0]), np.ones((1, 4), np.float32)
    weight = contracts.call(weights.token_mean, mask)

    def loss(chance):
      logit = np.full((1, 4), np.log(chance / (1 - chance)), np.float32)
      each = contracts.call(values.cross_entropy, logit, reward, mask)
      return float(np.sum(each * weight))

    expected = -(0.75 * np.log(0.75) + 0.25 * np.log(0.25))
    self.assertAlmostEqual(loss(0.75), expected, delta=1e-6)
    self.assertGreater(min(loss(0.7), loss(0.8)), loss(0.75))

  def test_a_negative_range_is_refused(self):
    x = np.ones((1, 1), np.float32)
    with self.assertRaisesRegex(ValueError, 'clip=-0.1'):
      values.clipped(x, x, x, x, clip=-0.1)


if __name__ == '__main__':
  absltest.main()
