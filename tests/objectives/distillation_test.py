"""Distillation: fused and dense, top-k and whole, sampled and exact."""

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np

from rljax.objectives import distillation, divergences
import rljax_kernels

F32 = np.float32
RNG = np.random.default_rng(5)
N, D, V = 5, 6, 11
HIDDEN, OTHER = RNG.normal(size=(2, N, D)).astype(F32)
UNEMBED, OTHER_UNEMBED = RNG.normal(size=(2, V, D)).astype(F32)
MASK = np.array([1, 1, 0, 1, 1], F32)


def close(found, wanted, atol=2e-6):
  np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=atol)


def teacher(hidden=OTHER, temperature=1.0):
  return rljax_kernels.Reference(
    jnp.asarray(hidden), jnp.asarray(OTHER_UNEMBED), temperature
  )


class FusedTest(parameterized.TestCase):
  @parameterized.parameters(
    ('forward_kl', {}), ('reverse_kl', {}), ('jsd', {'beta': 0.3})
  )
  def test_equals_dense(self, name, settings):
    dense = getattr(distillation, name)
    fused = getattr(distillation, f'fused_{name}')
    wanted_logits = OTHER @ OTHER_UNEMBED.T

    def of_logits(hidden, unembed):
      kl = dense(hidden @ unembed.T, wanted_logits, MASK, **settings)
      return jnp.sum(kl * (1.0 + jnp.arange(N))), kl

    def of_hidden(hidden, unembed, other):
      kl = fused(hidden, unembed, teacher(other), MASK, **settings)
      return jnp.sum(kl * (1.0 + jnp.arange(N))), kl

    grads, kl = jax.grad(of_logits, (0, 1), has_aux=True)(HIDDEN, UNEMBED)
    bad = [np.where(MASK[:, None] > 0, x, F32(np.nan)) for x in (HIDDEN, OTHER)]
    found = jax.grad(of_hidden, (0, 1, 2), has_aux=True)(
      bad[0], UNEMBED, bad[1]
    )
    close(found[1], kl)
    self.assertEqual(float(found[1][2]), 0.0)
    close(found[0][0], grads[0])
    close(found[0][1], grads[1], 1e-5)
    np.testing.assert_array_equal(found[0][2], np.zeros((N, D)))

  def test_temperatures(self):
    dense = distillation.forward_kl(
      HIDDEN @ UNEMBED.T, OTHER @ OTHER_UNEMBED.T, MASK, temperature=2.0
    )
    fused = distillation.fused_forward_kl(
      HIDDEN, UNEMBED, teacher(temperature=2.0), MASK, temperature=2.0
    )
    close(fused, dense)

  def test_wrong_masks_are_refused(self):
    with self.assertRaisesRegex(ValueError, r'mask\[3\] must be \[5\]'):
      distillation.fused_jsd(HIDDEN, UNEMBED, teacher(), np.ones(3, F32))
    with self.assertRaisesRegex(ValueError, r'mask\[3\] must be \[5\]'):
      logits = HIDDEN @ UNEMBED.T
      distillation.jsd(logits, logits, np.ones(3, F32))
    with self.assertRaisesRegex(ValueError, 'for 0 use forward_kl'):
      distillation.jsd(logits, logits, MASK, beta=0.0)


class LimitsTest(parameterized.TestCase):
  @parameterized.parameters((1e-3, 'forward_kl'), (1 - 1e-3, 'reverse_kl'))
  def test_ends_of_jsd(self, beta, name):
    logits, other = HIDDEN @ UNEMBED.T, OTHER @ OTHER_UNEMBED.T
    whole = getattr(distillation, name)(logits, other, MASK)
    part = distillation.jsd(logits, other, MASK, beta=beta)
    scaled = part / min(beta, 1 - beta)
    # The next term of the expansion is beta times a chi-square divergence.
    np.testing.assert_allclose(scaled, whole, rtol=0.1)
    self.assertGreater(float(jnp.max(whole)), 0.5)

  def test_jsd_is_bounded(self):
    far = np.array([[60.0, 0.0], [0.0, 0.0]], F32)
    bound = distillation.jsd(far, far[:, ::-1], np.ones(2, F32))
    close(bound, [np.log(2.0), 0.0])


