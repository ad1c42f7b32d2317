"""Presets against the numbers of the libraries that they are pinned to."""

import dataclasses
import functools
import pathlib

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np

from rljax.core import groups
from rljax.objectives import divergences, presets, surrogates
from tests import contracts
from tests.peers import golden

F32 = np.float32
_PATH = pathlib.Path(__file__).parents[1] / 'data' / 'peers_torch.npz'
_VERL_GSPO = 'verl/pg/gspo/c0/seq-mean-token-mean/adv_seq/std'


@functools.cache
def case(name):
  """Returns one case of the peers."""
  return next(c for c in _file().cases if c.id == name)


@functools.cache
def _file():
  return golden.File(_PATH)


def _wider_gspo():
  """Returns GSPO with the range of verl's case."""
  return dataclasses.replace(presets.gspo_paper(), surrogate=surrogates.clip)


def loss(preset, logp, old, adv, mask, behavior=None):
  """Returns the loss of a batch of one group."""
  factor = None
  if behavior is not None and preset.correct is not None:
    factor = preset.correct(old, behavior, mask)
  weight = preset.aggregate(mask, groups.uniform(1, len(mask)))
  objective, _ = preset.objective(logp, old, adv, mask, factor=factor)
  return -jnp.sum(objective * weight)


class PeersTest(parameterized.TestCase):
  @parameterized.parameters(
    ('verl/pg/vanilla/c0/token-mean/adv_seq/std', presets.verl_grpo),
    ('verl/pg/vanilla/c0/token-mean/adv_seq/big', presets.verl_grpo),
    ('trl/grpo/dapo/token/def/std', presets.trl_dapo),
    ('trl/grpo/dapo/token/def/toolmask', presets.trl_dapo),
    ('trl/grpo/grpo/token/def/std', presets.trl_grpo),
    ('trl/grpo/grpo/token/def/empty', presets.trl_grpo),
    (
      'trl/grpo/dr_grpo/token/def/std',
      functools.partial(presets.dr_grpo, max_tokens=32),
    ),
    (_VERL_GSPO, _wider_gspo),
  )
  def test_loss_and_gradient(self, name, make):
    found = self._loss(case(name), make(), corrected=False)
    self.assertIsNone(golden.failure(case(name), found))

  def test_trl_with_its_correction(self):
    names = [
      c.id
      for c in _file().cases
      if c.fn == 'GRPOTrainer._compute_loss'
      and c.kwargs['vllm_is'] == 'sequence_mask'
      and (c.kwargs['loss_type'], c.kwargs['beta']) == ('dapo', 0.0)
      and c.id.endswith('/std')
    ]
    self.assertNotEmpty(names)
    for name in names:
      found = self._loss(case(name), presets.trl_dapo(), corrected=True)
      wanted = case(name).outputs
      for key in ('loss', 'grad_lp'):
        np.testing.assert_allclose(found[key], wanted[key], 2e-5, 2e-6)

  @parameterized.parameters(presets.cispo_minimax, presets.cispo_scalerl)
  def test_cispo_has_trls_gradient(self, make):
    # Its value holds adv · logp in place of adv · log_ratio.
    name = 'trl/grpo/cispo/token/eh5.0/std'
    found = self._loss(case(name), make(), corrected=False)
    contracts.close(found['grad_lp'], case(name).outputs['grad_lp'])

  def _loss(self, peer, preset, corrected):
    x = {k: jnp.asarray(v) for k, v in peer.inputs.items()}
    verl = 'log_prob' in x
    names = (
      ('log_prob', 'old_log_prob', 'advantages', 'response_mask')
      if verl
      else ('lp', 'old_lp', 'adv', 'mask')
    )
    logp, old, adv, mask = (x[name] for name in names)
    if not verl:  # TRL has one advantage a row.
      adv = jnp.broadcast_to(adv[:, :1], mask.shape)
    behavior = x['rollout_lp'] if corrected else None
    fn = functools.partial(loss, preset)
    value, slope = jax.jit(jax.value_and_grad(fn))(
      logp, old, adv, mask, behavior
    )
    return {'loss': value, 'grad_lp': slope}

  def test_advantages_of_verl(self):
    peer = case('verl/adv/grpo_std1/single')
    x = peer.inputs
    ids, rows = x['index'].astype(np.int32), len(x['index'])
    found = presets.verl_grpo().credit(
      jnp.sum(jnp.asarray(x['tok_rewards']), 1),
      groups.from_ids(ids, int(ids.max()) + 1, rows),
      jnp.ones(rows, bool),
      jnp.asarray(x['mask']),
      None,
    )
    contracts.close(found, peer.outputs['advantages'] * x['mask'])

  def test_advantages_of_trl(self):
    peer = case('trl/adv/binary/group/sum_then_normalize/w1.0')
    reward = jnp.asarray(peer.outputs['rewards'][:, 0])
    for make in (presets.trl_dapo, presets.trl_grpo):
      found = make().credit(
        reward,
        groups.uniform(3, 4),
        jnp.ones(12, bool),
        jnp.ones((12, 1)),
        None,
      )
      contracts.close(found[:, 0], peer.outputs['advantages'])

  def test_openrlhf_whitens_as_reinforce_pp(self):
    # verl's variance is unbiased; without KL the two differ in that alone.
    peer = case('verl/adv/rpp_g1.0_tok/std')
    mask = jnp.asarray(peer.inputs['mask'])
    reward = jnp.sum(jnp.asarray(peer.inputs['tok_rewards']), 1)
    rows, count = len(mask), float(mask.sum())
    found = presets.openrlhf_reinforce_pp().credit(
      reward, groups.uniform(1, rows), jnp.ones(rows, bool), mask, mask * 0.0
    )
    unbiased = found * np.sqrt((count - 1) / count)
    contracts.close(unbiased, peer.outputs['advantages'] * mask, 1e-5)


