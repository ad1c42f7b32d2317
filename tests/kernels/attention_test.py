"""Tests of the attention dispatcher against float64, one row at a time."""

import functools

from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax_kernels import chips
from rljax_kernels.attention import api


def oracle(q, k, v, *, ids=None, causal=True, window=None, softcap=None):
  """Returns attention [B, T, H, d] in float64, by its definition."""
  q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
  out = np.zeros(q.shape)
  group, late = q.shape[2] // k.shape[2], k.shape[1] - q.shape[1]
  for b, t, h in np.ndindex(q.shape[:3]):
    z = k[b, :, h // group] @ q[b, t, h] / np.sqrt(q.shape[3])
    if softcap:
      z = softcap * np.tanh(z / softcap)
    apart = t + late - np.arange(len(z))
    hidden = causal & (apart < 0)
    if window:
      hidden |= np.abs(apart) >= window
    if ids is not None:
      hidden |= ids[b] != ids[b, t]
    p = np.where(hidden, 0.0, np.exp(z - z.max()))
    out[b, t, h] = p / p.sum() @ v[b, :, h // group]
  return out


def inputs(t, s, heads=4, kv_heads=2, width=8, dtype=np.float32):
  r = np.random.default_rng(t)
  shapes = (2, t, heads, width), (2, s, kv_heads, width)
  made = (2 * r.normal(size=shapes[i]) for i in (0, 1, 1))
  return tuple(jnp.asarray(x, dtype) for x in made)


# (name, T, S, key-value heads, whether in segments, options)
CASES = (
  ('causal', 12, 12, 2, False, {}),
  ('one_kv_head', 12, 12, 1, False, dict(softcap=2.0)),
  ('segments', 12, 12, 2, True, {}),
  ('segments_both_ways', 12, 12, 2, True, dict(causal=False)),
  ('window_of_1', 12, 12, 2, False, dict(window=1, softcap=2.0)),
  ('window_both_ways', 12, 12, 2, False, dict(causal=False, window=3)),
  ('softcap', 12, 12, 2, False, dict(softcap=1.5)),
  ('all', 12, 12, 2, True, dict(window=3, softcap=1.5)),
  ('last_queries', 5, 12, 2, False, dict(window=6)),
)


class AttentionTest(parameterized.TestCase):
  @parameterized.named_parameters(*CASES)
  def test_of_float64(self, t, s, kv_heads, segmented, options):
    q, k, v = inputs(t, s, kv_heads=kv_heads)
    ids = np.repeat([[3, 0, 7], [5, 5, 1]], [5, 1, 6], axis=1)
    ids = np.int32(ids) if segmented else None
    run = jax.jit(lambda *x: api.attention(*x, segment_ids=ids, **options))
    wanted = oracle(q, k, v, ids=ids, **options)
    np.testing.assert_allclose(run(q, k, v), wanted, atol=3e-6)

  def test_bfloat16(self):
    q, k, v = inputs(12, 12, dtype=jnp.bfloat16)
    for softcap in (None, 2.0):
      found = jax.jit(functools.partial(api.attention, softcap=softcap))(
        q, k, v
      )
      self.assertEqual(found.dtype, jnp.bfloat16)
      wanted = oracle(q, k, v, softcap=softcap)
      found = np.asarray(found, np.float64)
      np.testing.assert_allclose(found, wanted, atol=3e-2)

  @parameterized.parameters(None, 2.0)
  def test_paged_decode(self, softcap):
    q, k, v = inputs(1, 12)
    lengths, size = np.array([12, 6], np.int32), 4
    # Row 0 has the pages 4, 0, 2; row 1 has 3 and 1, and then nonsense.
    pages = np.array([[4, 0, 2], [3, 1, 99]], np.int32)
    stores = []
    for x in (k, v):
      store = np.full((2, 5, size, 8), 1e3, np.float32)
      for b, m in ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1)):
        part = np.asarray(x[b, m * size : (m + 1) * size])
        store[:, pages[b, m]] = part.transpose(1, 0, 2)
      stores.append(store)
    run = jax.jit(lambda *x: api.paged_decode(*x, softcap=softcap))
    found = run(q[:, 0], *stores, lengths, pages)
    for b, length in enumerate(lengths):
      part = (x[b : b + 1, :length] for x in (k, v))
      wanted = oracle(q[b : b + 1], *part, softcap=softcap)
      np.testing.assert_allclose(found[b], wanted[0, 0], atol=3e-6)

  def test_refusals(self):
    q, k, v = inputs(12, 12)
    for args, options, message in (
      ((q[0], k, v), {}, r'q \(12, 4, 8\)'),
      ((q, k[:, :, :, :4], v[..., :4]), {}, r'k \(2, 12, 2, 4\)'),
      ((q[:, :, :3], k, v), {}, 'K divide H'),
      ((q, k[:, :4], v[:, :4]), {}, 'more queries'),
      ((q, k, v), dict(segment_ids=np.zeros((2, 3))), r'ids \(2, 3\)'),
      ((q, k, v), dict(segment_ids=np.zeros((2, 12))), 'ids are float64'),
      ((q, k, v), dict(window=0), 'window=0'),
      ((q, k, v), dict(window=2.0), 'window=2.0'),
      ((q, k, v), dict(softcap=0), 'softcap=0'),
      ((q, k, v), dict(scale=0.0), 'scale=0.0'),
      (([[0.0]], k, v), {}, 'q is a list'),
      ((q.astype(jnp.bfloat16), k, v), {}, 'bfloat16, float32, float32'),
      ((q, k, v), dict(implementation='flash'), "'flash'"),
      ((q.astype(jnp.float16), k, v), {}, 'float16'),
    ):
      with self.assertRaisesRegex(ValueError, message):
        api.attention(*args, **options)
    with self.assertRaisesRegex(NotImplementedError, 'T=12 is not'):
      api.attention(q, k, v, implementation='splash')
    store = np.zeros((2, 5, 4, 8), np.float32)
    row, pages = np.ones(2, np.int32), np.zeros((2, 3), np.int32)
    with self.assertRaisesRegex(NotImplementedError, 'd=8 is not'):
      api.paged_decode(
        q[:, 0], store, store, row, pages, implementation='paged'
      )
    for lengths, message in (
      (np.ones(3, np.int32), r'lengths \(3,\)'),
      (np.ones(2), 'lengths are float64'),
      ([1, 2], 'lengths is a list'),
    ):
      with self.assertRaisesRegex(ValueError, message):
        api.paged_decode(q[:, 0], store, store, lengths, pages)

  def test_kernels_of_a_tpu_are_refused_elsewhere(self):
    q = jnp.ones((1, 128, 2, 128))
    with self.assertRaisesRegex(NotImplementedError, "'splash': .* on cpu"):
      api.attention(q, q, q, implementation='splash')
    store, one = jnp.ones((2, 4, 8, 128)), jnp.ones(1, jnp.int32)
    with self.assertRaisesRegex(NotImplementedError, "'paged': .* on cpu"):
      api.paged_decode(
        q[:, 0], store, store, one, one[None], implementation='paged'
      )

  def test_scale(self):
    q, k, v = inputs(12, 12)
    found = api.attention(q, k, v, scale=0.3)
    wanted = oracle(np.asarray(q) * 0.3 * np.sqrt(8), k, v)
    np.testing.assert_allclose(found, wanted, atol=3e-6)

  def test_pages_and_lengths_outside(self):
    q, k, _ = inputs(1, 8)
    store = np.asarray(k).transpose(2, 0, 1, 3)  # two pages of 8 positions
    pages = np.array([[-7], [99]], np.int32)
    run = jax.jit(api.paged_decode)
    found = run(q[:, 0], store, store, np.array([-3, 99], np.int32), pages)
    inside = np.array([1, 8], np.int32), np.array([[0], [1]], np.int32)
    np.testing.assert_array_equal(found, run(q[:, 0], store, store, *inside))
    self.assertTrue(np.isfinite(found).all())


