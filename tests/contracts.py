"""What every function of a family must satisfy.

One table per family maps each public function to its claims, and one check
tests a claim. `objectives/contracts_test.py` runs every check and fails for a
public function that no table knows: write its claims here.
"""

from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import functools
import inspect
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.objectives import (
  advantages,
  credit,
  divergences,
  ratios,
  surrogates,
  weights,
)

Fn = Callable[..., Any]
F32 = np.float32


def public(module: types.ModuleType) -> dict[str, Fn]:
  """Returns the public functions that are defined in `module`, by name."""
  return {
    name: fn
    for name, fn in vars(module).items()
    if inspect.isfunction(fn)
    and fn.__module__ == module.__name__
    and not name.startswith('_')
  }


@contextlib.contextmanager
def strict() -> Iterator[None]:
  """Makes implicit promotion of dtypes and of ranks an error."""
  with (
    jax.numpy_dtype_promotion('strict'),
    jax.numpy_rank_promotion('raise'),
  ):
    yield


@functools.cache
def _compiled(fn: Fn) -> Fn:
  """Returns `fn` compiled; cached, since checks call it many times."""
  return jax.jit(fn)


@functools.cache
def _compiled_gradient(fn: Fn) -> Fn:
  """Returns the compiled gradient of an unevenly weighted sum of `fn`."""

  def total(x, *rest):
    out = fn(x, *rest)
    return jnp.sum(out * _spread(out.shape))

  return jax.jit(jax.grad(total))


def call(fn: Fn, *arrays: np.ndarray) -> np.ndarray:
  """Returns `fn(*arrays)` under `strict`, which must be float32."""
  with strict():
    out = _compiled(fn)(*arrays)
  assert out.dtype == jnp.float32, f'returns {out.dtype}'
  return np.asarray(out)


def gradient(fn: Fn, x: np.ndarray, *rest: np.ndarray) -> np.ndarray:
  """Returns the gradient in `x` of a sum of `fn(x, *rest)` with weights."""
  with strict():
    return np.asarray(_compiled_gradient(fn)(x, *rest))


def slope(fn: Fn, x: np.ndarray, *rest: np.ndarray) -> np.ndarray:
  """Returns what `gradient` should, by central differences."""
  step, out = 2.0**-7, np.zeros(x.shape)
  for place in np.ndindex(x.shape):
    move = np.zeros(x.shape, F32)
    move[place] = step
    change = call(fn, x + move, *rest) - call(fn, x - move, *rest)
    out[place] = np.sum(change * _spread(change.shape)) / (2 * step)
  return out


def close(
  actual: Any, expected: Any, tolerance: float = 2e-6, err_msg: str = ''
) -> None:
  """Asserts equality up to the rounding of float32."""
  np.testing.assert_allclose(
    actual, expected, rtol=1e-5, atol=tolerance, err_msg=err_msg
  )


def _spread(shape: tuple[int, ...]) -> np.ndarray:
  """Returns unequal weights, so that errors cannot cancel in a sum."""
  return (1.0 + 0.1 * np.arange(np.prod(shape))).reshape(shape).astype(F32)


# Advantages: (reward [G], valid [G]) -> [G].


@dataclasses.dataclass(frozen=True)
class Advantage:
  """What a group advantage claims."""

  golden: tuple[float, ...]  # for rewards 1, 0, 0, 1, worked by hand
  baseline: bool = True  # shifts of the reward do not matter
  scaled: bool = False  # its scale does not matter, up to eps
  settings: tuple[dict[str, Any], ...] = ({},)


_ZSCORE = 0.5 / np.sqrt(1.0 / 3.0)
ADVANTAGES = {
  'reinforce': Advantage((1, 0, 0, 1), baseline=False),
  'center': Advantage((0.5, -0.5, -0.5, 0.5)),
  'leave_one_out': Advantage((2 / 3, -2 / 3, -2 / 3, 2 / 3)),
  'zscore': Advantage(
    (1, -1, -1, 1), scaled=True, settings=({'ddof': 0}, {'ddof': 0, 'eps': 0})
  ),
  'grpo': Advantage((_ZSCORE, -_ZSCORE, -_ZSCORE, _ZSCORE), scaled=True),
}


