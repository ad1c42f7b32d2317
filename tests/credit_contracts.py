"""What every advantage, credit, critic loss and change of a reward satisfies.

The tables and checks of `contracts` for what happens before the loss, and the
critic's.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

import numpy as np
import pytest

from rljax.objectives import (
  advantages,
  attempts,
  credit,
  shaping,
  spans,
  token_baselines,
  values,
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

# Advantages: (reward [G], data [G] ..., valid [G]) -> [G].


@dataclasses.dataclass(frozen=True)
class Advantage:
  """What a group advantage claims."""

  golden: tuple[float, ...]  # for rewards 1, 0, 0, 1, worked by hand
  data: tuple[tuple[float, ...], ...] = ()  # what else the golden values read
  baseline: bool = True  # shifts of the reward do not matter
  zero: bool = True  # whether equal rewards give exactly 0
  scaled: bool = False  # its scale does not matter, up to eps
  positive: bool = False  # whether rewards must not be negative
  columns: bool = False  # whether it takes rewards [G, R]
  settings: tuple[dict[str, Any], ...] = ({},)


_ZSCORE = 0.5 / np.sqrt(1.0 / 3.0)
# The others of a success are 1, 0, 0: their mean is 1/3, their variance 1/3.
_OTHERS = (2 / 3) / np.sqrt(1 / 3)
ADVANTAGES = {
  'reinforce': Advantage((1, 0, 0, 1), baseline=False, zero=False),
  'center': Advantage((0.5, -0.5, -0.5, 0.5)),
  'leave_one_out': Advantage((2 / 3, -2 / 3, -2 / 3, 2 / 3)),
  'leave_one_out_zscore': Advantage(
    (_OTHERS, -_OTHERS, -_OTHERS, _OTHERS), scaled=True
  ),
  'zscore': Advantage(
    (1, -1, -1, 1), scaled=True, settings=({'ddof': 0}, {'ddof': 0, 'eps': 0})
  ),
  'grpo': Advantage((_ZSCORE, -_ZSCORE, -_ZSCORE, _ZSCORE), scaled=True),
  'opo': Advantage((1 / 3, -2 / 3, -2 / 3, 1 / 3), data=((1, 1, 1, 3),)),
  'gdpo': Advantage(
    (2, -2, -2, 2),
    scaled=True,
    columns=True,
    settings=({'weights': (2.0,), 'ddof': 0},),
  ),
  'singleton': Advantage((0, 0, 0, 0), baseline=False, zero=False),
  'scale': Advantage(
    (2, 0, 0, 2),
    data=((1, 0, 0, 1),),
    baseline=False,
    zero=False,
    settings=({'ddof': 0},),
  ),
  'gpg': Advantage(
    (4 / 3, 0, 0, 4 / 3), data=((1, 0, 5, 1),), baseline=False, zero=False
  ),
}
# With k = 2, five of six pairs hold a success: E[M] is 5/6, and 2/3 with a
# failure in the pair. Two successes tie for the best.
_PAIR = np.sqrt(5 / 36)
ATTEMPTS = {
  'best_margin': Advantage((0, 0, 0, 0)),
  'best_margin_zscore': Advantage((0, 0, 0, 0), scaled=True),
  'best_of_k': Advantage(
    (1 / 6 / _PAIR, -1 / 6 / _PAIR, -1 / 6 / _PAIR, 1 / 6 / _PAIR),
    scaled=True,
    settings=({'k': 2},),
  ),
  'maxrl': Advantage(
    (1, -1, -1, 1), baseline=False, scaled=True, positive=True
  ),
  'maxrl_every_group': Advantage(
    (1, -1, -1, 1), baseline=False, scaled=True, positive=True
  ),
}


def check_advantage(fn: Fn, claim: Advantage) -> None:
  """Checks one group advantage against its claims."""
  fn = _one_column(fn) if claim.columns else fn
  rng = np.random.default_rng(1)
  reward = rng.normal(size=6).astype(F32)
  reward = np.abs(reward) if claim.positive else reward
  data = [rng.uniform(1, 5, size=6).astype(F32) for _ in claim.data]
  every = np.ones(6, bool)
  base = call(fn, reward, *data, every)
  order = rng.permutation(6)
  moved = call(fn, reward[order], *(x[order] for x in data), every)
  close(moved, base[order])
  binary = [np.array(x, F32) for x in ((1, 0, 0, 1), *claim.data)]
  close(call(fn, *binary, np.ones(4, bool)), claim.golden, 5e-6)
  if claim.baseline:
    close(call(fn, reward + F32(4.0), *data, every), base, 1e-5)
  if claim.scaled:
    close(call(fn, reward * F32(8.0), *data, every), base, 1e-5)
  if claim.zero:
    check_equal_rewards(fn, claim)
  check_absent_members(fn, reward, data, base)


def check_equal_rewards(fn: Fn, claim: Advantage) -> None:
  """Groups of equal rewards get exactly 0, of whatever size and reward."""
  sizes = (2, 3, 8) if _needs_two(fn) else (1, 3, 8)
  for equal in (0.1, 0.35, 0.7, 1e4, 3.0 if claim.positive else -3.0):
    for size in sizes:
      row = np.full(size, equal, F32)
      data = [np.arange(1, size + 1).astype(F32) for _ in claim.data]
      assert not call(fn, row, *data, np.ones(size, bool)).any(), (equal, size)


def _needs_two(fn: Fn) -> bool:
  """Whether a group [1] is refused, as for two attempts."""
  return getattr(fn, 'keywords', {}).get('k', 1) > 1


def check_absent_members(
  fn: Fn, reward: np.ndarray, data: list[np.ndarray], base: np.ndarray
) -> None:
  """Padding and missing rewards get 0 and leave the others as they are."""
  for absent in (0.0, 1e6, np.nan, np.inf):
    padded = [np.insert(x, [2, 6], absent).astype(F32) for x in (reward, *data)]
    valid = np.insert(np.ones(6, bool), [2, 6], False)
    out = call(fn, *padded, valid)
    close(out[valid], base)
    assert not out[~valid].any()
    if not np.isfinite(absent):
      np.testing.assert_array_equal(call(fn, *padded, np.ones(8, bool)), out)
  missing = [np.full(3, np.nan, F32) for _ in (reward, *data)]
  nothing = call(fn, *missing, np.zeros(3, bool))
  np.testing.assert_array_equal(nothing, np.zeros(3))
  alone = [np.array([0.7, np.nan], F32) for _ in (reward, *data)]
  assert np.isfinite(call(fn, *alone, np.array([True, False]))).all()
  with pytest.raises(ValueError, match='is not one group'):
    two = [np.zeros((2, 3), F32) for _ in (reward, *data)]
    fn(*two, np.ones((2, 3), bool))


def _one_column(fn: Fn) -> Fn:
  """Returns a function of rewards [G, R] as one of rewards [G]."""
  return lambda reward, *rest: fn(reward[:, None], *rest)


# Credit: (rows [B] or tokens [B, T] ..., mask [B, T]) -> [B, T].


@dataclasses.dataclass(frozen=True)
class Credit:
  """What a credit function claims."""

  inputs: tuple[str, ...]  # 'rows' or 'tokens', before the mask
  keeps_sign: bool = False  # of its first input, at every sampled token
  settings: tuple[dict[str, Any], ...] = ({},)


_STEPS = ({'discount': 0.9, 'decay': 0.8},)
CREDITS = {
  'broadcast': Credit(('rows',), keeps_sign=True),
  'reward_to_go': Credit(('tokens',), settings=({}, {'discount': 0.9})),
  'gae': Credit(('tokens', 'tokens'), settings=_STEPS),
  'lambda_return': Credit(('tokens', 'tokens'), settings=_STEPS),
  'remax': Credit(('tokens', 'rows')),
  'whiten': Credit(('tokens',)),
  'reinforce_plus_plus': Credit(('tokens',), settings=({'discount': 0.9},)),
  'reinforce_plus_plus_baseline': Credit(('rows',)),
}


def check_credit(fn: Fn, claim: Credit) -> None:
  """Checks one credit function against its claims."""
  rng, mask = np.random.default_rng(2), ragged_mask()
  shapes = {'rows': mask.shape[:1], 'tokens': mask.shape}
  data = [rng.normal(size=shapes[kind]).astype(F32) for kind in claim.inputs]
  # Off the mask a critic may say anything; rewards there are data.
  data = [x * mask if x.ndim == 2 else x for x in data]
  base = call(fn, *data, mask)
  assert not base[mask == 0].any()
  order = rng.permutation(len(mask))
  close(call(fn, *(x[order] for x in data), mask[order]), base[order])
  for absent in (0.0, np.nan, np.inf):
    wide = [np.pad(x, ((0, 0), (0, 3))) if x.ndim == 2 else x for x in data]
    wide_mask = np.pad(mask, ((0, 0), (0, 3)))
    poison = [
      np.where(wide_mask > 0, x, F32(absent)) if x.ndim == 2 else x
      for x in wide
    ]
    close(call(fn, *poison, wide_mask), np.pad(base, ((0, 0), (0, 3))))
    assert np.isfinite(gradient(fn, poison[0], *poison[1:], wide_mask)).all()
  if claim.keeps_sign:
    sign = np.sign(data[0])[:, None] * np.ones(mask.shape)
    np.testing.assert_array_equal(np.sign(base)[mask > 0], sign[mask > 0])


# Spans: (x [B, T], mask [B, T]) -> [B, T], only moved.


@dataclasses.dataclass(frozen=True)
class Span:
  """What a move of tokens claims."""

  golden: tuple[float, ...]  # of 1, 2, 3, 4 under the mask 0, 1, 0, 1
  settings: tuple[dict[str, Any], ...] = ({},)


SPANS = {
  'pack': Span((2, 4, 0, 0)),
  'unpack': Span((0, 1, 0, 2)),
  'carry': Span((2, 2, 4, 4)),
}


def check_span(fn: Fn, claim: Span) -> None:
  """Checks one move of tokens against its claims."""
  line = np.array([[1, 2, 3, 4]], F32)
  np.testing.assert_array_equal(
    call(fn, line, np.array([[0, 1, 0, 1]], F32)), [claim.golden]
  )
  mask = ragged_mask()
  x = np.random.default_rng(3).normal(size=mask.shape).astype(F32)
  np.testing.assert_array_equal(call(fn, x, np.ones_like(mask)), x)
  assert not call(fn, x, np.zeros_like(mask)).any()
  order = np.array([3, 1, 0, 4, 2])
  np.testing.assert_array_equal(
    call(fn, x[order], mask[order]), call(fn, x, mask)[order]
  )
  close(gradient(fn, x, mask), slope(fn, x, mask), 2e-3)


# Token baselines: (returns, energy, mask [G, T], valid [G]) -> [G, T].


@dataclasses.dataclass(frozen=True)
class TokenBaseline:
  """What a token baseline of a group, or the advantage by it, claims."""

  # Returns 3, 0; 1, 0, 2 with energies 1, 2; 1, 1, 4.
  golden: tuple[tuple[float, ...], ...]
  settings: tuple[dict[str, Any], ...] = ({},)


# Sums of energy are 1, 3; 1, 2, 6: the baselines are 4/2, 0/5 and 12/6.
TOKEN_BASELINES = {
  'optimal_baseline': TokenBaseline(((2, 0, 0), (2, 0, 2))),
  'optimal_token': TokenBaseline(((1, 0, 0), (-1, 0, 0))),
  'optimal_token_with_tail': TokenBaseline(((1, 0, 0), (-1, 0, 2))),
}


def check_token_baseline(fn: Fn, claim: TokenBaseline) -> None:
  """Checks one token baseline against its claims."""
  returns = np.array([[3, 0, 0], [1, 0, 2]], F32)
  energy = np.array([[1, 2, 0], [1, 1, 4]], F32)
  mask, every = np.array([[1, 1, 0], [1, 1, 1]], F32), np.ones(2, bool)
  close(call(fn, returns, energy, mask, every), claim.golden)
  mask = ragged_mask()
  rng, every = np.random.default_rng(4), np.ones(5, bool)
  returns = rng.normal(size=mask.shape).astype(F32)
  energy = rng.uniform(size=mask.shape).astype(F32)
  base = call(fn, returns, energy, mask, every)
  assert not base[mask == 0].any()
  order = rng.permutation(5)
  moved = call(fn, returns[order], energy[order], mask[order], every)
  close(moved, base[order])
  for absent in (np.nan, np.inf, 0.0):
    bad = [np.where(mask > 0, x, F32(absent)) for x in (returns, energy)]
    np.testing.assert_array_equal(call(fn, *bad, mask, every), base)
    wide = [np.insert(x, 2, absent, axis=0).astype(F32) for x in bad]
    valid = np.insert(every, 2, False)
    out = call(fn, *wide, np.insert(mask, 2, 1.0, axis=0), valid)
    np.testing.assert_array_equal(out[valid], base)
    assert not out[~valid].any()
  with pytest.raises(ValueError, match='are not one group'):
    fn(returns, energy, mask[:, :3], every)


# Critic losses: (value, data ..., mask), each [B, T] -> [B, T].


@dataclasses.dataclass(frozen=True)
class Critic:
  """What a critic's loss, or a statistic of it, claims."""

  golden: float  # for a value of 2, an old value of 1 and a target of 0
  old: bool = False  # whether it reads the old value
  least: Callable[[Any], Any] | None = None  # target -> the best value
  settings: tuple[dict[str, Any], ...] = ({},)


