"""A calculator on the device: expressions of tokens, evaluated exactly.

An expression is positive whole numbers joined by + - * /, products before
sums, without spaces, signs or parentheses, over given numbers that may each be
used once. Quotients are fractions of 32-bit integers; nothing overflows while
the product of the given numbers times their count stays below 2³¹.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

SYMBOLS = '0123456789+-*/'
_MINUS, _TIMES, _OVER, _END, _OTHER = range(11, 16)
_NO_NUMBER = 10**8  # where a number being read stops growing; none is as large


class Value(NamedTuple):
  """What expressions are worth; the fraction counts where it is valid."""

  valid: jax.Array  # bool [B]
  numerator: jax.Array  # i32 [B]
  denominator: jax.Array  # i32 [B], positive


class _State(NamedTuple):
  """An expression read up to some token; [B] each, exact fractions."""

  valid: jax.Array
  digits: jax.Array  # bool, the number being read has any
  number: jax.Array  # being read
  used: jax.Array  # bool [B, n], given numbers that are spent
  term: jax.Array  # numerator of the product being read
  under: jax.Array  # its denominator
  divide: jax.Array  # bool, the next number divides the product
  total: jax.Array  # numerator of the sum before the product
  below: jax.Array  # its denominator
  sign: jax.Array  # of the product


def evaluate(
  tokens: jax.Array, length: jax.Array, symbols: jax.Array, numbers: jax.Array
) -> Value:
  """Evaluates one expression a row.

  Args:
    tokens: i32 [B, T].
    length: i32 [B], below T; tokens of the expression.
    symbols: i32 [B, 14], ids of the `SYMBOLS`.
    numbers: i32 [B, n], the numbers given, all positive.
  """
  same = tokens[:, :, None] == symbols[:, None, :]
  code = jnp.where(same.any(-1), same.argmax(-1), _OTHER)
  place = jnp.arange(code.shape[1])[None]
  end = length[:, None]
  code = jnp.where(place == end, _END, code)

  def step(state, column):
    code, live = column
    after = _read(state, code, numbers)
    return jax.tree.map(lambda *pair: _where(live, *pair), after, state), None

  columns = (code.T, (place <= end).T)
  state, _ = jax.lax.scan(step, _start(numbers), columns)
  return Value(state.valid, state.total, state.below)


def _where(rows: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
  """Returns `new` in some rows, bool [B], and `old` in the others."""
  return jnp.where(rows.reshape(-1, *[1] * (new.ndim - 1)), new, old)


def _start(numbers: jax.Array) -> _State:
  """Returns the state before the first token."""
  zero = jnp.zeros_like(numbers[:, 0])
  return _State(
    valid=zero == 0,
    digits=zero != 0,
    number=zero,
    used=numbers < 0,
    term=zero + 1,
    under=zero + 1,
    divide=zero != 0,
    total=zero,
    below=zero + 1,
    sign=zero + 1,
  )


def _read(state: _State, code: jax.Array, numbers: jax.Array) -> _State:
  """Returns the state after one token of each row."""
  digit = code < 10
  valid = state.valid & jnp.where(
    digit, (state.number > 0) | ~state.digits, state.digits
  )
  valid &= code != _OTHER
  grown = jnp.minimum(state.number * 10 + code, _NO_NUMBER)
  done = _close(state, code, numbers)
  return done._replace(
    valid=valid & (digit | done.valid),
    digits=digit,
    number=jnp.where(digit, grown, 0),
    used=jnp.where(digit[:, None], state.used, done.used),
    **{
      name: jnp.where(digit, getattr(state, name), getattr(done, name))
      for name in ('term', 'under', 'divide', 'total', 'below', 'sign')
    },
  )


def _close(state: _State, code: jax.Array, numbers: jax.Array) -> _State:
  """Returns the state after an operator or the end: a number is complete."""
  free = (numbers == state.number[:, None]) & ~state.used
  first = free & (jnp.cumsum(free, axis=1) == 1)
  term = jnp.where(state.divide, state.term, state.term * state.number)
  under = jnp.where(state.divide, state.under * state.number, state.under)
  product = (code == _TIMES) | (code == _OVER)
  total = state.total * under + state.sign * term * state.below
  return state._replace(
    valid=free.any(axis=1),
    used=state.used | first,
    term=jnp.where(product, term, 1),
    under=jnp.where(product, under, 1),
    divide=code == _OVER,
    total=jnp.where(product, state.total, total),
    below=jnp.where(product, state.below, state.below * under),
    sign=jnp.where(product, state.sign, jnp.where(code == _MINUS, -1, 1)),
  )
