"""What every function of a family must satisfy.

One table per family maps each public function to its claims, and one check
tests a claim. `objectives/contracts_test.py` runs every check and fails for a
public function of any module of `rljax.objectives` that no table knows: write
its claims here or in one of the `..._contracts.py` beside.
"""

from collections.abc import Callable, Iterable, Iterator
import contextlib
import dataclasses
import functools
import inspect
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rljax.objectives import (
  divergences,
  ratios,
  surrogates,
  trust_regions,
  weights,
)

Fn = Callable[..., Any]
F32 = np.float32


def public(module: types.ModuleType) -> dict[str, Fn]:
  """Returns the public functions that are defined in `module`, by name."""
  return {
    name: fn
    for name, fn in vars(module).items()
    if not name.startswith('_') and _defined(module, fn)
  }


def _defined(module: types.ModuleType, x: Any) -> bool:
  """Whether `x` is a function of `module`, also a compiled or partial one."""
  if isinstance(x, functools.partial):
    return True
  own = getattr(x, '__module__', None) == module.__name__
  return own and callable(x) and not inspect.isclass(x)


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


def ragged_mask() -> np.ndarray:
  """Returns a mask with inner zeros, an empty row and a full one, [5, 8]."""
  mask = np.zeros((5, 8), F32)
  mask[0, :6], mask[0, 2:4] = 1.0, 0.0
  mask[1, :1], mask[3, :], mask[4, 3:5] = 1.0, 1.0, 1.0
  return mask


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
  'sequence_mean_token_sum_norm': Aggregation(
    lambda length: length.mean() / 7.0, settings=({'scale': 7.0},)
  ),
  'sequence_token_mean': Aggregation(
    lambda length: len(length) / 9.0,
    equal_rows=True,
    settings=({'sequences': 9.0},),
  ),
  'all_rows_mean_token_mean': Aggregation(
    lambda length: len(length) / 5.0, equal_rows=True
  ),
  'all_rows_mean_token_sum': Aggregation(lambda length: length.sum() / 5.0),
  'token_sum': Aggregation(lambda length: length.sum()),
  'constant': Aggregation(
    lambda length: length.sum() / 7.0, settings=({'denominator': 7.0},)
  ),
  'dr_grpo': Aggregation(
    lambda length: length.sum() / (5 * 16), settings=({'max_tokens': 16},)
  ),
}


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

  exact: bool = True  # whether autodiff is the derivative of the value
  signed: bool = False  # whether it also reads the advantage
  settings: tuple[dict[str, Any], ...] = ({},)


RATIOS = {
  'token': LogRatio(settings=({}, {'clamp': 80.0})),
  'sequence': LogRatio(settings=({}, {'clamp': 80.0})),
  'sequence_token': LogRatio(exact=False),
  'sequence_sum': LogRatio(),
  'geometric_mean': LogRatio(signed=True),
}


def check_ratio(fn: Fn, claim: LogRatio) -> None:
  """Checks a log-ratio against its claims."""
  rng, mask = np.random.default_rng(5), ragged_mask()
  logp, old, adv = rng.normal(size=(3, *mask.shape)).astype(F32)
  rest = (mask, adv) if claim.signed else (mask,)
  np.testing.assert_array_equal(call(fn, logp, logp, *rest), 0.0)
  base = call(fn, logp, old, *rest)
  assert not base[mask == 0].any()
  for absent in (np.nan, np.inf, -np.inf, 0.0):
    bad = [np.where(mask > 0, x, F32(absent)) for x in (logp, old)]
    np.testing.assert_array_equal(call(fn, *bad, *rest), base)
    grad = gradient(fn, bad[0], bad[1], *rest)
    assert np.isfinite(grad).all() and not grad[mask == 0].any()
  for far in (-91.0, 91.0):
    other = np.where(mask > 0, F32(-2 + far), old)
    assert np.isfinite(np.exp(call(fn, logp * 0 - 2, other, *rest))).all()
    assert np.isfinite(gradient(fn, logp * 0 - 2, other, *rest)).all()
  if claim.exact:
    grad = gradient(fn, logp, old, *rest)
    close(grad, slope(fn, logp, old, *rest), 2e-3)


# Surrogates: (log_ratio [...], adv [...]) -> [...].


@dataclasses.dataclass(frozen=True)
class Surrogate:
  """What a surrogate claims."""

  settings: tuple[dict[str, Any], ...] = ({},)
  bounded: bool = False  # whether good tokens stop gaining past the range
  exact: bool = True  # whether autodiff is the derivative of the value


