"""Logits of some ids at a time: a range, or ids by row, in float32.

Functions here see one shard: local rows and, where `Form.axis` names a mesh
axis, a local slice of the vocabulary. Ids are local to that slice.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from rljax_kernels import checks
from rljax_kernels.layout import Layout

# Stands for minus infinity where that would be multiplied by a zero.
LOW = -1e30


@dataclasses.dataclass(frozen=True)
class Form:
  """What is fixed about logits when a program is traced.

  Attributes:
    softcap: None or c, for logits c * tanh(x / c).
    valid: None or the number of real ids over all shards.
    columns: whether the unembedding is [D, V] instead of [V, D].
    axis: mesh axis that splits the vocabulary, or None.
  """

  softcap: float | None = None
  valid: int | None = None
  columns: bool = False
  axis: str | None = None

  def width(self, unembed: jax.Array) -> int:
    """Returns how many ids `unembed` [V, D] holds."""
    return unembed.shape[1 if self.columns else 0]

  def offset(self, unembed: jax.Array) -> jax.Array | int:
    """Returns the first id of a shard [V, D], i32 []."""
    if self.axis is None:
      return 0
    return jax.lax.axis_index(self.axis) * self.width(unembed)

  def rows(self, unembed: jax.Array, start, width: int) -> jax.Array:
    """Returns [width, D], or [D, width], of the ids from `start`."""
    if width == self.width(unembed):
      return unembed
    axis = 1 if self.columns else 0
    return jax.lax.dynamic_slice_in_dim(unembed, start, width, axis)


def make_form(
  hidden: jax.Array,
  unembed: jax.Array,
  softcap: float | None,
  valid: int | None,
  layout: Layout | None,
) -> Form:
  """Returns the form of logits of hidden [N, D].

  Args:
    hidden: [N, D].
    unembed: [V, D] or [D, V]; a square one is [V, D].
    softcap: None or c.
    valid: None or the number of real ids.
    layout: how the arrays are split.

  Raises:
    ValueError: for shapes, dtypes or values that do not fit.
  """
  columns = checks.pair(hidden, unembed)
  vocab = unembed.shape[1 if columns else 0]
  checks.bend(softcap, valid, vocab)
  if layout is not None:
    layout.check(hidden.shape[0], vocab)
  return Form(softcap, valid, columns, layout and layout.vocab)


def inverse_of(temperature: jax.Array | float, tokens: int) -> jax.Array:
  """Returns 1 / temperature, f32 [N]; see `checks.inverse`."""
  found = checks.inverse(temperature, tokens)
  return jnp.ones(tokens, jnp.float32) if found is None else found


def check_rows(hidden: jax.Array, **arrays: jax.Array | None) -> None:
  """Raises ValueError unless each array that is there is [N]."""
  checks.rows(hidden.shape[0], **arrays)


def specs(layout: Layout, form: Form) -> tuple[PartitionSpec, PartitionSpec]:
  """Returns how arrays [N, ...] and the unembedding are split."""
  vocab = (None, layout.vocab) if form.columns else (layout.vocab,)
  return PartitionSpec(layout.rows), PartitionSpec(*vocab)


def _einsum(kind: str, hidden, unembed) -> jax.Array:
  # Accelerators would round float32 inputs of a product to fewer bits.
  exact = jnp.float32 in (hidden.dtype, unembed.dtype)
  return jnp.einsum(
    kind,
    hidden,
    unembed,
    precision='highest' if exact else None,
    preferred_element_type=jnp.float32,
  )


def _finish(z, ids, unembed, form: Form):
  if form.softcap is not None:
    z = form.softcap * jnp.tanh(z / form.softcap)
  if form.valid is None:
    return z
  return jnp.where(ids + form.offset(unembed) < form.valid, z, -jnp.inf)


def of_range(hidden, unembed, start, width: int, form: Form) -> jax.Array:
  """Returns logits [N, width] of ids from `start`, -inf where banned."""
  kind = 'nd,dv->nv' if form.columns else 'nd,vd->nv'
  z = _einsum(kind, hidden, form.rows(unembed, start, width))
  return _finish(z, start + jnp.arange(width)[None], unembed, form)


def of_spans(hidden, unembed, start, width: int, form: Form, serial: bool):
  """Returns logits [N, width] of ids from each row's own `start`, i32 [N].

  Args:
    hidden: [N, D].
    unembed: this shard's.
    start: i32 [N], with start + width inside the shard.
    width: ids a row.
    form: of the logits.
    serial: go row by row, so that no [N, width, D] is formed.
  """

  def one(row):
    h, s = row
    kind = 'd,dk->k' if form.columns else 'd,kd->k'
    return _einsum(kind, h, form.rows(unembed, s, width))

  each = jax.lax.map if serial else lambda f, xs: jax.vmap(f)(xs)
  z = each(one, (hidden, start))
  return _finish(z, start[:, None] + jnp.arange(width)[None], unembed, form)


def of_ids(hidden, unembed, ids, form: Form) -> jax.Array:
  """Returns the logit [N] of one id a row, i32 [N] inside the shard."""
  rows = jnp.take(unembed, ids, axis=1 if form.columns else 0, mode='clip')
  kind = 'nd,dn->n' if form.columns else 'nd,nd->n'
  return _finish(_einsum(kind, hidden, rows), ids, unembed, form)
