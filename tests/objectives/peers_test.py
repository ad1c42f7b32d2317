"""The formulas of verl 0.9.1 and TRL 1.16.0, against their own numbers.

`data/peers_objectives.json` holds what the two libraries return for small
fixtures. Where rljax differs on purpose, the test says how.
"""

from collections.abc import Callable
import functools
import json
import pathlib

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np

from rljax.core import groups
from rljax.objectives import (
  advantages,
  corrections,
  credit,
  divergences,
  ratios,
  surrogates,
  weights,
)
from tests import contracts

_PATH = pathlib.Path(__file__).parents[1] / 'data' / 'peers_objectives.json'
_DATA = json.loads(_PATH.read_text('utf-8'))


def _arrays(named: dict) -> dict[str, np.ndarray]:
  out = {name: np.array(value, np.float32) for name, value in named.items()}
  if 'index' in out:
    out['index'] = out['index'].astype(np.int32)
  return out


FIXTURES = {name: _arrays(value) for name, value in _DATA['fixtures'].items()}
CASES = {name: _arrays(value) for name, value in _DATA['cases'].items()}

_trl_zscore = functools.partial(advantages.zscore, ddof=1, eps=1e-4)
ADVANTAGES = {
  'verl/adv/grpo_std1/std': advantages.grpo,
  'verl/adv/grpo_std1/equal': advantages.grpo,
  'verl/adv/grpo_std1/single': advantages.grpo,
  'verl/adv/grpo_std0/std': advantages.center,
  'verl/adv/rloo_vectorized/std': advantages.leave_one_out,
  'verl/adv/rloo_vectorized/single': advantages.leave_one_out,
  'trl/adv/binary/group/sum_then_normalize/w1.0': _trl_zscore,
  'trl/adv/float_equal/group/sum_then_normalize/w1.0': _trl_zscore,
  'trl/adv/none/group/sum_then_normalize/w1.0': _trl_zscore,
  'trl/rloo_adv/binary/norm0/beta0.0/clip0': advantages.leave_one_out,
}

# name -> (log-ratio, surrogate, aggregation, advantages, KL coefficient)
_dr_grpo = functools.partial(weights.dr_grpo, max_tokens=32)
_higher = functools.partial(surrogates.clip, high=0.28)
_token, _row = weights.token_mean, weights.sequence_mean_token_mean
POLICY = {
  'verl/pg/vanilla/c0/token-mean/adv_seq/std': (
    (ratios.token, surrogates.dual_clip, _token, 'seq', 0.0)
  ),
  'verl/pg/vanilla/c0/token-mean/adv_seq/big': (
    (ratios.token, surrogates.dual_clip, _token, 'seq', 0.0)
  ),
  'verl/pg/vanilla/higher/seq-mean-token-mean/adv_seq/std': (
    (ratios.token, _higher, _row, 'seq', 0.0)
  ),
  'verl/pg/gspo/c0/seq-mean-token-mean/adv_seq/std': (
    (ratios.sequence, surrogates.clip, _row, 'seq', 0.0)
  ),
  'trl/grpo/grpo/token/def/std': (
    (ratios.token, surrogates.clip, _row, 'row', 0.0)
  ),
  'trl/grpo/grpo/token/higher/std': (ratios.token, _higher, _row, 'row', 0.0),
  'trl/grpo/grpo/sequence/def/std': (
    (ratios.sequence, surrogates.clip, _row, 'row', 0.0)
  ),
  'trl/grpo/dapo/token/def/std': (
    (ratios.token, surrogates.clip, _token, 'row', 0.0)
  ),
  'trl/grpo/dr_grpo/token/def/std': (
    (ratios.token, surrogates.clip, _dr_grpo, 'row', 0.0)
  ),
  'trl/grpo/grpo/token/kl_nobias/std': (
    (ratios.token, surrogates.clip, _row, 'row', 0.04)
  ),
}


def _fixture(name: str) -> dict[str, np.ndarray]:
  return FIXTURES[name.split('/')[-1]]


def _adv(fixture: dict[str, np.ndarray], kind: str) -> np.ndarray:
  """Returns advantages [B, T]; TRL's are those of the first token."""
  if kind == 'seq':
    return fixture['adv_seq']
  return fixture['adv_tok'][:, :1] * np.ones_like(fixture['mask'])


def _loss(
  log_ratio: Callable, surrogate: Callable, aggregate: Callable, beta: float
) -> Callable:
  """Returns (lp, old_lp, ref_lp, mask, adv) -> loss."""

  def loss(lp, old, ref, mask, adv):
    objective = surrogate(log_ratio(lp, old, mask), adv)
    if beta:
      objective = objective - beta * divergences.k3(lp, ref)
    return -jnp.sum(objective * aggregate(mask))

  return loss


@functools.cache
def _lifted(advantage: Callable) -> Callable:
  """Returns (reward [12], ids [12]) -> advantages [12]."""

  def lifted(reward, ids):
    return groups.apply(advantage, groups.from_ids(ids, 4, 12), reward)

  return lifted


