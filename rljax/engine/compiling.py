"""How the engine's programs are compiled."""

from collections.abc import Callable
import os
from typing import Any

import jax
import jax.core
from jax.sharding import Mesh

_LEVEL = 'xla_backend_optimization_level'


def jit(fn: Callable, mesh: Mesh | None = None, **kwargs: Any) -> Any:
  """Returns `jax.jit(fn)` with what suits the devices of a mesh.

  On a CPU, LLVM at its level 3 takes more time than a short run, and the loops
  of level 1 are as fast: time goes to the matrix products of a library. The
  level in XLA_FLAGS, if there is one, stands.

  Args:
    fn: to compile; it takes arrays.
    mesh: where it will run; None for the default device.
    **kwargs: for `jax.jit`.
  """
  if _platform(mesh) == 'cpu' and _LEVEL not in os.environ.get('XLA_FLAGS', ''):
    return _Tuned(fn, {_LEVEL: 1}, kwargs)
  return jax.jit(fn, **kwargs)


class _Tuned:
  """A compiled function with options, which only an outermost one may have."""

  def __init__(self, fn: Callable, options: dict, kwargs: dict):
    self._outer = jax.jit(fn, compiler_options=options, **kwargs)
    self._inner = jax.jit(fn, **kwargs)
    self.lower = self._outer.lower
    self.__wrapped__ = fn

  def __call__(self, *args: Any) -> Any:
    traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(args))
    return (self._inner if traced else self._outer)(*args)


def _platform(mesh: Mesh | None) -> str:
  return mesh.devices.flat[0].platform if mesh else jax.default_backend()
