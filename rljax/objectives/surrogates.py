"""Surrogate objectives of one token, to be maximized.

Each takes `(log_ratio, adv)` of equal shape, f32, where `log_ratio` is the
log-ratio of the current policy to the old one (see `ratios`), and returns
f32 of the same shape. At log-ratio 0 the gradient of each is `adv`, that of
the policy gradient. Log-ratios beyond ±`limit` are clamped inside the
exponential, so values and gradients are finite for any finite input.

The same functions make losses of rows: GSPO is `clip` of `ratios.sequence`,
and LUSPO is that with each row weighted by its length, which is
`weights.all_rows_mean_token_sum`. Factors on an objective that carry no
gradient, such as masks, are in `trust_regions`.
"""

import jax
import jax.numpy as jnp

from rljax.core.types import Array
from rljax.objectives import arguments

# exp(20) is 4.9e8: far past every clip range, and its square still fits f32.
LIMIT = 20.0


def reinforce(log_ratio: Array, adv: Array) -> Array:
  """Returns adv · log_ratio: the plain policy gradient, uncorrected (GPG).

  Given log-probs in place of log-ratios, its gradient is the same and its
  value is what verl's `gpg` and `cispo` and TRL's `cispo` and `vespo` report:
  they differ by adv · old_logp. Times `corrections.truncate` it is REINFORCE
  with importance weights.

  Args:
    log_ratio: f32 [...], nats, or the log-probs themselves.
    adv: f32 [...].

  Returns:
    f32 [...].

  Reference: Chu et al., "GPG: A Simple and Strong Reinforcement Learning
    Baseline for Model Reasoning", 2025, arXiv:2504.02546, with the advantages
    of `advantages.gpg`.
  """
  arguments.one_shape(log_ratio=log_ratio, adv=adv)
  return log_ratio * adv


def importance(
  log_ratio: Array, adv: Array, *, limit: float | Array = LIMIT
) -> Array:
  """Returns ρ · adv: the ratio is neither clipped nor stopped.

  The limit of `clip` for wide ranges; tinker's `importance_sampling` and the
  first term of KL-Cov.

  Args:
    log_ratio: f32 [...], nats; ρ is its exponential.
    adv: f32 [...].
    limit: bound on |log_ratio|, past which the gradient is 0; at most 80, or
      products overflow.

  Returns:
    f32 [...].
  """
  arguments.one_shape(log_ratio=log_ratio, adv=adv)
  return _ratio(log_ratio, limit) * adv


def clip(
  log_ratio: Array,
  adv: Array,
  *,
  low: float | Array = 0.2,
  high: float | Array = 0.2,
  limit: float | Array = LIMIT,
) -> Array:
  """Returns min(ρ · adv, clip(ρ, 1 - low, 1 + high) · adv) (PPO, GRPO).

  Args:
    log_ratio: f32 [...], nats; ρ is its exponential.
    adv: f32 [...].
    low: how far below 1 the ratio may push a bad token down.
    high: how far above 1 it may push a good one up; 0.28 in DAPO.
    limit: as in `importance`.

  Returns:
    f32 [...].

  Reference: Schulman et al., "Proximal Policy Optimization Algorithms", 2017,
    arXiv:1707.06347; with high > low, Yu et al. (DAPO), 2025, arXiv:2503.14476.
  """
  arguments.one_shape(log_ratio=log_ratio, adv=adv)
  arguments.nonnegative(low=low, high=high)
  ratio = _ratio(log_ratio, limit)
  return jnp.minimum(ratio * adv, jnp.clip(ratio, 1.0 - low, 1.0 + high) * adv)


def dual_clip(
  log_ratio: Array,
  adv: Array,
  *,
  low: float | Array = 0.2,
  high: float | Array = 0.2,
  cap: float | Array = 3.0,
  limit: float | Array = LIMIT,
) -> Array:
  """Returns the clipped objective, at least cap · adv where adv < 0.

  Bounds what a token that became far more likely can cost. On in verl's
  `vanilla`; with a large cap it is `clip`.

  Args:
    log_ratio: f32 [...], nats.
    adv: f32 [...].
    low: as in `clip`.
    high: as in `clip`.
    cap: more than 1; verl's default is 3.
    limit: as in `importance`.

  Returns:
    f32 [...].

  Reference: Ye et al., "Mastering Complex Control in MOBA Games with Deep
    Reinforcement Learning", 2020, arXiv:1912.09729.
  """
  _above_one(cap=cap)
  objective = clip(log_ratio, adv, low=low, high=high, limit=limit)
  return jnp.where(adv < 0.0, jnp.maximum(objective, cap * adv), objective)


