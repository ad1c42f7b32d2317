"""Groups are made by id, and one-group functions reach the right rows."""

import functools

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np

from rljax.core import groups, masked
from rljax.objectives import advantages
from tests import contracts

_apply = jax.jit(groups.apply, static_argnums=0)
_reduce = jax.jit(groups.reduce, static_argnums=0)


def _by_hand(reward, ids, valid):
  """Returns centered rewards with a loop over groups."""
  out = np.zeros(len(reward), np.float32)
  for group in np.unique(ids):
    rows = (ids == group) & valid
    out[rows] = reward[rows] - reward[rows].mean() if rows.any() else 0.0
  return out


class GroupsTest(parameterized.TestCase):
  def test_uniform_rows_are_contiguous(self):
    layout = groups.uniform(2, 3)
    np.testing.assert_array_equal(layout.index, [[0, 1, 2], [3, 4, 5]])
    self.assertTrue(layout.valid.all())
    same = groups.from_ids(np.repeat(np.arange(2), 3), 2, 3)
    np.testing.assert_array_equal(same.index, layout.index)

  @parameterized.parameters(False, True)
  def test_ragged_groups_by_id(self, traced):
    ids = np.array([2, 0, 2, 1, 0, 2, 2], np.int32)  # sizes 2, 1, 4, 0
    make = functools.partial(groups.from_ids, prompts=4, size=5)
    with contracts.strict():
      layout = (jax.jit(make) if traced else make)(ids)
    self.assertEqual(layout.valid.sum(1).tolist(), [2, 1, 4, 0])
    members = [
      index[valid].tolist()
      for index, valid in zip(
        np.array(layout.index), np.array(layout.valid), strict=True
      )
    ]
    self.assertEqual(members, [[1, 4], [3], [0, 2, 5, 6], []])

  def test_permuting_rows_permutes_results(self):
    rng = np.random.default_rng(0)
    ids = np.repeat(np.arange(3), (4, 3, 1)).astype(np.int32)
    reward = rng.normal(size=8).astype(np.float32)
    valid = np.array([1, 1, 0, 1, 1, 1, 1, 1], bool)
    for order in (np.arange(8), rng.permutation(8), rng.permutation(8)):
      layout = groups.from_ids(ids[order], 3, 4)
      with contracts.strict():
        out = _apply(
          advantages.center,
          layout,
          jnp.asarray(reward[order]),
          valid=jnp.asarray(valid[order]),
        )
      contracts.close(out, _by_hand(reward, ids, valid)[order])

  def test_survivors_of_an_incomplete_group(self):
    ids = np.repeat(np.arange(3), (4, 3, 1)).astype(np.int32)
    reward = jnp.array([1.0, 0.0, jnp.nan, 0.0, 1.0, 1.0, 0.0, 7.0])
    out = _apply(advantages.center, groups.from_ids(ids, 3, 4), reward)
    third = 1 / 3
    contracts.close(
      out, [2 * third, -third, 0, -third, third, third, -2 * third, 0]
    )

  def test_an_excluded_empty_row_does_not_reach_its_peer(self):
    out = _apply(
      advantages.grpo,
      groups.uniform(1, 2),
      jnp.array([10.0, 0.0]),
      valid=jnp.array([False, True]),
    )
    self.assertEqual(out.tolist(), [0.0, 0.0])

  def test_apply_takes_further_data_and_returns_further_axes(self):
    def weigh(reward, features, valid):
      return reward[:, None] * features * valid[:, None]

    features = jnp.arange(8.0).reshape(4, 2)
    reward = jnp.array([1.0, 2.0, 3.0, 4.0])
    out = _apply(weigh, groups.uniform(2, 2), reward, features)
    np.testing.assert_array_equal(out, features * reward[:, None])

  def test_reduce_counts_valid_members(self):
    layout = groups.from_ids(np.array([0, 2, 0, 0], np.int32), 3, 3)
    reward = jnp.array([1.0, 5.0, jnp.nan, 3.0])
    valid = jnp.isfinite(reward)
    means = _reduce(masked.mean, layout, reward, valid=valid)
    self.assertEqual(means.tolist(), [2.0, 0.0, 5.0])

  def test_rows_in_no_group_get_zero(self):
    layout = groups.from_ids(np.array([0, 1], np.int32), 2, 1)
    out = _apply(advantages.reinforce, layout, jnp.array([2.0, 3.0, 4.0]))
    self.assertEqual(out.tolist(), [2.0, 3.0, 0.0])

  def test_what_does_not_fit_is_an_error_on_the_host(self):
    with self.assertRaisesRegex(ValueError, 'group 1 has 3 rows; at most 2'):
      groups.from_ids(np.array([0, 1, 1, 1]), 2, 2)
    for ids in ([0, 2], [-1, 0]):
      with self.assertRaisesRegex(ValueError, 'there are 2 groups'):
        groups.from_ids(np.array(ids), 2, 2)

  def test_rows_that_are_not_those_of_the_groups(self):
    layout, three = groups.uniform(2, 2), jnp.array([1.0, 0.0, 5.0])
    for lift in (groups.apply, groups.reduce):
      with self.assertRaisesRegex(ValueError, r'rows 0\.\.3; there are 3 rows'):
        lift(advantages.grpo, layout, three)
      with self.assertRaisesRegex(ValueError, r'arrays of \[2, 4\] rows'):
        lift(advantages.grpo, layout, jnp.ones(4), valid=jnp.ones(2))

  def test_what_does_not_fit_leaves_every_group_inside_jit(self):
    ids = jnp.array([0, 1, 1, 1, -1, 5])
    layout = jax.jit(lambda ids: groups.from_ids(ids, 2, 2))(ids)
    out = _apply(advantages.reinforce, layout, jnp.ones(6))
    self.assertEqual(out.tolist(), [1, 1, 1, 0, 0, 0])


if __name__ == '__main__':
  absltest.main()
