"""What all functions here ask of their arguments."""

import math
import operator
from typing import Any

import jax
import jax.core
import jax.numpy as jnp

_LAST_ID = 2**31 - 1


def arrays(**given: Any) -> None:
  """Raises ValueError for what has no shape and type; None may be absent."""
  for name, x in given.items():
    if x is not None and not (hasattr(x, 'shape') and hasattr(x, 'dtype')):
      raise ValueError(
        f'{name} is a {type(x).__name__}; pass an array (jnp.asarray).'
      )


def pair(hidden, unembed, name: str = 'unembed') -> bool:
  """Returns whether an unembedding is [D, V] rather than [V, D].

  Args:
    hidden: [N, D], float32 or bfloat16.
    unembed: [V, D] or [D, V]; a square one is [V, D].
    name: of the unembedding.

  Raises:
    ValueError: for other shapes or types.
  """
  arrays(hidden=hidden, **{name: unembed})
  shapes = f'hidden {hidden.shape}, {name} {unembed.shape}'
  if hidden.ndim != 2 or unembed.ndim != 2:
    raise ValueError(f'Need hidden [N, D] and {name} [V, D], got {shapes}.')
  if hidden.shape[1] not in unembed.shape:
    raise ValueError(
      f'Model widths differ: {shapes}; {name} is [V, D] or [D, V].'
    )
  for x in (hidden, unembed):
    if x.dtype not in (jnp.float32, jnp.bfloat16):
      raise ValueError(
        f'{x.dtype} is not supported ({shapes}); use bfloat16 or float32.'
      )
  if not all((*hidden.shape[1:], *unembed.shape)):
    raise ValueError(f'There is no id or no feature: {shapes}.')
  return hidden.shape[1] != unembed.shape[1]


def bend(softcap, valid, vocab: int, prefix: str = '') -> None:
  """Raises ValueError for a soft cap or a number of real ids that is none."""
  if softcap is not None and not 0 < softcap < math.inf:
    raise ValueError(
      f'{prefix}softcap={softcap} must be positive; None for no cap.'
    )
  if valid is None:
    return
  if not _is_integer(valid) or not 0 < valid <= vocab:
    raise ValueError(
      f'{prefix}valid={valid} must be an integer in [1, {vocab}], the number of'
      ' real ids.'
    )


def positive(**given) -> None:
  """Raises ValueError for a number that is given and no positive integer."""
  for name, number in given.items():
    if number is not None and not (_is_integer(number) and number > 0):
      raise ValueError(f'{name}={number} must be a positive integer.')


def _is_integer(x) -> bool:
  try:
    operator.index(x)
  except TypeError:
    return False
  return True


def inverse(
  temperature, tokens: int, name: str = 'temperature'
) -> jax.Array | None:
  """Returns 1 / temperature, f32 [N] without a gradient, or None for 1.

  Args:
    temperature: scalar or [N], positive. A traced one cannot be looked at:
      where it is not positive the result is NaN.
    tokens: N.
    name: of the argument.

  Raises:
    ValueError: for another shape, or values that are not positive and finite.
  """
  shape = jnp.shape(temperature)
  if shape not in ((), (tokens,)):
    raise ValueError(f'{name} {shape} must be a scalar or [{tokens}].')
  if not _is_traced(temperature):
    with jax.ensure_compile_time_eval():
      values = jnp.asarray(temperature, jnp.float32)
      good = bool(jnp.all((values > 0) & (values < jnp.inf)))
    if not good:
      raise ValueError(f'{name} is {temperature}; it must be positive.')
    if not shape and temperature == 1:
      return None
  x = jax.lax.stop_gradient(jnp.asarray(temperature, jnp.float32))
  return jnp.broadcast_to(jnp.where(x > 0, 1.0 / x, jnp.nan), (tokens,))


def _is_traced(x) -> bool:
  """Whether the values of x cannot be read here."""
  if isinstance(x, jax.core.Tracer):
    return True
  return isinstance(x, jax.Array) and not x.is_fully_addressable


def rows(tokens: int, **given) -> None:
  """Raises ValueError for an array that has not one number for each token."""
  arrays(**given)
  for name, x in given.items():
    if x is not None and x.shape != (tokens,):
      raise ValueError(
        f'{name} {x.shape} must be ({tokens},), a number for each token.'
      )


def ids(**given) -> jax.Array:
  """Returns ids [...] as i32; those that do not fit become -1 or 2^31 - 1.

  Raises:
    ValueError: it is no array of integers.
  """
  ((name, x),) = given.items()
  arrays(**given)
  if not jnp.issubdtype(x.dtype, jnp.integer):
    raise ValueError(f'{name} are {x.dtype}; ids are integers.')
  # Wide integers would wrap around when they become int32.
  if x.dtype.itemsize > 4 or x.dtype == jnp.uint32:
    x = x.clip(
      -1 if jnp.issubdtype(x.dtype, jnp.signedinteger) else 0, _LAST_ID
    )
  return jnp.asarray(x, jnp.int32)


def vocab_axis(axis: str) -> int:
  """Returns into how many parts the vocabulary is split inside a `shard_map`.

  Raises:
    ValueError: outside of one, or where it does not track what varies over its
      axes: there gradients would silently be those of one shard.
  """
  try:
    number = jax.lax.axis_index(axis)
  except NameError:
    raise ValueError(
      f'vocab_axis={axis!r} is for use inside a shard_map over that axis; pass'
      ' layout= outside.'
    ) from None
  if axis not in jax.typeof(number).manual_axis_type.varying:
    raise ValueError(
      f'vocab_axis={axis!r} needs jax.shard_map(..., check_vma=True).'
    )
  return jax.lax.axis_size(axis)
