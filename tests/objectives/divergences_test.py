"""The gradient of each estimator, by enumeration of three tokens."""

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np

from rljax.objectives import divergences
from tests import contracts

THETA = np.array([0.3, -0.2, 0.5])
REF = np.asarray(jax.nn.log_softmax(jnp.array([0.0, 0.1, -0.4])))
REVERSE = (-0.046132, -0.156667, 0.202799)
FORWARD = (-0.006682, -0.183711, 0.190392)


def _times_ratio(estimator):
  """Returns the estimator times a ratio of value 1 that has a gradient."""

  def fn(logp, other_logp):
    ratio = jnp.exp(logp - jax.lax.stop_gradient(logp))
    return estimator(logp, other_logp) * ratio

  return fn


class DivergencesTest(parameterized.TestCase):
  @parameterized.parameters(
    (divergences.k1, (0.0, 0.0, 0.0)),
    (divergences.k2, REVERSE),
    (divergences.k3, FORWARD),
    (divergences.k3_straight_through, REVERSE),
    (_times_ratio(divergences.k1), REVERSE),
    (_times_ratio(divergences.k3), REVERSE),
  )
  def test_expected_gradient(self, fn, expected):
    contracts.close(contracts.expected_gradient(fn, THETA, REF), expected)

  def test_the_straight_through_form_has_the_value_of_k3(self):
    logp = np.asarray(jax.nn.log_softmax(jnp.asarray(THETA, jnp.float32)))
    np.testing.assert_array_equal(
      contracts.call(divergences.k3_straight_through, logp, REF),
      contracts.call(divergences.k3, logp, REF),
    )

  def test_the_two_gradients_are_of_the_two_divergences(self):
    def reverse(theta):
      logp = jax.nn.log_softmax(theta)
      return jnp.sum(jnp.exp(logp) * (logp - REF))

    def forward(theta):
      return jnp.sum(jnp.exp(REF) * (REF - jax.nn.log_softmax(theta)))

    theta = jnp.asarray(THETA, jnp.float32)
    contracts.close(jax.jit(jax.grad(reverse))(theta), REVERSE)
    contracts.close(jax.jit(jax.grad(forward))(theta), FORWARD)

  @parameterized.parameters(divergences.k1, divergences.k3)
  def test_corrected_gradients_off_policy(self, estimator):
    # Another policy drew the tokens, and the ratio is far from 1.
    drawn = np.asarray(jax.nn.softmax(jnp.array([-1.0, 0.4, 0.9])))

    def expected(theta):
      logp = jax.nn.log_softmax(theta)
      each = divergences.ratio_corrected(
        estimator(logp, REF), logp - jnp.log(drawn)
      )
      return jnp.sum(drawn * each)

    theta = jnp.asarray(THETA, jnp.float32)
    value, slope = jax.jit(jax.value_and_grad(expected))(theta)
    logp = jax.nn.log_softmax(theta)
    contracts.close(value, jnp.sum(jnp.exp(logp) * (logp - REF)))
    contracts.close(slope, REVERSE)

  @parameterized.parameters(-4.0, -0.5, 0.0, 0.01, 2.0)
  def test_corrected_k3_in_one_term_is_the_product(self, gap):
    logp = jnp.log(jnp.array([0.2, 0.5, 0.9], jnp.float32))
    other, old = logp + gap, jnp.log(jnp.array([0.1, 0.6, 0.9], jnp.float32))

    def product(logp):
      return divergences.ratio_corrected(
        divergences.k3(logp, other), logp - old
      )

    def one_term(logp):
      return divergences.k3_ratio_corrected(logp, other, old)

    for fn in (lambda fn: fn, lambda fn: jax.grad(lambda x: jnp.sum(fn(x)))):
      contracts.close(jax.jit(fn(one_term))(logp), fn(product)(logp), 1e-5)

  @parameterized.parameters(18.0, -18.0, 39.0)
  def test_corrected_k3_in_one_term_keeps_its_gradient(self, x):
    # exp(39) is 8.7e16, of which float32 cannot take 39 away.
    logp, old = jnp.array([-1.0]), jnp.array([-1.5])
    other = logp + x

    def total(logp):
      return jnp.sum(
        divergences.k3_ratio_corrected(logp, other, old, limit=40.0)
      )

    slope = jax.jit(jax.grad(total))(logp)
    np.testing.assert_allclose(slope, [-np.exp(0.5) * x], rtol=1e-6)

  def test_corrected_k3_has_the_gradient_of_k1_at_each_token(self):
    logp = jnp.log(jnp.array([0.2, 0.5, 0.9], jnp.float32))
    ref, old = jnp.log(jnp.array([[0.7, 0.4, 0.1], [0.1, 0.6, 0.9]]))

    def total(logp, estimator):
      corrected = divergences.ratio_corrected(estimator(logp, ref), logp - old)
      return jnp.sum(corrected)

    ratio, k1 = jnp.exp(logp - old), logp - ref
    found = jax.grad(total)(logp, divergences.k3)
    contracts.close(found, ratio * k1, 1e-5)
    found = jax.grad(total)(logp, divergences.k1)
    contracts.close(found, ratio * (k1 + 1.0), 1e-5)

  @parameterized.parameters(1e-6, 1e-4, 1e-2, 0.029, 0.031, 0.3, 3.0)
  def test_k3_is_accurate_for_small_gaps(self, gap):
    for x in (gap, -gap):
      other = np.float32([x])
      exact = np.float64(other)
      exact = np.expm1(exact) - exact
      value = contracts.call(divergences.k3, np.float32([0.0]), other)
      np.testing.assert_allclose(value, exact, rtol=5e-5)


if __name__ == '__main__':
  absltest.main()
