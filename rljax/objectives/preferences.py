"""Losses over preferences: pairs of responses, and single judgments.

A loss of pairs takes `(chosen, rejected)`, f32 [N] each, the scores of the
better and the worse response (`scores.score`, a log-ratio to the reference),
and returns f32 [N], one loss a pair, to be weighted and summed by the caller;
TRL takes their mean. β times a score is the implicit reward. All are finite,
with finite gradients, for any finite scores.

TRL's 15 loss types, in its order: sigmoid is `dpo`, hinge, ipo (scores
`scores.per_token`), exo_pair, nca_pair, robust, bco_pair, sppo_hard, aot,
aot_unpaired, apo_zero, apo_down, discopop, sft (`supervised.sft` of the chosen
responses), and sigmoid_norm, which is `dpo` of scores per token.
"""

import jax
import jax.numpy as jnp

from rljax.core import masked
from rljax.core.types import Array
from rljax.objectives import arguments

# exp(80) is 5.5e34, near the end of float32.
LIMIT = 80.0


def dpo(
  chosen: Array, rejected: Array, *, beta: float = 0.1, margin: float = 0.0
) -> Array:
  """Returns -log σ(β (chosen - rejected) - margin).

  Of scores per token it is TRL's sigmoid_norm; of log-probs per token, without
  a reference, SimPO (β = 2, margin 1).

  Args:
    chosen: f32 [N].
    rejected: f32 [N].
    beta: positive; strength of the tie to the reference.
    margin: by how much the rewards shall differ.

  Returns:
    f32 [N].

  Reference: Rafailov et al., "Direct Preference Optimization: Your Language
    Model is Secretly a Reward Model", 2023, arXiv:2305.18290; Meng et al.,
    "SimPO", 2024, arXiv:2405.14734.
  """
  return -jax.nn.log_sigmoid(_reward(chosen, rejected, beta) - margin)


def conservative(
  chosen: Array, rejected: Array, *, beta: float = 0.1, flipped: float
) -> Array:
  """Returns `dpo` when a share of the labels is flipped, as an expectation.

  (1 - ε) dpo(chosen, rejected) + ε dpo(rejected, chosen). It ends at a
  reward difference of log((1 - ε) / ε); `dpo` for ε = 0.

  Args:
    chosen: f32 [N].
    rejected: f32 [N].
    beta: as in `dpo`.
    flipped: ε in [0, ½).

  Returns:
    f32 [N].

  Reference: Mitchell, "A note on DPO with noisy preferences and relationship
    to IPO" (cDPO), 2023.
  """
  _check_share('flipped', flipped)
  kept = dpo(chosen, rejected, beta=beta)
  return (1.0 - flipped) * kept + flipped * dpo(rejected, chosen, beta=beta)


def robust(
  chosen: Array, rejected: Array, *, beta: float = 0.1, flipped: float
) -> Array:
  """Returns an estimate of `dpo` that flipped labels do not bias.

  ((1 - ε) dpo(chosen, rejected) - ε dpo(rejected, chosen)) / (1 - 2ε): its
  mean over labels flipped with probability ε is `dpo` of the true ones.

  Args:
    chosen: f32 [N].
    rejected: f32 [N].
    beta: as in `dpo`.
    flipped: ε in [0, ½); TRL's label_smoothing.

  Returns:
    f32 [N]; may be negative.

  Reference: Chowdhury et al., "Provably Robust DPO: Aligning Language Models
    with Noisy Feedback", 2024, arXiv:2403.00409.
  """
  _check_share('flipped', flipped)
  kept = (1.0 - flipped) * dpo(chosen, rejected, beta=beta)
  swapped = flipped * dpo(rejected, chosen, beta=beta)
  return (kept - swapped) / (1.0 - 2.0 * flipped)