GROUPS = groups.uniform(2, 2)
EVERY = jnp.ones(4, bool)
MASK = jnp.float32([[1, 1, 0], [1, 0, 0], [1, 1, 1], [1, 0, 0]])
REWARD = jnp.float32([1, 0, 3, 1])


class PartsTest(parameterized.TestCase):
  def test_kl_is_taken_from_later_rewards_too(self):
    kl = jnp.float32([[1, 3, 9], [0, 0, 0], [100, 0, 2], [-1, 0, 0]])
    found = presets.openrlhf_reinforce_pp().credit(
      REWARD, GROUPS, EVERY, MASK, kl
    )
    # Rewards to go; 100 counts as 10.
    returns = np.array([
      [0.96, 0.97, 0], [0, 0, 0], [2.88, 2.98, 2.98], [1.01, 0, 0]
    ])  # fmt: skip
    there = np.asarray(MASK) > 0
    mean, std = returns[there].mean(), returns[there].std()
    contracts.close(found, (returns - mean) / std * there, 1e-5)

  def test_scalerl_has_one_scale(self):
    found = presets.cispo_scalerl().credit(REWARD, GROUPS, EVERY, MASK, None)
    centered = np.array([0.5, -0.5, 1.0, -1.0])
    wanted = centered / centered.std(ddof=1)
    contracts.close(found, wanted[:, None] * MASK, 1e-5)
    weight = presets.cispo_scalerl().aggregate(MASK, GROUPS)
    contracts.close(weight, MASK / np.array([[6], [6], [8], [8]]))

  def test_nemos_penalty_has_the_gradient_of_k1(self):
    logp, ref = jnp.float32([[-1.0, -2.0]]), jnp.float32([[-1.5, -0.5]])

    def total(logp):
      preset, zero = presets.nemo_grpo(), jnp.zeros((1, 2))
      found, kl = preset.objective(
        logp, jax.lax.stop_gradient(logp), zero, jnp.ones((1, 2)), ref_logp=ref
      )
      return jnp.sum(found), kl

    slope, kl = jax.grad(total, has_aux=True)(logp)
    contracts.close(kl, divergences.k3(logp, ref))
    contracts.close(slope, -0.01 * (logp - ref))

  def test_dapo_clips_higher_and_punishes_length(self):
    preset, ones = presets.dapo(max_tokens=10), jnp.ones((1, 4))
    log_ratio = jnp.log(jnp.float32([[1.25, 1.3, 0.7, 0.75]]))
    adv = jnp.float32([[1, 1, -1, -1]])
    found, _ = preset.objective(log_ratio, 0.0 * ones, adv, ones)
    contracts.close(found, [[1.25, 1.28, -0.8, -0.8]])
    contracts.close(preset.shape(jnp.int32([8, 9, 10])), [0, -0.5, -1])
    self.assertFalse(preset.keep(jnp.ones(3), jnp.ones(3, bool)))

  def test_a_penalty_needs_a_reference(self):
    with self.assertRaisesRegex(ValueError, 'beta=0.04 needs ref_logp'):
      presets.grpo_paper().objective(MASK, MASK, MASK, MASK)

  def test_it_is_frozen(self):
    with self.assertRaises(dataclasses.FrozenInstanceError):
      presets.verl_grpo().beta = 1.0


if __name__ == '__main__':
  absltest.main()
