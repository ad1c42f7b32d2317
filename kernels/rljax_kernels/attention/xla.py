"""Attention in plain XLA: `jax.nn`, or sums where that has no soft cap."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Form(NamedTuple):
  """What is fixed when a program is traced; see `attention`."""

  causal: bool
  window: int | None
  softcap: float | None
  scale: float


def attention(q, k, v, segment_ids, *, form: Form) -> jax.Array:
  """Returns attention [B, T, H, d] of q over k and v [B, S, K, d]."""
  length, total = q.shape[1], k.shape[1]
  row = total - length + jnp.arange(length)[:, None]
  apart = row - jnp.arange(total)[None]
  seen = jnp.ones((length, total), bool)
  if form.causal:
    seen &= apart >= 0
  if form.window is not None:
    seen &= jnp.abs(apart) < form.window
  seen = seen[None]
  if segment_ids is not None:
    seen = seen & (segment_ids[:, :, None] == segment_ids[:, None, :])
  return _attend(q, k, v, seen, form)


def paged_decode(q, k_pages, v_pages, lengths, pages, *, form: Form):
  """Returns attention [B, H, d] of one query a row over its pages."""

  def positions(x):
    x = jnp.take(x, pages, axis=1, mode='clip')  # [K, B, M, size, d]
    x = x.transpose(1, 2, 3, 0, 4)
    return x.reshape(x.shape[0], -1, *x.shape[3:])

  k, v = positions(k_pages), positions(v_pages)
  seen = jnp.arange(k.shape[1])[None] < lengths[:, None]
  return _attend(q[:, None], k, v, seen[:, None], form)[:, 0]


def _attend(q, k, v, seen, form: Form):
  """Returns attention where `seen`, bool [B or 1, T, S]."""
  if form.softcap is None:
    return jax.nn.dot_product_attention(
      q, k, v, mask=seen[:, None], scale=form.scale, implementation='xla'
    )
  batch, length, heads, width = q.shape
  q = q.reshape(batch, length, k.shape[2], -1, width)
  z = jnp.einsum('btkgd,bskd->bkgts', q, k, preferred_element_type=jnp.float32)
  z = form.softcap * jnp.tanh(z * (form.scale / form.softcap))
  p = jax.nn.softmax(jnp.where(seen[:, None, None], z, -jnp.inf), axis=-1)
  out = jnp.einsum('bkgts,bskd->btkgd', p.astype(v.dtype), v)
  return out.reshape(batch, length, heads, -1).astype(q.dtype)
