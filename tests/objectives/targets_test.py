"""Masks, missing rewards and empty rows in the targets of a batch."""

import dataclasses
import functools

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np

from rljax.core import groups, types
from rljax.objectives import advantages, surrogates, weights
from rljax.objectives.targets import targets, usable
from tests import contracts

NAN, INF = np.nan, np.inf


def _rollout(lengths, group=2, size=4, **fields):
  """Returns a rollout of rows with these numbers of sampled tokens."""
  rows = len(lengths)
  length = jnp.asarray(lengths, jnp.int32)
  mask = jnp.arange(size)[None, :] < length[:, None]
  token = jnp.zeros((rows, size), jnp.int32)
  zero, real = jnp.zeros(rows, jnp.int32), jnp.zeros((rows, size))
  prompts = types.Prompts(
    tokens=jnp.zeros((rows // group, 3), jnp.int32),
    length=jnp.full(rows // group, 3, jnp.int32),
    uid=jnp.arange(rows // group, dtype=jnp.int32),
  )
  rollout = types.Rollout(
    prompts=prompts,
    prompt_of=jnp.arange(rows, dtype=jnp.int32) // group,
    response=token,
    length=length,
    mask=mask.astype(jnp.float32),
    logp=real,
    logp_full=real,
    logp_unit=real,
    unit=token,
    seat=zero,
    temperature=jnp.ones(rows),
    groups=groups.uniform(rows // group, group),
    stop=zero,
    version=token,
    data={},
  )
  return dataclasses.replace(rollout, **fields)


@functools.partial(jax.jit, static_argnames='aggregate')
def _grpo(rollout, rewards, aggregate=weights.token_mean, keep=None):
  adv = groups.apply(
    advantages.center,
    rollout.groups,
    rewards['task'],
    valid=usable(rollout, rewards),
  )
  return targets(rollout, rewards, adv, aggregate, keep=keep)


class TargetsTest(parameterized.TestCase):
  def test_a_plain_batch(self):
    rewards = {'task': jnp.array([1.0, 0.0, 1.0, 1.0])}
    with contracts.strict():
      out = _grpo(_rollout([1, 3, 4, 2]), rewards)
    mask = np.asarray(out.rollout.mask)
    contracts.close(out.weight, mask / 10)
    adv = np.array([[0.5], [-0.5], [0.0], [0.0]])
    contracts.close(out.advantage, adv * mask)
    self.assertIsNone(out.old_logp)
    observed = {name: x.tolist() for name, x in out.observed.items()}
    self.assertEqual(
      observed,
      {
        'reward/missing': [0.0] * 4,
        'response/empty': [0.0] * 4,
        'groups/zero_variance': [0.0, 1.0],
      },
    )

  def test_equal_rewards_stay_in_the_denominator(self):
    rewards = {'task': jnp.array([1.0, 0.0, 1.0, 1.0])}
    out = _grpo(_rollout([2, 2, 4, 4]), rewards)
    contracts.close(out.weight.sum(1), [2 / 12, 2 / 12, 4 / 12, 4 / 12])

  @parameterized.parameters(NAN, INF, -INF)
  def test_a_missing_reward_takes_its_row_out_and_is_counted(self, bad):
    rewards = {'task': jnp.array([1.0, bad, 1.0, 0.0])}
    out = _grpo(_rollout([2, 2, 3, 3]), rewards)
    contracts.close(out.weight.sum(1), [2 / 8, 0, 3 / 8, 3 / 8])
    contracts.close(out.advantage[:, 0], [0.0, 0.0, 0.5, -0.5])
    self.assertEqual(out.observed['reward/missing'].tolist(), [0, 1, 0, 0])

  def test_any_column_or_unit_may_be_missing(self):
    units = jnp.array([[0.0, 1.0], [NAN, 1.0], [0.0, 0.0], [1.0, 1.0]])
    rewards = {'task': jnp.array([1.0, 0.0, NAN, 0.0]), 'step': units}
    kept = usable(_rollout([2, 2, 3, 3]), rewards)
    self.assertEqual(kept.tolist(), [True, False, False, True])

  def test_an_empty_response_does_not_reach_its_peer(self):
    out = _grpo(_rollout([0, 3]), {'task': jnp.array([10.0, 0.0])})
    self.assertFalse(np.any(out.advantage))
    contracts.close(out.weight.sum(1), [0.0, 1.0])
    self.assertEqual(out.observed['response/empty'].tolist(), [1.0, 0.0])

  @parameterized.parameters(
    (weights.token_mean, [0, 3 / 8, 0, 5 / 8]),
    (weights.sequence_mean_token_mean, [0, 0.5, 0, 0.5]),
    (functools.partial(weights.dr_grpo, max_tokens=5), [0, 0.15, 0, 0.25]),
  )
  def test_rows_that_are_not_kept_leave_the_denominator(self, mode, expected):
    stop = jnp.array([types.Stop.LENGTH, types.Stop.TOKEN] * 2)
    rollout = _rollout([5, 3, 5, 5], size=5, stop=stop)
    rewards = {'task': jnp.array([1.0, 0.0, 0.0, 1.0])}
    out = _grpo(rollout, rewards, mode, rollout.stop != types.Stop.LENGTH)
    contracts.close(out.weight.sum(1), expected)
    # The statistics still hold them.
    contracts.close(out.advantage[1, 0], -0.5)

  def test_nothing_usable_gives_loss_and_gradient_exactly_zero(self):
    rewards = {'task': jnp.full(4, NAN)}
    out = _grpo(_rollout([0, 3, 4, 1]), rewards)

    def loss(logp):
      return -jnp.sum(surrogates.clip(logp, out.advantage) * out.weight)

    value, slope = jax.jit(jax.value_and_grad(loss))(
      np.full((4, 4), 3, np.float32)
    )
    self.assertEqual(value, 0.0)
    self.assertFalse(np.any(slope))
    self.assertTrue(np.isfinite(out.advantage).all())

  def test_token_advantages_are_masked(self):
    rollout = _rollout([2, 3])
    adv = jnp.where(rollout.mask > 0, 2.0, NAN)
    out = targets(rollout, {'task': jnp.ones(2)}, adv)
    np.testing.assert_array_equal(out.advantage, 2.0 * rollout.mask)


if __name__ == '__main__':
  absltest.main()
