"""Which two policies a ratio compares, and what it does at extremes."""

import functools

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np

from rljax.objectives import corrections, ratios, surrogates, weights
from tests import contracts


def _f32(*rows):
  return np.array(rows, np.float32)


def _loss(logp, old, mask, adv, log_ratio=ratios.token):
  objective = surrogates.clip(log_ratio(logp, old, mask), adv)
  return -jnp.sum(objective * weights.sequence_mean_token_mean(mask))


_value_and_grad = jax.jit(jax.value_and_grad(_loss), static_argnums=4)


class RatiosTest(parameterized.TestCase):
  @parameterized.product(adv=(1.0, -1.0), present=(1.0, 0.0))
  def test_a_vanished_sampler_probability(self, adv, present):
    # exp(-2 + 91) overflows float32.
    value, slope = _value_and_grad(
      _f32([-2, -1]),
      _f32([-91, -1]),
      _f32([present, 1]),
      _f32([adv, adv]),
      ratios.token,
    )
    self.assertTrue(np.isfinite(value) and np.isfinite(slope).all())

  def test_a_sequence_far_off_leaves_its_neighbors_alone(self):
    old = np.zeros((2, 3), np.float32)
    mask, adv = np.ones((2, 3), np.float32), _f32([-1] * 3, [1] * 3)
    near = _f32([0.1, 0.0, -0.1], [0.1, 0.05, 0.0])
    far = near + _f32([100] * 3, [0] * 3)
    _, base = _value_and_grad(near, old, mask, adv, ratios.sequence)
    value, slope = _value_and_grad(far, old, mask, adv, ratios.sequence)
    self.assertTrue(np.isfinite(value) and np.isfinite(slope).all())
    np.testing.assert_array_equal(slope[1], base[1])

  def test_sequence_ratios_by_hand(self):
    mask = _f32([1, 1, 0, 0], [1, 1, 1, 1])
    delta = _f32([0.1, 0.2, 9, 9], [-0.2, 0, 0.1, 0.3])
    adv = _f32([1] * 4, [-1] * 4)
    row = contracts.call(ratios.sequence, delta, delta * 0, mask)
    contracts.close(np.exp(row[:, 0]), [1.161834, 1.051271])
    np.testing.assert_array_equal(row, row[:, :1] * mask)
    value, slope = _value_and_grad(delta, delta * 0, mask, adv, ratios.sequence)
    self.assertAlmostEqual(float(value), -0.055282, delta=1e-6)
    contracts.close(slope, [[-0.290459] * 2 + [0] * 2, [0.131409] * 4])

  def test_the_clamp_is_an_argument(self):
    logp, old, mask = _f32([5.0, -5.0]), _f32([0.0, 0.0]), _f32([1.0, 1.0])
    fn = functools.partial(ratios.token, clamp=2.0)
    contracts.close(contracts.call(fn, logp, old, mask), [[2.0, -2.0]])
    far = functools.partial(ratios.sequence, clamp=1.0)
    contracts.close(contracts.call(far, logp + 9, old, mask), [[1.0, 1.0]])

  def test_both_gradients_of_a_sequence_ratio(self):
    # The loss has one gradient for equal advantages, whichever form; with
    # advantages per token the forms differ.
    mask = _f32([1, 1, 0, 0], [1, 1, 1, 1])
    delta = _f32([0.1, 0.2, 9, 9], [-0.2, 0, 0.1, 0.3])
    adv = _f32([1] * 4, [-1] * 4)
    value, slope = _value_and_grad(
      delta, delta * 0, mask, adv, ratios.sequence_token
    )
    self.assertAlmostEqual(float(value), -0.055282, delta=1e-6)
    contracts.close(slope, [[-0.290459] * 2 + [0] * 2, [0.131409] * 4])
    ones = np.ones((2, 4), np.float32)
    through = contracts.gradient(ratios.sequence, delta, delta * 0, ones)
    own = contracts.gradient(ratios.sequence_token, delta, delta * 0, ones)
    spread = 1.0 + 0.1 * np.arange(8).reshape(2, 4)
    contracts.close(through, spread.mean(1, keepdims=True) * ones)
    contracts.close(own, spread)

  def test_the_sum_of_a_row_is_its_importance(self):
    mask = _f32([1, 0, 1])
    logp, old = _f32([-1.0, 5, -2.0]), _f32([-1.5, 7, -2.25])
    row = contracts.call(ratios.sequence_sum, logp, old, mask)
    contracts.close(row, [[0.75, 0, 0.75]])
    contracts.close(
      contracts.call(ratios.sequence, logp, old, mask), [[0.375, 0, 0.375]]
    )

  @parameterized.parameters(
    # A good token above the range and a bad one below it are clipped.
    (1.0, [0.1, 0.9, -0.9], [0.1, 0.4, -0.9]),
    (-1.0, [0.1, 0.9, -0.9], [0.1, 0.9, -0.4]),
    (0.0, [0.1, 0.9, -0.9], [0.0, 0.0, 0.0]),
  )
  def test_geometric_mean_by_hand(self, adv, delta, clipped):
    mask, adv = np.ones((1, 3), np.float32), np.full((1, 3), adv, np.float32)
    delta, old = _f32(delta), np.zeros((1, 3), np.float32)
    row = contracts.call(ratios.geometric_mean, delta, old, mask, adv)
    contracts.close(row, np.mean(clipped) * mask)
    slope = contracts.gradient(ratios.geometric_mean, delta, old, mask, adv)
    moves = np.array(clipped) == np.array(delta[0], np.float64).round(6)
    np.testing.assert_array_equal(slope[0] != 0, moves & (adv[0] != 0))

  def test_geometric_mean_inside_the_range_is_the_sequence_ratio(self):
    rng, mask = np.random.default_rng(2), contracts.ragged_mask()
    delta, adv = rng.uniform(-0.3, 0.3, (2, *mask.shape)).astype(np.float32)
    inside = contracts.call(ratios.geometric_mean, delta, delta * 0, mask, adv)
    contracts.close(
      inside, contracts.call(ratios.sequence, delta, delta * 0, mask)
    )

  @parameterized.parameters(
    (ratios.token, {'clamp': 0.0}, 'clamp=0.0'),
    (ratios.sequence, {'clamp': -1.0}, 'clamp=-1.0'),
    (ratios.sequence_token, {'clamp': 0}, 'clamp=0'),
    (ratios.sequence_sum, {'clamp': -20.0}, 'clamp=-20.0'),
  )
  def test_refuses(self, fn, settings, message):
    x = np.zeros((1, 2), np.float32)
    with self.assertRaisesRegex(ValueError, message):
      fn(x, x, x, **settings)
    with self.assertRaisesRegex(ValueError, r'its mask has \(1, 2\)'):
      fn(np.zeros((1, 3), np.float32), x, x)

  def test_refuses_a_negative_range(self):
    x = np.zeros((1, 2), np.float32)
    with self.assertRaisesRegex(ValueError, 'low=-0.2'):
      ratios.geometric_mean(x, x, x, x, low=-0.2)

  def test_truncated_sampling_biases_by_the_kept_mass(self):
    # Probabilities .5, .3, .2 with top-p .8: the sampler drew from .625, .375.
    scorer, kept, full = (np.log(_f32([p])) for p in (0.5, 0.625, 0.5))
    mask = _f32([1.0])
    naive = np.exp(contracts.call(ratios.token, scorer, kept, mask))
    same = np.exp(contracts.call(ratios.token, scorer, full, mask))
    contracts.close((naive[0, 0], same[0, 0]), (0.8, 1.0))

  def test_three_policies_are_three_tensors(self):
    rng = np.random.default_rng(0)
    mask = np.ones((2, 5), np.float32)
    current, old, behavior = rng.normal(size=(3, 2, 5)).astype(np.float32) / 2

    def objective(current, old, behavior):
      weight = corrections.truncate(ratios.token(old, behavior, mask), mask)
      ratio = jnp.exp(ratios.token(current, old, mask))
      return jnp.sum(weight * ratio)

    differentiate = jax.jit(jax.grad(objective, argnums=(0, 1, 2)))
    slopes = differentiate(current, old, behavior)
    weight = np.minimum(np.exp(old - behavior), 2.0)
    each = weight * np.exp(current - old)
    contracts.close(slopes[0], each)
    contracts.close(slopes[1], -each)
    self.assertFalse(np.any(slopes[2]))

  def test_stale_rows_are_clipped(self):
    rng = np.random.default_rng(1)
    mask, adv = np.ones((1, 64), np.float32), np.ones((1, 64), np.float32)
    old = rng.normal(size=(1, 64)).astype(np.float32)
    stale = old + rng.normal(size=(1, 64)).astype(np.float32)
    _, slope = _value_and_grad(stale, old, mask, adv, ratios.token)
    clipped = np.exp(stale - old) > 1.2
    self.assertGreater(clipped.mean(), 0.2)
    np.testing.assert_array_equal(np.asarray(slope) == 0.0, clipped)


if __name__ == '__main__':
  absltest.main()
