"""Presets run on the real step; their parts reach the loss."""

import dataclasses
import functools
import inspect

from absl.testing import parameterized
import jax
import numpy as np
import pytest

from rljax.engine import grpo, presets, seams
from rljax.engine import step as step_lib
from rljax.objectives import presets as presets_lib
from rljax.objectives import weights
from tests import contracts
from tests.engine import small, training

PROMPTS = 8
PHASE = dataclasses.replace(small.PHASE, max_tokens=8, group_size=4)
# Of tokens, with a correction, of rows, with a divergence in the reward.
KINDS = 'verl_grpo', 'trl_dapo', 'gspo_paper', 'openrlhf_reinforce_pp'
REST = sorted(set(contracts.public(presets_lib)) - set(KINDS))


def named(name):
  """Returns a preset for the small model."""
  fn = contracts.public(presets_lib)[name]
  limited = 'max_tokens' in inspect.signature(fn).parameters
  return fn(max_tokens=PHASE.max_tokens) if limited else fn()


def step_of(method):
  return step_lib.make_step(
    method, {'policy': training.MODEL}, training.keeping(), training.judge,
    prompts=PROMPTS,
  )  # fmt: skip


def batch():
  return small.batch(PROMPTS, bad=np.eye(PROMPTS)[0])


@functools.cache
def rollout():
  """Returns rows of the common start, and their rewards."""
  step = step_of(presets.method(named('verl_grpo'), phase=PHASE))
  sampled = step.sampled(training.state(), batch())
  return sampled, training.judge(sampled)


def run(method):
  """Returns what one step makes of these rows."""
  return training.learn(step_of(method), given=rollout())


@functools.cache
def run_named(name):
  return run(presets.method(named(name), phase=PHASE))


def assert_learns(name):
  """Checks one step of a preset: finite, and not for nothing."""
  found = run_named(name)
  assert np.isfinite(found.mean('loss'))
  assert found.mean('nonfinite') == 0
  leaves = jax.tree.leaves(found.grads)
  assert all(np.isfinite(x).all() for x in leaves)
  assert found.mean('grad_norm') > 1e-4
  assert ('kl/ref' in found.metrics) == bool(named(name).beta)


class StepTest(parameterized.TestCase):
  @parameterized.parameters(*KINDS)
  def test_kinds_learn(self, name):
    assert_learns(name)

  @parameterized.parameters(*REST)
  @pytest.mark.slow
  def test_all_others_learn_too(self, name):
    assert_learns(name)

  def test_it_is_the_grpo_that_is_written_by_hand(self):
    # On-policy neither the dual clip nor the row of one tells them apart.
    preset = presets.method(presets_lib.verl_grpo(), phase=PHASE)
    by_hand = dataclasses.replace(
      preset, credit=grpo.credit(aggregate=weights.token_mean), loss=grpo.loss()
    )
    found, wanted = run_named('verl_grpo').grads, run(by_hand).grads
    training.assert_close_leaves(found, wanted, 1e-6)


class ShapeTest(parameterized.TestCase):
  def test_losses_are_of_tokens_unless_the_ratio_is_of_rows(self):
    for name in (*KINDS, *REST):
      kind = seams.RowLoss if name == 'gspo_paper' else seams.TokenLoss
      self.assertIsInstance(presets.loss(named(name)), kind)

  def test_only_who_reads_a_reference_has_a_view(self):
    reading = {
      name for name in (*KINDS, *REST) if presets.reads_reference(named(name))
    }
    wanted = {'nemo_grpo', 'openrlhf_reinforce_pp', 'grpo_paper'}
    self.assertEqual(reading, wanted)
    without = dataclasses.replace(named('grpo_paper'), beta=0.0)
    self.assertEmpty(presets.method(without).views)

  def test_equal_groups_leave_the_denominator(self):
    step = step_of(presets.method(named('dapo'), phase=PHASE))
    state, (rows, rewards) = training.state(), rollout()
    equal = np.arange(PROMPTS * 4) // 4 % 2 == 0
    rewards = {'task': np.where(equal, np.float32(0.5), rewards['task'])}
    weight = np.asarray(jax.jit(step.credit)(state, rows, rewards).weight)
    np.testing.assert_array_equal(weight[equal], 0.0)
    self.assertAlmostEqual(float(weight.sum()), 1.0, places=5)
