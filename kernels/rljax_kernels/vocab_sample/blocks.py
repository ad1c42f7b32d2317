"""Sampling by vocabulary blocks: sums of sub-blocks, then one sub-block.

Pass 1 goes over the vocabulary in blocks and keeps a few sums of each
sub-block of 128 ids. Everything after it reads these sums in the order of the
ids, so the size of the blocks decides nothing but speed. Pass 2 computes the
logits of the one sub-block again that holds the uniform.
"""

import dataclasses
from typing import NamedTuple

import jax
from jax.extend.random import threefry2x32_p
import jax.numpy as jnp

from rljax_kernels import logits
from rljax_kernels.vocab_sample import cdf


class Drawn(NamedTuple):
  """A sampled id of each row and what is known about it.

  Log-probs and entropy are in nats, of the logits after soft cap and bans.

  Attributes:
    token: i32 [N].
    logp: f32 [N], of the distribution the id was drawn from: at the
      temperature and truncated. A forced id has `logp_full` here.
    logp_full: f32 [N], at the temperature, without truncation.
    logp_unit: f32 [N], at temperature 1, without truncation.
    entropy: f32 [N], at the temperature, without truncation.
    kept: f32 [N], the probability mass that truncation kept, in (0, 1]; 1
      without truncation. Where an id was drawn, logp = logp_full - log(kept).
  """

  token: jax.Array
  logp: jax.Array
  logp_full: jax.Array
  logp_unit: jax.Array
  entropy: jax.Array
  kept: jax.Array


@dataclasses.dataclass(frozen=True)
class Plan:
  """How a platform goes over the vocabulary.

  Attributes:
    block: ids a block; a multiple of 128 or at least the vocabulary.
    serial: compute pass 2 row by row.
  """

  block: int
  serial: bool


class Rows(NamedTuple):
  """What is known of each row, apart from its hidden state."""

  inverse: jax.Array | None  # f32 [N], 1 / temperature; None for 1
  uniform: jax.Array | None = None  # f32 [N]
  forced: jax.Array | None = None  # i32 [N], negative where free
  keys: jax.Array | None = None  # u32 [N, 2], of Gumbel noise


class SubSums(NamedTuple):
  """What pass 1 keeps of each sub-block, [N, S] each; z is a logit."""

  top: jax.Array  # largest z
  mass: jax.Array  # sum of exp((z - top) / temperature)
  spread: jax.Array  # sum of that times (z - top) / temperature
  unit: jax.Array  # sum of exp(z - top)
  score: jax.Array | None = None  # largest z / temperature + noise
  best: jax.Array | None = None  # i32, place of `score` in the sub-block


class Moments(NamedTuple):
  """Moments over the whole vocabulary, f32 [N] each."""

  top: jax.Array
  log_total: jax.Array  # lse at the temperature is top / temperature + this
  log_unit: jax.Array  # at temperature 1
  entropy: jax.Array


