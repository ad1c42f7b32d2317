"""Tilted cross-entropy: gradients, limits, and the fused form."""

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np

from rljax.objectives import distillation, tilting
import rljax_kernels
from tests import contracts

F32 = np.float32
RNG = np.random.default_rng(6)
N, D, V = 4, 5, 11
HIDDEN, UNEMBED = RNG.normal(size=(N, D)), RNG.normal(size=(V, D))
OTHER, OTHER_UNEMBED = RNG.normal(size=(N, 3)), RNG.normal(size=(V, 3))
HIDDEN, UNEMBED, OTHER, OTHER_UNEMBED = map(
  jnp.float32, (HIDDEN, UNEMBED, OTHER, OTHER_UNEMBED)
)
MASK = jnp.float32([1, 0, 1, 1])
LOGITS, TEACHER = HIDDEN @ UNEMBED.T, OTHER @ OTHER_UNEMBED.T
ONE = np.ones(1, F32)
TILTS = (0.0, 1e-3, 0.1, 0.5, 1.0, 3.0)


@jax.jit
def dense(logits, teacher, mask, tilt):
  return tilting.tilted_cross_entropy(logits, teacher, mask, tilt=tilt)


@jax.jit
def slope(logits, teacher, mask, tilt):
  return jax.grad(lambda x: jnp.sum(dense(x, teacher, mask, tilt)))(logits)


def softmax(x):
  p = np.exp(np.float64(x) - np.max(x, -1, keepdims=True))
  return p / p.sum(-1, keepdims=True)


class DenseTest(parameterized.TestCase):
  def test_by_hand(self):
    # p = (¾, ¼), q = (½, ½): -2 log ½ (√¾ + √¼), -log ½.
    p, q = np.log(np.array([[0.75, 0.25]], F32)), np.zeros((1, 2), F32)
    root = -2 * np.log(0.5 * (np.sqrt(0.75) + 0.5))
    contracts.close(dense(p, q, ONE, 0.5), [root])
    contracts.close(dense(p, q, ONE, 1.0), [np.log(2.0)])
    contracts.close(dense(p, q, ONE, 0.0), [-0.5 * np.log(0.1875)], 1e-5)

  @parameterized.parameters(*TILTS)
  def test_gradient_is_enumerated(self, tilt):
    p, q = softmax(LOGITS), softmax(TEACHER)
    w = q * p**tilt
    w /= w.sum(-1, keepdims=True)
    contracts.close(slope(LOGITS, TEACHER, jnp.ones(N), tilt), p - w)

  @parameterized.parameters(*TILTS)
  def test_value_in_double_precision(self, tilt):
    p, q = softmax(LOGITS), softmax(TEACHER)
    exact = -np.sum(q * np.log(p), -1)
    if tilt:
      exact = -np.log(np.sum(q * p**tilt, -1)) / tilt
    found = dense(LOGITS, TEACHER, jnp.ones(N), tilt)
    # At 1e-3 the rounding of float32 comes back a thousandfold.
    np.testing.assert_allclose(found, exact, rtol=5e-5)

  def test_without_tilt_it_has_the_gradient_of_forward_kl(self):
    kl = jax.grad(lambda x: jnp.sum(distillation.forward_kl(x, TEACHER, MASK)))(
      LOGITS
    )
    contracts.close(slope(LOGITS, TEACHER, MASK, 0.0), kl)
    entropy = -np.sum(softmax(TEACHER) * np.log(softmax(TEACHER)), -1) * MASK
    whole = distillation.forward_kl(LOGITS, TEACHER, MASK) + entropy
    contracts.close(dense(LOGITS, TEACHER, MASK, 0.0), whole)

  def test_tilt_1_is_a_policy_gradient_with_the_teachers_chance(self):
    p, q = softmax(LOGITS[:1]), softmax(TEACHER[:1])
    # E over tokens of -q(v) d log p(v), over the mean of q(v).
    each = np.eye(V) - p
    expected = -(p * q) @ each / np.sum(p * q)
    contracts.close(slope(LOGITS[:1], TEACHER[:1], ONE, 1.0), expected)

  def test_it_grows_less_for_what_the_student_excludes(self):
    # The teacher's first token has ever smaller probability here.
    q = np.log(np.array([[0.5, 0.5]], F32))
    pulls = {}
    for tilt in (0.0, 0.5):
      pulls[tilt] = [
        float(-slope(np.array([[-gap, 0.0]], F32), q, ONE, tilt)[0, 0])
        for gap in (2.0, 10.0, 40.0)
      ]
    self.assertGreater(min(pulls[0.0]), 0.37)
    np.testing.assert_allclose(pulls[0.5], [0.1497, 0.00665, 0], atol=1e-4)

  def test_it_is_at_most_the_cross_entropy_and_falls_with_the_tilt(self):
    values = [np.asarray(dense(LOGITS, TEACHER, MASK, t)) for t in TILTS]
    for more, less in zip(values, values[1:], strict=False):
      self.assertTrue((less <= more).all())
    self.assertTrue((values[-1] >= 0).all())

  @parameterized.parameters(0.0, 0.05, 1.0)
  def test_bans_are_finite(self, tilt):
    ban = np.array([[-np.inf, 0.0, 1.0]], F32)
    taught = np.array([[0.0, -np.inf, -np.inf]], F32)
    for x, y in ((ban, ban), (ban, taught), (taught, ban)):
      self.assertTrue(np.isfinite(dense(x, y, ONE, tilt)).all())
      self.assertTrue(np.isfinite(slope(x, y, ONE, tilt)).all())

  def test_wrong_arguments_are_refused(self):
    with self.assertRaisesRegex(ValueError, 'tilt=-1 must not be negative'):
      tilting.tilted_cross_entropy(LOGITS, TEACHER, MASK, tilt=-1)
    with self.assertRaisesRegex(ValueError, r'mask\[3\] all of it but V'):
      tilting.tilted_cross_entropy(LOGITS, TEACHER, MASK[:3], tilt=1)


