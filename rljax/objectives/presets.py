"""Methods as their papers or other libraries compose them, frozen.

Each function returns a `Preset`: credit, aggregation, ratio, surrogate and
penalty of one paper, or the defaults of one library at one version, down to
epsilon and denominator. Where a library leaves a number undefined (an empty
batch, a group without a reward) ours is the documented one. To change a part,
`dataclasses.replace` it: then it is no longer the preset, but still a method.

All are arrays in, arrays out; `rljax.engine.presets` makes a method of one.
"""

from collections.abc import Callable
import dataclasses

import jax
import jax.numpy as jnp

from rljax.core import groups as groups_lib
from rljax.core import masked
from rljax.core.types import Array, Groups
from rljax.objectives import (
  advantages,
  corrections,
  credit,
  divergences,
  ratios,
  selection,
  shaping,
  surrogates,
  weights,
)

# Libraries without a clamp: as far as float32 holds what follows.
_FAR = 80.0

OfRows = Callable[[Array, Groups, Array, Array, Array | None], Array]
OfGroup = Callable[[Array, Array], Array]


@dataclasses.dataclass(frozen=True)
class Preset:
  """What distinguishes one method, as functions of arrays.

  Attributes:
    credit: (reward [B], groups, valid [B], mask [B, T], kl [B, T] or None) ->
      advantage [B, T].
    aggregate: (mask [B, T] of the whole batch, groups) -> weight [B, T].
    surrogate: (log_ratio, adv) -> objective, of one shape.
    ratio: (logp, old_logp, mask) -> log_ratio, as those of `ratios`.
    rows: whether `ratio` looks at whole rows, so that its arrays are [B, T].
    beta: coefficient of `penalty` in the loss; 0 reads no reference.
    penalty: (logp, ref_logp, log_ratio) -> divergence, of one shape.
    reward_kl: whether credit takes the `divergences.k1` of the old policy from
      the reference.
    correct: (old_logp, behavior_logp, mask) -> factor [B, T] on the surrogate,
      or None.
    keep: (reward [G], valid [G]) -> bool [], which groups enter the loss and
      its denominator, or None for all.
    shape: length [B] -> what is added to the reward [B], or None.
  """

  credit: OfRows
  aggregate: Callable[[Array, Groups], Array]
  surrogate: Callable[[Array, Array], Array]
  ratio: Callable[[Array, Array, Array], Array] = ratios.token
  rows: bool = False
  beta: float = 0.0
  penalty: Callable[[Array, Array, Array], Array] | None = None
  reward_kl: bool = False
  correct: Callable[[Array, Array, Array], Array] | None = None
  keep: OfGroup | None = None
  shape: Callable[[Array], Array] | None = None

  def objective(
    self,
    logp: Array,
    old_logp: Array,
    adv: Array,
    mask: Array,
    *,
    ref_logp: Array | None = None,
    factor: Array | None = None,
  ) -> tuple[Array, Array]:
    """Returns what is maximized at each token, and the divergence in it.

    The loss is -Σ objective · weight, with a weight of `aggregate`.

    Args:
      logp: f32 [...], nats, the current policy; differentiated.
      old_logp: f32 [...], the policy at credit time.
      adv: f32 [...].
      mask: f32 [...]; [B, T] if `rows`.
      ref_logp: f32 [...], the reference; needed where beta is not 0.
      factor: f32 [...], from `correct`; None is 1.

    Returns:
      f32 [...] twice, 0 where the mask is zero; the divergence is 0 without
      a penalty.

    Raises:
      ValueError: if beta is not 0 and there is no reference.
    """
    log_ratio = self.ratio(logp, old_logp, mask)
    objective = self.surrogate(log_ratio, masked.fill(adv, mask))
    if factor is not None:
      objective *= masked.fill(factor, mask)
    kl = jnp.zeros_like(objective)
    if self.penalty is not None and self.beta:
      if ref_logp is None:
        raise ValueError(f'beta={self.beta} needs ref_logp, the reference.')
      there = masked.fill(logp, mask), masked.fill(ref_logp, mask)
      kl = self.penalty(*there, log_ratio)
    return objective - self.beta * kl, kl


def verl_grpo() -> Preset:
  """Returns verl 0.9.1 with `adv_estimator=grpo` and nothing else set.

  z-scores (ddof 1, eps 1e-6), a group of one keeps its raw reward; clip ±0.2
  with a dual clip at 3; the mean over tokens; no KL. Its recipes add
  `use_kl_loss` with 0.001 times `divergences.k3`, cap 10.
  """

  def advantage(reward, valid):
    alone = advantages.singleton(reward, valid)
    return advantages.grpo(reward, valid) + alone

  return Preset(
    credit=_of_groups(advantage),
    aggregate=_plain(weights.token_mean),
    surrogate=surrogates.dual_clip,
  )


