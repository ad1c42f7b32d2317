"""Files of numbers that other libraries computed, and how ours compare.

A file holds `fx/<fixture>/<array>`, `out/<case id>/<array>` and `index`, JSON
with the cases. Which kind a case is follows from the file alone:

  raises      the peer raised: ours gives finite numbers
  non-finite  an output of the peer is NaN or infinite: ours is finite, and
              equal where the peer's is finite
  comparable  all the others: ours is equal
"""

from collections.abc import Callable, Mapping
import dataclasses
import functools
import json
import pathlib
from typing import Any

import numpy as np

RTOL, ATOL = 2e-5, 2e-6
# Log-ratios of 40 and advantages of 300: float32 keeps no more of them.
BIG_RTOL = 1e-3

Outputs = Mapping[str, Any]
SPOILED = 'spoiled'


@dataclasses.dataclass(frozen=True)
class Case:
  """One call of a peer's function."""

  id: str
  fn: str
  fixture: str | None
  kwargs: Mapping[str, Any]
  inputs: Mapping[str, np.ndarray]
  outputs: Mapping[str, np.ndarray]  # by their last name
  metrics: Mapping[str, float]
  error: str | None

  @property
  def kind(self) -> str:
    """One of 'raises', 'non-finite', 'comparable'."""
    if self.error:
      return 'raises'
    finite = all(np.isfinite(x).all() for x in self.outputs.values())
    return 'comparable' if finite else 'non-finite'


class File:
  """A file of cases."""

  def __init__(self, path: str | pathlib.Path):
    arrays = np.load(path)
    self._names = arrays.files
    # Cases share their inputs.
    self._array = functools.cache(arrays.__getitem__)
    self.index = json.loads(str(self._array('index')))
    self.cases = [self._case(entry) for entry in self.index['cases']]

  def fixture(self, name: str) -> dict[str, np.ndarray]:
    """Returns all arrays of a fixture."""
    head = f'fx/{name}/'
    names = [key for key in self._names if key.startswith(head)]
    return {key[len(head) :]: self._array(key) for key in names}

  def _case(self, entry: Mapping[str, Any]) -> Case:
    outputs = {
      key.removeprefix(f'out/{entry["id"]}/'): self._array(key)
      for key in entry['outputs']
    }
    inputs = {k: self._array(key) for k, key in entry['inputs'].items()}
    return Case(
      id=entry['id'],
      fn=entry['fn'],
      fixture=entry['fixture'],
      kwargs=entry['kwargs'],
      inputs=inputs,
      outputs=outputs,
      metrics=entry['metrics'] or {},
      error=entry['error'],
    )


Adapter = Callable[[Case, File], Outputs]


@dataclasses.dataclass(frozen=True)
class Declared:
  """Why a comparable case is not matched: the peer draws or is wrong.

  Attributes:
    outputs: how the names of the outputs start in which it may differ.
    reason: the derivation.
  """

  outputs: tuple[str, ...]
  reason: str


def failure(
  case: Case, found: Outputs, declared: Declared | None = None
) -> str | None:
  """Returns what is wrong with our outputs of a case, or None.

  Outputs that are declared to differ may have any finite numbers.

  An output of the peer that we do not return is wrong too, a metric is not.
  Where the peer's output is non-finite, `found[SPOILED]` may name entries of
  the others that NaN outside the mask reached: bool arrays by output.
  """
  found = dict(found)
  spoiled = found.pop(SPOILED, {})
  if spoiled and case.kind != 'non-finite':
    return f'{SPOILED} in a case that is {case.kind}'
  for name, value in found.items():
    if not np.isfinite(np.asarray(value, np.float64)).all():
      return f'{name} is not finite'
  if case.kind == 'raises':
    return None
  for name, wanted in case.outputs.items():
    if declared and name.startswith(declared.outputs):
      continue
    if name not in found:
      return f'{name} is not computed'
    if name in spoiled:
      wanted = np.where(spoiled[name], np.nan, wanted)
    wrong = _difference(case, np.asarray(found[name]), wanted)
    if wrong:
      return f'{name}: {wrong}'
  for name, wanted in case.metrics.items():
    if name in found:
      wrong = _difference(case, np.asarray(found[name]), np.asarray(wanted))
      if wrong:
        return f'metric {name}: {wrong}'
  return None


def spoiled_rows(read: np.ndarray) -> Outputs:
  """Returns that gradients are spoiled in rows of `read` [B, T] with NaN."""
  rows = ~np.isfinite(read).all(1, keepdims=True)
  return {SPOILED: {'grad_lp': rows}} if rows.any() else {}


def _difference(
  case: Case, found: np.ndarray, wanted: np.ndarray
) -> str | None:
  if found.shape != wanted.shape:
    return f'shape {found.shape}, not {wanted.shape}'
  there = np.isfinite(wanted)
  rtol = BIG_RTOL if case.fixture == 'big' else RTOL
  wrong = ~np.isclose(found, wanted, rtol=rtol, atol=ATOL) & there
  if not wrong.any():
    return None
  at = np.unravel_index(np.argmax(wrong), wrong.shape)
  return f'{found[at]:.8g}, not {wanted[at]:.8g}, at {list(map(int, at))}'
