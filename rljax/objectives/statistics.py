"""Estimates and intervals for evaluation, in NumPy on the host."""

import collections
from collections.abc import Hashable, Sequence
import math
from statistics import NormalDist

import numpy as np


def wilson(
  successes: float, count: float, confidence: float = 0.95
) -> tuple[float, float]:
  """Returns the Wilson score interval of a success rate.

  For independent trials, such as one greedy answer to each problem; several
  answers to one problem are not independent, see `bootstrap`.

  Args:
    successes: how many trials succeeded.
    count: how many there were; 0 gives (0, 1).
    confidence: two-sided, in (0, 1).

  Returns:
    (low, high), within [0, 1].

  Raises:
    ValueError: unless 0 <= successes <= count.
  """
  if not 0 <= successes <= count:
    raise ValueError(f'{successes} successes of {count} trials')
  if count == 0:
    return 0.0, 1.0
  z = NormalDist().inv_cdf(0.5 + confidence / 2.0)
  rate, spread = successes / count, z * z / count
  middle = (rate + spread / 2.0) / (1.0 + spread)
  half = np.sqrt(rate * (1.0 - rate) * spread + spread * spread / 4.0)
  half = float(half) / (1.0 + spread)
  return max(middle - half, 0.0), min(middle + half, 1.0)


def pass_at_k(
  count: np.ndarray | int, correct: np.ndarray | int, k: int
) -> np.ndarray:
  """Returns the unbiased pass@k: 1 - C(n - c, k) / C(n, k).

  Args:
    count: n, answers to each problem; failed ones included, as wrong.
    correct: c, how many of them were right; broadcast against `count`.
    k: how many answers may be tried.

  Returns:
    f64, the probability for each problem; average it over problems.

  Raises:
    ValueError: unless 1 <= k <= n and 0 <= c <= n.

  Reference: Chen et al., "Evaluating Large Language Models Trained on Code",
    2021, arXiv:2107.03374.
  """
  n, c = np.broadcast_arrays(count, correct)
  if k < 1 or np.any(n < k) or np.any(c < 0) or np.any(c > n):
    raise ValueError(
      f'pass@{k} needs 1 <= k <= n and 0 <= c <= n; '
      f'got n = {count}, c = {correct}'
    )
  drawn = np.arange(k)
  wrong = np.maximum(n[..., None] - c[..., None] - drawn, 0)
  return 1.0 - np.prod(wrong / (n[..., None] - drawn), axis=-1)


def bootstrap(
  values: np.ndarray,
  seed: int,
  confidence: float = 0.95,
  samples: int = 10_000,
) -> tuple[float, float]:
  """Returns the percentile interval of a mean over prompts.

  Prompts are drawn with replacement; the answers to one prompt stay together,
  because they are not independent.

  Args:
    values: [P], one number per prompt, for example its mean over answers.
    seed: of the resampling.
    confidence: two-sided, in (0, 1).
    samples: how often prompts are drawn anew.

  Returns:
    (low, high).

  Raises:
    ValueError: if there are no prompts.
  """
  values = np.asarray(values, np.float64)
  if values.ndim != 1 or values.size == 0:
    raise ValueError(f'values must be [P] with P > 0, got {values.shape}')
  generator = np.random.default_rng(seed)
  # One sample at a time: [samples, P] of a large benchmark is gigabytes.
  means = [
    values[generator.integers(values.size, size=values.size)].mean()
    for _ in range(samples)
  ]
  tail = 100.0 * (1.0 - confidence) / 2.0
  low, high = np.percentile(means, [tail, 100.0 - tail])
  return float(low), float(high)


def best_of_k(scores: np.ndarray, values: np.ndarray, k: int) -> float:
  """Returns the expected value of the best-scored of k answers, unbiased.

  The mean over all subsets of k of the n answers. With a reward model's scores
  and true values it is best-of-k sampling; with `scores` = `values` it is
  max@k, and pass@k for values 0 and 1; negate the scores for the worst of k.

  Args:
    scores: [n], by which one of k is chosen; ties are broken at random.
    values: [n], what the chosen one is worth.
    k: in [1, n].

  Returns:
    The expectation for one problem; average it over problems.

  Raises:
    ValueError: unless scores and values are [n] and 1 <= k <= n.
  """
  scores, values = _of_answers(scores, values, k)
  n = len(scores)
  # Ranked from below, i answers lie under number i: C(i, k - 1) subsets.
  chances = [math.comb(i, k - 1) / math.comb(n, k) for i in range(n)]
  _, tie = np.unique(scores, return_inverse=True)
  size = np.bincount(tie)
  chance = np.bincount(np.sort(tie), weights=chances)
  return float(np.sum((chance / size)[tie] * values))


