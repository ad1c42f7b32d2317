"""Prompts and answers from a JSONL or Parquet file.

Like `task`, this module loads neither jax nor grain before it must.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
import dataclasses
import functools
import hashlib
import json
import math
import pathlib
from typing import TYPE_CHECKING, Any

from rljax.core import spelling
from rljax.rewards import mathematics
from rljax.tasks import task

if TYPE_CHECKING:
  import grain
  import numpy as np

  from rljax.data import tokenizers

COMPARISONS = ('exact', 'math')


@dataclasses.dataclass(frozen=True, kw_only=True)
class File:
  """One example a line or row.

  Attributes:
    kind: 'jsonl' or 'parquet' (extra `tasks`).
    path: of the file.
    prompt: field of the prompt, a string.
    answer: field of the answer, a string or a number.
    trace: field of a worked solution; '' for none.
    template: what the policy reads, with '{prompt}' for the prompt.
    compare: 'exact' wants the answer as the whole response; 'math' wants one
      that is equal to it in a box, see `mathematics.equivalent` (extra
      `tasks`).
    test_path: file of the same kind for 'test'; its prompts are taken out of
      'train'. '' splits the one file instead.
    held_out: share of the prompts of one file that is kept for 'test'.
  """

  kind: str
  path: str
  prompt: str = 'prompt'
  answer: str = 'answer'
  trace: str = ''
  template: str = '{prompt}'
  compare: str = 'exact'
  test_path: str = ''
  held_out: float = 0.1

  def __post_init__(self):
    if self.compare not in COMPARISONS:
      hint = spelling.nearest(self.compare, COMPARISONS)
      raise task.wrong('compare', self.compare, f'is no comparison{hint}')
    if '{prompt}' not in self.template:
      why = "does not hold '{prompt}'"
      raise task.wrong('template', self.template, why)
    task.check_share(self, 'held_out')
    if self.compare == 'math':
      mathematics.require()

  @property
  def name(self) -> str:
    """The name that `task.named` takes."""
    return f'{self.kind}:{self.path}'

  @property
  def options(self) -> Mapping[str, Any]:
    """What `task.named` takes besides the name."""
    fields = dataclasses.asdict(self)
    return {k: v for k, v in fields.items() if k not in ('kind', 'path')}

  @property
  def trusted(self) -> bool:
    """Whether `verify` may run outside the sandbox."""
    return self.compare == 'exact'

  @property
  def device_verify(self) -> None:
    """Judges a rollout on the device, f32 [B]."""
    return None

  def source(self, split: str) -> grain.MapDataset[task.Example]:
    """Returns the examples of a split in the order of their file.

    Raises:
      ValueError: the file can't be read; names it and the line.
    """
    import grain

    task.check_split(split)
    return grain.MapDataset.source(self._splits[split])

  def verify(self, example: task.Example, text: str) -> float:
    """Returns 1 if the response is right, else 0."""
    if self.compare == 'math':
      return mathematics.equivalent(example.answer, text)
    return float(text.strip() == example.answer.strip())

  def encode(
    self, example: task.Example, tokenizer: tokenizers.Tokenizer
  ) -> dict[str, np.ndarray]:
    """Returns nothing: answers are compared on the host."""
    del example, tokenizer
    return {}

  @functools.cached_property
  def _splits(self) -> dict[str, list[task.Example]]:
    rows = self._rows(self.path)
    test = self._rows(self.test_path) if self.test_path else rows
    uids: dict[str, int] = {}
    for example in (*rows, *test):
      uids.setdefault(example.prompt, len(uids))
    if self.test_path:
      held = {example.prompt for example in test}
    else:
      ranked = sorted(uids, key=_digest)
      held = set(ranked[: math.ceil(self.held_out * len(ranked))])
    train = [e for e in rows if e.prompt not in held]
    if not train:
      raise ValueError(f'{self.path} leaves no prompt to train on.')
    test = [e for e in test if e.prompt in held]
    return {
      name: [dataclasses.replace(e, uid=uids[e.prompt]) for e in examples]
      for name, examples in (('train', train), ('test', test))
    }

  def _rows(self, path: str) -> list[task.Example]:
    """Returns the examples of a file, all with uid 0."""
    if not pathlib.Path(path).is_file():
      raise ValueError(f'There is no file {path!r}.')
    read = _read_jsonl if self.kind == 'jsonl' else _read_parquet
    fields = [f for f in (self.prompt, self.answer, self.trace) if f]
    rows = [self._example(row, place) for row, place in read(path, fields)]
    if not rows:
      raise ValueError(f'{path} holds no examples.')
    return rows

  def _example(self, row: Mapping[str, Any], place: str) -> task.Example:
    prompt = _text(row, self.prompt, place, (str,))
    return task.Example(
      uid=0,
      prompt=self.template.replace('{prompt}', prompt),
      answer=_text(row, self.answer, place, (str, int, float)),
      trace=_text(row, self.trace, place, (str,)) if self.trace else '',
    )


def _text(
  row: Mapping[str, Any], field: str, place: str, kinds: tuple[type, ...]
) -> str:
  """Returns a field of a row as text, or raises with the place."""
  if field not in row:
    raise ValueError(
      f'{place}: no field {field!r}{spelling.nearest(field, row)}'
    )
  value = row[field]
  if not isinstance(value, kinds) or isinstance(value, bool):
    raise ValueError(
      f'{place}: {field!r} is {value!r:.40}, not a '
      f'{" or ".join(kind.__name__ for kind in kinds)}.'
    )
  if isinstance(value, float) and not math.isfinite(value):
    raise ValueError(f'{place}: {field!r} is {value}, not a finite number.')
  text = str(value)
  try:
    text.encode()
  except UnicodeEncodeError as error:
    # JSON can write half a surrogate pair, of which no text can be made.
    raise ValueError(f'{place}: {field!r} is no text: {error}.') from None
  return text


def _read_jsonl(
  path: str, fields: list[str]
) -> Iterator[tuple[Mapping[str, Any], str]]:
  """Yields each object and its place."""
  del fields
  for number, line in enumerate(pathlib.Path(path).read_bytes().split(b'\n')):
    place = f'{path}, line {number + 1}'
    if not line.strip():
      continue
    try:
      row = json.loads(line)
    except ValueError as error:
      raise ValueError(f'{place}: not JSON: {error}.') from None
    if not isinstance(row, dict):
      raise ValueError(f'{place}: not a JSON object: {line[:40]!r}.')
    yield row, place


def _read_parquet(
  path: str, fields: list[str]
) -> Iterator[tuple[Mapping[str, Any], str]]:
  """Yields each row and its place."""
  try:
    import pyarrow
    from pyarrow import parquet
  except ImportError:
    raise task.missing('pyarrow') from None
  try:
    names = parquet.read_schema(path).names
    columns = [field for field in fields if field in names]
    rows = parquet.read_table(path, columns=columns).to_pylist()
  except (pyarrow.ArrowInvalid, OSError) as error:
    raise ValueError(f'{path}: not a Parquet file: {error}.') from None
  for field in fields:
    if field not in names:
      hint = spelling.nearest(field, names)
      raise ValueError(f'{path}: no column {field!r}{hint}')
  for number, row in enumerate(rows):
    yield row, f'{path}, row {number + 1}'


def _digest(text: str) -> tuple[bytes, str]:
  return hashlib.blake2b(text.encode(), digest_size=8).digest(), text
