"""How well confidences fit outcomes, in NumPy on the host.

Each takes `(confidence, correct)`, [n] each, over the answers of a benchmark.
"""

import numpy as np


def expected_error(
  confidence: np.ndarray, correct: np.ndarray, *, bins: int = 10
) -> float:
  """Returns the expected calibration error (ECE), in [0, 1].

  Σ over bins of equal width: share of answers · abs(mean confidence - share
  correct). It depends on the bins, and one that is always 0.5 on a fair coin
  has none: look at `brier` and `auroc` too.

  Args:
    confidence: [n], probabilities.
    correct: [n], 0 or 1.
    bins: how many; a confidence of 1 falls into the last.

  Raises:
    ValueError: for shapes or values that do not fit.

  Reference: Naeini et al., "Obtaining Well Calibrated Probabilities Using
    Bayesian Binning", 2015; Guo et al., 2017, arXiv:1706.04599.
  """
  p, y = _probabilities(confidence, correct)
  if bins < 1:
    raise ValueError(f'bins={bins} must be at least 1.')
  place = np.minimum((p * bins).astype(int), bins - 1)
  gap = np.bincount(place, weights=p - y, minlength=bins)
  return float(np.abs(gap).sum() / len(p))


def brier(confidence: np.ndarray, correct: np.ndarray) -> float:
  """Returns the mean of (confidence - correct)², in [0, 1].

  A proper score: its expectation is least for the true probability.

  Args:
    confidence: [n], probabilities.
    correct: [n], 0 or 1.

  Raises:
    ValueError: for shapes or values that do not fit.

  Reference: Brier, "Verification of Forecasts Expressed in Terms of
    Probability", 1950.
  """
  p, y = _probabilities(confidence, correct)
  return float(np.mean(np.square(p - y)))


def auroc(score: np.ndarray, correct: np.ndarray) -> float:
  """Returns how often a right answer has a higher score than a wrong one.

  The area under the ROC curve; ties count half. Only the order matters.

  Args:
    score: [n], any finite numbers.
    correct: [n], 0 or 1.

  Returns:
    In [0, 1]; 0.5 if all answers are right or all are wrong, when there is
    nothing to tell apart.

  Raises:
    ValueError: for shapes or values that do not fit.
  """
  x, y = _pairs(score, correct)
  right = int(y.sum())
  wrong = len(y) - right
  if not right or not wrong:
    return 0.5
  _, tie = np.unique(x, return_inverse=True)
  size = np.bincount(tie)
  rank = np.cumsum(size) - (size - 1) / 2.0  # from 1, the mean of a tie
  return float((rank[tie][y == 1].sum() / right - (right + 1) / 2.0) / wrong)


def _pairs(x: np.ndarray, correct: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Returns both as f64 [n], or raises."""
  x, y = np.asarray(x, np.float64), np.asarray(correct, np.float64)
  if x.ndim != 1 or x.shape != y.shape or not len(x):
    raise ValueError(
      f'confidence {x.shape} and correct {y.shape} must both be [n], n > 0.'
    )
  if not np.isin(y, (0.0, 1.0)).all() or not np.isfinite(x).all():
    raise ValueError(
      'correct must be 0 or 1 and confidence finite: leave out'
      ' the answers that have none.'
    )
  return x, y


def _probabilities(
  confidence: np.ndarray, correct: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  p, y = _pairs(confidence, correct)
  if p.min() < 0.0 or p.max() > 1.0:
    raise ValueError(
      f'confidence must be in [0, 1], got [{p.min():g}, {p.max():g}].'
    )
  return p, y