def trl_dapo() -> Preset:
  """Returns TRL 1.16.0's defaults for GRPO: `loss_type='dapo'`, with vLLM.

  z-scores (ddof 1, eps 1e-4), clip ±0.2 (not DAPO's 0.28), the mean over the
  tokens of the whole generation batch, no KL; rows whose likelihood under the
  trainer is over 3 times that under the sampler count 0.
  """
  return Preset(
    credit=_of_groups(_trl_zscore),
    aggregate=_plain(weights.token_mean),
    surrogate=_unclamped_clip,
    ratio=_unclamped,
    correct=_masked_rows,
  )


def trl_grpo() -> Preset:
  """Returns TRL 1.16.0 with `loss_type='grpo'`: the mean over all rows.

  As `trl_dapo`, but each row's mean over its tokens counts alike, and rows
  without tokens are counted.
  """
  return dataclasses.replace(
    trl_dapo(), aggregate=_plain(weights.all_rows_mean_token_mean)
  )


def nemo_grpo() -> Preset:
  """Returns NeMo-RL's GRPO, as of 7ea279a (2026-08-22).

  Mean and standard deviation of the *other* rows (eps 1e-6), clip ±0.2, the
  mean over tokens, and 0.01 times `divergences.k3` (clamped at 20, the value at
  10) with a differentiable ratio of 1, so that its gradient is that of
  reverse_kl. Its one-pass variance is not copied.
  """

  def penalty(logp, ref_logp, log_ratio):
    del log_ratio
    own = logp - jax.lax.stop_gradient(logp)
    kl = divergences.k3(logp, ref_logp, limit=20.0, cap=10.0)
    return divergences.ratio_corrected(kl, own)

  return Preset(
    credit=_of_groups(advantages.leave_one_out_zscore),
    aggregate=_plain(weights.token_mean),
    surrogate=surrogates.clip,
    beta=0.01,
    penalty=penalty,
  )


def openrlhf_reinforce_pp() -> Preset:
  """Returns OpenRLHF's REINFORCE++, as of 3c3be62 (2026-08-13).

  0.01 times k1 (clamped at ±10) is taken from the reward of each token; the
  reward to go is whitened over the batch's tokens (ddof 0; 1e-8 is added to the
  variance, which OpenRLHF clamps there); clip ±0.2, the mean over tokens.
  """

  def assign(reward, groups, valid, mask, kl):
    del groups
    here = weights.keep_rows(mask, valid)
    nothing = jnp.zeros(mask.shape, jnp.float32)
    bounded = jnp.clip(masked.fill(kl, mask), -10.0, 10.0)
    paid = shaping.penalize_kl(nothing, bounded, here, coefficient=0.01)
    whole = credit.broadcast(masked.fill(reward, valid), here)
    returns = whole + credit.reward_to_go(paid, here)
    return masked.whiten(returns, here, ddof=0)

  return Preset(
    credit=assign,
    aggregate=_plain(weights.token_mean),
    surrogate=surrogates.clip,
    reward_kl=True,
  )


def tinker_importance() -> Preset:
  """Returns tinker-cookbook's default, as of 9dfcc3a (2026-08-19).

  Centered rewards, the ratio neither clipped nor stopped, a sum over tokens: no
  denominator, so the rate must suit the batch. The ratio there is to the
  sampler.
  """
  return Preset(
    credit=_of_groups(advantages.center),
    aggregate=_plain(weights.token_sum),
    surrogate=surrogates.importance,
  )


def grpo_paper() -> Preset:
  """Returns GRPO: z-scores, clip ±0.2, rows alike, 0.04 times k3.

  The paper does not say which standard deviation; here it is the unbiased one.

  Reference: Shao et al., "DeepSeekMath", 2024, arXiv:2402.03300.
  """
  return Preset(
    credit=_of_groups(advantages.grpo),
    aggregate=_plain(weights.sequence_mean_token_mean),
    surrogate=surrogates.clip,
    beta=0.04,
    penalty=lambda logp, ref_logp, _: divergences.k3(logp, ref_logp),
  )


def dr_grpo(*, max_tokens: int) -> Preset:
  """Returns Dr. GRPO: centered, over a constant, without KL.

  Args:
    max_tokens: the limit on a response, by which the loss is divided.

  Reference: Liu et al., "Understanding R1-Zero-Like Training: A Critical
    Perspective", 2025, arXiv:2503.20783.
  """
  return Preset(
    credit=_of_groups(advantages.center),
    aggregate=lambda mask, _: weights.dr_grpo(mask, max_tokens=max_tokens),
    surrogate=surrogates.clip,
  )


