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


if __name__ == '__main__':
  absltest.main()
