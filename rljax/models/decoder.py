"""One decoder-only transformer, as Flax NNX modules with scanned layers.

The modules hold parameters and one-layer mathematics. `Model` splits them
once into a static graph and a parameter pytree and offers pure functions:

  hidden    prompts [P, S] and responses [B, T] -> hidden states [B, T, D]
  prefill   prompts -> the keys and values of every layer
  decode    one token a row -> hidden states [B, D] and new keys and values
  head      parameters -> the vocabulary head

A prompt is computed once and its rows attend to it. Its last token opens the
response stream, so that position t of that stream predicts `response[:, t]`,
in the sampler and in the scorer alike.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

from flax import nnx
import jax
import jax.numpy as jnp

from rljax.core.types import Array, Head, Params, Prompts
from rljax.models import attention, rope
from rljax.models.rope import Rope

REMAT = ('none', 'dots', 'full')


@dataclasses.dataclass(frozen=True)
class Config:
  """Architecture of a decoder; hashable, so it can key a compilation."""

  vocab_size: int
  width: int
  layers: int
  heads: int
  kv_heads: int
  head_dim: int
  mlp_width: int
  rotary: Rope = Rope()
  norm_eps: float = 1e-6
  qk_norm: bool = False
  qkv_bias: bool = False
  tied: bool = True
  valid_vocab: int | None = None  # ids past it pad the embedding
  dtype: str = 'float32'  # of activations and of what multiplies them
  remat: str = 'dots'

  def __post_init__(self):
    if self.heads % self.kv_heads:
      raise ValueError(
        f'heads={self.heads} must be a multiple of kv_heads={self.kv_heads}.'
      )
    if self.remat not in REMAT:
      raise ValueError(f'remat={self.remat!r} is not among {REMAT}.')
    if self.dtype not in ('float32', 'bfloat16'):
      raise ValueError(f'dtype={self.dtype!r}: use float32 or bfloat16.')


def _random(key, shape, scale, dtype):
  # Uniform with standard deviation `scale`: a normal one takes five times as
  # long to compile.
  limit = scale * 3**0.5
  value = jax.random.uniform(key, shape, minval=-limit, maxval=limit)
  return nnx.Param(value.astype(dtype))


def _as_last(x, rank: int):
  """Returns x [D] with as many axes as `rank` says, all but the last 1."""
  return x.reshape((1,) * (rank - 1) + x.shape)


class Norm(nnx.Module):
  """Root-mean-square normalization with float32 statistics."""

  def __init__(self, size: int, eps: float, dtype):
    self.scale = nnx.Param(jnp.ones(size, dtype))
    self.eps = eps

  def __call__(self, x):
    wide = x.astype(jnp.float32)
    square = jnp.mean(wide * wide, axis=-1, keepdims=True)
    out = wide * jax.lax.rsqrt(square + self.eps)
    scale = self.scale[...].astype(jnp.float32)
    return (out * _as_last(scale, x.ndim)).astype(x.dtype)


class Linear(nnx.Module):
  """x [..., I] -> [..., O]."""

  def __init__(self, size_in, size_out, key, *, scale, bias=False, dtype):
    self.kernel = _random(key, (size_in, size_out), scale, dtype)
    self.bias = nnx.Param(jnp.zeros(size_out, dtype)) if bias else None

  def __call__(self, x):
    # Flat, so that the backward pass is a plain matrix product: contracting
    # two axes at once took 1.6 times as long on CPU.
    y = x.reshape(-1, x.shape[-1]) @ self.kernel[...]
    y = y if self.bias is None else y + self.bias[...][None]
    return y.reshape(*x.shape[:-1], y.shape[-1])


class Attention(nnx.Module):
  """Projections of grouped-query attention."""

  def __init__(self, c: Config, key):
    keys = jax.random.split(key, 4)
    scale, dtype = c.width**-0.5, jnp.dtype(c.dtype)
    wide, narrow = c.heads * c.head_dim, c.kv_heads * c.head_dim
    linear = functools.partial(
      Linear, scale=scale, bias=c.qkv_bias, dtype=dtype
    )
    self.q = linear(c.width, wide, keys[0])
    self.k = linear(c.width, narrow, keys[1])
    self.v = linear(c.width, narrow, keys[2])
    scale = (2 * c.layers * wide) ** -0.5
    self.o = Linear(wide, c.width, keys[3], scale=scale, dtype=dtype)
    norm = functools.partial(Norm, c.head_dim, c.norm_eps, dtype)
    self.q_norm = norm() if c.qk_norm else None
    self.k_norm = norm() if c.qk_norm else None
    self.config = c

  def project(self, x, table):
    """Returns q [..., H, d], k and v [..., K, d] of x, rotated by `table`."""
    c = self.config

    def split(y, n):
      return y.reshape(*y.shape[:-1], n, c.head_dim)

    q = split(self.q(x), c.heads)
    k, v = split(self.k(x), c.kv_heads), split(self.v(x), c.kv_heads)
    if self.q_norm is not None and self.k_norm is not None:
      q, k = self.q_norm(q), self.k_norm(k)
    return rope.rotate(q, table), rope.rotate(k, table), v


class Mlp(nnx.Module):
  """SwiGLU."""

  def __init__(self, c: Config, key):
    keys = jax.random.split(key, 3)
    dtype = jnp.dtype(c.dtype)
    scale = c.width**-0.5
    self.gate = Linear(c.width, c.mlp_width, keys[0], scale=scale, dtype=dtype)
    self.up = Linear(c.width, c.mlp_width, keys[1], scale=scale, dtype=dtype)
    scale = (2 * c.layers * c.mlp_width) ** -0.5
    self.down = Linear(c.mlp_width, c.width, keys[2], scale=scale, dtype=dtype)

  def __call__(self, x):
    return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class Layer(nnx.Module):
  """One pre-norm transformer layer, with attention left to the caller."""

  def __init__(self, c: Config, key):
    first, second = jax.random.split(key)
    norm = functools.partial(Norm, c.width, c.norm_eps, jnp.dtype(c.dtype))
    self.attention_norm, self.mlp_norm = norm(), norm()
    self.attention, self.mlp = Attention(c, first), Mlp(c, second)

  def project(self, x, table):
    """Returns the queries, keys and values of the normalized input."""
    return self.attention.project(self.attention_norm(x), table)

  def finish(self, x, mixed):
    """Returns the layer's output from its input and the mixed values."""
    heads, size = mixed.shape[-2:]
    flat = mixed.reshape(*mixed.shape[:-2], heads * size)
    x = x + self.attention.o(flat)
    return x + self.mlp(self.mlp_norm(x))