def hinge(chosen: Array, rejected: Array, *, beta: float = 0.1) -> Array:
  """Returns max(0, 1 - β (chosen - rejected)) (SLiC, RSO).

  Args:
    chosen: f32 [N].
    rejected: f32 [N].
    beta: as in `dpo`; the reciprocal of the margin.

  Returns:
    f32 [N]; its gradient is 0 past the margin.

  Reference: Zhao et al., "SLiC-HF: Sequence Likelihood Calibration with Human
    Feedback", 2023, arXiv:2305.10425; Liu et al., "Statistical Rejection
    Sampling Improves Preference Optimization", 2023, arXiv:2309.06657.
  """
  return jax.nn.relu(1.0 - _reward(chosen, rejected, beta))


def ipo(chosen: Array, rejected: Array, *, beta: float = 0.1) -> Array:
  """Returns (chosen - rejected - 1 / (2β))².

  Args:
    chosen: f32 [N], scores per token: of sums the target would not grow with
      the length. TRL has it from the authors.
    rejected: f32 [N], as `chosen`.
    beta: positive; τ of the paper.

  Returns:
    f32 [N].

  Reference: Azar et al., "A General Theoretical Paradigm to Understand
    Learning from Human Preferences", 2023, arXiv:2310.12036.
  """
  return jnp.square(_reward(chosen, rejected, beta) - 0.5) / (beta * beta)


def exo(
  chosen: Array, rejected: Array, *, beta: float = 0.1, flipped: float = 1e-3
) -> Array:
  """Returns KL of the policy's preference from the label's, 1 - ε to ε.

  With q = σ(β (chosen - rejected)): q log(q / (1 - ε)) + (1 - q)
  log((1 - q) / ε). `conservative` is the KL the other way, up to a constant.

  Args:
    chosen: f32 [N].
    rejected: f32 [N].
    beta: as in `dpo`.
    flipped: ε in (0, ½); TRL's label_smoothing.

  Returns:
    f32 [N].

  Reference: Ji et al., "Towards Efficient Exact Optimization of Language Model
    Alignment" (EXO), 2024, arXiv:2402.00856.
  """
  _check_share('flipped', flipped, zero=False)
  x = _reward(chosen, rejected, beta)
  won = jax.nn.log_sigmoid(x) - jnp.log1p(jnp.float32(-flipped))
  lost = jax.nn.log_sigmoid(-x) - jnp.log(jnp.float32(flipped))
  return jax.nn.sigmoid(x) * won + jax.nn.sigmoid(-x) * lost


def nca(chosen: Array, rejected: Array, *, beta: float = 0.1) -> Array:
  """Returns -log σ(c) - ½ log σ(-c) - ½ log σ(-r), c and r β times the scores.

  Unlike `dpo` it holds the likelihood of the chosen response up.

  Args:
    chosen: f32 [N].
    rejected: f32 [N].
    beta: as in `dpo`.

  Returns:
    f32 [N].

  Reference: Chen et al., "Noise Contrastive Alignment of Language Models with
    Explicit Rewards", 2024, arXiv:2402.05369.
  """
  c, r = _rewards(chosen, rejected, beta)
  noise = jax.nn.log_sigmoid(-c) + jax.nn.log_sigmoid(-r)
  return -jax.nn.log_sigmoid(c) - 0.5 * noise


def bco(
  chosen: Array, rejected: Array, *, beta: float = 0.1, shift: float = 0.0
) -> Array:
  """Returns -log σ(c - δ) - log σ(δ - r), c and r β times the scores.

  Args:
    chosen: f32 [N].
    rejected: f32 [N].
    beta: as in `dpo`.
    shift: δ; the paper keeps a running mean of all rewards, TRL's DPO 0.

  Returns:
    f32 [N].

  Reference: Jung et al., "Binary Classifier Optimization for Large Language
    Model Alignment", 2024, arXiv:2404.04656.
  """
  c, r = _rewards(chosen, rejected, beta)
  return -jax.nn.log_sigmoid(c - shift) - jax.nn.log_sigmoid(shift - r)


