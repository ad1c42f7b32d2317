"""Tests of configs and command lines."""

import dataclasses
import json
import os
import pathlib
import shlex
import subprocess
import sys
import textwrap
from typing import Literal

from absl.testing import parameterized
import pytest

from rljax.runs import run


@dataclasses.dataclass(frozen=True)
class Config(run.Config):
  learning_rate: float = run.field(0.1, 'step size')
  steps: int = run.field(3, 'updates', grows=True)
  tau: str = run.field('linear(0.1,0.01)', 'a number or a schedule')
  layers: tuple[int, ...] = run.field((1, 2), 'layers to read')
  names: tuple[str, ...] = run.field((), 'names')
  control: Literal['none', 'shuffled'] = run.field('none', 'which control')

  def validate(self) -> None:
    super().validate()
    if self.steps < 1:
      raise ValueError(f'--steps={self.steps} is less than 1')


@dataclasses.dataclass(frozen=True)
class Sized(run.Config):
  model: str = run.field('small', 'which')
  steps: int = run.field(3, 'updates')
  stop: str = run.field('', 'what ends a text')

  def preset(self):
    large = {'steps': 90, 'stop': r'\n'}
    return {} if self.model == 'small' else large


@dataclasses.dataclass(frozen=True)
class Other(run.Config):
  learning_rate: float = run.field(0.5, 'another default of the same name')


def parse(*arguments, config=Config):
  got = []
  run.main(config, got.append, ['prog.py', '--workdir=w', *arguments])
  return got[0]


def test_values_have_the_annotated_types():
  got = parse(
    '--steps=7',
    '--learning_rate=1',
    '--resume',
    '--layers=3,4,5',
    '--names=a,b',
    '--control=shuffled',
    '--tau=0.3',
  )
  want = Config(
    workdir='w',
    steps=7,
    learning_rate=1.0,
    resume=True,
    layers=(3, 4, 5),
    names=('a', 'b'),
    control='shuffled',
    tau='0.3',
  )
  assert got == want
  assert isinstance(got.learning_rate, float)


def test_two_configs_do_not_collide():
  assert parse().learning_rate == 0.1
  assert parse(config=Other).learning_rate == 0.5
  assert parse('--noresume', '--layers=') == Config(workdir='w', layers=())


@pytest.mark.parametrize(
  'flags, steps, stop',
  [
    ('', 3, ''),
    ('--model=large', 90, r'\n'),
    ('--model=large --steps=3', 3, r'\n'),  # its own default, but given
    ('--steps=5 --seed=2 --mesh=data:1', 5, ''),
  ],
)
def test_a_command_line_makes_its_config_again(flags, steps, stop):
  config = parse(*flags.split(), config=Sized)
  assert (config.steps, config.stop) == (steps, stop)
  start, command = run.program(config).start, run.command(config)
  assert command.startswith(start)
  assert sorted(command.removeprefix(start).split()) == sorted(flags.split())


def test_a_command_line_can_be_pasted_into_a_shell():
  config = parse('--stop=a b\\n', '--workdir=my run', config=Sized)
  words = shlex.split(run.resumption(config))
  assert words[-3:] == ['--stop=a b\\n', '--workdir=my run', '--resume']


@pytest.mark.parametrize(
  'arguments, start, source',
  [
    (['my script.py'], "python 'my script.py'", 'my script.py'),
    (['-m', 'package.mine'], 'python -m package.mine', 'package/mine.py'),
  ],
)
def test_a_program_is_what_was_started(tmp_path, arguments, start, source):
  """And not the module from which it takes its config."""
  (tmp_path / 'package').mkdir()
  for name in ('my script.py', 'package/mine.py'):
    (tmp_path / name).write_text(
      'from rljax.runs import run; p = run.program(run.Config());'
      'print(p.start, p.source, sep=chr(10))'
    )
  paths = [str(pathlib.Path(path).absolute()) for path in sys.path if path]
  done = subprocess.run(
    [sys.executable, *arguments],
    env=dict(os.environ, PYTHONPATH=os.pathsep.join(paths)),
    cwd=tmp_path,
    capture_output=True,
    text=True,
    check=True,
  )
  assert done.stdout.splitlines() == [start, source]


class RefusedTest(parameterized.TestCase):
  @pytest.fixture(autouse=True)
  def _capture(self, capsys):
    self.capsys = capsys

  @parameterized.parameters(
    ('--lerning_rate=1', 'learning_rate'),
    ('--learning-rate=1', 'learning_rate'),
    ('--sed=1', 'seed'),
    ('--steps=many', 'steps'),
    ('--steps=0', '--steps=0 is less than 1'),
    ('--control=shufled', "did you mean 'shuffled'?"),
    ('--stps=4', "there is no flag --stps; did you mean 'steps'?"),
    ('--zzz=4', 'there is no flag --zzz; known: traceback, seed'),
    ('--layers=1,x', 'layers'),
    ('--seed=-1', '--seed=-1 is not in'),
    ('--learning_rate=nan', '--learning_rate=nan is not a finite number'),
    ('--learning_rate=-inf', '--learning_rate=-inf is not a finite number'),
    ('steps=4', "'steps=4' is no flag"),
  )
  def test_one_line_and_status_2(self, argument, message):
    ran = []
    with self.assertRaises(SystemExit) as caught:
      run.main(Config, ran.append, ['prog.py', argument])
    out, err = self.capsys.readouterr()
    assert caught.exception.code == 2
    assert not ran and not out
    assert err.startswith('error: ') and err.count('\n') == 1, err
    assert message in err


