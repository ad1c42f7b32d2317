"""Sharding rules: ordered (regex, PartitionSpec), first match wins.

Three sets per model: `TRAIN` for parameters and optimizer state, `SAMPLE` for
the sampler's own copy. `SAMPLE` has no fsdp axis: a weight that is sliced per
layer inside the token loop cannot be gathered outside it, so with fsdp every
token would gather every weight.
"""

from collections.abc import Sequence
import re
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Rules = Sequence[tuple[str, PartitionSpec]]

AXES = ('replica', 'data', 'fsdp', 'expert', 'tensor', 'sequence')
ROWS = ('replica', 'data', 'fsdp')

TRAIN: Rules = (
  (r'(^|/)(embed|unembed)$', PartitionSpec('tensor', 'fsdp')),
  (r'attention/[qkv]/kernel$', PartitionSpec(None, 'fsdp', 'tensor')),
  (r'attention/[qkv]/bias$', PartitionSpec(None, 'tensor')),
  (r'attention/o/kernel$', PartitionSpec(None, 'tensor', 'fsdp')),
  (r'mlp/(gate|up)/kernel$', PartitionSpec(None, 'fsdp', 'tensor')),
  (r'mlp/down/kernel$', PartitionSpec(None, 'tensor', 'fsdp')),
  (r'norm/scale$', PartitionSpec()),
)


def _without(spec: PartitionSpec, axis: str) -> PartitionSpec:
  return PartitionSpec(*(None if part == axis else part for part in spec))


SAMPLE: Rules = tuple((name, _without(spec, 'fsdp')) for name, spec in TRAIN)


def path_name(path: Sequence[Any]) -> str:
  """Returns a tree path as 'layers/attention/q/kernel'."""
  return jax.tree_util.keystr(tuple(path), simple=True, separator='/')


def spec_of(name: str, shape: Sequence[int], mesh: Mesh, rules: Rules):
  """Returns the PartitionSpec of a leaf.

  An axis that does not divide its dimension is left out, so that models of
  any size run on any mesh.

  Raises:
    ValueError: if no rule matches a leaf with dimensions.
  """
  if not shape:
    return PartitionSpec()
  for pattern, spec in rules:
    if re.search(pattern, name):
      return _fit(spec, shape, mesh)
  raise ValueError(f'No sharding rule matches {name!r} of shape {shape}.')


def _fit(spec, shape, mesh):
  parts = tuple(spec) + (None,) * (len(shape) - len(spec))
  size = dict(mesh.shape)
  keep = [
    axis if axis is not None and dim % size.get(axis, 1) == 0 else None
    for axis, dim in zip(parts, shape, strict=True)
  ]
  return PartitionSpec(*keep)


def shardings(tree: Any, mesh: Mesh, rules: Rules) -> Any:
  """Returns the NamedSharding of each leaf of a tree of shaped leaves."""

  def one(path, leaf):
    spec = spec_of(path_name(path), leaf.shape, mesh, rules)
    return NamedSharding(mesh, spec)

  return jax.tree_util.tree_map_with_path(one, tree)
