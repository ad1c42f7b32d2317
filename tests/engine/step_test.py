"""Tests of the step: its forms agree, and it guards what it changes."""

import dataclasses
import functools

from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.engine import grpo, optim, sampling, scoring, seams, sharding
from rljax.engine import method as method_lib
from rljax.engine import step as step_lib
from rljax.models import decoder
from rljax.objectives import divergences, surrogates
from tests.engine import small, training

# Sums in another order, relative to the norm of each leaf.
CLOSE = 1e-5


@functools.cache
def fused():
  """Returns the state after one fused step, its metrics, and a glimpse."""
  return jax.device_get(
    training.make().fused(training.state(), training.batch())
  )


def whole():
  """Returns the same step as what it learned."""
  return training.Result(policy(), *fused()[:2])


def uniforms():
  return small.uniforms(training.batch(), training.PHASE, key=3)


def policy():
  return small.params(config=small.SHALLOW)


class FormsTest(parameterized.TestCase):
  """One program, two programs, micro-batches: the same numbers."""

  def test_the_sampler_alone(self):
    _, _, glimpse = fused()
    rollout, rewards = training.rollout()
    np.testing.assert_array_equal(glimpse.response, rollout.response)
    np.testing.assert_array_equal(glimpse.length, rollout.length)
    np.testing.assert_array_equal(glimpse.reward, rewards['task'])

  def test_four_microbatches_and_a_judge_on_the_host(self):
    def judge(rollout):
      length = np.asarray(rollout.length)  # fails while tracing
      rewards = np.asarray(training.judge(rollout)['task'])
      return {'task': np.where(length > 0, rewards, np.nan)}

    step = training.make_with(judge, host_judge=True, microbatches=4)
    found = step.run(training.state(), training.batch())
    state, metrics, glimpse = jax.device_get(found)
    one = fused()
    for name in ('response', 'length', 'reward'):
      found, wanted = getattr(glimpse, name), getattr(one[2], name)
      np.testing.assert_array_equal(found, wanted)
    grads = state.opt_state.grads
    training.assert_close_leaves(grads, whole().grads, CLOSE)
    self.assertEqual(set(metrics), set(one[1]))
    for name, wanted in one[1].items():
      pairs = zip(*map(jax.tree.leaves, (metrics[name], wanted)), strict=True)
      for x, y in pairs:
        close = CLOSE if name in ('loss', 'grad_norm') else 1e-4
        np.testing.assert_allclose(x, y, rtol=close, atol=1e-5, err_msg=name)
    self.assertEqual(int(state.step), 1)
    self.assertEqual(int(state.update), 1)

  @pytest.mark.slow
  def test_two_programs(self):
    two = training.learn(training.make())
    training.assert_close_leaves(two.grads, whole().grads, CLOSE)
    self.assertEqual(set(two.metrics), set(whole().metrics))
    loss = whole().mean('loss')
    self.assertAlmostEqual(two.mean('loss'), loss, delta=CLOSE * abs(loss))

  def test_the_gradient_has_a_size(self):
    # Otherwise everything above would agree on nothing.
    for leaf in jax.tree.leaves(whole().grads):
      self.assertGreater(np.abs(leaf).max(), 1e-4)
    self.assertGreater(whole().mean('kl/ref'), 1e-3)


class MeshTest(parameterized.TestCase):
  @parameterized.parameters('data:8', 'data:4,fsdp:2', 'data:2,fsdp:2,tensor:2')
  def test_uniforms_are_bit_equal(self, mesh):
    batch = training.place(training.batch(), mesh)
    fn = functools.partial(small.uniforms, phase=training.PHASE, key=3)
    np.testing.assert_array_equal(fn(batch), uniforms())

  def test_fused_over_rows_weights_and_vocabulary(self):
    _check_fused('data:2,fsdp:2,tensor:2')


