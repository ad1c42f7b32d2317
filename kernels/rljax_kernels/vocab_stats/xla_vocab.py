"""Vocabulary blocks in plain XLA: `[N, block]` logits at a time.

Blocks are slices of the unembedding; the last one overlaps the one before and
its old columns do not count, so that any V works and nothing is padded.
"""

import jax
import jax.numpy as jnp

from rljax_kernels.vocab_stats import algebra, program
from rljax_kernels.vocab_stats.program import Inputs, Plan, Side

_BLOCK = 4096


def block_size(plan: Plan, vocab: int) -> int:
  """Returns how many ids a block holds."""
  return min(plan.block or _BLOCK, vocab)


def _slice(unembed, begin, size: int, wide: bool):
  return jax.lax.dynamic_slice_in_dim(unembed, begin, size, 1 if wide else 0)


def _block(plan: Plan, x: Inputs, number, size: int):
  """Returns where a block begins, its unembedding, and its tile."""
  vocab = program.vocab_size(x.policy.unembed, plan.wide)
  begin = jnp.minimum(number * size, vocab - size)
  local = begin + jnp.arange(size)[None]

  def cut(side: Side, wide: bool) -> Side:
    if side.unembed is None:
      return side
    return side._replace(unembed=_slice(side.unembed, begin, size, wide))

  ref = x.reference
  ref = None if ref is None else cut(ref, plan.ref_wide)
  part = Inputs(cut(x.policy, plan.wide), x.targets, ref)
  fresh = None if vocab % size == 0 else local >= number * size
  return (
    begin,
    part,
    program.tile(plan, part, program.offset(plan, x) + local, fresh),
  )


def sweep(plan: Plan, x: Inputs, stats: algebra.Columns | None):
  """Returns the moments of all local ids; see `Implementation`."""
  vocab = program.vocab_size(x.policy.unembed, plan.wide)
  size = block_size(plan, vocab)

  def body(number, total):
    *_, t = _block(plan, x, number, size)
    found = program.collect(plan, t, stats)
    if stats is None:
      return algebra.join(total, found)
    return jax.tree.map(jnp.add, total, found)

  rows = x.targets.shape[0]
  if stats is None:
    first = algebra.start(plan.spec, rows)
  else:
    first = dict.fromkeys(('mix', 'mix_q'), jnp.zeros((rows, 1), jnp.float32))
  first = program.varying_as(first, *jax.tree.leaves(x))
  return jax.lax.fori_loop(0, -(-vocab // size), body, first)


def pull(plan: Plan, x: Inputs, constants: algebra.Columns):
  """Returns cotangents of hidden and unembed; see `Implementation`."""
  hidden, unembed, _ = x.policy
  vocab = program.vocab_size(unembed, plan.wide)
  size = block_size(plan, vocab)
  axis = 1 if plan.wide else 0

  def body(number, carry):
    d_hidden, d_unembed = carry
    begin, part, t = _block(plan, x, number, size)
    dz = program.raw_slopes(plan, t, constants)
    dh, dw = program.products(dz, hidden, part.policy.unembed, plan.wide)
    # Columns that an earlier block has filled get 0 more.
    old = jax.lax.dynamic_slice_in_dim(d_unembed, begin, size, axis)
    new = old + dw.astype(old.dtype)
    return d_hidden + dh, jax.lax.dynamic_update_slice_in_dim(
      d_unembed, new, begin, axis
    )

  start = jnp.zeros(hidden.shape, jnp.float32), jnp.zeros_like(unembed)
  start = program.varying_as(start, *jax.tree.leaves((x, constants)))
  return jax.lax.fori_loop(0, -(-vocab // size), body, start)
