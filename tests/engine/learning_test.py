"""Tests of how parts of a batch are chosen, learned from and added up."""

import dataclasses
import functools
from unittest import mock

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np
import optax

from rljax.core import types
from rljax.engine import grpo, learning, sampling, seams
from rljax.engine import method as method_lib
from rljax.engine import step as step_lib
from rljax.models import decoder
from tests.engine import small, training

CTL = seams.Ctl(jnp.int32(0), jnp.int32(0), jnp.float32(0))


@functools.cache
def targets() -> types.Targets:
  """Returns targets whose arrays say which row they are of."""
  rollout, rewards = training.rollout()
  found = jax.jit(lambda *x: grpo.credit()(*x, {}, CTL))(rollout, rewards)
  rows = jnp.arange(rollout.length.size, dtype=jnp.float32)
  # Columns of several numbers a row and a prompt must stay in one piece.
  part = jnp.stack([rows, -rows, 2 * rows], axis=1)
  answer = jnp.arange(2 * training.PROMPTS).reshape(-1, 2)
  rollout = dataclasses.replace(
    found.rollout, data={**found.rollout.data, 'answer': answer}
  )
  return dataclasses.replace(
    found,
    rollout=rollout,
    extra={'row': rows},
    rewards={**rewards, 'parts': part},
    old_logp=rollout.logp,
  )


