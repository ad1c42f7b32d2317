"""Our numbers are those of verl 0.9.1 and TRL 1.16.0, and the runner says so.

A sample of the cases of `data/peers_torch.npz`, at least one of each function
of the peers but the step of a whole model. All cases run in a slow test.
"""

import collections
import dataclasses
import functools
import json
import pathlib
import re
import subprocess
import sys

from absl.testing import absltest, parameterized
import numpy as np
import pytest

from tests.peers import __main__ as runner
from tests.peers import adapters, golden

ROOT = pathlib.Path(__file__).parents[2]
PATH = ROOT / 'tests' / 'data' / 'peers_torch.npz'
FILE = golden.File(PATH)
LAST = r'matched (\d+) finite (\d+) declared (\d+) failed (\d+) of (\d+)'
_MODEL = 'GRPOTrainer real step on tiny Qwen2'
# Three cases for files of our own; the second is the program of the first.
_FEW = tuple(f'verl/agg/token-mean/{name}' for name in ('g0/std', 'g0/empty'))
_FEW += ('verl/agg/token-mean/g0/all_empty',)


def _sample() -> list[golden.Case]:
  """Returns a case of each function, with tool tokens if there is one.

  Of the policy losses also one with NaN off the mask; it costs no compiling.
  """
  cases = collections.defaultdict(list)
  for case in FILE.cases:
    cases[case.fn].append(case)
  del cases[_MODEL]
  chosen = []
  for fn, found in cases.items():
    by_fixture = {case.fixture: case for case in found}
    chosen.append(by_fixture.get('toolmask', found[len(found) // 2]))
    if fn.startswith('compute_policy_loss_') and 'nanpad' in by_fixture:
      chosen.append(by_fixture['nanpad'])
  return chosen


@functools.cache
def _case(name: str) -> golden.Case:
  return next(case for case in FILE.cases if case.id == name)


def _write(path: pathlib.Path, change: float) -> str:
  """Writes a file of few cases, the first of them changed."""
  arrays = np.load(PATH)
  entries = [entry for entry in FILE.index['cases'] if entry['id'] in _FEW]
  names = {key for entry in entries for key in entry['outputs']}
  names |= {key for entry in entries for key in entry['inputs'].values()}
  kept = {name: arrays[name] for name in names}
  kept[f'out/{_FEW[0]}/loss'] = kept[f'out/{_FEW[0]}/loss'] * (1.0 + change)
  index = json.dumps({**FILE.index, 'cases': entries})
  np.savez(path, index=index, **kept)
  return str(path)


def _run(path: str) -> tuple[int, list[str]]:
  """Returns the exit status of the runner and the lines that it prints."""
  done = subprocess.run(
    [sys.executable, '-m', 'tests.peers', path],
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=1200,
  )
  return done.returncode, done.stdout.splitlines()


class PeersTest(parameterized.TestCase):
  @parameterized.named_parameters((case.id, case) for case in _sample())
  def test_case(self, case):
    verdict, wrong = adapters.evaluate(case, FILE)
    self.assertNotEqual(verdict, 'failed', wrong)

  def test_every_function_of_the_peers_has_an_adapter(self):
    self.assertEmpty(
      {case.fn for case in FILE.cases} - adapters.ADAPTERS.keys()
    )

  def test_what_is_declared_is_comparable_and_little(self):
    kinds = {case.id: case.kind for case in FILE.cases}
    self.assertEqual(
      {kinds[name] for name in adapters.DECLARED}, {'comparable'}
    )
    self.assertLessEqual(len(adapters.DECLARED), 20)


def test_right_numbers_pass(tmp_path, capsys):
  status = runner.main(_write(tmp_path / 'few.npz', 0.0))
  assert status == 0
  text = capsys.readouterr().out
  assert text == 'matched 2 finite 1 declared 0 failed 0 of 3\n'


def test_one_wrong_number_fails(tmp_path):
  status, lines = _run(_write(tmp_path / 'few.npz', 1e-4))
  assert status == 1
  assert len(lines) == 2
  assert re.match(f'comparable {_FEW[0]}: loss: .*, not ', lines[0])
  assert lines[1] == 'matched 1 finite 1 declared 0 failed 1 of 3'


class RunnerTest(parameterized.TestCase):
  def test_only_the_declared_outputs_may_differ(self):
    case = _case('trl/adv/float_equal/group/sum_then_normalize/w1.0')
    self.assertEqual(adapters.evaluate(case, FILE)[0], 'declared')
    outputs = {name: x + 1e-3 for name, x in case.outputs.items()}
    self.assertGreater(len(outputs), 1)
    changed = dataclasses.replace(case, outputs=outputs)
    self.assertEqual(adapters.evaluate(changed, FILE)[0], 'failed')

  def test_what_is_wrong_with_outputs(self):
    case = _case(_FEW[0])
    loss = case.outputs['loss']
    for found, message in (
      ({'loss': loss}, None),
      ({'loss': loss * (1.0 + 1e-6)}, None),
      ({'loss': loss * (1.0 + 1e-4)}, 'loss: .*, not '),
      ({'loss': np.stack([loss])}, 'shape'),
      ({}, 'loss is not computed'),
      ({'loss': loss, 'other': np.nan}, 'other is not finite'),
      ({'loss': loss, golden.SPOILED: {'loss': True}}, 'spoiled in a case'),
    ):
      wrong = golden.failure(case, found)
      if message is None:
        self.assertIsNone(wrong)
      else:
        self.assertRegex(wrong, message)


@pytest.mark.slow
def test_the_whole_file():
  status, lines = _run(str(PATH))
  found = re.fullmatch(LAST, lines[-1])
  assert found is not None, lines[-1]
  matched, finite, declared, failed, total = map(int, found.groups())
  assert (status, failed) == (0, 0), lines
  kinds = collections.Counter(case.kind for case in FILE.cases)
  assert matched >= 2679 and declared <= 20
  assert matched + declared == kinds['comparable']
  assert finite == kinds['raises'] + kinds['non-finite']
  assert total == len(FILE.cases)


if __name__ == '__main__':
  absltest.main()
