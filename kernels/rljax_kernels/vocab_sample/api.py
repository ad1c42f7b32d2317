"""Exact sampling from `softmax(hidden @ unembed.T)`, one id a row."""

from collections.abc import Callable
import functools
import numbers

import jax
import jax.numpy as jnp

from rljax_kernels import checks, logits
from rljax_kernels.layout import Layout
from rljax_kernels.vocab_sample import blocks, cdf, truncation

# Logits that one block may hold: with fewer there is no loop.
_BLOCK_LOGITS = 1 << 20
# Logits a block on CPU, where they should stay in the second-level cache: at
# N 64, V 49,152, D 576 blocks of 512 to 1,024 ids took half the time of 16,384.
_CPU_BLOCK_LOGITS = 3 << 14


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

  The id depends neither on `block` nor on `layout`, unless the uniform is
  within a few roundings of a boundary. An id of probability 0 is never drawn.
  It is data: no gradient passes; score the ids with `vocab_stats` for one.

  What is formed: without truncation, a first pass adds up sub-blocks of 128
  ids, four sums f32 [N, V / 128], from the logits of a block of ids at a time:
  about 49,152 of them on CPU and 2^20 elsewhere, but 256 ids at least, and all
  of [N, V] where that is no more than 2^20. A second pass looks into the one
  sub-block that holds the uniform: row by row on CPU and for an unembedding
  [D, V], otherwise it gathers [N, 128, D]. Truncation needs all logits: it
  forms about six f32 [N, V], and gathers them where the vocabulary is split.

  Truncation keeps the ids that each of `top_k`, `top_p` and `min_p` keeps.
  Each looks at the whole softmax at the temperature, so that their order does
  not matter and nothing is renormalized between them; ids of equal probability
  stay or go together. One limit alone is what vLLM and Hugging Face
  transformers do, but for ties at the edge of `top_p`, of which they keep some
  by the order of their sort. With several they keep as much or less: they
  renormalize after each (vLLM min-p, top-k, top-p; transformers top-k, top-p,
  min-p), and `top_p` is a share of what the limits before it left.

  Args:
    hidden: [N, D], float32 or bfloat16; N may be 0.
    unembed: [V, D] or [D, V]; a square one is [V, D].
    uniform: f32 [N] in [0, 1). Below 0 counts as 0; 1, more or NaN as the
      largest number below 1. None takes the likeliest id, of equal ones the
      smallest.
    temperature: scalar or [N], positive; divides the logits.
    softcap: None or c, for logits c * tanh(x / c).
    valid: None or the number of real ids; the rest of V is never drawn.
    forced: integers [N], ids to take instead of drawing; negative where free.
      Their `logp` is that of the untruncated distribution; an id that is banned
      or not below V is returned as it is (at most 2^31 - 1), its log-probs are
      -inf, and nothing is read for it.
    top_k: keep ids with fewer than k strictly likelier ones; 0 keeps all.
    top_p: keep ids whose strictly likelier ones hold less than this mass: the
      smallest set of likeliest ids that reaches it, and ties with its last; 1
      keeps all.
    min_p: keep probabilities of at least this share of the largest; 0 keeps
      all.
    layout: how the arrays are split, or None for one device.
    block: ids a block, a multiple of 128; None to choose.

  Raises:
    ValueError: for shapes, dtypes or values that do not fit.
  """
  limits = truncation.Limits(top_k, top_p, min_p)
  limits.check()
  form = _form(hidden, unembed, softcap, valid, layout, block)
  rows = _rows(hidden, temperature, forced)
  if uniform is not None:
    rows = rows._replace(uniform=cdf.checked(uniform, hidden.shape[0]))
  if limits == truncation.Limits():
    run = functools.partial(_by_blocks, form=form, block=block)
  else:
    run = functools.partial(truncation.draw, form=form, limits=limits)
  return _over_mesh(run, layout, form)(*_data(hidden, unembed), rows)


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
  Small changes of the logits rarely change the id. What is formed is what
  `vocab_sample` forms without truncation, and noise for each logit of a block.
  It is data: no gradient passes.

  Args:
    hidden: [N, D], float32 or bfloat16; N may be 0.
    unembed: [V, D] or [D, V]; a square one is [V, D].
    keys: [N] typed keys of the default (threefry) kind, as
      `jax.random.split(jax.random.key(0), N)` returns.
    temperature: scalar or [N], positive; divides the logits.
    softcap: None or c, for logits c * tanh(x / c).
    valid: None or the number of real ids; the rest of V is never drawn.
    forced: integers [N], negative where free; see `vocab_sample`.
    layout: how the arrays are split, or None for one device.
    block: ids a block, a multiple of 128; None to choose.

  Raises:
    ValueError: for shapes, dtypes, keys or values that do not fit.
  """
  form = _form(hidden, unembed, softcap, valid, layout, block)
  rows = _rows(hidden, temperature, forced)
  rows = rows._replace(keys=_key_data(keys, hidden.shape[0]))
  run = functools.partial(_by_blocks, form=form, block=block)
  return _over_mesh(run, layout, form)(*_data(hidden, unembed), rows)


def _form(hidden, unembed, softcap, valid, layout, block) -> logits.Form:
  if block is not None and (
    not isinstance(block, numbers.Integral) or block <= 0 or block % cdf.WIDTH
  ):
    raise ValueError(
      f'block={block} must be a multiple of {cdf.WIDTH}, or None to choose.'
    )
  return logits.make_form(hidden, unembed, softcap, valid, layout)


def _rows(hidden, temperature, forced) -> blocks.Rows:
  tokens = hidden.shape[0]
  checks.rows(tokens, forced=forced)
  if forced is not None:
    forced = checks.ids(forced=forced)
  return blocks.Rows(checks.inverse(temperature, tokens), None, forced)


def _key_data(keys, tokens: int) -> jax.Array:
  """Returns the halves u32 [N, 2] of keys [N]."""
  mend = f'pass jax.random.split(jax.random.key(0), {tokens})'
  if keys is None:
    raise ValueError(f'keys is None; {mend}.')
  checks.arrays(keys=keys)
  if not jnp.issubdtype(keys.dtype, jax.dtypes.prng_key):
    raise ValueError(
      f'keys {keys.dtype}{keys.shape} are no typed keys; {mend}.'
    )
  checks.rows(tokens, keys=keys)
  data = jax.random.key_data(keys)
  if data.shape != (tokens, 2):
    raise ValueError(f'keys {keys.dtype} are not of threefry; {mend}.')
  return data


def _data(*arrays) -> tuple[jax.Array, ...]:
  return tuple(jax.lax.stop_gradient(jnp.asarray(x)) for x in arrays)


def _over_mesh(run: Callable, layout: Layout | None, form: logits.Form):
  """Returns `run` of (hidden, unembed, rows), on each shard of a layout."""
  if layout is None:
    return run
  rows, vocab = logits.specs(layout, form)
  return layout.spread(run, (rows, vocab, rows), rows)


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
    cpu=on(_CPU_BLOCK_LOGITS, True),
    default=on(_BLOCK_LOGITS, False),
  )


def _block_size(rows: int, vocab: int, values: int) -> int:
  """Returns ids a block, for blocks of about `values` logits."""
  if rows * vocab <= _BLOCK_LOGITS:
    return vocab
  return max(values // rows // cdf.WIDTH, 2) * cdf.WIDTH
