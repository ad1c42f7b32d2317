"""Masked reductions against NumPy on the values that are present."""

from collections.abc import Callable
import functools
from typing import Any

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np

from rljax.core import masked
from tests import contracts


def _ranks(x: np.ndarray) -> np.ndarray:
  below = (x[None, :] < x[:, None]).sum(1)
  return below + ((x[None, :] == x[:, None]).sum(1) - 1) / 2


def _quantile(x, mask, axis=None):
  return masked.quantile(x, mask, 0.3, axis)


def _unbiased(x, mask, axis=None):
  return masked.std(x, mask, axis, ddof=1)


def _whitened(x: np.ndarray) -> np.ndarray:
  return (x - x.mean()) / np.sqrt(np.var(x, ddof=min(1, len(x) - 1)) + 1e-8)


def _fill(x, mask, axis=None):
  del axis
  return masked.fill(x, mask)


def _count(x, mask, axis=None):
  return masked.count(mask, axis) + 0.0 * masked.sum(x, mask, axis)


# (function of x, mask, axis; its equal on the present values, at least one)
ORACLES: dict[str, tuple[Callable, Callable]] = {
  'fill': (_fill, lambda x: x),
  'count': (_count, len),
  'sum': (masked.sum, np.sum),
  'mean': (masked.mean, np.mean),
  'center': (masked.center, lambda x: x - x.mean()),
  'variance': (masked.variance, np.var),
  'std': (masked.std, np.std),
  'std_unbiased': (_unbiased, lambda x: np.std(x, ddof=min(1, len(x) - 1))),
  'whiten': (masked.whiten, _whitened),
  'max': (masked.max, np.max),
  'min': (masked.min, np.min),
  'softmax': (masked.softmax, lambda x: np.exp(x) / np.exp(x).sum()),
  'rank': (masked.rank, _ranks),
  'quantile': (_quantile, lambda x: np.quantile(x, 0.3)),
}


def _one(oracle: Callable, row: np.ndarray, keep: np.ndarray) -> np.ndarray:
  """Returns the oracle of the present values, 0 for the others."""
  result = np.asarray(oracle(row[keep] if keep.any() else np.ones(1)))
  out = np.zeros(row.shape if result.ndim else (), np.float64)
  if keep.any():
    out[keep if result.ndim else ...] = result
  return out


def _expected(oracle: Callable, x: np.ndarray, mask: np.ndarray, axis: Any):
  """Returns the oracle along an axis, in the shape of the function's."""
  keep = mask > 0
  if axis is None:
    out = _one(oracle, x.ravel(), keep.ravel())
    return out.reshape(x.shape) if out.ndim else out
  rows = zip(np.moveaxis(x, axis, -1), np.moveaxis(keep, axis, -1), strict=True)
  out = np.stack([_one(oracle, *row) for row in rows])
  return np.moveaxis(out, -1, axis) if out.ndim == 2 else out


def _example() -> tuple[np.ndarray, np.ndarray]:
  """Returns values with a tie and a mask with an empty row, [4, 7]."""
  rng = np.random.default_rng(0)
  x = rng.normal(size=(4, 7)).astype(np.float32)
  x[0, 1] = x[0, 4]
  mask = (rng.random((4, 7)) < 0.6).astype(np.float32)
  mask[0], mask[2] = 1.0, 0.0
  return x, mask


@functools.cache
def _values_and_slopes(axis: int | None) -> Callable:
  """Returns a compiled function that runs and differentiates everything."""

  def total(x, mask, fn):
    out = fn(x, mask, axis)
    return jnp.sum(out * jnp.cos(jnp.arange(out.size)).reshape(out.shape)), out

  def evaluate(x, mask):
    grad = jax.grad(total, has_aux=True)
    pairs = {name: grad(x, mask, fn) for name, (fn, _) in ORACLES.items()}
    return {name: (value, slope) for name, (slope, value) in pairs.items()}

  def strictly(x, mask):
    with contracts.strict():
      return jax.tree.map(np.asarray, compiled(x, mask))

  compiled = jax.jit(evaluate)
  return strictly


