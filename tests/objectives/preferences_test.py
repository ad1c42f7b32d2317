"""Losses over preferences: orders, sorted sets, single judgments, size."""

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np

from rljax.objectives import preferences, reward_models, scores

F32 = np.float32
ROWS, TOKENS = 512, 4096


def array(*values):
  return np.array(values, F32)


class PairsTest(parameterized.TestCase):
  def test_dpo_of_one_pair(self):
    # Rewards 0.2 and -0.1: log(1 + e^-0.3).
    loss = preferences.dpo(array(2.0), array(-1.0))
    np.testing.assert_allclose(loss, [0.5543552], rtol=1e-6)

  def test_a_margin_is_simpo(self):
    loss = preferences.dpo(array(-0.5), array(-1.0), beta=2.0, margin=1.0)
    np.testing.assert_allclose(loss, [np.log(2.0)], rtol=1e-6)

  def test_without_flips_all_are_dpo(self):
    rng = np.random.default_rng(0)
    pair = rng.normal(size=(2, 7)).astype(F32)
    expected = preferences.dpo(*pair)
    for fn in (preferences.conservative, preferences.robust):
      np.testing.assert_allclose(fn(*pair, flipped=0.0), expected, rtol=1e-6)

  def test_robust_is_unbiased_and_conservative_is_not(self):
    chosen, rejected, flips = array(3.0), array(-4.0), 0.2
    clean = float(preferences.dpo(chosen, rejected)[0])

    def noisy(fn):
      kept = fn(chosen, rejected, flipped=flips)
      swapped = fn(rejected, chosen, flipped=flips)
      return float(((1 - flips) * kept + flips * swapped)[0])

    self.assertAlmostEqual(noisy(preferences.robust), clean, delta=1e-6)
    self.assertGreater(noisy(preferences.conservative), clean + 0.05)

  def test_conservative_ends_at_the_odds_of_the_labels(self):
    best = array(np.log(0.9 / 0.1) / 0.1)
    slope = jax.grad(
      lambda x: preferences.conservative(x, array(0.0), flipped=0.1)[0]
    )(best)
    np.testing.assert_allclose(slope, [0.0], atol=1e-8)

  def test_exo_is_zero_where_the_policy_prefers_as_the_labels(self):
    best = array(np.log(0.9 / 0.1) / 0.1)
    loss = preferences.exo(best, array(0.0), flipped=0.1)
    np.testing.assert_allclose(loss, [0.0], atol=1e-7)

  def test_targets_of_ipo_and_sppo(self):
    loss = preferences.ipo(array(5.0), array(0.0))
    np.testing.assert_allclose(loss, [0.0], atol=1e-10)
    loss = preferences.sppo(array(5.0), array(-5.0))
    np.testing.assert_allclose(loss, [0.0], atol=1e-10)

  def test_bco_moves_with_its_shift(self):
    pair = array(2.0, 1.0), array(0.5, -1.0)
    moved = preferences.bco(pair[0] + 3.0, pair[1] + 3.0, beta=0.5, shift=1.5)
    base = preferences.bco(*pair, beta=0.5)
    np.testing.assert_allclose(moved, base, rtol=1e-6)

  def test_bad_numbers_are_refused(self):
    pair = array(1.0), array(0.0)
    with self.assertRaisesRegex(ValueError, 'beta=0.0 must be positive'):
      preferences.dpo(*pair, beta=0.0)
    with self.assertRaisesRegex(ValueError, r'flipped=0.5 must be in \[0, 0.5'):
      preferences.robust(*pair, flipped=0.5)
    with self.assertRaisesRegex(ValueError, r'flipped=0.0 must be in \(0, 0.5'):
      preferences.exo(*pair, flipped=0.0)
    with self.assertRaisesRegex(ValueError, 'tau=-1.0 must be positive'):
      preferences.discopop(*pair, tau=-1.0)


