"""Short sums and products, asked few-shot: for pretrained language models.

A prompt shows solved problems and ends in the one to solve:

  3+4=7
  5*6=30
  2+9=

A response is right if it is exactly the answer and then stops: no space, no
leading zero, nothing after it. Whoever samples makes the line break a stop
token beside the model's own; the text of a response ends before its stop token.
On the device tokens are compared, on the host text, which lacks special tokens:
the two differ where a model writes one of those in the middle of an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
import dataclasses
import functools
import hashlib
import itertools
import operator
from typing import TYPE_CHECKING, Any

import grain
import numpy as np

from rljax.core import spelling
from rljax.data import prompts
from rljax.tasks import arithmetic, task

if TYPE_CHECKING:
  import jax

  from rljax.core import types
  from rljax.data import tokenizers


@dataclasses.dataclass(frozen=True)
class Part:
  """One kind of problem.

  Attributes:
    digits: operands are 0 .. 10**digits - 1.
    symbol: of the operation.
    apply: the operation.
    shown: problems that may stand above a prompt.
  """

  digits: int
  symbol: str
  apply: Callable[[int, int], int]
  shown: tuple[tuple[int, int], ...]


PARTS = {
  'sums': Part(1, '+', operator.add, ((3, 4), (8, 9), (1, 7), (6, 0))),
  'products': Part(1, '*', operator.mul, ((5, 6), (2, 4), (9, 3), (7, 1))),
  'long_sums': Part(
    2, '+', operator.add, ((17, 25), (60, 38), (8, 54), (46, 91))
  ),
}
_SHOWN = 4  # problems that each part can show
_ANSWER_TOKENS = 4  # three digits, and a mark of the start

Problem = tuple[str, int, int]  # name of the part, and two operands


@dataclasses.dataclass(frozen=True, kw_only=True)
class FewShot:
  """Sums and products of two numbers.

  Attributes:
    parts: names from `PARTS`, separated by spaces: one-digit sums, one-digit
      products, two-digit sums.
    shots: solved problems above each prompt, the parts in turn.
    held_out: share of the unordered problems of each part kept for 'test'.
    most: unordered problems of a part that are asked at all; one digit has 55
      of each operation.
  """

  parts: str = 'sums products'
  shots: int = 4
  held_out: float = 0.4
  most: int = 55

  def __post_init__(self):
    for part in self._parts:
      if part not in PARTS:
        hint = spelling.nearest(part, PARTS)
        raise task.wrong('parts', self.parts, f'has no part {part!r}{hint}')
    if not self._parts or len(set(self._parts)) < len(self._parts):
      raise task.wrong('parts', self.parts, 'is empty or repeats itself')
    if not 0 <= self.shots <= _SHOWN * len(self._parts):
      why = f'is not between 0 and {_SHOWN} for each part'
      raise task.wrong('shots', self.shots, why)
    task.check_least(self, most=4)
    task.check_share(self, 'held_out')

  @property
  def name(self) -> str:
    """'few_shot'."""
    return 'few_shot'

  @property
  def options(self) -> Mapping[str, Any]:
    """The attributes by name."""
    return dataclasses.asdict(self)

  @property
  def trusted(self) -> bool:
    """True: a response is only compared."""
    return True

  @property
  def device_verify(self) -> Callable[[types.Rollout], jax.Array]:
    """Compares tokens with those of the answer."""
    return arithmetic.exact

  def source(self, split: str) -> grain.MapDataset[task.Example]:
    """Returns the problems of a split, both orders of each."""
    task.check_split(split)
    return grain.MapDataset.source(self._splits[split]).map(self._example)

  def verify(self, example: task.Example, text: str) -> float:
    """Returns 1 if the text is the answer to the character, else 0."""
    return float(text == example.answer)

  def encode(
    self, example: task.Example, tokenizer: tokenizers.Tokenizer
  ) -> dict[str, np.ndarray]:
    """Returns 'answer' i32 [A], 'answer_length' and 'separator' (-1) i32 []."""
    ids = prompts.continuation(example.prompt, example.answer, tokenizer)
    answer = np.zeros(_ANSWER_TOKENS, np.int32)
    answer[: len(ids)] = ids
    return {
      'answer': answer,
      'answer_length': np.array(len(ids), np.int32),
      'separator': np.array(-1, np.int32),
    }

  @property
  def _parts(self) -> list[str]:
    return self.parts.split()

  @functools.cached_property
  def _shown(self) -> list[Problem]:
    """The solved problems, the parts in turn."""
    turns = [
      (p, *PARTS[p].shown[i]) for i in range(_SHOWN) for p in self._parts
    ]
    return turns[: self.shots]

  @functools.cached_property
  def _preamble(self) -> str:
    return ''.join(f'{_written(p)}{_answer(p)}\n' for p in self._shown)

  @functools.cached_property
  def _splits(self) -> dict[str, list[Problem]]:
    """The ordered problems of each split."""
    splits: dict[str, list[Problem]] = {name: [] for name in task.SPLITS}
    shown = [_uid(problem) for problem in self._shown]
    for part in self._parts:
      rest = [p for p in _problems(part) if _uid(p) not in shown]
      asked = sorted(rest, key=_digest)[: self.most]
      for i, problem in enumerate(sorted(asked, key=_size)):
        held = int((i + 1) * self.held_out) > int(i * self.held_out)
        splits['test' if held else 'train'] += _both_orders(problem)
    return splits

  def _example(self, problem: Problem) -> task.Example:
    return task.Example(
      uid=_uid(problem),
      prompt=f'{self._preamble}{_written(problem)}',
      answer=_answer(problem),
      trace=_answer(problem),
    )


def _problems(part: str) -> Iterator[Problem]:
  """Yields the unordered problems of a part, the smaller operand first."""
  numbers = range(10 ** PARTS[part].digits)
  for a, b in itertools.combinations_with_replacement(numbers, 2):
    yield part, a, b


def _both_orders(problem: Problem) -> list[Problem]:
  part, a, b = problem
  return list(dict.fromkeys([problem, (part, b, a)]))


def _digest(problem: Problem) -> bytes:
  """Orders problems as if at random, in the same way everywhere."""
  return hashlib.blake2b(repr(problem).encode(), digest_size=8).digest()


def _size(problem: Problem) -> tuple[int, bytes]:
  """Orders problems so that every n-th is about as hard as all together."""
  return problem[2], _digest(problem)


def _uid(problem: Problem) -> int:
  """Returns a number that both orders of a problem share, and no others."""
  part, *operands = problem
  low, high = sorted(operands)
  return (list(PARTS).index(part) * 100 + high) * 100 + low


def _written(problem: Problem) -> str:
  part, a, b = problem
  return f'{a}{PARTS[part].symbol}{b}='


def _answer(problem: Problem) -> str:
  part, a, b = problem
  return str(PARTS[part].apply(a, b))
