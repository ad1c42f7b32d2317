"""Tests of filling a batch: which groups take its places, in which order."""

import dataclasses
import functools

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np

from rljax.core import types
from rljax.engine import refill, sharding
from rljax.objectives import selection
from tests.engine import training

PROMPTS, GROUP = 8, 4
ROWS = PROMPTS * GROUP


def drawn(first: int, varied: str):
  """Returns 8 groups whose arrays say which they are, and rewards.

  Args:
    first: uid of the first prompt.
    varied: for each group, 'v' if its rewards vary, '0' or '1' if they are all
      that, '?' if they are missing but for one.
  """
  uid = first + np.arange(PROMPTS, dtype=np.int32)
  row = np.arange(ROWS, dtype=np.int32) + GROUP * first
  reward = np.zeros((PROMPTS, GROUP), np.float32)
  for group, kind in enumerate(varied):
    plain = {'v': [0, 1, 0, 1], '?': [np.nan, 1, np.nan, np.nan]}
    reward[group] = plain[kind] if kind in plain else float(kind)
  wide = np.tile(row[:, None], 3)
  real = wide.astype(np.float32)
  rollout = types.Rollout(
    prompts=types.Prompts(
      tokens=np.tile(uid[:, None], 5), length=uid + 1, uid=uid
    ),
    prompt_of=np.arange(ROWS, dtype=np.int32) // GROUP,
    response=wide, length=row, mask=np.ones_like(real),
    logp=real, logp_full=real + 0.25, logp_unit=real + 0.5,
    unit=wide, seat=row, temperature=real[:, 0],
    groups=types.Groups(
      index=np.arange(ROWS, dtype=np.int32).reshape(PROMPTS, GROUP),
      valid=np.ones((PROMPTS, GROUP), bool),
    ),
    stop=row, version=wide,
    data={'answer': np.tile(uid[:, None, None], (2, 3))},
    extra={'taps': wide[..., None] + np.zeros((3, 2), np.int32)},
  )  # fmt: skip
  rewards = {'task': reward.reshape(-1), 'parts': real}
  return jax.tree.map(jnp.asarray, (rollout, rewards))


@functools.cache
def program(mesh: str = ''):
  keep = refill.by_group()
  where = sharding.make_mesh(mesh) if mesh else None

  def fill(held, drawn, taken):
    found = refill.fill(keep, held, drawn, taken)
    return sharding.constrain_rows(found[:2], where), *found[2:]

  return jax.jit(fill)


def filled(batches, mesh=''):
  """Returns the batch made of several, and how many groups passed in each."""
  held, taken, passed = None, 0, []
  for batch in batches:
    batch = training.place(batch, mesh)
    held, found, _ = program(mesh)(held or batch, batch, np.int32(taken))
    passed.append(int(found))
    taken += passed[-1]
  return *held, passed


BATCHES = [
  drawn(100, '0v1v0001'),
  drawn(200, '00000000'),
  drawn(300, 'v?0vvvvv'),
  drawn(400, 'vvvvvvvv'),
]
TAKEN = [101, 103, 300, 303, 304, 305, 306, 307]