def sppo(chosen: Array, rejected: Array, *, beta: float = 0.1) -> Array:
  """Returns (chosen - 1 / (2β))² + (rejected + 1 / (2β))², hard labels.

  Args:
    chosen: f32 [N].
    rejected: f32 [N].
    beta: as in `dpo`; 1 / η of the paper.

  Returns:
    f32 [N].

  Reference: Wu et al., "Self-Play Preference Optimization for Language Model
    Alignment", 2024, arXiv:2405.00675.
  """
  c, r = _rewards(chosen, rejected, beta)
  return (jnp.square(c - 0.5) + jnp.square(r + 0.5)) / (beta * beta)


def apo_zero(chosen: Array, rejected: Array, *, beta: float = 0.1) -> Array:
  """Returns 1 - σ(c) + σ(r): chosen better than what the model writes.

  Args:
    chosen: f32 [N].
    rejected: f32 [N].
    beta: as in `dpo`.

  Returns:
    f32 [N], in (0, 2).

  Reference: D'Oosterlinck et al., "Anchored Preference Optimization and
    Contrastive Revisions", 2024, arXiv:2408.06266, equation 7.
  """
  c, r = _rewards(chosen, rejected, beta)
  return jax.nn.sigmoid(-c) + jax.nn.sigmoid(r)


def apo_down(chosen: Array, rejected: Array, *, beta: float = 0.1) -> Array:
  """Returns σ(c) + 1 - σ(c - r): both worse than what the model writes.

  Args:
    chosen: f32 [N].
    rejected: f32 [N].
    beta: as in `dpo`.

  Returns:
    f32 [N], in (0, 2).

  Reference: as `apo_zero`, equation 8.
  """
  c, r = _rewards(chosen, rejected, beta)
  return jax.nn.sigmoid(c) + jax.nn.sigmoid(r - c)


def discopop(
  chosen: Array, rejected: Array, *, beta: float = 0.1, tau: float = 0.05
) -> Array:
  """Returns (1 - m) · -log σ(x) + m · exp(-x), x = β (chosen - rejected).

  m = σ(x / τ). It was found by a search and is not convex: near x = 0 it
  pushes the wrong way.

  Args:
    chosen: f32 [N].
    rejected: f32 [N].
    beta: as in `dpo`.
    tau: of the mixture, positive.

  Returns:
    f32 [N].

  Reference: Lu et al., "Discovering Preference Optimization Algorithms with
    and for Large Language Models", 2024, arXiv:2406.08414, equation 5.
  """
  arguments.positive(tau=tau)
  x = _reward(chosen, rejected, beta)
  mix = jax.nn.sigmoid(x / tau)
  power = jnp.exp(-jnp.clip(x, -LIMIT, LIMIT))
  return -jax.nn.log_sigmoid(x) * (1.0 - mix) + power * mix


def aot(
  chosen: Array,
  rejected: Array,
  mask: Array,
  *,
  beta: float = 0.1,
  flipped: float = 0.0,
) -> Array:
  """Returns `conservative` of two sets of scores, each sorted on its own.

  Optimal transport of whole distributions: the k-th best of one set meets the
  k-th best of the other. TRL's aot_unpaired passes the scores of chosen and of
  rejected responses, which need not be pairs; its aot passes, for each pair,
  log π(chosen) - log π(rejected) and the same of the reference.

  Args:
    chosen: f32 [N], the set that shall be larger.
    rejected: f32 [N], the other.
    mask: f32 [N], 0 for an absent pair.
    beta: as in `dpo`.
    flipped: as in `conservative`.

  Returns:
    f32 [N] in sorted order, 0 past the last.

  Reference: Melnyk et al., "Distributional Preference Alignment of LLMs via
    Optimal Transport", 2024, arXiv:2406.05882.
  """
  place = jnp.arange(mask.shape[0], dtype=jnp.float32)
  there = place < masked.count(mask)
  # Absent ones sort last; what stands there is replaced before it is used.
  better, worse = (
    masked.fill(jnp.sort(masked.fill(x, mask, jnp.inf)), there)
    for x in (chosen, rejected)
  )
  each = conservative(better, worse, beta=beta, flipped=flipped)
  return masked.fill(each, there)


