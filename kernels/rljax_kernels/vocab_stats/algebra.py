"""Moments of a softmax over tiles of the vocabulary, and its slopes.

A tile holds scaled logits [n, v] of some rows and ids; what belongs to a row
is [n, 1]. Moments of tiles are joined in any order, over blocks or over the
shards of a mesh, and then finished into statistics. The gradient of every
statistic in a logit is one formula with constants per row. The same lines run
in XLA programs and inside Pallas kernels.

Names: p is the policy's softmax, q the reference's, m the largest logit, and
u = log p + H with H the entropy.
"""

from collections.abc import Mapping
import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

# A banned logit: finite, so that differences of two never make NaN.
NEVER = -1e30
# Where exp has long been 0 in float32; squares of it are still finite.
_FLOOR = -1e4
_NO_ID = 2.0**30

# What can be asked for, and the moments each needs beside 'm', 'l' and 't'.
PLAIN = {
  'logp': '',
  'lse': '',
  'entropy': 'a',
  'varentropy': 'a b',
  'top_logp': 'i',
  'collision': 's',
  'entropy_drift': 'a s as',
}
PAIRED = {'ref_logp': 'tq', 'kl_pq': 'pq', 'kl_qp': 'qp', 'js': ''}
DERIVED = {'polarity': ('logp', 'entropy', 'entropy_drift')}
WANT = (*PLAIN, *DERIVED, *PAIRED)

Columns = Mapping[str, jax.Array]  # f32 [n, 1] each


@dataclasses.dataclass(frozen=True)
class Bend:
  """How raw logits of one model are bent and cut.

  Attributes:
    softcap: None or c, for c * tanh(x / c).
    valid: None or the number of real ids.
  """

  softcap: float | None = None
  valid: int | None = None


@dataclasses.dataclass(frozen=True)
class Spec:
  """What a program computes, fixed when it is traced.

  Attributes:
    names: among PLAIN and PAIRED; 'logp' and 'lse' always.
    policy: bend of the policy's logits.
    reference: bend of the reference's, or None without one.
    beta: weight of the reference in the mixture of 'js'.
  """

  names: tuple[str, ...] = ('logp', 'lse')
  policy: Bend = Bend()
  reference: Bend | None = None
  beta: float = 0.5

  @functools.cached_property
  def infinite(self) -> tuple[str, ...]:
    """The divergences that are: one side bans what the other may draw."""
    if self.reference is None:
      return ()
    p, q = (x.valid or math.inf for x in (self.policy, self.reference))
    return (*(['kl_pq'] if p > q else []), *(['kl_qp'] if q > p else []))

  @functools.cached_property
  def moments(self) -> tuple[str, ...]:
    """The moments a sweep collects, in order."""
    table = {**PLAIN, **PAIRED}
    asked = ' '.join(table[name] for name in self.names).split()
    paired = () if self.reference is None else ('mq', 'lq')
    order = ('a', 'b', 'i', 's', 'as', 'tq', 'pq', 'qp')
    return ('m', 'l', 't', *paired, *(k for k in order if k in asked))


def bent(raw, inverse, bend: Bend, ids, fresh=None):
  """Returns scaled logits [n, v] and their slope in the raw ones, None for 1.

  Args:
    raw: f32 [n, v].
    inverse: f32 [n, 1], 1 / temperature, or None for 1.
    bend: of the model.
    ids: i32 [1, v] or [n, v], ids of the columns.
    fresh: None or bool, columns that count.
  """
  slope = None
  if bend.softcap is not None:
    curve = jnp.tanh(raw * (1.0 / bend.softcap))
    raw, slope = bend.softcap * curve, 1.0 - curve * curve
  scaled = raw
  if inverse is not None:
    scaled = raw * inverse
    slope = inverse if slope is None else inverse * slope
  if bend.valid is not None:
    real = ids < bend.valid
    fresh = real if fresh is None else fresh & real
  if fresh is not None:
    scaled = jnp.where(fresh, scaled, NEVER)
  return scaled, slope


def _sum(x):
  return jnp.sum(x, axis=1, keepdims=True)


def _max(x):
  return jnp.max(x, axis=1, keepdims=True)


