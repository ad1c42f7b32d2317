"""What is computed on the host: statistics, calibration, checks of arguments.

Each function has numbers worked by hand and arguments that it refuses.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from rljax.objectives import arguments, calibration, statistics
from tests.contracts import F32, Fn, close

NAN = np.nan


@dataclasses.dataclass(frozen=True)
class Example:
  """A call with its result, and calls that raise ValueError."""

  given: tuple[Any, ...]
  result: Any  # a number, or a tuple of them
  refused: tuple[tuple[Any, ...], ...] = ()
  settings: tuple[dict[str, Any], ...] = ({},)


_SURE = (0.9, 0.6, 0.2, 0.7)
_RIGHT = (1, 0, 0, 1)
_ABSENT = ((NAN, 0.5), (1, 0))
_UNEQUAL = ((0.5, 0.5), (1, 0, 1))
STATISTICS = {
  # 8 of 10 at 95 %: the textbook interval.
  'wilson': Example((8, 10), (0.490162, 0.943318), ((11, 10), (-1, 10))),
  'pass_at_k': Example((8, 4, 4), 0.985714, ((2, 1, 3), (4, 5, 1), (4, 2, 0))),
  'bootstrap': Example(((0.25,) * 6, 0), (0.25, 0.25), (((), 0),)),
  # Of the pairs of 1, 0, 0, 1 five hold a 1.
  'best_of_k': Example(
    (_RIGHT, _RIGHT, 2), 5 / 6, ((_RIGHT, _RIGHT, 5), (*_UNEQUAL, 1))
  ),
  # Of the pairs of a, a, b one is a, a, and two are ties.
  'maj_at_k': Example(
    (('a', 'a', 'b'), (1, 1, 0), 2), 2 / 3, ((('a',), (1,), 2),)
  ),
  'majority': Example((('b', 'a', 'a'), np.array((0.0, 1.0, 0.5))), 1.0),
  'verl_best_at_n': Example(((0.5, 0.5), 3), (0.5, 0.0)),
  'verl_maj_at_n': Example((('a', 'b'), np.array((0.5, 0.5)), 3), (0.5, 0.0)),
}
CALIBRATIONS = {
  # In four bins: 0.2 | 0.6, 0.7 | 0.9, gaps of 0.2, 0.3 and 0.1.
  'expected_error': Example(
    (_SURE, _RIGHT), 0.15, (_ABSENT, _UNEQUAL), settings=({'bins': 4},)
  ),
  # 0.01, 0.36, 0.04, 0.09
  'brier': Example((_SURE, _RIGHT), 0.125, (_ABSENT, _UNEQUAL, ((2,), (1,)))),
  'auroc': Example((_SURE, _RIGHT), 1.0, (_ABSENT, _UNEQUAL, ((2,), (0.5,)))),
}


def check_example(fn: Fn, claim: Example) -> None:
  """Checks one function of the host against its claims."""
  found = fn(*claim.given)
  assert np.isfinite(found).all()
  close(found, claim.result)
  for given in claim.refused:
    with pytest.raises(ValueError):
      fn(*map(_arrays, given))


def _arrays(x: Any) -> Any:
  return np.array(x) if isinstance(x, tuple) else x


@dataclasses.dataclass(frozen=True)
class Refusal:
  """Which numbers or shapes a check of arguments refuses."""

  taken: tuple[Any, ...]
  refused: tuple[Any, ...]
  settings: tuple[dict[str, Any], ...] = ({},)


ARGUMENTS = {
  'positive': Refusal((1e-9, 3, np.inf), (0, -1.0, NAN)),
  'nonnegative': Refusal((0, 3.0), (-1, -1e-9, NAN)),
  'shares': Refusal((0, 0.5, 1), (-0.1, 1.1, NAN)),
  'one_shape': Refusal((np.zeros(3),), (np.zeros(2), np.zeros((3, 1)))),
}


def check_refusal(fn: Fn, claim: Refusal) -> None:
  """Checks that what is wrong is named, and the rest passes."""
  same = {} if fn.func is not arguments.one_shape else {'first': np.zeros(3)}
  for value in claim.taken:
    assert fn(**same, second=value) is None
  for value in claim.refused:
    with pytest.raises(ValueError, match='second'):
      fn(**same, second=value)
  if not same:
    with pytest.raises(ValueError, match='second'):
      fn(second=np.full((), -5.0, F32))
    # A traced number passes: inside jit nothing is raised.
    assert jax.eval_shape(lambda x: fn(second=x), F32(-5.0)) is None


FAMILIES: tuple[tuple[Any, dict[str, Any], Callable[..., None]], ...] = (
  (statistics, STATISTICS, check_example),
  (calibration, CALIBRATIONS, check_example),
  (arguments, ARGUMENTS, check_refusal),
  (arguments, {'is_known': Example((F32(2.0),), True)}, check_example),
)