def two_sided_clip(
  log_ratio: Array,
  adv: Array,
  *,
  low: float | Array = 0.2,
  high: float | Array = 0.2,
  delta: float | Array = 4.0,
  limit: float | Array = LIMIT,
) -> Array:
  """Returns min(min(ρ, delta) · adv, clip(ρ, 1 - low, 1 + high) · adv).

  For delta >= 1 + high it is `dual_clip` with that cap; below, good tokens are
  held at delta too. TRL's `delta`, off by default there.

  Args:
    log_ratio: f32 [...], nats.
    adv: f32 [...].
    low: as in `clip`.
    high: as in `clip`.
    delta: the largest ratio; more than 1, 4 in the paper.
    limit: as in `importance`.

  Returns:
    f32 [...].

  Reference: Prime Intellect, "INTELLECT-2: A Reasoning Model Trained Through
    Globally Decentralized Reinforcement Learning", 2025, arXiv:2505.07291.
  """
  arguments.one_shape(log_ratio=log_ratio, adv=adv)
  arguments.nonnegative(low=low, high=high)
  _above_one(delta=delta)
  ratio = _ratio(log_ratio, limit)
  clipped = jnp.clip(ratio, 1.0 - low, 1.0 + high)
  return jnp.minimum(jnp.minimum(ratio, delta) * adv, clipped * adv)


def cispo(
  log_ratio: Array,
  adv: Array,
  *,
  floor: float | Array = 0.0,
  cap: float | Array = 5.0,
) -> Array:
  """Returns sg(clip(ρ, floor, cap)) · adv · log_ratio.

  Every token keeps its gradient, weighted by the truncated ratio. The value
  differs from the paper's by terms in the old policy, which have no gradient;
  `corrections.truncate` times `reinforce` of log-probs has both.
  The published bounds are [0, 5] (ScaleRL, SkyRL, TRL's advice), [0.8, 1.2]
  (verl, NeMo-RL, slime) and [0, 1.272] (open-instruct); TRL left at its
  defaults has [0, 0.2]. With floor = cap = 1 it is `reinforce`.

  Args:
    log_ratio: f32 [...], nats.
    adv: f32 [...].
    floor: the smallest weight; the paper has none.
    cap: the largest weight.

  Returns:
    f32 [...].

  Reference: MiniMax, "MiniMax-M1: Scaling Test-Time Compute Efficiently with
    Lightning Attention", 2025, arXiv:2506.13585.
  """
  arguments.nonnegative(floor=floor)
  arguments.positive(cap=cap)
  weight = jnp.clip(_ratio(log_ratio), floor, cap)
  return jax.lax.stop_gradient(weight) * reinforce(log_ratio, adv)


def sapo(
  log_ratio: Array,
  adv: Array,
  *,
  tau_pos: float | Array = 1.0,
  tau_neg: float | Array = 1.05,
  limit: float | Array = LIMIT,
) -> Array:
  """Returns (4 / τ) · sigmoid(τ · (ρ - 1)) · adv: a soft gate, no clip.

  τ is `tau_pos` where adv > 0, else `tau_neg`. The slope in ρ is adv at ρ = 1
  and falls off smoothly on both sides, faster for larger τ; as τ goes to 0 it
  is `importance` up to a constant. verl forces the mean of row means upon it,
  TRL lets it be chosen.

  Args:
    log_ratio: f32 [...], nats.
    adv: f32 [...].
    tau_pos: for good tokens.
    tau_neg: for the others.
    limit: as in `importance`.

  Returns:
    f32 [...].

  Reference: Gao et al., "Soft Adaptive Policy Optimization", 2025,
    arXiv:2511.20347.
  """
  arguments.one_shape(log_ratio=log_ratio, adv=adv)
  arguments.positive(tau_pos=tau_pos, tau_neg=tau_neg)
  tau = jnp.where(adv > 0.0, tau_pos, tau_neg)
  ratio = _ratio(log_ratio, limit)
  return jax.nn.sigmoid(tau * (ratio - 1.0)) * (4.0 / tau) * adv


def dro(log_ratio: Array, adv: Array, *, beta: float | Array) -> Array:
  """Returns adv · log_ratio - ½ beta · log_ratio².

  Up to a constant it is -(adv - beta · log_ratio)² / (2 beta): regression of
  the log-ratio on the advantage, at rest where log_ratio = adv / beta. With
  beta = 0 it is `reinforce`. verl's value has adv · logp in the first term.

  Args:
    log_ratio: f32 [...], nats.
    adv: f32 [...].
    beta: strength of the pull to the old policy.

  Returns:
    f32 [...].

  Reference: Richemond et al., "Offline Regularized Reinforcement Learning for
    Large Language Models Alignment", 2024, arXiv:2405.19107.
  """
  arguments.nonnegative(beta=beta)
  return reinforce(log_ratio, adv) - 0.5 * beta * jnp.square(log_ratio)


def _ratio(log_ratio: Array, limit: float | Array = LIMIT) -> Array:
  """Returns exp(log_ratio) with the log-ratio clamped to ±limit."""
  arguments.positive(limit=limit)
  return jnp.exp(jnp.clip(log_ratio, -limit, limit))


def _above_one(**numbers: float | Array) -> None:
  for name, number in numbers.items():
    if arguments.is_known(number) and not number > 1:
      raise ValueError(f'{name}={number} bounds a ratio: it must exceed 1.')