class PeersTest(parameterized.TestCase):
  @parameterized.parameters(*ADVANTAGES)
  def test_advantages(self, name):
    case, last = CASES[name], name.split('/')[-1]
    data = FIXTURES.get(last, case)
    reward = data['rewards']
    ids = data.get('index', np.repeat(np.arange(3, dtype=np.int32), 4))
    # One shape for all cases: a row with id -1 is in no group.
    pad = (0, 12 - len(ids))
    out = contracts.call(
      _lifted(ADVANTAGES[name]),
      np.pad(reward, pad),
      np.pad(ids, pad, constant_values=-1),
    )
    # verl's group of one keeps its raw reward; ours gets 0.
    alone = np.bincount(ids)[ids] == 1
    expected = np.where(alone, 0.0, case['advantages'])
    # TRL's mean of 0.3 and 0.30001 is off by rounding, 7e-5 of a deviation.
    tolerance = 1e-4 if 'float_equal' in name else 2e-6
    contracts.close(out[: len(ids)], expected, tolerance)

  def test_returns_pass_over_tool_tokens(self):
    name = 'verl/adv/rpp_g0.9_tok/toolmask'
    mask = _fixture(name)['mask']
    fn = functools.partial(credit.reward_to_go, discount=0.9)
    out = contracts.call(fn, _fixture(name)['tok_rewards'], mask)
    contracts.close(out, CASES[name]['returns'] * mask)

  def test_gae_passes_over_tool_tokens(self):
    name = 'verl/adv/gae_g0.99_l0.95_tok/toolmask'
    data, mask = _fixture(name), _fixture(name)['mask']
    fn = functools.partial(credit.gae, discount=0.99, decay=0.95)
    out = contracts.call(fn, data['tok_rewards'], data['values'], mask)
    contracts.close(out, CASES[name]['raw_advantages'] * mask, 5e-6)

  @parameterized.parameters(
    ('token-mean', weights.token_mean),
    ('seq-mean-token-sum', weights.sequence_mean_token_sum),
    ('seq-mean-token-mean', weights.sequence_mean_token_mean),
    ('seq-mean-token-sum-norm', None),
  )
  def test_aggregation_with_an_empty_row(self, mode, aggregate):
    case, data = CASES[f'verl/agg/{mode}/g0/empty'], FIXTURES['empty']
    mask = data['mask']
    # verl divides by non-empty rows times the padded length.
    size = float((mask.sum(1) > 0).sum() * mask.shape[1])
    aggregate = aggregate or functools.partial(
      weights.constant, denominator=size
    )
    weight = contracts.call(aggregate, mask)
    contracts.close(np.sum(data['adv_tok'] * weight), case['loss'])

  @parameterized.parameters('k1', 'k2', 'k3')
  def test_divergence(self, name):
    case, data = CASES[f'verl/kl/{name}/std'], FIXTURES['std']
    fn = contracts.public(divergences)[name]
    contracts.close(
      contracts.call(fn, data['lp'], data['ref_lp']), case['kl'], 1e-6
    )
    total = jax.jit(jax.grad(lambda lp, ref: jnp.sum(fn(lp, ref))))
    slope = total(data['lp'], data['ref_lp'])
    contracts.close(slope, case['grad_lp'])

  @parameterized.parameters('std', 'big')
  def test_truncated_importance(self, name):
    data = FIXTURES[name]
    log_ratio = contracts.call(
      ratios.token, data['old_lp'], data['rollout_lp'], data['mask']
    )
    out = contracts.call(corrections.truncate, log_ratio, data['mask'])
    contracts.close(out, CASES[f'verl/is/token/2.0/bn0/{name}']['weights'])

  @parameterized.parameters(*POLICY)
  def test_policy_loss(self, name):
    log_ratio, surrogate, aggregate, kind, beta = POLICY[name]
    case, data = CASES[name], _fixture(name)
    loss = jax.jit(
      jax.value_and_grad(_loss(log_ratio, surrogate, aggregate, beta))
    )
    ref = data.get('ref_lp', data['old_lp'])
    value, slope = loss(
      data['lp'], data['old_lp'], ref, data['mask'], _adv(data, kind)
    )
    loose = {'rtol': 1e-3 if name.endswith('big') else 2e-5, 'atol': 2e-6}
    np.testing.assert_allclose(value, case['loss'], **loose)
    np.testing.assert_allclose(slope, case['grad_lp'], **loose)

  @parameterized.parameters(
    ('verl/pg/gpg/c0/token-mean/adv_seq/std', surrogates.reinforce, 'seq'),
    ('trl/grpo/cispo/token/eh5.0/std', surrogates.cispo, 'row'),
  )
  def test_policy_gradient(self, name, surrogate, kind):
    # Their values hold adv * logp, ours adv * log-ratio: the gradients agree.
    data = _fixture(name)
    loss = _loss(ratios.token, surrogate, weights.token_mean, 0.0)
    slope = jax.jit(jax.grad(loss))(
      data['lp'],
      data['old_lp'],
      data['ref_lp'],
      data['mask'],
      _adv(data, kind),
    )
    contracts.close(slope, CASES[name]['grad_lp'])


if __name__ == '__main__':
  absltest.main()
