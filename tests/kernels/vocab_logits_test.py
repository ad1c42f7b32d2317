"""Tests of the largest logits and of given ones, against float64."""

import dataclasses

from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rljax_kernels
from tests.kernels import meshes, oracle

SHARDS = (meshes.ROWS_OF_TWO_AXES,), (meshes.MORE_VOCAB,)


def topk(c: oracle.Case, k, columns=False, **options):
  unembed = c.unembed.T if columns else c.unembed

  @jax.jit
  def run(h, w, t):
    return rljax_kernels.vocab_topk(
      h, w, k, temperature=t, softcap=c.softcap, valid=c.valid, **options
    )

  return run(c.hidden, unembed, c.temperature)


def gather(c: oracle.Case, ids, columns=False, **options):
  def run(h, w):
    return rljax_kernels.gather_logits(
      h, w.T if columns else w, ids, temperature=c.temperature,
      softcap=c.softcap, valid=c.valid, **options,
    )  # fmt: skip

  return run


def check_topk(c: oracle.Case, k, ids, logp):
  z = oracle.logits(c)
  wanted = np.argsort(-z, axis=1, kind='stable')[:, :k]
  log_p = z - oracle.stats(c)['lse'][:, None]
  np.testing.assert_array_equal(ids, wanted)
  wanted = np.take_along_axis(log_p, wanted, 1)
  np.testing.assert_allclose(logp, wanted, atol=1e-5)


class TopKTest(parameterized.TestCase):
  @parameterized.parameters(
    (7, 7, None, None), (50, 5, 16, 41), (1000, 9, 7, 12),
    (50257, 3, 8192, 50001),
  )  # fmt: skip
  def test_of_float64(self, v, k, block, valid):
    softcap = (None, 5.0)[k % 2]
    c = oracle.case(13, 16, v, softcap=softcap, valid=valid)
    check_topk(c, k, *topk(c, k, columns=k == 9, block=block))

  @parameterized.parameters(*SHARDS)
  def test_of_shards(self, spec):
    layout = meshes.layout(*spec)
    # 20 real ids: most shards hold padding alone, none holds k ids.
    c = oracle.case(16, 8, 96, valid=26)
    check_topk(c, 25, *topk(c, 25, layout=layout, block=5))

  def test_equal_logits_come_in_the_order_of_the_ids(self):
    c = oracle.case(8, 4, 96)
    c = dataclasses.replace(c, unembed=np.repeat(c.unembed[:12], 8, 0))
    layout = meshes.layout(*meshes.MORE_VOCAB)
    ids, _ = topk(c, 20, layout=layout, block=10)
    np.testing.assert_array_equal(np.diff(ids[:, :8], axis=1), 1)

  def test_all_logits_are_never_formed(self):
    h, w = jnp.zeros((64, 8)), jnp.zeros((151936, 8))
    run = jax.jit(lambda h, w: rljax_kernels.vocab_topk(h, w, 4))
    text = run.lower(h, w).compile().as_text()
    self.assertNotIn('64,151936', text)
    self.assertIn('f32[64,16384]', text)


