"""Exact sampling from `softmax(hidden @ unembed.T)`, one id a row."""

import functools

import jax

from rljax_kernels import logits
from rljax_kernels.layout import Layout
from rljax_kernels.vocab_sample import blocks, cdf, truncation

# Logits that one block may hold: with fewer there is no loop.
_VALUES = 1 << 20
# Logits a block on CPU, where they should stay in the second-level cache: at
# N 64, V 49,152, D 576 blocks of 512 to 1,024 ids took half the time of 16,384.
_CPU_VALUES = 3 << 14


def vocab_sample(
  hidden: jax.Array,
  unembed: jax.Array,
  uniform: jax.Array | None,
  *,
  temperature: jax.Array | float = 1.0,
  softcap: float | None = None,
  valid: int | None = None,
  forced: jax.Array | None = None,
  top_k: int = 0,
  top_p: float = 1.0,
  min_p: float = 0.0,
  layout: Layout | None = None,
  block: int | None = None,
) -> blocks.Drawn:
  """Returns one id a row by inverse CDF in the order of the ids.

  Without truncation no [N, V] array is formed: a first pass adds up sub-blocks
  of 128 ids, a second one looks only into the one that holds the uniform. The
  id depends neither on `block` nor on `layout`, unless the uniform is within a
  few roundings of a boundary. An id of probability 0 is never drawn.
  Truncation forms [N, V] (and gathers a vocabulary that is split).

  Args:
    hidden: [N, D], float32 or bfloat16.
    unembed: [V, D] or [D, V]; a square one is [V, D].
    uniform: f32 [N] in [0, 1); None takes the most likely id.
    temperature: scalar or [N], positive; divides the logits.
    softcap: None or c, for logits c * tanh(x / c).
    valid: None or the number of real ids; the rest of V is never drawn.
    forced: i32 [N], ids to take instead of drawing; -1 where free. Their
      `logp` is that of the untruncated distribution, -inf outside of it.
    top_k: keep the k largest; 0 keeps all. Ties with the k-th stay.
    top_p: keep the smallest set of largest probabilities that reaches this
      mass; 1 keeps all.
    min_p: keep probabilities of at least this share of the largest.
    layout: how the arrays are split, or None for one device.
    block: ids a block, a multiple of 128; None to choose.

  Raises:
    ValueError: for shapes, dtypes or values that do not fit.
  """
  if top_k < 0 or not 0 < top_p <= 1 or not 0 <= min_p <= 1:
    raise ValueError(
      f'top_k={top_k} must be at least 0, top_p={top_p} in (0, 1] and'
      f' min_p={min_p} in [0, 1].'
    )
  form = _form(hidden, unembed, softcap, valid, layout, block)
  logits.check_rows(hidden, uniform=uniform, forced=forced)
  inverse = logits.inverse_of(temperature, hidden.shape[0])
  rows = blocks.Rows(inverse, uniform, forced)
  limits = truncation.Limits(top_k, top_p, min_p)
  if limits == truncation.Limits():
    run = functools.partial(_by_blocks, form=form, block=block)
  else:
    run = functools.partial(truncation.draw, form=form, limits=limits)
  return _split(run, layout, form)(hidden, unembed, rows)


def gumbel_sample(
  hidden: jax.Array,
  unembed: jax.Array,
  keys: jax.Array,
  *,
  temperature: jax.Array | float = 1.0,
  softcap: float | None = None,
  valid: int | None = None,
  forced: jax.Array | None = None,
  layout: Layout | None = None,
  block: int | None = None,
) -> blocks.Drawn:
  """Returns one id a row by the Gumbel-max trick.

  The noise is a function of the row's key and the id alone. It costs a hash
  per logit: on CPU three times `vocab_sample` at D 576, more at smaller ones.
  Small changes of the logits rarely change the id.

  Args:
    hidden: [N, D], float32 or bfloat16.
    unembed: [V, D] or [D, V]; a square one is [V, D].
    keys: [N] typed keys of `jax.random`, of the default (threefry) kind.
    temperature: scalar or [N], positive; divides the logits.
    softcap: None or c, for logits c * tanh(x / c).
    valid: None or the number of real ids; the rest of V is never drawn.
    forced: i32 [N], ids to take instead of drawing; -1 where free.
    layout: how the arrays are split, or None for one device.
    block: ids a block, a multiple of 128; None to choose.

  Raises:
    ValueError: for shapes, dtypes, keys or values that do not fit.
  """
  form = _form(hidden, unembed, softcap, valid, layout, block)
  logits.check_rows(hidden, keys=keys, forced=forced)
  inverse = logits.inverse_of(temperature, hidden.shape[0])
  data = jax.random.key_data(keys)
  if data.shape != (hidden.shape[0], 2):
    raise ValueError(f'keys must be [N] threefry keys, got {keys.dtype}.')
  rows = blocks.Rows(inverse, None, forced, data)
  run = functools.partial(_by_blocks, form=form, block=block)
  return _split(run, layout, form)(hidden, unembed, rows)


def _form(hidden, unembed, softcap, valid, layout, block):
  if block is not None and (block <= 0 or block % cdf.WIDTH):
    raise ValueError(f'block={block} must be a multiple of {cdf.WIDTH}.')
  return logits.make_form(hidden, unembed, softcap, valid, layout)


def _split(run, layout: Layout | None, form: logits.Form):
  if layout is None:
    return run
  rows, vocab = logits.specs(layout, form)
  return jax.shard_map(
    run,
    mesh=layout.mesh,
    in_specs=(rows, vocab, rows),
    out_specs=rows,
    check_vma=False,
  )


def _by_blocks(hidden, unembed, rows, *, form, block):
  shape = hidden.shape[0], form.width(unembed)

  def on(values, serial):
    plan = blocks.Plan(block or _block_size(*shape, values), serial)
    return functools.partial(blocks.draw, form=form, plan=plan)

  # Not the default backend: programs are also compiled for other platforms.
  return jax.lax.platform_dependent(
    hidden,
    unembed,
    rows,
    cpu=on(_CPU_VALUES, True),
    default=on(_VALUES, False),
  )


def _block_size(rows: int, vocab: int, values: int) -> int:
  if rows * vocab <= _VALUES:
    return vocab
  return max(values // rows // cdf.WIDTH, 2) * cdf.WIDTH
