"""Scores of responses by hand."""

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np

from rljax.objectives import scores

F32 = np.float32
MASK = np.array([[0, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]], F32)
LOGP = np.array([[9, -1, -2, 9], [-1, -1, -1, -3], [9, 9, 9, 9]], F32)
REF = np.array([[5, -2, -2, 5], [-1, -2, -3, -4], [5, 5, 5, 5]], F32)


class ScoresTest(parameterized.TestCase):
  def test_sums_and_means(self):
    total = scores.score(LOGP, REF, MASK)
    np.testing.assert_array_equal(total, [1.0, 4.0, 0.0])
    mean = scores.per_token(total, MASK)
    np.testing.assert_array_equal(mean, [0.5, 1.0, 0.0])

  @parameterized.parameters(np.nan, np.inf, -np.inf)
  def test_absent_tokens_do_not_enter(self, absent):
    bad = [np.where(MASK > 0, x, F32(absent)) for x in (LOGP, REF)]

    def total(logp, ref_logp):
      return jnp.sum(scores.score(logp, ref_logp, MASK))

    np.testing.assert_array_equal(
      scores.score(*bad, MASK), scores.score(LOGP, REF, MASK)
    )
    np.testing.assert_array_equal(jax.grad(total)(*bad), MASK)
    collision = np.where(MASK > 0, F32(0.5), F32(absent))
    self.assertTrue(
      np.isfinite(scores.agreement(bad[0], collision, MASK)).all()
    )

  def test_surplus_tokens_count_less(self):
    partner = np.array([[1, 1, 1], [1, 1, 0], [1, 0, 0]], F32)
    weight = scores.length_decay(MASK, partner, decay=0.25)
    expected = [[0, 1, 1, 0], [1, 1, 0.25, 0.25], [0, 0, 0, 0]]
    np.testing.assert_array_equal(weight, expected)
    np.testing.assert_array_equal(
      scores.length_decay(MASK, partner, decay=1.0), MASK
    )
    with self.assertRaisesRegex(ValueError, r'decay=1.5 must be in \[0, 1\]'):
      scores.length_decay(MASK, partner, decay=1.5)

  def test_agreement_is_one_for_what_is_always_drawn(self):
    zero, one = np.zeros((1, 4), F32), np.ones((1, 4), F32)
    np.testing.assert_array_equal(scores.agreement(zero, one, one), [1.0])
    # Uniform over 4 ids: p = ¼ and Σ p² = ¼.
    uniform = np.full((1, 4), 0.25, F32)
    agreement = scores.agreement(np.log(uniform), uniform, one)
    np.testing.assert_allclose(agreement, [1.0], rtol=1e-6)
    # Twice as likely as that on average: its mean log exceeds by log 2.
    agreement = scores.agreement(np.log(2 * uniform), uniform, one)
    np.testing.assert_allclose(agreement, [2.0], rtol=1e-6)

  def test_limits_of_alpha(self):
    total = np.linspace(-3, 3, 7).astype(F32)
    np.testing.assert_allclose(
      scores.alpha(total, order=0.0), scores.forward_kl(total), rtol=2e-6
    )
    np.testing.assert_allclose(
      scores.alpha(total, order=1.0 + 1e-4), total, rtol=1e-3
    )
    with self.assertRaisesRegex(ValueError, 'order=1.0 is the score itself'):
      scores.alpha(total, order=1.0)


if __name__ == '__main__':
  absltest.main()
