"""Tests of sampling by inverse CDF: exact sets, log-probs and frequencies."""

import functools
import itertools

from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rljax_kernels
from rljax_kernels.vocab_sample import truncation

# The largest uniform that float32 holds, and the spacing of `jax.random`'s.
LAST = np.float32(1 - 2**-24)
# Running sums of float32 may move a boundary of the CDF by a few roundings.
EDGE = 2e-6


_STATIC = ('top_k', 'top_p', 'min_p', 'block')


@functools.partial(jax.jit, static_argnames=_STATIC)
def draw(hidden, unembed, uniform, forced=None, **options):
  return rljax_kernels.vocab_sample(
    hidden, unembed, uniform, forced=forced, **options
  )


def rowwise(logits, uniform):
  """Draws from logits [N, V]: they are the states, the unembedding is 1."""
  return draw(logits, np.eye(logits.shape[1], dtype=np.float32), uniform)


def many(logits, uniform, forced=None, **options):
  """Draws from the same logits [V] with every uniform [N]."""
  n = len(uniform)
  assert n <= 4096
  # Of one size, so that tests share programs.
  uniform = np.resize(np.float32(uniform), 4096)
  if forced is not None:
    forced = np.resize(forced, 4096)
  one = np.ones((4096, 1), np.float32)
  drawn = draw(one, np.float32(logits)[:, None], uniform, forced, **options)
  return jax.tree.map(lambda x: np.asarray(x)[:n], drawn)


def grid(n):
  """Returns n uniforms, evenly in [0, 1), the ends included."""
  inner = (np.arange(n - 2) + 0.5) / (n - 2)
  return np.concatenate([[0.0], inner, [LAST]]).astype(np.float32)


def log_of(p):
  with np.errstate(divide='ignore'):
    return np.log(np.asarray(p, np.float64)).astype(np.float32)


def probabilities(logits):
  z = np.asarray(logits, np.float64)
  p = np.exp(z - z.max())
  return p / p.sum()


def random_logits(v, spread=2.0):
  return (spread * np.random.default_rng(v).normal(size=v)).astype(np.float32)


