"""Schedules: hyperparameters that change during a run.

A schedule maps a count, an integer or i32 [], to f32 []. Coefficients of a
method count rollout batches (`step`); learning rates count optimizer updates
(`update`, that is batches x epochs x minibatches). `total` is the configured
number of them: a schedule ends there and holds its last value. Positions
within a run are fractions of `total`, so that a shorter run keeps its shape.
Schedules never raise inside jit; bad settings raise when they are built.
"""

from collections.abc import Callable
import math
import re

import jax.numpy as jnp

from rljax.core import spelling
from rljax.core.types import Array

Count = int | Array
Schedule = Callable[[Count], Array]


def constant(value: float) -> Schedule:
  """Returns a schedule that is always `value`."""
  return lambda step: jnp.asarray(value, jnp.float32)


def linear(start: float, end: float, *, total: int) -> Schedule:
  """Returns a straight line from `start` at 0 to `end` at `total`."""
  progress = _progress(total)
  return lambda step: start + (end - start) * progress(step)


def cosine(start: float, end: float, *, total: int) -> Schedule:
  """Returns half a cosine from `start` at 0 to `end` at `total`."""
  progress = _progress(total)

  def schedule(step: Count) -> Array:
    return end + (start - end) * 0.5 * (1.0 + jnp.cos(jnp.pi * progress(step)))

  return schedule


def piecewise(*values: float, total: int) -> Schedule:
  """Returns constant pieces: value, fraction, value, fraction, ..., value.

  `piecewise(0.1, 0.5, 0.01, total=n)` is 0.1 up to the middle of the run and
  0.01 from there on.

  Args:
    *values: an odd number; fractions in [0, 1] must not decrease.
    total: the count at which the run ends.

  Raises:
    ValueError: if the values do not have this form.
  """
  pieces, fractions = values[0::2], values[1::2]
  if len(values) % 2 == 0 or list(fractions) != sorted(fractions):
    raise ValueError(
      'piecewise takes value, fraction, value, ..., value with increasing '
      f'fractions; got {values}'
    )
  _check_fractions('piecewise', fractions)
  progress = _progress(total)

  def schedule(step: Count) -> Array:
    now, value = progress(step), jnp.asarray(pieces[0], jnp.float32)
    for fraction, piece in zip(fractions, pieces[1:], strict=True):
      value = jnp.where(now >= fraction, piece, value)
    return value

  return schedule


def handoff(begin: float, end: float | None = None, *, total: int) -> Schedule:
  """Returns 1 up to `begin`, a line to 0 at `end`, and 0 after that.

  One method hands over to another: the first is weighted by the schedule, the
  second by one minus it.

  Args:
    begin: fraction of `total` at which the hand-over begins.
    end: fraction at which it is complete; None means at once.
    total: the count at which the run ends.

  Raises:
    ValueError: if not 0 <= begin <= end <= 1.
  """
  last = begin if end is None else end
  _check_fractions('handoff', (begin, last))
  if last < begin:
    raise ValueError(f'handoff ends at {last}, before it begins at {begin}')
  if last == begin:
    return piecewise(1.0, begin, 0.0, total=total)
  progress = _progress(total)
  return lambda step: jnp.clip(
    (last - progress(step)) / (last - begin), 0.0, 1.0
  )


def warmup(peak: float, begin: float, *, total: int) -> Schedule:
  """Returns a line from 0 at 0 to `peak`, and `peak` from there on.

  Args:
    peak: the value that is reached.
    begin: fraction of `total` at which it is.
    total: the count at which the run ends.

  Raises:
    ValueError: unless 0 <= begin <= 1.
  """
  return wsd(peak, begin, 1.0, total=total)


def warmup_linear(
  peak: float, begin: float, end: float = 0.0, *, total: int
) -> Schedule:
  """Returns `warmup`, and then a line to `end` at `total`.

  Args:
    peak: the value that is reached.
    begin: fraction of `total` at which it is.
    end: the last value.
    total: the count at which the run ends.

  Raises:
    ValueError: unless 0 <= begin <= 1.
  """
  return wsd(peak, begin, begin, end, total=total)


def warmup_cosine(
  peak: float, begin: float, end: float = 0.0, *, total: int
) -> Schedule:
  """Returns `warmup`, and then half a cosine to `end` at `total`.

  Args:
    peak: the value that is reached.
    begin: fraction of `total` at which it is.
    end: the last value.
    total: the count at which the run ends.

  Raises:
    ValueError: unless 0 <= begin <= 1.
  """
  return _trapezoid(peak, begin, begin, end, total, _half_cosine)


def wsd(
  peak: float, begin: float, decay: float, end: float = 0.0, *, total: int
) -> Schedule:
  """Returns warm-up, a stable stretch, and a line to `end` (WSD).

  A run may be continued from its stable stretch, whose length it need not know.

  Args:
    peak: the value of the stable stretch.
    begin: fraction of `total` at which it begins, after a line from 0.
    decay: fraction of `total` at which it ends.
    end: the value at `total`.
    total: the count at which the run ends.

  Raises:
    ValueError: unless 0 <= begin <= decay <= 1.

  Reference: Hu et al., "MiniCPM: Unveiling the Potential of Small Language
    Models with Scalable Training Strategies", 2024, arXiv:2404.06395.
  """
  return _trapezoid(peak, begin, decay, end, total, lambda x: x)


