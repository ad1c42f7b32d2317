"""Tests of per-token vocabulary statistics against float64."""

import dataclasses

from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rljax_kernels
from tests.kernels import oracle

XLA = ('xla_token', 'xla_vocab')


def bound(c):
  """Returns the error a statistic may have, by the size of the logits."""
  z = [oracle.logits(x) for x in (c, c.other) if x is not None]
  return 2e-6 + 6e-7 * max(np.abs(x[np.isfinite(x)]).max() for x in z)


def measure(c, names=oracle.NAMES, wide=False, **options):
  """Returns statistics and gradients by the kernel, compiled."""

  def fn(h, w):
    return rljax_kernels.vocab_stats(
      h, w.T if wide else w, c.targets, **c.options, want=names, **options
    )

  given = oracle.cotangents(len(c.targets), names)
  found, pulled = jax.jit(oracle.pull(fn))(c.hidden, c.unembed, given)
  return found, pulled, given


def compare(c, found, pulled, given, gradient=3e-6):
  """Fails where the kernel is further from float64 than allowed."""
  expected, limit = oracle.stats(c), bound(c)
  assert set(found) == set(given)
  for name in found:
    assert found[name].dtype == jnp.float32
    gap = np.abs(np.asarray(found[name]) - expected[name]).max()
    # Second moments carry the error of u twice, times u.
    size = 1 + (expected[name].max() if name == 'varentropy' else 0)
    assert gap <= size * limit, (name, gap, limit)
  given = {k: v for k, v in given.items() if k != 'ref_logp'}
  for got, wanted in zip(pulled, oracle.gradients(c, given), strict=True):
    assert oracle.error(got, wanted) <= gradient


