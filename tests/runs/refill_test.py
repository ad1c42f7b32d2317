"""Tests of steps that draw several batches, with a sampler that pretends."""

import functools
import types

import jax.numpy as jnp
import numpy as np
import pytest

from rljax.core import types as core
from rljax.engine import refill as engine_refill
from rljax.runs import metrics, refill

P, G = 4, 2


class Stub:
  """A step whose rewards are said by the uid of the prompt.

  A uid that 3 divides has an answer that is right and one that is wrong; one
  above 1000 has lost all rewards; others have two that are wrong.
  """

  def __init__(self):
    self.numbers, self.finished = [], []
    keep = engine_refill.by_group()
    self.fill = functools.partial(engine_refill.fill, keep)

  def sampled(self, state, batch, number):
    assert state == 'before'
    self.numbers.append(int(number))
    token = jnp.repeat(batch.prompts.uid, G)[:, None] * jnp.ones((1, 3), int)
    row, real = jnp.zeros(P * G, int), jnp.ones((P * G, 3))
    return core.Rollout(
      prompts=batch.prompts, prompt_of=jnp.arange(P * G) // G, response=token,
      length=row + 3, mask=real, logp=real, logp_full=real, logp_unit=real,
      unit=token, seat=row, temperature=real[:, 0],
      groups=core.Groups(
        index=jnp.arange(P * G).reshape(P, G), valid=jnp.ones((P, G), bool)
      ),
      stop=row, version=token, data=batch.data,
    )  # fmt: skip

  def judged(self, rollout):
    right = (rollout.uid % 3 == 0) & (jnp.arange(P * G) % G == 0)
    reward = jnp.where(rollout.uid > 1000, jnp.nan, right.astype(jnp.float32))
    return {'task': reward}

  def finish(self, state, rollout, rewards):
    self.finished.append(rollout.prompts.uid.tolist())
    glimpse = types.SimpleNamespace(reward=rewards['task'])
    count = core.Mean(total=rewards['task'].sum(), count=jnp.float32(P * G))
    return 'after', {'reward/task': count}, glimpse


def draw(*batches):
  """Returns what gives batches of these uids, and counts them."""
  given = iter(batches)
  drawn = []

  def next_one():
    uids = np.array(next(given), np.int32)
    drawn.append(uids)
    tokens = np.stack([uids, uids], axis=1)
    prompts = core.Prompts(tokens=tokens, length=uids * 0 + 2, uid=uids)
    batch = core.Batch(prompts=prompts, data={'answer': uids})
    return batch, [f'example {uid}' for uid in uids]

  return next_one, drawn


def test_batches_are_drawn_until_all_places_are_taken():
  step = Stub()
  source, drawn = draw([1, 3, 2, 4], [5, 7, 8, 10], [6, 9, 11, 12], [15] * 4)
  found = refill.run(step, 'before', source, most=9)
  assert found.state == 'after'
  assert step.finished == [[3, 6, 9, 12]]
  assert step.numbers == [0, 1, 2] and len(drawn) == 3
  np.testing.assert_array_equal(found.batch.prompts.uid, [3, 6, 9, 12])
  np.testing.assert_array_equal(found.batch.prompts.tokens[:, 1], [3, 6, 9, 12])
  assert found.examples == [f'example {uid}' for uid in (3, 6, 9, 12)]
  np.testing.assert_array_equal(found.glimpse.reward, [1, 0] * P)
  assert metrics.finalize(found.metrics) == {
    'reward/task': 0.5,
    'refill/batches': 3.0,
    'refill/kept': pytest.approx(4 / 12),
    'refill/reward': pytest.approx(4 / 24),
  }


def test_one_batch_may_be_enough():
  step = Stub()
  source, drawn = draw([3, 6, 9, 12])
  found = refill.run(step, 'before', source, most=2)
  assert step.finished == [[3, 6, 9, 12]] and len(drawn) == 1
  assert metrics.finalize(found.metrics)['refill/batches'] == 1.0


@pytest.mark.parametrize('most', [1, 3])
def test_no_group_that_varies_ends_with_the_rewards(most):
  step = Stub()
  source, drawn = draw(*[[1, 2, 4, 5]] * 9)
  words = (
    f'only 0 of {4 * most} groups in {most} batches .* for 4 places; '
    f'rewards of all responses: 0: {8 * most}.* --max_gen_batches'
  )
  with pytest.raises(ValueError, match=words):
    refill.run(step, 'before', source, most=most)
  assert len(drawn) == most and not step.finished


def test_a_group_that_never_completes_does_not_hold_up_the_others():
  step = Stub()
  source, drawn = draw([3, 1003, 6, 9], [1003, 12, 15, 18])
  refill.run(step, 'before', source, most=4)
  assert step.finished == [[3, 6, 9, 12]] and len(drawn) == 2
  source, drawn = draw(*[[1003, 1, 2, 1006]] * 9)
  words = 'only 0 of 8 groups .* 0: 8, missing: 8'
  with pytest.raises(ValueError, match=words):
    refill.run(step, 'before', source, most=2)
  assert len(drawn) == 2


def test_too_few_groups_are_no_smaller_batch():
  step = Stub()
  source, _ = draw([3, 6, 9, 1], [2, 4, 5, 7])
  words = 'only 3 of 8 groups in 2 batches .* 0: 13, 1: 3'
  with pytest.raises(ValueError, match=words):
    refill.run(step, 'before', source, most=2)
  assert not step.finished


def test_a_sampler_that_dies_ends_the_step():
  class Dying(Stub):
    def sampled(self, state, batch, number):
      if number == 1:
        raise RuntimeError('no device')
      return super().sampled(state, batch, number)

  source, drawn = draw(*[[1, 2, 4, 5]] * 9)
  with pytest.raises(RuntimeError, match='no device'):
    refill.run(Dying(), 'before', source, most=9)
  assert len(drawn) == 2


def test_many_values_are_binned():
  nan = [np.nan, np.inf]
  values = np.array([0.25, 1.0, 0.25, *nan], np.float32)
  assert refill.histogram(values) == '0.25: 2, 1: 1, missing: 2'
  line = refill.histogram(np.linspace(0, 8, 81, dtype=np.float32))
  assert line.startswith('0 to 1: 10, 1 to 2: 10, ')
  assert line.endswith(', 7 to 8: 11')
  assert refill.histogram(np.array(nan)) == 'missing: 2'