class TopKTest(parameterized.TestCase):
  def test_all_tokens_are_the_whole_divergence(self):
    logits, other = HIDDEN @ UNEMBED.T, OTHER @ OTHER_UNEMBED.T
    ids = np.tile(np.arange(V)[::-1], (N, 1))
    kl = distillation.topk_forward_kl(
      distillation.topk_logp(logits, ids),
      distillation.topk_logp(other, ids),
      MASK,
      floor=None,
    )
    close(kl, distillation.forward_kl(logits, other, MASK))

  def test_a_tail_makes_it_a_divergence(self):
    # Student (0.6, 0.3 | 0.1), teacher (0.5, 0.1 | 0.4).
    logp = np.log(np.array([[0.6, 0.3]], F32))
    other = np.log(np.array([[0.5, 0.1]], F32))
    one = np.ones(1, F32)
    kl = distillation.topk_forward_kl(logp, other, one)
    close(kl, [0.5 * np.log(0.5 / 0.6) + 0.1 * np.log(0.1 / 0.3)])
    self.assertLess(float(kl[0]), 0.0)
    whole = distillation.topk_forward_kl(
      *map(distillation.with_tail, (logp, other)), one
    )
    close(whole, kl + 0.4 * np.log(0.4 / 0.1))

  @parameterized.parameters('jsd', 'reverse_kl', 'forward_kl')
  def test_divergences_of_the_likeliest_and_a_tail(self, name):
    divergence = getattr(distillation, name)
    logits, other = HIDDEN @ UNEMBED.T, OTHER @ OTHER_UNEMBED.T
    ids = np.argsort(-other, axis=1)
    whole, parts = divergence(logits, other, MASK), []
    for size in (1, 4, V):
      chosen = (
        distillation.topk_logp(x, ids[:, :size]) for x in (logits, other)
      )
      p, q = map(distillation.with_tail, chosen)
      parts.append(divergence(p, q, MASK))
    # Grouping tokens loses some of the difference; with all of them, none.
    self.assertTrue((parts[0] <= parts[1] + 1e-6).all())
    self.assertTrue((parts[1] <= whole + 1e-6).all())
    np.testing.assert_allclose(parts[2], whole, atol=1e-4)
    p, q = (
      np.exp(distillation.topk_logp(x, ids[:, :1]))[:, 0]
      for x in (logits, other)
    )
    m = 0.5 * (p + q)

    def kl(p, q):
      return p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))

    exact = {
      'jsd': 0.5 * (kl(p, m) + kl(q, m)),
      'reverse_kl': kl(p, q),
      'forward_kl': kl(q, p),
    }[name]
    close(parts[0], exact * MASK, 1e-5)

  def test_a_full_tail_has_a_gradient(self):
    logp = np.log(np.array([[0.75, 0.25]], F32))
    tail = distillation.with_tail(logp)[0, 2]
    close(tail, np.log(1e-6))
    slope = jax.grad(lambda x: distillation.with_tail(x)[0, 2])(logp)
    self.assertTrue(np.isfinite(slope).all())

  def test_below_the_floor_there_is_no_gradient(self):
    logp, other = np.array([[-12.0, -1.0]], F32), np.array([[-1, -2]], F32)

    def loss(logp):
      return distillation.topk_forward_kl(logp, other, np.ones(1, F32))[0]

    close(jax.grad(loss)(logp), [[0.0, -np.exp(-2.0)]])
    close(loss(logp), np.exp(-1.0) * 9.0 - np.exp(-2.0))
    impossible = distillation.topk_forward_kl(
      np.array([[-np.inf, -1.0]], F32), other, np.ones(1, F32), floor=None
    )
    self.assertTrue(np.isfinite(impossible).all())

  def test_fused_log_probs(self):
    ids = RNG.integers(V, size=(N, 3))
    found = distillation.fused_topk_logp(HIDDEN, UNEMBED, ids, temperature=0.7)
    close(found, distillation.topk_logp(HIDDEN @ UNEMBED.T / F32(0.7), ids))

  def test_meters(self):
    logp = np.log(np.array([[0.5, 0.25], [0.5, 0.25]], F32))
    close(distillation.topk_mass(logp), [0.75, 0.75])
    ids, theirs = np.array([[3, 1], [0, 2]]), np.array([[1, 7], [5, 6]])
    other = np.log(np.array([[0.25, 0.5], [0.25, 0.5]], F32))
    count, gain = distillation.topk_overlap(ids, theirs, logp, other)
    np.testing.assert_array_equal(count, [1.0, 0.0])
    close(gain, [0.25 * np.log(2.0), 0.0])

  def test_wrong_shapes_are_refused(self):
    with self.assertRaisesRegex(ValueError, r'teacher_logp\[2, 3\] must have'):
      distillation.topk_forward_kl(
        np.zeros((2, 2), F32), np.zeros((2, 3), F32), np.ones(2, F32)
      )