class VocabStatsTest(parameterized.TestCase):
  @parameterized.parameters(*oracle.shapes())
  def test_values_and_gradients(self, index, n, d, v):
    self.check_shape(XLA[index // 2 % 2], index, n, d, v)

  @parameterized.parameters(*oracle.every_shape())
  @pytest.mark.slow
  def test_values_and_gradients_of_every_shape(self, index, n, d, v):
    # Both over small vocabularies; they take turns over large ones.
    for name in XLA if v < 10_000 else XLA[index // 2 % 2 :][:1]:
      self.check_shape(name, index, n, d, v)

  def check_shape(self, name, index, n, d, v):
    c, block = oracle.varied(index, n, d, v)
    names = (oracle.NAMES, ('logp',), ('logp', 'entropy'))[index % 3]
    wide = d != v and index % 4 == 1
    compare(c, *measure(c, names, wide, block=block, implementation=name))

  @parameterized.parameters('reference', *XLA)
  def test_every_statistic_alone_and_with_a_reference(self, name):
    c = oracle.case(37, 16, 250, softcap=4.0, valid=247)
    c = oracle.paired(c, 24, softcap=9.0, valid=247)
    names = (*oracle.ALONE, *oracle.PAIRED)
    block = None if name == 'reference' else 96
    compare(c, *measure(c, names, implementation=name, block=block))

  @parameterized.product(name=XLA, flat=(True, False))
  def test_flat_and_peaked(self, name, flat):
    spread = 0.0 if flat else 20.0
    c = oracle.paired(oracle.case(40, 8, 300, spread=spread), 8, spread=3.0)
    if not flat:
      self.assertGreater(np.abs(oracle.logits(c)).max(), 60)
    names = (*oracle.ALONE, *oracle.PAIRED)
    if flat:
      names = tuple(x for x in names if x != 'top_logp')  # all ids tie
    found = measure(c, names, block=128, implementation=name)
    # Logits near 100 carry an error of 6e-6 into each probability.
    compare(c, *found, gradient=3e-6 if flat else 1e-5)

  @parameterized.parameters(*XLA)
  def test_a_certain_token(self, name):
    # Exact zeros, not small negative entropies or NaN.
    unembed = np.zeros((9, 4), np.float32)
    unembed[2], unembed[5] = 60.0, -60.0
    sure = oracle.Case(
      np.ones((3, 4), np.float32), unembed, np.array([2, 5, 0], np.int32),
      np.ones(3, np.float32),
    )  # fmt: skip
    names = oracle.ALONE
    found, pulled, _ = measure(sure, names, block=4, implementation=name)
    np.testing.assert_allclose(found['logp'], [0, -480, -240], atol=1e-4)
    for zero in ('entropy', 'varentropy', 'top_logp', 'entropy_drift'):
      np.testing.assert_array_equal(found[zero], [0, 0, 0])
    for x in pulled:
      self.assertTrue(np.isfinite(x).all())

  @parameterized.parameters(*XLA)
  def test_a_divergence_from_what_is_banned(self, name):
    c = oracle.paired(oracle.case(5, 8, 50, valid=40), 8, valid=45)
    names = ('kl_pq', 'kl_qp', 'js', 'logp')
    found, pulled, _ = measure(c, names, block=16, implementation=name)
    np.testing.assert_array_equal(found['kl_qp'], np.inf)
    for x in (found['kl_pq'], found['js'], found['logp'], *pulled):
      self.assertTrue(np.isfinite(x).all())
    with np.errstate(invalid='ignore'):
      wanted = oracle.stats(c)
    for k in ('kl_pq', 'js'):
      np.testing.assert_allclose(found[k], wanted[k], atol=1e-5)

  @parameterized.parameters('reference', *XLA)
  def test_a_divergence_from_what_is_banned_and_hardly_likely(self, name):
    # Id 45 has a mass of about exp(-60) under q, and none under p.
    c = oracle.case(5, 8, 50, valid=45)
    other = oracle.case(5, 8, 50, seed=1, valid=46)
    other.unembed[45] = -60.0 * other.hidden[0] / np.sum(other.hidden[0] ** 2)
    c = dataclasses.replace(c, other=other)
    block = None if name == 'reference' else 16
    names = ('kl_pq', 'kl_qp', 'logp')
    found, pulled, given = measure(c, names, block=block, implementation=name)
    np.testing.assert_array_equal(found['kl_qp'], np.inf)
    wanted = oracle.stats(c)
    np.testing.assert_allclose(found['kl_pq'], wanted['kl_pq'], atol=1e-5)
    # What is infinite passes no gradient, and cuts none of the others.
    del given['kl_qp']
    # Logits near 100 carry an error of 6e-6 into each probability.
    for got, wanted in zip(pulled, oracle.gradients(c, given), strict=True):
      self.assertLess(oracle.error(got, wanted), 1e-5)

  @parameterized.parameters('reference', *XLA)
  def test_a_reference_that_is_nearly_certain(self, name):
    # log q of most ids is about -20,000, where p is not 0.
    c = oracle.paired(oracle.case(5, 8, 50), 8)
    c.other.unembed[7] = 0.0
    c.other.unembed[7, 0] = 2e4
    c.other.hidden[:, 0] = 1.0
    block = None if name == 'reference' else 16
    names = ('kl_pq', 'kl_qp')
    found, pulled, given = measure(c, names, block=block, implementation=name)
    wanted = oracle.stats(c)
    self.assertGreater(wanted['kl_pq'].min(), 1e4)
    for k in names:
      np.testing.assert_allclose(found[k], wanted[k], rtol=1e-6)
    # Logits near 40,000 are rounded by 2e-3, and compared with each other.
    for got, wanted in zip(pulled, oracle.gradients(c, given), strict=True):
      self.assertLess(oracle.error(got, wanted), 5e-5)

  @parameterized.parameters('reference', *XLA)
  def test_an_offset_between_two_models_costs_no_digits(self, name):
    # All logits of q lie 4,096 higher, which changes no probability. They are
    # multiples of 1 / 64, which float32 holds exactly there.
    c = oracle.paired(oracle.case(20, 8, 300), 8)
    q = c.other
    edge = ((0, 0), (0, 1))
    flat = dataclasses.replace(
      q,
      hidden=np.pad(np.sign(q.hidden), edge, constant_values=1.0),
      unembed=np.pad(
        np.round(q.unembed * 64) / 64, edge, constant_values=4096.0
      ),
      temperature=np.ones(20, np.float32),
    )
    c = dataclasses.replace(c, other=flat)
    block = None if name == 'reference' else 64
    names = ('kl_pq', 'kl_qp', 'js')
    found, _, _ = measure(c, names, block=block, implementation=name)
    wanted = oracle.stats(c)
    for k in names:
      np.testing.assert_allclose(found[k], wanted[k], rtol=2e-6, atol=2e-6)

  @parameterized.parameters('reference', *XLA)
  def test_targets_that_cannot_be_drawn(self, name):
    c = oracle.case(6, 8, 50, valid=45)
    targets = np.array([-1, 45, 50, 2**30, 0, 44], np.int32)
    c = dataclasses.replace(c, targets=targets)
    block = None if name == 'reference' else 16
    names = ('logp', 'polarity', 'entropy')
    found, pulled, _ = measure(c, names, block=block, implementation=name)
    wanted = [1, 1, 1, 1, 0, 0]
    np.testing.assert_array_equal(np.isneginf(found['logp']), wanted)
    for x in (found['polarity'], found['entropy'], *pulled):
      self.assertTrue(np.isfinite(x).all())
    alive = dataclasses.replace(c, targets=np.array([0] * 4 + [0, 44]))
    again, _, _ = measure(alive, names, block=block, implementation=name)
    np.testing.assert_array_equal(found['logp'][4:], again['logp'][4:])

  def test_published_polarity(self):
    # p = (1/2, 1/4, 1/4) and (0.9, 0.1): arXiv 2605.11775's S.
    for p, wanted in (
      ((0.5, 0.25, 0.25), np.array([-3, 3, 3]) / 16 * np.log(2)),
      ((0.9, 0.1), np.array([-0.0396, 0.3560])),
    ):
      count = len(p)
      hidden = np.tile(np.log(p, dtype=np.float32), (count, 1))
      found = rljax_kernels.vocab_stats(
        hidden, np.eye(count, dtype=np.float32), np.arange(count),
        want=('polarity',),
      )  # fmt: skip
      np.testing.assert_allclose(found['polarity'], wanted, atol=6e-5)

  def test_a_wrong_padding_would_show(self):
    # Columns past V that count as exp(0), or a block that loses its remainder,
    # move the log-sum-exp by more than the tolerance.
    c = oracle.case(5, 8, 50)
    z = np.pad(oracle.logits(c), ((0, 0), (0, 14)))
    wrong = np.log(np.exp(z).sum(1)) - oracle.stats(c)['lse']
    self.assertGreater(np.abs(wrong).min(), 10 * bound(c))

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

  @parameterized.parameters('reference', *XLA)
  def test_one_model_at_two_temperatures(self, name):
    c = oracle.case(37, 16, 250, softcap=5.0, valid=247)
    other = dataclasses.replace(c, temperature=2.5 - c.temperature)
    block = None if name == 'reference' else 96

    def js(hidden, second):
      return rljax_kernels.vocab_js(
        hidden, c.unembed, (c.temperature, second), beta=oracle.BETA,
        softcap=5.0, valid=247, implementation=name, block=block,
      )  # fmt: skip

    run = jax.jit(js)
    found = run(c.hidden, other.temperature)
    wanted = oracle.stats(dataclasses.replace(c, other=other))['js']
    np.testing.assert_allclose(found, wanted, atol=bound(c))
    np.testing.assert_allclose(run(c.hidden, c.temperature), 0, atol=1e-7)
    slope = jax.grad(lambda h: jnp.sum(run(h, other.temperature)))(c.hidden)
    np.testing.assert_array_equal(slope, 0)

  def test_published_divergence_of_temperatures(self):
    # Logits (2, 0) at 0.3 and 1.2, arXiv 2609.33589; uniform logits differ
    # at no temperature.
    hidden = np.array([[2, 0], [0, 0]], np.float32)
    found = rljax_kernels.vocab_js(
      hidden, np.eye(2, dtype=np.float32), (0.3, 1.2)
    )
    np.testing.assert_allclose(found, [0.05517, 0], atol=5e-6)

  @parameterized.parameters(*XLA)
  def test_donated_inputs_become_their_gradients(self, name):
    c = oracle.case(13, 8, 50)

    def total(h, w):
      found = rljax_kernels.vocab_stats(
        h, w, c.targets, **c.options, block=4, implementation=name
      )
      return jnp.sum(found['logp'])

    given = [jnp.array(x) for x in (c.hidden, c.unembed)]
    run = jax.jit(jax.grad(total, (0, 1)), donate_argnums=(0, 1))
    pulled = run(*given)
    self.assertTrue(all(x.is_deleted() for x in given))
    ones = {'logp': np.ones(13)}
    for got, wanted in zip(pulled, oracle.gradients(c, ones), strict=True):
      self.assertLess(oracle.error(got, wanted), 3e-6)

  @parameterized.parameters(*XLA)
  def test_bfloat16(self, name):
    c = oracle.paired(oracle.case(100, 64, 1000), 64)
    rounded = oracle.bfloat16(c)
    names = ('logp', 'entropy', 'kl_pq')
    found, pulled, given = measure(rounded, names, implementation=name)
    self.assertEqual(pulled[0].dtype, jnp.bfloat16)
    # Products of bfloat16 are exact in float32, so statistics stay as good;
    # gradients are rounded to 8 bits, once as logits and once as a result.
    compare(rounded, found, pulled, given, gradient=4e-3)

  @parameterized.parameters(*XLA)
  def test_no_array_of_all_logits(self, name):
    n, v = 40, 151_936

    def total(h, w, t):
      found = rljax_kernels.vocab_stats(
        h, w, t, want=oracle.NAMES, block=8 if name == 'xla_token' else 2048,
        implementation=name,
      )  # fmt: skip
      return sum(jnp.sum(x) for x in found.values())

    shapes = ((n, 16), (v, 16))
    args = [jax.ShapeDtypeStruct(x, jnp.float32) for x in shapes]
    ids = jax.ShapeDtypeStruct((n,), jnp.int32)
    run = jax.jit(jax.value_and_grad(total, (0, 1)))
    text = run.lower(*args, ids).compile().as_text()
    self.assertNotIn(f'[{n},{v}]', text)
    self.assertNotIn(f'[{v},{n}]', text)


class ChoiceTest(parameterized.TestCase):
  def explain(self, n=64, d=128, v=8192, **options):
    c = oracle.case(n, d, v)
    return rljax_kernels.vocab_stats(*c.arrays, explain=True, **options)

  def test_by_platform_and_shape(self):
    self.assertEqual(self.explain(v=100).name, 'xla_token')
    whole = self.explain()
    self.assertEqual(whole.name, 'by_platform')
    self.assertIn('pallas_tpu on TPU', whole.reason)
    self.assertIn(
      'xla_vocab on TPU (a model width of 96', self.explain(d=96)[1]
    )
    mesh = jax.make_mesh((1,), ('data',), devices=jax.devices()[:1])
    layout = rljax_kernels.Layout(mesh, ('data',))
    self.assertEqual(self.explain(layout=layout).name, 'xla_token')

  def test_what_is_compiled_for_a_platform_is_its_own(self):
    c = oracle.case(8, 128, 5000)

    def fn(h, w):
      return rljax_kernels.vocab_stats(h, w, c.targets)['logp']

    jitted = jax.jit(fn)
    np.testing.assert_allclose(
      jitted(c.hidden, c.unembed), oracle.stats(dataclasses.replace(
        c, temperature=np.ones(8)))['logp'], atol=2e-5,
    )  # fmt: skip
    for platform, kernel in (('tpu', True), ('cpu', False), ('cuda', False)):
      text = jitted.trace(c.hidden, c.unembed).lower(
        lowering_platforms=(platform,)
      )
      self.assertEqual('tpu_custom_call' in text.as_text(), kernel, platform)

  def test_one_that_cannot_serve(self):
    with self.assertRaisesRegex(NotImplementedError, 'width of 64 is no mult'):
      self.explain(d=64, implementation='pallas_tpu')
    with self.assertRaisesRegex(NotImplementedError, 'block=100'):
      self.explain(implementation='pallas_tpu', block=100)


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    (dict(hidden=np.zeros((2, 3, 4), np.float32)), r'\(2, 3, 4\)'),
    (dict(unembed=np.zeros((9, 50), np.float32)), r'\(9, 50\).*\[V, D\]'),
    (dict(targets=np.zeros(7, np.int32)), r'\(7,\)'),
    (dict(hidden=np.zeros((6, 8), np.float16)), 'float16'),
    (dict(want=('logp', 'kl')), 'kl'),
    (dict(want=('kl_pq',)), r'reference=Reference'),
    (dict(targets=np.zeros(6, np.float32)), 'float32'),
    (dict(temperature=np.ones(3, np.float32)), r'temperature \(3,\)'),
    (dict(temperature=float('nan')), 'positive'),
    (dict(softcap=-1.0), 'softcap=-1.0'),
    (dict(valid=0), 'valid=0'),
    (dict(block=0), 'block=0'),
    (dict(unembed=np.zeros((0, 8), np.float32)), r'no id.*\(0, 8\)'),
    (dict(hidden=[[0.0] * 8] * 6), 'hidden is a list'),
    (dict(want='logp'), r"want=\('logp',\)"),
    (dict(temperature=float('inf')), 'temperature is inf'),
    (dict(temperature=jnp.zeros(6)), 'must be positive'),
    (dict(softcap=float('nan')), 'softcap=nan'),
    (dict(valid=51), r'valid=51 .*\[1, 50\]'),
    (dict(valid=5.5), r'valid=5.5 .*integer'),
    (dict(vocab_axis='tensor'), 'inside a shard_map.*layout='),
    (dict(implementation='fast'), 'fast'),
    (dict(temperature=0.0), 'positive'),
    (dict(temperature=np.array([1, 1, 1, 0, 1, 1.0])), 'positive'),
  ],
)
def test_what_does_not_fit_is_named(change, message):
  c = oracle.case(6, 8, 50)
  given = dict(hidden=c.hidden, unembed=c.unembed, targets=c.targets)
  given |= change
  with pytest.raises(ValueError, match=message):
    rljax_kernels.vocab_stats(**given)


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    (dict(softcap=0.0), 'reference.softcap=0.0'),
    (dict(valid=99), r'reference.valid=99 .*\[1, 50\]'),
    (dict(temperature=-1.0), 'reference.temperature is -1.0'),
    (dict(unembed=np.zeros((51, 8), np.float32)), r'\(51, 8\).*other tokens'),
  ],
)
def test_a_reference_that_does_not_fit_is_named(change, message):
  c = oracle.case(6, 8, 50)
  given = dict(hidden=c.hidden, unembed=c.unembed) | change
  other = rljax_kernels.Reference(**given)
  with pytest.raises(ValueError, match=message):
    rljax_kernels.vocab_stats(*c.arrays, reference=other, want=('kl_pq',))


@pytest.mark.parametrize('name', (None, 'reference', *XLA))
def test_no_token_at_all(name):
  c = oracle.case(6, 8, 50)
  none = np.zeros((0, 8), np.float32), c.unembed, np.zeros(0, np.int32)

  def fn(h, w):
    found = rljax_kernels.vocab_stats(h, w, none[2], implementation=name)
    return jnp.sum(found['logp'])

  total, pulled = jax.value_and_grad(fn, (0, 1))(*none[:2])
  assert total == 0
  assert pulled[0].shape == (0, 8)
  np.testing.assert_array_equal(pulled[1], 0)
