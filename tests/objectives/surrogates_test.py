"""Surrogates at hand-worked ratios."""

import functools

from absl.testing import absltest, parameterized
import numpy as np

from rljax.objectives import surrogates
from tests import contracts

RATIOS = (0.5, 0.9, 1.1, 1.25, 5.0)


class SurrogatesTest(parameterized.TestCase):
  @parameterized.parameters(
    (surrogates.clip, {}, 1, (0.5, 0.9, 1.1, 1.2, 1.2)),
    (surrogates.clip, {}, -1, (-0.8, -0.9, -1.1, -1.25, -5.0)),
    (surrogates.clip, {'high': 0.28}, 1, (0.5, 0.9, 1.1, 1.25, 1.28)),
    (surrogates.clip, {'low': 0.05}, -1, (-0.95, -0.95, -1.1, -1.25, -5.0)),
    (surrogates.dual_clip, {}, 1, (0.5, 0.9, 1.1, 1.2, 1.2)),
    (surrogates.dual_clip, {}, -1, (-0.8, -0.9, -1.1, -1.25, -3.0)),
    (surrogates.dual_clip, {'cap': 1.2}, -1, (-0.8, -0.9, -1.1, -1.2, -1.2)),
    (surrogates.reinforce, {}, 2, tuple(2 * np.log(RATIOS))),
  )
  def test_values(self, fn, settings, adv, expected):
    log_ratio = np.log(np.array(RATIOS, np.float32))
    fn = functools.partial(fn, **settings)
    out = contracts.call(fn, log_ratio, np.full(5, adv, np.float32))
    contracts.close(out, expected)

  @parameterized.parameters((5.0, RATIOS), (1.2, (0.5, 0.9, 1.1, 1.2, 1.2)))
  def test_cispo_keeps_every_gradient(self, cap, expected):
    log_ratio = np.log(np.array(RATIOS, np.float32))
    fn = functools.partial(surrogates.cispo, cap=cap)
    for adv in (1.0, -2.0):
      # On-policy every weight is 1, which leaves the weights of `gradient`.
      advs = np.full(5, adv, np.float32)
      plain = contracts.gradient(fn, np.zeros(5, np.float32), advs)
      slope = contracts.gradient(fn, log_ratio, advs)
      contracts.close(slope / plain, expected)


if __name__ == '__main__':
  absltest.main()
