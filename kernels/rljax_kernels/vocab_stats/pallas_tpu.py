"""Vocabulary statistics on a TPU: tiles of logits that never leave the core.

The grid goes over blocks of tokens and of ids; moments of a row wait in VMEM
until its last tile. Backward passes recompute each tile:

  fused_v  vocabulary outside, tokens inside: the unembedding's cotangent waits
           in VMEM, that of the hidden states is read and written back in HBM,
           float32 [N, D]; 6 N V D operations.
  split    a kernel for each cotangent; 8 N V D operations, nothing in HBM.
"""

import functools

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from rljax_kernels.vocab_stats import algebra, program, tpu_tile
from rljax_kernels.vocab_stats.program import Inputs, Plan, Side
from rljax_kernels.vocab_stats.tpu_tile import Blocks, Chip

# What the second sweep, for 'js', reads of the first.
_SECOND = ('max', 'log_l', 'ref_max', 'ref_log_l')


def _fit(plan: Plan, x: Inputs, chip: Chip) -> Blocks:
  found = tpu_tile.blocks(plan, x, chip)
  assert found is not None  # `refusal` was asked before
  return found


def sweep(plan: Plan, x: Inputs, stats, chip: Chip):
  """Returns the moments of all local ids; see `Implementation`."""
  b = _fit(plan, x, chip)
  names = plan.spec.moments if stats is None else ('mix', 'mix_q')
  columns = {}
  if stats is not None:
    columns = {k: stats[k] for k in _SECOND}
  out = tpu_tile.call(
    plan,
    x,
    columns,
    functools.partial(_sweep_kernel, names=names, second=stats is not None),
    jax.ShapeDtypeStruct((x.targets.shape[0], tpu_tile.LANES), jnp.float32),
    b,
    tokens=0,
    out_specs=pl.BlockSpec((b.tokens, tpu_tile.LANES), lambda i, j, *_: (i, 0)),
    scratch=[pltpu.VMEM((b.tokens, tpu_tile.LANES), jnp.float32)],
    semantics=('parallel', 'arbitrary'),
    products=1,
    name='vocab_stats_forward',
  )
  return {name: out[:, k : k + 1] for k, name in enumerate(names)}


def _sweep_kernel(begin, *refs, plan, edge, b, names, second):
  *refs, out, total = refs
  i, j = pl.program_id(0), pl.program_id(1)

  @pl.when(j == 0)
  def _():
    first = algebra.start(plan.spec, b.tokens)
    zero = jnp.zeros((b.tokens, 1), jnp.float32)
    columns = [zero if second else first[k] for k in names]
    total[...] = tpu_tile.at_lanes(columns, total.shape)

  x = tpu_tile.read(plan, edge, refs, i, j, b)
  aux = refs[2][...]
  stats = {k: tpu_tile.lane(aux, k) for k in _SECOND} if second else None
  found = program.collect(
    plan, tpu_tile.logits(plan, edge, begin, x, j, b), stats
  )
  before = {name: total[:, k : k + 1] for k, name in enumerate(names)}
  if second:
    joined = {name: before[name] + found[name] for name in names}
  else:
    joined = algebra.join(before, found)
  total[...] = tpu_tile.at_lanes([joined[k] for k in names], total.shape)

  @pl.when(j == pl.num_programs(1) - 1)
  def _():
    out[...] = total[...]


def pull(plan: Plan, x: Inputs, constants: algebra.Columns, chip: Chip):
  """Returns cotangents of hidden and unembed; see `Implementation`."""
  b = _fit(plan, x, chip)
  # The fused kernel reads what it wrote two steps before, on one core.
  # Over shards of the vocabulary its float32 [N, D] would be the largest array.
  whole = plan.vocab_axis is None
  if chip.cores > 1 or x.targets.shape[0] <= b.tokens or not whole:
    return _split(plan, x, constants, b)
  return _fused(plan, x, constants, b)


def _like(side: Side):
  return jax.ShapeDtypeStruct(side.unembed.shape, side.unembed.dtype)


def _split(plan: Plan, x: Inputs, constants, b: Blocks):
  """Returns both cotangents from a kernel each."""
  hidden = x.policy.hidden
  width = hidden.shape[1]
  d_hidden = tpu_tile.call(
    plan,
    x,
    constants,
    _hidden_kernel,
    jax.ShapeDtypeStruct(hidden.shape, hidden.dtype),
    b,
    tokens=0,
    out_specs=pl.BlockSpec((b.tokens, width), lambda i, j, *_: (i, 0)),
    scratch=[pltpu.VMEM((b.tokens, width), jnp.float32)],
    semantics=('parallel', 'arbitrary'),
    products=2,
    name='vocab_stats_backward_hidden',
  )
  d_unembed = tpu_tile.call(
    plan,
    x,
    constants,
    _unembed_kernel,
    _like(x.policy),
    b,
    tokens=1,
    out_specs=_unembed_spec(plan, width, b),
    scratch=[_unembed_scratch(plan, width, b)],
    semantics=('parallel', 'arbitrary'),
    products=2,
    name='vocab_stats_backward_unembed',
  )
  return d_hidden, d_unembed