@pytest.mark.slow
class SlowMeshTest(parameterized.TestCase):
  @parameterized.parameters('data:8', 'data:4,fsdp:2')
  def test_fused(self, mesh):
    _check_fused(mesh)

  @parameterized.parameters('data:8', 'data:4,fsdp:2', 'data:2,fsdp:2,tensor:2')
  def test_two_programs(self, mesh):
    step = training.make(mesh)
    start, batch = training.state(mesh), training.batch()
    rollout = jax.device_get(step.sampled(start, training.place(batch, mesh)))
    alone = training.rollout()[0]
    small.assert_same_tokens(policy(), alone, rollout, uniforms())
    same = (rollout.response == alone.response).all(axis=1)
    np.testing.assert_allclose(rollout.logp[same], alone.logp[same], atol=1e-5)
    found = training.learn(step, mesh=mesh)
    training.assert_close_leaves(found.grads, whole().grads, CLOSE)

  def test_the_token_loop_gathers_no_weights(self):
    mesh = 'data:2,fsdp:4'
    args = training.state(mesh), training.place(training.batch(), mesh)
    program = training.make(mesh).sampled.lower(*args).compile().as_text()
    self.assertIn(' all-gather(', program)  # once, before the loop
    self.assertEmpty(training.in_loops(program, ' all-gather('))

  def test_microbatches_on_a_mesh(self):
    mesh = 'data:2,fsdp:2,tensor:2'
    found = training.learn(training.make(mesh, microbatches=4), mesh=mesh)
    training.assert_close_leaves(found.grads, whole().grads, CLOSE)


def _check_fused(mesh):
  """Compares two steps on a mesh with that of one device."""
  step = training.make(mesh)
  batch = training.place(training.batch(), mesh)
  state, metrics, glimpse = step.fused(training.state(mesh), batch)
  alone = training.rollout()[0]
  seen = dataclasses.replace(alone, response=glimpse.response)
  small.assert_same_tokens(policy(), alone, seen, uniforms())
  # One row of 512 that left its twin would move the sums by its share.
  same = np.array_equal(glimpse.response, alone.response)
  close = CLOSE if same else 0.05
  grads = jax.device_get(state.opt_state.grads)
  training.assert_close_leaves(grads, whole().grads, close)
  loss = float(metrics['loss'].total)
  np.testing.assert_allclose(loss, whole().mean('loss'), rtol=close)
  # The state is where it was planned to be, so nothing compiles again.
  wanted = step_lib.state_shardings(state, sharding.make_mesh(mesh))
  for x, place in zip(*map(jax.tree.leaves, (state, wanted)), strict=True):
    assert x.sharding.is_equivalent_to(place, x.ndim)
  with training.compilations() as found:
    state, *_ = step.fused(state, batch)
  assert not found
  assert int(state.step) == 2


