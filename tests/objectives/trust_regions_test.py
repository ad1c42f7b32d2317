"""Trust regions: worked by hand, enumerated, and where they are PPO's clip."""

import functools
import itertools

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np

from rljax.objectives import surrogates, trust_regions
from tests import contracts

F32 = np.float32
RNG = np.random.default_rng(0)


def row(*values):
  return np.array([values], F32)


def logs(*chances):
  return np.log(row(*chances))


def kept(fn, logp, old, adv, **settings):
  """Returns the factor of tokens that are all there."""
  fn = functools.partial(fn, **settings)
  return contracts.call(fn, logp, old, adv, np.ones_like(logp))


class ClippedTest(parameterized.TestCase):
  def test_by_hand(self):
    log_ratio = np.log(np.array([1.25, 1.25, 0.75, 0.75, 1.25, 1.1], F32))
    adv = np.array([1, -1, -1, 1, 0, 1], F32)
    held = contracts.call(trust_regions.clipped, log_ratio, adv)
    np.testing.assert_array_equal(held, [1, 0, 1, 0, 0, 0])

  def test_is_where_clip_has_no_gradient(self):
    log_ratio = RNG.normal(scale=0.5, size=200).astype(F32)
    adv = RNG.normal(size=200).astype(F32)
    settings = {'low': 0.1, 'high': 0.3}
    slope = contracts.gradient(
      functools.partial(surrogates.clip, **settings), log_ratio, adv
    )
    held = contracts.call(
      functools.partial(trust_regions.clipped, **settings), log_ratio, adv
    )
    np.testing.assert_array_equal(held == 1, slope == 0)
    self.assertBetween(held.mean(), 0.2, 0.8)


class DppoTest(parameterized.TestCase):
  @parameterized.parameters(
    # Good tokens may rise by at most `high`, others fall by at most `low`.
    ({'high': 0.2}, 0.5, 0.4, 1, 1),
    ({'high': 0.05}, 0.5, 0.4, 1, 0),
    ({'high': 0.05}, 0.5, 0.4, -1, 1),
    ({'low': 0.05}, 0.4, 0.5, -1, 0),
    ({'low': 0.05}, 0.4, 0.5, 0, 0),
    ({'low': 0.05}, 0.4, 0.5, 1, 1),
    # 200 times as likely, but rare all the same: PPO would hold it.
    ({'high': 0.05}, 0.02, 1e-4, 1, 1),
  )
  def test_total_variation_by_hand(self, settings, p, old, adv, expected):
    out = kept(trust_regions.dppo_tv, logs(p), logs(old), row(adv), **settings)
    np.testing.assert_array_equal(out, [[expected]])

  @parameterized.parameters(
    # ½ log(0.5 / 0.9) + ½ log(0.5 / 0.1) = 0.5108
    ({'high': 0.52}, 0.9, 0.5, 1, 1),
    ({'high': 0.50}, 0.9, 0.5, 1, 0),
    ({'high': 0.50}, 0.1, 0.5, 1, 1),
    ({'low': 0.52}, 0.1, 0.5, -1, 1),
    ({'low': 0.50}, 0.1, 0.5, -1, 0),
    ({'low': 0.50}, 0.9, 0.5, -1, 1),
  )
  def test_binary_kl_by_hand(self, settings, p, old, adv, expected):
    out = kept(trust_regions.dppo_kl, logs(p), logs(old), row(adv), **settings)
    np.testing.assert_array_equal(out, [[expected]])

  @parameterized.parameters(0.0, 1e-9, 1e-6)
  def test_a_certain_token_is_not_far(self, rest):
    # 1e-4 log(1e-4 / 1e-8) - 1e-4 = 8e-4: float32 must not divide by 0.
    logp, old = np.log1p(row(-rest)), np.log1p(row(-1e-4))
    out = kept(trust_regions.dppo_kl, logp, old, row(1), high=0.01)
    np.testing.assert_array_equal(out, [[1.0]])

  @parameterized.parameters(0, 1, 2)
  def test_bounds_of_a_token_are_below_those_of_the_vocabulary(self, seed):
    # Grouping all other tokens as one can only shrink a divergence, so that
    # none is dropped for a divergence that the whole policy does not have.
    p, old = np.random.default_rng(seed).dirichlet(np.ones(4), 2)
    whole = {
      trust_regions.dppo_tv: 0.5 * np.abs(p - old).sum(),
      trust_regions.dppo_kl: np.sum(old * np.log(old / p)),
    }
    for fn, bound in whole.items():
      for adv in (1.0, -1.0):
        arrays = logs(*p), logs(*old), row(*[adv] * 4)
        bound += 1e-6
        wide = kept(fn, *arrays, low=bound, high=bound)
        np.testing.assert_array_equal(wide, np.ones((1, 4)))
        tight = kept(fn, *arrays, low=0.0, high=0.0)
        wrong_way = (p > old) if adv > 0 else (p < old)
        np.testing.assert_array_equal(tight[0], ~wrong_way)

  def test_a_bound_that_follows_the_probability_is_ppos_clip(self):
    # π > (1 + ε) π_old is π - π_old > ε π_old.
    old = RNG.uniform(0.05, 0.6, size=(4, 50)).astype(F32)
    logp = np.log(old) + RNG.normal(scale=0.3, size=old.shape).astype(F32)
    adv = RNG.normal(size=old.shape).astype(F32)
    ones = np.ones_like(old)
    keep = trust_regions.dppo_tv(
      logp, np.log(old), adv, ones, low=0.2 * old, high=0.2 * old
    )
    held = trust_regions.clipped(logp - np.log(old), adv)
    np.testing.assert_array_equal(keep, 1.0 - held)
    self.assertBetween(float(held.mean()), 0.1, 0.5)

  def test_without_bounds_all_tokens_stay(self):
    logp, old = -RNG.exponential(size=(2, 3, 5)).astype(F32)
    adv = RNG.normal(size=logp.shape).astype(F32)
    for fn in (trust_regions.dppo_tv, trust_regions.dppo_kl):
      out = kept(fn, logp, old, adv, low=1e9, high=1e9)
      np.testing.assert_array_equal(out, np.ones_like(logp))


