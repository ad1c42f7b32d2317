"""Evaluation statistics against known numbers."""

import itertools

from absl.testing import absltest, parameterized
import numpy as np

from rljax.objectives import statistics


class StatisticsTest(parameterized.TestCase):
  @parameterized.parameters(
    (4, 1, 2, 0.5),
    (4, 2, 2, 0.833333),
    (8, 4, 4, 0.985714),
    (4, 0, 2, 0.0),
    (4, 4, 4, 1.0),
    (5, 2, 1, 0.4),
    (1000, 1, 500, 0.5),
  )
  def test_pass_at_k(self, n, c, k, expected):
    self.assertAlmostEqual(
      float(statistics.pass_at_k(n, c, k)), expected, delta=1e-6
    )

  def test_pass_at_k_is_the_mean_over_subsets(self):
    correct = np.array([1, 0, 0, 1, 0, 0])
    subsets = itertools.combinations(correct, 3)
    mean = np.mean([max(subset) for subset in subsets])
    self.assertAlmostEqual(float(statistics.pass_at_k(6, 2, 3)), mean)

  def test_pass_at_k_of_many_problems(self):
    out = statistics.pass_at_k(np.array([4, 4, 8]), np.array([1, 2, 4]), 2)
    np.testing.assert_allclose(out, [0.5, 0.833333, 0.785714], rtol=1e-5)

  @parameterized.parameters((4, 1, 5), (4, 5, 2), (4, -1, 2), (4, 1, 0))
  def test_impossible_counts_are_refused(self, n, c, k):
    with self.assertRaisesRegex(ValueError, f'pass@{k} needs'):
      statistics.pass_at_k(n, c, k)

  @parameterized.parameters(
    (8, 10, 0.4902, 0.9433),
    (0, 10, 0.0, 0.2775),
    (10, 10, 0.7225, 1.0),
    (120, 200, 0.5308, 0.6654),
    (0, 0, 0.0, 1.0),
  )
  def test_wilson(self, successes, count, low, high):
    interval = statistics.wilson(successes, count)
    np.testing.assert_allclose(interval, (low, high), atol=5e-5)

  def test_wilson_widens_with_confidence_and_refuses_nonsense(self):
    low, high = statistics.wilson(8, 10, confidence=0.99)
    self.assertLess(low, 0.4902)
    self.assertGreater(high, 0.9433)
    with self.assertRaisesRegex(ValueError, '11 successes of 10'):
      statistics.wilson(11, 10)

  def test_bootstrap_has_the_width_of_the_normal_interval(self):
    values = np.random.default_rng(0).random(400)
    low, high = statistics.bootstrap(values, seed=1, samples=2000)
    half = 1.96 * values.std() / 20.0
    self.assertAlmostEqual(low, values.mean() - half, delta=0.1 * half)
    self.assertAlmostEqual(high, values.mean() + half, delta=0.1 * half)
    again = statistics.bootstrap(values, seed=1, samples=2000)
    self.assertEqual((low, high), again)

  def test_bootstrap_needs_prompts(self):
    self.assertEqual(
      statistics.bootstrap(np.full(3, 0.25), seed=0, samples=10), (0.25, 0.25)
    )
    with self.assertRaisesRegex(ValueError, 'P > 0'):
      statistics.bootstrap(np.zeros(0), seed=0)


if __name__ == '__main__':
  absltest.main()