class Decoder(nnx.Module):
  """Embedding, stacked layers [L, ...], final norm, optional unembedding."""

  def __init__(self, c: Config, key):
    first, second, third = jax.random.split(key, 3)
    shape, dtype = (c.vocab_size, c.width), jnp.dtype(c.dtype)
    self.embed = _random(first, shape, 0.02, dtype)
    stack = nnx.vmap(lambda k: Layer(c, k), in_axes=0, out_axes=0)
    self.layers = stack(jax.random.split(second, c.layers))
    self.norm = Norm(c.width, c.norm_eps, dtype)
    scale = c.width**-0.5
    self.unembed = None if c.tied else _random(third, shape, scale, dtype)


class Cache(NamedTuple):
  """Keys and values of one layer: each [rows, K, positions, d]."""

  k: Array
  v: Array


@dataclasses.dataclass(frozen=True)
class Model:
  """A decoder's static half and its pure functions over parameters."""

  config: Config

  @functools.cached_property
  def _layer(self):
    return nnx.split(
      nnx.eval_shape(lambda: Layer(self.config, jax.random.key(0)))
    )

  def init(self, key: Array) -> Params:
    """Returns fresh parameters, a nested dict of arrays."""
    return nnx.to_pure_dict(nnx.state(Decoder(self.config, key), nnx.Param))

  def abstract(self) -> Params:
    """Returns the shapes and dtypes of the parameters."""
    return jax.eval_shape(self.init, jax.random.key(0))

  def working(self, params: Params) -> Params:
    """Returns the parameters in the type they are multiplied in.

    A training state keeps them in float32: steps of 1e-5 are lost in bfloat16.
    """
    dtype = jnp.dtype(self.config.dtype)
    return jax.tree.map(lambda x: x.astype(dtype), params)

  def layer(self, params: Params) -> Layer:
    """Returns the module of one layer holding one layer's parameters."""
    graph, state = self._layer
    state = jax.tree.map(lambda x: x, state)
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(graph, state)

  def norm(self, params: Params, x: Array) -> Array:
    """Returns x [..., D] after the final norm."""
    c = self.config
    norm = nnx.eval_shape(lambda: Norm(c.width, c.norm_eps, c.dtype))
    norm.scale = nnx.Param(params['norm']['scale'])
    return norm(x)

  def head(self, params: Params, temperature: Array) -> Head:
    """Returns the vocabulary head at `temperature` [B]."""
    weight = params['embed' if self.config.tied else 'unembed']
    valid = self.config.valid_vocab
    return Head(weight=weight, temperature=temperature, valid=valid)

  def empty(self, rows: int, size: int) -> list[Cache]:
    """Returns zeroed caches [rows, K, size, d] of every layer."""
    c = self.config
    zero = jnp.zeros((rows, c.kv_heads, size, c.head_dim), jnp.dtype(c.dtype))
    return [Cache(zero, zero) for _ in range(c.layers)]

  def _table(self, position: Array) -> tuple[Array, Array]:
    return self.config.rotary.table(position, self.config.head_dim)

  def _prompt(self, prompts: Prompts) -> tuple[Array, Array, Array]:
    """Returns tokens, validity and positions [P, S - 1] without the last."""
    width = prompts.tokens.shape[1]
    position = jnp.arange(width - 1)[None] - (width - prompts.length)[:, None]
    return prompts.tokens[:, :-1], position >= 0, jnp.maximum(position, 0)

  def hidden(self, params: Params, prompts: Prompts, response: Array) -> Array:
    """Returns the states that predict each response token, [B, T, D].

    Args:
      params: of this model.
      prompts: P of them; row b answers prompt b // (B / P).
      response: i32 [B, T].
    """
    count, size = response.shape
    group = count // prompts.uid.shape[0]
    head, valid, position = self._prompt(prompts)
    first = jnp.repeat(prompts.tokens[:, -1:], group, axis=0)
    rows = jnp.concatenate([first, response[:, :-1]], axis=1)
    after = (prompts.length - 1)[:, None] + jnp.arange(size)[None]

    # A prompt and all its rows are one line of tokens [P, S - 1 + G * T] for
    # everything but attention: half as many operations to compile and run.
    def line(x, y):
      return jnp.concatenate([x, y], axis=1)

    tokens = line(head, rows.reshape(-1, group * size))
    table = self._table(line(position, jnp.tile(after, (1, group))))

    def layer(x, weights):
      module = self.layer(weights)
      mixed = attention.shared(*module.project(x, table), valid, group=group)
      return module.finish(x, mixed), None

    layer = _rematerialize(layer, self.config.remat)
    x, _ = jax.lax.scan(layer, params['embed'][tokens], params['layers'])
    x = x[:, head.shape[1] :].reshape(count, size, x.shape[-1])
    return self.norm(params, x)

  def prefill(self, params: Params, prompts: Prompts) -> list[Cache]:
    """Returns each layer's keys and values [P, K, S - 1, d] of the prompts."""
    tokens, valid, position = self._prompt(prompts)
    table = self._table(position)

    def layer(x, weights):
      module = self.layer(weights)
      q, k, v = module.project(x, table)
      x = module.finish(x, attention.causal(q, k, v, valid))
      return x, Cache(k.swapaxes(1, 2), v.swapaxes(1, 2))

    x = params['embed'][tokens]
    _, stacked = jax.lax.scan(layer, x, params['layers'])
    return unstack(stacked, self.config.layers)

  def decode(
    self,
    params: Params,
    layers: list[Params],
    token: Array,
    step: Array,
    live: list[Cache],
    closed: list[list[Cache]],
    start: int,
    prompts: Prompts,
    prompt: list[Cache],
  ) -> tuple[Array, list[Cache]]:
    """Returns the state after one more token a row, and the live caches.

    Args:
      params: of this model.
      layers: the parameters of each layer, see `unstack`.
      token: i32 [B].
      step: i32 [], how many tokens were decoded before this one.
      live: of each layer, the cache being written [B, K, L, d].
      closed: of each layer, the full caches before it.
      start: step of the live cache's first token.
      prompts: P of them; row b answers prompt b // (B / P).
      prompt: of each layer, keys and values of the prompts [P, K, S - 1, d].
    """
    _, valid, _ = self._prompt(prompts)
    group = token.shape[0] // valid.shape[0]
    first = jnp.repeat(prompts.length - 1, group)
    x, slot = params['embed'][token], step - start
    table = self._table(first + step)
    grown = []
    for i, weights in enumerate(layers):
      module = self.layer(weights)
      q, k, v = module.project(x, table)
      cache = Cache(*attention.write(live[i], k, v, slot))
      grown.append(cache)
      mixed = attention.decode(q, prompt[i], valid, closed[i], cache, slot)
      x = module.finish(x, mixed)
    return self.norm(params, x), grown


def _rematerialize(layer, name: str):
  if name == 'none':
    return layer
  policy = {
    'full': jax.checkpoint_policies.nothing_saveable,
    'dots': jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
  }[name]
  return jax.checkpoint(layer, policy=policy)


def unstack(tree: Any, count: int) -> list[Any]:
  """Returns the slices of stacked [L, ...] leaves, a tree for each layer."""
  return [jax.tree.map(lambda x, i=i: x[i], tree) for i in range(count)]