class VespoTest(parameterized.TestCase):
  @parameterized.parameters(
    (0.0, 1.0, 1.0),
    (0.0, -1.0, 1.0),
    (np.log(2.0), 1.0, 4.0 * np.exp(-3.0)),  # 2² exp(3 · (1 - 2))
    (np.log(2.0), 0.0, 4.0 * np.exp(-3.0)),
    (np.log(2.0), -1.0, 8.0 * np.exp(-2.0)),  # 2³ exp(2 · (1 - 2))
    (np.log(0.5), 1.0, 0.25 * np.exp(1.5)),
    (np.log(0.5), -1.0, 0.125 * np.exp(1.0)),
  )
  def test_by_hand(self, log_w, adv, expected):
    # Only the product of the ratios counts, not how it is spread.
    for shares in ([0.5, 0.5], [1.7, -0.7]):
      old = logs(0.2, 0.3)
      logp = old + row(*(log_w * share for share in shares))
      out = kept(trust_regions.vespo, logp, old, row(adv, adv))
      contracts.close(out, [[expected] * 2], 1e-5)

  @parameterized.parameters((1.0, 2 / 3), (-1.0, 3 / 2))
  def test_is_largest_at_k_over_lambda(self, adv, best):
    weights = np.geomspace(1e-3, 50.0, 400).astype(F32)[:, None]
    old = np.full_like(weights, -2.0)
    out = kept(
      trust_regions.vespo, old + np.log(weights), old, old * 0 + F32(adv)
    )[:, 0]
    self.assertAlmostEqual(float(weights[out.argmax(), 0]), best, delta=0.03)
    rising = np.diff(out) > 0
    np.testing.assert_array_equal(rising, np.sort(rising)[::-1])
    np.testing.assert_array_less(out[[0, -1]], 1e-3)

  def test_a_correction_multiplies_the_weight(self):
    old, adv = logs(0.2, 0.3), row(1, 1)
    moved = kept(trust_regions.vespo, old + row(0.3, 0.4), old, adv)
    out = kept(
      trust_regions.vespo, old, old, adv, log_correction=np.array([0.7], F32)
    )
    contracts.close(out, moved, 1e-5)

  def test_negative_numbers_are_refused(self):
    with self.assertRaisesRegex(ValueError, 'k_pos=-1 must not be negative'):
      trust_regions.vespo(row(0), row(0), row(0), row(1), k_pos=-1)


# Both centered: means 0 and -1. The covariances are 2, -1, 0.5, 1.5, 0, 0.
ADV = row(2, 1, -1, -1.5, 0, -0.5)
LOGP = row(0.0, -2.0, -1.5, -2.0, 0.5, -1.0)


def covariances():
  return (ADV - ADV.mean()) * (LOGP - LOGP.mean())