class RunTest(parameterized.TestCase):
  """What holds from step to step, with the programs of above."""

  def test_one_trace_and_no_copy_of_the_state(self):
    step, state = training.make(), training.state()
    for seed in range(3):
      old, batch = state, training.batch(seed)
      with training.compilations() as compiled:
        state, metrics, _ = step.fused(state, batch)
      if seed:
        self.assertEmpty(compiled)
      for name in ('params', 'opt_state', 'frozen', 'step', 'update', 'key'):
        for leaf in jax.tree.leaves(getattr(old, name)):
          self.assertTrue(leaf.is_deleted(), name)
      # Sampler and learner stay one policy, whatever was learned.
      mismatch = metrics['mismatch/k3']
      self.assertLess(float(mismatch.total / mismatch.count), 1e-9)
      self.assertEqual(int(metrics['staleness'].value), 0)
    self.assertEqual(int(state.step), 3)
    self.assertEqual(int(state.update), 3)

  def test_the_sampler_has_the_new_weights(self):
    step, state = training.make(), training.state()
    before = jax.device_get(state.params['policy'])
    state, *_ = step.fused(state, training.batch())
    rollout = step.sampled(state, training.batch())
    np.testing.assert_array_equal(rollout.version, 1)
    read = jax.jit(functools.partial(_unit_logp, rollout=rollout))
    live = np.asarray(rollout.mask) > 0
    new = np.asarray(read(state.params['policy']))[live]
    old = np.asarray(read(before))[live]
    found = np.asarray(rollout.logp_unit)[live]
    np.testing.assert_allclose(found, new, atol=1e-5)
    self.assertGreater(np.abs(found - old).max(), 1e-2)
    # Nor does a later step repeat the numbers of an earlier one.
    first = np.asarray(training.rollout()[0].response)
    self.assertLess((np.asarray(rollout.response) == first).mean(), 0.5)

  def test_the_version_counts_updates_and_not_steps(self):
    counts = dict(step=jnp.int32(5), update=jnp.int32(8))
    state = dataclasses.replace(training.state(), **counts)
    rollout = training.make().sampled(state, training.batch())
    np.testing.assert_array_equal(rollout.version, 8)

  def test_staleness_is_the_updates_since_a_row_was_sampled(self):
    state = dataclasses.replace(training.state(), update=jnp.int32(2))
    found = training.learn(training.make(), state)
    self.assertEqual(int(found.metrics['staleness'].value), 2)

  def test_a_prefix_named_in_the_data_opens_each_response(self):
    phase = dataclasses.replace(training.PHASE, prefix='start', max_tokens=4)
    start = np.full((training.PROMPTS, 2), -1, np.int32)
    start[:, 0] = 5 + np.arange(training.PROMPTS) % 8
    step = training.make(phase=phase)
    rollout = step.sampled(training.state(), training.batch(start=start))
    first = np.repeat(start[:, 0], phase.group_size)
    np.testing.assert_array_equal(rollout.response[:, 0], first)
    np.testing.assert_array_equal(rollout.mask[:, 0], 0)
    # A row whose prefix is a stop id ends there.
    np.testing.assert_array_equal(rollout.mask[:, 1], rollout.length > 1)
    self.assertGreater(len(np.unique(rollout.response[:, 1])), 4)

  def test_kl_to_an_equal_reference_is_0_until_it_learns(self):
    step = training.make()
    ref = jax.tree.map(jnp.copy, policy())
    state, metrics, _ = step.fused(training.state(ref=ref), training.batch())
    self.assertLess(abs(float(metrics['kl/ref'].total)), 1e-8)
    _, metrics, _ = step.fused(state, training.batch())
    kl = metrics['kl/ref']
    self.assertGreater(float(kl.total / kl.count), 1e-5)

  def test_metrics_are_sums_over_counts(self):
    _, metrics, glimpse = fused()
    rollout, rewards = training.rollout()
    rows, tokens = rollout.length.size, np.asarray(rollout.mask).sum()
    wanted = {
      'length': (np.asarray(rollout.length).sum(), rows),
      'reward/task': (np.asarray(rewards['task']).sum(), rows),
      'stop/length': ((np.asarray(rollout.stop) == 0).sum(), rows),
      'reward/missing': (0, rows),
      'response/empty': (0, rows),
      'nonfinite': (0, 1),
    }
    for name, (total, count) in wanted.items():
      np.testing.assert_allclose(metrics[name].total, total, rtol=1e-5)
      self.assertEqual(metrics[name].count, count, name)
    self.assertEqual(metrics['entropy'].count, tokens)
    self.assertBetween(float(metrics['entropy'].total / tokens), 2.0, 3.5)
    grads = jax.tree.leaves(fused()[0].opt_state.grads)
    norm = np.sqrt(sum(np.sum(np.square(x)) for x in grads))
    np.testing.assert_allclose(metrics['grad_norm'].total, norm, rtol=1e-5)


def _unit_logp(params, rollout):
  """Returns log-probs [B, T] at temperature 1 of a whole reading."""
  rollout = dataclasses.replace(
    rollout, temperature=jnp.ones_like(rollout.temperature)
  )
  hidden, weight = scoring.read(training.MODEL, params, rollout)
  return scoring.scores(training.MODEL, hidden, weight, rollout, None).logp


class ProgramsTest(parameterized.TestCase):
  """The form that `run` takes."""

  def test_a_device_judge_is_fused(self):
    step = training.make()
    self.assertIs(step.run, step.fused)

  def test_trimmed_rows_keep_their_tokens(self):
    rollout, _ = training.rollout()
    short = step_lib.trim(rollout, 5)
    for name in ('response', 'mask', 'logp', 'version', 'unit'):
      np.testing.assert_array_equal(
        getattr(short, name), getattr(rollout, name)[:, :5]
      )
    for name in ('prompts', 'length', 'groups', 'data', 'temperature'):
      pairs = zip(
        *(jax.tree.leaves(getattr(x, name)) for x in (short, rollout)),
        strict=True,
      )
      for x, y in pairs:
        np.testing.assert_array_equal(x, y)


