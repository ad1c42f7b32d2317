"""What every loss of given responses, preferences and a teacher satisfies.

The tables and checks of `contracts` for what needs no sampled group.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

import numpy as np
import pytest

from rljax.objectives import (
  distillation,
  preferences,
  reward_models,
  scores,
  supervised,
)
from tests.contracts import (
  F32,
  Fn,
  call,
  close,
  gradient,
  ragged_mask,
  slope,
)

# Pairs: (chosen [N], rejected [N]) -> [N].


@dataclasses.dataclass(frozen=True)
class Pair:
  """A loss of pairs, with numbers worked by hand for beta = 0.1."""

  value: float  # where both scores are `at`
  slopes: tuple[float, float]  # in the chosen and in the rejected one, there
  at: float = 0.0
  difference: bool = False  # whether only chosen - rejected matters
  settings: tuple[dict[str, Any], ...] = ({},)


_LOG2 = float(np.log(2.0))
PAIRS = {
  'dpo': Pair(_LOG2, (-0.05, 0.05), difference=True),
  'conservative': Pair(
    _LOG2, (-0.04, 0.04), difference=True, settings=({'flipped': 0.1},)
  ),
  'robust': Pair(
    _LOG2, (-0.0625, 0.0625), difference=True, settings=({'flipped': 0.1},)
  ),
  'hinge': Pair(1.0, (-0.1, 0.1), difference=True),
  'ipo': Pair(25.0, (-10.0, 10.0), difference=True),
  'exo': Pair(
    0.510826,  # -log 2 - ½ log 0.09
    (-0.0549306, 0.0549306),  # ¼ log(0.1 / 0.9)
    difference=True,
    settings=({'flipped': 0.1},),
  ),
  'nca': Pair(2 * _LOG2, (-0.025, 0.025)),
  'bco': Pair(2 * _LOG2, (-0.05, 0.05)),
  'sppo': Pair(50.0, (-10.0, 10.0)),
  'apo_zero': Pair(1.0, (-0.025, 0.025)),
  'apo_down': Pair(1.0, (0.0, 0.025)),
  # The wrong way: -¾ + (1 - log 2) / (4 · 0.05), times beta.
  'discopop': Pair(0.5 * _LOG2 + 0.5, (0.0784264, -0.0784264), difference=True),
  # The log-odds rise by 1 / (1 - e⁻¹) for each nat of log-prob.
  'orpo': Pair(_LOG2, (-0.7909883, 0.7909883), at=-1.0),
}
REWARDS = {
  'bradley_terry': Pair(_LOG2, (-0.5, 0.5), difference=True),
  'centering': Pair(0.0, (0.0, 0.0)),
}


def check_pair(fn: Fn, claim: Pair) -> None:
  """Checks one loss of pairs against its claims."""

  def swapped(rejected, chosen):
    return fn(chosen, rejected)

  same = np.full(1, claim.at, F32)
  close(call(fn, same, same), [claim.value])
  close(gradient(fn, same, same), claim.slopes[:1])
  close(gradient(swapped, same, same), claim.slopes[1:])
  rng = np.random.default_rng(11)
  chosen, rejected = -np.abs(rng.normal(size=(2, 5))).astype(F32)
  base = call(fn, chosen, rejected)
  order = rng.permutation(5)
  close(call(fn, chosen[order], rejected[order]), base[order])
  if claim.difference:
    moved = call(fn, chosen + F32(2.0), rejected + F32(2.0))
    close(moved, base, 1e-5)
  # A central difference of 2⁻⁷ of losses up to 60, in float32.
  near = gradient(fn, chosen, rejected)
  np.testing.assert_allclose(near, slope(fn, chosen, rejected), 1e-2, 5e-3)
  near = gradient(swapped, rejected, chosen)
  np.testing.assert_allclose(near, slope(swapped, rejected, chosen), 1e-2, 5e-3)
  check_extremes(fn, swapped)
  with pytest.raises(ValueError, match=r'chosen\[2\] and rejected\[3\]'):
    fn(np.zeros(2, F32), np.zeros(3, F32))


def check_extremes(fn: Fn, swapped: Fn) -> None:
  """Values and gradients stay finite for any scores."""
  far = np.array([0, 1e-9, 30, 100, -100, 1e4, -1e4], F32)
  one, other = (x.ravel() for x in np.meshgrid(far, far))
  assert np.isfinite(call(fn, one, other)).all()
  assert np.isfinite(gradient(fn, one, other)).all()
  assert np.isfinite(gradient(swapped, other, one)).all()


# Generators: score [N] -> [N].


@dataclasses.dataclass(frozen=True)
class Generator:
  """The derivative of an f-divergence at π / π_ref, of the log-ratio."""

  value: float  # at log 2, by hand
  slope: float  # at 0
  settings: tuple[dict[str, Any], ...] = ({},)


GENERATORS = {
  'forward_kl': Generator(0.5, 1.0),
  'js': Generator(np.log(4.0 / 3.0), 0.5),
  'alpha': Generator(0.5857864, 1.0, ({'order': 0.5},)),  # 2 - √2
}


def check_generator(fn: Fn, claim: Generator) -> None:
  """Checks one generator against its claims."""
  zero = np.zeros(1, F32)
  close(call(fn, zero), [0.0])
  close(call(fn, np.log(np.full(1, 2.0, F32))), [claim.value])
  close(gradient(fn, zero), [claim.slope])
  line = np.linspace(-8, 8, 30).astype(F32)
  assert (np.diff(call(fn, line)) > 0).all()
  far = np.array([100, -100, 1e4, -1e4], F32)
  assert np.isfinite(call(fn, far)).all()
  assert np.isfinite(gradient(fn, far)).all()


# Token losses: (logp [B, T], mask) -> [B, T].


@dataclasses.dataclass(frozen=True)
class TokenLoss:
  """A loss of given tokens."""

  slope: Callable[[np.ndarray], np.ndarray]  # of the log-prob
  settings: tuple[dict[str, Any], ...] = ({},)


TOKEN_LOSSES = {
  'sft': TokenLoss(lambda logp: -np.ones_like(logp)),
  'dft': TokenLoss(lambda logp: -np.exp(logp)),
}


def check_token_loss(fn: Fn, claim: TokenLoss) -> None:
  """Checks one loss of given tokens against its claims."""
  rng, mask = np.random.default_rng(12), ragged_mask()
  logp = -np.abs(rng.normal(size=mask.shape)).astype(F32)
  base, unit = call(fn, logp, mask), gradient(fn, np.zeros_like(logp), mask)
  assert (base[mask > 0] > 0).all() and not base[mask == 0].any()
  for absent in (np.nan, np.inf, -np.inf):
    bad = np.where(mask > 0, logp, F32(absent))
    np.testing.assert_array_equal(call(fn, bad, mask), base)
    # `gradient` weighs positions; at log-prob 0 both slopes are -1.
    close(gradient(fn, bad, mask), -unit * claim.slope(logp) * mask)


# Divergences over the vocabulary: (logits [N, V], teacher, mask [N]) -> [N].


@dataclasses.dataclass(frozen=True)
class OverVocabulary:
  """A divergence of a student from a teacher."""

  exact: Callable[[np.ndarray, np.ndarray], np.ndarray]  # of probabilities
  settings: tuple[dict[str, Any], ...] = ({},)


def _kl(p: np.ndarray, q: np.ndarray) -> np.ndarray:
  return np.sum(p * np.log(p / q), axis=-1)


def _jsd(p: np.ndarray, q: np.ndarray) -> np.ndarray:
  middle = 0.7 * p + 0.3 * q
  return 0.7 * _kl(p, middle) + 0.3 * _kl(q, middle)


OVER_VOCABULARY = {
  'forward_kl': OverVocabulary(lambda p, q: _kl(q, p)),
  'reverse_kl': OverVocabulary(_kl),
  'jsd': OverVocabulary(_jsd, ({'beta': 0.3},)),
}


def check_over_vocabulary(fn: Fn, claim: OverVocabulary) -> None:
  """Checks one divergence over the vocabulary against its claims."""
  rng = np.random.default_rng(13)
  logits, teacher = rng.normal(size=(2, 3, 4)).astype(F32)
  every, mask = np.ones(3, F32), np.array([1, 0, 1], F32)
  p, q = (np.exp(np.float64(x)) for x in (logits, teacher))
  p, q = p / p.sum(-1, keepdims=True), q / q.sum(-1, keepdims=True)
  base = call(fn, logits, teacher, every)
  close(base, claim.exact(p, q))
  close(call(fn, logits, logits, every), np.zeros(3))
  close(call(fn, logits + F32(50.0), teacher, every), base, 1e-5)
  near = gradient(fn, logits, teacher, every)
  close(near, slope(fn, logits, teacher, every), 1e-3)
  for absent in (np.nan, np.inf):
    bad = [x.copy() for x in (logits, teacher)]
    bad[0][1], bad[1][1] = absent, absent
    np.testing.assert_array_equal(call(fn, *bad, mask), base * mask)
    np.testing.assert_array_equal(
      gradient(fn, *bad, mask), near * mask[:, None]
    )
  check_banned(fn, logits, teacher)
  with pytest.raises(ValueError, match=r'teacher\[3, 5\] must have the shape'):
    fn(logits, np.zeros((3, 5), F32), every)
  with pytest.raises(ValueError, match='temperature=0.0 must be positive'):
    fn(logits, teacher, every, temperature=0.0)


def check_banned(fn: Fn, logits: np.ndarray, teacher: np.ndarray) -> None:
  """Ids that both ban do not exist; a ban of one alone stays finite."""
  every, ban = np.ones(3, F32), np.full((3, 1), -np.inf, F32)
  wide = [np.concatenate([x, ban], axis=1) for x in (logits, teacher)]
  close(call(fn, *wide, every), call(fn, logits, teacher, every))
  flat = np.zeros_like(wide[0])
  for one in ([wide[0], flat], [flat, wide[1]]):
    assert np.isfinite(call(fn, *one, every)).all()
    assert np.isfinite(gradient(fn, *one, every)).all()


FAMILIES: tuple[tuple[Any, dict[str, Any], Callable[..., None]], ...] = (
  (preferences, PAIRS, check_pair),
  (reward_models, REWARDS, check_pair),
  (scores, GENERATORS, check_generator),
  (supervised, TOKEN_LOSSES, check_token_loss),
  (distillation, OVER_VOCABULARY, check_over_vocabulary),
)
