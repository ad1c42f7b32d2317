"""Group advantages where peers went wrong."""

from absl.testing import absltest, parameterized
import numpy as np

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


if __name__ == '__main__':
  absltest.main()
