"""Meshes, and where the arrays of a step live."""

import math
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from rljax.models import rules
from rljax_kernels import Layout

# Over which rows or parameters are split.
_SPLIT = [
  axis
  for axis in rules.AXES
  if axis in rules.ROWS or any(axis in spec for _, spec in rules.TRAIN)
]


def parse(text: str) -> dict[str, int]:
  """Returns axis sizes of 'data:4,fsdp:2'; '' means no axes.

  Raises:
    ValueError: for an axis that is unknown, split over by nothing or given
      twice, or a size that is no positive integer.
  """
  sizes = {}
  for part in filter(None, text.split(',')):
    axis, _, size = part.partition(':')
    if axis not in rules.AXES:
      raise ValueError(
        f'mesh axis {axis!r} is unknown; choose among {", ".join(rules.AXES)}.'
      )
    if axis not in _SPLIT:
      raise ValueError(
        f'mesh axis {axis!r} would hold copies: nothing is split over it yet;'
        f' choose among {", ".join(_SPLIT)}.'
      )
    if axis in sizes:
      raise ValueError(f'mesh={text!r} gives {axis!r} twice.')
    if not size.isdecimal() or int(size) < 1:
      raise ValueError(f'mesh={text!r}: write each axis as name:size.')
    sizes[axis] = int(size)
  return sizes


def make_mesh(text: str = '') -> Mesh | None:
  """Returns a mesh over all devices, or None for one device and no axes.

  Args:
    text: 'data:4,fsdp:2'; '' puts all devices on `data`.

  Raises:
    ValueError: if the axes do not multiply to the number of devices.
  """
  sizes = parse(text)
  count = jax.device_count()
  if not sizes:
    if count == 1:
      return None
    sizes = {'data': count}
  if math.prod(sizes.values()) != count:
    raise ValueError(
      f'mesh={text!r} needs {math.prod(sizes.values())} devices, but there are'
      f' {count}; change --mesh or --devices.'
    )
  shape = tuple(sizes.get(axis, 1) for axis in rules.AXES)
  return jax.make_mesh(
    shape, rules.AXES, axis_types=(AxisType.Auto,) * len(shape)
  )


def row_shards(mesh: Mesh | None) -> int:
  """Returns into how many parts the rows of a batch are split."""
  if mesh is None:
    return 1
  return math.prod(mesh.shape[axis] for axis in rules.ROWS)


def layout(mesh: Mesh | None, vocab_size: int) -> Layout | None:
  """Returns how the vocabulary kernels are split, or None without a mesh."""
  if mesh is None:
    return None
  # A vocabulary that the axis does not divide is kept whole on each device.
  tensor = mesh.shape['tensor']
  split = tensor > 1 and vocab_size % tensor == 0
  return Layout(mesh, rules.ROWS, 'tensor' if split else None)


def constrain_rows(tree: Any, mesh: Mesh | None) -> Any:
  """Returns the tree with the first dimension of each leaf over the rows."""
  if mesh is None:
    return tree
  rows = NamedSharding(mesh, PartitionSpec(rules.ROWS))
  return jax.tree.map(
    lambda x: jax.lax.with_sharding_constraint(x, rows) if x.ndim else x, tree
  )


def constrain_params(params: Any, mesh: Mesh | None, which: rules.Rules) -> Any:
  """Returns parameters constrained to a rule set, inside jit."""
  if mesh is None:
    return params
  return jax.lax.with_sharding_constraint(
    params, rules.shardings(params, mesh, which)
  )


def place_rows(tree: Any, mesh: Mesh | None) -> Any:
  """Returns host arrays [P, ...] placed with the first dimension split.

  With several processes each passes its own part of the rows.
  """
  if mesh is None:
    return jax.tree.map(jax.numpy.asarray, tree)
  rows = NamedSharding(mesh, PartitionSpec(rules.ROWS))
  return jax.tree.map(
    lambda x: jax.make_array_from_process_local_data(rows, x), tree
  )
