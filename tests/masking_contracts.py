"""What is absent changes nothing: NaN and infinity where a mask is zero.

Every function of the objectives that reads a mask is called here, also those
whose family has claims of its own: what stands at masked places changes neither
value nor gradient by one bit, an empty mask and log-ratios of 100 leave both
finite. Functions without a mask are called as they are meant to be, on what
`masked.fill` or `ratios` made of it.
"""

from collections.abc import Callable
import dataclasses
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rljax.core import groups, masked
from rljax.objectives import (
  advantages,
  corrections,
  credit,
  distillation,
  divergences,
  preferences,
  presets,
  ratios,
  scores,
  selection,
  spans,
  supervised,
  surrogates,
  targets,
  tilting,
  token_baselines,
  trust_regions,
  weights,
)
import rljax_kernels
from tests import (
  contracts,
  credit_contracts,
  preference_contracts,
)
from tests.contracts import F32, Fn, ragged_mask

WIDTH = 3  # of a place with several numbers
_UNEMBED = np.random.default_rng(30).normal(size=(7, WIDTH)).astype(F32)


@dataclasses.dataclass(frozen=True)
class Masking:
  """How a function is called; its first argument is differentiated.

  Kinds of arguments: 'token' [B, T] and 'wide' [B, T, 3] are absent where the
  'mask' [B, T] is zero; 'paid' [B, T] only if it is not finite there; 'row' [B]
  and 'ids' i32 [B, T, 3] are not.
  """

  inputs: tuple[str, ...]
  call: Callable[[Fn], Fn] = lambda fn: fn
  settings: tuple[dict[str, Any], ...] = ({},)


def check_masking(fn: Fn, claim: Masking) -> None:
  """Checks that what is absent changes nothing."""
  both, mask = _compiled(claim.call(fn)), ragged_mask()
  data = [_argument(kind, mask, i) for i, kind in enumerate(claim.inputs)]
  base, slopes = both(*data)
  assert base.dtype == F32, f'returns {base.dtype}'
  assert np.isfinite(base).all() and np.isfinite(slopes).all()
  silent = claim.inputs[0] in ('token', 'wide')
  # Whether a reward off the mask counts depends on whether it is finite.
  seen = mask if claim.inputs[0] == 'paid' else np.ones_like(slopes)
  assert not silent or not slopes[mask == 0].any()
  for absent in (np.nan, np.inf, -np.inf, 1e30):
    found = both(*_poisoned(claim, data, mask, absent))
    np.testing.assert_array_equal(found[0], base)
    np.testing.assert_array_equal(found[1] * seen, slopes * seen)
  for far in (100.0, -100.0):
    found = both(data[0] + F32(far), *data[1:])
    assert all(np.isfinite(x).all() for x in found)
  empty = _poisoned(claim, data, mask * 0, np.nan)
  kinds = zip(claim.inputs, empty, strict=True)
  empty = [x * 0 if kind == 'mask' else x for kind, x in kinds]
  found = both(*empty)
  assert all(np.isfinite(x).all() for x in found)
  assert not silent or not found[1].any()