_CLIP = ({'clip': 0.5},)
CRITICS = {
  'squared': Critic(2.0, least=lambda target: target),
  'clipped': Critic(2.0, old=True, least=lambda target: target, settings=_CLIP),
  'clipping': Critic(0.0, old=True, settings=_CLIP),
  'cross_entropy': Critic(
    np.log1p(np.exp(2.0)), least=lambda target: np.log(target / (1 - target))
  ),
}


def check_critic(fn: Fn, claim: Critic) -> None:
  """Checks one critic loss against its claims."""
  rng, mask = np.random.default_rng(5), ragged_mask()
  value, old = rng.normal(size=(2, *mask.shape)).astype(F32)
  target = rng.uniform(0.1, 0.9, size=mask.shape).astype(F32)
  rest = (old, target) if claim.old else (target,)
  base = call(fn, value, *rest, mask)
  assert (base >= 0).all() and not base[mask == 0].any()
  one = np.ones((1, 1), F32)
  data = (one, 0 * one) if claim.old else (0 * one,)
  close(call(fn, 2 * one, *data, one), [[claim.golden]])
  for absent in (np.nan, np.inf, 0.0):
    bad = [np.where(mask > 0, x, F32(absent)) for x in (value, *rest)]
    np.testing.assert_array_equal(call(fn, *bad, mask), base)
    grad = gradient(fn, *bad, mask)
    assert np.isfinite(grad).all() and not grad[mask == 0].any()
  for far in (1e4, -1e4):
    away = value * 0 + F32(far)
    assert np.isfinite(call(fn, away, *rest, mask)).all()
    assert np.isfinite(gradient(fn, away, *rest, mask)).all()
  if claim.least is None:
    assert not gradient(fn, value, *rest, mask).any()
    return
  close(gradient(fn, value, *rest, mask), slope(fn, value, *rest, mask), 5e-3)
  best = claim.least(target).astype(F32)
  rest = (best, target) if claim.old else (target,)
  close(gradient(fn, best, *rest, mask), np.zeros(mask.shape), 1e-5)


