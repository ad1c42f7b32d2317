"""The budget of CPU time adds up, is recorded, and can be exceeded."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from tests.structure import budget, sources

TEST = """
import time

def test_busy():
  end = time.process_time() + 0.3
  while time.process_time() < end:
    pass
"""


def test_folder_limits_name_folders_and_fit_the_total():
  limits = {k: v for k, v in budget.LIMITS.items() if k != budget.TOTAL}
  folders = {p.name for p in (sources.ROOT / 'tests').iterdir() if p.is_dir()}
  assert limits.keys() <= folders
  assert max(limits.values()) < budget.LIMITS[budget.TOTAL] == 12


def test_lines_of_several_processes_add_up(tmp_path):
  path = tmp_path / 'durations.jsonl'
  quiet = budget.QUIET
  path.write_text(
    f'{{"core": 60, "total": 90, "samples": [{quiet}, {2 * quiet}]}}\n'
    f'{{"core": 120, "data": 30, "samples": [{9 * quiet}]}}\n'
  )
  minutes, slowness = budget.load(path)
  assert minutes == {'core': 3, 'data': 0.5, 'total': 1.5}
  assert slowness == pytest.approx(2)


def test_a_fast_machine_narrows_no_limit(tmp_path):
  path = tmp_path / 'durations.jsonl'
  path.write_text(f'{{"core": 60, "samples": [{budget.QUIET / 2}]}}\n')
  assert budget.load(path)[1] == 1


def test_excess_is_named():
  minutes = {
    'core': budget.LIMITS['core'] + 1,
    'novel': budget.OTHER,
    'total': 1,
  }
  (line,) = budget.excesses(minutes, slowness=1.0)
  assert line.startswith('tests/core: ')
  assert not budget.excesses(minutes, slowness=4.0)


def test_pytest_records_cpu_time_per_folder(tmp_path):
  test = tmp_path / 'tests' / 'busy' / 'busy_test.py'
  test.parent.mkdir(parents=True)
  test.write_text(TEST)
  program = (
    'import pytest; from tests.structure import budget;'
    'pytest.main(["-q", "-p", "no:cacheprovider", "tests"],'
    ' plugins=[budget.Recorder("out")])'
  )
  environment = dict(os.environ, PYTHONPATH=str(sources.ROOT))
  subprocess.run(
    [sys.executable, '-c', program],
    cwd=tmp_path,
    env=environment,
    check=True,
    capture_output=True,
  )
  seconds = json.loads(pathlib.Path(tmp_path, 'out').read_text())
  (spent,) = seconds['samples']
  assert 0 < spent < 1
  assert 0.25 <= seconds['busy'] < seconds['total'] < 10
