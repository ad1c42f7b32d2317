"""Lifts functions of one group to rows; the layouts of groups.

A one-group function has the signature
`(*data [G, ...], valid bool [G]) -> [G]`; it is written for one group and
mapped over all. Members that are padding, or whose row is not valid, are
False in `valid`; what the function returns for them is dropped.
"""

from collections.abc import Callable

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from rljax.core.types import Array, Groups


def apply(
  fn: Callable[..., Array],
  groups: Groups,
  *row_data: Array,
  valid: Array | None = None,
) -> Array:
  """Returns one value per row from a function of one group.

  Args:
    fn: `(*data [G, ...], valid bool [G]) -> [G, ...]`.
    groups: [P, G]; a row belongs to at most one group.
    *row_data: [B, ...] each, at least one; gathered to [G, ...] for `fn`.
    valid: bool [B], rows that enter the statistics; None means all.

  Returns:
    [B, ...]; 0 for rows that are not valid or in no group.
  """
  _check_rows(groups, row_data, valid)
  rows = row_data[0].shape[0]
  members = _members(groups, valid)
  values = _map(fn, groups, row_data, members)
  # Absent members point past the last row, where `drop` discards them.
  target = jnp.where(members, groups.index, rows)
  empty = jnp.zeros((rows, *values.shape[2:]), values.dtype)
  return empty.at[target].set(values, mode='drop')


def reduce(
  fn: Callable[..., Array],
  groups: Groups,
  *row_data: Array,
  valid: Array | None = None,
) -> Array:
  """Returns one value per group from a function of one group.

  Args:
    fn: `(*data [G, ...], valid bool [G]) -> [...]`.
    groups: [P, G].
    *row_data: [B, ...] each; gathered to [G, ...] for `fn`.
    valid: bool [B], rows that enter the statistics; None means all.

  Returns:
    [P, ...].
  """
  _check_rows(groups, row_data, valid)
  return _map(fn, groups, row_data, _members(groups, valid))


def uniform(prompts: int, size: int) -> Groups:
  """Returns groups of equal size whose rows are contiguous, [P, G]."""
  index = jnp.arange(prompts * size, dtype=jnp.int32)
  return Groups(
    index=index.reshape(prompts, size),
    valid=jnp.ones((prompts, size), bool),
  )


def from_ids(ids: Array | np.ndarray, prompts: int, size: int) -> Groups:
  """Returns groups of rows with equal ids, wherever the rows stand.

  Inside jit nothing can be raised: there, rows beyond `size` and rows with an
  id outside [0, P) are in no group, so they get no credit.

  Args:
    ids: i32 [B], the group of each row, in [0, P).
    prompts: P, the number of groups; groups without rows are empty.
    size: G, the largest number of rows of one group.

  Returns:
    Groups [P, G]; members are in row order.

  Raises:
    ValueError: outside jit, if an id is out of range or a group too large.
  """
  if not isinstance(ids, jax.core.Tracer):
    _check_ids(np.asarray(ids), prompts, size)
  ids = jnp.asarray(ids, jnp.int32)
  order = jnp.argsort(ids, stable=True).astype(jnp.int32)
  group = ids[order]
  first = jnp.searchsorted(group, group, side='left').astype(jnp.int32)
  place = jnp.arange(ids.shape[0], dtype=jnp.int32) - first
  # A negative index would wrap around; past the end it is dropped.
  group = jnp.where(group < 0, prompts, group)
  index = jnp.zeros((prompts, size), jnp.int32)
  valid = jnp.zeros((prompts, size), bool)
  return Groups(
    index=index.at[group, place].set(order, mode='drop'),
    valid=valid.at[group, place].set(True, mode='drop'),
  )


def _check_rows(
  groups: Groups, row_data: tuple[Array, ...], valid: Array | None
) -> None:
  """Raises ValueError unless arrays [B, ...] hold the rows of the groups."""
  counts = {x.shape[0] for x in row_data}
  counts |= set() if valid is None else {valid.shape[0]}
  if len(counts) > 1:
    raise ValueError(
      f'arrays of {sorted(counts)} rows; each must have one entry a row of the'
      ' batch, valid too.'
    )
  layout = groups.index, groups.valid
  if any(isinstance(x, jax.core.Tracer) for x in layout):
    return
  members = np.asarray(groups.index)[np.asarray(groups.valid, bool)]
  rows = counts.pop()
  if members.size and (members.min() < 0 or members.max() >= rows):
    raise ValueError(
      f'groups hold rows {members.min()}..{members.max()}; there are {rows}'
      ' rows: make them of this batch, with uniform or from_ids.'
    )


def _members(groups: Groups, valid: Array | None) -> Array:
  """Returns which members of each group count, bool [P, G]."""
  if valid is None:
    return groups.valid
  return groups.valid & valid.astype(bool)[groups.index]


def _map(
  fn: Callable[..., Array],
  groups: Groups,
  row_data: tuple[Array, ...],
  members: Array,
) -> Array:
  """Returns `fn` of each group, [P, ...]."""
  data = [rows[groups.index] for rows in row_data]
  return jax.vmap(fn)(*data, members)


def _check_ids(ids: np.ndarray, prompts: int, size: int) -> None:
  """Raises ValueError unless the rows fit into [prompts, size]."""
  if ids.size and (ids.min() < 0 or ids.max() >= prompts):
    raise ValueError(
      f'group ids span {ids.min()}..{ids.max()}; there are {prompts} groups'
    )
  counts = np.bincount(ids, minlength=prompts)
  largest = int(counts.argmax())
  if counts[largest] > size:
    raise ValueError(
      f'group {largest} has {counts[largest]} rows; at most {size} fit'
    )
