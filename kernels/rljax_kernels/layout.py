"""How the arrays of a kernel are split over a mesh."""

import dataclasses

from jax.sharding import Mesh


@dataclasses.dataclass(frozen=True)
class Layout:
  """How rows and vocabulary are split over a mesh.

  Attributes:
    mesh: the device mesh.
    rows: mesh axes that split the N tokens.
    vocab: mesh axis that splits the vocabulary, or None.

  Raises:
    ValueError: an axis that the mesh lacks, or one axis for two things.
  """

  mesh: Mesh
  rows: tuple[str, ...] = ()
  vocab: str | None = None

  def __post_init__(self):
    named = (*self.rows, *(() if self.vocab is None else (self.vocab,)))
    for axis in named:
      if axis not in self.mesh.axis_names or named.count(axis) > 1:
        raise ValueError(
          f'rows={self.rows} and vocab={self.vocab!r} must be different axes of'
          f' the mesh, {self.mesh.axis_names}.'
        )