def maj_at_k(answers: Sequence[Hashable], values: np.ndarray, k: int) -> float:
  """Returns the expected value of the majority of k answers, unbiased.

  The exact mean over all subsets of k of the n answers (`cons@k`). Ties are
  broken at random, with equal chances. An answer None is drawn but does not
  vote, and a draw without votes is worth 0.

  Args:
    answers: [n], equal for equal answers; None where none was found.
    values: [n], 1 for right and 0 for wrong; their mean where equal answers
      differ.
    k: in [1, n].

  Returns:
    The expectation for one problem; average it over problems.

  Raises:
    ValueError: unless there are as many answers as values and 1 <= k <= n.
  """
  _, values = _of_answers(np.zeros(len(answers)), values, k)
  votes: dict[Hashable, list[float]] = {}
  for answer, value in zip(answers, values, strict=True):
    votes.setdefault(answer, []).append(float(value))
  silent = len(votes.pop(None, []))
  counts = {answer: len(v) for answer, v in votes.items()}
  total = 0.0
  for answer, group in votes.items():
    if any(group):
      others = [n for other, n in counts.items() if other != answer]
      chance = _wins(counts[answer], others, silent, k)
      total += chance * float(np.mean(group))
  return total / math.comb(len(values), k)


def majority(answers: Sequence[Hashable], values: np.ndarray) -> float:
  """Returns the value of the most frequent answer (verl's `calc_maj_val`).

  Of equally frequent answers the one that was seen first; of its values the
  first. It depends on the order; `maj_at_k` does not.

  Args:
    answers: [n], n > 0.
    values: [n].
  """
  # A Counter lists equal counts in the order in which they were first seen.
  winner, _ = collections.Counter(answers).most_common(1)[0]
  return float(values[list(answers).index(winner)])


def verl_best_at_n(
  values: np.ndarray, n: int, *, draws: int = 1000, seed: int = 42
) -> tuple[float, float]:
  """Returns mean and deviation of the best of n drawn WITH replacement.

  What verl logs as `best@n`, number for number; for comparison. It is biased:
  8 answers of which one is right have a best@8 of 0.66, though any of the 8
  is 1. See `best_of_k`. verl's `worst@n` is that of negated values, negated.

  Args:
    values: [m], of the answers to one problem.
    n: answers a draw.
    draws: how many draws.
    seed: of the draws, the same for each problem.

  Returns:
    (mean, standard deviation) over draws; average them over problems.
  """
  drawn = _verl_draws(len(values), n, draws, seed)
  best = np.asarray(values, np.float64)[drawn].max(axis=1)
  return float(best.mean()), float(best.std())


def verl_maj_at_n(
  answers: Sequence[Hashable],
  values: np.ndarray,
  n: int,
  *,
  draws: int = 1000,
  seed: int = 42,
) -> tuple[float, float]:
  """Returns mean and deviation of `majority` of n drawn WITH replacement.

  What verl logs as `maj@n`, number for number; see `maj_at_k`.

  Args:
    answers: [m], of one problem.
    values: [m].
    n: answers a draw.
    draws: how many draws.
    seed: of the draws, the same for each problem.

  Returns:
    (mean, standard deviation) over draws.
  """
  won = [
    majority([answers[i] for i in drawn], np.asarray(values)[drawn])
    for drawn in _verl_draws(len(answers), n, draws, seed)
  ]
  return float(np.mean(won)), float(np.std(won))


def _of_answers(scores, values, k: int) -> tuple[np.ndarray, np.ndarray]:
  """Returns both as f64 [n], or raises."""
  scores, values = np.asarray(scores, float), np.asarray(values, float)
  if scores.ndim != 1 or scores.shape != values.shape:
    raise ValueError(
      f'scores or answers {scores.shape} and values {values.shape} must both be'
      ' [n], those of one problem.'
    )
  if not 1 <= k <= len(values):
    raise ValueError(f'k={k} must be in [1, {len(values)}], the answers given.')
  return scores, values


def _wins(own: int, others: list[int], silent: int, k: int) -> float:
  """Returns in how many of the subsets of k an answer wins; ties are shared.

  Args:
    own: how many of the answers are this one.
    others: how often each other answer occurs.
    silent: how many do not vote.
    k: size of a subset.
  """
  total = 0.0
  for votes in range(1, min(own, k) + 1):
    # ways[drawn, tied]: of the other answers, with none above `votes`.
    ways = np.zeros((k + 1, k // votes + 1))
    ways[:, 0] = [math.comb(silent, drawn) for drawn in range(k + 1)]
    for count in others:
      ways = _with_answer(ways, count, votes)
    share = ways[k - votes] / (1.0 + np.arange(ways.shape[1]))
    total += math.comb(own, votes) * float(share.sum())
  return total


def _with_answer(ways: np.ndarray, count: int, votes: int) -> np.ndarray:
  """Returns the ways [drawn, tied] with an answer that occurs `count` times."""
  out = np.zeros_like(ways)
  for drawn in range(min(count, votes) + 1):
    moved = math.comb(count, drawn) * ways[: len(ways) - drawn]
    if drawn < votes:
      out[drawn:] += moved
    else:
      out[drawn:, 1:] += moved[:, :-1]
  return out


def _verl_draws(count: int, n: int, draws: int, seed: int) -> np.ndarray:
  """Returns the indices [draws, n] that verl draws from its global state."""
  generator = np.random.RandomState(seed)
  return generator.choice(count, size=(draws, n), replace=True)