def start(spec: Spec, rows: int) -> dict[str, jax.Array]:
  """Returns the moments of no tile at all, f32 [rows, 1] each."""
  first = {'m': NEVER, 'mq': NEVER, 'i': _NO_ID}
  return {
    k: jnp.full((rows, 1), first.get(k, 0.0), jnp.float32) for k in spec.moments
  }


def of_tile(spec: Spec, s, own, ids, sq=None) -> dict[str, jax.Array]:
  """Returns the moments of one tile.

  Args:
    spec: which.
    s: f32 [n, v], scaled logits.
    own: gives what an [n, v] holds at the target [n, 1], 0 if it is elsewhere.
    ids: i32 [n, v] or [1, v].
    sq: f32 [n, v], scaled logits of the reference.
  """
  top = _max(s)
  # No bound on d: XLA on CPU would write it out as an array of its size.
  d = s - top
  e = jnp.exp(d)
  square = e * e
  sums = {
    'l': lambda: e,
    'a': lambda: e * d,
    'b': lambda: e * d * d,
    's': lambda: square,
    'as': lambda: square * d,
  }
  found = {'m': top, 't': own(s)}
  if 'tq' in spec.moments:
    found['tq'] = own(sq)
  if sq is not None:
    found['mq'] = _max(sq)
    dq = sq - found['mq']
    eq = jnp.exp(dq)
    # Of logits below their maxima: an offset between the models costs no digit.
    gap = d - dq
    sums |= {
      'lq': lambda: eq,
      'pq': lambda: e * gap,
      'qp': lambda: -eq * gap,
    }
  found |= {k: _sum(sums[k]()) for k in spec.moments if k in sums}
  if 'i' in spec.moments:
    number = jnp.broadcast_to(ids.astype(jnp.float32), s.shape)
    found['i'] = jnp.min(
      jnp.where(s == top, number, _NO_ID), axis=1, keepdims=True
    )
  return found


def _lifted(x: Columns, top, top_q) -> dict[str, jax.Array]:
  """Returns moments relative to larger maxima; they then simply add."""
  delta = jnp.maximum(x['m'] - top, _FLOOR)
  scale = jnp.exp(delta)
  out = {'l': scale * x['l'], 't': x['t']}
  if 'a' in x:
    out['a'] = scale * (x['a'] + delta * x['l'])
  if 'b' in x:
    second = x['b'] + 2 * delta * x['a'] + delta * delta * x['l']
    out['b'] = scale * second
  if 's' in x:
    out['s'] = scale * scale * x['s']
  if 'as' in x:
    out['as'] = scale * scale * (x['as'] + delta * x['s'])
  if 'mq' in x:
    delta_q = x['mq'] - top_q
    scale_q = jnp.exp(jnp.maximum(delta_q, _FLOOR))
    out['lq'] = scale_q * x['lq']
    gap = (x['m'] - top) - delta_q
    if 'pq' in x:
      out['pq'] = scale * (x['pq'] + gap * x['l'])
    if 'qp' in x:
      out['qp'] = scale_q * (x['qp'] - gap * x['lq'])
  if 'tq' in x:
    out['tq'] = x['tq']
  return out


def join(x: Columns, y: Columns) -> dict[str, jax.Array]:
  """Returns the moments of two sets of ids together, [n, 1] each."""
  top = jnp.maximum(x['m'], y['m'])
  top_q = jnp.maximum(x['mq'], y['mq']) if 'mq' in x else None
  first, second = _lifted(x, top, top_q), _lifted(y, top, top_q)
  out = {k: first[k] + second[k] for k in first} | {'m': top}
  if top_q is not None:
    out['mq'] = top_q
  if 'i' in x:
    out['i'] = jnp.where(x['m'] >= y['m'], x['i'], y['i'])
  return {k: out[k] for k in x}


def over_shards(x: Columns, axis: str) -> dict[str, jax.Array]:
  """Returns the moments [n, 1] over all shards of the vocabulary."""
  top = jax.lax.pmax(x['m'], axis)
  top_q = jax.lax.pmax(x['mq'], axis) if 'mq' in x else None
  lifted = _lifted(x, top, top_q)
  out = added(lifted, axis) | {'m': top}
  if top_q is not None:
    out['mq'] = top_q
  if 'i' in x:
    out['i'] = jax.lax.pmin(jnp.where(x['m'] == top, x['i'], _NO_ID), axis)
  return {k: out[k] for k in x}


