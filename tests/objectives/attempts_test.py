"""Advantages for the best of several attempts, by enumeration."""

import functools
import itertools

from absl.testing import absltest, parameterized
import jax
import numpy as np

from rljax.objectives import advantages, attempts
from tests import contracts


def _of(fn, rewards):
  reward = np.array(rewards, np.float32)
  return contracts.call(fn, reward, np.ones(reward.shape, bool))


def _enumerated(reward, k):
  """Returns the mean z-score of the sets of k that hold each member."""
  sets = list(itertools.combinations(range(len(reward)), k))
  best = np.array([max(reward[i] for i in chosen) for chosen in sets])
  score = (best - best.mean()) / best.std()
  return [
    np.mean([score[j] for j, chosen in enumerate(sets) if i in chosen])
    for i in range(len(reward))
  ]


def _weight(fn, size, chance):
  """Returns the mean gradient over d log p / d logit, for rewards 0 and 1."""
  total = 0.0
  patterns = np.array(list(itertools.product((0, 1), repeat=size)), np.float32)
  adv = np.asarray(jax.jit(jax.vmap(fn))(patterns, np.ones_like(patterns)))
  for reward, a in zip(patterns, adv, strict=True):
    odds = np.prod(np.where(reward > 0, chance, 1 - chance))
    total += odds * np.mean(a * (reward - chance))
  return total / (1 - chance)


class AttemptsTest(parameterized.TestCase):
  def test_only_the_best_leads(self):
    contracts.close(_of(attempts.best_margin, [3, 1, 2]), [1, 0, 0])
    self.assertFalse(_of(attempts.best_margin, [3, 1, 3]).any())
    self.assertEqual(_of(attempts.best_margin, [3]).tolist(), [0.0])
    scaled = _of(attempts.best_margin_zscore, [3, 1, 2])
    contracts.close(scaled, [1, 0, 0], 5e-6)

  @parameterized.parameters(2, 3, 4)
  def test_best_of_k_by_enumeration(self, k):
    reward = np.random.default_rng(k).normal(size=5).astype(np.float32)
    for row in (reward, np.array([1, 0, 0, 1, 0], np.float32)):
      if k == 4 and row[1] == 0:
        continue  # every four of five hold a success
      adv = _of(functools.partial(attempts.best_of_k, k=k), row)
      contracts.close(adv, _enumerated(row, k), 1e-5)
      self.assertAlmostEqual(float(adv.sum()), 0.0, delta=1e-5)

  def test_one_attempt_is_the_zscore(self):
    reward = [0.3, 2.0, -1.0, 0.3, np.nan]
    one = _of(functools.partial(attempts.best_of_k, k=1), reward)
    z = _of(functools.partial(advantages.zscore, ddof=0, eps=0.0), reward)
    contracts.close(one, z, 1e-5)

  def test_sets_that_are_all_alike_teach_nothing(self):
    for reward in ([1, 0, 0, 0], [1, 1, 1, 0], [np.nan, 1, 0, np.nan]):
      k = 4 if reward[0] == 1 and reward[1] == 0 else 2
      adv = _of(functools.partial(attempts.best_of_k, k=k), reward)
      self.assertFalse(adv.any(), reward)

  @parameterized.parameters(0, 5)
  def test_impossible_attempts_are_refused(self, k):
    with self.assertRaisesRegex(ValueError, f'k = {k} .* group of 4'):
      attempts.best_of_k(np.ones(4), np.ones(4, bool), k=k)

  def test_maxrl_by_hand(self):
    contracts.close(_of(attempts.maxrl, [1, 0, 0, 0]), [3, -1, -1, -1])
    contracts.close(_of(attempts.maxrl, [0.5, 1, 0]), [0, 1, -1])
    self.assertFalse(_of(attempts.maxrl, [0, 0, 0]).any())
    failed = _of(attempts.maxrl_every_group, [0, 0, np.nan])
    self.assertEqual(failed.tolist(), [-1.0, -1.0, 0.0])

  def test_maxrl_climbs_log_p_by_enumeration(self):
    # 1 - (1 - p)^n and 1 - (1 - p)^(n - 1) at p = 0.3, n = 4.
    every = _weight(attempts.maxrl_every_group, 4, 0.3)
    self.assertAlmostEqual(every, 0.7599, delta=1e-5)
    self.assertAlmostEqual(_weight(attempts.maxrl, 4, 0.3), 0.657, delta=1e-5)


if __name__ == '__main__':
  absltest.main()
