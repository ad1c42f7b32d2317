"""Meters of mismatch at values worked by hand."""

import functools

from absl.testing import absltest
import numpy as np

from rljax.objectives import corrections, mismatch
from tests import contracts

_MASK = np.array([[1, 1, 1], [1, 1, 0], [0, 0, 0]], np.float32)
_RATIO = np.array([[0.5, 1, 2], [1, 4, 99], [7, 7, 7]], np.float32)
_LOG = np.log(_RATIO)


class MismatchTest(absltest.TestCase):
  def test_divergences_by_hand(self):
    # log 0.5 + log 2 cancel; what is left of the sum is log 4.
    zero = np.zeros_like(_LOG)
    left = np.log(4.0)
    kl = contracts.call(mismatch.kl, _LOG, zero, _MASK)
    contracts.close(kl, -left / 5)
    k3 = contracts.call(mismatch.k3, _LOG, _MASK)
    contracts.close(k3, (8.5 - 5 - left) / 5)
    chi = contracts.call(mismatch.chi_square, _LOG, _MASK)
    contracts.close(chi, (0.25 + 1 + 4 + 1 + 16) / 5 - 1)

  def test_means_are_those_of_the_distributions(self):
    # A vocabulary of three, its tokens in the shares that behavior draws.
    behavior, old = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.3, 0.5])
    tokens = np.repeat(np.arange(3), (5, 3, 2))[None]
    mask = np.ones((1, 10), np.float32)
    mine = np.log(old)[tokens].astype(np.float32)
    other = np.log(behavior)[tokens].astype(np.float32)
    exact = np.sum(behavior * np.log(behavior / old))
    contracts.close(contracts.call(mismatch.kl, mine, other, mask), exact)
    contracts.close(contracts.call(mismatch.k3, mine - other, mask), exact)
    chi = np.sum(old**2 / behavior) - 1.0
    found = contracts.call(mismatch.chi_square, mine - other, mask)
    contracts.close(found, chi)

  def test_k3_of_close_policies_is_not_negative(self):
    rng = np.random.default_rng(0)
    log_ratio = rng.normal(scale=1e-4, size=(4, 64)).astype(np.float32)
    mask = np.ones_like(log_ratio)
    found = contracts.call(mismatch.k3, log_ratio, mask)
    np.testing.assert_allclose(
      found, np.mean(np.square(log_ratio, dtype=np.float64)) / 2, rtol=0.02
    )

  def test_perplexity(self):
    logp = np.log(np.array([[0.5, 0.5, 0.5], [0.1, 0.4, 9]], np.float32))
    rows = contracts.call(mismatch.log_perplexity, logp, _MASK[:2])
    contracts.close(np.exp(rows), [2.0, 5.0])

  def test_effective_share(self):
    equal = np.full((1, 4), 3.0, np.float32)
    one = np.array([[0, 0, 7, 0]], np.float32)
    two = np.array([[1, 0, 1, 0]], np.float32)
    mask = np.ones((1, 4), np.float32)
    share = mismatch.effective_share
    contracts.close(contracts.call(share, equal, mask), 1.0)
    contracts.close(contracts.call(share, one, mask), 0.25)
    contracts.close(contracts.call(share, two, mask), 0.5)
    contracts.close(contracts.call(share, one * 0, mask), 0.0)
    huge = one * np.float32(1e30)
    contracts.close(contracts.call(share, huge, mask), 0.25)

  def test_shares_of_tokens_and_rows(self):
    kept = contracts.call(
      functools.partial(corrections.keep_ratio, low=0.6, high=3.0), _LOG, _MASK
    )
    np.testing.assert_array_equal(kept, [[0, 1, 1], [1, 0, 0], [0, 0, 0]])
    contracts.close(contracts.call(mismatch.masked_share, kept, _MASK), 0.4)
    # Both rows with tokens lost one; the empty row is not counted.
    contracts.close(contracts.call(mismatch.touched_share, kept, _MASK), 1.0)
    outside = functools.partial(mismatch.outside_share, low=0.6, high=3.0)
    contracts.close(contracts.call(outside, _LOG, _MASK), 0.4)
    contracts.close(contracts.call(mismatch.largest, _LOG, _MASK), np.log(4))

  def test_kept_mass_of_top_p(self):
    # Probabilities .5, .3, .2 with top-p .8: the sampler drew from .625, .375.
    full = np.log(np.array([[0.5, 0.3]], np.float32))
    drawn = np.log(np.array([[0.625, 0.375]], np.float32))
    mask = np.ones((1, 2), np.float32)
    contracts.close(contracts.call(mismatch.kept_mass, full, drawn, mask), 0.8)
    contracts.close(contracts.call(mismatch.kept_mass, full, full, mask), 1.0)

  def test_refuses_a_negative_bound(self):
    with self.assertRaisesRegex(ValueError, 'low=-1.0'):
      mismatch.outside_share(_LOG, _MASK, low=-1.0)


if __name__ == '__main__':
  absltest.main()
