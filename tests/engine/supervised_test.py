"""Tests of supervised fine-tuning on the machinery of the step."""

import dataclasses

from absl.testing import absltest
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rljax.core.types import Stop
from rljax.engine import step as step_lib
from rljax.engine import supervised
from rljax.models import decoder
from tests.engine import small, training
from tests.models import dense

PROMPTS, SIZE = 8, 5


def batch():
  r = np.random.default_rng(0)
  trace = r.integers(0, 32, (PROMPTS, SIZE), np.int32)
  length = r.integers(1, SIZE + 1, PROMPTS, np.int32)
  answer = np.arange(PROMPTS)
  return small.batch(PROMPTS, trace=trace, trace_length=length, answer=answer)


class SftTest(absltest.TestCase):
  def test_loss_is_the_mean_surprise_and_falls(self):
    params, given = small.params(config=small.SHALLOW), batch()
    states = dense.responses(
      small.SHALLOW, params, given.prompts, given.data['trace']
    )
    z = states @ np.float64(params['embed']).T
    log_p = z - np.log(np.exp(z).sum(-1, keepdims=True))
    trace = np.asarray(given.data['trace'])
    length = np.asarray(given.data['trace_length'])
    each = np.take_along_axis(log_p, trace[..., None], -1)[..., 0]
    inside = np.arange(SIZE)[None] < length[:, None]

    optimizer = optax.adam(1e-2)
    sft = supervised.make_sft(training.MODEL, optimizer, prompts=PROMPTS)
    state = step_lib.init_state(
      training.MODEL, optimizer, seed=0, params=params
    )
    old, losses = state, []
    for _ in range(30):
      state, metrics = sft(state, given)
      losses.append(float(metrics['loss'].total))
    self.assertAlmostEqual(losses[0], -each[inside].mean(), places=5)
    self.assertLess(losses[-1], 0.5 * losses[0])
    self.assertEqual(int(state.update), 30)
    for leaf in jax.tree.leaves(old.params):
      self.assertTrue(leaf.is_deleted())

  @pytest.mark.slow
  def test_small_steps_are_not_lost_in_bfloat16(self):
    config = dataclasses.replace(small.SHALLOW, dtype='bfloat16')
    model, optimizer = decoder.Model(config), optax.adam(1e-6)
    sft = supervised.make_sft(model, optimizer, prompts=PROMPTS)
    state = step_lib.init_state(model, optimizer, seed=0)
    before = [np.array(x) for x in jax.tree.leaves(state.params)]
    state, _ = sft(state, batch())
    after = [np.asarray(x) for x in jax.tree.leaves(state.params)]
    moved = [np.mean(x != y) for x, y in zip(before, after, strict=True)]
    # Of the embedding, rows whose gradient is 0 stay.
    self.assertGreater(min(moved), 0.9)
    self.assertEqual({x.dtype for x in after}, {np.dtype('float32')})

  def test_a_given_response_is_a_rollout(self):
    given = batch()
    found = supervised.given(
      given, given.data['trace'], given.data['trace_length']
    )
    length = np.asarray(given.data['trace_length'])
    inside = np.arange(SIZE)[None] < length[:, None]
    np.testing.assert_array_equal(found.mask, inside)
    np.testing.assert_array_equal(found.version, -1)
    np.testing.assert_array_equal(found.uid, given.prompts.uid)
    np.testing.assert_array_equal(found.stop, Stop.TOKEN)
    np.testing.assert_array_equal(found.groups.index[:, 0], np.arange(PROMPTS))

  def test_a_pad_that_is_the_stop_token_is_masked_by_length(self):
    # 2 ends the response and fills it up: the first one is learned.
    found = supervised.given(
      small.batch(2), jnp.array([[5, 2, 2, 2], [5, 6, 7, 2]]), jnp.array([2, 4])
    )
    np.testing.assert_array_equal(found.mask, [[1, 1, 0, 0], [1, 1, 1, 1]])