@pytest.fixture(scope='module')
def tpu():
  """A place on a TPU v5e that need not be there."""
  if lacking := chips.missing('v5e'):
    pytest.skip(lacking)
  return jax.sharding.SingleDeviceSharding(chips.devices('v5e')[0])


def compiled(fn, *args) -> str:
  return jax.jit(fn).lower(*args).compile().as_text()


@pytest.mark.aot
@pytest.mark.parametrize('width', [64, 128])
@pytest.mark.parametrize(
  'options',
  [{}, dict(window=100, softcap=30.0), dict(causal=False)],
)
def test_tpu_runs_splash(tpu, width, options):
  def make(s, heads):
    shape = 2, s, heads, width
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=tpu)

  ids = jax.ShapeDtypeStruct((2, 384), jnp.int32, sharding=tpu)

  def total(q, k, v, ids):
    out = api.attention(q, k, v, segment_ids=ids, **options)
    return jnp.sum(out.astype(jnp.float32))

  grad = jax.grad(total, (0, 1, 2))
  text = compiled(grad, make(384, 8), make(384, 2), make(384, 2), ids)
  # Forward, and two of the backward pass.
  assert text.count('custom_call_target="tpu_custom_call"') >= 3
  assert '384,384' not in text


@pytest.mark.aot
@pytest.mark.parametrize('softcap', [None, 30.0])
def test_tpu_runs_paged_attention(tpu, softcap):
  def make(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=tpu)

  def run(*args):
    return api.paged_decode(*args, softcap=softcap)

  rows = make(16, dtype=jnp.int32), make(16, 12, dtype=jnp.int32)
  pages = make(2, 64, 16, 128)
  text = compiled(run, make(16, 8, 128), pages, pages, *rows)
  assert 'custom_call_target="tpu_custom_call"' in text


@pytest.mark.aot
def test_short_sequences_compile_for_a_tpu_too(tpu):
  q = jax.ShapeDtypeStruct((2, 20, 4, 8), jnp.float32, sharding=tpu)
  assert 'tpu_custom_call' not in compiled(api.attention, q, q, q)