class FullSoftmaxTest(parameterized.TestCase):
  @parameterized.parameters(
    (7, None), (50, None), (1004, None), (2048, 256),
  )  # fmt: skip
  def test_inverts_the_cdf_of_float64(self, v, block):
    z = random_logits(v)
    u = grid(4000)
    drawn = many(z, u, block=block)
    p = probabilities(z)
    cdf = np.cumsum(p)
    wanted = np.minimum(np.searchsorted(cdf, u, side='right'), v - 1)
    token = np.asarray(drawn.token)
    # Only where the uniform lies on a boundary may the neighbor be taken.
    lower, upper = np.minimum(token, wanted), np.maximum(token, wanted)
    gap = np.where(token == wanted, 0.0, np.abs(cdf[lower] - u))
    self.assertLess(gap.max(), EDGE)
    self.assertLessEqual((upper - lower).max(), 1)
    self.assertLess((token != wanted).mean(), 0.01)
    np.testing.assert_allclose(drawn.logp, np.log(p[token]), atol=3e-6)
    np.testing.assert_array_equal(drawn.logp, drawn.logp_full)
    np.testing.assert_array_equal(drawn.logp, drawn.logp_unit)
    wanted = -(p * np.log(p)).sum()
    np.testing.assert_allclose(drawn.entropy, wanted, atol=2e-6)
    np.testing.assert_array_equal(drawn.kept, 1.0)

  def test_frequencies(self):
    n, v, block = 40_000, 300, 128
    z = random_logits(v, spread=1.0)
    u = np.asarray(jax.random.uniform(jax.random.key(v), (10, n // 10)))
    token = [many(z, part, block=block).token for part in u]
    count = np.bincount(np.concatenate(token), minlength=v)
    expected = n * probabilities(z)
    chi = ((count - expected) ** 2 / expected).sum()
    # Mean v - 1, deviation sqrt(2 (v - 1)); the key is fixed.
    self.assertLess(abs(chi - (v - 1)), 4 * np.sqrt(2 * (v - 1)))

  @parameterized.parameters((7, None), (1004, None), (2048, 256))
  def test_ids_without_probability_are_never_drawn(self, v, block):
    r = np.random.default_rng(v)
    z = r.normal(size=v).astype(np.float32)
    z[r.uniform(size=v) < 0.5] = -np.inf
    z[[0, -1]] = -np.inf  # at both ends, where rounding would go
    z[v // 2] = 1.0
    drawn = many(z, grid(3000), block=block)
    self.assertTrue(np.isfinite(z[drawn.token]).all())
    for found in drawn:
      self.assertTrue(np.isfinite(found).all())
    alive = np.isfinite(z) & (probabilities(z) > 1e-3)
    self.assertContainsSubset(np.flatnonzero(alive), np.asarray(drawn.token))

  def test_uniforms_at_the_ends(self):
    z = random_logits(300)
    first, last = many(z, np.array([0.0, LAST]), block=128).token
    self.assertEqual(first, 0)
    self.assertEqual(last, 299)
    # The last thousand ids underflow to mass 0: the end is id 4.
    z = np.full(1004, -200.0, np.float32)
    z[:5] = 0.0
    tokens = many(z, np.array([LAST, 1 - 2**-23, 0.79])).token
    np.testing.assert_array_equal(tokens, [4, 4, 3])

  def test_uniforms_of_the_last_thousandth(self):
    # Where running sums are near 1 they have lost most of their digits.
    z = random_logits(2048)
    u = (1 - np.geomspace(2**-24, 1e-3, 500)).astype(np.float32)
    token = many(z, u, block=256).token
    cdf = np.cumsum(probabilities(z))
    self.assertTrue((u < cdf[token] + EDGE).all())
    self.assertTrue((u > cdf[np.maximum(token - 1, 0)] - EDGE).all())

  @parameterized.parameters((50, None), (2048, 256))
  def test_uniforms_on_the_boundaries(self, v, block):
    # Two ways to add up a block differ in their last digits: the id must
    # still be next to the boundary, not at the other end of the block.
    z = random_logits(v)
    cdf = np.cumsum(probabilities(z))
    edge = cdf[:-1:2].astype(np.float32)
    steps = [edge, np.nextafter(edge, 0), np.nextafter(edge, 1)]
    u = np.concatenate(steps)
    token = np.asarray(many(z, u, block=block).token)
    before = np.where(token > 0, cdf[token - 1], 0.0)
    self.assertTrue((u < cdf[token] + EDGE).all())
    self.assertTrue((u > before - EDGE).all())

  def test_row_does_not_depend_on_its_neighbors(self):
    r = np.random.default_rng(0)
    z = r.normal(size=(32, 50)).astype(np.float32)
    u = r.uniform(size=32).astype(np.float32)
    whole = rowwise(z, u)
    order = r.permutation(32)
    mixed = rowwise(z[order], u[order])
    for name in whole._fields:
      found = np.asarray(getattr(whole, name))
      np.testing.assert_array_equal(getattr(mixed, name), found[order])

  def test_a_constant_on_all_logits_changes_nothing(self):
    z = np.round(random_logits(50) * 64) / 64  # exact in float32, so is + 512
    u = grid(500)
    plain, moved = many(z, u), many(z + 512, u)
    np.testing.assert_array_equal(plain.token, moved.token)
    np.testing.assert_array_equal(plain.logp, moved.logp)

  def test_greedy(self):
    z = np.random.default_rng(0).normal(size=(9, 50)).astype(np.float32)
    drawn = rowwise(z, None)
    np.testing.assert_array_equal(drawn.token, z.argmax(1))
    wanted = [np.log(probabilities(row).max()) for row in z]
    np.testing.assert_allclose(drawn.logp, wanted, atol=2e-6)

  def test_forced_ids_have_the_full_log_prob(self):
    p = [0.5, 0.3, 0.2]
    forced = np.array([-1, 2, -1, 2, 0], np.int32)
    u = np.array([0.1, 0.1, LAST, LAST, LAST], np.float32)
    drawn = many(log_of(p), u, forced, top_k=2)
    np.testing.assert_array_equal(drawn.token, [0, 2, 1, 2, 0])
    wanted = np.log([0.5 / 0.8, 0.2, 0.3 / 0.8, 0.2, 0.5])
    np.testing.assert_allclose(drawn.logp, wanted, atol=1e-6)
    full = np.log([0.5, 0.2, 0.3, 0.2, 0.5])
    np.testing.assert_allclose(drawn.logp_full, full, atol=1e-6)


TRUNCATED = (
  # (probabilities, options, ids that stay)
  ('top_k', [0.1, 0.4, 0.2, 0.3], dict(top_k=2), [1, 3]),
  ('top_k_of_more_than_all', [0.6, 0.4], dict(top_k=5), [0, 1]),
  ('top_k_with_ties', [0.4, 0.2, 0.2, 0.2], dict(top_k=2), [0, 1, 2, 3]),
  ('top_k_1', [0.3, 0.6, 0.1], dict(top_k=1), [1]),
  ('top_p', [0.5, 0.3, 0.2], dict(top_p=0.7), [0, 1]),
  ('top_p_on_the_edge', [0.5, 0.25, 0.25], dict(top_p=0.5), [0]),
  ('top_p_past_the_edge', [0.5, 0.26, 0.24], dict(top_p=0.51), [0, 1]),
  ('top_p_keeps_one', [0.3, 0.6, 0.1], dict(top_p=1e-6), [1]),
  ('top_p_needs_all', [0.5, 0.3, 0.2], dict(top_p=0.99), [0, 1, 2]),
  ('min_p', [0.5, 0.3, 0.04, 0.16], dict(min_p=0.2), [0, 1, 3]),
  ('min_p_of_1', [0.2, 0.5, 0.3], dict(min_p=1.0), [1]),
  ('smallest_set_of_all',
   [0.4, 0.3, 0.15, 0.1, 0.05], dict(top_k=4, top_p=0.8, min_p=0.5), [0, 1]),
  ('zeros', [0.6, 0.0, 0.4, 0.0], dict(top_k=3, top_p=0.9), [0, 2]),
)  # fmt: skip


def kept_by_definition(weights, top_k, top_p, min_p) -> np.ndarray:
  """Returns which ids of one row of integers stay, bool [V]."""
  above = weights[None] > weights[:, None]
  fewer = above.sum(1) < (top_k or len(weights))
  lighter = (above * weights).sum(1) < top_p * weights.sum()
  return fewer & (lighter | (top_p == 1)) & (weights >= min_p * weights.max())


def left_in_turn(p, order, options) -> list[float]:
  """Returns what stays where each limit renormalizes; p falls, [V]."""
  p = list(p)
  for name in order:
    total, limit = sum(p), options.get(name)
    if limit and name == 'top_k':
      p = p[:limit]
    elif limit and name == 'top_p':
      p = [x for i, x in enumerate(p) if sum(p[:i]) < limit * total]
    elif limit:
      p = [x for x in p if x >= limit * p[0]]
  return p


class TruncationTest(parameterized.TestCase):
  @parameterized.named_parameters(*TRUNCATED)
  def test_exact_sets(self, p, options, stays):
    mass = jnp.pad(jnp.asarray(p), (0, 5 - len(p)))[None] / max(p)
    limits = truncation.Limits(**options)
    kept = truncation.keep(mass, mass.sum(1), *limits) & (mass > 0)
    np.testing.assert_array_equal(np.flatnonzero(kept), stays)

  def test_every_combination_by_its_definition(self):
    # Numbers that float32 holds, with many ties.
    weights = np.random.default_rng(0).integers(0, 9, (40, 7))
    weights[:, 3] = 8
    mass = jnp.asarray(weights / 8, jnp.float32)
    total = mass.sum(1)
    grid = (0, 1, 3, 9), (0.25, 0.5, 0.8125, 1.0), (0.0, 0.375, 0.5, 1.0)
    for limits in itertools.product(*grid):
      found = truncation.keep(mass, total, *limits)
      wanted = [kept_by_definition(row, *limits) for row in weights]
      positive = weights > 0  # others are never drawn
      np.testing.assert_array_equal(found & positive, wanted & positive)

  @parameterized.parameters(
    # What is left of (.4, .3, .2, .1): ours, vLLM's, that of transformers.
    (dict(top_k=3), 3, 3, 3),
    (dict(top_p=0.75), 3, 3, 3),
    (dict(min_p=0.4), 3, 3, 3),
    (dict(top_k=3, top_p=0.75), 3, 2, 2),
    (dict(top_p=0.75, min_p=0.4), 3, 2, 3),
  )
  def test_libraries_that_renormalize_keep_no_more(
    self, options, ours, vllm, transformers
  ):
    p = [0.4, 0.3, 0.2, 0.1]
    drawn = many(log_of(p), grid(50), **options)
    self.assertLen(set(np.asarray(drawn.token)), ours)
    orders = ('min_p', 'top_k', 'top_p'), ('top_k', 'top_p', 'min_p')
    for order, wanted in zip(orders, (vllm, transformers), strict=True):
      self.assertLen(left_in_turn(p, order, options), wanted)

  @parameterized.named_parameters(*TRUNCATED[4:5], *TRUNCATED[-2:])
  def test_draws_and_log_probs(self, p, options, stays):
    drawn = many(log_of(p), grid(400), **options)
    p = np.asarray(p)
    kept = p[stays].sum()
    token = np.asarray(drawn.token)
    self.assertEqual(set(token), set(stays))
    np.testing.assert_allclose(drawn.logp, np.log(p[token] / kept), atol=1e-6)
    np.testing.assert_allclose(drawn.logp_full, np.log(p[token]), atol=1e-6)
    np.testing.assert_allclose(drawn.kept, kept, atol=1e-6)
    share = np.bincount(token, minlength=len(p))[stays] / len(token)
    np.testing.assert_allclose(share, p[stays] / kept, atol=0.01)

  @parameterized.parameters(
    dict(top_k=17), dict(top_p=0.6), dict(min_p=0.1), dict(top_k=40, top_p=0.8)
  )
  @pytest.mark.slow
  def test_large_vocabulary(self, **options):
    z = random_logits(1000, spread=1.5)
    p = probabilities(z)
    order = np.argsort(-p)
    before = np.cumsum(p[order]) - p[order]
    stays = before < options.get('top_p', 1.0)
    stays[options.get('top_k') or len(p) :] = False
    stays &= p[order] >= options.get('min_p', 0.0) * p.max()
    stays = order[stays]
    drawn = many(z, grid(4000), **options)
    self.assertContainsSubset(np.unique(drawn.token), stays)
    kept = p[stays].sum()
    np.testing.assert_allclose(drawn.kept, kept, rtol=1e-5)
    wanted = np.log(p[drawn.token] / kept)
    np.testing.assert_allclose(drawn.logp, wanted, atol=5e-6)

  def test_ratio_is_biased_by_the_kept_mass_and_replay_is_not(self):
    # p = .5 .3 .2 with top_p .8 and id 0: the naive ratio is .8.
    drawn = many(log_of([0.5, 0.3, 0.2]), np.zeros(1), top_p=0.8)
    self.assertEqual(drawn.token[0], 0)
    naive = np.exp(drawn.logp_full - drawn.logp)
    np.testing.assert_allclose(naive, 0.8, rtol=1e-6)
    replayed = np.exp(drawn.logp_full - np.log(drawn.kept) - drawn.logp)
    np.testing.assert_allclose(replayed, 1.0, rtol=1e-6)


class PickTest(parameterized.TestCase):
  @parameterized.parameters(1, 5, 128, 1025)
  def test_of_equal_masses(self, v):
    u = (np.arange(v) + 0.5) / v
    mass = jnp.full((v, v), 0.25)
    found = jax.jit(rljax_kernels.pick)(mass, u.astype(np.float32))
    np.testing.assert_array_equal(found, np.arange(v))

  def test_skips_empty_blocks(self):
    mass = np.zeros((3, 1000), np.float32)
    mass[:, [500, 730]] = 2.0
    u = np.array([0.0, 0.5, LAST], np.float32)
    found = jax.jit(rljax_kernels.pick)(mass, u)
    np.testing.assert_array_equal(found, [500, 730, 730])

  def test_uniforms_that_are_none(self):
    mass = np.zeros((5, 400), np.float32)
    mass[:, 3:390] = 1.0
    u = np.array([-1.0, 1.0, 2.0, np.inf, np.nan], np.float32)
    np.testing.assert_array_equal(
      rljax_kernels.pick(mass, u), [3, 389, 389, 389, 389]
    )

  def test_edges(self):
    none = np.zeros(0, np.float32)
    found = rljax_kernels.pick(np.zeros((0, 9), np.float32), none)
    self.assertEqual((found.shape, found.dtype), ((0,), jnp.int32))
    half = np.float32([0.5])
    for mass in (np.ones((1, 1), np.float32), np.zeros((1, 300), np.float32)):
      np.testing.assert_array_equal(rljax_kernels.pick(mass, half), [0])
    # Narrow masses are added up in float32.
    wide = jnp.ones((1, 4096), jnp.bfloat16)
    np.testing.assert_array_equal(rljax_kernels.pick(wide, half), [2048])

  @parameterized.parameters(
    ([[0.5, 0.5]], np.zeros(1, np.float32), 'mass is a list'),
    (np.ones(3, np.float32), np.zeros(3, np.float32), r'mass \(3,\)'),
    (np.ones((1, 0), np.float32), np.zeros(1, np.float32), r'mass \(1, 0\)'),
    (np.ones((1, 3), np.int32), np.zeros(1, np.float32), 'mass is int32'),
    (np.ones((2, 3), np.float32), np.zeros(1, np.float32), r'uniform \(1,\)'),
    (np.ones((1, 3), np.float32), [0.5], 'uniform is a list'),
    (np.ones((1, 3), np.float32), np.zeros(1, np.int32), 'uniform is int32'),
  )
  def test_is_refused(self, mass, uniform, message):
    with self.assertRaisesRegex(ValueError, message):
      rljax_kernels.pick(mass, uniform)
