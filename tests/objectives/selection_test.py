"""Which tokens, rows and groups are kept."""

import functools

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np

from rljax.core import groups
from rljax.objectives import selection, weights
from tests import contracts


def _top(entropy, mask, share):
  fn = functools.partial(selection.top_entropy, share=share)
  return contracts.call(fn, np.float32(entropy), np.float32(mask))


class TopEntropyTest(parameterized.TestCase):
  @parameterized.parameters(
    # Five tokens with entropies 1..5: the 0.8-quantile is 4.2, and so on.
    (0.2, [0, 0, 0, 0, 1]),
    (0.5, [0, 0, 1, 1, 1]),
    (0.0, [0, 0, 0, 0, 1]),
    (1.0, [1, 1, 1, 1, 1]),
  )
  def test_by_hand(self, share, expected):
    entropy = [[3, 9, 5], [1, 4, 2]]
    mask = [[1, 0, 1], [1, 1, 1]]
    order = [(1, 0), (1, 2), (0, 0), (1, 1), (0, 2)]
    kept = _top(entropy, mask, share)
    self.assertEqual(kept[0, 1], 0.0)
    self.assertEqual([kept[at] for at in order], expected)

  def test_equal_entropies_are_kept_together(self):
    np.testing.assert_array_equal(_top([[0.5] * 4], [[1] * 4], 0.25), 1.0)

  @parameterized.parameters(np.nan, np.inf, -np.inf)
  def test_masked_values_do_not_matter(self, absent):
    entropy = np.float32([[1, 2, absent], [3, absent, 4]])
    mask = np.float32([[1, 1, 0], [1, 0, 1]])
    np.testing.assert_array_equal(
      _top(entropy, mask, 0.5), [[0, 0, 0], [1, 0, 1]]
    )
    np.testing.assert_array_equal(_top(entropy, mask * 0, 0.5), 0.0)
    fn = functools.partial(selection.top_entropy, share=0.5)
    np.testing.assert_array_equal(contracts.gradient(fn, entropy, mask), 0.0)

  def test_refuses_a_share_above_one(self):
    x = np.ones((1, 2), np.float32)
    with self.assertRaisesRegex(ValueError, 'share=80'):
      selection.top_entropy(x, x, share=80)

  def test_memory_is_bounded(self):
    shape = jax.ShapeDtypeStruct((512, 4096), jnp.float32)
    program = jax.jit(selection.top_entropy).lower(shape, shape).compile()
    memory = program.memory_analysis().temp_size_in_bytes
    self.assertLessEqual(memory, 4 * 512 * 4096 * 4)


class GroupsTest(parameterized.TestCase):
  def test_rules_are_lifted_by_group_id(self):
    # Interleaved groups; the third has one reward, the fourth none.
    ids = np.array([0, 1, 0, 1, 2, 0, 1, 3], np.int32)
    reward = np.float32([1, 0.1, 0, 0.1, 1, 1, 0.1, np.nan])
    layout = groups.from_ids(ids, 4, 3)
    keep = groups.reduce(selection.varies, layout, reward)
    np.testing.assert_array_equal(keep, [True, False, False, False])

  @parameterized.parameters(
    (0.0, 1.0, [0, 1, 1, 1, 0]),
    (0.2, 0.8, [0, 1, 1, 1, 0]),
    (0.25, 0.75, [0, 0, 1, 0, 0]),
    (0.2, 1.0, [0, 1, 1, 1, 0]),
    (-1.0, 2.0, [1, 1, 1, 1, 1]),
  )
  def test_a_band_of_pass_rates(self, low, high, expected):
    rewards = np.float32([[i < right for i in range(4)] for right in range(5)])
    rule = functools.partial(selection.mean_between, low=low, high=high)
    keep = jax.vmap(rule)(rewards, np.ones((5, 4), bool))
    np.testing.assert_array_equal(keep, np.array(expected, bool))

  def test_for_binary_rewards_both_rules_agree(self):
    rewards = np.float32(np.random.default_rng(0).integers(0, 2, (64, 3)))
    valid = np.random.default_rng(1).random((64, 3)) < 0.8
    np.testing.assert_array_equal(
      jax.vmap(selection.varies)(rewards, valid),
      jax.vmap(selection.mean_between)(rewards, valid),
    )

  def test_refuses(self):
    rows = np.zeros((2, 3), np.float32)
    with self.assertRaisesRegex(ValueError, r'reward\[2, 3\] is not one group'):
      selection.varies(rows, rows > 0)
    with self.assertRaisesRegex(ValueError, 'low=0.8, high=0.2'):
      selection.mean_between(rows[0], rows[0] > 0, low=0.8, high=0.2)


class LengthTest(absltest.TestCase):
  def test_both_ends_are_inside(self):
    mask = np.tril(np.ones((5, 5), np.float32), -1)  # 0 to 4 tokens
    keep = selection.length_between(mask, low=1, high=3)
    np.testing.assert_array_equal(keep, [False, True, True, True, False])
    weight = weights.keep_rows(mask, keep)
    np.testing.assert_array_equal(np.sum(weight, axis=1), [0, 1, 2, 3, 0])

  def test_refuses(self):
    with self.assertRaisesRegex(ValueError, 'low=3, high=2'):
      selection.length_between(np.ones((1, 2), np.float32), low=3, high=2)


if __name__ == '__main__':
  absltest.main()
