"""The budget of CPU time adds up, is recorded, and can be exceeded."""

import json
import os
import pathlib
import subprocess
import sys

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
  path.write_text('{"core": 60, "total": 90}\n{"core": 120, "data": 30}\n')
  assert budget.load(path) == {'core': 3, 'data': 0.5, 'total': 1.5}


def test_excess_is_named():
  minutes = {
    'core': budget.LIMITS['core'] + 1,
    'novel': budget.OTHER,
    'total': 1,
  }
  (line,) = budget.excesses(minutes)
  assert line.startswith('tests/core: ')


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
  assert 0.25 <= seconds['busy'] < seconds['total'] < 10
