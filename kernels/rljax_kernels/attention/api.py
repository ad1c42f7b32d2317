"""Attention and paged decoding: which implementation, and what it is given."""

import functools
import math
from typing import cast

import jax
from jax import core
from jax.experimental.pallas.ops.tpu import paged_attention
from jax.experimental.pallas.ops.tpu import splash_attention as splash
import jax.numpy as jnp

from rljax_kernels import checks
from rljax_kernels.attention import xla

_LANES = 128


def attention(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  *,
  segment_ids: jax.Array | None = None,
  causal: bool = True,
  window: int | None = None,
  softcap: float | None = None,
  scale: float | None = None,
  implementation: str | None = None,
) -> jax.Array:
  """Returns softmax(cap(scale * q k)) v, [B, T, H, d] in the type of q.

  Differentiable in q, k and v. On a TPU it is splash attention where T and S
  are multiples of 128, elsewhere `jax.nn`, or its sums where there is a soft
  cap; these form the logits [B, H, T, S]. It is chosen by the platform that the
  program is lowered for. Over a mesh, call it inside `shard_map`: a TPU kernel
  is not split by itself.

  Args:
    q: [B, T, H, d], float32 or bfloat16.
    k: [B, S, K, d] of the same type, where K divides H. With S > T the queries
      are the last T of the S positions.
    v: [B, S, K, d] of the same type.
    segment_ids: integers [B, T], where T = S; only equal ids see each other.
    causal: whether a query sees no later position.
    window: None or how far a query sees: positions less than this apart.
    softcap: None or c, for logits c * tanh(x / c).
    scale: of the logits, positive; None means d ** -0.5.
    implementation: 'splash', 'xla' or None to choose.

  Raises:
    ValueError: for shapes, dtypes or values that do not fit.
    NotImplementedError: if splash attention is asked for and cannot do it, or
      for arrays that do not lie on a TPU. Under `jit` that shows when jax
      lowers the program, as an error of jax.
  """
  checks.arrays(q=q, k=k, v=v, segment_ids=segment_ids)
  _check_qkv(q, k, v, segment_ids)
  checks.positive(window=window)
  form = _form(causal, window, softcap, scale, q.shape[3])
  with_xla = functools.partial(xla.attention, form=form)
  with_splash = functools.partial(_splash, form=form)
  refusal = _splash_refusal(q, k)
  return _choose(
    implementation, 'splash', with_splash, with_xla, refusal,
    q, k, v, segment_ids,
  )  # fmt: skip


def paged_decode(
  q: jax.Array,
  k_pages: jax.Array,
  v_pages: jax.Array,
  lengths: jax.Array,
  pages: jax.Array,
  *,
  softcap: float | None = None,
  scale: float | None = None,
  implementation: str | None = None,
) -> jax.Array:
  """Returns attention of one query a row over its pages, [B, H, d].

  On a TPU it is jax's paged attention kernel where d is a multiple of 128 and
  `size` one of 8, elsewhere a gather of the pages of all rows.

  Args:
    q: [B, H, d], float32 or bfloat16.
    k_pages: [K, P, size, d] of the same type, P pages of `size` positions; K
      divides H.
    v_pages: [K, P, size, d] of the same type.
    lengths: i32 [B], positions of a row; numbers outside of [1, M * size] count
      as the nearest inside.
    pages: i32 [B, M], the pages of a row in order; likewise, in [0, P).
    softcap: None or c, for logits c * tanh(x / c).
    scale: of the logits, positive; None means d ** -0.5.
    implementation: 'paged', 'xla' or None to choose.

  Raises:
    ValueError: for shapes, dtypes or values that do not fit.
    NotImplementedError: if the TPU's kernel is asked for and cannot do it; see
      `attention`.
  """
  checks.arrays(q=q, k_pages=k_pages, v_pages=v_pages)
  lengths, pages = checks.ids(lengths=lengths), checks.ids(pages=pages)
  _check_pages(q, k_pages, v_pages, lengths, pages)
  form = _form(False, None, softcap, scale, q.shape[2])
  lengths = jnp.clip(lengths, 1, pages.shape[1] * k_pages.shape[2])
  pages = jnp.clip(pages, 0, k_pages.shape[1] - 1)
  with_xla = functools.partial(xla.paged_decode, form=form)
  with_paged = functools.partial(_paged, form=form)
  return _choose(
    implementation, 'paged', with_paged, with_xla, _paged_refusal(k_pages),
    q, k_pages, v_pages, lengths, pages,
  )  # fmt: skip


def _choose(implementation, name, on_tpu, elsewhere, refusal, *args):
  """Calls one of two functions, or lets the platform choose."""
  if implementation not in (None, name, 'xla'):
    raise ValueError(
      f'implementation={implementation!r} is not {name!r}, "xla" or None.'
    )
  if implementation == name:
    if refusal := refusal or _far_from_tpu(args):
      raise NotImplementedError(
        f'implementation={name!r}: {refusal} Pass None to choose.'
      )
    return on_tpu(*args)
  if implementation == 'xla' or refusal:
    return elsewhere(*args)
  return jax.lax.platform_dependent(*args, tpu=on_tpu, default=elsewhere)


def _form(causal, window, softcap, scale, width: int) -> xla.Form:
  for name, number in (('softcap', softcap), ('scale', scale)):
    if number is not None and not (
      isinstance(number, int | float) and 0 < number < math.inf
    ):
      raise ValueError(
        f'{name}={number} must be a positive number of Python, or None.'
      )
  return xla.Form(
    bool(causal), window, softcap, width**-0.5 if scale is None else scale
  )


