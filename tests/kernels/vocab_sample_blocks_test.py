"""Tests of sampling from hidden states: blocks, shards, noise, bad input."""

import dataclasses
import functools

from absl.testing import parameterized
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np
import pytest

import rljax_kernels
from rljax_kernels import chips, logits
from rljax_kernels.vocab_sample import blocks
from tests.kernels import meshes, oracle

LAST = np.float32(1 - 2**-24)
# Four units in the last place of a running sum near 1.
ULPS = 4 * 2.0**-23
OFF = ('layout', 'block', 'softcap', 'valid')


@functools.partial(jax.jit, static_argnames=OFF)
def sample(hidden, unembed, uniform, temperature, forced=None, **options):
  return rljax_kernels.vocab_sample(
    hidden, unembed, uniform, temperature=temperature, forced=forced, **options
  )


@functools.partial(jax.jit, static_argnames=OFF)
def noisy(hidden, unembed, keys, temperature, **options):
  return rljax_kernels.gumbel_sample(
    hidden, unembed, keys, temperature=temperature, **options
  )


def draw(c: oracle.Case, uniform, fn=sample, columns=False, **options):
  unembed = c.unembed.T if columns else c.unembed
  return fn(
    c.hidden, unembed, uniform, c.temperature,
    softcap=c.softcap, valid=c.valid, **options,
  )  # fmt: skip


def uniforms(n: int) -> np.ndarray:
  u = np.random.default_rng(n).uniform(size=n).astype(np.float32)
  return np.minimum(u, LAST)


def cdf(c: oracle.Case) -> np.ndarray:
  p = np.exp(oracle.logits(c) - oracle.stats(c)['lse'][:, None])
  return np.cumsum(p, axis=1) / p.sum(1, keepdims=True)


def gap(c: oracle.Case, token, uniform) -> float:
  """Returns how far the worst uniform is outside the interval of its id."""
  edges = np.pad(cdf(c), ((0, 0), (1, 0)))
  row = np.arange(len(token))
  low, high = edges[row, token], edges[row, np.asarray(token) + 1]
  return float(np.maximum(low - uniform, uniform - high).max())


def check_facts(c: oracle.Case, drawn, atol=1e-5) -> None:
  """Fails unless what is said about the drawn ids is right."""
  c = dataclasses.replace(c, targets=np.asarray(drawn.token))
  wanted = oracle.stats(c)
  np.testing.assert_allclose(drawn.logp, wanted['logp'], atol=atol)
  np.testing.assert_array_equal(drawn.logp, drawn.logp_full)
  np.testing.assert_allclose(drawn.entropy, wanted['entropy'], atol=atol)
  unit = dataclasses.replace(c, temperature=np.ones_like(c.temperature))
  np.testing.assert_allclose(
    drawn.logp_unit, oracle.stats(unit)['logp'], atol=atol
  )
  np.testing.assert_array_equal(drawn.kept, 1.0)


# (V, block, softcap, valid, whether the unembedding is [D, V])
CASES = (
  (1000, 128, 5.0, None, True),
  (1001, 384, None, 700, False),
  (50257, None, None, 50000, False),
)


