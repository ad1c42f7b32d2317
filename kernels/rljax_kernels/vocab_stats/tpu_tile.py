"""Tiles of a TPU kernel: their sizes, what they read, how a grid is called.

Sizes need not be multiples of a block: what hangs over the edge is garbage,
perhaps NaN, so rows and columns out of range are zeroed before any product.
What a row needs travels in the 128 lanes of one float32 array; ids are exact
below 2**24.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import functools
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from rljax_kernels.vocab_stats import algebra, program
from rljax_kernels.vocab_stats.program import Inputs, Plan, Side

LANES = 128
_ROW = ('target', 'inverse', 'ref_inverse', *algebra.CONSTANTS)
_MIB = 1 << 20
_SIZES = ((512, 512), (256, 512), (256, 256), (128, 256), (128, 128))


@dataclasses.dataclass(frozen=True)
class Chip:
  """What the kernels must know of a chip."""

  vmem: int = 64 * _MIB
  cores: int = 1


CHIPS = {
  'TPU v5 lite': Chip(vmem=128 * _MIB),
  'TPU v5e': Chip(vmem=128 * _MIB),
  'TPU v6 lite': Chip(vmem=128 * _MIB),
  'TPU v6e': Chip(vmem=128 * _MIB),
  'TPU v5': Chip(cores=2),
  'TPU v5p': Chip(cores=2),
}


@dataclasses.dataclass(frozen=True)
class Blocks:
  """Tokens and ids of a tile, and the chip's limit."""

  tokens: int
  ids: int
  limit: int

  def compiler(self, *semantics: Any) -> pltpu.CompilerParams:
    """Returns how the kernel is compiled."""
    return pltpu.CompilerParams(
      dimension_semantics=semantics, vmem_limit_bytes=self.limit
    )


def _bytes(plan: Plan, x: Inputs, tokens: int, ids: int) -> int:
  """Returns the VMEM that a backward tile takes, measured by compiling."""
  size = x.policy.hidden.dtype.itemsize * x.policy.hidden.shape[1]
  total = 8 * size * (tokens + ids) + 6 * 4 * tokens * ids
  if x.reference is not None:
    total += 2 * 4 * tokens * ids
  for side in x.models[1:]:
    size = side.hidden.dtype.itemsize * side.hidden.shape[1]
    total += 4 * size * (tokens + ids)
  return total


def blocks(plan: Plan, x: Inputs, chip: Chip) -> Blocks | None:
  """Returns the largest tile that fits, or None."""
  limit = int(0.95 * chip.vmem)
  for tokens, ids in _SIZES:
    if plan.block is not None:
      tokens = ids = plan.block
    if _bytes(plan, x, tokens, ids) <= 0.85 * chip.vmem:
      return Blocks(tokens, ids, limit)
  return None


def refusal(plan: Plan, x: Inputs, chip: Chip = Chip()) -> str | None:
  """Returns why the kernels cannot serve, or None if they can."""
  for side in x.models:
    width = side.hidden.shape[1]
    if width % LANES:
      return f'a model width of {width} is no multiple of {LANES}'
    if side.hidden.dtype != side.unembed.dtype:
      return 'hidden and unembed are of different types'
  if program.vocab_size(x.policy.unembed, plan.wide) >= 1 << 24:
    return 'ids above 2**24 are not exact in float32'
  if plan.block is not None and plan.block % LANES:
    return f'block={plan.block} is no multiple of {LANES}'
  if blocks(plan, x, chip) is None:
    return f'no tile fits {chip.vmem // _MIB} MiB of VMEM'
  return None


def chip_of(kind: str | None) -> Chip:
  """Returns the chip of a device kind; the smallest if it is unknown."""
  return CHIPS.get(kind or '', Chip())


# What travels in lanes.


def _packed(rows: int, columns: Mapping[str, jax.Array]) -> jax.Array:
  """Returns f32 [N, 128] with the columns at their lanes."""
  zero = jnp.zeros((rows, 1), jnp.float32)
  wide = [columns.get(k, zero).astype(jnp.float32) for k in _ROW]
  stacked = jnp.concatenate(wide, axis=1)
  return jnp.pad(stacked, ((0, 0), (0, LANES - len(_ROW))))


def _aux(x: Inputs, columns: Mapping[str, jax.Array]) -> jax.Array:
  """Returns the lanes of all rows."""
  one = jnp.ones_like(x.targets, jnp.float32)
  own = {'target': x.targets, 'inverse': one}
  if x.policy.inverse is not None:
    own['inverse'] = x.policy.inverse
  if x.reference is not None:
    inverse = x.reference.inverse
    own['ref_inverse'] = one if inverse is None else inverse
  return _packed(x.targets.shape[0], {**own, **columns})


def lane(aux, name: str):
  """Returns the column [n, 1] of this name."""
  k = _ROW.index(name)
  return aux[:, k : k + 1]


def at_lanes(columns: Sequence[jax.Array], shape):
  """Returns an array [n, 128] whose lane k is column k [n, 1]."""
  place = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
  out = jnp.zeros(shape, jnp.float32)
  for k, column in enumerate(columns):
    out = jnp.where(place == k, column, out)
  return out


# One tile inside a kernel.


@dataclasses.dataclass(frozen=True)
class Edge:
  """How many rows and local ids there are."""

  tokens: int
  ids: int


def inside(x, axis: int, begin, limit: int):
  """Returns x with zeros past the edge."""
  if limit % x.shape[axis] == 0:
    return x
  index = jax.lax.broadcasted_iota(jnp.int32, x.shape, axis) + begin
  return jnp.where(index < limit, x, jnp.zeros_like(x))


