"""Tests of how parts of a batch are chosen and added up."""

import dataclasses

from absl.testing import absltest
import jax
import jax.numpy as jnp
import numpy as np

from rljax.core import types
from rljax.engine import grpo, learning, seams
from tests.engine import training


def targets() -> types.Targets:
  """Returns targets whose arrays say which row and prompt they are of."""
  rollout, rewards = training.rollout()
  ctl = seams.Ctl(jnp.int32(0), jnp.int32(0), jnp.float32(0))
  found = grpo.credit()(rollout, rewards, {}, ctl)
  rows = jnp.arange(rollout.length.size, dtype=jnp.float32)
  return dataclasses.replace(
    found, extra={'row': rows}, old_logp=found.rollout.logp
  )


class SelectTest(absltest.TestCase):
  def test_prompts_come_with_all_of_their_rows(self):
    whole, order = targets(), np.array([5, 0, 31])
    part = learning.select(whole, jnp.asarray(order))
    rows = (order[:, None] * 16 + np.arange(16)[None]).reshape(-1)
    np.testing.assert_array_equal(part.extra['row'], rows)
    for name in ('advantage', 'weight', 'old_logp'):
      np.testing.assert_array_equal(
        getattr(part, name), getattr(whole, name)[rows]
      )
    np.testing.assert_array_equal(
      part.rewards['task'], whole.rewards['task'][rows]
    )
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
    np.testing.assert_array_equal(found.data['bad'], rollout.data['bad'][order])


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
    orders = []

    def note(part):
      orders.append(part)

    found = targets()
    chosen = learning.select

    def spy(whole, order):
      jax.debug.callback(note, order)
      return chosen(whole, order)

    learning.select = spy
    try:
      learning.accumulate(
        training.MODEL, grpo.loss(), training.state().params['policy'], found,
        seams.Ctl(jnp.int32(0), jnp.int32(0), jnp.float32(0)), None, 4,
      )  # fmt: skip
      jax.effects_barrier()
    finally:
      learning.select = chosen
    self.assertLen(orders, 4)
    np.testing.assert_array_equal(np.sort(np.ravel(orders)), np.arange(32))
    for part in orders:
      np.testing.assert_array_equal(np.bincount(part // 8), [2, 2, 2, 2])
