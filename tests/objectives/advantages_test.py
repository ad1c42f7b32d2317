"""Group advantages where peers went wrong."""

import functools

from absl.testing import absltest, parameterized
import numpy as np

from rljax.core import groups
from rljax.objectives import advantages
from tests import contracts


def _of(fn, rewards):
  reward = np.array(rewards, np.float32)
  return contracts.call(fn, reward, np.ones(reward.shape, bool))


class AdvantagesTest(parameterized.TestCase):
  def test_one_row_apart_gets_its_distance(self):
    # A one-pass float32 variance of the other seven is 2.6e-8 instead of 0,
    # and dividing by its root gives -2154 instead of -0.35.
    adv = _of(advantages.leave_one_out, [0.35] * 7 + [0.0])
    contracts.close(adv, [0.05] * 7 + [-0.35])
    scaled = _of(advantages.grpo, [0.35] * 7 + [0.0])
    contracts.close(scaled, [0.353551] * 7 + [-2.474854], 5e-6)

  @parameterized.parameters(([0.1] * 3,), ([0.7] * 4,), ([0.35] * 7,))
  def test_equal_rewards_get_exactly_zero(self, rewards):
    for fn in (
      advantages.center,
      advantages.leave_one_out,
      advantages.grpo,
    ):
      self.assertFalse(_of(fn, rewards).any())

  def test_a_group_of_one(self):
    for fn in (
      advantages.center,
      advantages.leave_one_out,
      advantages.grpo,
    ):
      self.assertEqual(_of(fn, [0.7]).tolist(), [0.0])
    contracts.close(_of(advantages.reinforce, [0.7]), [0.7])

  def test_a_missing_reward_leaves_the_statistics(self):
    rewards = [1.0, np.nan, 0.0, 0.0]
    contracts.close(_of(advantages.center, rewards), [2 / 3, 0, -1 / 3, -1 / 3])
    contracts.close(_of(advantages.leave_one_out, rewards), [1, 0, -0.5, -0.5])
    alone = _of(advantages.grpo, [np.nan, 0.4, np.nan])
    self.assertEqual(alone.tolist(), [0.0, 0.0, 0.0])

  def test_leave_one_out_is_the_mean_of_the_others(self):
    reward = np.random.default_rng(0).normal(size=5).astype(np.float32)
    others = [reward[i] - np.delete(reward, i).mean() for i in range(5)]
    contracts.close(_of(advantages.leave_one_out, reward), others)

  def test_grpo_has_unit_unbiased_variance(self):
    reward = np.random.default_rng(1).normal(size=8).astype(np.float32)
    adv = _of(advantages.grpo, reward)
    self.assertAlmostEqual(np.var(adv, ddof=1), 1.0, delta=1e-5)

  def test_the_others_of_one_row_apart_do_not_vary(self):
    # NeMo-RL's one-pass variance of 7 times 0.35 is 2.6e-8, not 0.
    adv = _of(advantages.leave_one_out_zscore, [0.35] * 7 + [0.0])
    self.assertAlmostEqual(adv[7], -0.35, delta=1e-6)
    # The others of each 0.35 hold the 0: mean 0.3, deviation 0.35 / sqrt(7).
    contracts.close(adv[:7], [0.05 / (0.35 / np.sqrt(7))] * 7, 1e-4)

  def test_leave_one_out_zscore_by_hand(self):
    reward = np.random.default_rng(2).normal(size=5).astype(np.float32)
    expected = [
      (reward[i] - np.delete(reward, i).mean())
      / (np.delete(reward, i).std(ddof=1) + 1e-6)
      for i in range(5)
    ]
    adv = _of(advantages.leave_one_out_zscore, reward)
    contracts.close(adv, expected, 1e-5)

  def test_lengths_weigh_the_baseline(self):
    def of(reward, length):
      data = np.array(reward, np.float32), np.array(length, np.float32)
      return contracts.call(advantages.opo, *data, np.ones(3, bool))

    # Baseline (10 * 1 + 20 * 0 + 30 * 0) / 60.
    contracts.close(of([1, 0, 0], [10, 20, 30]), [5 / 6, -1 / 6, -1 / 6])
    contracts.close(of([1, 0, 0], [7, 7, 7]), [2 / 3, -1 / 3, -1 / 3])
    # verl divides 0 by 0 where nobody has a token.
    self.assertTrue(np.isfinite(of([1, 0, 0], [0, 0, 0])).all())

  def test_each_reward_has_its_own_scale(self):
    # One pays 0 or 1, the other 0 or 100; a z-score of their sum would follow
    # the second alone.
    reward = np.array([[1, 0], [0, 100], [1, 0], [0, 100]], np.float32)
    fn = functools.partial(advantages.gdpo, weights=(1.0, 1.0), ddof=0)
    adv = contracts.call(fn, reward, np.ones(4, bool))
    contracts.close(adv, np.zeros(4), 1e-5)
    fn = functools.partial(advantages.gdpo, weights=(1.0, 0.25), ddof=0)
    adv = contracts.call(fn, reward, np.ones(4, bool))
    contracts.close(adv, [0.75, -0.75, 0.75, -0.75], 1e-5)
    # A missing reward leaves its column; the other still counts.
    reward[0, 1] = np.nan
    adv = contracts.call(fn, reward, np.ones(4, bool))
    self.assertAlmostEqual(adv[0], 1.0, delta=1e-5)

  def test_a_weight_for_each_reward(self):
    with self.assertRaisesRegex(ValueError, r'reward\[4, 2\].*weights\[1\]'):
      advantages.gdpo(np.ones((4, 2)), np.ones(4, bool), weights=(1.0,))

  def test_only_a_group_of_one_keeps_its_reward(self):
    self.assertAlmostEqual(_of(advantages.singleton, [0.7])[0], 0.7, delta=1e-6)
    self.assertFalse(_of(advantages.singleton, [0.7, 0.1]).any())
    alone = _of(advantages.singleton, [np.nan, 0.4, np.nan])
    contracts.close(alone, [0.0, 0.4, 0.0])

  def test_the_scale_of_the_batch_keeps_the_groups_apart(self):
    reward = np.array([1, 0, 1, 0, 4, 0], np.float32)
    layout = groups.uniform(3, 2)
    every = np.ones(6, bool)

    def batch(reward):
      adv = groups.apply(advantages.center, layout, reward)
      return advantages.scale(adv, reward, every, ddof=1, eps=0.0)

    adv = contracts.call(batch, reward)
    std = np.std(reward, ddof=1)
    contracts.close(adv, np.array([0.5, -0.5, 0.5, -0.5, 2, -2]) / std)

  def test_gpg_divides_by_the_rows_that_teach(self):
    def of(adv, signal):
      data = [np.array(x, np.float32) for x in (adv, signal)]
      return contracts.call(advantages.gpg, *data, np.ones(4, bool))

    adv = [0.5, -0.5, 0.0, 0.0]
    contracts.close(of(adv, adv), [1.0, -1.0, 0.0, 0.0])
    # verl counts the rewards that are not 0: here 1, 0, 1, 1.
    contracts.close(of(adv, [1, 0, 1, 1]), [2 / 3, -2 / 3, 0.0, 0.0])
    self.assertFalse(of([0.0] * 4, [0.0] * 4).any())

  def test_incomplete_groups_use_who_is_there(self):
    # Sizes 4, 3 and 1, rows in any order.
    ids = np.array([0, 1, 0, 2, 1, 0, 1, 0], np.int32)
    reward = np.array([1, 1, 0, 1, 0, 0, 0, 1], np.float32)

    def rows(reward):
      layout = groups.from_ids(ids, 3, 4)
      return groups.apply(advantages.center, layout, reward)

    adv = contracts.call(rows, reward)
    third = 1 / 3
    expected = [0.5, 2 * third, -0.5, 0, -third, -0.5, -third, 0.5]
    contracts.close(adv, expected)

  def test_an_empty_response_moves_nobody(self):
    # Two rows, the empty one with a reward of 10 that nobody sampled.
    layout = groups.uniform(1, 2)
    usable = np.array([False, True])

    def rows(reward):
      return groups.apply(advantages.grpo, layout, reward, valid=usable)

    adv = contracts.call(rows, np.array([10, 0], np.float32))
    self.assertEqual(adv.tolist(), [0.0, 0.0])

  def test_an_undefined_ddof_is_refused(self):
    for ddof in (-1, 2):
      with self.assertRaisesRegex(ValueError, f'ddof={ddof}: use 0'):
        advantages.zscore(np.ones(4), np.ones(4, bool), ddof=ddof)


if __name__ == '__main__':
  absltest.main()