class FusedTest(parameterized.TestCase):
  @parameterized.parameters(
    {'tilt': 0.5},
    {'tilt': 0.01, 'tolerance': 3e-4},
    {'tilt': 1.0, 'temperature': 0.7},
    {'tilt': 0.5, 'valid': 9},
    {'tilt': 0.5, 'turned': True},
  )
  def test_equals_dense(
    self, tilt, temperature=1.0, valid=V, turned=False, tolerance=5e-6
  ):
    bad = jnp.where(MASK[:, None] > 0, HIDDEN, jnp.nan)
    teacher = rljax_kernels.Reference(
      jnp.where(MASK[:, None] > 0, OTHER, jnp.inf), OTHER_UNEMBED, 1.3
    )

    def fused(hidden, unembed):
      head = unembed.T if turned else unembed
      value = tilting.fused_tilted_cross_entropy(
        hidden, head, teacher, MASK,
        tilt=tilt, temperature=temperature, valid=valid,
      )  # fmt: skip
      return jnp.sum(value * jnp.arange(1.0, N + 1)), value

    def whole(hidden, unembed):
      logits = (hidden @ unembed.T / temperature)[:, :valid]
      value = tilting.tilted_cross_entropy(
        logits, (TEACHER / 1.3)[:, :valid], MASK, tilt=tilt
      )
      return jnp.sum(value * jnp.arange(1.0, N + 1)), value

    found, wanted = (
      jax.jit(jax.grad(fn, (0, 1), has_aux=True)) for fn in (fused, whole)
    )
    if valid < V:
      # Padding of the student alone: the teacher's mass there is lost.
      kept = softmax(TEACHER / 1.3)[:, :valid].sum(-1)
      lost = -np.log(kept) / tilt * MASK
    else:
      lost = 0.0
    slopes, value = found(bad, UNEMBED)
    expected, exact = wanted(HIDDEN, UNEMBED)
    contracts.close(value, exact + lost, tolerance)
    contracts.close(slopes[0], expected[0], 1e-5)
    contracts.close(slopes[1], expected[1], 1e-5)

  def test_no_gradient_reaches_the_teacher(self):
    def total(other, head):
      teacher = rljax_kernels.Reference(other, head)
      return jnp.sum(
        tilting.fused_tilted_cross_entropy(
          HIDDEN, UNEMBED, teacher, MASK, tilt=0.5
        )
      )

    for x in jax.grad(total, (0, 1))(OTHER, OTHER_UNEMBED):
      np.testing.assert_array_equal(x, jnp.zeros_like(x))

  def test_soft_caps_are_refused(self):
    teacher = rljax_kernels.Reference(OTHER, OTHER_UNEMBED, softcap=30.0)
    with self.assertRaisesRegex(NotImplementedError, 'softcap: capped logits'):
      tilting.fused_tilted_cross_entropy(
        HIDDEN, UNEMBED, teacher, MASK, tilt=0.5
      )


if __name__ == '__main__':
  absltest.main()