class CovarianceTest(parameterized.TestCase):
  def test_numbers(self):
    contracts.close(covariances(), [[2, -1, 0.5, 1.5, 0, 0]], 1e-6)

  @parameterized.parameters(
    (1.0, (1, 1, 1, 1, 1, 1)),
    (0.5, (1, 0, 1, 1, 0, 0)),
    (0.34, (1, 0, 0, 1, 0, 0)),
    (0.0, (1, 0, 0, 0, 0, 0)),  # one at least
  )
  def test_kl_cov_takes_the_highest(self, share, expected):
    fn = functools.partial(trust_regions.kl_cov, share=share)
    out = contracts.call(fn, LOGP, ADV, np.ones_like(ADV))
    np.testing.assert_array_equal(out, [expected])

  def test_kl_cov_takes_the_first_of_equals(self):
    fn = functools.partial(trust_regions.kl_cov, share=0.5)
    ones = np.ones((1, 4), F32)
    out = contracts.call(fn, ones * -1, ones, ones)
    np.testing.assert_array_equal(out, [[1, 1, 0, 0]])

  def test_clip_cov_drops_between_its_bounds(self):
    # Between 0.25 and 1.75 lie the covariances 0.5 and 1.5.
    fn = functools.partial(
      kept, trust_regions.clip_cov, LOGP, LOGP, ADV, floor=0.25, cap=1.75
    )
    scores = row(0.9, 0.8, 0.2, 0.3, 0.7, 0.6)
    np.testing.assert_array_equal(
      fn(scores=scores, share=0.0), [[1, 1, 1, 0, 1, 1]]
    )
    np.testing.assert_array_equal(
      fn(scores=scores, share=0.4), [[1, 1, 0, 0, 1, 1]]
    )
    np.testing.assert_array_equal(
      fn(scores=scores, share=1.0), [[1, 1, 0, 0, 1, 1]]
    )

  def test_clip_cov_leaves_what_ppo_holds(self):
    # The good token of covariance 1.5 would be a candidate; it has risen.
    old = LOGP + row(0, 0, 0, 0.5, 0, 0)
    out = kept(
      trust_regions.clip_cov, LOGP, old, ADV,
      scores=row(0, 0, 0, 1, 0, 0), share=1.0, floor=0.25, cap=1.75,
    )  # fmt: skip
    np.testing.assert_array_equal(out, [[1, 1, 0, 1, 1, 1]])

  def test_clip_cov_without_candidates_is_ppos_clip(self):
    old = LOGP + row(0.5, -0.5, 0.1, 0.3, -0.3, 0.0)
    keep = kept(
      trust_regions.clip_cov, LOGP, old, ADV, scores=ADV, floor=9.0, cap=9.0
    )
    np.testing.assert_array_equal(keep, np.ones_like(ADV))
    objective = surrogates.clip(LOGP - old, ADV)
    np.testing.assert_array_equal(keep * objective, objective)

  def test_clip_cov_drops_each_candidate_equally_often(self):
    ones = np.ones((1, 6), F32)
    fn = functools.partial(
      trust_regions.clip_cov, share=0.2, floor=-9.0, cap=9.0
    )
    orders = np.array(list(itertools.permutations(range(6))), F32)
    out = jax.vmap(
      lambda scores: fn(LOGP, LOGP, ADV, ones, scores=scores[None])
    )(orders)
    np.testing.assert_allclose(out.mean(0), ones * 5 / 6, rtol=1e-6)

  def test_without_these_tokens_entropy_falls_less(self):
    # The step of each token of a batch that is distributed as the policy is.
    chance = np.array([4, 2, 1, 1]) / 8
    token = np.repeat(np.arange(4), (4, 2, 1, 1))
    adv = np.array([1.0, -0.5, -1.0, 0.0], F32)[token][None]
    theta = jnp.log(jnp.asarray(chance, jnp.float32))
    logp = jax.nn.log_softmax(theta)[token][None]
    taken = trust_regions.kl_cov(logp, adv, np.ones_like(adv), share=0.65)

    def entropy(theta):
      logp = jax.nn.log_softmax(theta)
      return -jnp.sum(jnp.exp(logp) * logp)

    def change(weight):
      def objective(theta):
        return jnp.sum(weight * adv * jax.nn.log_softmax(theta)[token][None])

      return float(jax.grad(entropy)(theta) @ jax.grad(objective)(theta))

    np.testing.assert_array_equal(taken, row(1, 1, 1, 1, 0, 0, 1, 0))
    self.assertLess(change(1.0), change(1.0 - taken))
    self.assertLess(change(1.0), 0.0)

  def test_natural_gradients_change_entropy_by_minus_the_covariance(self):
    # The paper's first lemma, and why these covariances are compared.
    chance = np.array([4, 2, 1, 1]) / 8
    adv = np.array([1.0, -0.5, -1.0, 0.25])

    def entropy(step):
      p = chance * np.exp(step * adv)
      p /= p.sum()
      return -np.sum(p * np.log(p))

    slope = (entropy(1e-5) - entropy(-1e-5)) / 2e-5
    token = np.repeat(np.arange(4), (4, 2, 1, 1))
    each = trust_regions._covariance(
      jnp.log(jnp.asarray(chance, jnp.float32))[token][None],
      jnp.asarray(adv, jnp.float32)[token][None],
      jnp.ones((1, 8)),
    )
    self.assertAlmostEqual(float(each.mean()), -slope, places=5)

  def test_shares_are_refused(self):
    with self.assertRaisesRegex(ValueError, r'share=2 must lie in \[0, 1\]'):
      trust_regions.kl_cov(LOGP, ADV, np.ones_like(ADV), share=2)


if __name__ == '__main__':
  absltest.main()
