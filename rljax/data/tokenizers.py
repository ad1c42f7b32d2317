"""Tokenizers: text to ids and back.

A tokenizer adds nothing to a text: who builds a prompt puts the one
beginning-of-sequence id in front of it. `pad_id` only fills arrays; which
positions are real is known from lengths, never from ids.
"""

from collections.abc import Iterable, Sequence
import dataclasses
import functools
import pathlib
from typing import Any, Protocol

from rljax.core import spelling
from rljax.data import subwords

Spec = dict[str, Any]


class Tokenizer(Protocol):
  """What the library asks of a tokenizer."""

  @property
  def vocab_size(self) -> int:
    """Ids are below this."""
    ...

  @property
  def pad_id(self) -> int:
    """The id that fills arrays; 0 when the vocabulary has none."""
    ...

  @property
  def bos_id(self) -> int | None:
    """The id that a text begins with, if the model was trained with one."""
    ...

  @property
  def stop_ids(self) -> tuple[int, ...]:
    """The ids that end a response."""
    ...

  def encode(self, text: str) -> list[int]:
    """Returns the ids of a text, without special ids around it."""
    ...

  def decode(self, ids: Sequence[int]) -> str:
    """Returns the text of ids; special ids have none."""
    ...

  def spec(self) -> Spec:
    """Returns what `load` rebuilds the tokenizer from, as JSON values."""
    ...


@dataclasses.dataclass(frozen=True)
class Bytes:
  """One id per byte of UTF-8; the id of a byte is its value."""

  pad_id: int = dataclasses.field(default=256, init=False)
  bos_id: int = dataclasses.field(default=257, init=False)
  stop_ids: tuple[int, ...] = dataclasses.field(default=(258,), init=False)
  vocab_size: int = dataclasses.field(default=259, init=False)

  def encode(self, text: str) -> list[int]:
    """Returns the bytes of a text."""
    return list(text.encode())

  def decode(self, ids: Sequence[int]) -> str:
    """Returns the text; bytes that are no UTF-8 become U+FFFD."""
    plain = subwords.plain_ids(ids, self.vocab_size)
    return bytes(i for i in plain if i < 256).decode(errors='replace')

  def spec(self) -> Spec:
    """Returns {'kind': 'byte'}."""
    return {'kind': 'byte'}


@dataclasses.dataclass(frozen=True)
class Characters:
  """One id per character of an alphabet, after pad, bos and stop."""

  alphabet: str
  pad_id: int = dataclasses.field(default=0, init=False)
  bos_id: int = dataclasses.field(default=1, init=False)
  stop_ids: tuple[int, ...] = dataclasses.field(default=(2,), init=False)

  def __post_init__(self):
    if not self.alphabet:
      raise ValueError('the alphabet is empty')
    if len(set(self.alphabet)) < len(self.alphabet):
      raise ValueError(f'the alphabet {self.alphabet!r} repeats a character')

  @functools.cached_property
  def _table(self) -> dict[str, int]:
    return {char: i for i, char in enumerate(self.alphabet, 3)}

  @property
  def vocab_size(self) -> int:
    """Characters and the three special ids."""
    return len(self.alphabet) + 3

  def encode(self, text: str) -> list[int]:
    """Returns the ids of a text; ValueError names a character it lacks."""
    try:
      return [self._table[char] for char in text]
    except KeyError as error:
      raise ValueError(
        f'character {error.args[0]!r} of {text[:40]!r} is not in the alphabet '
        f'{self.alphabet!r}'
      ) from None

  def decode(self, ids: Sequence[int]) -> str:
    """Returns the text of ids."""
    plain = subwords.plain_ids(ids, self.vocab_size)
    return ''.join(self.alphabet[i - 3] for i in plain if i > 2)

  def spec(self) -> Spec:
    """Returns the alphabet."""
    return {'kind': 'char', 'alphabet': self.alphabet}


def load(spec: Spec) -> Tokenizer:
  """Rebuilds a tokenizer from its `spec()`."""
  kind, fields = spec.get('kind'), {**spec}
  fields.pop('kind', None)
  if kind == 'byte':
    return Bytes()
  if kind == 'char':
    return Characters(**fields)
  if kind == 'sentencepiece':
    return subwords.SentencePiece.from_spec(fields)
  if kind == 'huggingface':
    return subwords.HuggingFace.from_spec(fields)
  raise ValueError(f'unknown kind of tokenizer {kind!r}')


_NAMES = ('char', 'byte', 'sentencepiece')


def _unknown(name: str) -> ValueError:
  hint = spelling.nearest(name, _NAMES)
  return ValueError(
    f'unknown tokenizer {name!r}{hint} An existing tokenizer.json or'
    ' tokenizer.model will do too.'
  )


def _from_file(path: pathlib.Path) -> Tokenizer:
  try:
    if path.suffix == '.json':
      return subwords.huggingface_file(path)
    return subwords.SentencePiece(path.read_bytes())
  except ValueError as error:
    raise ValueError(f'{path}: {error}') from error


def named(
  name: str, corpus: Iterable[str] = (), *, vocab_size: int = 512
) -> Tokenizer:
  """Returns the tokenizer that a flag asks for.

  Args:
    name: 'byte', 'char' (the characters of the corpus), 'sentencepiece'
      (trained on the corpus), or the path of a tokenizer.json or
      tokenizer.model.
    corpus: texts in which every character that will be met occurs.
    vocab_size: the upper limit when one is trained.

  Raises:
    ValueError: if the name is unknown, with the nearest one.
  """
  if name == 'byte':
    return Bytes()
  if name == 'char':
    return Characters(''.join(sorted(set().union(*corpus))))
  if name == 'sentencepiece':
    return subwords.train_sentencepiece(corpus, vocab_size)
  path = pathlib.Path(name)
  if not path.is_file():
    raise _unknown(name)
  return _from_file(path)