def _compiled(fn: Fn) -> Fn:
  """Returns a function to the value of `fn` and the gradient of a sum of it."""

  def total(*arrays):
    out = fn(*arrays)
    # Decisions as numbers, several results as one.
    out = jnp.stack(out) if isinstance(out, tuple) else out
    out = out.astype(jnp.float32) if out.dtype == bool else out
    uneven = 1.0 + 0.1 * jnp.arange(out.size, dtype=jnp.float32)
    return jnp.sum(out * uneven.reshape(out.shape)), out

  compiled = jax.jit(jax.grad(total, has_aux=True))

  def both(*arrays: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    with contracts.strict():
      slopes, out = compiled(*arrays)
    return np.asarray(out), np.asarray(slopes)

  return both


def _argument(kind: str, mask: np.ndarray, seed: int) -> np.ndarray:
  """Returns an argument of a kind; log-probs are as good as any."""
  rng = np.random.default_rng(seed)
  if kind == 'mask':
    return mask
  if kind == 'ids':
    return rng.integers(7, size=(*mask.shape, WIDTH)).astype(np.int32)
  shape = mask.shape[:1] if kind == 'row' else mask.shape
  shape = (*shape, WIDTH) if kind == 'wide' else shape
  x = -rng.exponential(size=shape).astype(F32)
  return x * mask if kind == 'paid' else x


def _poisoned(
  claim: Masking, data: list[np.ndarray], mask: np.ndarray, absent: float
) -> list[np.ndarray]:
  """Returns the arguments with `absent` where the mask is zero."""
  out = []
  for kind, x in zip(claim.inputs, data, strict=True):
    there = mask.reshape(mask.shape + (1,) * (x.ndim - 2)) > 0
    if kind in ('token', 'wide') or (kind == 'paid' and abs(absent) != 1e30):
      x = np.where(there, x, F32(absent))
    out.append(x)
  return out


def _filled(fn: Fn) -> Fn:
  """Returns a function without a mask, of tokens that are there."""
  return lambda *data: fn(*(masked.fill(x, data[-1]) for x in data[:-1]))


def _times_weight(fn: Fn) -> Fn:
  """Returns the terms of a loss with a divergence."""
  return lambda *data: _filled(fn)(*data) * weights.token_mean(data[-1])


def _as_loss(fn: Fn) -> Fn:
  """Returns the terms of a loss with a surrogate."""

  def loss(logp, old_logp, adv, mask):
    log_ratio = ratios.token(logp, old_logp, mask, clamp=80.0)
    objective = fn(log_ratio, masked.fill(adv, mask))
    return -objective * weights.token_mean(mask)

  return loss


def _flat(fn: Fn) -> Fn:
  """Returns a function of [N, ...] as one of [B, T, ...]."""
  return lambda *data: fn(*(x.reshape(-1, *x.shape[2:]) for x in data))


def _rows_flat(fn: Fn) -> Fn:
  """Returns a function of [N] as one of [B, T], all in one line."""
  return lambda *data: fn(*(x.reshape(-1) for x in data))


def _fused(fn: Fn) -> Fn:
  """Returns a divergence of hidden states from those of a teacher."""

  def fused(hidden, teacher, mask):
    reference = rljax_kernels.Reference(teacher, jnp.asarray(_UNEMBED), 1.0)
    return fn(hidden, _UNEMBED, reference, mask)

  return _flat(fused)


def _member(fn: Fn) -> Fn:
  """Returns a function of a group's rows as one of tokens, row by row."""
  return lambda reward, mask: fn(reward[0], mask[0])


def _group(fn: Fn) -> Fn:
  """Returns a function of a group, where all members are valid."""
  return lambda *data: fn(*data, np.ones(len(data[0]), bool))


def _lifted(fn: Fn) -> Fn:
  """Returns `apply` of a token baseline to one group of all rows."""

  def lifted(returns, energy, mask):
    every = groups.uniform(1, len(mask))
    return fn(token_baselines.optimal_token, every, returns, energy, mask)

  return lifted


def _of_turns(fn: Fn) -> Fn:
  return _group(fn(token_baselines.optimal_token))


def _dropped(fn: Fn) -> Fn:
  """Returns a function of rows that leaves what is dropped as it is."""

  def dropped(x, mask):
    keep = masked.count(mask, 1) > 0.0
    here = mask.astype(bool) | ~keep[:, None]
    return fn(masked.fill(x, here), keep)

  return dropped


def _preset(fn: Fn) -> Fn:
  """Returns the terms of the loss of a preset, one group of all rows."""

  def terms(logp, old_logp, adv, mask):
    preset = fn()
    objective, _ = preset.objective(
      logp, old_logp, adv, mask, ref_logp=old_logp
    )
    weight = preset.aggregate(mask, groups.uniform(1, len(mask)))
    return -objective * weight

  return terms


def _rows(mask):
  """Returns what `targets` reads of a rollout: one group of all rows."""
  return types.SimpleNamespace(mask=mask, groups=groups.uniform(1, len(mask)))


def _targets(fn: Fn) -> Fn:
  """Returns advantage and weight of a batch, as terms of its loss."""

  def terms(adv, mask):
    rewards = {'task': masked.sum(adv, mask, 1)}
    found = fn(_rows(mask), rewards, adv)
    return found.advantage * found.weight

  return terms


def _usable(fn: Fn) -> Fn:
  """Returns tokens of rows whose reward, their sum, is not missing."""

  def usable(x, mask):
    rewards = {'task': masked.sum(x, mask, 1)}
    keep = fn(_rows(mask), rewards)
    return weights.keep_rows(masked.fill(x, mask), keep)

  return usable


def _present(x, mask):
  """Returns x [..., 3] with 0 for what is masked."""
  return masked.fill(x, jnp.broadcast_to(mask[..., None], x.shape))


def _chances(x, mask):
  """Returns log-probs [..., 3] of tokens that are not all."""
  return _present(-1.5 - jnp.abs(x), mask)


_PAIR = Masking(('token', 'token', 'mask'))
_TOPK = Masking(('wide', 'wide', 'mask'))
_FILLED = Masking(('token', 'token', 'mask'), _filled)
_FUSED = Masking(('wide', 'wide', 'mask'), _fused)
# What no family claims.
ALONE = {
  advantages: {'present': Masking(('token', 'mask'), _member)},
  corrections: {
    'off_policy_rows': Masking(
      ('token', 'row', 'mask'), settings=({'limit': 0.1},)
    ),
    # What the sampler did not score has another mask: being finite.
    'fill_unscored': Masking(
      ('token', 'token', 'mask'),
      lambda fn: lambda a, b, mask: masked.fill(fn(a, b), mask),
    ),
  },
  distillation: {
    'fused_forward_kl': _FUSED,
    'fused_reverse_kl': _FUSED,
    'fused_jsd': _FUSED,
    'topk_forward_kl': _TOPK,
    'topk_logp': Masking(
      ('wide', 'mask'),
      lambda fn: (
        lambda x, mask: fn(
          _present(x, mask), jnp.zeros((*mask.shape, 2), jnp.int32)
        )
      ),
    ),
    'fused_topk_logp': Masking(
      ('wide', 'ids', 'mask'),
      lambda fn: _flat(
        lambda x, ids, mask: fn(_present(x, mask), _UNEMBED, ids)
      ),
    ),
    'with_tail': Masking(
      ('wide', 'mask'), lambda fn: lambda x, mask: fn(_chances(x, mask))
    ),
    'topk_mass': Masking(
      ('wide', 'mask'), lambda fn: lambda x, mask: fn(_chances(x, mask))
    ),
    'topk_overlap': Masking(
      ('wide', 'ids', 'ids', 'mask'),
      lambda fn: (
        lambda x, ids, other, mask: fn(
          ids, other, _chances(x, mask), _chances(-x, mask)
        )
      ),
    ),
    'advantage': _PAIR,
    'penalty': _PAIR,
  },
  divergences: {
    'ratio_corrected': _FILLED,
    'k3_ratio_corrected': Masking(('token', 'token', 'token', 'mask'), _filled),
  },
  preferences: {
    'aot': Masking(('token', 'token', 'mask'), _rows_flat),
    'kto': Masking(
      ('token', 'mask'),
      lambda fn: _rows_flat(
        lambda x, mask: fn(
          masked.fill(x, mask), masked.fill(x, mask) > -1.0, jnp.float32(0.3)
        )
      ),
    ),
    'kto_baseline': Masking(('token', 'mask'), _rows_flat),
  },
  presets: {
    name: Masking(
      ('token', 'token', 'token', 'mask'),
      _preset,
      ({'max_tokens': 8},) if name in ('dapo', 'dr_grpo') else ({},),
    )
    for name in contracts.public(presets)
  },
  scores: {
    'score': _PAIR,
    'per_token': Masking(('row', 'mask')),
    'length_decay': Masking(
      ('token', 'mask'),
      lambda fn: lambda x, mask: fn(mask, mask[::-1]) * masked.fill(x, mask),
      ({'decay': 0.5},),
    ),
    'agreement': Masking(
      ('token', 'token', 'mask'),
      lambda fn: lambda x, y, mask: fn(x, jnp.exp(y), mask),
    ),
  },
  selection: {
    'length_between': Masking(
      ('token', 'mask'),
      lambda fn: (
        lambda x, mask: weights.keep_rows(masked.fill(x, mask), fn(mask))
      ),
      ({'high': 3},),
    ),
    'top_entropy': Masking(('token', 'mask')),
  },
  targets: {
    'targets': Masking(('token', 'mask'), _targets),
    'usable': Masking(('token', 'mask'), _usable),
  },
  tilting: {
    'tilted_cross_entropy': Masking(
      ('wide', 'wide', 'mask'), settings=({'tilt': 0.0}, {'tilt': 0.5})
    ),
    'fused_tilted_cross_entropy': Masking(
      ('wide', 'wide', 'mask'), _fused, ({'tilt': 0.5},)
    ),
  },
  token_baselines: {
    'score_energy': Masking(
      ('token', 'token', 'mask'),
      lambda fn: lambda x, y, mask: fn(jnp.minimum(x, 0.0), y, mask),
    ),
    'apply': Masking(('token', 'token', 'mask'), _lifted),
    'by_turn': Masking(('token', 'token', 'mask'), _of_turns),
  },
  trust_regions: {'clipped': _FILLED},
  weights: {
    'keep_rows': Masking(('token', 'mask'), _dropped),
    'group_mean_token_mean': Masking(
      ('token', 'mask'),
      lambda fn: (
        lambda x, mask: (
          masked.fill(x, mask) * fn(mask, groups.uniform(1, len(mask)))
        )
      ),
    ),
  },
}


def _derived(
  table: dict[str, Any],
  inputs: Callable[[Any], tuple[str, ...]],
  wrap: Callable[[Fn], Fn] = lambda fn: fn,
) -> dict[str, Masking]:
  """Returns the claims of a family's functions, at its first settings.

  Args:
    table: of the family.
    inputs: a claim to kinds of arguments.
    wrap: how a function is called.
  """
  return {
    name: Masking(inputs(claim), wrap, claim.settings[:1])
    for name, claim in table.items()
  }


def _of_credit(claim: credit_contracts.Credit) -> tuple[str, ...]:
  """Returns kinds; rewards off the mask count, if they are finite."""
  first = {'rows': 'row', 'tokens': 'paid'}[claim.inputs[0]]
  rest = [{'rows': 'row', 'tokens': 'token'}[x] for x in claim.inputs[1:]]
  return (first, *rest, 'mask')


def _of_ratio(claim: contracts.LogRatio) -> tuple[str, ...]:
  return ('token', 'token', 'mask', *(['token'] if claim.signed else []))


_ONE, _TWO = ('token', 'mask'), ('token', 'token', 'mask')
_OF_PACKED = Masking(
  _ONE, lambda fn: lambda x, mask: fn(spans.pack(x, mask), mask)
)
DERIVED = (
  (credit, _derived(credit_contracts.CREDITS, _of_credit)),
  (
    divergences,
    _derived(contracts.DIVERGENCES, lambda _: _TWO, _times_weight),
  ),
  (ratios, _derived(contracts.RATIOS, _of_ratio)),
  (
    spans,
    {'pack': Masking(_ONE), 'unpack': _OF_PACKED, 'carry': Masking(_ONE)},
  ),
  (supervised, _derived(preference_contracts.TOKEN_LOSSES, lambda _: _ONE)),
  (
    surrogates,
    _derived(contracts.SURROGATES, lambda _: ('token', *_TWO), _as_loss),
  ),
)
FAMILIES = tuple(
  (module, table, check_masking) for module, table in (*ALONE.items(), *DERIVED)
)