def scan(hidden, unembed, rows: Rows, form: logits.Form, block: int):
  """Returns `SubSums`, and the logits [N, S, 128] where one block is all."""
  vocab = form.width(unembed)

  def one(start, width):
    z = logits.of_range(hidden, unembed, start, width, form)
    z = cdf.split(z, -jnp.inf)
    return summarize(z, rows, start + form.offset(unembed)), z

  if block >= vocab:
    return one(0, vocab)
  whole, per = vocab // cdf.WIDTH, block // cdf.WIDTH
  like = jax.eval_shape(lambda: one(0, block)[0])
  empty = jax.tree.map(
    lambda x: jnp.zeros((x.shape[0], -(-vocab // cdf.WIDTH)), x.dtype), like
  )

  def put(all_, new, at):
    put_one = jax.lax.dynamic_update_slice_in_dim
    return jax.tree.map(lambda x, y: put_one(x, y, at, 1), all_, new)

  def body(i, sums):
    # The last block lies over the one before it, and writes the same again.
    at = jnp.minimum(i * per, whole - per)
    return put(sums, one(at * cdf.WIDTH, block)[0], at)

  sums = jax.lax.fori_loop(0, -(-whole // per), body, empty)
  if vocab % cdf.WIDTH:
    sums = put(sums, one(whole * cdf.WIDTH, vocab % cdf.WIDTH)[0], whole)
  return sums, None


def summarize(z, rows: Rows, start) -> SubSums:
  """Returns the sums of logits [N, S, 128] of ids from `start`."""
  top = jnp.maximum(jnp.max(z, axis=2), logits.LOW)
  shifted = z - top[..., None]
  scaled = jnp.maximum(times(shifted, rows.inverse), logits.LOW)
  mass = jnp.exp(scaled)
  unit = mass if rows.inverse is None else jnp.exp(shifted)
  score = best = None
  if rows.keys is not None:
    ids = start + jnp.arange(z.shape[1] * cdf.WIDTH)
    noise = _gumbel(rows.keys, ids).reshape(z.shape)
    noisy = times(z, rows.inverse) + noise
    score, best = jnp.max(noisy, axis=2), jnp.argmax(noisy, axis=2)
  return SubSums(
    top,
    jnp.sum(mass, axis=2),
    jnp.sum(mass * scaled, axis=2),
    jnp.sum(unit, axis=2),
    score,
    best,
  )


def times(x: jax.Array, inverse: jax.Array | None) -> jax.Array:
  """Returns x [N, ...] over the temperature; see `Rows`."""
  if inverse is None:
    return x
  return x * inverse.reshape(-1, *(1,) * (x.ndim - 1))


def _gumbel(keys, ids) -> jax.Array:
  """Returns noise [N, W] that is a function of a row's key and the id."""
  shape = keys.shape[0], ids.shape[0]
  halves = [jnp.broadcast_to(keys[:, i, None], shape) for i in (0, 1)]
  count = jnp.broadcast_to(ids.astype(jnp.uint32)[None], shape)
  bits, _ = threefry2x32_p.bind(*halves, count, jnp.zeros_like(count))
  # 23 bits and a half: never 0, never 1.
  uniform = ((bits >> 9).astype(jnp.float32) + 0.5) * 2.0**-23
  return -jnp.log(-jnp.log(uniform))


def moments(sums: SubSums, inverse: jax.Array | None) -> Moments:
  """Returns moments [N] of the sub-blocks [N, S] of all shards."""
  top = jnp.max(sums.top, axis=1)
  weight, unit = weights(sums, inverse), sums.top - top[:, None]
  total = jnp.sum(weight * sums.mass, axis=1)
  shift = jnp.maximum(times(unit, inverse), logits.LOW)
  spread = jnp.sum(weight * (sums.spread + sums.mass * shift), axis=1)
  log_total = jnp.log(total)
  log_unit = jnp.log(jnp.sum(jnp.exp(unit) * sums.unit, axis=1))
  # No cancellation of large numbers: both terms are at most log V.
  return Moments(top, log_total, log_unit, log_total - spread / total)


def weights(sums: SubSums, inverse: jax.Array | None) -> jax.Array:
  """Returns what turns masses of sub-blocks into those of a row, [N, S]."""
  top = jnp.max(sums.top, axis=1, keepdims=True)
  return jnp.exp(times(sums.top - top, inverse))


def draw(hidden, unembed, rows: Rows, form: logits.Form, plan: Plan) -> Drawn:
  """Returns ids drawn from the whole softmax, the same on every shard."""
  own, z = scan(hidden, unembed, rows, form, plan.block)
  sums = own
  if form.axis is not None:
    sums = jax.tree.map(
      lambda x: jax.lax.all_gather(x, form.axis, axis=1, tiled=True), own
    )
  # To gather columns, a TPU would copy the whole unembedding.
  shard = _Shard(hidden, unembed, z, form, plan.serial or form.columns)
  token = force(_token(shard, rows, sums), rows.forced)
  chosen = _logit(shard, token)
  return drawn(token, chosen, moments(sums, rows.inverse), rows.inverse)


def force(token: jax.Array, forced: jax.Array | None) -> jax.Array:
  """Returns ids [N], the forced ones where those are not negative."""
  return token if forced is None else jnp.where(forced >= 0, forced, token)


def drawn(token, chosen, found: Moments, inverse) -> Drawn:
  """Returns what is known of ids with logits `chosen`, f32 [N]."""
  above = chosen - found.top
  logp = times(above, inverse) - found.log_total
  return Drawn(
    token=token,
    logp=logp,
    logp_full=logp,
    logp_unit=above - found.log_unit,
    entropy=found.entropy,
    kept=jnp.ones_like(logp),
  )


class _Shard(NamedTuple):
  """One shard's part of the logits."""

  hidden: jax.Array
  unembed: jax.Array
  z: jax.Array | None  # [N, S, 128] where one block held the vocabulary
  form: logits.Form
  serial: bool

  @property
  def width(self) -> int:
    return self.form.width(self.unembed)

  @property
  def subs(self) -> int:
    return -(-self.width // cdf.WIDTH)


def _token(shard: _Shard, rows: Rows, sums: SubSums) -> jax.Array:
  """Returns ids, i32 [N]; `sums` are of all shards."""
  if sums.score is not None and sums.best is not None:
    sub = jnp.argmax(sums.score, axis=1)
    owner, local = sub // shard.subs, sub % shard.subs
    place = owner * shard.width + local * cdf.WIDTH
    return (place + cdf.take(sums.best, sub)).astype(jnp.int32)
  if rows.uniform is None:
    return _inside(shard, rows, jnp.argmax(sums.top, axis=1), None)
  mass = sums.mass * weights(sums, rows.inverse)
  return _inside(shard, rows, *cdf.locate(mass, rows.uniform))


def _inside(shard: _Shard, rows: Rows, sub, share) -> jax.Array:
  """Returns the id in sub-block `sub` [N], at `share` [N] or the likeliest."""
  axis, here = shard.form.axis, None
  if axis is not None:
    sub = sub - jax.lax.axis_index(axis) * shard.subs
    here = (sub >= 0) & (sub < shard.subs)
    sub = jnp.clip(sub, 0, shard.subs - 1)
  start, z = _sub_block(shard, sub)
  if share is None:
    index = jnp.argmax(z, axis=1)
  else:
    top = jnp.max(z, axis=1, keepdims=True)
    mass = jnp.exp(times(z - top, rows.inverse))
    index, _ = cdf.locate(mass, share)
  token = start + index + shard.form.offset(shard.unembed)
  if here is not None:
    token = jax.lax.psum(jnp.where(here, token, 0), axis)
  return token.astype(jnp.int32)


def _sub_block(shard: _Shard, sub):
  """Returns logits [N, 128] around sub-block `sub` [N], and their first id."""
  start = sub * cdf.WIDTH
  if shard.z is not None:
    at = sub[:, None, None]
    return start, jnp.take_along_axis(shard.z, at, axis=1)[:, 0]
  # The last one may be short: then ids before it are read and banned.
  begin = jnp.minimum(start, shard.width - cdf.WIDTH)
  z = logits.of_spans(
    shard.hidden, shard.unembed, begin, cdf.WIDTH, shard.form, shard.serial
  )
  own = begin[:, None] + jnp.arange(cdf.WIDTH)[None] >= start[:, None]
  return begin, jnp.where(own, z, -jnp.inf)


def _logit(shard: _Shard, token) -> jax.Array:
  """Returns the logits of ids [N]; -inf outside the vocabulary."""
  local = token - shard.form.offset(shard.unembed)
  here = (local >= 0) & (local < shard.width)
  local = jnp.clip(local, 0, shard.width - 1)
  if shard.z is None:
    z = logits.of_spans(
      shard.hidden, shard.unembed, local, 1, shard.form, shard.serial
    )[:, 0]
  else:
    z = cdf.take(shard.z.reshape(local.shape[0], shard.subs * cdf.WIDTH), local)
  z = jnp.where(here, z, -jnp.inf)
  axis = shard.form.axis
  return z if axis is None else jax.lax.pmax(z, axis)
