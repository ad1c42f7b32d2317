"""How much CPU time each folder of the default tests may take.

RLJAX_DURATIONS=/tmp/durations.jsonl python -m pytest
python -m tests.structure.budget /tmp/durations.jsonl

The limits hold for two quiet cores. A CPU second is worth less where others
share the cores and the caches, so a fixed piece of work is timed after every
test module, and the limits grow by how much slower it ran than on quiet cores.
"""

import collections
from collections.abc import Mapping
import json
import os
import pathlib
import statistics
import sys
import time

import pytest

TOTAL = 'total'
# CPU-minutes, with a warm or a cold compilation cache.
LIMITS: Mapping[str, float] = {
  'core': 0.5,
  'objectives': 3.0,
  'kernels': 3.0,
  'models': 1.5,
  'engine': 3.5,
  'runs': 2.5,
  'scale': 2.0,
  TOTAL: 12.0,
}
# Folders without a line of their own.
OTHER = 1.0
SAMPLES = 'samples'
# CPU seconds of `sample` within a run of the tests on two quiet cores.
QUIET = 0.0095


def cpu_seconds() -> float:
  """Returns CPU seconds of this process and of children that ended."""
  times = os.times()
  return sum(times[:4])


def sample() -> float:
  """Returns the CPU seconds that a fixed piece of work takes now."""
  start = time.process_time()
  words = {str(i * 7919 % 10007): i for i in range(20_000)}
  sorted(words.items(), key=lambda item: item[0][::-1])
  return time.process_time() - start


class Recorder:
  """A pytest plugin that appends one JSON line of CPU seconds per process."""

  def __init__(self, path: str):
    self._path = path
    self._samples: list[float] = []
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
  def pytest_runtest_protocol(self, item, nextitem):
    """Counts a test with its fixtures; samples the machine after a module."""
    start = cpu_seconds()
    result = yield
    self._seconds[_folder(item)] += cpu_seconds() - start
    if nextitem is None or nextitem.path != item.path:
      self._samples.append(sample())
    return result

  def pytest_sessionfinish(self):
    """Writes the sums, and the whole process as `total`."""
    total = cpu_seconds() - self._before
    line = json.dumps({**self._seconds, TOTAL: total, SAMPLES: self._samples})
    with open(self._path, 'a') as file:
      file.write(line + '\n')


def _folder(node: pytest.Item | pytest.Module) -> str:
  """Returns the folder below tests/ of a test, '.' for tests/ itself."""
  return pathlib.PurePath(node.nodeid.split('::')[0]).parts[1:][0]


def load(path: str) -> tuple[dict[str, float], float]:
  """Returns CPU minutes per folder over all lines, and the machine's slowness.

  The slowness is 1 on quiet cores, and never below.
  """
  minutes: dict[str, float] = collections.defaultdict(float)
  samples = []
  for line in pathlib.Path(path).read_text().splitlines():
    record = json.loads(line)
    samples += record.pop(SAMPLES)
    for name, seconds in record.items():
      minutes[name] += seconds / 60
  return dict(minutes), max(1.0, statistics.median(samples) / QUIET)


def limit(name: str, slowness: float) -> float:
  """Returns the CPU minutes that a folder may take on such a machine."""
  return LIMITS.get(name, OTHER) * slowness


def excesses(minutes: Mapping[str, float], slowness: float) -> list[str]:
  """Returns one line for each folder above its limit."""
  allowed = {name: limit(name, slowness) for name in minutes}
  return [
    f'tests/{name}: {spent:.2f} CPU-minutes, {allowed[name]:.2f} allowed'
    for name, spent in sorted(minutes.items())
    if spent > allowed[name]
  ]


def main(path: str) -> int:
  """Prints the table; returns the number of folders above their limit."""
  minutes, slowness = load(path)
  print(f'a CPU second does 1/{slowness:.2f} of what it does on quiet cores')
  for name, spent in sorted(minutes.items(), key=lambda x: -x[1]):
    print(f'{name:13s} {spent:6.2f} of {limit(name, slowness):5.2f} min')
  over = excesses(minutes, slowness)
  print('\n'.join(over) or 'within the budget')
  return len(over)


if __name__ == '__main__':
  sys.exit(main(sys.argv[1]))
