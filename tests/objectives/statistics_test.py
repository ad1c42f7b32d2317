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

  @parameterized.parameters(1, 2, 3, 5, 6)
  def test_best_of_k_is_the_mean_over_subsets(self, k):
    scores = np.array([0.3, 0.9, 0.1, 0.9, 0.5, 0.9])
    values = np.array([1.0, 0.0, 1.0, 1.0, 0.0, 0.5])
    means = []
    for subset in itertools.combinations(range(6), k):
      best = max(scores[i] for i in subset)
      means.append(np.mean([values[i] for i in subset if scores[i] == best]))
    found = statistics.best_of_k(scores, values, k)
    self.assertAlmostEqual(found, np.mean(means), delta=1e-12)

  def test_best_of_k_by_value_is_pass_at_k(self):
    values = np.array([1, 0, 0, 1, 0, 0, 0, 0])
    for k in range(1, 9):
      found = statistics.best_of_k(values, values, k)
      wanted = float(statistics.pass_at_k(8, 2, k))
      self.assertAlmostEqual(found, wanted, delta=1e-12)

  @parameterized.parameters(1, 2, 3, 4, 5, 8)
  def test_maj_at_k_is_the_mean_over_subsets(self, k):
    answers = ['a', 'b', 'a', None, 'c', 'b', None, 'b']
    right = {'a': 1.0, 'b': 0.0, 'c': 0.5, None: 1.0}
    means = []
    for subset in itertools.combinations(answers, k):
      votes = [answer for answer in subset if answer is not None]
      most = max([votes.count(answer) for answer in votes], default=0)
      won = {answer for answer in votes if votes.count(answer) == most}
      means.append(np.mean([right[answer] for answer in won]) if won else 0.0)
    values = np.array([right[answer] for answer in answers])
    found = statistics.maj_at_k(answers, values, k)
    self.assertAlmostEqual(found, np.mean(means), delta=1e-12)

  def test_maj_of_one_is_the_mean_and_large_counts_work(self):
    answers = [i % 5 for i in range(256)]
    values = np.array([answer == 2 for answer in answers])
    self.assertAlmostEqual(
      statistics.maj_at_k(answers, values, 1), values.mean(), delta=1e-12
    )
    # Four answers of 51 and one of 52: the last wins when all are drawn.
    values = np.array([answer == 0 for answer in answers])
    self.assertEqual(statistics.maj_at_k(answers, values, 256), 1.0)

  def test_majority_prefers_what_was_seen_first(self):
    self.assertEqual(statistics.majority(['b', 'a'], np.array([0.2, 0.9])), 0.2)
    self.assertEqual(
      statistics.majority(['b', 'a', 'a'], np.array([0.2, 0.9, 0.4])), 0.9
    )

  def test_verl_draws_with_replacement(self):
    values = np.array([1, 0, 0, 0, 0, 0, 0, 0])
    mean, deviation = statistics.verl_best_at_n(values, 8, draws=20_000)
    exact = 1 - (7 / 8) ** 8
    # Four standard errors of 20,000 draws.
    self.assertAlmostEqual(mean, exact, delta=0.0135)
    self.assertAlmostEqual(deviation, (exact * (1 - exact)) ** 0.5, delta=0.01)
    self.assertEqual(statistics.best_of_k(values, values, 8), 1.0)

  def test_impossible_k_is_refused(self):
    with self.assertRaisesRegex(ValueError, r'k=4 must be in \[1, 3\]'):
      statistics.best_of_k(np.zeros(3), np.zeros(3), 4)
    with self.assertRaisesRegex(ValueError, r'k=0 must be in \[1, 3\]'):
      statistics.maj_at_k(['a'] * 3, np.zeros(3), 0)
    with self.assertRaisesRegex(ValueError, r'\(3,\) and values \(2,\)'):
      statistics.best_of_k(np.zeros(3), np.zeros(2), 1)


if __name__ == '__main__':
  absltest.main()