def read(plan: Plan, edge: Edge, refs, i, j, b: Blocks) -> Inputs:
  """Returns a tile's inputs, zero past the edges."""
  aux = refs[2][...]

  def side(hidden, unembed, wide: bool, inverse: str) -> Side:
    h = inside(hidden[...], 0, i * b.tokens, edge.tokens)
    w = inside(unembed[...], int(wide), j * b.ids, edge.ids)
    return Side(h, w, lane(aux, inverse))

  ref = None
  if len(refs) > 3:
    ref = side(refs[3], refs[4], plan.ref_wide, 'ref_inverse')
  elif plan.spec.reference is not None:
    ref = Side(None, None, lane(aux, 'ref_inverse'))
  policy = side(refs[0], refs[1], plan.wide, 'inverse')
  return Inputs(policy, lane(aux, 'target').astype(jnp.int32), ref)


def logits(plan: Plan, edge: Edge, begin, x: Inputs, j, b: Blocks):
  """Returns the `Tile` of block j of the ids, which count from begin[0]."""
  local = jax.lax.broadcasted_iota(jnp.int32, (1, b.ids), 1) + j * b.ids
  fresh = None if edge.ids % b.ids == 0 else local < edge.ids
  return program.tile(plan, x, begin[0] + local, fresh)


def slopes(plan: Plan, edge: Edge, begin, refs, i, j, b: Blocks):
  """Returns a tile's inputs and its slopes, 0 past the edges."""
  x = read(plan, edge, refs, i, j, b)
  t = logits(plan, edge, begin, x, j, b)
  aux = refs[2][...]
  c = {k: lane(aux, k) for k in _present(plan)}
  dz = program.raw_slopes(plan, t, c)
  return x, inside(dz, 0, i * b.tokens, edge.tokens)


def _present(plan: Plan) -> tuple[str, ...]:
  """Returns the names of the constants of a plan."""
  row = jnp.zeros((1, 1), jnp.float32)
  names = (*plan.spec.names, *algebra.CONSTANTS)
  g = {k: row for k in plan.spec.names if k != 'ref_logp'}
  found = jax.eval_shape(
    functools.partial(algebra.constants, plan.spec),
    dict.fromkeys(names, row),
    g,
  )
  return tuple(found)


# Programs.


def _specs(plan: Plan, x: Inputs, b: Blocks, tokens: int) -> list[pl.BlockSpec]:
  """Returns how inputs are cut; the grid axis `tokens` counts token blocks."""

  def row(width):
    return pl.BlockSpec((b.tokens, width), lambda *at: (at[tokens], 0))

  def unembed(side: Side, wide: bool):
    width = side.hidden.shape[1]
    if wide:
      return pl.BlockSpec((width, b.ids), lambda *at: (0, at[1 - tokens]))
    return pl.BlockSpec((b.ids, width), lambda *at: (at[1 - tokens], 0))

  found = [
    row(x.policy.hidden.shape[1]),
    unembed(x.policy, plan.wide),
    row(LANES),
  ]
  for side in x.models[1:]:
    found += [row(side.hidden.shape[1]), unembed(side, plan.ref_wide)]
  return found


def arrays(x: Inputs, aux) -> list[jax.Array]:
  """Returns what a kernel reads, in order; aux is f32 [N, 128]."""
  policy, *ref = [side[:2] for side in x.models]
  return [*policy, aux, *(array for pair in ref for array in pair)]


def _begin(plan: Plan, x: Inputs) -> jax.Array:
  return jnp.asarray(program.offset(plan, x), jnp.int32).reshape(1)


def _cost(plan: Plan, x: Inputs, products: int, blocks: int) -> pl.CostEstimate:
  """Returns what the compiler should expect of that many products."""
  rows, width = x.policy.hidden.shape
  vocab = program.vocab_size(x.policy.unembed, plan.wide)
  size = x.policy.hidden.dtype.itemsize
  models = len(x.models)
  return pl.CostEstimate(
    flops=2 * (products + models - 1) * rows * vocab * width,
    transcendentals=models * rows * vocab,
    bytes_accessed=models * size * width * (rows + vocab * blocks),
  )


def call(plan: Plan, x: Inputs, columns, kernel, out, b: Blocks, **options):
  """Calls a kernel over a grid of (token, id) blocks, in an order."""
  tokens = options.pop('tokens')
  rows = x.targets.shape[0]
  edge = Edge(rows, program.vocab_size(x.policy.unembed, plan.wide))
  count = (pl.cdiv(edge.tokens, b.tokens), pl.cdiv(edge.ids, b.ids))
  extra: list[Any] = options.pop('extra', [])
  operands = [*arrays(x, _aux(x, columns)), *extra]
  specs = [
    *_specs(plan, x, b, tokens),
    *[pl.BlockSpec(memory_space=pl.ANY) for _ in extra],
  ]
  return pl.pallas_call(
    functools.partial(kernel, plan=plan, edge=edge, b=b),
    out_shape=out,
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=1,
      grid=count if tokens == 0 else count[::-1],
      in_specs=specs,
      out_specs=options.pop('out_specs'),
      scratch_shapes=options.pop('scratch'),
    ),
    compiler_params=b.compiler(*options.pop('semantics')),
    cost_estimate=_cost(plan, x, options.pop('products'), count[0]),
    **options,
  )(_begin(plan, x), *operands)