class SampledTest(parameterized.TestCase):
  @parameterized.parameters(np.nan, np.inf)
  def test_advantage_is_data_and_bounded(self, absent):
    logp = np.array([[-1.0, -2.0, absent]], F32)
    other = np.array([[-3.0, -40.0, absent]], F32)
    mask = np.array([[1, 1, 0]], F32)
    adv = distillation.advantage(logp, other, mask)
    np.testing.assert_array_equal(adv, [[-2.0, -10.0, 0.0]])
    slope = jax.grad(lambda x: jnp.sum(distillation.advantage(x, other, mask)))(
      logp
    )
    np.testing.assert_array_equal(slope, np.zeros((1, 3)))
    slope = jax.grad(lambda x: jnp.sum(distillation.penalty(x, other, mask)))(
      logp
    )
    np.testing.assert_array_equal(slope, [[2.0, 0.0, 0.0]])
    with self.assertRaisesRegex(ValueError, 'limit=0 must be positive'):
      distillation.penalty(logp, other, mask, limit=0)

  @parameterized.parameters(
    (divergences.k1, 'zero'), (divergences.k2, 'reverse'),
    (divergences.k3, 'forward'),
  )  # fmt: skip
  def test_expected_gradients(self, estimate, which):
    theta = np.array([[0.3, -0.2, 0.5]], F32)
    other = np.array([[0.0, 0.1, -0.4]], F32)
    one, every = np.ones(1, F32), np.ones((1, 3), F32)
    p = jax.nn.softmax(theta)

    def expected(theta):
      logp, target = jax.nn.log_softmax(theta), jax.nn.log_softmax(other)
      each = distillation.penalty(logp, target, every, estimate=estimate)
      return jnp.sum(p * each)

    wanted = {
      'zero': lambda theta: jnp.sum(0.0 * theta),
      'reverse': lambda x: distillation.reverse_kl(x, other, one)[0],
      'forward': lambda x: distillation.forward_kl(x, other, one)[0],
    }[which]
    close(jax.grad(expected)(theta), jax.grad(wanted)(theta))

  def test_advantage_in_a_surrogate_is_reverse_kl(self):
    theta = np.array([[0.3, -0.2, 0.5]], F32)
    other = np.array([[0.0, 0.1, -0.4]], F32)
    logp, target = jax.nn.log_softmax(theta), jax.nn.log_softmax(other)
    adv = distillation.advantage(logp, target, np.ones((1, 3), F32))
    p = jnp.exp(logp)
    found = jax.grad(lambda x: -jnp.sum(p * adv * jax.nn.log_softmax(x)))(theta)
    # Enumerated for this pair: the gradient of the reverse KL.
    close(found, [[-0.046132, -0.156667, 0.202799]])


if __name__ == '__main__':
  absltest.main()