def dapo(*, max_tokens: int) -> Preset:
  """Returns DAPO: clip -0.2, +0.28, tokens alike, long responses punished.

  Groups of equal rewards leave loss and denominator, as dynamic sampling leaves
  them; they are not sampled anew. The punishment grows over the last fifth of
  the limit: 4096 of 20480 in the paper.

  Args:
    max_tokens: the limit on a response.

  Reference: Yu et al., "DAPO: An Open-Source LLM Reinforcement Learning System
    at Scale", 2025, arXiv:2503.14476.
  """
  buffer = max(max_tokens // 5, 1)
  return Preset(
    credit=_of_groups(advantages.grpo),
    aggregate=_plain(weights.token_mean),
    surrogate=lambda x, adv: surrogates.clip(x, adv, low=0.2, high=0.28),
    keep=selection.varies,
    shape=lambda n: shaping.overlong(n, limit=max_tokens, buffer=buffer),
  )


def gspo_paper() -> Preset:
  """Returns GSPO: the clipped ratio of rows, -3e-4, +4e-4, rows alike.

  Reference: Zheng et al., "Group Sequence Policy Optimization", 2025,
    arXiv:2507.18071.
  """
  return Preset(
    credit=_of_groups(advantages.grpo),
    aggregate=_plain(weights.sequence_mean_token_mean),
    surrogate=lambda x, adv: surrogates.clip(x, adv, low=3e-4, high=4e-4),
    ratio=ratios.sequence,
    rows=True,
  )


def sapo_paper() -> Preset:
  """Returns SAPO: a soft gate in place of the clip, rows alike.

  Reference: Gao et al., "Soft Adaptive Policy Optimization", 2025,
    arXiv:2511.20347.
  """
  return Preset(
    credit=_of_groups(advantages.grpo),
    aggregate=_plain(weights.sequence_mean_token_mean),
    surrogate=surrogates.sapo,
  )


def cispo_minimax() -> Preset:
  """Returns CISPO: weights are clipped, gradients are not; tokens alike.

  The weight has no lower bound. The paper tunes the upper one and does not
  state it; 5 is what ScaleRL and TRL recommend.

  Reference: MiniMax, "MiniMax-M1", 2025, arXiv:2506.13585.
  """
  return Preset(
    credit=_of_groups(advantages.grpo),
    aggregate=_plain(weights.token_mean),
    surrogate=lambda x, adv: surrogates.cispo(x, adv, cap=5.0),
  )


def cispo_scalerl() -> Preset:
  """Returns ScaleRL's loss: CISPO, prompts alike, one scale for the batch.

  Centered within the group, divided by the standard deviation over the batch;
  the mean over prompts of the mean over their tokens; groups of equal rewards
  leave the denominator. The batch's deviation is that of the centered rewards.
  Its other parts, such as the head in float32 and the choice of prompts, are no
  part of a loss.

  Reference: Khatri et al., "The Art of Scaling Reinforcement Learning Compute
    for LLMs", 2025, arXiv:2510.13786.
  """

  def assign(reward, groups, valid, mask, kl):
    del kl
    adv = groups_lib.apply(advantages.center, groups, reward, valid=valid)
    adv = advantages.scale(adv, adv, valid, ddof=1)
    return credit.broadcast(adv, mask)

  return Preset(
    credit=assign,
    aggregate=weights.group_mean_token_mean,
    surrogate=lambda x, adv: surrogates.cispo(x, adv, cap=5.0),
    keep=selection.varies,
  )


def _of_groups(advantage: OfGroup) -> OfRows:
  """Returns credit by a group advantage [G], equal along a row."""

  def assign(reward, groups, valid, mask, kl):
    del kl
    adv = groups_lib.apply(advantage, groups, reward, valid=valid)
    return credit.broadcast(adv, mask)

  return assign


def _plain(aggregate: Callable[[Array], Array]):
  """Returns an aggregation [B, T] that does not look at groups."""
  return lambda mask, groups: aggregate(mask)


def _trl_zscore(reward: Array, valid: Array) -> Array:
  return advantages.zscore(reward, valid, ddof=1, eps=1e-4)


def _unclamped(logp: Array, old_logp: Array, mask: Array) -> Array:
  return ratios.token(logp, old_logp, mask, clamp=_FAR)


def _unclamped_clip(log_ratio: Array, adv: Array) -> Array:
  return surrogates.clip(log_ratio, adv, limit=_FAR)


def _masked_rows(old_logp: Array, behavior_logp: Array, mask: Array) -> Array:
  """Returns TRL's `sequence_mask` with cap 3, f32 [B, T]."""
  behavior_logp = corrections.fill_unscored(behavior_logp, old_logp)
  whole = ratios.sequence_sum(old_logp, behavior_logp, mask, clamp=_FAR)
  return corrections.discard(whole, mask, cap=3.0)
