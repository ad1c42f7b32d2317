"""Corrections worked by hand, their limits, and what bounds them."""

import functools

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np

from rljax.objectives import (
  corrections,
  divergences,
  ratios,
  surrogates,
  weights,
)
from tests import contracts

# Ratios of two rows; the last token of the second row is no token.
_RATIO = np.array([[0.25, 1.0, 4.0], [0.5, 8.0, 99.0]], np.float32)
_MASK = np.array([[1, 1, 1], [1, 1, 0]], np.float32)
_LOG = np.log(_RATIO)


def _of(fn, *arrays, **settings):
  return contracts.call(functools.partial(fn, **settings), *arrays)


class WeightsTest(parameterized.TestCase):
  @parameterized.parameters(
    (corrections.truncate, {}, [[0.25, 1, 2], [0.5, 2, 0]]),
    (corrections.truncate, {'cap': 5.0}, [[0.25, 1, 4], [0.5, 5, 0]]),
    (
      corrections.truncate,
      {'floor': 0.5, 'cap': 5.0},
      [[0.5, 1, 4], [0.5, 5, 0]],
    ),
    (corrections.discard, {}, [[0.25, 1, 0], [0.5, 0, 0]]),
    (corrections.icepop, {}, [[0, 1, 4], [0.5, 0, 0]]),
    (corrections.icepop, {'low': 0.9, 'high': 1.1}, [[0, 1, 0], [0, 0, 0]]),
  )
  def test_by_hand(self, fn, settings, expected):
    contracts.close(_of(fn, _LOG, _MASK, **settings), expected)

  def test_levels_by_hand(self):
    # The product of the first row is 1, of the second 4, its root 2.
    zero = np.zeros_like(_LOG)
    product = contracts.call(ratios.sequence_sum, _LOG, zero, _MASK)
    root = contracts.call(ratios.sequence, _LOG, zero, _MASK)
    cap = {'cap': 3.0}
    contracts.close(
      _of(corrections.truncate, product, _MASK, **cap), [[1] * 3, [3, 3, 0]]
    )
    contracts.close(
      _of(corrections.truncate, root, _MASK, **cap), [[1] * 3, [2, 2, 0]]
    )
    contracts.close(
      _of(corrections.discard, product, _MASK, **cap), [[1] * 3, [0] * 3]
    )

  def test_limits(self):
    wide = _of(corrections.truncate, _LOG, _MASK, cap=1e6)
    contracts.close(wide, _RATIO * _MASK)
    band = _of(corrections.icepop, _LOG, _MASK, low=0.0, high=3.0)
    np.testing.assert_array_equal(band, _of(corrections.discard, _LOG, _MASK))

  def test_normalized_weights_have_mean_one(self):
    weight = _RATIO * _MASK
    tokens = contracts.call(corrections.normalize_tokens, weight, _MASK)
    contracts.close(tokens, weight / (13.75 / 5))
    rows = contracts.call(corrections.normalize_rows, weight, _MASK)
    contracts.close(rows, weight / ((1.75 + 4.25) / 2))

  def test_an_empty_row_is_no_row_to_normalize_over(self):
    mask = np.array([[1, 1], [0, 0]], np.float32)
    rows = contracts.call(corrections.normalize_rows, 4 * mask, mask)
    np.testing.assert_array_equal(rows, mask)

  def test_all_tokens_rejected(self):
    # verl's effective sample size divides by zero here.
    weight = _of(corrections.icepop, _LOG, _MASK, low=0.9, high=0.95)
    for fn in (corrections.normalize_tokens, corrections.normalize_rows):
      np.testing.assert_array_equal(contracts.call(fn, weight, _MASK), 0.0)

  def test_the_weight_at_the_row_level_makes_the_estimate_unbiased(self):
    # Two tokens of two kinds each, drawn from behavior and weighted: the mean
    # of any function is the one under the policy. Per token it is not.
    policy, behavior = np.array([0.7, 0.3]), np.array([0.4, 0.6])
    rows = np.array([[0, 0], [0, 1], [1, 0], [1, 1]])
    logp, other = np.log(policy)[rows], np.log(behavior)[rows]
    mask, value = np.ones((4, 2), np.float32), np.array([1.0, -2.0, 5.0, 3.0])
    arrays = logp.astype(np.float32), other.astype(np.float32), mask
    exact = np.sum(np.exp(logp.sum(1)) * value)
    drawn = np.exp(other.sum(1))

    def estimate(level):
      log_ratio = contracts.call(level, *arrays)
      weight = _of(corrections.truncate, log_ratio, mask, cap=100.0)
      return np.sum(drawn * weight.mean(1) * value)

    contracts.close(estimate(ratios.sequence_sum), exact)
    self.assertGreater(abs(estimate(ratios.token) - exact), 0.1)

  def test_reinforce_with_weights_has_the_gradient_of_the_ratio(self):
    # w · adv · logp and ρ · adv agree where nothing is truncated.
    rng = np.random.default_rng(0)
    logp, old, adv = rng.normal(size=(3, 2, 3)).astype(np.float32) / 3

    def corrected(logp):
      log_ratio = ratios.token(logp, old, _MASK)
      weight = corrections.truncate(log_ratio, _MASK, cap=50.0)
      return jnp.sum(weight * surrogates.reinforce(logp, adv))

    def direct(logp):
      return jnp.sum(jnp.exp(ratios.token(logp, old, _MASK)) * adv * _MASK)

    contracts.close(jax.grad(corrected)(logp), jax.grad(direct)(logp))