class BlocksTest(parameterized.TestCase):
  @parameterized.parameters(*CASES)
  def test_inverts_the_cdf_of_float64(self, v, block, softcap, valid, columns):
    c = oracle.case(64, 16, v, softcap=softcap, valid=valid)
    u = uniforms(64)
    drawn = draw(c, u, block=block, columns=columns)
    self.assertLess(gap(c, drawn.token, u), ULPS)
    check_facts(c, drawn)

  def test_bfloat16_is_exact_on_its_values(self):
    c = oracle.bfloat16(oracle.case(64, 64, 1000))
    u = uniforms(64)
    drawn = draw(c, u, block=256)
    self.assertLess(gap(c, drawn.token, u), ULPS)
    check_facts(c, drawn)

  def test_block_does_not_matter(self):
    c = oracle.case(1000, 8, 2053)
    u = uniforms(1000)
    found = [draw(c, u, block=b) for b in (None, 384)]
    differ = np.flatnonzero(found[0].token != found[1].token)
    near = np.abs(cdf(c)[differ] - u[differ, None]).min(1, initial=1.0)
    self.assertTrue((near < ULPS).all(), near)
    self.assertLess(len(differ), 10)
    np.testing.assert_allclose(found[0].entropy, found[1].entropy, atol=2e-6)

  def test_banned_ids_are_never_drawn(self):
    c = oracle.case(6, 8, 300, valid=140)
    c.unembed[140:] = 9 * np.sign(c.hidden[0])  # the likeliest for row 0
    u = np.array([0.0, LAST] * 3, np.float32)
    for uniform in (u, None):
      drawn = draw(c, uniform, block=128)
      self.assertLess(np.max(drawn.token), 140)
      check_facts(c, drawn)
    np.testing.assert_array_equal(drawn.token, oracle.logits(c).argmax(1))
    np.testing.assert_array_equal(draw(c, u, block=128).token[::2], 0)

  def test_forced_ids(self):
    c = oracle.case(5, 8, 300, valid=280)
    forced = np.array([-1, 3, 299, 10**6, 279], np.int32)
    u = uniforms(5)
    drawn = draw(c, u, block=128, forced=forced)
    self.assertEqual(drawn.token[0], np.searchsorted(cdf(c)[0], u[0]))
    np.testing.assert_array_equal(drawn.token[1:], forced[1:])
    # Banned, and outside: no probability, and nothing read.
    np.testing.assert_array_equal(drawn.logp[2:4], -np.inf)
    row = np.array([0, 1, 4])
    wanted = oracle.logits(c) - oracle.stats(c)['lse'][:, None]
    wanted = wanted[row, np.asarray(drawn.token)[row]]
    np.testing.assert_allclose(drawn.logp[row], wanted, atol=1e-5)

  @parameterized.parameters(
    (np.int8, 100, {}), (np.uint32, 2**32 - 1, {}),
    (np.int64, 2**32 + 1, dict(top_k=3)),
  )  # fmt: skip
  def test_forced_ids_of_any_width(self, kind, wide, limits):
    # Cut to 32 bits, 2^32 + 1 would be id 1, and 2^32 - 1 a free row.
    states, unembed = np.ones((2, 4), np.float32), np.ones((120, 4), np.float32)
    drawn = rljax_kernels.vocab_sample(
      states, unembed, None, forced=np.array([7, wide], kind), **limits
    )
    np.testing.assert_array_equal(drawn.token, [7, min(wide, 2**31 - 1)])
    outside = -np.log(120) if kind == np.int8 else -np.inf
    np.testing.assert_allclose(drawn.logp, [-np.log(120), outside], rtol=1e-6)
    np.testing.assert_allclose(drawn.entropy, np.log(120), rtol=1e-6)

  @parameterized.parameters(dict(), dict(top_p=0.9), dict(block=128))
  def test_uniforms_that_are_none(self, **options):
    c = oracle.case(6, 8, 300)
    u = np.array([-3.0, 0.0, 1.0, 7.0, np.nan, LAST], np.float32)
    c = dataclasses.replace(
      c, hidden=c.hidden[[0, 0, 1, 1, 1, 1]], temperature=np.ones(6, np.float32)
    )
    drawn = rljax_kernels.vocab_sample(c.hidden, c.unembed, u, **options)
    self.assertEqual(drawn.token[0], drawn.token[1])
    np.testing.assert_array_equal(drawn.token[2:], drawn.token[5])
    self.assertTrue(np.isfinite(drawn.logp).all())

  def test_extreme_temperatures_and_logits(self):
    c = oracle.case(4, 8, 300, spread=60.0)
    cold = np.array([1e-12, 1e-3, 1e3, 1e12], np.float32)
    c = dataclasses.replace(c, temperature=cold)
    u = np.full(4, 0.5, np.float32)
    best = oracle.logits(c).argmax(1)
    drawn = draw(c, u, block=128)
    for found in drawn:
      self.assertTrue(np.isfinite(found).all())
    np.testing.assert_array_equal(drawn.token[:2], best[:2])
    np.testing.assert_allclose(drawn.entropy[3], np.log(300), atol=1e-5)
    np.testing.assert_array_equal(drawn.token[3], 150)

  def test_what_other_platforms_do(self):
    # They read all sub-blocks of pass 2 at once.
    c = oracle.case(24, 8, 300, valid=290)
    u = uniforms(24)
    rows = blocks.Rows(jnp.asarray(1 / c.temperature), jnp.asarray(u))
    form, plan = logits.Form(valid=290), blocks.Plan(128, serial=False)
    run = jax.jit(functools.partial(blocks.draw, form=form, plan=plan))
    drawn = run(c.hidden, c.unembed, rows)
    self.assertLess(gap(c, drawn.token, u), ULPS)
    check_facts(c, drawn)

  @pytest.mark.slow
  def test_vmap(self):
    c = oracle.case(24, 8, 300)
    u = uniforms(24)
    args = c.hidden, u, c.temperature
    run = jax.vmap(lambda *x: sample(x[0], c.unembed, *x[1:], block=128))
    drawn = run(*(x.reshape(2, 12, *x.shape[1:]) for x in args))
    drawn = jax.tree.map(lambda x: x.reshape(24), drawn)
    self.assertLess(gap(c, drawn.token, u), ULPS)
    check_facts(c, drawn)

  def test_logits_of_all_ids_are_never_formed(self):
    self.check_shapes(sample, jnp.float32(0))

  @pytest.mark.slow
  def test_noise_of_all_ids_is_never_formed(self):
    self.check_shapes(noisy, jax.random.key(0))

  def check_shapes(self, fn, row):
    n, d, v = 64, 8, 151936
    h, w, rows = jnp.zeros((n, d)), jnp.zeros((v, d)), jnp.full(n, row)
    text = fn.lower(h, w, rows, jnp.ones(n)).compile().as_text()
    self.assertNotRegex(text, f'{n},({v}|1187,128)')
    # The sums of sub-blocks are there, so this is how shapes are printed.
    self.assertIn(f'f32[{n},1187]', text)