def added(x: Columns, axis: str) -> dict[str, jax.Array]:
  """Returns columns [n, 1] summed over a mesh axis, in one all-reduce."""
  names = sorted(x)
  total = jax.lax.psum(jnp.concatenate([x[k] for k in names], axis=1), axis)
  return {k: total[:, i : i + 1] for i, k in enumerate(names)}


def finish(spec: Spec, x: Columns) -> dict[str, jax.Array]:
  """Returns statistics [n, 1] of all ids, and what their gradients need.

  'js' and its 'mix' are not among them: they take a second sweep.
  """
  log_l = jnp.log(x['l'])
  # Subtracting the maximum first keeps the digits that a large lse would eat.
  out = {
    'lse': x['m'] + log_l,
    'logp': (x['t'] - x['m']) - log_l,
    'max': x['m'],
    'log_l': log_l,
  }
  if 'a' in x:
    # No cancellation of large numbers: both terms are at most log V.
    out['entropy'] = log_l - x['a'] / x['l']
  if 'b' in x:
    mean = x['a'] / x['l']
    out['varentropy'] = jnp.maximum(x['b'] / x['l'] - mean * mean, 0.0)
  if 'i' in x:
    out |= {'top_logp': -log_l, 'top_id': x['i']}
  if 's' in x:
    out['collision'] = x['s'] / (x['l'] * x['l'])
  if 'as' in x:
    shift = (out['entropy'] - log_l) * out['collision']
    out['entropy_drift'] = x['as'] / (x['l'] * x['l']) + shift
  if 'mq' in x:
    out |= _paired(spec, x, log_l)
  return out


def _paired(spec: Spec, x: Columns, log_l) -> dict[str, jax.Array]:
  log_lq = jnp.log(x['lq'])
  out = {'ref_max': x['mq'], 'ref_log_l': log_lq}
  if 'tq' in x:
    out['ref_logp'] = (x['tq'] - x['mq']) - log_lq
  if 'pq' in x:
    out['kl_pq'] = x['pq'] / x['l'] - (log_l - log_lq)
  if 'qp' in x:
    out['kl_qp'] = x['qp'] / x['lq'] + (log_l - log_lq)
  return out | {k: jnp.full_like(log_l, jnp.inf) for k in spec.infinite}


def _log_mix(spec: Spec, logp, logq):
  """Returns log((1 - beta) p + beta q)."""
  x, y = logp + math.log1p(-spec.beta), logq + math.log(spec.beta)
  return jnp.maximum(x, y) + jnp.log1p(jnp.exp(-jnp.abs(x - y)))


def mixed(spec: Spec, stats: Columns, s, sq) -> dict[str, jax.Array]:
  """Returns KL(p || mixture) and KL(q || mixture) of a tile, [n, 1] each."""
  logp = (s - stats['max']) - stats['log_l']
  logq = (sq - stats['ref_max']) - stats['ref_log_l']
  mix = _log_mix(spec, logp, logq)
  return {
    'mix': _sum(jnp.exp(logp) * (logp - mix)),
    'mix_q': _sum(jnp.exp(logq) * (logq - mix)),
  }


def with_mix(spec: Spec, stats: Columns, x: Columns) -> dict[str, jax.Array]:
  """Returns the statistics [n, 1] with 'js' from the sums of `mixed`."""
  js = (1 - spec.beta) * x['mix'] + spec.beta * x['mix_q']
  return {**stats, 'mix': x['mix'], 'js': js}


# What `slopes` reads of each row, beside the target and the temperature.
CONSTANTS = (
  'max', 'log_l', 'ref_max', 'ref_log_l', 'one', 'logp', 'square', 'logq',
  'q', 'p', 'plogp', 'hit', 'top', 'top_id', 'js', 'mix',
)  # fmt: skip