SURROGATES = {
  'reinforce': Surrogate(),
  'importance': Surrogate(({}, {'limit': 80.0})),
  'clip': Surrogate(
    ({}, {'low': 0.2, 'high': 0.28}, {'limit': 80.0}), bounded=True
  ),
  'dual_clip': Surrogate(({}, {'cap': 10.0, 'limit': 80.0}), bounded=True),
  'two_sided_clip': Surrogate(({}, {'delta': 8.0}), bounded=True),
  'cispo': Surrogate(({}, {'floor': 0.8, 'cap': 1.2}), exact=False),
  'sapo': Surrogate(({}, {'tau_neg': 2.0}, {'limit': 80.0})),
  'dro': Surrogate(({'beta': 0.3}, {'beta': 0.0})),
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


# Trust regions: ([log-probs and advantages, then] mask, [B, T]) -> factor.


@dataclasses.dataclass(frozen=True)
class TrustRegion:
  """A factor on the objective: data, within [0, top]."""

  inputs: int  # how many arrays come before the mask
  top: float = 1.0
  binary: bool = True
  settings: tuple[dict[str, Any], ...] = ({},)


_SCORES = np.random.default_rng(8).uniform(size=(5, 8)).astype(F32)
TRUST_REGIONS = {
  'dppo_tv': TrustRegion(3, settings=({}, {'low': 0.01, 'high': 0.01})),
  'dppo_kl': TrustRegion(3, settings=({}, {'low': 0.01, 'high': 0.01})),
  'vespo': TrustRegion(3, top=1.25, binary=False),
  'clip_cov': TrustRegion(
    3, settings=({'scores': _SCORES, 'share': 0.2, 'floor': 0.1},)
  ),
  'kl_cov': TrustRegion(2, settings=({}, {'share': 0.25})),
}


def check_trust_region(fn: Fn, claim: TrustRegion) -> None:
  """Checks one factor against its claims."""
  rng, mask = np.random.default_rng(9), ragged_mask()
  logp, old = -rng.exponential(size=(2, *mask.shape)).astype(F32)
  adv = rng.normal(size=mask.shape).astype(F32)
  data = (logp, old, adv) if claim.inputs == 3 else (logp, adv)
  base = call(fn, *data, mask)
  assert (base >= 0).all() and (base <= claim.top).all()
  assert not base[mask == 0].any() and base.any()
  assert (base != mask).any(), 'does nothing'
  assert not claim.binary or np.isin(base, (0.0, 1.0)).all()
  for absent in (np.nan, np.inf, -np.inf, 0.0):
    bad = [np.where(mask > 0, x, F32(absent)) for x in data]
    np.testing.assert_array_equal(call(fn, *bad, mask), base)
    np.testing.assert_array_equal(gradient(fn, *bad, mask), 0.0)
  for far in (100.0, -100.0):
    assert np.isfinite(call(fn, logp + F32(far), *data[1:], mask)).all()
  np.testing.assert_array_equal(call(fn, *data, mask * 0), 0.0)


# Divergences: (logp [...], other_logp [...]) -> [...].


@dataclasses.dataclass(frozen=True)
class Divergence:
  """What a sampled divergence claims."""

  penalty: str  # whose gradient it has on-policy; see check_enumerated
  nonnegative: bool = True
  unbiased: bool = True
  exact: bool = True  # whether autodiff is the derivative of the value
  corrected: bool = False  # whether a ratio gives it that of 'reverse'
  settings: tuple[dict[str, Any], ...] = ({},)


_CLAMPS = ({}, {'cap': 10.0}, {'limit': 80.0})
DIVERGENCES = {
  'k1': Divergence('zero', nonnegative=False, corrected=True),
  'k2': Divergence('reverse', unbiased=False),
  'k3': Divergence('forward', corrected=True, settings=_CLAMPS),
  'absolute': Divergence('variation', unbiased=False),
  'k1_straight_through': Divergence('reverse', nonnegative=False, exact=False),
  'k3_straight_through': Divergence('reverse', exact=False, settings=_CLAMPS),
  'absolute_straight_through': Divergence(
    'reverse', unbiased=False, exact=False
  ),
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
  if claim.exact:
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
  sign = np.sign(np.log(p / q))
  expected = {
    'zero': np.zeros(4),
    'reverse': p * (np.log(p / q) - kl),
    'forward': p - q,
    'variation': p * (sign - np.sum(p * sign)),
  }
  found = expected_gradient(fn, theta, np.log(q))
  close(found, expected[claim.penalty])
  corrected = expected_gradient(_times_ratio(fn), theta, np.log(q))
  right = np.allclose(corrected, expected['reverse'], atol=1e-5)
  assert right == claim.corrected


def _times_ratio(fn: Fn) -> Fn:
  """Returns `fn` times a ratio of value 1 that has a gradient."""

  def corrected(logp, other_logp):
    log_ratio = logp - jax.lax.stop_gradient(logp)
    return divergences.ratio_corrected(fn(logp, other_logp), log_ratio)

  return corrected


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
  (weights, AGGREGATIONS, check_aggregation),
  (ratios, RATIOS, check_ratio),
  (surrogates, SURROGATES, check_surrogate),
  (trust_regions, TRUST_REGIONS, check_trust_region),
  (divergences, DIVERGENCES, check_divergence),
)


def cases(families: Iterable[Any]) -> Iterator[tuple[str, Fn, Any, Fn]]:
  """Yields (name, function with settings, claim, check) of every function."""
  for module, table, check in families:
    functions = public(module)
    for name, claim in table.items():
      for settings in claim.settings:
        spelled = ','.join(f'{k}={v}' for k, v in settings.items())
        place = module.__name__.rpartition('.')[-1]
        kind = check.__name__.removeprefix('check_')
        label = f'{place}.{name}({spelled})/{kind}'
        yield (
          label,
          functools.partial(functions[name], **settings),
          claim,
          check,
        )


def unclaimed(module: types.ModuleType, families: Iterable[Any]) -> set[str]:
  """Returns the public functions of `module` that no table of it knows."""
  tables = [table for owner, table, _ in families if owner is module]
  return set(public(module)).difference(*tables)