def test_help_lists_only_these_flags(capsys):
  with pytest.raises(SystemExit) as caught:
    run.main(Config, print, ['prog.py', '--help'])
  assert caught.value.code == 0
  out = capsys.readouterr().out
  flags = [line.split('=')[0] for line in out.splitlines() if '--' in line]
  names = [f.name for f in dataclasses.fields(Config)] + ['traceback']
  assert flags == [f'  --{name}' for name in names]
  assert '--layers=1,2 ' in out and 'which control (none, shuffled)' in out
  assert out.count('shuffled') == 1
  assert out.startswith('Tests of configs')


@pytest.mark.parametrize(
  'error, status',
  [
    (ValueError('two\nlines'), 1),
    (FileNotFoundError(2, 'No such file', 'x.jsonl'), 1),
    (OSError(28, 'No space left on device'), 1),
    (KeyboardInterrupt(), 130),
  ],
)
def test_errors_of_a_run_are_one_line(error, status, capsys):
  def fail(config):
    raise error

  with pytest.raises(SystemExit) as caught:
    run.main(Config, fail, ['prog.py'])
  assert caught.value.code == status
  err = capsys.readouterr().err
  assert err.startswith('error: ') and err.count('\n') == 1


def test_threads_that_end_with_a_failed_write_are_silent(monkeypatch):
  shown = []
  monkeypatch.setattr(sys, 'unraisablehook', lambda x: shown.append(x.exc_type))
  run._hush_threads.cache_clear()

  class Raises:
    def __init__(self, error):
      self.error = error

    def __del__(self):
      raise self.error

  def fail(config):
    Raises(RuntimeError('Event loop is closed'))
    Raises(KeyError('a bug'))

  run.main(Config, fail, ['prog.py'])
  assert shown == [KeyError]
  run._hush_threads.cache_clear()


def test_traceback_is_shown_on_request_and_for_bugs():
  def fail(config):
    raise ValueError('no')

  with pytest.raises(ValueError):
    run.main(Config, fail, ['prog.py', '--traceback'])

  def bug(config):
    raise KeyError('no')

  with pytest.raises(KeyError):
    run.main(Config, bug, ['prog.py'])


def test_json_round_trip_and_diff():
  config = Config(workdir='a', layers=(4,), names=('x', 'y'))
  assert Config.from_json(json.loads(json.dumps(config.to_json()))) == config
  other = dataclasses.replace(config, workdir='b', devices=4, layers=(4, 5))
  assert run.diff(config, other) == {'layers': ((4,), (4, 5))}
  longer = dataclasses.replace(config, steps=9)
  assert run.diff(config, longer) == {}
  assert run.diff(longer, config) == {'steps': (9, 3)}
  with pytest.raises(ValueError, match="did you mean 'learning_rate'"):
    Config.from_json({'learning_rte': 1})


def test_unsupported_annotation_is_named():
  @dataclasses.dataclass(frozen=True)
  class Bad(run.Config):
    table: dict[str, int] | None = run.field(None, 'no')

  with pytest.raises(TypeError, match='table'):
    run.main(Bad, print, ['prog.py'])


def test_folder_is_new_and_resume_takes_the_newest(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  seen = []

  def fn(config):
    seen.append(config.workdir)
    (tmp_path / config.workdir).mkdir(parents=True, exist_ok=True)

  for arguments in ([], [], ['--resume'], ['--seed=3']):
    run.main(Config, fn, ['a/prog.py', *arguments])
  first = 'runs/prog-seed0'
  assert seen == [first, f'{first}-2', f'{first}-2', 'runs/prog-seed3']
  with pytest.raises(SystemExit):
    run.main(Config, fn, ['a/prog.py', '--resume', '--seed=9'])


def test_devices_are_made_before_the_backend_starts(tmp_path):
  script = textwrap.dedent("""
    import jax
    from jax._src import xla_bridge
    from rljax.runs import run
    assert not xla_bridge.backends_are_initialized()
    run.main(run.Config, lambda config: print(jax.device_count()))
  """)
  command = [sys.executable, '-c', script, '--devices=3', '--workdir=w']
  done = subprocess.run(command, capture_output=True, text=True, check=True)
  assert done.stdout == '3\n'
