"""What every correction, meter of mismatch and rule of selection satisfies.

The tables and checks of `contracts` for what stands between the sampler and the
loss.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

import numpy as np

from rljax.objectives import corrections, mismatch, selection
from tests.contracts import (
  F32,
  Fn,
  call,
  close,
  gradient,
  ragged_mask,
)

# Corrections: (log_ratio or statistic or weight, mask) -> [B, T], data.


@dataclasses.dataclass(frozen=True)
class Correction:
  """A weight, a smaller mask or a statistic of rows: no gradient."""

  on_policy: float | None = None  # at log-ratio 0, where there is a token
  within: tuple[float, float] = (0.0, np.inf)
  binary: bool = False
  settings: tuple[dict[str, Any], ...] = ({},)


CORRECTIONS = {
  'truncate': Correction(1.0, (0.0, 2.0)),
  'discard': Correction(1.0, (0.0, 3.0)),
  'icepop': Correction(1.0, (0.0, 5.0)),
  'normalize_tokens': Correction(),
  'normalize_rows': Correction(),
  'keep_ratio': Correction(1.0, binary=True),
  'keep_below': Correction(1.0, binary=True, settings=({'limit': 0.5},)),
  'drop_outlier_rows': Correction(1.0, binary=True),
  'sequence_sum': Correction(0.0, (-np.inf, np.inf)),
  'sequence_mean': Correction(0.0, (-np.inf, np.inf)),
  'sequence_max': Correction(0.0, (-np.inf, np.inf)),
}


def check_correction(fn: Fn, claim: Correction) -> None:
  """Checks one correction against its claims."""
  rng, mask = np.random.default_rng(7), ragged_mask()
  x = rng.normal(size=mask.shape).astype(F32)
  x = np.abs(x) if claim.on_policy is None else x
  base = call(fn, x, mask)
  low, high = claim.within
  assert (base >= low).all() and (base <= high).all()
  assert not base[mask == 0].any()
  assert not claim.binary or np.isin(base, (0.0, 1.0)).all()
  if claim.on_policy is not None:
    expected = claim.on_policy * mask
    np.testing.assert_array_equal(call(fn, x * 0, mask), expected)
  for absent in (np.nan, np.inf, -np.inf, 0.0):
    bad = np.where(mask > 0, x, F32(absent))
    np.testing.assert_array_equal(call(fn, bad, mask), base)
    np.testing.assert_array_equal(gradient(fn, bad, mask), 0.0)
  wide = [np.pad(a, ((0, 0), (0, 3))) for a in (x, mask)]
  close(call(fn, *wide), np.pad(base, ((0, 0), (0, 3))))
  np.testing.assert_array_equal(call(fn, x, mask * 0), 0.0)
  order = rng.permutation(len(mask))
  close(call(fn, x[order], mask[order]), base[order])
  for far in (100.0, -100.0):
    size = np.abs(far) if claim.on_policy is None else far
    assert np.isfinite(call(fn, x * 0 + F32(size), mask)).all()


# Meters: (tokens [B, T] ..., mask [B, T]) -> a number, or one per row.


@dataclasses.dataclass(frozen=True)
class Meter:
  """What a meter claims."""

  equal: float  # for inputs that are all 1: equal policies, equal weights
  inputs: int = 1  # how many [B, T] it reads before the mask
  share: bool = True  # whether it lies in [0, 1]
  rows: bool = False  # whether it returns one number per row
  settings: tuple[dict[str, Any], ...] = ({},)


METERS = {
  'kl': Meter(0.0, inputs=2, share=False),
  'k3': Meter(np.e - 2.0, share=False),
  'chi_square': Meter(np.e**2 - 1.0, share=False),
  'log_perplexity': Meter(-1.0, share=False, rows=True),
  'largest': Meter(1.0, share=False),
  'effective_share': Meter(1.0),
  'masked_share': Meter(0.0),
  'touched_share': Meter(0.0),
  'outside_share': Meter(1.0),
  'kept_mass': Meter(1.0, inputs=2),
}


def check_meter(fn: Fn, claim: Meter) -> None:
  """Checks one meter against its claims."""
  rng, mask = np.random.default_rng(8), ragged_mask()
  data = np.abs(rng.normal(size=(claim.inputs, *mask.shape))).astype(F32)
  base = call(fn, *data, mask)
  assert base.shape == (mask.shape[:1] if claim.rows else ())
  assert not claim.share or 0.0 <= base <= 1.0
  equal = call(fn, *np.ones_like(data), mask)
  close(equal, claim.equal * (mask.any(1) if claim.rows else 1.0))
  for absent in (np.nan, np.inf, -np.inf, 0.0):
    bad = [np.where(mask > 0, x, F32(absent)) for x in data]
    np.testing.assert_array_equal(call(fn, *bad, mask), base)
    np.testing.assert_array_equal(gradient(fn, *bad, mask), 0.0)
  np.testing.assert_array_equal(call(fn, *data, mask * 0), 0.0 * base)
  wide = [np.pad(a, ((0, 0), (0, 3))) for a in (*data, mask)]
  close(call(fn, *wide), base)
  order = rng.permutation(len(mask))
  moved = call(fn, *(a[order] for a in (*data, mask)))
  close(moved, base[order] if claim.rows else base)


# Selections: rules of groups, (reward [G], valid [G]) -> bool [].


@dataclasses.dataclass(frozen=True)
class Rule:
  """What a keep rule of a group claims."""

  kept: tuple[tuple[float, ...], ...]
  dropped: tuple[tuple[float, ...], ...]
  settings: tuple[dict[str, Any], ...] = ({},)


_EQUAL = tuple((value,) * 8 for value in (0.0, 1.0, 0.1, 0.7))
RULES = {
  'varies': Rule(((0, 1), (1, 0, 0, 0), (0.3, 0.30001)), _EQUAL),
  'mean_between': Rule(((0, 1), (1, 0, 0, 0), (0.1,) * 8), _EQUAL[:2]),
}


def check_rule(fn: Fn, claim: Rule) -> None:
  """Checks one keep rule of groups against its claims."""
  as_number = _numeric(fn)
  for rewards, expected in ((claim.kept, 1.0), (claim.dropped, 0.0)):
    for reward in rewards:
      row = np.array(reward, F32)
      every = np.ones(len(row), bool)
      assert call(as_number, row, every) == expected, reward
      assert call(as_number, row[::-1], every) == expected, reward
      for absent in (np.nan, np.inf, -7.0):
        padded = np.insert(row, 1, F32(absent))
        valid = np.insert(every, 1, False)
        assert call(as_number, padded, valid) == expected, reward
        if not np.isfinite(absent):
          everyone = np.ones(len(padded), bool)
          assert call(as_number, padded, everyone) == expected, reward
  assert not call(as_number, np.full(3, np.nan, F32), np.ones(3, bool))


def _numeric(fn: Fn) -> Fn:
  return lambda *arrays: fn(*arrays).astype(F32)


FAMILIES: tuple[tuple[Any, dict[str, Any], Callable[..., None]], ...] = (
  (corrections, CORRECTIONS, check_correction),
  (mismatch, METERS, check_meter),
  (selection, RULES, check_rule),
)