def constants(spec: Spec, stats: Columns, g: Columns) -> dict[str, jax.Array]:
  """Returns the row constants of the gradient for cotangents g, [n, 1] each.

  With them d loss / d s_v is
    p (one + logp log p + square log p^2 + logq log q + p p_v + plogp p log p)
    + q q_v + hit [v is the target] + top [v is the most likely] + js's term.
  """
  g = {k: v for k, v in g.items() if k not in spec.infinite}
  own = jnp.where(stats['logp'] > -jnp.inf, g['logp'], 0.0)
  c = {k: stats[k] for k in ('max', 'log_l')}
  c |= {'hit': own, 'one': g['lse'] - own}
  if {'entropy', 'varentropy', 'entropy_drift', 'kl_pq'} & set(g):
    c['logp'] = jnp.zeros_like(c['one'])
  if 'entropy' in g:
    c['one'] -= g['entropy'] * stats['entropy']
    c['logp'] -= g['entropy']
  if 'varentropy' in g:
    slope = 2 * stats['entropy'] + 2
    rest = stats['entropy'] ** 2 + 2 * stats['entropy'] - stats['varentropy']
    c['one'] += g['varentropy'] * rest
    c['logp'] += g['varentropy'] * slope
    c['square'] = g['varentropy']
  if 'top_logp' in g:
    c |= {'top': g['top_logp'], 'top_id': stats['top_id']}
    c['one'] -= g['top_logp']
  if 'collision' in g:
    c['one'] -= 2 * g['collision'] * stats['collision']
    c['p'] = 2 * g['collision']
  if 'entropy_drift' in g:
    _add_drift(c, stats, g['entropy_drift'])
  if 'kl_pq' in g:
    c['one'] -= g['kl_pq'] * stats['kl_pq']
    c['logp'] += g['kl_pq']
    c['logq'] = -g['kl_pq']
  if 'kl_qp' in g:
    c['one'] += g['kl_qp']
    c['q'] = -g['kl_qp']
  if 'js' in g:
    c |= {'js': (1 - spec.beta) * g['js'], 'mix': stats['mix']}
  if spec.reference is not None:
    c |= {k: stats[k] for k in ('ref_max', 'ref_log_l')}
  return c


def _add_drift(c: dict, stats: Columns, g) -> None:
  """Adds the terms of sum p^2 u."""
  both = stats['collision'] * (1 + stats['entropy'])
  c['one'] -= g * (2 * stats['entropy_drift'] + both)
  c['logp'] -= g * stats['collision']
  c['p'] = c.get('p', 0.0) + g * (2 * stats['entropy'] + 1)
  c['plogp'] = 2 * g


def slopes(spec: Spec, c: Columns, s, hit, ids, sq=None):
  """Returns d loss / d scaled logit, f32 [n, v]; see `constants`."""
  logp = (s - c['max']) - c['log_l']
  p = jnp.exp(logp)
  inner = c['one']
  if 'logp' in c:
    inner = inner + c['logp'] * logp
  if 'square' in c:
    inner = inner + c['square'] * logp * logp
  if 'p' in c:
    inner = inner + c['p'] * p
  if 'plogp' in c:
    inner = inner + c['plogp'] * p * logp
  ds = jnp.where(hit, c['hit'], 0.0)
  if sq is not None:
    logq = (sq - c['ref_max']) - c['ref_log_l']
    if 'logq' in c:
      inner = inner + c['logq'] * logq
    if 'js' in c:
      ratio = logp - _log_mix(spec, logp, logq)
      inner = inner + c['js'] * (ratio - c['mix'])
    if 'q' in c:
      ds = ds + c['q'] * jnp.exp(logq)
  if 'top' in c:
    ds = ds + jnp.where(ids.astype(jnp.float32) == c['top_id'], c['top'], 0.0)
  ds = ds + p * inner
  # An id that is banned has no slope, and squares of its logp are infinite.
  return jnp.where(s > 0.5 * NEVER, ds, 0.0)


def names(spec: Spec) -> tuple[str, ...]:
  """Returns all statistics of a spec, those derived of others included."""
  more = [k for k, v in DERIVED.items() if set(v) <= set(spec.names)]
  return (*spec.names, *more)


def with_derived(basic: dict[str, jax.Array]) -> dict[str, jax.Array]:
  """Returns statistics [N] with those that are functions of them."""
  if not set(DERIVED['polarity']) <= set(basic):
    return basic
  there = basic['logp'] > -jnp.inf
  logp = jnp.where(there, basic['logp'], 0.0)
  own = jnp.exp(logp) * (logp + basic['entropy'])
  own = jnp.where(there, own, 0.0)
  return {**basic, 'polarity': basic['entropy_drift'] - own}
