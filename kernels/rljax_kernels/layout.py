"""How the arrays of a kernel are split over a mesh."""

from collections.abc import Callable
import dataclasses
import math
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec


@dataclasses.dataclass(frozen=True)
class Layout:
  """How rows and vocabulary are split over a mesh.

  Axes of the mesh may be of type `Auto` or `Explicit`; arrays that lie
  elsewhere are moved. To differentiate outside of `jit` on a mesh with explicit
  axes, set it first: `with jax.set_mesh(mesh):`.

  Attributes:
    mesh: the device mesh.
    rows: mesh axes that split the N tokens.
    vocab: mesh axis that splits the vocabulary, or None.

  Raises:
    ValueError: no mesh, an axis that it lacks, or one axis for two things.
  """

  mesh: Mesh
  rows: tuple[str, ...] = ()
  vocab: str | None = None

  def __post_init__(self):
    if not isinstance(self.mesh, Mesh):
      raise ValueError(
        f'mesh={self.mesh!r} must be a jax.sharding.Mesh; for one device pass'
        ' layout=None.'
      )
    if not isinstance(self.rows, tuple):
      raise ValueError(f'rows={self.rows!r} must be a tuple of axis names.')
    named = (*self.rows, *(() if self.vocab is None else (self.vocab,)))
    for axis in named:
      if axis not in self.mesh.axis_names or named.count(axis) > 1:
        raise ValueError(
          f'rows={self.rows} and vocab={self.vocab!r} must be different axes of'
          f' the mesh, {self.mesh.axis_names}.'
        )

  def check(self, tokens: int, vocab: int) -> None:
    """Raises ValueError unless N tokens and V ids split evenly."""
    parts = math.prod(self.mesh.shape[axis] for axis in self.rows)
    if tokens % parts:
      raise ValueError(
        f'{tokens} tokens do not split over rows={self.rows}, {parts} parts:'
        ' pad them.'
      )
    if self.vocab is not None and vocab % self.mesh.shape[self.vocab]:
      raise ValueError(
        f'{vocab} ids do not split over vocab={self.vocab!r},'
        f' {self.mesh.shape[self.vocab]} parts: pad the unembedding and pass'
        ' valid=.'
      )

  def place(self, tree: Any, specs: Any) -> Any:
    """Returns arrays where `shard_map` wants them; a prefix of specs will do.

    Axes of type `Auto` need nothing; of type `Explicit` a move is an operation
    of its own, with a gradient.
    """
    if AxisType.Explicit not in self.mesh.axis_types:
      return tree

    def move(spec: PartitionSpec, part: Any):
      place = NamedSharding(self.mesh, spec)
      return jax.tree.map(lambda x: jax.sharding.reshard(x, place), part)

    return jax.tree.map(move, specs, tree)

  def spread(self, run: Callable, in_specs: Any, out_specs: Any) -> Callable:
    """Returns `run` of one shard as a function of whole arrays."""
    mapped = jax.shard_map(
      run,
      mesh=self.mesh,
      in_specs=in_specs,
      out_specs=out_specs,
      check_vma=False,
    )
    return lambda *args: mapped(*self.place(args, in_specs))
