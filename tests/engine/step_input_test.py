"""What the step refuses, before anything compiles."""

import dataclasses

from absl.testing import parameterized
import jax
import numpy as np

from tests.engine import small, training


class SplitTest(parameterized.TestCase):
  @parameterized.parameters(
    (dict(microbatches=3), 'prompts=32.*multiple of 3'),
    (dict(microbatches=4, minibatches=16), 'multiple of 64'),
    (dict(mesh='data:8', microbatches=8), 'row shards of the mesh=8'),
  )
  def test_what_does_not_divide_is_named(self, changes, message):
    with self.assertRaisesRegex(ValueError, message):
      training.make(**changes)


class RefusedTest(parameterized.TestCase):
  """What tracing refuses."""

  def test_a_batch_of_another_size(self):
    few = small.batch(4, bad=np.zeros(4), poison=np.zeros(4))
    with self.assertRaisesRegex(ValueError, 'made for prompts=32.* has 4'):
      jax.eval_shape(training.make().sample, training.state(), few)

  def test_a_judge_without_the_reward_of_the_task(self):
    step = training.make_with(lambda rollout: {'style': rollout.temperature})
    with self.assertRaisesRegex(ValueError, "returned .'style'.*'task' must"):
      jax.eval_shape(step.fused, training.state(), training.batch())

  def test_a_prefix_longer_than_a_response(self):
    phase = dataclasses.replace(training.PHASE, prefix='start', max_tokens=1)
    start = np.full((training.PROMPTS, 2), 5, np.int32)
    step = training.make(phase=phase)
    with self.assertRaisesRegex(ValueError, '2 forced.*max_tokens=1'):
      jax.eval_shape(step.sample, training.state(), training.batch(start=start))
