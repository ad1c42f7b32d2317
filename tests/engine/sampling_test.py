"""Tests of the sampler: what it says about its tokens, and their randomness."""

import dataclasses
import functools

from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from rljax.core.types import Stop
from rljax.engine import sampling, scoring
from rljax.models import decoder
from tests.engine import small

PHASE = small.PHASE
ROWS = 16 * PHASE.group_size
FREE = dataclasses.replace(PHASE, stop_ids=())


@jax.jit
def scored(params, rollout, temperature):
  """Returns log-probs [B, T] of the rows read as a whole, and the logits."""
  rollout = dataclasses.replace(rollout, temperature=temperature)
  hidden, weight = scoring.read(small.MODEL, params, rollout)
  read = scoring.scores(small.MODEL, hidden, weight, rollout, None)
  return read.logp, hidden @ weight.T


def inside(rollout):
  """Returns which positions of [B, T] are part of the response."""
  size = rollout.response.shape[1]
  return np.arange(size)[None] < np.asarray(rollout.length)[:, None]


@functools.cache
def base():
  """Returns the rollout that others are compared with."""
  return small.sample(small.params(), small.batch())


class AgreementTest(parameterized.TestCase):
  """Sampler and scorer give the same log-prob to the same token."""

  @parameterized.product(temperature=(0.6, 1.0, 1.3), sharpness=(1.0, 8.0))
  def test_of_each_token(self, temperature, sharpness):
    params = small.params(sharpness)
    rollout = small.sample(params, small.batch(), FREE, temperature=temperature)
    rows = jnp.full(ROWS, temperature, jnp.float32)
    logp, logits = scored(params, rollout, rows)
    gap = np.abs(np.asarray(logp) - rollout.logp)
    self.assertGreaterEqual(gap.size, 4096)
    logits = np.asarray(logits)
    spread = (logits.max(-1) - logits.min(-1)).max()
    self.assertGreater(spread, 4 * sharpness)
    self.assertLessEqual(gap.mean(), 5e-6)
    limit = 1e-5 * max(1.0, spread / 6) / temperature
    self.assertLessEqual(gap.max(), limit)
    shifted = np.abs(np.asarray(logp)[:, 1:] - rollout.logp[:, :-1])
    self.assertGreater(shifted.mean(), 0.1)
    # Without truncation there is one distribution at this temperature.
    np.testing.assert_array_equal(rollout.logp, rollout.logp_full)
    unit, _ = scored(params, rollout, jnp.ones(ROWS))
    gap = np.abs(np.asarray(unit) - rollout.logp_unit)
    self.assertLessEqual(gap.max(), 1e-5 * max(1.0, spread / 6))
    if temperature != 1.0:
      self.assertGreater(np.abs(unit - logp).mean(), 0.02)

  def test_of_rows_of_different_temperature(self):
    rows = np.where(np.arange(ROWS) % 2, 0.7, 1.6).astype(np.float32)
    rollout = small.sample(
      small.params(4.0), small.batch(), FREE, temperature=rows
    )
    np.testing.assert_array_equal(rollout.temperature, rows)
    logp, _ = scored(small.params(4.0), rollout, jnp.asarray(rows))
    np.testing.assert_allclose(logp, rollout.logp, atol=1e-4)
    surprise = -np.asarray(rollout.logp).mean(axis=1)
    self.assertLess(surprise[rows < 1].mean(), surprise[rows > 1].mean() - 0.3)

  def test_of_truncated_rows(self):
    phase = dataclasses.replace(FREE, top_k=9, top_p=0.8)
    params = small.params()
    rollout = small.sample(params, small.batch(), phase)
    logp, logits = scored(params, rollout, jnp.ones(ROWS))
    np.testing.assert_allclose(rollout.logp_full, logp, atol=1e-5)
    z = np.float64(logits)
    p = np.exp(z - z.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    order = np.sort(p, axis=-1)[..., ::-1]
    before = np.cumsum(order, axis=-1) - order
    stays = (before < 0.8) & (np.arange(32) < 9)
    kept = np.where(stays, order, 0.0).sum(-1)
    floor = np.where(stays, order, 1.0).min(-1)
    chosen = np.take_along_axis(p, rollout.response[..., None], -1)[..., 0]
    self.assertTrue((chosen >= floor - 1e-6).all())
    self.assertLess(kept.mean(), 0.8)
    # A token on the edge of the set may fall on either side of it.
    gap = np.abs(rollout.logp - (np.log(chosen) - np.log(kept)))
    self.assertLess(np.quantile(gap, 0.99), 1e-5)

  def test_greedy_takes_the_most_likely_real_id(self):
    config = dataclasses.replace(small.SHALLOW, valid_vocab=21)
    params = small.params(config=config)
    phase = dataclasses.replace(FREE, greedy=True)
    rollout = small.sample(params, small.batch(), phase, config=config)
    read = jax.jit(decoder.Model(config).hidden)
    hidden = read(params, rollout.prompts, rollout.response)
    z = np.float64(hidden) @ np.float64(params['embed']).T
    self.assertGreater((z.argmax(-1) > 20).mean(), 0.1)
    z = z[..., :21]
    token = np.asarray(rollout.response)
    taken = np.take_along_axis(z, token[..., None], -1)[..., 0]
    np.testing.assert_allclose(taken, z.max(-1), atol=1e-5)
    wanted = taken - np.log(np.exp(z).sum(-1))
    for name in ('logp', 'logp_full', 'logp_unit'):
      np.testing.assert_allclose(getattr(rollout, name), wanted, atol=1e-5)
    groups = token.reshape(16, 8, -1)
    np.testing.assert_array_equal(groups, groups[:, :1].repeat(8, 1))


class EndTest(parameterized.TestCase):
  """Stop ids, limits and forced tokens."""

  def test_rows_end_with_a_stop_id_that_counts(self):
    rollout, free = base(), small.sample(small.params(), small.batch(), FREE)
    response, length = np.asarray(rollout.response), np.asarray(rollout.length)
    is_stop = np.isin(free.response, small.STOPS)
    first = np.where(is_stop.any(1), is_stop.argmax(1) + 1, 32)
    np.testing.assert_array_equal(length, first)
    stopped = is_stop.any(axis=1)
    self.assertBetween(stopped.mean(), 0.5, 0.999)
    np.testing.assert_array_equal(
      rollout.stop, np.where(stopped, Stop.TOKEN, Stop.LENGTH)
    )
    last = response[np.arange(ROWS), length - 1]
    self.assertEqual(set(last[stopped]), set(small.STOPS))
    # The stop token is part of the response, though one of them is the pad.
    live = inside(rollout)
    np.testing.assert_array_equal(rollout.mask, live)
    self.assertTrue(np.isfinite(rollout.logp).all())
    self.assertTrue((np.asarray(rollout.logp)[live] < 0).all())
    # Up to there nothing differs from a row that goes on; then all is 0.
    for name in ('response', 'logp', 'logp_full', 'logp_unit'):
      whole = np.where(live, getattr(free, name), 0)
      np.testing.assert_array_equal(getattr(rollout, name), whole)

  def test_limits_per_row(self):
    limit = np.arange(ROWS) % 5
    rollout = small.sample(small.params(), small.batch(), limit=limit)
    length = np.minimum(base().length, limit)
    np.testing.assert_array_equal(rollout.length, length)
    live = inside(rollout)
    np.testing.assert_array_equal(
      rollout.response, np.where(live, base().response, 0)
    )
    np.testing.assert_array_equal(rollout.mask, live)
    stop = np.where(base().length <= limit, base().stop, Stop.LENGTH)
    stop = np.where(limit == 0, Stop.EMPTY, stop)
    np.testing.assert_array_equal(rollout.stop, stop)
    self.assertEqual(set(stop), set(Stop))

  def test_forced_tokens_are_taken_and_not_trained(self):
    forced = np.full((ROWS, 4), -1, np.int32)
    forced[:40, :3] = [17, 3, 30]
    forced[40:80, 1] = 11
    rollout = small.sample(small.params(), small.batch(), FREE, forced=forced)
    response, given = np.asarray(rollout.response), forced >= 0
    np.testing.assert_array_equal(response[:, :4][given], forced[given])
    np.testing.assert_array_equal(rollout.mask[:, :4], ~given)
    np.testing.assert_array_equal(rollout.mask[:, 4:], 1)
    np.testing.assert_array_equal(rollout.length, 32)
    # What follows them was drawn, and is scored, as their continuation.
    logp, _ = scored(small.params(), rollout, jnp.ones(ROWS))
    np.testing.assert_allclose(rollout.logp, logp, atol=1e-5)
    free = small.sample(small.params(), small.batch(), FREE)
    np.testing.assert_array_equal(response[80:], free.response[80:])
    self.assertGreater(
      (response[:80, 4:] != free.response[:80, 4:]).mean(), 0.5
    )

  def test_what_was_drawn_anyway_can_be_forced(self):
    free = small.sample(small.params(), small.batch(), FREE)
    forced = np.asarray(free.response)[:, :4]
    again = small.sample(small.params(), small.batch(), FREE, forced=forced)
    np.testing.assert_array_equal(again.response, free.response)
    np.testing.assert_allclose(again.logp, free.logp, atol=1e-6)

  def test_a_forced_stop_ends_the_row(self):
    forced = np.tile(np.array([-1, -1, 9, -1], np.int32), (ROWS, 1))
    rollout = small.sample(small.params(), small.batch(), forced=forced)
    wanted = np.minimum(base().length, 3)
    np.testing.assert_array_equal(rollout.length, wanted)
    np.testing.assert_array_equal(rollout.stop, Stop.TOKEN)
    long = wanted == 3
    forced_at = np.asarray(base().length) > 2
    np.testing.assert_array_equal(rollout.response[forced_at, 2], 9)
    np.testing.assert_array_equal(rollout.mask[forced_at, 2], 0)
    self.assertTrue(long.any())

  def test_facts_of_the_rows(self):
    rollout = base()
    np.testing.assert_array_equal(rollout.version, 7)  # 7 in this sampler
    np.testing.assert_array_equal(rollout.prompt_of, np.arange(ROWS) // 8)
    np.testing.assert_array_equal(
      rollout.groups.index, np.arange(ROWS).reshape(16, 8)
    )
    np.testing.assert_array_equal(rollout.uid, 100 + np.arange(ROWS) // 8)


class Counting(decoder.Model):
  """A model that reports each decoded token and each cache segment."""

  seen, made = [], []

  def empty(self, rows, size):
    jax.debug.callback(lambda: self.made.append(size))
    return super().empty(rows, size)

  def decode(self, params, layers, token, step, *rest):
    jax.debug.callback(lambda step: self.seen.append(int(step)), step)
    return super().decode(params, layers, token, step, *rest)


class CacheTest(parameterized.TestCase):
  @parameterized.parameters(
    (32, 64, [(0, 32)]),
    (32, 8, [(0, 8), (8, 8), (16, 16)]),
    (7, 2, [(0, 2), (2, 2), (4, 3)]),
    (1, 1, [(0, 1)]),
    (100, 32, [(0, 32), (32, 32), (64, 36)]),
  )
  def test_segments_double_the_total(self, total, first, wanted):
    self.assertEqual(sampling.segments(total, first), wanted)

  def test_segments_and_padding_do_not_change_tokens(self):
    phase = dataclasses.replace(PHASE, segment=12)
    batch = small.batch()
    rollout = small.sample(small.params(), small.widen(batch, 5), phase)
    small.assert_same_tokens(
      small.params(), base(), rollout, small.uniforms(batch)
    )
    same = (rollout.response == base().response).all(axis=1)
    np.testing.assert_allclose(rollout.logp[same], base().logp[same], atol=1e-5)

  def test_decoding_ends_with_the_longest_row(self):
    phase = dataclasses.replace(FREE, segment=8, max_tokens=16, group_size=1)
    batch = small.batch(prompts=2)
    model = Counting(small.SHALLOW)

    params = small.params(config=small.SHALLOW)

    @jax.jit
    def run(limit):
      return sampling.sample(
        model, params, batch, phase, key=jax.random.key(0),
        step=jnp.int32(0), version=jnp.int32(0), limit=limit,
      )  # fmt: skip

    for limit in ([0, 0], [1, 3], [8, 0], [2, 9], [16, 5]):
      Counting.seen.clear()
      Counting.made.clear()
      rollout = run(jnp.array(limit))
      jax.effects_barrier()
      np.testing.assert_array_equal(rollout.length, limit)
      self.assertEqual(sorted(Counting.seen), list(range(max(limit))))
      # A segment that nobody reaches is not even filled with zeros.
      self.assertLen(Counting.made, 1 + (max(limit) > 8))


class RandomnessTest(parameterized.TestCase):
  """Tokens follow from the facts of a row, and from nothing else."""

  def test_rows_move_with_their_prompts(self):
    order = np.random.default_rng(3).permutation(16)
    batch = small.batch()
    prompts = jax.tree.map(lambda x: x[order], batch.prompts)
    moved = small.sample(
      small.params(), dataclasses.replace(batch, prompts=prompts)
    )
    rows = (order[:, None] * 8 + np.arange(8)[None]).reshape(-1)
    there = jax.tree.map(
      lambda x: x[rows], dataclasses.replace(base(), prompts=None, groups=None)
    )
    there = dataclasses.replace(
      there, prompts=prompts, prompt_of=moved.prompt_of
    )
    uniform = small.uniforms(batch)[rows]
    small.assert_same_tokens(small.params(), there, moved, uniform)
    # The same sums over the same numbers: bit-equal, whatever the neighbors.
    self.assertGreater((there.logp == moved.logp).mean(), 0.99)

  def test_uniforms_are_what_decides(self):
    # The helper that explains differences explains every token.
    params, batch = small.params(), small.batch()
    free, uniform = small.sample(params, batch, FREE), small.uniforms(batch)
    _, logits = scored(params, free, jnp.ones(ROWS))
    z = np.float64(logits)
    edges = np.cumsum(np.exp(z), -1) / np.exp(z).sum(-1, keepdims=True)
    token = (edges < uniform[..., None]).sum(-1)
    self.assertGreater((token == free.response).mean(), 0.999)
    other = dataclasses.replace(
      free, response=free.response.at[3, 2].set((free.response[3, 2] + 1) % 32)
    )
    gap = np.abs(edges[3, 2] - uniform[3, 2]).min()
    found = small.gaps(params, free, other, uniform)
    self.assertEqual(list(found), [3])
    self.assertAlmostEqual(found[3], gap, places=5)

  def test_nothing_repeats(self):
    # Over steps, groups, prompts and repeated prompts: all fresh.
    batch = small.batch(uid=[7] * 8 + [8] * 8)
    tokens = batch.prompts.tokens[:1].repeat(16, 0)
    prompts = dataclasses.replace(
      batch.prompts, tokens=tokens, length=jnp.full(16, 6, jnp.int32)
    )
    batch = dataclasses.replace(batch, prompts=prompts)
    found = [
      np.asarray(small.sample(small.params(), batch, FREE, step=step).response)
      for step in range(3)
    ]
    rows = np.concatenate(found)
    self.assertLen({row.tobytes() for row in rows}, 3 * ROWS)
    # Also where each row would be the first of its call.
    self.assertLen({row[:6].tobytes() for row in rows}, 3 * ROWS)

  def test_uniforms_do_not_repeat_anywhere(self):
    batch = small.batch(prompts=4, uid=[1, 2, 1, 1])
    phases = [dataclasses.replace(FREE, number=n) for n in range(3)]
    found = [
      small.uniforms(batch, phase, step, key)
      for phase in phases for step in range(4) for key in (5, 6)
    ]  # fmt: skip
    found = np.stack(found).reshape(-1)
    # Chance alone makes n² / 2 / 2^23 of the pairs equal.
    pairs = found.size**2 / 2 / 2**23
    repeats = found.size - np.unique(found).size
    self.assertLess(repeats, pairs + 5 * np.sqrt(pairs))

  def test_a_refill_is_fresh(self):
    uid = jnp.arange(4)
    first, second = (
      jax.random.key_data(
        sampling.row_keys(jax.random.key(0), 3, 0, uid, 8, refill=n)
      )
      for n in (0, 1)
    )
    self.assertFalse((first[:, None] == second[None]).all(-1).any())

  def test_occurrence_of_a_uid_not_its_place(self):
    key = jax.random.key(0)

    def rows(uid):
      keys = sampling.row_keys(key, 1, 0, jnp.array(uid), 2)
      return np.asarray(jax.random.key_data(keys)).reshape(len(uid), 2, -1)

    one, two = rows([7, 8, 7, 9, 7]), rows([9, 7, 7, 7, 8])
    np.testing.assert_array_equal(one[[0, 2, 4]], two[[1, 2, 3]])
    np.testing.assert_array_equal(one[[1, 3]], two[[4, 0]])
    everything = one.reshape(10, -1)
    self.assertLen(np.unique(everything, axis=0), 10)

  def test_frequencies_are_those_of_the_policy(self):
    # All pairs of two tokens, so that successive uniforms must not agree.
    config = dataclasses.replace(small.SHALLOW, vocab_size=4)
    params = small.params(config=config)
    phase = sampling.Phase(max_tokens=2, group_size=4000)
    batch = small.batch(prompts=2)
    tokens = batch.prompts.tokens % 4
    batch = dataclasses.replace(
      batch, prompts=dataclasses.replace(batch.prompts, tokens=tokens)
    )
    rollout = small.sample(
      params, batch, phase, config=config, forced=np.full((8000, 1), -1)
    )
    pair = np.asarray(rollout.response) @ [4, 1]
    whole = np.exp(np.asarray(rollout.logp).sum(axis=1))
    for p in range(2):
      rows = slice(4000 * p, 4000 * (p + 1))
      count = np.bincount(pair[rows], minlength=16)
      expected = 4000 * np.array([
        whole[rows][pair[rows] == k].mean() for k in range(16)
      ])  # fmt: skip
      self.assertAlmostEqual(expected.sum(), 4000, delta=0.1)
      chi = ((count - expected) ** 2 / expected).sum()
      self.assertLess(chi, 15 + 4 * np.sqrt(30))


class PhaseTest(parameterized.TestCase):
  @parameterized.parameters(
    (dict(max_tokens=0), 'max_tokens=0'),
    (dict(group_size=0), 'group_size=0'),
    (dict(temperature=0.0), 'temperature=0.0'),
    (dict(top_p=0.0), 'top_p=0.0'),
    (dict(top_p=1.1), 'top_p=1.1'),
    (dict(min_p=-0.1), 'min_p=-0.1'),
    (dict(top_k=-1), 'top_k=-1'),
  )
  def test_impossible_ones_are_named(self, changes, message):
    with self.assertRaisesRegex(ValueError, message):
      sampling.Phase(**{'max_tokens': 4, **changes})

  @parameterized.parameters(
    (dict(), False), (dict(top_k=1), True), (dict(top_p=0.9), True),
    (dict(min_p=0.1), True), (dict(temperature=0.5), False),
  )  # fmt: skip
  def test_truncates(self, changes, wanted):
    self.assertEqual(sampling.Phase(4, **changes).truncates, wanted)