class ShardedTest(parameterized.TestCase):
  @parameterized.parameters(
    (meshes.ROWS_OF_TWO_AXES, 128, False),
    (meshes.ROWS_AND_VOCAB, None, True),
    (meshes.VOCAB, 128, True),
  )
  def test_shards_do_not_matter(self, spec, block, columns):
    layout = meshes.layout(*spec)
    # Shards of 257 ids and more: no multiple of a sub-block. Some are banned.
    c = oracle.case(800, 8, 2056, softcap=6.0, valid=1500)
    u = uniforms(800)
    drawn = draw(c, u, block=block, columns=columns, layout=layout)
    self.assertLess(gap(c, drawn.token, u), ULPS)
    check_facts(c, drawn)

  @pytest.mark.slow
  def test_shards_of_many_ids(self):
    layout = meshes.layout(*meshes.MORE_VOCAB)
    c = oracle.case(64, 8, 50264)
    u = uniforms(64)
    drawn = draw(c, u, layout=layout)
    self.assertLess(gap(c, drawn.token, u), ULPS)
    check_facts(c, drawn)

  @pytest.mark.slow
  def test_greedy_forced_and_truncated(self):
    layout = meshes.layout(*meshes.MORE_VOCAB)
    c = oracle.case(16, 8, 1000, valid=900)
    greedy = draw(c, None, layout=layout)
    np.testing.assert_array_equal(greedy.token, oracle.logits(c).argmax(1))
    forced = np.where(np.arange(16) < 8, -1, 700).astype(np.int32)
    run = functools.partial(
      rljax_kernels.vocab_sample,
      c.hidden, c.unembed, uniforms(16), temperature=c.temperature,
      valid=c.valid, forced=forced, top_k=9, top_p=0.8,
    )  # fmt: skip
    found, wanted = jax.jit(lambda: (run(layout=layout), run()))()
    for name, x in found._asdict().items():
      np.testing.assert_allclose(x, getattr(wanted, name), atol=1e-5)
    self.assertLess(np.max(wanted.kept), 0.9)
    self.assertTrue((found.logp > found.logp_full)[:8].all())
    np.testing.assert_array_equal(found.logp[8:], found.logp_full[8:])
    check_facts(c, found._replace(logp=found.logp_full, kept=np.ones(16)))

  def test_sums_are_gathered_and_the_unembedding_is_not(self):
    layout = meshes.layout(*meshes.MORE_VOCAB)
    c = oracle.case(16, 8, 4096)
    rows, vocab = (
      NamedSharding(layout.mesh, PartitionSpec(x))
      for x in (layout.rows, layout.vocab)
    )
    places = rows, vocab, rows, rows
    args = c.hidden, c.unembed, uniforms(16), c.temperature
    args = jax.device_put(args, places)
    text = sample.lower(*args, layout=layout).compile().as_text()
    self.assertIn('all-gather', text)
    self.assertNotIn('[4096', text)
    self.assertNotIn(',4096', text)


class GumbelTest(parameterized.TestCase):
  @pytest.mark.slow
  def test_blocks_and_shards_do_not_matter(self):
    c = oracle.case(128, 8, 1000, softcap=6.0, valid=700)
    keys = jax.random.split(jax.random.key(1), 128)
    whole = draw(c, keys, noisy)
    check_facts(c, whole)
    layout = meshes.layout(*meshes.MORE_VOCAB)
    for options in (dict(block=128), dict(columns=True, layout=layout)):
      drawn = draw(c, keys, noisy, **options)
      np.testing.assert_array_equal(drawn.token, whole.token)
      np.testing.assert_allclose(drawn.logp, whole.logp, atol=1e-5)

  @pytest.mark.slow
  def test_frequencies(self):
    n, v, block = 20_000, 300, 128
    c = oracle.case(1, 8, v, spread=1.0)
    c = dataclasses.replace(
      c,
      hidden=np.repeat(c.hidden, n, 0),
      temperature=np.repeat(c.temperature, n),
    )
    keys = jax.random.split(jax.random.key(v), n)
    count = np.bincount(draw(c, keys, noisy, block=block).token, minlength=v)
    one = dataclasses.replace(
      c, hidden=c.hidden[:1], temperature=c.temperature[:1]
    )
    expected = n * np.diff(cdf(one)[0], prepend=0.0)
    chi = ((count - expected) ** 2 / expected).sum()
    self.assertLess(abs(chi - (v - 1)), 4 * np.sqrt(2 * (v - 1)))