def check_advantage(fn: Fn, claim: Advantage) -> None:
  """Checks one group advantage against its claims."""
  rng = np.random.default_rng(1)
  reward = rng.normal(size=6).astype(F32)
  every = np.ones(6, bool)
  base = call(fn, reward, every)
  order = rng.permutation(6)
  close(call(fn, reward[order], every), base[order])
  binary = np.array([1, 0, 0, 1], F32)
  close(call(fn, binary, np.ones(4, bool)), claim.golden, 5e-6)
  if claim.baseline:
    close(call(fn, reward + F32(4.0), every), base, 1e-5)
    for equal in (0.1, 0.35, 0.7, 1e4, -3.0):
      for size in (1, 3, 8):
        row = np.full(size, equal, F32)
        assert not call(fn, row, np.ones(size, bool)).any(), (equal, size)
  if claim.scaled:
    close(call(fn, reward * F32(8.0), every), base, 1e-5)
  check_absent_members(fn, reward, base)


def check_absent_members(fn: Fn, reward: np.ndarray, base: np.ndarray) -> None:
  """Padding and missing rewards get 0 and leave the others as they are."""
  for absent in (0.0, 1e6, np.nan, np.inf):
    padded = np.insert(reward, [2, 6], absent).astype(F32)
    valid = np.insert(np.ones(6, bool), [2, 6], False)
    out = call(fn, padded, valid)
    close(out[valid], base)
    assert not out[~valid].any()
    if not np.isfinite(absent):
      np.testing.assert_array_equal(call(fn, padded, np.ones(8, bool)), out)
  nothing = call(fn, np.full(3, np.nan, F32), np.zeros(3, bool))
  np.testing.assert_array_equal(nothing, np.zeros(3))
  one = call(fn, np.full(1, 0.7, F32), np.ones(1, bool))
  assert one.shape == (1,) and np.isfinite(one).all()
  with pytest.raises(ValueError, match=r'reward\[2, 3\] is not one group'):
    fn(np.zeros((2, 3), F32), np.ones((2, 3), bool))


# Credit: (rows [B] or tokens [B, T] ..., mask [B, T]) -> [B, T].


@dataclasses.dataclass(frozen=True)
class Credit:
  """What a credit function claims."""

  inputs: tuple[str, ...]  # 'rows' or 'tokens', before the mask
  keeps_sign: bool = False  # of its first input, at every sampled token
  settings: tuple[dict[str, Any], ...] = ({},)


CREDITS = {
  'broadcast': Credit(('rows',), keeps_sign=True),
  'reward_to_go': Credit(('tokens',), settings=({}, {'discount': 0.9})),
  'gae': Credit(
    ('tokens', 'tokens'), settings=({'discount': 0.9, 'decay': 0.8},)
  ),
}


def ragged_mask() -> np.ndarray:
  """Returns a mask with inner zeros, an empty row and a full one, [5, 8]."""
  mask = np.zeros((5, 8), F32)
  mask[0, :6], mask[0, 2:4] = 1.0, 0.0
  mask[1, :1], mask[3, :], mask[4, 3:5] = 1.0, 1.0, 1.0
  return mask


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


# Aggregations: mask [B, T] of the whole batch -> weight [B, T].


@dataclasses.dataclass(frozen=True)
class Aggregation:
  """What an aggregation claims."""

  total: Callable[[np.ndarray], float]  # lengths of non-empty rows -> sum
  equal_rows: bool = False  # whether non-empty rows have equal totals
  settings: tuple[dict[str, Any], ...] = ({},)


AGGREGATIONS = {
  'token_mean': Aggregation(lambda length: 1.0),
  'sequence_mean_token_mean': Aggregation(lambda length: 1.0, equal_rows=True),
  'sequence_mean_token_sum': Aggregation(np.mean),
  'constant': Aggregation(
    lambda length: length.sum() / 7.0, settings=({'denominator': 7.0},)
  ),
  'dr_grpo': Aggregation(
    lambda length: length.sum() / (5 * 16), settings=({'max_tokens': 16},)
  ),
}
GATES = {'keep_rows': None}  # not an aggregation; see weights_test.py


def check_aggregation(fn: Fn, claim: Aggregation) -> None:
  """Checks one aggregation against its claims."""
  mask = ragged_mask()
  weight = call(fn, mask)
  assert (weight >= 0).all() and not weight[mask == 0].any()
  length = mask.sum(1)
  close(weight.sum(), claim.total(length[length > 0]))
  if claim.equal_rows:
    rows = weight.sum(1)[length > 0]
    close(rows, np.full(rows.shape, rows[0]))
  np.testing.assert_array_equal(call(fn, np.zeros((2, 3), F32)), 0.0)
  order = np.random.default_rng(3).permutation(len(mask))
  close(call(fn, mask[order]), weight[order])
  close(
    call(fn, np.pad(mask, ((0, 0), (0, 3)))), np.pad(weight, [(0, 0), (0, 3)])
  )
  check_microbatches(weight)