def _far_from_tpu(args) -> str:
  """Returns where arrays lie that can be looked at, or '' on a TPU."""
  for x in args:
    if isinstance(x, jax.Array) and not isinstance(x, core.Tracer):
      platform = next(iter(x.devices())).platform
      if platform != 'tpu':
        return f'it runs on a TPU, and arrays are on {platform}.'
  return ''


def _splash_refusal(q, k) -> str:
  """Returns why splash attention cannot do it, or ''."""
  for name, size in (('T', q.shape[1]), ('S', k.shape[1])):
    if size % _LANES:
      return f'{name}={size} is not a multiple of {_LANES}.'
  return ''


def _splash(q, k, v, segment_ids, *, form: xla.Form):
  batch, length, heads, _ = q.shape
  total, kv_heads = k.shape[1:3]
  mask = splash.MultiHeadMask(
    [_mask(length, total, form)] * (heads // kv_heads)
  )
  kernel = splash.make_splash_mqa_single_device(
    mask, block_sizes=_blocks(length, total), attn_logits_soft_cap=form.softcap
  )
  ids = None
  if segment_ids is not None:
    ids = splash.SegmentIds(q=segment_ids, kv=segment_ids)
  q = (q * form.scale).astype(q.dtype)
  q = q.reshape(batch, length, kv_heads, -1, q.shape[-1])
  q = q.transpose(0, 2, 3, 1, 4)  # [B, K, H / K, T, d]
  k, v = (x.transpose(0, 2, 1, 3) for x in (k, v))
  over_heads = jax.vmap(kernel, (0, 0, 0, None))
  out = cast(jax.Array, jax.vmap(over_heads)(q, k, v, ids))
  out = out.transpose(0, 3, 1, 2, 4)
  return out.reshape(batch, length, heads, -1)


def _mask(length: int, total: int, form: xla.Form):
  shape, offset = (length, total), total - length
  if form.window is not None:
    reach = form.window - 1
    sides = (reach, 0 if form.causal else reach)
    return splash.LocalMask(shape, sides, offset)
  if form.causal:
    return splash.CausalMask(shape, offset)
  return splash.FullMask(shape)


def _blocks(length: int, total: int):
  def largest(size):
    return next(b for b in (512, 256, _LANES) if size % b == 0)

  rows, columns = largest(length), largest(total)
  return splash.BlockSizes(
    block_q=rows, block_kv=columns,
    block_q_dkv=rows, block_kv_dkv=columns,
    block_q_dq=rows, block_kv_dq=columns,
  )  # fmt: skip


def _paged_refusal(k_pages) -> str:
  """Returns why the TPU's paged attention cannot do it, or ''."""
  if k_pages.shape[3] % _LANES:
    return f'd={k_pages.shape[3]} is not a multiple of {_LANES}.'
  if k_pages.shape[2] % 8:
    return f'pages of {k_pages.shape[2]} positions: not a multiple of 8.'
  return ''


def _paged(q, k_pages, v_pages, lengths, pages, *, form: xla.Form):
  per_row = pages.shape[1]
  return paged_attention.paged_attention(
    (q * form.scale).astype(q.dtype),
    k_pages,
    v_pages,
    lengths,
    pages,
    attn_logits_soft_cap=form.softcap,
    pages_per_compute_block=max(
      n for n in range(1, min(per_row, 8) + 1) if per_row % n == 0
    ),
  )


def _check_qkv(q, k, v, segment_ids):
  shapes = f'q {q.shape}, k {k.shape}, v {v.shape}'
  if q.ndim != 4 or k.ndim != 4 or k.shape != v.shape:
    raise ValueError(f'Need q [B, T, H, d], k and v [B, S, K, d]: {shapes}.')
  batch, length, heads, width = q.shape
  if (batch, width) != (k.shape[0], k.shape[3]) or heads % k.shape[2]:
    raise ValueError(f'B and d must be equal and K divide H: {shapes}.')
  if length > k.shape[1]:
    raise ValueError(f'There are more queries than positions: {shapes}.')
  if segment_ids is not None and (
    segment_ids.shape != (batch, length) or length != k.shape[1]
  ):
    raise ValueError(
      f'segment_ids {segment_ids.shape} must be [B, T] and T = S: {shapes}.'
    )
  if segment_ids is not None:
    checks.ids(segment_ids=segment_ids)
  _check_types(q, k, v)


def _check_pages(q, k_pages, v_pages, lengths, pages):
  shapes = f'q {q.shape}, k_pages {k_pages.shape}, v_pages {v_pages.shape}'
  if q.ndim != 3 or k_pages.ndim != 4 or k_pages.shape != v_pages.shape:
    raise ValueError(f'Need q [B, H, d] and pages [K, P, size, d]: {shapes}.')
  if q.shape[2] != k_pages.shape[3] or q.shape[1] % k_pages.shape[0]:
    raise ValueError(f'd must be equal and K divide H: {shapes}.')
  if (
    lengths.shape != q.shape[:1]
    or pages.shape[:-1] != q.shape[:1]
    or not pages.shape[1]
  ):
    raise ValueError(
      f'lengths {lengths.shape} must be [B] and pages {pages.shape} [B, M]:'
      f' {shapes}.'
    )
  _check_types(q, k_pages, v_pages)


def _check_types(*arrays):
  types = [x.dtype for x in arrays]
  if types[0] not in (jnp.float32, jnp.bfloat16) or len(set(types)) > 1:
    found = ', '.join(map(str, types))
    raise ValueError(
      f'Types {found} must be one, float32 or bfloat16; float16 is not'
      ' supported.'
    )
