"""Frozen configs that become command-line flags when a module is run.

    @dataclasses.dataclass(frozen=True)
    class Config(run.Config):
      steps: int = run.field(100, 'rollout batches to train for')

    if __name__ == '__main__':
      run.main(Config, train)

Nothing is defined at import, so two experiments can be imported together.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import logging as python_logging
import math
import pathlib
import shlex
import sys
import typing
from typing import Any, NoReturn, Self, TypeVar

from absl import flags, logging
import jax

from rljax.core import spelling
from rljax.runs import memory

_Value = TypeVar('_Value')
_Config = TypeVar('_Config', bound='Config')


_USAGE = 2  # exit status of a command line that cannot be run
_FAILED = 1  # of a run that ended with an error
_INTERRUPTED = 130  # of a run ended by Ctrl-C, as in a shell


def field(
  default: _Value, help: str, *, transient: bool = False, grows: bool = False
) -> _Value:
  """Returns a config field with its help text.

  Args:
    default: the value without the flag; its annotation gives the flag's type.
    help: one line for `--help`.
    transient: the value may differ between a run and its resumption.
    grows: the value may be larger in a resumption.
  """
  metadata = {'help': help, 'transient': transient, 'grows': grows}
  return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class Config:
  """What every run can be told; experiments add their own fields."""

  seed: int = field(0, 'seed of all randomness of the run')
  workdir: str = field(
    '',
    'folder of the run; empty: a new one under runs/',
    transient=True,
  )
  resume: bool = field(
    False, 'continue from the last checkpoint in the folder', transient=True
  )
  devices: int = field(
    0,
    'devices to use, made virtual on a CPU; 0: all there are',
    transient=True,
  )
  mesh: str = field(
    '', 'axis sizes such as data:4,tensor:2; empty: all data', transient=True
  )

  def validate(self) -> None:
    """Raises ValueError if no run can have these values."""
    for name, value in self.to_json().items():
      if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f'--{name}={value} is not a finite number')
    if not 0 <= self.seed < 2**32:
      raise ValueError(f'--seed={self.seed} is not in [0, 2**32)')
    if self.devices < 0:
      raise ValueError(f'--devices={self.devices} is negative')

  def preset(self) -> Mapping[str, Any]:
    """Returns other defaults, which the values that were given imply."""
    return {}

  def to_json(self) -> dict[str, Any]:
    """Returns the fields as a dict that `json.dumps` takes."""
    values = dataclasses.asdict(self)
    return {
      k: list(v) if isinstance(v, tuple) else v for k, v in values.items()
    }

  @classmethod
  def from_json(cls, values: Mapping[str, Any]) -> Self:
    """Returns the config that `to_json` gave; refuses unknown fields."""
    names = [f.name for f in dataclasses.fields(cls)]
    for name in values:
      if name not in names:
        raise ValueError(
          f'unknown field {name!r}{spelling.nearest(name, names)}'
        )
    fields: dict[str, Any] = {
      k: tuple(v) if isinstance(v, list) else v for k, v in values.items()
    }
    return cls(**fields)


def diff(old: Config, new: Config) -> dict[str, tuple[Any, Any]]:
  """Returns {field: (old, new)} of what makes these two different runs."""
  found = {}
  for f in dataclasses.fields(new):
    before, now = getattr(old, f.name), getattr(new, f.name)
    longer = f.metadata.get('grows') and now > before
    if before != now and not longer and not f.metadata.get('transient'):
      found[f.name] = (before, now)
  return found


@dataclasses.dataclass(frozen=True)
class Program:
  """What runs a config.

  Attributes:
    name: for people, such as 'quickstart'.
    source: its file; empty where there is none.
    start: the command line without flags.
  """

  name: str
  source: str
  start: str


def program(config: Config) -> Program:
  """Returns the program that was started; in a notebook, the config's module.

  That a script takes the config class of a module does not make it the module.
  """
  module = sys.modules['__main__']
  if not getattr(module, '__file__', ''):
    module = sys.modules[type(config).__module__]
  source = getattr(module, '__file__', '') or ''
  if source and pathlib.Path(source).is_relative_to(pathlib.Path.cwd()):
    source = str(pathlib.Path(source).relative_to(pathlib.Path.cwd()))
  if module.__spec__ is not None:
    name = module.__spec__.name
    return Program(name.split('.')[-1], source, f'python -m {name}')
  start = f'python {shlex.quote(source)}' if source else 'python'
  return Program(pathlib.Path(source).stem, source, start)


def command(config: Config) -> str:
  """Returns the command line of a config, but for its folder."""
  defaults = {f.name: f.default for f in dataclasses.fields(config)}
  defaults |= config.preset()
  flags = [
    shlex.quote(f'--{name}={_text(getattr(config, name))}')
    for name, value in defaults.items()
    if name not in ('workdir', 'resume') and getattr(config, name) != value
  ]
  return ' '.join([program(config).start, *flags])


def resumption(config: Config) -> str:
  """Returns the command line that continues the run of a config."""
  folder = shlex.quote(f'--workdir={config.workdir}')
  return f'{command(config)} {folder} --resume'


def main(
  config_class: type[_Config],
  fn: Callable[[_Config], Any],
  argv: Sequence[str] | None = None,
) -> None:
  """Parses flags into `config_class`, calls `fn` with it, exits on errors.

  A bad command line exits with 2; a run's ValueError, OSError or ImportError
  (an extra is missing) with 1. Each writes one line to stderr; `--traceback`
  shows where it came from. Other exceptions are bugs and keep their traceback.

  Args:
    config_class: dataclass whose fields become the flags.
    fn: what to run; `config.workdir` is never empty.
    argv: program and flags; `sys.argv` by default.
  """
  program, *arguments = sys.argv if argv is None else argv
  values = _define(config_class)
  try:
    config = _parse(config_class, values, program, arguments)
  except (flags.Error, ValueError) as error:
    _fail(error, _USAGE)
  if not values['traceback'].value:
    _hush()
  memory.free_after_compiling()
  try:
    fn(config)
  except KeyboardInterrupt:
    _fail('interrupted', _INTERRUPTED)
  except (ValueError, OSError, ImportError) as error:
    if values['traceback'].value:
      raise
    _fail(error, _FAILED)


def _hush() -> None:
  """Keeps libraries from writing, from their threads, what they also raise."""
  logging.set_verbosity(logging.FATAL)
  # Of writes that were under way when the first one failed.
  python_logging.getLogger('asyncio').setLevel(python_logging.CRITICAL)
  _hush_threads()


@functools.cache
def _hush_threads() -> None:
  """Drops what TensorStore tells an event loop that a failed write closed."""
  before = sys.unraisablehook

  def hook(found: Any) -> None:
    if str(found.exc_value) != 'Event loop is closed':
      before(found)

  sys.unraisablehook = hook


def _fail(error: Exception | str, status: int) -> NoReturn:
  """Writes the error as one line and exits."""
  sys.stderr.write(f'error: {" ".join(str(error).split())}\n')
  sys.exit(status)


def _parse(
  config_class: type[_Config],
  values: flags.FlagValues,
  program: str,
  arguments: Sequence[str],
) -> _Config:
  """Returns the checked config of a command line, with its folder chosen."""
  if {'--help', '-h', '-help'} & set(arguments):
    sys.stdout.write(_help(config_class, values))
    sys.exit(0)
  try:
    _, *rest = values([program, *arguments])
  except flags.UnrecognizedFlagError as error:
    near = spelling.nearest(error.flagname, list(values))
    raise ValueError(
      f'there is no flag --{error.flagname}{near} See --help.'
    ) from error
  if rest:
    raise ValueError(f'{rest[0]!r} is no flag; write --name=value')
  if not flags.FLAGS.is_parsed():
    flags.FLAGS([program])  # libraries read their own flags' defaults
  names = [f.name for f in dataclasses.fields(config_class)]
  given = {n: values[n].value for n in names if values[n].present}
  config = config_class.from_json(given)
  implied = {k: v for k, v in config.preset().items() if k not in given}
  config = dataclasses.replace(config, **implied)
  config.validate()
  _request_devices(config.devices)
  workdir = config.workdir or _folder(program, config)
  return dataclasses.replace(config, workdir=workdir)


def _folder(program: str, config: Config) -> str:
  """Returns a new folder of the run, or with `resume` the newest there is."""
  stem = f'{pathlib.Path(program).stem}-seed{config.seed}'
  tried = [pathlib.Path('runs', stem)]
  while tried[-1].exists():
    tried.append(pathlib.Path('runs', f'{stem}-{len(tried) + 1}'))
  if not config.resume:
    return str(tried[-1])
  if len(tried) == 1:
    raise ValueError(f'--resume: there is no {tried[0]}; give --workdir')
  return str(tried[-2])


def _request_devices(count: int) -> None:
  """Makes that many CPU devices, if no backend was started yet."""
  if count:
    try:
      jax.config.update('jax_num_cpu_devices', count)
    except RuntimeError as error:
      if jax.device_count() < count:
        raise ValueError(
          f'--devices={count}: {jax.device_count()} exist already'
        ) from error


class _TupleParser(flags.ArgumentParser):
  """Parses '1,2' into (1, 2)."""

  def __init__(self, item: type):
    self._item = item
    self.syntactic_help = f'a comma separated list of {item.__name__}'

  def parse(self, argument: Any) -> tuple[Any, ...]:
    if isinstance(argument, str):
      argument = argument.split(',') if argument else ()
    return tuple(self._item(x) for x in argument)

  def flag_type(self) -> str:
    return self.syntactic_help


class _ChoiceParser(flags.ArgumentParser):
  """Takes one of a few words."""

  def __init__(self, choices: Sequence[str]):
    self.choices = choices
    self.syntactic_help = f'one of {", ".join(choices)}'

  def parse(self, argument: str) -> str:
    if argument not in self.choices:
      raise ValueError(
        f'no such choice{spelling.nearest(argument, self.choices)}'
      )
    return argument

  def flag_type(self) -> str:
    return self.syntactic_help


def _define(config_class: type[Config]) -> flags.FlagValues:
  """Returns one flag per field, apart from absl's global flags."""
  values = flags.FlagValues()
  flags.DEFINE_bool(
    'traceback', False, 'show where an error came from', flag_values=values
  )
  hints = typing.get_type_hints(config_class)
  for f in dataclasses.fields(config_class):
    help = f.metadata.get('help', '')
    _define_one(values, f.name, hints[f.name], f.default, help)
  return values


