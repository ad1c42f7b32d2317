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
  """

  mesh: Mesh
  rows: tuple[str, ...] = ()
  vocab: str | None = None