@jax.jit
@jax.value_and_grad
def _loss_and_gradient(logp: jax.Array, weight: jax.Array) -> jax.Array:
  return -jnp.sum(surrogates.reinforce(jnp.sin(logp), logp) * weight)


def check_microbatches(weight: np.ndarray) -> None:
  """Sums over any split of the rows, and their gradients, add up."""
  rng = np.random.default_rng(4)
  logp = rng.normal(size=weight.shape).astype(F32)

  whole, whole_grad = _loss_and_gradient(logp, weight)
  for parts in (2, 3, 5):
    split = np.array_split(np.arange(len(weight)), parts)
    pieces = [_loss_and_gradient(logp[rows], weight[rows]) for rows in split]
    close(sum(value for value, _ in pieces), whole)
    close(np.concatenate([grad for _, grad in pieces]), whole_grad)


# Ratios: (logp, other_logp, mask), each [B, T] -> [B, T].


@dataclasses.dataclass(frozen=True)
class LogRatio:
  """A log-ratio, differentiated in its first input."""

  settings: tuple[dict[str, Any], ...] = ({},)


@dataclasses.dataclass(frozen=True)
class Importance:
  """An importance weight: data, within [0, cap]."""

  cap: float
  settings: tuple[dict[str, Any], ...] = ({},)


RATIOS = {
  'token': LogRatio(),
  'sequence': LogRatio(),
  'truncated_importance': Importance(cap=2.0),
}


def check_ratio(fn: Fn, claim: LogRatio | Importance) -> None:
  """Checks a log-ratio or importance weight against its claims."""
  rng, mask = np.random.default_rng(5), ragged_mask()
  logp, old = rng.normal(size=(2, *mask.shape)).astype(F32)
  neutral = 0.0 if isinstance(claim, LogRatio) else 1.0
  np.testing.assert_array_equal(call(fn, logp, logp, mask), neutral * mask)
  base = call(fn, logp, old, mask)
  for absent in (np.nan, np.inf, -np.inf, 0.0):
    bad = [np.where(mask > 0, x, F32(absent)) for x in (logp, old)]
    np.testing.assert_array_equal(call(fn, *bad, mask), base)
    grad = gradient(fn, bad[0], bad[1], mask)
    assert np.isfinite(grad).all() and not grad[mask == 0].any()
  far = call(fn, np.where(mask > 0, F32(-2), logp), old * 0 - 91, mask)
  assert np.isfinite(np.exp(far)).all()
  if isinstance(claim, Importance):
    assert (base >= 0).all() and (base <= claim.cap).all()
    assert not gradient(fn, logp, old, mask).any()
  else:
    close(gradient(fn, logp, old, mask), slope(fn, logp, old, mask), 2e-3)


# Surrogates: (log_ratio [...], adv [...]) -> [...].


@dataclasses.dataclass(frozen=True)
class Surrogate:
  """What a surrogate claims."""

  settings: tuple[dict[str, Any], ...] = ({},)
  bounded: bool = False  # whether good tokens stop gaining past the range
  exact: bool = True  # whether autodiff is the derivative of the value


SURROGATES = {
  'reinforce': Surrogate(),
  'clip': Surrogate(({}, {'low': 0.2, 'high': 0.28}), bounded=True),
  'dual_clip': Surrogate(bounded=True),
  'cispo': Surrogate(exact=False),
}


def check_surrogate(fn: Fn, claim: Surrogate) -> None:
  """Checks one surrogate against its claims."""
  adv = np.array([1.5, -0.5, 0.0, 300.0, -300.0], F32)
  on_policy = np.zeros(5, F32)
  close(gradient(fn, on_policy, adv), adv * _spread((5,)))
  for far in (100.0, -100.0, 20.0, -20.0, 89.0):
    log_ratio = np.full(5, far, F32)
    assert np.isfinite(call(fn, log_ratio, adv)).all()
    assert np.isfinite(gradient(fn, log_ratio, adv)).all()
  if claim.bounded:
    ones = np.ones(2, F32)
    past = np.array([0.3, 1.0], F32)
    assert not gradient(fn, past, ones).any()
    assert not gradient(fn, -past, -ones).any()
    assert gradient(fn, -past, ones).all() and gradient(fn, past, -ones).all()
  if claim.exact:
    near = np.array([-0.1, 0.05, 0.1, 0.12, -0.15], F32)
    adv = np.array([1.5, -0.5, 0.0, 2.0, -1.0], F32)
    close(gradient(fn, near, adv), slope(fn, near, adv), 2e-4)


