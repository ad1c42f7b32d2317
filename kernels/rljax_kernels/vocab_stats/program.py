"""What every implementation takes, and the tile that XLA's share."""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from rljax_kernels.vocab_stats import algebra


class Side(NamedTuple):
  """The arrays of one model, as one shard sees them.

  A reference without hidden states shares the policy's logits before the
  temperature.
  """

  hidden: Any  # [N, D]
  unembed: Any  # [V, D], or [D, V]
  inverse: jax.Array | None  # f32 [N, 1], 1 / temperature; None for 1


class Inputs(NamedTuple):
  """The arrays of a program."""

  policy: Side
  targets: jax.Array  # i32 [N, 1]
  reference: Side | None = None

  @property
  def models(self) -> tuple[Side, ...]:
    """The sides that have hidden states."""
    sides = (self.policy, self.reference)
    return tuple(s for s in sides if s is not None and s.hidden is not None)


@dataclasses.dataclass(frozen=True)
class Plan:
  """What is fixed when a program is traced.

  Attributes:
    spec: the statistics.
    wide: the policy's unembedding is [D, V].
    ref_wide: the reference's is.
    vocab_axis: mesh axis of the program that splits the vocabulary, or None.
    block: tokens or ids a block, or None to choose.
  """

  spec: algebra.Spec = algebra.Spec()
  wide: bool = False
  ref_wide: bool = False
  vocab_axis: str | None = None
  block: int | None = None


class Tile(NamedTuple):
  """Logits of some rows and ids."""

  s: jax.Array  # f32 [n, v]
  slope: jax.Array | None  # of s in the raw logits, [n, v], [n, 1] or 1
  hit: jax.Array  # bool [n, v], where the target is
  ids: jax.Array  # i32 [1, v]
  sq: jax.Array | None = None
  at: jax.Array | None = None  # i32 [n, 1], the target's column, if it is known

  def own(self, values: jax.Array) -> jax.Array:
    """Returns what values [n, v] hold at the target, [n, 1]; 0 if elsewhere."""
    if self.at is None:
      return jnp.sum(jnp.where(self.hit, values, 0.0), axis=1, keepdims=True)
    size = values.shape[1]
    found = jnp.take_along_axis(values, jnp.clip(self.at, 0, size - 1), axis=1)
    return jnp.where((self.at >= 0) & (self.at < size), found, 0.0)


class Implementation(Protocol):
  """How one kind of program sweeps over the vocabulary."""

  def sweep(
    self, plan: Plan, x: Inputs, stats: algebra.Columns | None
  ) -> dict[str, jax.Array]:
    """Returns moments [N, 1] of the local ids, given stats of `mixed`."""
    ...

  def pull(
    self, plan: Plan, x: Inputs, constants: algebra.Columns
  ) -> tuple[jax.Array, jax.Array]:
    """Returns the local cotangents of hidden (f32 [N, D]) and unembed."""
    ...


def vocab_size(unembed: jax.Array, wide: bool) -> int:
  """Returns how many ids an unembedding, [V, D] or wide [D, V], has."""
  return unembed.shape[1 if wide else 0]


def dot(x, y, wide: bool):
  """Returns x [n, k] times y [v, k] transposed, or y [k, v] if wide, in f32."""
  dims = (((1,), (0,)), ((), ())) if wide else (((1,), (1,)), ((), ()))
  return _product(x, y, dims)


def _product(x, y, dims):
  # Accelerators would round float32 inputs of a product to fewer bits.
  exact = jnp.float32 in (x.dtype, y.dtype)
  return jax.lax.dot_general(
    x,
    y,
    dims,
    precision=jax.lax.Precision.HIGHEST if exact else None,
    preferred_element_type=jnp.float32,
  )


def offset(plan: Plan, x: Inputs):
  """Returns the first id of this shard."""
  if plan.vocab_axis is None:
    return 0
  size = vocab_size(x.policy.unembed, plan.wide)
  return jax.lax.axis_index(plan.vocab_axis) * size