# Shaping: functions of several shapes, each with numbers worked by hand.


@dataclasses.dataclass(frozen=True)
class Shaping:
  """What a change of the reward, or a filter, gives."""

  inputs: tuple[Any, ...]
  output: Any
  rows: bool = True  # whether the rows of all inputs may be permuted
  settings: tuple[dict[str, Any], ...] = ({},)


_MASK = ((1.0, 1.0, 0.0), (1.0, 0.0, 0.0))
_KL = ((0.5, -1.0, np.nan), (2.0, np.inf, np.nan))
_LENGTHS = (0, 16, 17, 20, 21, 24)
_BUFFER = {'limit': 20, 'buffer': 4}
_NAN = np.nan
SHAPINGS = {
  'penalize_kl': Shaping(
    (((0.0, 1.0, 0.0), (3.0, np.nan, 7.0)), _KL, _MASK),
    ((-0.05, 1.1, 0.0), (2.8, 0.0, 7.0)),
    settings=({'coefficient': 0.1},),
  ),
  'penalize_row_kl': Shaping(
    ((1.0, _NAN), _KL, _MASK), (1.05, _NAN), settings=({'coefficient': 0.1},)
  ),
  'adapt_coefficient': Shaping(
    (0.2, 5.0, 64.0), 0.1997866667, rows=False, settings=({'target': 6.0},)
  ),
  'overlong': Shaping(
    (_LENGTHS,), (0.0, 0.0, -0.25, -1.0, -1.0, -1.0), settings=(_BUFFER,)
  ),
  'overlong_unbounded': Shaping(
    (_LENGTHS,), (0.0, 0.0, -0.25, -1.0, -1.25, -2.0), settings=(_BUFFER,)
  ),
  'rescale': Shaping(
    # Mean 2 and unbiased variance 4.
    (((0.0, 2.0, _NAN), (4.0, _NAN, 9.0)), _MASK),
    ((1.0, 2.0, 0.0), (3.0, 0.0, 0.0)),
  ),
  'weighted_sum': Shaping(
    (((1.0, 2.0), (_NAN, 3.0), (_NAN, _NAN)),),
    (2.0, 1.5, _NAN),
    settings=({'weights': (1.0, 0.5)},),
  ),
  'finished': Shaping(((0, 1, 2),), (False, True, False)),
  'within': Shaping(
    ((0, 1, 3, 4),), (False, True, True, False), settings=({'high': 3},)
  ),
  'mixed': Shaping(((0.1, _NAN, 0.1), (True, True, True)), False, rows=False),
}


