"""Checks of arguments that the caller fixed before tracing.

A number that is traced, such as the value of a schedule, passes unchecked:
inside jit nothing is raised.
"""

import jax
import jax.core
import jax.numpy as jnp

from rljax.core.types import Array


def positive(**numbers: float | Array) -> None:
  """Raises ValueError for a number, f32 [], that is not above 0."""
  for name, number in numbers.items():
    if is_known(number) and not number > 0:
      raise ValueError(f'{name}={number} must be positive.')


def nonnegative(**numbers: float | Array) -> None:
  """Raises ValueError for a number, f32 [], that is below 0."""
  for name, number in numbers.items():
    if is_known(number) and not number >= 0:
      raise ValueError(f'{name}={number} must not be negative.')


def shares(**numbers: float | Array) -> None:
  """Raises ValueError for a number, f32 [], outside [0, 1]."""
  for name, number in numbers.items():
    if is_known(number) and not 0 <= number <= 1:
      raise ValueError(f'{name}={number} must lie in [0, 1].')


def one_shape(**arrays: Array) -> None:
  """Raises ValueError unless the arrays [...] have one shape."""
  shapes = {name: list(array.shape) for name, array in arrays.items()}
  if len({tuple(shape) for shape in shapes.values()}) > 1:
    found = ', '.join(f'{name}{shape}' for name, shape in shapes.items())
    raise ValueError(
      f'{found} must have one shape: spread rows over tokens with'
      ' credit.broadcast first.'
    )


def is_known(number: float | Array) -> bool:
  """Whether this is a number, f32 [], whose value can be read now."""
  if number is None or isinstance(number, jax.core.Tracer):
    return False
  return jnp.ndim(number) == 0