def tile(plan: Plan, x: Inputs, ids, fresh=None) -> Tile:
  """Returns the logits of all rows of x and of the ids of its unembeddings.

  Args:
    plan: of the program.
    x: inputs whose unembeddings hold just the ids.
    ids: i32 [1, v].
    fresh: None or bool [1, v], columns that count.
  """
  spec = plan.spec
  raw = dot(x.policy.hidden, x.policy.unembed, plan.wide)
  s, slope = algebra.bent(raw, x.policy.inverse, spec.policy, ids, fresh)
  hit = ids == x.targets
  if fresh is not None:
    hit &= fresh
  if x.reference is None or spec.reference is None:
    return Tile(s, slope, hit, ids)
  q = x.reference
  if q.hidden is not None:
    raw = dot(q.hidden, q.unembed, plan.ref_wide)
  sq, _ = algebra.bent(raw, q.inverse, spec.reference, ids, fresh)
  return Tile(s, slope, hit, ids, sq)


def collect(plan: Plan, t: Tile, stats: algebra.Columns | None):
  """Returns a tile's moments, or given stats its share of the second sweep."""
  if stats is None:
    return algebra.of_tile(plan.spec, t.s, t.own, t.ids, t.sq)
  return algebra.mixed(plan.spec, stats, t.s, t.sq)


def statistics(
  plan: Plan,
  x: Inputs,
  sweep: Callable[[algebra.Columns | None], dict[str, jax.Array]],
) -> dict[str, jax.Array]:
  """Returns the statistics [n, 1] of the ids that a sweep goes over."""
  moments = sweep(None)
  if plan.vocab_axis is not None:
    moments = algebra.over_shards(moments, plan.vocab_axis)
  stats = _no_wild_read(plan, x, algebra.finish(plan.spec, moments))
  if 'js' not in plan.spec.names:
    return stats
  second = sweep(stats)
  if plan.vocab_axis is not None:
    second = algebra.added(second, plan.vocab_axis)
  return algebra.with_mix(plan.spec, stats, second)


def _no_wild_read(plan: Plan, x: Inputs, stats: dict) -> dict:
  """Returns -inf as log-prob of targets that cannot be drawn."""
  vocab = vocab_size(x.policy.unembed, plan.wide)
  if plan.vocab_axis is not None:
    vocab *= jax.lax.axis_size(plan.vocab_axis)
  for name, bend in (
    ('logp', plan.spec.policy),
    ('ref_logp', plan.spec.reference),
  ):
    if name in stats and bend is not None:
      limit = min(bend.valid or vocab, vocab)
      there = (x.targets >= 0) & (x.targets < limit)
      stats = {**stats, name: jnp.where(there, stats[name], -jnp.inf)}
  return stats


def _varying(x: jax.Array) -> frozenset[str]:
  """Returns the mesh axes over which x is known to differ."""
  return jax.typeof(x).manual_axis_type.varying


def varying_more(x: jax.Array, y: jax.Array) -> tuple[str, ...]:
  """Returns the mesh axes over which x and not y [...] differ.

  Inside a `shard_map` with `check_vma=True`; elsewhere there are none.
  """
  return tuple(sorted(_varying(x) - _varying(y)))


def varying_as(x: Any, *like: jax.Array) -> Any:
  """Returns arrays [...] that differ over all axes over which `like` do."""
  axes = frozenset().union(*(_varying(y) for y in like))

  def cast(a):
    more = tuple(sorted(axes - _varying(a)))
    return jax.lax.pcast(a, more, to='varying') if more else a

  return jax.tree.map(cast, x)


def raw_slopes(plan: Plan, t: Tile, constants: Mapping[str, jax.Array]):
  """Returns d loss / d raw logit of a tile, f32 [n, v]."""
  ds = algebra.slopes(plan.spec, constants, t.s, t.hit, t.ids, t.sq)
  return ds if t.slope is None else ds * t.slope


def products(dz, hidden, unembed, wide: bool):
  """Returns f32 cotangents of hidden and unembed for slopes dz [n, v]."""
  return (
    hidden_product(dz, unembed, wide),
    unembed_product(dz, hidden, wide),
  )


def hidden_product(dz, unembed, wide: bool):
  """Returns the f32 cotangent of hidden [n, D] for slopes dz [n, v]."""
  return dot(dz.astype(unembed.dtype), unembed, not wide)


def unembed_product(dz, hidden, wide: bool):
  """Returns the f32 cotangent of unembed, [v, D] or wide, for dz [n, v]."""
  dz = dz.astype(hidden.dtype)
  pair = (hidden, dz) if wide else (dz, hidden)
  return _product(*pair, (((0,), (0,)), ((), ())))
