"""Which two policies a ratio compares, and what it does at extremes."""

import functools

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np

from rljax.objectives import ratios, surrogates, weights
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

  def test_truncated_sampling_biases_by_the_kept_mass(self):
    # Probabilities .5, .3, .2 with top-p .8: the sampler drew from .625, .375.
    scorer, kept, full = (np.log(_f32([p])) for p in (0.5, 0.625, 0.5))
    mask = _f32([1.0])
    naive = contracts.call(ratios.truncated_importance, scorer, kept, mask)
    same = contracts.call(ratios.truncated_importance, scorer, full, mask)
    contracts.close((naive[0, 0], same[0, 0]), (0.8, 1.0))

  def test_three_policies_are_three_tensors(self):
    rng = np.random.default_rng(0)
    mask = np.ones((2, 5), np.float32)
    current, old, behavior = rng.normal(size=(3, 2, 5)).astype(np.float32) / 2

    def objective(current, old, behavior):
      weight = ratios.truncated_importance(old, behavior, mask)
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
