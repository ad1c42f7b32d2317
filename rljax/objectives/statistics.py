"""Estimates and intervals for evaluation, in NumPy on the host."""

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