def check_shaping(fn: Fn, claim: Shaping) -> None:
  """Checks one change of the reward against the numbers it claims."""
  arrays = [_array(x) for x in claim.inputs]
  out = _call(fn, arrays)
  np.testing.assert_allclose(out, claim.output, rtol=1e-6, atol=1e-6)
  if claim.rows:
    turned = _call(fn, [x[::-1] for x in arrays])
    np.testing.assert_array_equal(turned, out[::-1])


def _array(x: Any) -> np.ndarray:
  """Returns an array as the step has it: no 64 bits."""
  x = np.asarray(x)
  return x.astype({'f': F32, 'i': np.int32}.get(x.dtype.kind, x.dtype))


def _call(fn: Fn, arrays: list[np.ndarray]) -> np.ndarray:
  """Returns `fn` of arrays; what is a decision is bool, the rest float32."""

  @functools.wraps(fn)
  def as_float(*arrays):
    out = fn(*arrays)
    return out.astype(F32) if out.dtype == bool else out

  return call(as_float, *arrays)


FAMILIES = (
  (advantages, ADVANTAGES, check_advantage),
  (attempts, ATTEMPTS, check_advantage),
  (credit, CREDITS, check_credit),
  (spans, SPANS, check_span),
  (token_baselines, TOKEN_BASELINES, check_token_baseline),
  (values, CRITICS, check_critic),
  (shaping, SHAPINGS, check_shaping),
)
