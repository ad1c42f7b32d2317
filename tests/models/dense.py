"""A decoder over one whole sequence in float64: no cache, no parts, no scan."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from rljax.core.types import Prompts
from rljax.models import decoder, rope


def frequencies(rotary: rope.Rope, size: int) -> list[float]:
  """Returns radians per position of each pair, by the papers' formulas."""
  found = []
  for i in range(size // 2):
    f = rotary.base ** (-2 * i / size)
    s = rotary.scaling
    if isinstance(s, rope.Linear):
      f = f / s.factor
    if isinstance(s, rope.Llama3):
      length = 2 * math.pi / f
      if length > s.original_length / s.low_freq_factor:
        f = f / s.factor
      elif length > s.original_length / s.high_freq_factor:
        smooth = s.original_length / length - s.low_freq_factor
        smooth /= s.high_freq_factor - s.low_freq_factor
        f = (1 - smooth) * f / s.factor + smooth * f
    found.append(f)
  return found


def rotate(x: np.ndarray, rotary: rope.Rope) -> np.ndarray:
  """Returns x [L, H, d], row l rotated by position l."""
  half = x.shape[2] // 2
  turns = np.outer(np.arange(len(x)), frequencies(rotary, x.shape[2]))
  turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * turns)[:, None]
  return np.concatenate([turned.real, turned.imag], axis=2)


def norm(x, scale, eps):
  return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * scale


def mix(q, k, v):
  """Returns causal attention, one head and one position at a time."""
  share = q.shape[1] // k.shape[1]
  out = np.zeros_like(q)
  for h in range(q.shape[1]):
    keys, values = k[:, h // share], v[:, h // share]
    for t in range(len(q)):
      z = keys[: t + 1] @ q[t, h] / math.sqrt(q.shape[2])
      p = np.exp(z - z.max())
      out[t, h] = p @ values[: t + 1] / p.sum()
  return out


def hidden(config: decoder.Config, params, tokens) -> np.ndarray:
  """Returns the state after each token of one sequence, f64 [L, D]."""
  c = config
  params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
  x = params['embed'][np.asarray(tokens)]
  for i in range(c.layers):
    w = jax.tree.map(lambda leaf, i=i: leaf[i], params['layers'])
    x = x + _attend(c, w, norm(x, w['attention_norm']['scale'], c.norm_eps))
    y, mlp = norm(x, w['mlp_norm']['scale'], c.norm_eps), w['mlp']
    gate = y @ mlp['gate']['kernel']
    gate = gate / (1 + np.exp(-gate))
    x = x + (gate * (y @ mlp['up']['kernel'])) @ mlp['down']['kernel']
  return norm(x, params['norm']['scale'], c.norm_eps)


def _attend(c, w, y):
  a, parts = w['attention'], {}
  for name in 'qkv':
    part = y @ a[name]['kernel'] + a[name].get('bias', 0.0)
    part = part.reshape(len(y), -1, c.head_dim)
    if c.qk_norm and name != 'v':
      part = norm(part, a[f'{name}_norm']['scale'], c.norm_eps)
    parts[name] = part if name == 'v' else rotate(part, c.rotary)
  return mix(**parts).reshape(len(y), -1) @ a['o']['kernel']


def responses(config, params, prompts: Prompts, response) -> np.ndarray:
  """Returns what `Model.hidden` should, f64 [B, T, D], row by row."""
  tokens, length = np.asarray(prompts.tokens), np.asarray(prompts.length)
  group = len(response) // len(tokens)
  out = []
  for b, row in enumerate(np.asarray(response)):
    n = length[b // group]
    line = np.concatenate([tokens[b // group][len(tokens[0]) - n :], row])
    out.append(hidden(config, params, line)[n - 1 : -1])
  return np.stack(out)


def inputs(config, lengths, width, group, size, seed=0):
  """Returns prompts of these lengths with noise as padding, and responses."""
  r = np.random.default_rng(seed)
  count = len(lengths)
  tokens = r.integers(0, config.vocab_size, (count, width), np.int32)
  prompts = Prompts(
    tokens=jnp.asarray(tokens),
    length=jnp.asarray(lengths, jnp.int32),
    uid=jnp.arange(count),
  )
  shape = count * group, size
  return prompts, jnp.asarray(r.integers(0, config.vocab_size, shape, np.int32))


def params(config: decoder.Config, seed=0):
  """Returns parameters of useful size: no bias is 0, no scale is 1."""
  r = np.random.default_rng(seed)

  def leaf(path, shape):
    draw = r.normal(size=shape.shape)
    kind = path[-1].key
    if kind in ('scale', 'bias'):
      draw = 0.3 * draw + (kind == 'scale')
    else:
      draw = draw * (1.0 if kind == 'embed' else config.width**-0.5)
    return jnp.asarray(draw, shape.dtype)

  return jax.tree_util.tree_map_with_path(
    leaf, decoder.Model(config).abstract()
  )
