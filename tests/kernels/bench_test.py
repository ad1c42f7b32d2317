"""The table of what the kernels save, at small sizes; its flags."""

import importlib.util
import json

import jax
import pytest

from rljax_kernels import bench, chips

SMALL = bench.Sizes(16, 8, 5000, (4, 8, 300))
KEYS = ['name', 'cpu_s', 'ratio_to_naive', 'temp_mib', 'platform']


def test_rows_of_every_program(capsys):
  assert bench.main(['--json', '--rounds=2'], SMALL) == 0
  out, progress = capsys.readouterr()
  rows = json.loads(out)
  assert [list(row) for row in rows] == [KEYS] * 11
  ratios = {row['name']: row['ratio_to_naive'] for row in rows}
  for name in ('naive', 'naive + entropy', 'head matmul of 4 rows, V 300'):
    assert ratios[name] == 1.0
  assert {'token_loss, half dead', 'vocab_sample of them'} < ratios.keys()
  for row in rows:
    assert row['cpu_s'] >= 0 and row['temp_mib'] >= 0
    assert row['platform'] == 'cpu'
  assert 'compiling 11 of 11' in progress
  assert 'round 0 of 2, ' in progress
  assert progress.splitlines()[-1].startswith('round 2 of 2')


def test_a_limit_of_time_is_reported(capsys):
  def fn(x):
    return x + 1

  todo = [bench.Work('naive', 'naive', fn, (1.0,))]
  (row,) = bench.timed(todo, bench.Stop(rounds=50, seconds=0.0))
  assert row['ratio_to_naive'] == 1.0
  *_, last, said = capsys.readouterr().err.splitlines()
  assert last.startswith('round 1 of 50')
  assert said == 'stopped at --seconds=0: medians are of 1 of 50 rounds'


@pytest.mark.parametrize(
  ('flag', 'message'),
  [
    ('--aot=', "'' is not among v5e, v5p, v6e, v7x, h100"),
    ('--aot=v99', "'v99' is not among v5e"),
    ('--aot=v5e,', "'' is not among"),
    ('--peer=', "'' is not among naive, tokamax"),
    ('--peer=naive,foo', "'foo' is not among naive, tokamax"),
    ('--rounds=0', "'0' must be an integer of at least 1"),
    ('--rounds=2.5', "'2.5' must be an integer"),
    ('--seconds=-1', "'-1' must be a number of at least 0"),
    ('--seconds=nan', "'nan' must be a number"),
  ],
)
def test_flags_are_refused(flag, message, capsys):
  with pytest.raises(SystemExit, match='2'):
    bench.main([flag])
  assert message in capsys.readouterr().err


def test_every_flag_is_explained(capsys):
  with pytest.raises(SystemExit, match='0'):
    bench.main(['--help'])
  lines = capsys.readouterr().out.partition('options:')[2].splitlines()
  flags = [x for x in lines if x.startswith('  -')]
  assert len(flags) == 6
  # A flag is two columns, what it takes and what it does.
  assert all(len(x.strip().split('  ')) > 1 for x in flags)


def test_a_compiler_that_is_missing_is_named(capsys, monkeypatch):
  monkeypatch.setattr(chips, 'missing', lambda chip: 'pip install libtpu')
  with pytest.raises(SystemExit, match='2'):
    bench.main(['--aot=v5e'])
  assert '--aot=v5e: pip install libtpu' in capsys.readouterr().err


def test_a_peer_that_is_missing_has_a_row(capsys, monkeypatch):
  monkeypatch.setattr(bench, 'works', lambda sizes: [])
  monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
  assert bench.main(['--peer=naive,tokamax', '--rounds=1'], SMALL) == 0
  lines = capsys.readouterr().out.splitlines()
  assert lines[0].split() == KEYS
  assert lines[1].startswith('tokamax (absent: not installed; it needs Python')


def test_what_is_compiled_for_a_chip(monkeypatch, capsys):
  asked = []

  class Memory:
    temp_size_in_bytes = 3 * 2**20

  class Compiled:
    def memory_analysis(self):
      return Memory()

  def compiled_for(chip, name, **options):
    if name == 'naive' and options:
      raise jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: 22.2G of 15.7G')
    asked.append((chip, name, options))
    return Compiled()

  monkeypatch.setattr(chips, 'compiled_for', compiled_for)
  monkeypatch.setattr(chips, 'missing', lambda chip: None)
  assert bench.main(['--aot=v5e,h100', '--json']) == 0
  rows = json.loads(capsys.readouterr().out)
  names = [row['name'] for row in rows if row['temp_mib'] is None]
  assert names == ['naive, kl=True (does not fit)'] * 2
  assert [row['temp_mib'] for row in rows].count(3.0) == len(asked)
  assert ('v5e', 'pallas_tpu', {'tensor': 4}) in asked
  on_gpu = {name for chip, name, _ in asked if chip == 'h100'}
  assert on_gpu == {'naive', 'xla_vocab'}