def _unembed_spec(plan: Plan, width: int, b: Blocks) -> pl.BlockSpec:
  if plan.wide:
    return pl.BlockSpec((width, b.ids), lambda j, i, *_: (0, j))
  return pl.BlockSpec((b.ids, width), lambda j, i, *_: (j, 0))


def _unembed_scratch(plan: Plan, width: int, b: Blocks):
  shape = (width, b.ids) if plan.wide else (b.ids, width)
  return pltpu.VMEM(shape, jnp.float32)


def _hidden_kernel(begin, *refs, plan, edge, b):
  *refs, out, total = refs
  i, j = pl.program_id(0), pl.program_id(1)

  @pl.when(j == 0)
  def _():
    total[...] = jnp.zeros_like(total)

  x, dz = tpu_tile.slopes(plan, edge, begin, refs, i, j, b)
  side = x.policy
  total[...] += program.products(dz, side.hidden, side.unembed, plan.wide)[0]

  @pl.when(j == pl.num_programs(1) - 1)
  def _():
    out[...] = total[...].astype(out.dtype)


def _unembed_kernel(begin, *refs, plan, edge, b):
  *refs, out, total = refs
  j, i = pl.program_id(0), pl.program_id(1)

  @pl.when(i == 0)
  def _():
    total[...] = jnp.zeros_like(total)

  x, dz = tpu_tile.slopes(plan, edge, begin, refs, i, j, b)
  total[...] += program.products(
    dz, x.policy.hidden, x.policy.unembed, plan.wide
  )[1]

  @pl.when(i == pl.num_programs(1) - 1)
  def _():
    out[...] = total[...].astype(out.dtype)


def _fused(plan: Plan, x: Inputs, constants, b: Blocks):
  """Returns both cotangents from one kernel."""
  rows, width = x.policy.hidden.shape
  padded = pl.cdiv(rows, b.tokens) * b.tokens
  start = jnp.zeros((padded, width), jnp.float32)
  inputs = 1 + len(tpu_tile.arrays(x, None))
  d_unembed, d_hidden = tpu_tile.call(
    plan,
    x,
    constants,
    _fused_kernel,
    [_like(x.policy), jax.ShapeDtypeStruct(start.shape, start.dtype)],
    b,
    tokens=1,
    extra=[start],
    out_specs=[
      _unembed_spec(plan, width, b),
      pl.BlockSpec(memory_space=pl.ANY),
    ],
    scratch=[
      _unembed_scratch(plan, width, b),
      pltpu.VMEM((2, b.tokens, width), jnp.float32),
      pltpu.SemaphoreType.DMA((2,)),
      pltpu.SemaphoreType.DMA((2,)),
    ],
    semantics=('arbitrary', 'arbitrary'),
    products=3,
    input_output_aliases={inputs: 1},
    name='vocab_stats_backward',
  )
  return d_hidden[:rows], d_unembed


class _Slots:
  """Two buffers through which blocks of rows pass to HBM and back."""

  def __init__(self, rows, buffer, reading, writing, size: int):
    self._rows, self.buffer, self._size = rows, buffer, size
    self._reading, self._writing = reading, writing

  def _block(self, i):
    begin = pl.multiple_of(i * self._size, self._size)
    return self._rows.at[pl.ds(begin, self._size), :]

  def read(self, i, slot):
    """The copy of block i into a slot."""
    return pltpu.make_async_copy(
      self._block(i), self.buffer.at[slot], self._reading.at[slot]
    )

  def write(self, i, slot):
    """The copy of a slot to block i."""
    return pltpu.make_async_copy(
      self.buffer.at[slot], self._block(i), self._writing.at[slot]
    )


def _fused_kernel(begin, *refs, plan, edge, b):
  *refs, _, d_unembed, d_hidden, total, buffer, reading, writing = refs
  j, i = pl.program_id(0), pl.program_id(1)
  ids, tokens = pl.num_programs(0), pl.num_programs(1)
  step = j * tokens + i
  slot = step % 2
  slots = _Slots(d_hidden, buffer, reading, writing, b.tokens)

  # A slot is filled anew once what it held is written.
  @pl.when(step >= 2)
  def _():
    slots.write((step - 2) % tokens, slot).wait()

  # Written at least two steps ago, so that this wait has been passed.
  @pl.when(j > 0)
  def _():
    slots.read(i, slot).start()

  @pl.when(i == 0)
  def _():
    total[...] = jnp.zeros_like(total)

  x, dz = tpu_tile.slopes(plan, edge, begin, refs, i, j, b)
  dh, dw = program.products(dz, x.policy.hidden, x.policy.unembed, plan.wide)
  total[...] += dw

  @pl.when(j == 0)
  def _():
    buffer[slot] = dh

  @pl.when(j > 0)
  def _():
    slots.read(i, slot).wait()
    buffer[slot] = buffer[slot] + dh

  slots.write(i, slot).start()

  @pl.when(i == tokens - 1)
  def _():
    d_unembed[...] = total[...].astype(d_unembed.dtype)

  @pl.when(step == ids * tokens - 1)
  def _():
    slots.write(i, slot).wait()
    slots.write((step - 1) % tokens, 1 - slot).wait()