def restarts(
  start: float, end: float, cycles: float, growth: float = 1.0, *, total: int
) -> Schedule:
  """Returns cosines from `start` to `end`, one after the other (SGDR).

  Args:
    start: the value at the beginning of each cycle.
    end: the value that each approaches, and the last one holds.
    cycles: how many, a whole number.
    growth: how many times longer each is than the one before.
    total: the count at which the run ends.

  Raises:
    ValueError: if `cycles` is not whole and positive, or `growth` not positive.

  Reference: Loshchilov and Hutter, "SGDR: Stochastic Gradient Descent with
    Warm Restarts", 2016, arXiv:1608.03983.
  """
  if cycles < 1 or cycles != int(cycles) or growth <= 0:
    raise ValueError(
      f'restarts takes a whole number of cycles and a positive growth, got'
      f' {cycles} and {growth}'
    )
  sizes = [growth**i for i in range(int(cycles))]
  sizes = [size / math.fsum(sizes) for size in sizes]
  progress = _progress(total)

  def schedule(step: Count) -> Array:
    now, begin, along = progress(step), 0.0, jnp.float32(0.0)
    for size in sizes:
      along = jnp.where(now >= begin, (now - begin) / size, along)
      begin += size
    return end + (start - end) * (1.0 - _half_cosine(along))

  return schedule


def as_schedule(value: float | Schedule) -> Schedule:
  """Returns `value` itself if it is a schedule, else a constant one."""
  return value if callable(value) else constant(value)


_BUILDERS = {
  'constant': lambda *values, total: constant(*values),
  'linear': linear,
  'cosine': cosine,
  'piecewise': piecewise,
  'handoff': handoff,
  'warmup': warmup,
  'warmup_linear': warmup_linear,
  'warmup_cosine': warmup_cosine,
  'wsd': wsd,
  'restarts': restarts,
}


def parse(text: str, total: int) -> Schedule:
  """Returns the schedule that a flag describes.

  Args:
    text: a number, or a name of this module with numbers: '0.1',
      'linear(0.1, 0.01)', 'piecewise(0.1, 0.5, 0.01)', 'handoff(0.3, 0.5)'.
    total: the count at which the run ends.

  Raises:
    ValueError: if the text names no schedule or its numbers do not fit it;
      the message quotes the text.
  """
  match = re.fullmatch(r'\s*(\w+)\s*\(([^()]*)\)\s*', text)
  if match is None:
    return constant(_number(text, text))
  name, arguments = match.groups()
  if name not in _BUILDERS:
    hint = spelling.nearest(name, _BUILDERS)
    raise ValueError(f'{text!r}: there is no schedule {name!r}{hint}')
  values = [_number(part, text) for part in arguments.split(',')]
  try:
    return _BUILDERS[name](*values, total=total)
  except TypeError as error:
    raise ValueError(
      f'{text!r}: {name} does not take {len(values)} numbers'
    ) from error
  except ValueError as error:
    raise ValueError(f'{text!r}: {error}') from error


def _half_cosine(x: Array) -> Array:
  """Returns x of [0, 1], slow at both ends, f32 []."""
  return 0.5 * (1.0 - jnp.cos(jnp.pi * jnp.clip(x, 0.0, 1.0)))


def _trapezoid(
  peak: float,
  begin: float,
  decay: float,
  end: float,
  total: int,
  shape: Callable[[Array], Array],
) -> Schedule:
  """Returns a line from 0 up to `begin`, and `shape` down from `decay` on."""
  _check_fractions('a warm-up', (begin, decay))
  if decay < begin:
    raise ValueError(f'the decay begins at {decay}, before {begin}')
  progress = _progress(total)

  def schedule(step: Count) -> Array:
    now = progress(step)
    up = jnp.minimum(now / begin, 1.0) if begin else jnp.float32(1.0)
    if decay == 1.0:
      return peak * up
    down = shape(jnp.maximum((now - decay) / (1.0 - decay), 0.0))
    return jnp.where(now < begin, peak * up, peak + (end - peak) * down)

  return schedule


def _progress(total: int) -> Schedule:
  """Returns the schedule step / total, within [0, 1]."""
  if total < 1:
    raise ValueError(f'a schedule needs a total of at least 1, got {total}')

  def progress(step: Count) -> Array:
    return jnp.clip(jnp.asarray(step, jnp.float32) / total, 0.0, 1.0)

  return progress


def _check_fractions(name: str, fractions: tuple[float, ...]) -> None:
  """Raises ValueError unless every fraction lies in [0, 1]."""
  if any(not 0.0 <= fraction <= 1.0 for fraction in fractions):
    raise ValueError(
      f'{name} takes fractions of the run in [0, 1], got {fractions}'
    )


def _number(text: str, whole: str) -> float:
  """Returns the finite number that `text`, a part of `whole`, spells."""
  try:
    value = float(text)
  except ValueError:
    value = math.nan
  if not math.isfinite(value):
    raise ValueError(
      f'{whole!r} is no schedule: {text.strip()!r} is no finite number; '
      "examples: '0.1', 'linear(0.1,0.01)'"
    )
  return value
