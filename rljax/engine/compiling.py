"""How the engine's programs are compiled."""

from collections.abc import Callable
import os
from typing import Any

import jax
from jax.sharding import Mesh

_LEVEL = 'xla_backend_optimization_level'


def jit(fn: Callable, mesh: Mesh | None = None, **kwargs: Any) -> Any:
  """Returns `jax.jit(fn)` with what suits the devices of a mesh.

  On a CPU, LLVM at its level 3 takes more time than a short run, and the loops
  of level 1 are as fast: time goes to the matrix products of a library. The
  level in XLA_FLAGS, if there is one, stands.

  Args:
    fn: to compile.
    mesh: where it will run; None for the default device.
    **kwargs: for `jax.jit`.
  """
  options = None
  if _platform(mesh) == 'cpu' and _LEVEL not in os.environ.get('XLA_FLAGS', ''):
    options = {_LEVEL: 1}
  return jax.jit(fn, compiler_options=options, **kwargs)


def _platform(mesh: Mesh | None) -> str:
  return mesh.devices.flat[0].platform if mesh else jax.default_backend()