class RejectionTest(parameterized.TestCase):
  def test_a_band_is_that_of_the_ratio(self):
    # The band "0.5_1.1" of verl's token_k1 keeps 1.65 and rejects 0.61.
    log_ratio = np.log(np.array([[1.65, 0.61, 1.0]], np.float32))
    mask = np.ones((1, 3), np.float32)
    kept = _of(corrections.keep_ratio, log_ratio, mask, low=0.5, high=1.1)
    np.testing.assert_array_equal(kept, [[0, 1, 1]])
    verl = _of(
      corrections.keep_ratio, log_ratio, mask, low=1 / 1.1, high=1 / 0.5
    )
    np.testing.assert_array_equal(verl, [[1, 0, 1]])

  @parameterized.parameters(
    # k3 of ratios 0.25, 1, 4 is 0.636, 0, 1.614; of 0.5 and 8 0.193, 4.921.
    (None, 1.0, [[1, 1, 0], [1, 0, 0]]),
    (corrections.sequence_sum, 3.0, [[1, 1, 1], [0, 0, 0]]),
    (corrections.sequence_mean, 0.8, [[1, 1, 1], [0, 0, 0]]),
    (corrections.sequence_max, 1.6, [[0, 0, 0], [0, 0, 0]]),
    (corrections.sequence_max, 1.7, [[1, 1, 1], [0, 0, 0]]),
  )
  def test_divergences_of_each_level(self, spread, limit, expected):
    zero = np.zeros_like(_LOG)
    statistic = contracts.call(divergences.k3, zero, _LOG)
    if spread:
      statistic = contracts.call(spread, statistic, _MASK)
    kept = _of(corrections.keep_below, statistic, _MASK, limit=limit)
    np.testing.assert_array_equal(kept, expected)

  def test_a_statistic_that_is_nan_is_rejected(self):
    statistic = np.array([[np.nan, 0.0]], np.float32)
    mask = np.ones((1, 2), np.float32)
    kept = _of(corrections.keep_below, statistic, mask, limit=1.0)
    np.testing.assert_array_equal(kept, [[0, 1]])

  @parameterized.parameters(
    ({'low': 0.1, 'high': 5.0}, [1, 0]),
    ({'low': 0.3, 'high': 9.0}, [0, 1]),
    ({'low': 0.1, 'high': 9.0}, [1, 1]),
  )
  def test_one_outlier_drops_the_row(self, band, rows):
    kept = _of(corrections.drop_outlier_rows, _LOG, _MASK, **band)
    np.testing.assert_array_equal(kept, np.array(rows)[:, None] * _MASK)

  def test_the_denominator_is_the_callers_choice(self):
    kept = _of(corrections.keep_ratio, _LOG, _MASK, low=0.4, high=5.0)
    smaller = contracts.call(weights.token_mean, kept)
    same = contracts.call(weights.token_mean, _MASK) * kept
    contracts.close(smaller.sum(), 1.0)
    contracts.close(same.sum(), 3 / 5)


