"""Logits of some ids at a time: a range, or ids by row, in float32.

Functions here see one shard: local rows and, where `Form.axis` names a mesh
axis, a local slice of the vocabulary. Ids are local to that slice.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

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
  shapes = f'hidden {hidden.shape}, unembed {unembed.shape}'
  if hidden.ndim != 2 or unembed.ndim != 2:
    raise ValueError(f'hidden must be [N, D], unembed [V, D]; got {shapes}.')
  if hidden.shape[1] not in unembed.shape:
    raise ValueError(f'Model widths differ: {shapes}; unembed is [V, D].')
  if jnp.float16 in (hidden.dtype, unembed.dtype):
    raise ValueError(
      f'float16 is not supported (hidden {hidden.dtype}, unembed'
      f' {unembed.dtype}); use bfloat16 or float32.'
    )
  columns = unembed.shape[1] != hidden.shape[1]
  vocab = unembed.shape[1 if columns else 0]
  if valid is not None and not 0 < valid <= vocab:
    raise ValueError(f'valid={valid} must be in [1, {vocab}]; {shapes}.')
  if softcap is not None and softcap <= 0:
    raise ValueError(f'softcap={softcap} must be positive.')
  return Form(softcap, valid, columns, layout and layout.vocab)


def inverse_of(temperature: jax.Array | float, rows: int) -> jax.Array:
  """Returns 1 / temperature, f32 [N], of a scalar or [N].

  Raises:
    ValueError: for another shape, or a number that is not positive.
  """
  if isinstance(temperature, int | float) and temperature <= 0:
    raise ValueError(f'temperature={temperature} must be positive.')
  inverse = 1.0 / jnp.asarray(temperature, jnp.float32)
  if inverse.shape not in ((), (rows,)):
    raise ValueError(
      f'temperature {inverse.shape} must be a scalar or [{rows}].'
    )
  return jnp.broadcast_to(inverse, (rows,))


def check_rows(hidden: jax.Array, **arrays: jax.Array | None) -> None:
  """Raises ValueError unless each array that is there is [N]."""
  for name, x in arrays.items():
    if x is not None and x.shape != hidden.shape[:1]:
      raise ValueError(f'{name} {x.shape} must be [N]; hidden {hidden.shape}.')


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
