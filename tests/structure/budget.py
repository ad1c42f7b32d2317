"""How much CPU time each folder of the default tests may take.

RLJAX_DURATIONS=/tmp/durations.jsonl python -m pytest
python -m tests.structure.budget /tmp/durations.jsonl
"""

import collections
from collections.abc import Mapping
import json
import os
import pathlib
import sys

import pytest

TOTAL = 'total'
# CPU-minutes, with a warm or a cold compilation cache.
LIMITS: Mapping[str, float] = {
  'core': 0.5,
  'objectives': 2.0,
  'kernels': 3.0,
  'models': 1.5,
  'engine': 3.5,
  'runs': 2.5,
  'scale': 2.0,
  TOTAL: 12.0,
}
# Folders without a line of their own.
OTHER = 1.0


def cpu_seconds() -> float:
  """Returns CPU seconds of this process and of children that ended."""
  times = os.times()
  return sum(times[:4])


class Recorder:
  """A pytest plugin that appends one JSON line of CPU seconds per process."""

  def __init__(self, path: str):
    self._path = path
    self._seconds: dict[str, float] = collections.defaultdict(float)
    # A shell that replaced itself by this process leaves it its children.
    self._before = sum(os.times()[2:4])

  @pytest.hookimpl(wrapper=True)
  def pytest_make_collect_report(self, collector):
    """Counts the imports of a test module."""
    start = cpu_seconds()
    report = yield
    if isinstance(collector, pytest.Module):
      self._seconds[_folder(collector)] += cpu_seconds() - start
    return report

  @pytest.hookimpl(wrapper=True)
  def pytest_runtest_protocol(self, item):
    """Counts a test with its fixtures."""
    start = cpu_seconds()
    result = yield
    self._seconds[_folder(item)] += cpu_seconds() - start
    return result

  def pytest_sessionfinish(self):
    """Writes the sums, and the whole process as `total`."""
    total = cpu_seconds() - self._before
    line = json.dumps({**self._seconds, TOTAL: total})
    with open(self._path, 'a') as file:
      file.write(line + '\n')


def _folder(node: pytest.Item | pytest.Module) -> str:
  """Returns the folder below tests/ of a test, '.' for tests/ itself."""
  return pathlib.PurePath(node.nodeid.split('::')[0]).parts[1:][0]


def load(path: str) -> dict[str, float]:
  """Returns CPU minutes per folder, added over the lines of a file."""
  minutes: dict[str, float] = collections.defaultdict(float)
  for line in pathlib.Path(path).read_text().splitlines():
    for name, seconds in json.loads(line).items():
      minutes[name] += seconds / 60
  return dict(minutes)


def excesses(minutes: Mapping[str, float]) -> list[str]:
  """Returns one line for each folder above its limit."""
  return [
    f'tests/{name}: {spent:.2f} CPU-minutes, {LIMITS.get(name, OTHER)} allowed'
    for name, spent in sorted(minutes.items())
    if spent > LIMITS.get(name, OTHER)
  ]


def main(path: str) -> int:
  """Prints the table; returns the number of folders above their limit."""
  minutes = load(path)
  for name, spent in sorted(minutes.items(), key=lambda x: -x[1]):
    print(f'{name:12s} {spent:6.2f} of {LIMITS.get(name, OTHER):4.1f} min')
  over = excesses(minutes)
  print('\n'.join(over) or 'within the budget')
  return len(over)


if __name__ == '__main__':
  sys.exit(main(sys.argv[1]))
