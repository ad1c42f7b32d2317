"""Tests of per-token vocabulary statistics against float64."""

from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rljax_kernels
from tests.kernels import oracle

# Float32 keeps 24 bits: logits of size z are off by about 1e-7 * z, and sums
# over the vocabulary add a few of these.
STAT, GRADIENT = 5e-7, 3e-6


def measure(c, names=oracle.NAMES, **options):
  """Returns statistics and gradients by the kernel, compiled."""

  def fn(h, w):
    return rljax_kernels.vocab_stats(
      h, w, c.targets, **c.options, want=names, **options
    )

  given = oracle.cotangents(len(c.targets), names)
  found, pulled = jax.jit(oracle.pull(fn))(c.hidden, c.unembed, given)
  return found, pulled, given


def compare(c, found, pulled, given, stat=STAT, gradient=GRADIENT):
  """Fails where the kernel is further from float64 than allowed."""
  expected = oracle.stats(c)
  z = oracle.logits(c)
  size = max(1.0, np.abs(z[np.isfinite(z)]).max())
  assert set(found) == set(given)
  for name in found:
    assert found[name].dtype == jnp.float32
    gap = np.abs(np.asarray(found[name]) - expected[name]).max()
    assert gap <= 4 * stat * size, (name, gap, size)
  for got, wanted in zip(pulled, oracle.gradients(c, given), strict=True):
    assert oracle.error(got, wanted) <= gradient * size


class VocabStatsTest(parameterized.TestCase):
  @parameterized.parameters(*oracle.shapes(0))
  def test_values_and_gradients(self, index, n, d, v):
    c, block = oracle.varied(index, n, d, v)
    names = (oracle.NAMES, ('logp',), ('logp', 'entropy'))[index % 3]
    compare(c, *measure(c, names, block=block))

  def test_reference_too(self):
    c = oracle.case(37, 16, 50, softcap=4.0, valid=47)
    compare(c, *measure(c, implementation='reference'))

  @parameterized.parameters(None, 5)
  def test_logits_of_60(self, block):
    c = oracle.case(40, 8, 1000, spread=20.0)
    z = oracle.logits(c)
    self.assertGreater(np.abs(z).max(), 60)
    found, pulled, given = measure(c, block=block)
    compare(c, found, pulled, given)
    # A certain token: exact zeros, not small negative entropies or NaN.
    unembed = np.zeros((9, 4), np.float32)
    unembed[2], unembed[5] = 60.0, -60.0
    sure = oracle.Case(
      np.ones((3, 4), np.float32), unembed, np.array([2, 5, 0], np.int32),
      np.ones(3, np.float32),
    )  # fmt: skip
    found, (d_hidden, d_unembed), _ = measure(sure, block=block)
    np.testing.assert_allclose(found['logp'], [0, -480, -240], atol=1e-4)
    np.testing.assert_array_equal(found['entropy'], [0, 0, 0])
    for x in (d_hidden, d_unembed):
      self.assertTrue(np.isfinite(x).all())

  def test_a_wrong_padding_would_show(self):
    # Columns past V that count as exp(0), or a block that loses its remainder,
    # move the log-sum-exp by more than the tolerance.
    c = oracle.case(5, 8, 50)
    z = np.pad(oracle.logits(c), ((0, 0), (0, 14)))
    wrong = np.log(np.exp(z).sum(1)) - oracle.stats(c)['lse']
    self.assertGreater(np.abs(wrong).min(), 100 * STAT)

  def test_padding_ids_change_nothing(self):
    c = oracle.case(20, 8, 50)
    padded = oracle.Case(
      c.hidden, np.pad(c.unembed, ((0, 14), (0, 0)), constant_values=9.0),
      c.targets, c.temperature, valid=50,
    )  # fmt: skip
    found, (d_hidden, d_unembed), _ = measure(padded)
    plain, (plain_hidden, plain_unembed), _ = measure(c)
    for name in found:
      np.testing.assert_allclose(found[name], plain[name], atol=2e-6)
    np.testing.assert_array_equal(d_unembed[50:], 0)
    np.testing.assert_allclose(d_unembed[:50], plain_unembed, atol=1e-5)
    np.testing.assert_allclose(d_hidden, plain_hidden, atol=1e-5)

  def test_scalar_temperature_is_every_row(self):
    c = oracle.case(6, 8, 50)
    one = rljax_kernels.vocab_stats(*c.arrays, temperature=0.7)
    rows = rljax_kernels.vocab_stats(
      *c.arrays, temperature=np.full(6, 0.7, np.float32)
    )
    np.testing.assert_array_equal(one['logp'], rows['logp'])

  def test_under_vmap(self):
    cases = [oracle.case(13, 8, 50, seed=i, valid=48) for i in range(3)]
    given = oracle.cotangents(13)

    def total(h, w, t, i):
      out = rljax_kernels.vocab_stats(
        h, w, t, temperature=i, valid=48, want=oracle.NAMES, block=4
      )
      return sum(jnp.sum(out[k] * given[k]) for k in out)

    fields = [
      np.stack([getattr(c, name) for c in cases])
      for name in ('hidden', 'unembed', 'targets', 'temperature')
    ]
    pulled = jax.jit(jax.vmap(jax.grad(total, (0, 1))))(*fields)
    for i, c in enumerate(cases):
      for got, wanted in zip(pulled, oracle.gradients(c, given), strict=True):
        self.assertLess(oracle.error(got[i], wanted), 2e-5)

  @parameterized.parameters(None, 16)
  def test_bfloat16(self, block):
    c = oracle.case(100, 64, 1000)
    rounded = oracle.bfloat16(c)
    found, pulled, given = measure(rounded, block=block)
    self.assertEqual(pulled[0].dtype, jnp.bfloat16)
    # Products of bfloat16 are exact in float32, so statistics stay as good;
    # gradients are rounded to 8 bits, once as logits and once as a result.
    compare(rounded, found, pulled, given, gradient=1e-3)


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    (dict(hidden=np.zeros((2, 3, 4), np.float32)), r'\(2, 3, 4\)'),
    (dict(unembed=np.zeros((8, 50), np.float32)), r'\(8, 50\).*\[V, D\]'),
    (dict(targets=np.zeros(7, np.int32)), r'\(7,\)'),
    (dict(hidden=np.zeros((6, 8), np.float16)), 'float16'),
    (dict(want=('logp', 'kl')), 'kl'),
    (dict(implementation='fast'), 'fast'),
    (dict(temperature=0.0), 'positive'),
  ],
)
def test_what_does_not_fit_is_named(change, message):
  c = oracle.case(6, 8, 50)
  given = dict(hidden=c.hidden, unembed=c.unembed, targets=c.targets)
  given |= change
  with pytest.raises(ValueError, match=message):
    rljax_kernels.vocab_stats(**given)