class SortedTest(parameterized.TestCase):
  def test_ranks_meet_ranks(self):
    chosen, rejected = array(3.0, 1.0, 2.0), array(0.0, 5.0, 1.0)
    loss = preferences.aot(chosen, rejected, np.ones(3, F32))
    expected = preferences.dpo(array(1.0, 2.0, 3.0), array(0.0, 1.0, 5.0))
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    shuffled = preferences.aot(chosen[::-1], rejected, np.ones(3, F32))
    np.testing.assert_array_equal(shuffled, loss)

  @parameterized.parameters(0.0, np.nan, np.inf, -np.inf)
  def test_absent_pairs_change_nothing(self, absent):
    chosen, rejected = array(3.0, 1.0, 2.0), array(0.0, 5.0, 1.0)
    mask = array(1, 0, 1, 1)

    def total(chosen, rejected, mask):
      return jnp.sum(preferences.aot(chosen, rejected, mask, flipped=0.1))

    pair = [np.insert(x, 1, F32(absent)) for x in (chosen, rejected)]
    slopes = jax.grad(total, (0, 1))(*pair, mask)
    expected = jax.grad(total, (0, 1))(chosen, rejected, np.ones(3, F32))
    for found, wanted in zip(slopes, expected, strict=True):
      np.testing.assert_array_equal(found, np.insert(wanted, 1, 0.0))
    loss = preferences.aot(*pair, mask)
    self.assertEqual(float(loss[3]), 0.0)
    nothing = preferences.aot(*pair, np.zeros(4, F32))
    np.testing.assert_array_equal(nothing, np.zeros(4))


class KtoTest(parameterized.TestCase):
  def test_by_hand(self):
    score, good = array(2.0, 2.0, -1.0), np.array([True, False, False])
    loss = preferences.kto(
      score, good, jnp.float32(1.0), good_weight=2.0, bad_weight=0.5
    )
    # 2 σ(-0.1), ½ σ(0.1), ½ σ(-0.2).
    expected = [0.9500417, 0.2624896, 0.2250830]
    np.testing.assert_allclose(loss, expected, rtol=1e-6)

  def test_without_a_baseline_two_halves_are_apo_zero(self):
    chosen, rejected, zero = array(1.0, -3.0), array(0.5, 2.0), jnp.float32(0)
    parts = preferences.kto(chosen, np.ones(2), zero) + preferences.kto(
      rejected, np.zeros(2), zero
    )
    whole = preferences.apo_zero(chosen, rejected)
    np.testing.assert_allclose(parts, whole, rtol=1e-6)

  def test_extremes_and_refusals(self):
    far = array(1e4, -1e4, 100.0, -100.0)
    for good in (np.ones(4), np.zeros(4)):
      slope = jax.grad(
        lambda x, g=good: jnp.sum(preferences.kto(x, g, jnp.float32(0)))
      )(far)
      self.assertTrue(np.isfinite(slope).all())
    with self.assertRaisesRegex(ValueError, r'baseline\[4\] is one number'):
      preferences.kto(far, np.ones(4), far)

  def test_baseline_is_data_and_not_negative(self):
    mask = array(1, 1, 0)
    baseline = preferences.kto_baseline(array(1.0, 4.0, np.nan), mask)
    self.assertEqual(float(baseline), 2.5)
    self.assertEqual(
      float(preferences.kto_baseline(array(-1.0, -4.0, 9.0), mask)), 0.0
    )
    slope = jax.grad(lambda x: preferences.kto_baseline(x, mask))(mask)
    np.testing.assert_array_equal(slope, np.zeros(3))


class OddsTest(absltest.TestCase):
  def test_odds_ratio_by_hand(self):
    # Probabilities ½ and ¼ a token: odds 1 and ⅓, -log σ(log 3) = log 4/3.
    loss = preferences.orpo(*np.log(array(0.5, 0.25))[:, None])
    np.testing.assert_allclose(loss, [np.log(4.0 / 3.0)], rtol=1e-6)


class RewardModelTest(absltest.TestCase):
  def test_margin_and_centering(self):
    chosen, rejected = array(2.0, 1.0), array(0.0, 3.0)
    loss = reward_models.bradley_terry(
      chosen, rejected, margin=array(2.0, -2.0)
    )
    np.testing.assert_allclose(loss, np.log([2.0, 2.0]), rtol=1e-6)
    loss = reward_models.centering(chosen, rejected)
    np.testing.assert_array_equal(loss, [4.0, 16.0])


class SizeTest(absltest.TestCase):
  def test_whole_responses_need_no_more_than_their_tokens(self):
    half = ROWS // 2

    def loss(logp, ref_logp, mask):
      partner = jnp.concatenate([mask[half:], mask[:half]])
      weight = scores.length_decay(mask, partner, decay=0.5)
      score = scores.score(logp, ref_logp, weight)
      return jnp.sum(preferences.dpo(score[:half], score[half:]))

    shape = jax.ShapeDtypeStruct((ROWS, TOKENS), jnp.float32)
    compiled = jax.jit(jax.value_and_grad(loss)).lower(*[shape] * 3).compile()
    memory = compiled.memory_analysis()
    self.assertLessEqual(memory.temp_size_in_bytes, 4 * ROWS * TOKENS * 4)


if __name__ == '__main__':
  absltest.main()