class GatherTest(parameterized.TestCase):
  @parameterized.parameters((1000, 5.0, 700, True), (50257, None, None, False))
  def test_of_float64(self, v, softcap, valid, columns):
    c = oracle.case(9, 16, v, softcap=softcap, valid=valid)
    ids = np.random.default_rng(v).integers(0, v, (9, 6), np.int32)
    ids[:, 3] = ids[:, 2]
    self.check(c, ids, columns=columns)

  @parameterized.parameters(*SHARDS)
  def test_of_shards(self, spec):
    c = oracle.case(16, 8, 96, softcap=6.0, valid=90)
    ids = np.random.default_rng(0).integers(0, 90, (16, 5), np.int32)
    ids[0] = -1, 90, 96, 10**9, -(10**9)
    self.check(c, ids, layout=meshes.layout(*spec))

  def check(self, c: oracle.Case, ids, **options):
    n, v = len(ids), len(c.unembed)
    real = (ids >= 0) & (ids < (c.valid or v))
    g = np.random.default_rng(n).normal(size=ids.shape).astype(np.float32)
    run = jax.jit(oracle.pull(gather(c, ids, **options)))
    found, (d_hidden, d_unembed) = run(c.hidden, c.unembed, g)
    z = oracle.logits(c)
    at = np.where(real, ids, 0)
    wanted = np.where(real, np.take_along_axis(z, at, 1), -np.inf)
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    dz = np.zeros((n, v))
    np.add.at(dz, (np.arange(n)[:, None], at), np.where(real, g, 0.0))
    dz /= np.float64(c.temperature)[:, None]
    if c.softcap is not None:
      raw = np.float64(c.hidden) @ np.float64(c.unembed).T
      dz *= 1 - np.tanh(raw / c.softcap) ** 2
    self.assertLess(oracle.error(d_hidden, dz @ np.float64(c.unembed)), 3e-6)
    self.assertLess(oracle.error(d_unembed, dz.T @ np.float64(c.hidden)), 3e-6)

  def test_ids_that_are_not_there(self):
    c = oracle.case(3, 8, 50, valid=40)
    c.unembed[40:] = np.nan
    ids = np.array([[-1, 40], [49, 50], [2**31 - 1, -(2**31)]], np.int32)
    run = jax.jit(oracle.pull(gather(c, ids)))
    found, pulled = run(c.hidden, c.unembed, np.ones((3, 2), np.float32))
    np.testing.assert_array_equal(found, -np.inf)
    for x in pulled:
      np.testing.assert_array_equal(x, 0.0)

  def test_cotangents_of_ids_that_are_not_there(self):
    hidden, unembed = np.ones((1, 4), np.float32), np.ones((9, 4), np.float32)
    ids = np.array([[-1, 3, 9]], np.int32)
    run = oracle.pull(lambda h, w: rljax_kernels.gather_logits(h, w, ids))
    _, pulled = run(hidden, unembed, np.float32([[np.nan, 2.0, np.inf]]))
    np.testing.assert_array_equal(pulled[0], np.full((1, 4), 2.0))
    np.testing.assert_array_equal(pulled[1][3], np.full(4, 2.0))
    np.testing.assert_array_equal(np.delete(pulled[1], 3, 0), 0.0)

  @parameterized.parameters(False, True)
  def test_rows_of_one_id_at_a_time(self, columns):
    n, k, d, v = 48, 40, 64, 2000
    h, w = jnp.zeros((n, d)), jnp.zeros((d, v) if columns else (v, d))
    ids, g = jnp.zeros((n, k), jnp.int32), jnp.ones((n, k))
    run = oracle.pull(lambda h, w: rljax_kernels.gather_logits(h, w, ids))
    program = jax.jit(run).lower(h, w, g).compile()
    every = n * k * d * 4
    # The sums of the backward pass are results, and there once more.
    spare = 2 * (n + v) * d * 4
    temporaries = program.memory_analysis().temp_size_in_bytes
    self.assertLess(temporaries, spare + every // 4)
    self.assertNotRegex(program.as_text(), rf'\[({n},{k}|{k},{n}),{d}\]')

  def test_bfloat16(self):
    c = oracle.bfloat16(oracle.case(9, 64, 50))
    ids = np.random.default_rng(0).integers(0, 50, (9, 4), np.int32)
    run = jax.jit(oracle.pull(gather(c, ids)))
    one = np.ones((9, 4), np.float32)
    found, (_, d_unembed) = run(c.hidden, c.unembed, one)
    wanted = np.take_along_axis(oracle.logits(c), ids, 1)
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    self.assertEqual(d_unembed.dtype, jnp.bfloat16)


BAD = (
  ('width', dict(hidden=np.zeros((4, 9))), r'\(4, 9\).*\(50, 8\)'),
  ('list', dict(hidden=[[0.0] * 8] * 4), 'hidden is a list'),
  ('float16', dict(hidden=np.zeros((4, 8), np.float16)), 'float16'),
  ('temperature', dict(temperature=-1), 'temperature.{1,4}-1'),
)
BAD_IDS = (
  ('flat', np.zeros(4, np.int32), r'ids \(4,\)'),
  ('float', np.zeros((4, 2)), 'float'),
  ('list', [[1, 2]] * 4, 'ids is a list'),
)
BAD_COUNTS = (
  ('k_of_0', dict(k=0), r'k=0 .*\[1, 50\]'),
  ('k_of_all', dict(k=41, valid=40), r'k=41 .*\[1, 40\]'),
  ('float_k', dict(k=3.0), 'k=3.0 must be an integer'),
  ('block', dict(k=4, block=0), 'block=0'),
)
PAIR = dict(
  hidden=np.zeros((4, 8), np.float32), unembed=np.zeros((50, 8), np.float32)
)


class BadInputTest(parameterized.TestCase):
  @parameterized.named_parameters(*BAD)
  def test_is_refused(self, changes, message):
    with self.assertRaisesRegex(ValueError, message):
      rljax_kernels.vocab_topk(k=3, **(PAIR | changes))
    ids = np.zeros((4, 2), np.int32)
    with self.assertRaisesRegex(ValueError, message):
      rljax_kernels.gather_logits(ids=ids, **(PAIR | changes))

  @parameterized.named_parameters(*BAD_IDS)
  def test_ids_are_refused(self, ids, message):
    with self.assertRaisesRegex(ValueError, message):
      rljax_kernels.gather_logits(ids=ids, **PAIR)

  @parameterized.named_parameters(*BAD_COUNTS)
  def test_counts_are_refused(self, options, message):
    with self.assertRaisesRegex(ValueError, message):
      rljax_kernels.vocab_topk(**(PAIR | options))


@pytest.mark.parametrize('kind', [np.int8, np.uint8, np.int16, np.int64])
def test_ids_of_any_width(kind):
  hidden, unembed = np.ones((1, 4), np.float32), np.ones((400, 4), np.float32)
  ids = np.array([[0, 100]], kind)
  if kind == np.int64:
    ids = np.array([[0, 2**32 + 1]], kind)
  found = rljax_kernels.gather_logits(hidden, unembed, ids)
  wide = kind == np.int64
  np.testing.assert_array_equal(found, [[4, -np.inf if wide else 4]])
  score = rljax_kernels.vocab_stats(hidden, unembed, ids[:, 1])['logp']
  np.testing.assert_array_equal(np.isneginf(score), [wide])