class OffPolicyRowsTest(parameterized.TestCase):
  @parameterized.parameters(
    # The policy has left the first row by 0.3 nats per token, and joined the
    # second; the third has no token.
    (-1.0, 0.2, [False, True, True]),
    (-1.0, 0.3001, [True, True, True]),
    (0.0, 0.2, [True, True, True]),
    (1.0, 0.2, [True, True, True]),
  )
  def test_drops_bad_rows_that_drifted(self, adv, limit, expected):
    mask = np.array([[1, 1, 0], [1, 1, 1], [0, 0, 0]], np.float32)
    log_ratio = np.array([[-0.2, -0.4, 99], [0.5] * 3, [-9] * 3], np.float32)
    keep = corrections.off_policy_rows(
      log_ratio, np.full(3, adv, np.float32), mask, limit=limit
    )
    np.testing.assert_array_equal(keep, expected)

  def test_masked_nan_does_not_drop_a_row(self):
    mask, log_ratio = np.float32([[1, 0]]), np.float32([[0.0, np.nan]])
    adv = np.float32([-1.0])
    keep = corrections.off_policy_rows(log_ratio, adv, mask, limit=0.1)
    self.assertTrue(keep[0])

  def test_refuses_advantages_of_tokens(self):
    with self.assertRaisesRegex(ValueError, r'adv\[2, 3\] is not one per row'):
      corrections.off_policy_rows(_LOG, _LOG, _MASK, limit=0.1)


class UnscoredTest(absltest.TestCase):
  def test_a_token_without_a_score_is_not_corrected(self):
    behavior = np.float32([[np.nan, -1.0, -np.inf]])
    old = np.float32([[-2.0, -1.5, -0.5]])
    mask = np.ones((1, 3), np.float32)

    @jax.jit
    def weight(old, behavior):
      filled = corrections.fill_unscored(behavior, old)
      return corrections.truncate(ratios.token(old, filled, mask), mask)

    contracts.close(weight(old, behavior), [[1.0, np.exp(-0.5), 1.0]])


class ArgumentsTest(parameterized.TestCase):
  @parameterized.parameters(
    (corrections.truncate, {'cap': 0.0}, r'floor=0.0, cap=0.0'),
    (corrections.truncate, {'floor': 3.0}, r'floor=3.0, cap=2.0'),
    (corrections.discard, {'cap': -1.0}, r'high=-1.0'),
    (corrections.icepop, {'low': 6.0}, r'low=6.0, high=5.0'),
    (corrections.keep_ratio, {'low': -0.1}, r'low=-0.1'),
    (corrections.drop_outlier_rows, {'high': 0.0}, r'high=0.0'),
  )
  def test_refuses(self, fn, settings, message):
    with self.assertRaisesRegex(ValueError, message):
      fn(_LOG, _MASK, **settings)

  def test_bounds_may_be_traced(self):
    found = jax.jit(lambda cap: corrections.truncate(_LOG, _MASK, cap=cap))(2.0)
    contracts.close(found, _of(corrections.truncate, _LOG, _MASK))

  def test_memory_is_that_of_a_fused_loop(self):
    shape = jax.ShapeDtypeStruct((512, 4096), jnp.float32)

    @jax.jit
    def weight(old, behavior, mask):
      log_ratio = ratios.sequence_sum(old, behavior, mask)
      found = corrections.truncate(log_ratio, mask)
      k3 = divergences.k3(behavior, old)
      kept = corrections.keep_below(
        corrections.sequence_mean(k3, mask), mask, limit=0.1
      )
      return corrections.normalize_rows(found, mask) * weights.token_mean(kept)

    memory = weight.lower(shape, shape, shape).compile().memory_analysis()
    self.assertLessEqual(memory.temp_size_in_bytes, 4 * 512 * 4096 * 4)


if __name__ == '__main__':
  absltest.main()
