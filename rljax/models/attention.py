"""Attention over parts: a shared prompt, closed segments, the live one.

Each part contributes unnormalized values and a normalizer under one common
maximum, so parts are never concatenated. Scores and sums are float32.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from rljax.core.types import Array

_NEVER = -1e30  # finite: a part without valid keys must not make NaN


def causal(q: Array, k: Array, v: Array, valid: Array) -> Array:
  """Returns causal attention within a sequence, [P, S, H, d].

  Args:
    q: [P, S, H, d].
    k: [P, S, K, d].
    v: [P, S, K, d].
    valid: bool [P, S], keys that exist.
  """
  size = q.shape[1]
  seen = jnp.tril(jnp.ones((1, size, size), bool)) & valid[:, None]
  q = _group(q, k.shape[2])
  scores = _scores(q, k.swapaxes(1, 2), seen[:, None, None])
  return _ungroup(_merge([(scores, v.swapaxes(1, 2))], q.dtype))


def shared(q: Array, k: Array, v: Array, valid: Array, *, group: int) -> Array:
  """Returns attention in lines of a prompt and the rows that answer it.

  A line is a prompt of S tokens followed by G rows of T tokens. Prompt tokens
  see the prompt, row tokens see the prompt and their own row, causally.

  Args:
    q: [P, S + G * T, H, d].
    k: [P, S + G * T, K, d].
    v: [P, S + G * T, K, d].
    valid: bool [P, S], prompt keys that exist.
    group: G.

  Returns:
    [P, S + G * T, H, d].
  """
  lines, size = valid.shape
  first = causal(q[:, :size], k[:, :size], v[:, :size], valid)
  prompt = _Shared(k[:, :size].swapaxes(1, 2), v[:, :size].swapaxes(1, 2))

  def rows(x):
    return x[:, size:].reshape(lines * group, -1, *x.shape[2:])

  q, k, v = rows(q), rows(k), rows(v)
  q = _group(q, k.shape[2])
  length = k.shape[1]
  seen = jnp.tril(jnp.ones((1, 1, 1, length, length), bool))
  own = _scores(q, k.swapaxes(1, 2), seen)
  parts = [(own, v.swapaxes(1, 2)), (prompt.scores(q, valid), prompt)]
  rest = _ungroup(_merge(parts, q.dtype))
  return jnp.concatenate([first, rest.reshape(lines, -1, *rest.shape[2:])], 1)


def decode(q, prompt, prompt_valid, closed: Sequence, live, slot) -> Array:
  """Returns attention of one new token a row, [B, H, d].

  Args:
    q: [B, H, d].
    prompt: keys and values [P, K, S, d]; row b reads prompt b // (B / P).
    prompt_valid: bool [P, S].
    closed: full segments, keys and values [B, K, L, d] each.
    live: the segment being written [B, K, L, d].
    slot: i32 [], the last written position of the live segment.
  """
  q = _group(q[:, None], live.k.shape[1])
  shared = _Shared(prompt.k, prompt.v)
  seen = (jnp.arange(live.k.shape[2]) <= slot)[None, None, None, None]
  parts = [(shared.scores(q, prompt_valid), shared)]
  parts += [(_scores(q, c.k, None), c.v) for c in closed]
  parts += [(_scores(q, live.k, seen), live.v)]
  return _ungroup(_merge(parts, q.dtype))[:, 0]


def write(cache, k: Array, v: Array, slot: Array) -> tuple[Array, Array]:
  """Returns the cache's arrays [B, K, L, d] with k, v [B, K, d] at `slot`."""

  def put(x, new):
    return jax.lax.dynamic_update_slice_in_dim(
      x, new[:, :, None].astype(x.dtype), slot, axis=2
    )

  return put(cache.k, k), put(cache.v, v)


class _Shared:
  """Keys and values [P, K, S, d] that each serve B / P rows."""

  def __init__(self, k, v):
    self.k, self.v = k, v

  def scores(self, q, valid):
    """Returns scores [B, K, R, T, S] of q [B, K, R, T, d]."""
    scores = _scores(self._fold(q), self.k, valid[:, None, None, None])
    return self._unfold(scores, q.shape)

  def values(self, weights):
    """Returns weighted values [B, K, R, T, d] of weights [B, K, R, T, S]."""
    return self._unfold(_values(self._fold(weights), self.v), weights.shape)

  def _fold(self, x):
    """[B, K, R, T, n] -> [P, K, R, G * T, n]: rows of a group side by side."""
    b, k, r, t, n = x.shape
    prompts = self.k.shape[0]
    group = b // prompts
    x = x.reshape(prompts, group, k, r, t, n).transpose(0, 2, 3, 1, 4, 5)
    return x.reshape(prompts, k, r, group * t, n)

  def _unfold(self, x, shape):
    b, k, r, t, _ = shape
    prompts, n = self.k.shape[0], x.shape[-1]
    x = x.reshape(prompts, k, r, b // prompts, t, n)
    return x.transpose(0, 3, 1, 2, 4, 5).reshape(b, k, r, t, n)


def _group(q, kv_heads):
  """[B, T, H, d] -> [B, K, R, T, d], scaled: R queries share a key head."""
  b, t, h, d = q.shape
  q = (q * d**-0.5).reshape(b, t, kv_heads, h // kv_heads, d)
  return q.transpose(0, 2, 3, 1, 4)


def _ungroup(x):
  """[B, K, R, T, d] -> [B, T, H, d]."""
  b, k, r, t, d = x.shape
  return x.transpose(0, 3, 1, 2, 4).reshape(b, t, k * r, d)


def _scores(q, k, seen):
  """q [B, K, R, T, d], k [B, K, S, d] -> f32 [B, K, R, T, S]."""
  b, h, r, t, d = q.shape
  s = jnp.einsum(
    'bhnd,bhsd->bhns',
    q.reshape(b, h, r * t, d),
    k,
    preferred_element_type=jnp.float32,
  ).reshape(b, h, r, t, k.shape[2])
  return s if seen is None else jnp.where(seen, s, _NEVER)


def _values(weights, v):
  """weights [B, K, R, T, S], v [B, K, S, d] -> f32 [B, K, R, T, d]."""
  b, h, r, t, s = weights.shape
  out = jnp.einsum(
    'bhns,bhsd->bhnd',
    weights.reshape(b, h, r * t, s).astype(v.dtype),
    v,
    preferred_element_type=jnp.float32,
  )
  return out.reshape(b, h, r, t, v.shape[3])


def _merge(parts, dtype):
  """Returns softmax over all parts' scores applied to their values."""
  top = jnp.float32(_NEVER)
  for scores, _ in parts:
    # `initial` lets a part be empty: a prompt of one token has no cache.
    part = jnp.max(scores, axis=-1, keepdims=True, initial=_NEVER)
    top = jnp.maximum(top, jax.lax.stop_gradient(part))
  total = out = jnp.float32(0)
  for scores, v in parts:
    weights = jnp.exp(scores - top)
    total += jnp.sum(weights, axis=-1, keepdims=True)
    out += v.values(weights) if isinstance(v, _Shared) else _values(weights, v)
  return (out / total).astype(dtype)
