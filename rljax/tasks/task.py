"""What a task is, and how one is found by name and checked.

This module imports neither jax nor grain, so that a verifier's process can
load an untrusted task in a fraction of a second.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
import dataclasses
import typing
from typing import TYPE_CHECKING, Any, Protocol

from rljax.core import spelling
from rljax.rewards import sandbox

if TYPE_CHECKING:
  import grain
  import jax
  import numpy as np

  from rljax.core import types
  from rljax.data import tokenizers

SPLITS = ('train', 'test')
_BARE = ('arithmetic', 'countdown', 'few_shot')  # named without an argument
KINDS = (*_BARE, 'reasoning_gym', 'jsonl', 'parquet')
_GARBAGE = (
  '',
  ' ',
  '\n',
  '?',
  'I do not know.',
  '\x00\ud7ff\U0001f600',
  '}{',
  '\\boxed{}',
  '#### ',
  'nan',
  'inf',
  '((((((((1',
  '[' * 2000,
  '8' * 5000,
  '9**9**9',
  "__import__('os').getcwd()",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Example:
  """One problem.

  Attributes:
    uid: in [0, 2³¹), unique within the task and equal for equal problems.
    prompt: what the policy reads.
    answer: the right answer, in the form that the task's verifier expects.
    trace: a whole response that scores 1, worked out; may be empty.
    meta: plain data that the verifier needs besides.
  """

  uid: int
  prompt: str
  answer: str
  trace: str = ''
  meta: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class Task(Protocol):
  """Problems and how a response to one is judged.

  `trusted` is False where `verify` may run what the policy wrote, or may not
  end: such a task is verified in a sandbox only. `options` are plain values
  with which `named(name, **options)` builds the task again, in any process.
  `device_verify` judges a rollout on the device, f32 [B], and reads what
  `encode` put into `Rollout.data`; None where there is only `verify`.
  """

  @property
  def name(self) -> str:
    """The name that `task.named` takes."""
    ...

  @property
  def options(self) -> Mapping[str, Any]:
    """What `task.named` takes besides the name."""
    ...

  @property
  def trusted(self) -> bool:
    """Whether `verify` may run outside the sandbox."""
    ...

  @property
  def device_verify(
    self,
  ) -> Callable[[types.Rollout], jax.Array] | None:
    """Judges a rollout on the device, f32 [B]."""
    ...

  def source(self, split: str) -> grain.MapDataset[Example]:
    """Returns the unshuffled examples of 'train' or 'test'; disjoint."""
    ...

  def verify(self, example: Example, text: str) -> float:
    """Returns the score in [0, 1] of a response without its stop token."""
    ...

  def encode(
    self, example: Example, tokenizer: tokenizers.Tokenizer
  ) -> dict[str, np.ndarray]:
    """Returns arrays of the same shapes for every example; {} if none."""
    ...


def named(name: str, **options: Any) -> Task:
  """Returns the task called `name`.

  Args:
    name: 'arithmetic', 'countdown', 'few_shot', 'reasoning_gym:<dataset>',
      'jsonl:<path>' or 'parquet:<path>'.
    **options: fields of the task's class.

  Raises:
    ValueError: no such task or option; names the nearest one.
    ImportError: the task needs an extra that is not installed.
  """
  kind, colon, rest = name.partition(':')
  if kind not in KINDS:
    raise ValueError(
      f'There is no task {name!r}{spelling.nearest(kind, KINDS)}'
    )
  bare = kind in _BARE
  if bare == bool(colon) or (colon and not rest):
    form = kind if bare else f'{kind}:<{_ARGUMENT[kind]}>'
    raise ValueError(f'Task {name!r} should read {form!r}.')
  return _build(kind, rest, options)


_ARGUMENT = {'reasoning_gym': 'dataset', 'jsonl': 'path', 'parquet': 'path'}


def _build(kind: str, rest: str, options: Mapping[str, Any]) -> Task:
  """Imports the module of a task and constructs it."""
  if kind == 'arithmetic':
    from rljax.tasks import arithmetic

    return arithmetic.Arithmetic(**checked(arithmetic.Arithmetic, options))
  if kind == 'countdown':
    from rljax.tasks import countdown

    return countdown.Countdown(**checked(countdown.Countdown, options))
  if kind == 'few_shot':
    from rljax.tasks import few_shot

    return few_shot.FewShot(**checked(few_shot.FewShot, options))
  if kind == 'reasoning_gym':
    from rljax.tasks import reasoning_gym

    known = checked(reasoning_gym.ReasoningGym, options, 'dataset')
    return reasoning_gym.ReasoningGym(dataset=rest, **known)
  from rljax.tasks import files

  known = checked(files.File, options, 'kind', 'path')
  return files.File(kind=kind, path=rest, **known)


def checked(
  cls: type, options: Mapping[str, Any], *taken: str
) -> dict[str, Any]:
  """Returns options as values of the fields of `cls`.

  Args:
    cls: dataclass of a task.
    options: by name; a text is read as what its field is annotated with.
    *taken: fields that are no options.

  Raises:
    ValueError: an option is unknown, with the nearest one, or no such value.
  """
  kinds = typing.get_type_hints(cls)
  known = [f.name for f in dataclasses.fields(cls) if f.name not in taken]
  for option in options:
    if option not in known:
      raise ValueError(
        f'{cls.__name__} has no option {option!r}'
        + spelling.nearest(option, known)
      )
  return {name: _read(name, x, kinds[name]) for name, x in options.items()}


_READ: Mapping[type, tuple[str, Callable[[str], Any]]] = {
  bool: ('true or false', lambda text: _BOOLS[text.lower()]),
  int: ('a whole number', int),
  float: ('a number', float),
  str: ('a text', str),
}
_BOOLS = {'true': True, 'false': False}


def _read(name: str, value: Any, kind: Any) -> Any:
  """Returns an option as a value of its kind."""
  if kind not in _READ:
    if isinstance(value, str):
      raise wrong(name, value, 'cannot be given as text')
    return value
  what, read = _READ[kind]
  if isinstance(value, str):
    try:
      value = read(value)
    except (ValueError, KeyError):
      raise wrong(name, value, f'is not {what}') from None
  elif kind is float and type(value) is int:
    value = float(value)
  if type(value) is not kind:
    raise wrong(name, value, f'is not {what}')
  return value


def wrong(name: str, value: Any, why: str) -> ValueError:
  """Returns the error for an option of a task."""
  end = '' if why.endswith(('.', '?')) else '.'
  return ValueError(f'--task_options={name}:{value} {why}{end}')


def check_least(task: Any, **limits: int) -> None:
  """Raises ValueError if an option is below its limit."""
  for name, least in limits.items():
    if getattr(task, name) < least:
      raise wrong(name, getattr(task, name), f'is less than {least}')


def check_share(task: Any, name: str) -> None:
  """Raises ValueError if an option is no share of a whole."""
  if not 0 < getattr(task, name) < 1:
    raise wrong(name, getattr(task, name), 'is not between 0 and 1')


def missing(package: str) -> ImportError:
  """Returns the error for a package that only the extra `tasks` brings."""
  return ImportError(
    f"{package!r} is not installed: pip install 'rljax[tasks]'", name=package
  )


def check_split(split: str) -> None:
  """Raises ValueError unless `split` is 'train' or 'test'."""
  if split not in SPLITS:
    raise ValueError(
      f'There is no split {split!r}{spelling.nearest(split, SPLITS)}'
    )


def verifier(
  name: str, options: Mapping[str, Any]
) -> Callable[[Example, str], float]:
  """Returns the host verifier of a task, in whatever process this runs."""
  return named(name, **options).verify


def sandboxed(task: Task, **limits: Any) -> sandbox.Sandbox:
  """Returns a sandbox that scores responses to `task`.

  Args:
    task: one that `named` can build again from its name and options.
    **limits: workers, timeout, memory_mb; see `sandbox.Sandbox`.
  """
  options = {'name': task.name, 'options': dict(task.options)}
  return sandbox.Sandbox(f'{__name__}:verifier', options, **limits)


def validate(task: Task, n: int = 16) -> None:
  """Checks a task's verifier on the first `n` examples of both splits.

  The worked solution, or the answer where there is none, must score 1; an
  example without either isn't checked for that. Empty, garbage and adversarial
  strings must score 0 and never raise; in the sandbox of an untrusted task they
  may also fail to be scored.

  Raises:
    ValueError: names the first example and string with another score.
  """
  if task.trusted:
    return _validate(task, n, task.verify)
  with sandboxed(task, workers=1, timeout=5.0) as box:
    _validate(task, n, lambda e, text: float(box.score([e], [text])[0]))


def _validate(task: Task, n: int, score: Callable) -> None:
  for split in SPLITS:
    source = task.source(split)
    for index in range(min(n, len(source))):
      _validate_one(task, source[index], score)


def _validate_one(task, example, score) -> None:
  gold = example.trace or example.answer
  cases = {g: 0.0 for g in _GARBAGE if g != example.answer}
  if gold:
    cases[gold] = 1.0
  for text, wanted in cases.items():
    try:
      got = score(example, text)
    except Exception as error:
      raise ValueError(
        f'{task.name}, example {example.uid}: {text[:60]!r} raised {error!r}.'
      ) from error
    failed = not wanted and not task.trusted and got != got
    if got != wanted and not failed:
      raise ValueError(
        f'{task.name}, example {example.uid}: {text[:60]!r} scores {got}, '
        f'not {wanted} (the answer is {example.answer[:60]!r}).'
      )