def _define_one(
  values: flags.FlagValues, name: str, kind: Any, default: Any, help: str
) -> None:
  """Defines the flag of a field annotated with `kind`."""
  simple = {
    bool: flags.DEFINE_bool,
    int: flags.DEFINE_integer,
    float: flags.DEFINE_float,
    str: flags.DEFINE_string,
  }
  origin, args = typing.get_origin(kind), typing.get_args(kind)
  if kind in simple:
    simple[kind](name, default, help, flag_values=values)
  elif origin is typing.Literal:
    flags.DEFINE(_ChoiceParser(args), name, default, help, values)
  elif origin is tuple and args[0] in (int, float, str) and len(args) == 2:
    flags.DEFINE(_TupleParser(args[0]), name, default, help, values)
  else:
    raise TypeError(f'field {name!r}: {kind} cannot become a flag')


def _help(config_class: type[Config], values: flags.FlagValues) -> str:
  """Returns the module's docstring and its flags with their defaults."""
  names = [f.name for f in dataclasses.fields(config_class)] + ['traceback']
  shown = {name: f'--{name}={_text(values[name].default)}' for name in names}
  width = min(28, max(len(text) for text in shown.values()))
  lines = [(sys.modules[config_class.__module__].__doc__ or '').strip(), '']
  for name, text in shown.items():
    choices = getattr(values[name].parser, 'choices', ())
    suffix = f' ({", ".join(choices)})' if choices else ''
    lines.append(f'  {text:<{width}}  {values[name].help}{suffix}')
  return '\n'.join(lines) + '\n'


def _text(value: Any) -> str:
  """Returns a default as it would be typed."""
  if isinstance(value, tuple):
    return ','.join(map(str, value))
  return str(value).lower() if isinstance(value, bool) else str(value)
