"""Notebooks run from top to bottom, and were run before they were kept."""

import json
import pathlib
import subprocess
import sys

import pytest

from tests.structure import sources

NOTEBOOKS = sorted((sources.ROOT / 'experiments/notebooks').glob('*.ipynb'))


def _cells(path: pathlib.Path) -> list[dict]:
  cells = json.loads(path.read_text())['cells']
  return [cell for cell in cells if cell['cell_type'] == 'code']


@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_those_of_one_run(path):
  counts = [cell['execution_count'] for cell in _cells(path)]
  assert counts == list(range(1, len(counts) + 1))
  kinds = {
    out['output_type'] for cell in _cells(path) for out in cell['outputs']
  }
  assert 'error' not in kinds and 'display_data' in kinds


@pytest.mark.slow
@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_from_top_to_bottom(path):
  code = '\n'.join(''.join(cell['source']) for cell in _cells(path))
  done = subprocess.run(
    [sys.executable, '-c', code], capture_output=True, text=True
  )
  assert done.returncode == 0, done.stderr[-3000:]