class GuardTest(parameterized.TestCase):
  """Missing rewards and non-finite losses, through the fused program."""

  def run_fused(self, **data):
    state = training.state()
    before = jax.device_get((state.params, state.opt_state))
    found = training.make().fused(state, training.batch(**data))
    state, metrics, _ = jax.device_get(found)
    after = state.params, state.opt_state
    same = [
      np.array_equal(x, y)
      for x, y in zip(*map(jax.tree.leaves, (before, after)), strict=True)
    ]
    return state, metrics, all(same)

  def test_a_reward_changes_something(self):
    self.assertFalse(self.run_fused()[2])

  def test_no_reward_anywhere(self):
    bad = np.ones(training.PROMPTS)
    state, metrics, same = self.run_fused(bad=bad)
    self.assertTrue(same)
    self.assertEqual(float(metrics['loss'].total), 0)
    self.assertEqual(float(metrics['reward/task'].count), 0)
    self.assertEqual(float(metrics['reward/missing'].total), 32 * 16)
    for x in jax.tree.leaves(metrics):
      self.assertTrue(np.isfinite(x).all())
    self.assertEqual(float(metrics['nonfinite'].total), 0)
    self.assertEqual(int(state.update), 0)
    self.assertEqual(int(state.step), 1)

  def test_a_missing_reward_leaves_the_rest_as_it_is(self):
    bad = np.arange(training.PROMPTS) == 3
    _, metrics, same = self.run_fused(bad=bad.astype(np.float32))
    self.assertFalse(same)
    self.assertEqual(float(metrics['nonfinite'].total), 0)
    self.assertEqual(float(metrics['reward/missing'].total), 16)
    self.assertEqual(float(metrics['reward/task'].count), 31 * 16)

  @parameterized.parameters(np.nan, np.inf)
  def test_a_loss_that_is_not_finite(self, value):
    poison = np.zeros(training.PROMPTS)
    poison[5] = value
    state, metrics, same = self.run_fused(poison=poison)
    self.assertTrue(same)
    self.assertEqual(float(metrics['nonfinite'].total), 1)
    self.assertEqual(int(state.update), 0)
    self.assertEqual(int(state.step), 1)


class UpdatesTest(parameterized.TestCase):
  """Epochs and minibatches."""

  def step(self):
    return training.make(epochs=2, minibatches=4)

  def test_small_steps_add_up(self):
    # In the limit of a small rate nothing moves between updates: each epoch
    # sees every prompt once, at 4 times the weight.
    rate = 1e-4
    many = training.learn(self.step(), training.state(rate=rate))
    self.assertEqual(int(many.state.update), 8)
    self.assertEqual(int(many.state.step), 1)
    moved = jax.tree.map(
      lambda new, old: (np.float64(new) - old) / rate,
      many.state.params['policy'], many.before,
    )  # fmt: skip
    wanted = jax.tree.map(lambda g: -8 * g, whole().grads)
    # Parameters near 1 hold steps of 1e-4 to two digits.
    training.assert_close_leaves(moved, wanted, 3e-2)
    self.assertEqual(many.metrics['nonfinite'].count, 8)
    self.assertEqual(many.metrics['clip/high'].total, 0)

  def test_the_ratio_is_to_the_policy_before_all_of_them(self):
    many = training.learn(self.step(), training.state(rate=3.0))
    self.assertGreater(many.mean('clip/high'), 1e-3)
    self.assertGreater(many.mean('clip/low'), 1e-3)
    once = whole()
    self.assertEqual(once.mean('clip/high'), 0)
    # How far the policy is from the one that sampled shows as well.
    self.assertGreater(many.mean('mismatch/k3'), 1e-4)


def row_grpo():
  """Returns GRPO's loss, written over rows."""

  def fn(signals, targets, ctl):
    del ctl
    logp = signals['policy'].logp
    ratio = logp - jax.lax.stop_gradient(logp)
    objective = surrogates.clip(ratio, targets.advantage)
    objective -= training.BETA * divergences.k3(logp, targets.extra['ref_logp'])
    live = targets.weight != 0
    return -jnp.sum(jnp.where(live, objective, 0.0) * targets.weight), {}

  return seams.RowLoss(fn)


