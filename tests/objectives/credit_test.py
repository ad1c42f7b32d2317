"""Returns and advantages of tokens, with environment tokens between them."""

import functools

from absl.testing import absltest, parameterized
import numpy as np

from rljax.objectives import credit
from tests import contracts


def _f32(*rows):
  return np.array(rows, np.float32)


def _gae(reward, value, mask, discount, decay):
  fn = functools.partial(credit.gae, discount=discount, decay=decay)
  return contracts.call(fn, reward, value, mask)


class CreditTest(parameterized.TestCase):
  def test_an_observation_does_not_cut_the_return(self):
    fn = functools.partial(credit.reward_to_go, discount=0.5)
    out = contracts.call(fn, _f32([0, 0, 1]), _f32([1, 0, 1]))
    contracts.close(out, [[0.5, 0.0, 1.0]])

  def test_a_masked_value_is_not_bootstrapped(self):
    out = _gae(_f32([0, 1, 0]), _f32([0, 0, 100]), _f32([1, 1, 0]), 1.0, 0.95)
    contracts.close(out, [[0.95, 1.0, 0.0]])

  def test_a_reward_on_a_trailing_observation_is_not_lost(self):
    reward, mask = _f32([0, 0, 0, 2]), _f32([1, 1, 0, 0])
    fn = functools.partial(credit.reward_to_go, discount=0.5)
    contracts.close(contracts.call(fn, reward, mask), [[1.0, 2.0, 0.0, 0.0]])

  def test_a_reward_behind_a_tool_is_paid_to_the_last_sampled_token(self):
    reward, mask = _f32([0, 0, 1]), _f32([1, 1, 0])
    fn = functools.partial(credit.reward_to_go, discount=0.5)
    contracts.close(contracts.call(fn, reward, mask), [[0.5, 1.0, 0.0]])
    # Without critic and decay, GAE shows where it lies.
    out = _gae(reward, reward * 0, mask, 1.0, 0.0)
    contracts.close(out, [[0.0, 1.0, 0.0]])

  def test_gae_equals_that_of_the_compressed_sequence(self):
    rng = np.random.default_rng(0)
    mask = _f32([1, 1, 0, 0, 1, 0, 1, 1, 0])
    keep = mask[0] > 0
    reward, value = rng.normal(size=(2, 1, 9)).astype(np.float32)
    short = (reward * mask)[:, keep], value[:, keep], mask[:, keep]
    out = _gae(reward * mask, value, mask, 0.9, 0.8)
    contracts.close(out[:, keep], _gae(*short, 0.9, 0.8))

  def test_gae_by_hand(self):
    # delta = [1 + .5 * 2 - 1, 0 + .5 * 4 - 2, 3 - 4]; decay .5 * .5.
    out = _gae(_f32([1, 0, 3]), _f32([1, 2, 4]), _f32([1, 1, 1]), 0.5, 0.5)
    contracts.close(out, [[1.0 - 0.0625, -0.25, -1.0]])

  def test_no_decay_is_the_return_less_the_value(self):
    rng = np.random.default_rng(1)
    reward, value = rng.normal(size=(2, 3, 5)).astype(np.float32)
    mask = np.ones((3, 5), np.float32)
    fn = functools.partial(credit.reward_to_go, discount=0.7)
    returns = contracts.call(fn, reward, mask)
    contracts.close(_gae(reward, value, mask, 0.7, 1.0), returns - value, 5e-6)

  def test_one_terminal_reward_is_broadcast(self):
    mask = contracts.ragged_mask()
    adv = np.array([1.0, -2.0, 3.0, 4.0, 0.5], np.float32)
    last = mask.shape[1] - 1 - np.argmax(mask[:, ::-1], axis=1)
    reward = np.zeros_like(mask)
    reward[np.arange(5), last] = adv
    contracts.close(
      contracts.call(credit.reward_to_go, reward * mask, mask),
      contracts.call(credit.broadcast, adv, mask),
    )

  @parameterized.parameters(0.0, 0.6, 1.0)
  def test_lambda_returns_follow_their_recursion(self, decay):
    rng = np.random.default_rng(2)
    reward, value = rng.normal(size=(2, 1, 4)).astype(np.float32)
    mask = _f32([1, 1, 0, 1])
    fn = functools.partial(credit.lambda_return, discount=0.9, decay=decay)
    out = contracts.call(fn, reward * mask, value, mask)[0]
    r, v = reward[0], value[0]
    last = r[3]
    middle = r[1] + 0.9 * ((1 - decay) * v[3] + decay * last)
    first = r[0] + 0.9 * ((1 - decay) * v[1] + decay * middle)
    contracts.close(out, [first, middle, 0.0, last], 5e-6)

  def test_one_step_and_whole_returns_are_limits(self):
    rng = np.random.default_rng(3)
    reward, value = rng.normal(size=(2, 3, 5)).astype(np.float32)
    mask = np.ones((3, 5), np.float32)
    fn = functools.partial(credit.lambda_return, discount=0.9, decay=1.0)
    whole = functools.partial(credit.reward_to_go, discount=0.9)
    contracts.close(
      contracts.call(fn, reward, value, mask),
      contracts.call(whole, reward, mask),
      5e-6,
    )

  def test_remax_subtracts_the_greedy_reward_once(self):
    reward, mask = _f32([0, 0, 3], [1, 0, 0]), _f32([1, 1, 1], [1, 0, 0])
    baseline = np.array([1, 2], np.float32)
    out = contracts.call(credit.remax, reward, baseline, mask)
    contracts.close(out, [[2, 2, 2], [-1, 0, 0]])

  def test_reinforce_plus_plus_by_hand(self):
    # Rewards to go 2, 2 and -1 over three tokens: mean 1, variance 3.
    reward, mask = _f32([0, 2], [-1, 0]), _f32([1, 1], [1, 0])
    out = contracts.call(credit.reinforce_plus_plus, reward, mask)
    root = np.sqrt(3)
    contracts.close(out, [[1 / root, 1 / root], [-2 / root, 0]])
    adv = np.array([2, -1], np.float32)
    same = contracts.call(credit.reinforce_plus_plus_baseline, adv, mask)
    contracts.close(same, out)

  def test_too_few_tokens_to_whiten_give_zero(self):
    # verl raises for none and for one.
    for mask in (_f32([0, 0]), _f32([1, 0])):
      out = contracts.call(credit.whiten, _f32([3, 4]), mask)
      self.assertEqual(out.tolist(), [[0.0, 0.0]])

  def test_a_discount_above_one_is_refused(self):
    with self.assertRaisesRegex(ValueError, 'discount=1.5'):
      credit.reward_to_go(_f32([1]), _f32([1]), discount=1.5)


if __name__ == '__main__':
  absltest.main()