class FillTest(parameterized.TestCase):
  def check(self, rollout, rewards, uids):
    uids = np.array(uids)
    np.testing.assert_array_equal(rollout.prompts.uid, uids)
    np.testing.assert_array_equal(rollout.prompts.tokens[:, 2], uids)
    np.testing.assert_array_equal(rollout.prompts.length, uids + 1)
    np.testing.assert_array_equal(rollout.data['answer'][:, 1, 2], uids)
    # A row's number in all batches; a group's rows stay together, in order.
    rows = (GROUP * uids[:, None] + np.arange(GROUP)).reshape(-1)
    for name in ('length', 'seat', 'stop', 'temperature'):
      np.testing.assert_array_equal(getattr(rollout, name), rows)
    for name in ('response', 'unit', 'version', 'logp'):
      np.testing.assert_array_equal(getattr(rollout, name)[:, 2], rows)
    np.testing.assert_array_equal(rollout.extra['taps'][:, 2, 1], rows)
    np.testing.assert_array_equal(rewards['parts'][:, 1], rows)
    np.testing.assert_array_equal(rollout.uid, np.repeat(uids, GROUP))
    np.testing.assert_array_equal(
      rollout.groups.index, np.arange(ROWS).reshape(PROMPTS, GROUP)
    )

  def test_the_first_that_pass_in_the_order_they_were_drawn(self):
    rollout, rewards, passed = filled(BATCHES[:3])
    self.assertEqual(passed, [2, 0, 6])
    self.check(rollout, rewards, TAKEN)
    np.testing.assert_array_equal(rewards['task'], [0, 1, 0, 1] * PROMPTS)

  def test_what_is_over_is_dropped(self):
    rollout, rewards, passed = filled([BATCHES[0], BATCHES[3]])
    self.assertEqual(passed, [2, 8])
    self.check(rollout, rewards, [101, 103, *range(400, 406)])
    rollout, rewards, _ = filled([*BATCHES, BATCHES[3]])
    self.check(rollout, rewards, TAKEN)

  def test_a_batch_that_passes_stays_as_it_is(self):
    rollout, rewards, _ = filled([BATCHES[3]])
    found, wanted = (rollout, rewards), BATCHES[3]
    for x, y in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
      np.testing.assert_array_equal(x, y)

  @parameterized.parameters('data:8', 'data:2,fsdp:2,tensor:2')
  def test_a_mesh_takes_the_same_and_compiles_once(self, mesh):
    filled(BATCHES[:2], mesh)
    with training.compilations() as compiled:
      rollout, rewards, passed = filled(BATCHES[:3], mesh)
    self.assertEmpty(compiled)
    self.assertEqual(passed, [2, 0, 6])
    self.check(jax.device_get(rollout), jax.device_get(rewards), TAKEN)
    # What learns next finds its rows where they always are.
    wanted = training.place(BATCHES[0][0], mesh).response.sharding
    self.assertTrue(rollout.response.sharding.is_equivalent_to(wanted, 2))

  def test_rewards_of_all_rows_are_counted(self):
    batch = BATCHES[2]
    *_, reward = program()(batch, batch, np.int32(0))
    # 6 groups that vary have 2 of 4; one reward is left of four that failed.
    self.assertEqual((reward.total, reward.count), (13, 6 * 4 + 1 + 4))


class RuleTest(parameterized.TestCase):
  def test_rows_without_a_token_do_not_make_a_group_vary(self):
    rollout, rewards = BATCHES[3]
    mask = rollout.mask.at[1].set(0).at[3].set(0)
    empty = dataclasses.replace(rollout, mask=mask)
    keep = refill.by_group()(empty, {'task': rewards['task']})
    np.testing.assert_array_equal(keep, np.arange(PROMPTS) > 0)

  def test_another_rule_of_groups(self):
    rollout, rewards = BATCHES[0]
    easy = functools.partial(selection.mean_between, low=0.6, high=1.1)
    keep = refill.by_group(easy)(rollout, {'task': rewards['task']})
    np.testing.assert_array_equal(keep, [c == '1' for c in '0v1v0001'])


class StepTest(absltest.TestCase):
  def test_one_batch_that_passes_is_the_plain_step(self):
    step, batch = training.make(), training.batch()
    rollout = step.sampled(training.state(), batch, np.int32(0))
    drawn = rollout, step.judged(rollout)
    self.assertTrue(refill.by_group()(*drawn).all())
    held = step.fill(drawn, drawn, np.int32(0))
    state, metrics, glimpse = step.finish(training.state(), *held[:2])
    wanted = training.learn(step)
    np.testing.assert_array_equal(
      glimpse.response, training.rollout()[0].response
    )
    for x, y in zip(
      *map(jax.tree.leaves, (state.opt_state.grads, wanted.grads)), strict=True
    ):
      np.testing.assert_array_equal(x, y)
    self.assertEqual(set(metrics), set(wanted.metrics))
    # The same prompts get other answers in a later batch of the step.
    again = step.sampled(training.state(), batch, np.int32(1))
    self.assertLess(
      np.mean(np.asarray(again.response) == rollout.response), 0.5
    )


if __name__ == '__main__':
  absltest.main()