class MaskedTest(parameterized.TestCase):
  def test_every_function_has_an_oracle(self):
    self.assertContainsSubset(contracts.public(masked), ORACLES)

  @parameterized.parameters(None, 0, 1, -1)
  def test_present_values_alone_count(self, axis):
    x, mask = _example()
    evaluate = _values_and_slopes(axis)
    base = evaluate(x, mask)
    for name, (_, oracle) in ORACLES.items():
      value, slope = base[name]
      contracts.close(value, _expected(oracle, x, mask, axis), err_msg=name)
      self.assertTrue(np.isfinite(slope).all(), name)
      self.assertFalse(slope[mask == 0].any(), name)
    for bad in (np.nan, np.inf, -np.inf):
      again = evaluate(np.where(mask > 0, x, np.float32(bad)), mask)
      jax.tree.map(np.testing.assert_array_equal, again, base)

  def test_nothing_present_is_zero_with_zero_gradient(self):
    x, mask = np.full((4, 7), np.nan, np.float32), np.zeros((4, 7), np.float32)
    for name, (value, slope) in _values_and_slopes(None)(x, mask).items():
      self.assertFalse(value.any(), name)
      self.assertFalse(slope.any(), name)

  @parameterized.parameters('mean', 'center', 'std', 'softmax', 'whiten')
  def test_gradients_match_finite_differences(self, name):
    x, mask = _example()
    fn = functools.partial(ORACLES[name][0], axis=1)
    contracts.close(
      contracts.gradient(fn, x, mask), contracts.slope(fn, x, mask), 2e-3
    )

  def test_a_masked_nan_leaves_a_sequence_mean(self):
    loss = jnp.array([[1, jnp.nan, 3]])
    mask = jnp.array([[1, 0, 1]])
    self.assertEqual(masked.sum(loss, mask), 4.0)
    self.assertEqual(masked.mean(loss, mask, 1)[0], 2.0)

  @parameterized.parameters(
    ([0.1] * 3,), ([0.7] * 4,), ([0.35] * 7,), ([1e4] * 9,), ([-3e-5] * 5,)
  )
  def test_equal_values_deviate_by_exactly_zero(self, values):
    x = np.zeros(9, np.float32)
    mask = np.arange(9) < len(values)
    x[mask] = values
    self.assertEqual(contracts.call(_unbiased, x, mask), 0.0)
    self.assertFalse(contracts.call(masked.center, x, mask).any())
    self.assertFalse(contracts.call(masked.whiten, x, mask).any())
    self.assertFalse(contracts.gradient(_unbiased, x, mask).any())

  def test_the_variance_survives_a_large_mean(self):
    x = np.array([1e4, 1e4 + 0.5, 1e4 - 0.5, 1e4], np.float32)
    std = contracts.call(masked.std, x, np.ones(4, bool))
    self.assertAlmostEqual(float(std), 0.5**1.5, delta=1e-6)

  def test_whitened_values_have_mean_zero_and_variance_one(self):
    x, mask = _example()
    out = contracts.call(masked.whiten, x, mask)[mask > 0]
    self.assertAlmostEqual(out.mean(), 0.0, delta=1e-6)
    self.assertAlmostEqual(np.var(out, ddof=1), 1.0, delta=1e-5)
    plain = functools.partial(masked.whiten, ddof=0, eps=0.0)
    hand = contracts.call(
      plain, np.array([1, 3, 9], np.float32), np.array([1, 1, 0])
    )
    self.assertEqual(hand.tolist(), [-1.0, 1.0, 0.0])

  def test_other_types_become_float32(self):
    for x in (jnp.array([3, 4]), jnp.array([True, False])):
      self.assertEqual(masked.sum(x, jnp.ones(2)).dtype, jnp.float32)
    half = jnp.full(4096, 1.0, jnp.bfloat16)
    self.assertEqual(masked.sum(half, jnp.ones(4096)), 4096.0)

  def test_keepdims(self):
    x, mask = jnp.ones((2, 3)), jnp.ones((2, 3))
    reductions = masked.sum, masked.mean, masked.variance, masked.std
    for fn in (*reductions, masked.max, masked.min):
      for axis, shape in ((1, (2, 1)), (None, (1, 1))):
        kept = functools.partial(fn, axis=axis, keepdims=True)
        self.assertEqual(jax.eval_shape(kept, x, mask).shape, shape)

  def test_a_quantile_out_of_range_is_clamped(self):
    x, mask = np.array([5, 1, 3, 9], np.float32), np.array([1, 1, 1, 0])
    quantile = jax.jit(jax.vmap(masked.quantile, (None, None, 0)))
    values = quantile(x, mask, np.array([-1, 0, 0.5, 1, 2], np.float32))
    self.assertEqual(values.tolist(), [1.0, 1.0, 3.0, 5.0, 5.0])

  def test_other_shapes_are_named(self):
    with self.assertRaisesRegex(ValueError, r'\(2, 3\).*\(2,\)'):
      masked.sum(jnp.ones((2, 3)), jnp.ones(2))


if __name__ == '__main__':
  absltest.main()
