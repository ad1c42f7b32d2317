"""Aggregations over splits, shards and gated rows."""

import functools

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np

from rljax.core import types
from rljax.objectives import weights
from tests import contracts

MODES = {
  'token_mean': weights.token_mean,
  'sequence_mean_token_mean': weights.sequence_mean_token_mean,
  'sequence_mean_token_sum': weights.sequence_mean_token_sum,
  'constant': functools.partial(weights.constant, denominator=24.0),
  'dr_grpo': functools.partial(weights.dr_grpo, max_tokens=6),
}


def _mask(lengths, size=6):
  return (np.arange(size) < np.array(lengths)[:, None]).astype(np.float32)


def _batch(mode):
  """Returns log-probs, advantages and weights of 8 rows, one of them empty."""
  logp, adv = np.random.default_rng(0).normal(size=(2, 8, 6))
  weight = contracts.call(MODES[mode], _mask([3, 0, 6, 1, 2, 6, 5, 4]))
  return logp.astype(np.float32), adv.astype(np.float32), weight


@jax.jit
@jax.value_and_grad
def _loss_and_gradient(scale, logp, adv, weight):
  return -jnp.sum(jnp.tanh(scale * logp) * adv * weight)


class WeightsTest(parameterized.TestCase):
  def test_a_token_mean_is_no_mean_of_means(self):
    loss = np.array([[4.0, 0, 0], [0, 0, 0]], np.float32)
    weight = contracts.call(weights.token_mean, _mask([1, 3], 3))
    whole = np.sum(loss * weight)
    split = sum(np.sum(loss[row] * weight[row]) for row in (0, 1))
    self.assertEqual(whole, 1.0)
    self.assertEqual(split, 1.0)

  def test_groups_count_alike(self):
    mask = _mask([2, 0, 1, 4, 0, 3])
    # Rows 0 and 3; 1 and 4, without tokens; 2 and an absent one.
    index = np.array([[0, 3], [1, 4], [2, 0]], np.int32)
    valid = np.array([[True, True], [True, True], [True, False]])
    weight = contracts.call(
      lambda mask: weights.group_mean_token_mean(
        mask, types.Groups(index=index, valid=valid)
      ),
      mask,
    )
    wanted = np.array([1 / 12, 0, 1 / 2, 1 / 12, 0, 0])[:, None] * mask
    contracts.close(weight, wanted)

  @parameterized.product(mode=tuple(MODES), parts=(2, 4, 8))
  def test_any_accumulation_gives_one_loss_and_gradient(self, mode, parts):
    logp, adv, weight = _batch(mode)
    one = _loss_and_gradient(0.3, logp, adv, weight)
    found = [
      _loss_and_gradient(0.3, logp[rows], adv[rows], weight[rows])
      for rows in np.arange(8).reshape(parts, -1)
    ]
    contracts.close(np.sum(found, axis=0), one, 1e-6)

  @parameterized.parameters(*MODES)
  def test_rows_over_eight_devices_give_one_loss_and_gradient(self, mode):
    mesh = jax.make_mesh((8,), ('data',))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('data'))
    batch = _batch(mode)
    spread = _loss_and_gradient(0.3, *jax.device_put(batch, rows))
    contracts.close(spread, _loss_and_gradient(0.3, *batch), 1e-6)

  @parameterized.parameters(*MODES)
  def test_rows_over_eight_devices_share_the_denominator(self, mode):
    mask = _mask([3, 0, 6, 1, 2, 6, 5, 4])
    mesh = jax.make_mesh((8,), ('data',))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('data'))
    spread = jax.jit(MODES[mode], in_shardings=rows, out_shardings=rows)(mask)
    contracts.close(spread, contracts.call(MODES[mode], mask))

  @parameterized.parameters(
    (weights.constant, 'denominator'), (weights.dr_grpo, 'max_tokens')
  )
  def test_a_denominator_has_no_default(self, fn, name):
    with self.assertRaisesRegex(TypeError, name):
      fn(jnp.ones((2, 3)))

  def test_dr_grpo_counts_empty_rows_and_the_limit_not_the_padding(self):
    weight = contracts.call(MODES['dr_grpo'], _mask([2, 0, 5], 9))
    contracts.close(weight[0], [1 / 18] * 2 + [0] * 7)

  def test_rows_are_kept_out_of_one_or_both_parts(self):
    mask, keep = _mask([2, 4], 4), np.array([True, False])
    weight = contracts.call(weights.token_mean, mask)
    numerator = contracts.call(weights.keep_rows, weight, keep)
    contracts.close(numerator, [[1 / 6, 1 / 6, 0, 0], [0, 0, 0, 0]])
    kept = contracts.call(weights.keep_rows, mask, keep)
    both = contracts.call(weights.token_mean, kept)
    contracts.close(both, [[1 / 2, 1 / 2, 0, 0], [0, 0, 0, 0]])

  def test_a_gate_ignores_what_it_drops(self):
    weight = np.array([[1.0, 2.0], [np.nan, np.inf]], np.float32)
    out = contracts.call(weights.keep_rows, weight, np.array([True, False]))
    np.testing.assert_array_equal(out, [[1, 2], [0, 0]])

  def test_no_token_at_all_gives_loss_zero_with_gradient_zero(self):
    mask = np.zeros((2, 3), np.float32)
    for aggregate in MODES.values():
      weight = contracts.call(aggregate, mask)
      slope = jax.grad(lambda x, w=weight: jnp.sum(jnp.exp(x) * w))(mask)
      self.assertFalse(np.any(weight) or np.any(slope))


if __name__ == '__main__':
  absltest.main()
