"""Metrics: sums on the device, numbers in files."""

from collections.abc import Iterator, Mapping
import json
import math
import os
import pathlib
from typing import Any, BinaryIO

import jax
import jax.numpy as jnp
import tensorboardX

from rljax.core.types import Mean, Metrics, Peak

FILE = 'metrics.jsonl'
_SAMPLES = 'samples.jsonl'
_EVENTS = 'tensorboard'


def add(a: Metrics, b: Metrics) -> dict[str, Mean | Peak]:
  """Returns the metrics of both: sums and counts add, peaks are compared.

  Pure and jittable. A name that only one of them has is kept as it is.

  Raises:
    TypeError: a name is a Mean in one and a Peak in the other.
  """
  merged = {**a, **b}
  for name in a.keys() & b.keys():
    merged[name] = _add(name, a[name], b[name])
  return merged


def _add(name: str, a: Mean | Peak, b: Mean | Peak) -> Mean | Peak:
  if isinstance(a, Mean) and isinstance(b, Mean):
    return Mean(total=a.total + b.total, count=a.count + b.count)
  if isinstance(a, Peak) and isinstance(b, Peak):
    return Peak(value=jnp.maximum(a.value, b.value))
  raise TypeError(f'metric {name!r} is {type(a)} in one and {type(b)} in other')


def finalize(metrics: Metrics) -> dict[str, float]:
  """Returns the numbers to show, after one transfer from the device.

  A mean over nothing (count 0) and a peak of nothing (-inf) are left out; a
  NaN total stays NaN.
  """
  numbers = {}
  for name, metric in jax.device_get(dict(metrics)).items():
    if isinstance(metric, Peak):
      if metric.value != -math.inf:
        numbers[name] = float(metric.value)
    elif metric.count != 0:
      numbers[name] = float(metric.total) / float(metric.count)
  return numbers


def read(workdir: str | os.PathLike[str]) -> list[dict[str, Any]]:
  """Returns the rows of a run's metrics; null is NaN.

  A last line that was cut off while it was written is left out.

  Raises:
    ValueError: another line is no row; names the file and the line.
  """
  path = pathlib.Path(workdir, FILE)
  if not path.exists():
    return []
  lines = path.read_bytes().split(b'\n')[:-1]
  return [_row(line, f'{path}, line {i + 1}') for i, line in enumerate(lines)]


def _row(line: bytes, place: str) -> dict[str, Any]:
  try:
    row = json.loads(line)
  except ValueError as error:
    raise ValueError(f'{place}: not JSON: {error}') from None
  if not isinstance(row, dict) or not {'stage', 'step'} <= row.keys():
    raise ValueError(f'{place}: not a row: {line[:40]!r}')
  return {k: math.nan if v is None else v for k, v in row.items()}


class Clock:
  """Puts steps that start again with each stage on one axis."""

  def __init__(self):
    self._begin = 0
    self._now = 0

  def __call__(self, step: int) -> int:
    """Returns the place of the next row, in the order of the file."""
    if self._begin + step < self._now:
      self._begin = self._now
    self._now = self._begin + step
    return self._now


class Writer:
  """Appends to metrics.jsonl, samples.jsonl and TensorBoard events.

  `position` goes into the checkpoint record. A writer that is given it drops
  what was written later, so a resumed run ends with the files of one that was
  never stopped. One process writes.
  """

  def __init__(
    self,
    workdir: str | os.PathLike[str],
    position: Mapping[str, int] | None = None,
  ):
    """Opens the files, empty unless `position` says how much to keep."""
    root = pathlib.Path(workdir)
    root.mkdir(parents=True, exist_ok=True)
    self._files = {
      name: _open(root / name, (position or {}).get(name, 0))
      for name in (FILE, _SAMPLES)
    }
    for stale in (root / _EVENTS).glob('events.out.tfevents.*'):
      stale.unlink()
    self._events = tensorboardX.SummaryWriter(str(root / _EVENTS))
    self._clock = Clock()
    for row in read(root):
      self._event(row)

  def write(
    self, stage: str, step: int, values: Mapping[str, float], seconds: float
  ) -> None:
    """Appends one row.

    Args:
      stage: 'sft', 'rl' or 'eval'.
      step: rollout batches, or updates in 'sft', so far.
      values: numbers by metric name; those that are not finite become null.
      seconds: since the run began, resumed parts added up.
    """
    row = {'stage': stage, 'step': step, 'seconds': seconds}
    row |= {name: float(value) for name, value in values.items()}
    self._append(FILE, row)
    self._event(row)

  def sample(self, row: Mapping[str, Any]) -> None:
    """Appends a sampled answer: step, prompt, response, reward and the like."""
    self._append(_SAMPLES, row)

  def position(self) -> dict[str, int]:
    """Returns the bytes written so far, by file."""
    return {name: file.tell() for name, file in self._files.items()}

  def close(self) -> None:
    """Closes all files."""
    for file in self._files.values():
      file.close()
    self._events.close()

  def __enter__(self) -> 'Writer':
    return self

  def __exit__(self, *exc: object) -> None:
    self.close()

  def _append(self, name: str, row: Mapping[str, Any]) -> None:
    row = {k: _finite(v) for k, v in row.items()}
    line = json.dumps(row, allow_nan=False)
    self._files[name].write(line.encode() + b'\n')
    self._files[name].flush()  # what a killed run has logged is not lost

  def _event(self, row: Mapping[str, Any]) -> None:
    step = self._clock(row['step'])
    for name, value in _metrics_of(row):
      self._events.add_scalar(f'{row["stage"]}/{name}', value, step)


def _metrics_of(row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
  """Yields the finite metrics of a row."""
  for name, value in row.items():
    if name not in ('stage', 'step', 'seconds') and _finite(value) is not None:
      yield name, value


def _open(path: pathlib.Path, keep: int) -> BinaryIO:
  """Opens a file for appending after its first `keep` bytes."""
  path.touch()
  file = path.open('r+b')
  # A power failure can lose what was flushed; truncating must not pad.
  file.truncate(min(keep, path.stat().st_size))
  file.seek(0, 2)
  return file


def _finite(value: Any) -> Any:
  """Returns None for a float that JSON has no word for."""
  return (
    None if isinstance(value, float) and not math.isfinite(value) else value
  )