# Divergences: (logp [...], other_logp [...]) -> [...].


@dataclasses.dataclass(frozen=True)
class Divergence:
  """What a sampled divergence claims."""

  penalty: str  # whose gradient it has on-policy: 'zero', 'reverse', 'forward'
  nonnegative: bool = True
  unbiased: bool = True
  settings: tuple[dict[str, Any], ...] = ({},)


DIVERGENCES = {
  'k1': Divergence('zero', nonnegative=False),
  'k2': Divergence('reverse', unbiased=False),
  'k3': Divergence('forward'),
}


def check_divergence(fn: Fn, claim: Divergence) -> None:
  """Checks one sampled divergence against its claims."""
  rng = np.random.default_rng(6)
  logp = -rng.exponential(size=8).astype(F32)
  np.testing.assert_array_equal(call(fn, logp, logp), 0.0)
  for gap in (1e-6, 1e-3, 0.02, 0.04, 1.0, 100.0):
    for sign in (-1, 1):
      value = call(fn, logp, logp + F32(sign * gap))
      slopes = gradient(fn, logp, logp + F32(sign * gap))
      assert np.isfinite(value).all() and np.isfinite(slopes).all()
      assert not claim.nonnegative or (value >= 0).all(), (gap, sign)
  other = logp + rng.normal(size=8).astype(F32)
  close(gradient(fn, logp, other), slope(fn, logp, other), 1e-2)
  check_enumerated(fn, claim)


def check_enumerated(fn: Fn, claim: Divergence) -> None:
  """Enumerates a vocabulary of four: the mean, and the mean gradient."""
  theta = np.array([0.3, -0.2, 0.5, 0.1])
  p, q = _softmax(theta), _softmax(np.array([0.0, 0.1, -0.4, 0.9]))
  kl = np.sum(p * np.log(p / q))
  if claim.unbiased:
    mean = np.sum(p * call(fn, np.log(p).astype(F32), np.log(q).astype(F32)))
    close(mean, kl)
  expected = {
    'zero': np.zeros(4),
    'reverse': p * (np.log(p / q) - kl),
    'forward': p - q,
  }[claim.penalty]
  close(expected_gradient(fn, theta, np.log(q)), expected)


def expected_gradient(
  fn: Fn, theta: np.ndarray, other_logp: np.ndarray
) -> np.ndarray:
  """Returns E over tokens of d fn / d theta, the policy's logits, [V]."""
  policy, other_logp = _softmax(theta).astype(F32), other_logp.astype(F32)

  def penalty(theta):
    return jnp.sum(policy * fn(jax.nn.log_softmax(theta), other_logp))

  with strict():
    return np.asarray(jax.jit(jax.grad(penalty))(theta.astype(F32)))


def _softmax(x: np.ndarray) -> np.ndarray:
  return np.exp(x) / np.exp(x).sum()


FAMILIES = (
  (advantages, ADVANTAGES, check_advantage),
  (credit, CREDITS, check_credit),
  (weights, AGGREGATIONS, check_aggregation),
  (ratios, RATIOS, check_ratio),
  (surrogates, SURROGATES, check_surrogate),
  (divergences, DIVERGENCES, check_divergence),
)


def cases() -> Iterator[tuple[str, Fn, Any, Fn]]:
  """Yields (name, function with settings, claim, check) of every function."""
  for module, table, check in FAMILIES:
    functions = public(module)
    for name, claim in table.items():
      for settings in claim.settings:
        spelled = ','.join(f'{k}={v}' for k, v in settings.items())
        label = f'{module.__name__.split(".")[-1]}.{name}({spelled})'
        yield (
          label,
          functools.partial(functions[name], **settings),
          claim,
          check,
        )


def unclaimed(module: types.ModuleType, *tables: dict[str, Any]) -> set[str]:
  """Returns the public functions of `module` that no table knows."""
  return set(public(module)).difference(*tables)
