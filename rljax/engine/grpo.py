"""GRPO's credit and loss, with the parts that its relatives exchange.

Shao et al., "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in
Open Language Models", 2024, arXiv:2402.03300.
"""

from collections.abc import Callable

import jax.numpy as jnp

from rljax.core import groups
from rljax.core.types import Array, Stop
from rljax.engine import seams
from rljax.objectives import advantages, divergences, surrogates, weights
from rljax.objectives import targets as targets_lib


def credit(
  advantage: Callable = advantages.grpo,
  aggregate: Callable[[Array], Array] = weights.sequence_mean_token_mean,
  *,
  ref: bool = False,
  mask_truncated: bool = False,
) -> seams.CreditFn:
  """Returns credit by a group advantage, equal at all tokens of a row.

  Args:
    advantage: (reward [G], valid [G]) -> [G].
    aggregate: mask [B, T] -> weight [B, T], of the whole batch.
    ref: also read the reference's log-probs, for a KL penalty.
    mask_truncated: leave rows that hit the length limit out of the loss.
  """

  def assign(rollout, rewards, signals, ctl):
    del ctl
    adv = groups.apply(
      advantage,
      rollout.groups,
      rewards['task'],
      valid=targets_lib.usable(rollout, rewards),
    )
    return targets_lib.targets(
      rollout,
      rewards,
      adv,
      aggregate,
      keep=rollout.stop == Stop.TOKEN if mask_truncated else None,
      extra={'ref_logp': signals['ref'].logp} if ref else {},
    )

  return assign


def loss(
  *,
  low: float = 0.2,
  high: float = 0.2,
  beta: seams.Coefficient = 0.0,
  divergence: Callable[[Array, Array], Array] = divergences.k3,
) -> seams.TokenLoss:
  """Returns the clipped surrogate minus beta times a sampled divergence.

  Args:
    low: how far below 1 the ratio may go.
    high: how far above 1.
    beta: coefficient of the divergence from 'ref'; 0 reads no reference.
    divergence: (logp [N], ref_logp [N]) -> [N].
  """

  def fn(stats, data, ctl):
    log_ratio = stats['logp'] - data['old_logp']
    adv = data['advantage']
    objective = surrogates.clip(log_ratio, adv, low=low, high=high)
    seen = {
      'clip/high': (log_ratio > jnp.log1p(high)) & (adv > 0),
      'clip/low': (log_ratio < jnp.log1p(-low)) & (adv < 0),
    }
    seen = {k: v.astype(jnp.float32) for k, v in seen.items()}
    if 'ref_logp' in data:
      kl = divergence(stats['logp'], data['ref_logp'])
      objective -= seams.value_of(beta, ctl) * kl
      seen['kl/ref'] = kl
    elif callable(beta) or beta:
      raise ValueError(
        f'beta={beta} needs a reference: credit(ref=True), and views={{"ref":'
        ' View("ref")}}.'
      )
    return objective, seen

  return seams.TokenLoss(fn)