def orpo(chosen: Array, rejected: Array) -> Array:
  """Returns -log σ of the log of the odds ratio, no reference needed.

  Added to `supervised.sft` of the chosen response, times 0.1 in the paper.

  Args:
    chosen: f32 [N], mean log-prob per token, nats, below 0.
    rejected: f32 [N], as `chosen`.

  Returns:
    f32 [N].

  Reference: Hong et al., "ORPO: Monolithic Preference Optimization without
    Reference Model", 2024, arXiv:2403.07691.
  """
  _check_pair(chosen, rejected)
  return -jax.nn.log_sigmoid(_log_odds(chosen) - _log_odds(rejected))


def kto(
  score: Array,
  good: Array,
  baseline: Array,
  *,
  beta: float = 0.1,
  good_weight: float = 1.0,
  bad_weight: float = 1.0,
) -> Array:
  """Returns a prospect-theoretic loss of responses judged one at a time.

  good_weight · (1 - σ(β (score - z))) where the response is good, bad_weight ·
  (1 - σ(β (z - score))) where it is not. With z = 0 it is TRL's
  apo_zero_unpaired.

  Args:
    score: f32 [N], log-ratio to the reference.
    good: bool or f32 [N], whether the response is desirable.
    baseline: f32 [], z, see `kto_baseline`.
    beta: as in `dpo`.
    good_weight: of desirable responses; the paper balances weight times number.
    bad_weight: of the others.

  Returns:
    f32 [N].

  Reference: Ethayarajh et al., "KTO: Model Alignment as Prospect Theoretic
    Optimization", 2024, arXiv:2402.01306.
  """
  arguments.positive(beta=beta)
  if baseline.ndim:
    raise ValueError(f'baseline{list(baseline.shape)} is one number, f32 [].')
  is_good = good.astype(bool)
  gain = beta * (score - jnp.broadcast_to(baseline, score.shape))
  loss = jax.nn.sigmoid(jnp.where(is_good, -gain, gain))
  return jnp.where(is_good, good_weight, bad_weight) * loss


def kto_baseline(score: Array, mask: Array) -> Array:
  """Returns the reference point of `kto`: max(0, mean score), no gradient.

  Args:
    score: f32 [N] of responses that answer another prompt of the batch: their
      mean estimates KL(policy ‖ reference).
    mask: f32 [N].

  Returns:
    f32 [].
  """
  mean = masked.mean(score, mask)
  return jax.lax.stop_gradient(jnp.maximum(mean, 0.0))


def _reward(chosen: Array, rejected: Array, beta: float) -> Array:
  """Returns β (chosen - rejected), f32 [N]."""
  arguments.positive(beta=beta)
  _check_pair(chosen, rejected)
  return beta * (chosen - rejected)


def _rewards(
  chosen: Array, rejected: Array, beta: float
) -> tuple[Array, Array]:
  """Returns β times either score, f32 [N] each."""
  arguments.positive(beta=beta)
  _check_pair(chosen, rejected)
  return beta * chosen, beta * rejected


def _log_odds(logp: Array) -> Array:
  """Returns log(p / (1 - p)); p above 1 - 1e-6 counts as that, f32 [N]."""
  logp = jnp.minimum(logp, -1e-6)  # at 0 the odds are infinite
  return logp - jnp.log(-jnp.expm1(logp))


def _check_pair(chosen: Array, rejected: Array) -> None:
  if chosen.shape != rejected.shape or chosen.ndim != 1:
    raise ValueError(
      f'chosen{list(chosen.shape)} and rejected{list(rejected.shape)} must both'
      ' be [N]: one score a response, sums over its tokens (scores.score).'
    )


def _check_share(name: str, value: float, zero: bool = True) -> None:
  if not (0.0 < value < 0.5 or (zero and value == 0.0)):
    raise ValueError(
      f'{name}={value} must be in {"[" if zero else "("}0, 0.5): it is the'
      ' share of labels that are wrong.'
    )
