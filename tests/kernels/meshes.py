"""Ways to split rows and vocabulary over the eight devices of the tests."""

import jax
from jax.sharding import AxisType

import rljax_kernels

ROWS = (8,), ('data',), ('data',), None
ROWS_OF_TWO_AXES = (4, 2), ('data', 'fsdp'), ('data', 'fsdp'), None
ROWS_AND_VOCAB = (4, 2), ('data', 'tensor'), ('data',), 'tensor'
MORE_VOCAB = (2, 4), ('data', 'tensor'), ('data',), 'tensor'
VOCAB = (8,), ('tensor',), (), 'tensor'


def layout(shape, axes, rows, vocab) -> rljax_kernels.Layout:
  mesh = jax.make_mesh(shape, axes, axis_types=(AxisType.Auto,) * len(axes))
  return rljax_kernels.Layout(mesh, rows, vocab)
