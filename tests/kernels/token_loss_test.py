"""Tests of token losses: value and gradients in one pass over live tokens."""

import functools

from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

import rljax_kernels
from tests.kernels import oracle, token_losses


@functools.partial(
  jax.jit, static_argnames=('softcap', 'valid', 'block', 'implementation')
)
def compute(hidden, unembed, targets, weight, data, **options):
  return rljax_kernels.token_loss(
    token_losses.objective, hidden, unembed, targets, weight, data, **options
  )


class TokenLossTest(parameterized.TestCase):
  @parameterized.parameters(*oracle.shapes()[::2])
  def test_values_and_gradients(self, index, n, d, v):
    c, block = oracle.varied(index, n, d, v)
    weight, data = token_losses.inputs(n, dead=(0.0, 0.4, 0.9)[index // 2 % 3])
    sums = compute(*c.arrays, weight, data, block=block, **c.options)
    token_losses.compare(c, weight, data, sums)

  @parameterized.parameters(
    (dict(weight=np.ones(5, np.float32)), r'weight \(5,\) must be \(6,\)'),
    (dict(weight=np.ones((6, 1), np.float32)), r'weight \(6, 1\)'),
    (dict(data={'old': np.ones(7)}), r'old \(7,\) must be \(6,\)'),
  )
  def test_what_has_not_a_number_for_each_token(self, change, message):
    c = oracle.case(6, 8, 50)
    weight, data = token_losses.inputs(6, dead=0.0)
    given = dict(weight=weight, data=data) | change
    with self.assertRaisesRegex(ValueError, message):
      rljax_kernels.token_loss(token_losses.objective, *c.arrays, **given)

  @parameterized.parameters(
    (lambda s, d: s['logp'], r'must return \(objective'),
    (lambda s, d: (jnp.sum(s['logp']), {}), 'objective .*number for each'),
    (
      lambda s, d: (s['logp'], {'x': s['logp'] > 0}),
      'returned x .*must be f32',
    ),
  )
  def test_an_objective_that_is_none(self, fn, message):
    c = oracle.case(6, 8, 50)
    with self.assertRaisesRegex(ValueError, message):
      rljax_kernels.token_loss(fn, *c.arrays, np.ones(6), {})

  @parameterized.parameters('reference', 'xla_vocab')
  def test_in_two_sweeps(self, name):
    c = oracle.case(30, 8, 50)
    weight, data = token_losses.inputs(30, dead=0.5)
    poisoned = np.where((weight == 0)[:, None], np.nan, c.hidden)
    sums = compute(
      poisoned, *c.arrays[1:], weight, data, implementation=name, **c.options
    )
    token_losses.compare(c, weight, data, sums)

  def test_the_gradient_of_the_loss_is_the_one_returned(self):
    c = oracle.case(30, 8, 50)
    weight, data = token_losses.inputs(30, dead=0.5)

    def twice(h, w):
      sums = compute(h, w, c.targets, weight, data, block=7, **c.options)
      return 2.0 * sums.loss

    pulled = jax.jit(jax.grad(twice, (0, 1)))(*c.arrays[:2])
    sums = compute(*c.arrays, weight, data, block=7, **c.options)
    np.testing.assert_allclose(pulled[0], 2 * sums.d_hidden, rtol=1e-6)
    np.testing.assert_allclose(pulled[1], 2 * sums.d_unembed, rtol=1e-6)

  def test_arrays_of_numpy_and_whole_numbers(self):
    c = oracle.case(6, 8, 50)
    data = {'ids': np.arange(6), 'keep': np.array([True] * 3 + [False] * 3)}

    def fn(stats, data):
      part = jnp.where(data['keep'], stats['logp'], 0.0)
      return part * data['ids'], {'kept': data['keep'] * 1.0}

    sums = rljax_kernels.token_loss(fn, *c.arrays, np.arange(6), data)
    logp = rljax_kernels.vocab_stats(*c.arrays)['logp']
    np.testing.assert_allclose(sums.loss, -(logp[1] + 4 * logp[2]), rtol=1e-6)
    self.assertEqual(sums.aux['kept'], 2)  # token 0 has no weight

  def test_all_tokens_dead(self):
    c = oracle.case(12, 8, 50)
    weight, data = token_losses.inputs(12, dead=1.1)
    self.assertTrue(np.isnan(data['old']).all())
    sums = compute(*c.arrays, weight, data, block=5, **c.options)
    for x in jax.tree.leaves(sums):
      np.testing.assert_array_equal(x, 0)

  def test_hidden_of_dead_tokens_is_never_read(self):
    c = oracle.case(30, 8, 50)
    weight, data = token_losses.inputs(30, dead=0.5)
    poisoned = np.where((weight == 0)[:, None], np.nan, c.hidden)
    options = dict(block=7, **c.options)
    sums = compute(poisoned, *c.arrays[1:], weight, data, **options)
    clean = compute(*c.arrays, weight, data, **options)
    for x, y in zip(*map(jax.tree.leaves, (sums, clean)), strict=True):
      np.testing.assert_array_equal(x, y)

  def test_logits_of_60(self):
    c = oracle.case(40, 8, 1000, spread=20.0)
    weight, data = token_losses.inputs(40, dead=0.2)
    self.assertLess(oracle.stats(c)['logp'].min(), -104)  # exp is 0 there
    sums = compute(*c.arrays, weight, data, block=6, **c.options)
    # Logits near 60 carry an error of 4e-6 into each probability.
    loss, _, d_hidden, d_unembed = token_losses.expected(c, weight, data)
    np.testing.assert_allclose(sums.loss, loss, 1e-4)
    self.assertLess(oracle.error(sums.d_hidden, d_hidden), 1e-4)
    self.assertLess(oracle.error(sums.d_unembed, d_unembed), 1e-4)

  def test_equals_differentiating_the_statistics(self):
    # Two programs that share no backward pass but one formula.
    c = oracle.case(50, 16, 200, softcap=6.0, valid=190)
    weight, data = token_losses.inputs(50, dead=0.0)

    @jax.jit
    @functools.partial(jax.value_and_grad, argnums=(0, 1))
    def whole(h, w):
      stats = rljax_kernels.vocab_stats(
        h, w, c.targets, **c.options, want=oracle.NAMES
      )
      return -jnp.sum(weight * token_losses.objective(stats, data)[0])

    loss, grads = whole(c.hidden, c.unembed)
    sums = compute(*c.arrays, weight, data, block=9, **c.options)
    np.testing.assert_allclose(sums.loss, loss, rtol=1e-5)
    for got, wanted in zip(sums[2:4], grads, strict=True):
      self.assertLess(oracle.error(got, np.float64(wanted)), 1e-6)

  def test_under_vmap(self):
    cases = [oracle.case(11, 8, 50, seed=i) for i in range(3)]
    given = [token_losses.inputs(11, dead) for dead in (0.0, 0.5, 1.1)]
    arrays = [
      (*c.arrays, c.temperature, *x) for c, x in zip(cases, given, strict=True)
    ]
    arrays = jax.tree.map(lambda *x: np.stack(x), *arrays)

    def one(h, w, t, i, weight, data):
      return rljax_kernels.token_loss(
        token_losses.objective, h, w, t, weight, data, temperature=i, block=4
      )

    sums = jax.jit(jax.vmap(one))(*arrays)
    for i, c in enumerate(cases):
      token_losses.compare(
        c, *given[i], jax.tree.map(lambda x, i=i: x[i], sums)
      )

  def test_bfloat16(self):
    c = oracle.case(64, 64, 1000)
    rounded = oracle.bfloat16(c)
    weight, data = token_losses.inputs(64, dead=0.3)
    sums = compute(*rounded.arrays, weight, data, block=16, **rounded.options)
    self.assertEqual(sums.d_unembed.dtype, jnp.bfloat16)
    self.assertEqual(sums.loss.dtype, jnp.float32)
    # Gradients are rounded to 8 bits, once as logits and once as a result.
    token_losses.compare(rounded, weight, data, sums, gradient=5e-3)


class MemoryTest(parameterized.TestCase):
  """Nothing of the size of all logits is ever made."""

  N, D, V, BLOCK = 2048, 16, 3000, 64

  def check(self, fn, *args):
    compiled = jax.jit(fn).lower(*args).compile()
    everything = 4 * self.N * self.V
    used = compiled.memory_analysis().temp_size_in_bytes
    block = 4 * self.BLOCK * self.V
    self.assertLess(used, 12 * block)
    self.assertLess(used, everything / 2)
    for shape in (f'[{self.N},{self.V}]', f'[{self.V},{self.N}]'):
      self.assertNotIn(shape, compiled.as_text())

  def test_statistics_and_their_gradient(self):
    c = oracle.case(self.N, self.D, self.V)

    def total(h, w, block=self.BLOCK, implementation=None):
      out = rljax_kernels.vocab_stats(
        h, w, c.targets, want=oracle.NAMES, block=block,
        implementation=implementation,
      )  # fmt: skip
      return sum(jnp.sum(x) for x in out.values())

    self.check(jax.value_and_grad(total, (0, 1)), c.hidden, c.unembed)
    naive = functools.partial(total, implementation='reference')
    with self.assertRaises(AssertionError):
      self.check(jax.value_and_grad(naive, (0, 1)), c.hidden, c.unembed)

  def test_token_loss(self):
    c = oracle.case(self.N, self.D, self.V)
    weight, data = token_losses.inputs(self.N, dead=0.0)
    run = functools.partial(compute, block=self.BLOCK)
    self.check(run, *c.arrays, weight, data)
