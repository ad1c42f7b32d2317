"""Tokens go to the front of their rows and come back."""

from absl.testing import absltest
import numpy as np

from rljax.objectives import spans
from tests import contracts


class SpansTest(absltest.TestCase):
  def test_unpack_undoes_pack(self):
    mask = contracts.ragged_mask()
    x = np.random.default_rng(0).normal(size=mask.shape).astype(np.float32)
    front = contracts.call(spans.pack, x, mask)
    for row, values, keep in zip(front, x, mask > 0, strict=True):
      count = keep.sum()
      np.testing.assert_array_equal(row[:count], values[keep])
      self.assertFalse(row[count:].any())
    back = contracts.call(spans.unpack, front, mask)
    np.testing.assert_array_equal(back, x * mask)

  def test_environment_tokens_do_not_matter(self):
    mask = contracts.ragged_mask()
    x = np.random.default_rng(1).normal(size=mask.shape).astype(np.float32)
    for fn in (spans.pack, spans.carry):
      for absent in (np.nan, np.inf, 7.0):
        poison = np.where(mask > 0, x, np.float32(absent))
        np.testing.assert_array_equal(
          contracts.call(fn, poison, mask), contracts.call(fn, x, mask)
        )
        self.assertTrue(np.isfinite(contracts.gradient(fn, poison, mask)).all())


if __name__ == '__main__':
  absltest.main()