def test_the_loss_never_holds_all_logits():
  # Half of one [B, T, V] at most; the peers hold 4.8 of them.
  rows, size, vocab = 8, 480, 32_768
  model = decoder.Model(
    dataclasses.replace(small.SHALLOW, width=64, vocab_size=vocab)
  )
  phase = sampling.Phase(max_tokens=size, group_size=rows // 2)
  step = step_lib.make_step(
    method_lib.Method(phase=phase),
    {'policy': model}, optax.sgd(0.1), training.judge, prompts=2,
  )  # fmt: skip
  init = functools.partial(step_lib.init_state, model, optax.sgd(0.1), seed=0)
  state = jax.eval_shape(init)
  data = {'bad': np.zeros(2)}
  rollout = jax.eval_shape(step.sample, state, small.batch(2, **data))
  rewards = jax.eval_shape(step.judge, rollout)
  whole = jax.eval_shape(step.credit, state, rollout, rewards)

  def loss(hidden, weight, whole):
    reading = learning.Reading(hidden, weight, lambda pair: (pair,))
    return learning.gradient(model, grpo.loss(), reading, whole, CTL, None)

  shapes = (rows, size, 64), (vocab, 64)
  hidden, weight = (jax.ShapeDtypeStruct(x, jnp.float32) for x in shapes)
  compiled = jax.jit(loss).lower(hidden, weight, whole).compile()
  spent = compiled.memory_analysis().temp_size_in_bytes
  assert spent <= 0.5 * 4 * rows * size * vocab, spent / 2**20


class SelectTest(absltest.TestCase):
  def test_prompts_come_with_all_of_their_rows(self):
    whole, order = targets(), np.array([5, 0, 31])
    part = jax.jit(learning.select)(whole, jnp.asarray(order))
    rows = (order[:, None] * 16 + np.arange(16)[None]).reshape(-1)
    np.testing.assert_array_equal(part.extra['row'], rows)
    for name in ('advantage', 'weight', 'old_logp'):
      np.testing.assert_array_equal(
        getattr(part, name), getattr(whole, name)[rows]
      )
    for name, column in whole.rewards.items():
      np.testing.assert_array_equal(part.rewards[name], column[rows])
    found, rollout = part.rollout, whole.rollout
    for name in ('response', 'length', 'mask', 'logp', 'stop', 'temperature'):
      np.testing.assert_array_equal(
        getattr(found, name), getattr(rollout, name)[rows]
      )
    for name in ('tokens', 'length', 'uid'):
      np.testing.assert_array_equal(
        getattr(found.prompts, name), getattr(rollout.prompts, name)[order]
      )
    # Places are those within the part.
    np.testing.assert_array_equal(found.prompt_of, np.arange(48) // 16)
    np.testing.assert_array_equal(found.uid, rollout.uid[rows])
    np.testing.assert_array_equal(
      found.groups.index, np.arange(48).reshape(3, 16)
    )
    for name, column in rollout.data.items():
      np.testing.assert_array_equal(found.data[name], column[order])
    self.assertEqual(found.data['answer'].shape, (3, 2))


class SumTest(absltest.TestCase):
  def test_parts_add_and_peaks_do_not(self):
    def part(x):
      x = jnp.float32(x)
      metrics = {
        'mean': types.Mean(total=x, count=jnp.float32(2)),
        'peak': types.Peak(value=x),
      }
      return learning.Learned({'w': x * jnp.ones(2)}, x, metrics)

    found = learning.add(part(3), part(-1))
    np.testing.assert_array_equal(found.grads['w'], [2, 2])
    self.assertEqual(found.loss, 2)
    self.assertEqual(found.metrics['mean'].total, 2)
    self.assertEqual(found.metrics['mean'].count, 4)
    self.assertEqual(found.metrics['peak'].value, 3)

  def test_updates_collapse_to_one_metric(self):
    values = jnp.array([1.0, 4.0, 2.0])
    mean = learning.collapse(types.Mean(total=values, count=jnp.ones(3)))
    self.assertEqual((mean.total, mean.count), (7, 3))
    self.assertEqual(learning.collapse(types.Peak(value=values)).value, 4)

  def test_parts_are_dealt_evenly_from_the_shards(self):
    # Shard s of 4 holds prompts 8 s to 8 s + 7: each part takes two of each.
    def gradient(model, loss, reading, part, ctl, mesh):
      del model, loss, reading, ctl, mesh
      prompt = part.rollout.prompts.uid - 100
      shards = jnp.zeros(4).at[prompt // 8].add(1.0)
      seen = jnp.zeros(training.PROMPTS).at[prompt].add(1.0)
      return learning.Learned({'seen': seen}, jnp.max(shards), {})

    with mock.patch.multiple(
      learning, gradient=gradient, differentiate=lambda *args: None
    ):
      found = learning.accumulate(
        training.MODEL, grpo.loss(), {}, targets(), CTL, None, parts=4
      )
    np.testing.assert_array_equal(found.grads['seen'], 1)
    self.assertEqual(found.loss, 4 * 2)


# With no room for the ratio at all, whatever is not exactly 1 is clipped.
TIGHT = grpo.loss(low=0.0, high=0.0, beta=training.BETA)


class StartTest(parameterized.TestCase):
  """A policy that learns for the first time, from an equal reference."""

  def learn(self, rewards=None, **changes):
    rollout, plain = training.rollout()
    equal = jax.tree.map(jnp.copy, training.state().params['policy'])
    return training.learn(
      training.make(microbatches=4, loss=TIGHT),
      training.state(ref=equal),
      (dataclasses.replace(rollout, **changes), rewards or plain),
    )

  @parameterized.parameters(0.6, 0.7, 1.0, 1.3)
  def test_the_ratio_is_1_and_the_kl_0(self, temperature):
    rows = training.rollout()[0].temperature
    found = self.learn(temperature=jnp.full_like(rows, temperature))
    for name in ('clip/low', 'clip/high'):
      self.assertEqual(found.mean(name), 0, name)
    self.assertLess(abs(found.mean('kl/ref')), 1e-8)
    # These rows were sampled at 0.7: another temperature does show.
    if temperature == 0.7:
      self.assertLess(found.mean('mismatch/k3'), 1e-9)
    else:
      self.assertGreater(found.mean('mismatch/k3'), 1e-3)

  def test_what_is_masked_is_never_read(self):
    rollout, plain = training.rollout()[0], self.learn()
    dead = np.asarray(rollout.mask) == 0
    self.assertGreater(dead.mean(), 0.1)
    names = ('logp', 'logp_full', 'logp_unit')
    bad = {k: jnp.where(dead, jnp.nan, getattr(rollout, k)) for k in names}
    other = jnp.where(dead, 17, rollout.response)
    found = self.learn(response=other, **bad)
    training.assert_close_leaves(found.grads, plain.grads, 1e-6)
    for x, y in zip(
      *map(jax.tree.leaves, (found.metrics, plain.metrics)), strict=True
    ):
      np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-9)

  def test_a_batch_without_a_token_changes_nothing(self):
    rollout = training.rollout()[0]
    none = self.learn(
      mask=jnp.zeros_like(rollout.mask), length=jnp.zeros_like(rollout.length)
    )
    self.assertEqual(none.mean('loss'), 0)
    self.assertEqual(int(none.state.update), 0)
    for leaf in jax.tree.leaves(none.metrics):
      self.assertTrue(np.isfinite(leaf).all())
    start = training.state()
    for name in ('params', 'opt_state'):
      after, before = getattr(none.state, name), getattr(start, name)
      if name == 'params':
        after, before = after['policy'], none.before
      pairs = zip(*map(jax.tree.leaves, (after, before)), strict=True)
      for x, y in pairs:
        np.testing.assert_array_equal(x, y)

  def test_microbatches_without_a_token(self):
    # One prompt leaves three parts of four with nothing to learn from; of two
    # prompts each counts for half.
    rollout, rewards = training.rollout()

    def only(*prompts):
      kept = jnp.isin(rollout.prompt_of, jnp.array(prompts))
      task = jnp.where(kept, rewards['task'], jnp.nan)
      return self.learn({'task': task})

    one, other, both = only(5), only(20), only(5, 20)
    wanted = jax.tree.map(lambda x, y: (x + y) / 2, one.grads, other.grads)
    training.assert_close_leaves(both.grads, wanted, 1e-5)
    for leaf in jax.tree.leaves(wanted):
      self.assertGreater(np.abs(leaf).max(), 1e-4)
    self.assertEqual(int(one.state.update), 1)