KEYS = jax.random.split(jax.random.key(0), 4)
BAD = (
  ('list', dict(hidden=[[0.0] * 8] * 4), 'hidden is a list; pass an array'),
  ('three_dims', dict(hidden=np.zeros((2, 3, 4))), r'hidden \(2, 3, 4\)'),
  ('width', dict(hidden=np.zeros((4, 9))), r'\(4, 9\).*\(50, 8\)'),
  ('float16', dict(hidden=np.zeros((4, 8), np.float16)), 'float16'),
  ('uniform', dict(uniform=np.zeros(5, np.float32)), r'uniform \(5,\)'),
  ('uniform_list', dict(uniform=[0.5] * 4), 'uniform is a list'),
  ('uniform_int', dict(uniform=np.zeros(4, np.int32)), 'uniform is int32'),
  ('uniform_narrow', dict(uniform=np.zeros(4, np.float16)), 'is float16; draw'),
  ('forced', dict(forced=np.zeros((4, 1), np.int32)), r'forced \(4, 1\)'),
  ('forced_list', dict(forced=[1, 2, 3, 4]), 'forced is a list'),
  ('forced_float', dict(forced=np.zeros(4)), 'forced are float64; .*integers'),
  ('temperature', dict(temperature=0.0), 'temperature.{1,4}0.0'),
  ('temperatures', dict(temperature=np.ones(3)), r'temperature \(3,\)'),
  ('softcap', dict(softcap=-1.0), 'softcap=-1.0'),
  ('valid', dict(valid=51), r'valid=51 .*\[1, 50\]'),
  ('block', dict(block=100), 'block=100'),
  ('float_block', dict(block=128.0), 'block=128.0'),
)
BAD_LIMITS = (
  ('top_k', dict(top_k=-1), 'top_k=-1'),
  ('float_top_k', dict(top_k=2.0), 'top_k=2.0 must be an integer'),
  ('top_p', dict(top_p=0.0), 'top_p=0.0'),
  ('top_p_array', dict(top_p=np.full(4, 0.5)), 'top_p=.* number of Python'),
  ('top_p_nan', dict(top_p=float('nan')), 'top_p=nan'),
  ('min_p', dict(min_p=2.0), 'min_p=2.0'),
)
BAD_KEYS = (
  ('none', None, 'keys is None; pass'),
  ('raw', jax.random.split(jax.random.PRNGKey(0), 4), r'no typed keys; pass'),
  ('count', KEYS[:3], r'keys \(3,\)'),
  ('kind', jax.random.split(jax.random.key(0, impl='rbg'), 4), 'threefry'),
)


class BadInputTest(parameterized.TestCase):
  @parameterized.named_parameters(*BAD, *BAD_LIMITS)
  def test_is_refused(self, changes, message):
    options = dict(
      hidden=np.zeros((4, 8), np.float32),
      unembed=np.zeros((50, 8), np.float32),
      uniform=np.zeros(4, np.float32),
    )
    with self.assertRaisesRegex(ValueError, message):
      rljax_kernels.vocab_sample(**(options | changes))
    if 'uniform' in changes or (changes.keys() & {'top_k', 'top_p', 'min_p'}):
      return
    del options['uniform']
    with self.assertRaisesRegex(ValueError, message):
      rljax_kernels.gumbel_sample(keys=KEYS, **(options | changes))

  @parameterized.named_parameters(*BAD_KEYS)
  def test_keys_are_refused(self, keys, message):
    states, unembed = (
      np.zeros((4, 8), np.float32),
      np.zeros((50, 8), np.float32),
    )
    with self.assertRaisesRegex(ValueError, message):
      rljax_kernels.gumbel_sample(states, unembed, keys)


@pytest.mark.aot
@pytest.mark.parametrize('columns', [False, True])
def test_compiles_for_a_tpu(columns):
  if lacking := chips.missing('v5e'):
    pytest.skip(lacking)
  place = jax.sharding.SingleDeviceSharding(chips.devices('v5e')[0])

  def make(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

  n, d, v = 64, 1024, 151936
  h = make(n, d, dtype=jnp.bfloat16)
  w = make(*((d, v) if columns else (v, d)), dtype=jnp.bfloat16)
  program = sample.lower(h, w, make(n), make(n)).compile()
  assert f'{n},{v}' not in program.as_text()
  memory = program.memory_analysis()
  # Less than the logits of one block and the sub-blocks of pass 2.
  assert memory.temp_size_in_bytes < 4 * 2**20 + 2 * n * 128 * d