ROW = row_grpo()


class LossTest(parameterized.TestCase):
  def test_over_tokens_and_over_rows(self):
    rows = training.learn(training.make(loss=ROW))
    training.assert_close_leaves(rows.grads, whole().grads, CLOSE)
    self.assertAlmostEqual(rows.mean('loss'), whole().mean('loss'), places=6)

  @pytest.mark.slow
  def test_memory_follows_the_block_not_the_batch(self):
    config = dataclasses.replace(small.SHALLOW, vocab_size=5003)
    phase = sampling.Phase(max_tokens=32, group_size=64)
    model, prompts = decoder.Model(config), 8
    step = step_lib.make_step(
      training.method(phase=phase), {'policy': model}, training.keeping(),
      training.judge, prompts=prompts,
    )  # fmt: skip
    params = model.abstract()
    state = jax.eval_shape(
      lambda p: step_lib.init_state(
        model, training.keeping(), seed=0, params=p, frozen={'ref': p}
      ),
      params,
    )
    batch = small.batch(prompts, bad=np.zeros(8), poison=np.zeros(8))
    rollout = jax.eval_shape(step.sample, state, batch)
    rewards = jax.eval_shape(step.judge, rollout)
    compiled = step.learned.lower(state, rollout, rewards).compile()
    text = compiled.as_text()
    for shape in ('512,32,5003', '16384,5003'):
      self.assertNotIn(f'f32[{shape}]', text)
    # All logits are 328 MB, a block of 512 tokens is 10 MB.
    temp = compiled.memory_analysis().temp_size_in_bytes
    self.assertLess(temp, 100e6)


class CountTest(parameterized.TestCase):
  """How often the model is read, counted in the jaxpr."""

  DEPTH = 3  # a length that no other scan has

  def count(self, microbatches=1, **changes):
    config = dataclasses.replace(small.CONFIG, layers=self.DEPTH)
    model = decoder.Model(config)
    step = step_lib.make_step(
      method_lib.Method(phase=training.PHASE, **changes), {'policy': model},
      optim.adamw(1e-3), training.judge, prompts=training.PROMPTS,
      microbatches=microbatches,
    )  # fmt: skip
    params = model.abstract()
    state = jax.eval_shape(
      lambda p: step_lib.init_state(
        model, optim.adamw(1e-3), seed=0, params=p, frozen={'ref': p}
      ),
      params,
    )
    rollout = jax.eval_shape(step.sample, state, training.batch())
    rewards = jax.eval_shape(step.judge, rollout)
    self.args = state, rollout, rewards
    self.learned = step.learned
    return training.scans(step.learned, *self.args, length=self.DEPTH)

  def test_grpo_reads_the_policy_once(self):
    self.assertEqual(self.count(), (1, 1))

  def test_a_reference_is_one_more_reading(self):
    found = self.count(
      credit=grpo.credit(ref=True), loss=grpo.loss(beta=0.1), views=training.REF
    )
    self.assertEqual(found, (2, 1))

  def test_an_unread_view_changes_nothing(self):
    self.count()
    plain = self.learned.lower(*self.args).as_text()
    self.count(views=training.REF)
    self.assertEqual(self.learned.lower(*self.args).as_text(), plain)

  def entropic(self):
    plain = grpo.credit()

    def assign(rollout, rewards, signals, ctl):
      found = plain(rollout, rewards, signals, ctl)
      entropy = signals['policy'].entropy
      return dataclasses.replace(found, advantage=found.advantage * entropy)

    return assign

  def test_credit_may_read_the_policy_for_nothing(self):
    self.assertEqual(self.count(credit=self.entropic()), (1, 1))

  def test_microbatches_read_their_part(self):
    self.assertEqual(self.count(microbatches=4), (4, 4))
    found = self.count(microbatches=4, credit=self.entropic())
    self.assertEqual(found, (5, 4))

  def test_epochs_read_the_old_policy_once(self):
    found = self.count(microbatches=2, epochs=2, minibatches=4)
    self.assertEqual(found, (1 + 16, 16))
