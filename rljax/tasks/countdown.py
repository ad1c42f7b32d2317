"""Countdown: reach a target from given numbers, each used at most once.

A prompt is '3 5 7=26:', and '7*3+5' is one of its answers. An answer is
numbers joined by + - * /, without spaces, signs or parentheses; products come
before sums and a quotient is an exact fraction. The host verifier and the one
on the device accept the same answers.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import fractions
import functools
import hashlib
import itertools
import re
from typing import TYPE_CHECKING, Any

import grain
import jax
import jax.numpy as jnp
import numpy as np

from rljax.core import types
from rljax.data import prompts
from rljax.tasks import calculator, task

if TYPE_CHECKING:
  from rljax.data import tokenizers

_EXPRESSION = re.compile(r'[1-9][0-9]{0,8}(?:[-+*/][1-9][0-9]{0,8})*')
_MAX_LETTERS = 200  # of an answer that is looked at
_BLOCK = 1024  # problems drawn at once
_TRIES = 100  # draws per problem before the space counts as too small


@dataclasses.dataclass(frozen=True, kw_only=True)
class Countdown:
  """Random solvable problems, all different.

  Attributes:
    numbers: how many are given.
    largest: they are 1 .. largest.
    largest_target: targets are 1 .. largest_target, and no given number.
    problems: of both splits together.
    held_out: share of the problems that is kept for 'test'.
    seed: of the problems.
  """

  numbers: int = 3
  largest: int = 20
  largest_target: int = 100
  problems: int = 10_000
  held_out: float = 0.2
  seed: int = 0

  def __post_init__(self):
    task.check_least(
      self, numbers=2, largest=1, largest_target=1, problems=2, seed=0
    )
    task.check_share(self, 'held_out')
    most = max(self.numbers, self.largest_target)
    if most * self.largest**self.numbers >= 2**31:
      raise ValueError(
        f'{self.numbers} numbers up to {self.largest} with targets up to '
        f'{self.largest_target} overflow 32-bit integers on the device.'
      )

  @property
  def name(self) -> str:
    """The name that `task.named` takes."""
    return 'countdown'

  @property
  def options(self) -> Mapping[str, Any]:
    """What `task.named` takes besides the name."""
    return dataclasses.asdict(self)

  @property
  def trusted(self) -> bool:
    """Whether `verify` may run outside the sandbox."""
    return True

  @property
  def device_verify(self) -> Callable[[types.Rollout], jax.Array]:
    """Judges a rollout on the device, f32 [B]."""
    return reaches

  @property
  def alphabet(self) -> str:
    """Every character that a prompt or a solution may hold."""
    return f'{calculator.SYMBOLS} =:'

  def source(self, split: str) -> grain.MapDataset[task.Example]:
    """Returns the problems of a split."""
    task.check_split(split)
    return grain.MapDataset.source(self._splits[split])

  def verify(self, example: task.Example, text: str) -> float:
    """Returns 1 if the text is an answer in the task's form, else 0."""
    return float(
      reached(text, example.meta['numbers']) == example.meta['target']
    )

  def encode(
    self, example: task.Example, tokenizer: tokenizers.Tokenizer
  ) -> dict[str, np.ndarray]:
    """Returns 'numbers' i32 [numbers], 'target' i32 [], 'symbols' i32 [14].

    Raises:
      ValueError: the tokenizer has no token for some digit or operator.
    """
    symbols = [
      prompts.continuation('1', c, tokenizer) for c in calculator.SYMBOLS
    ]
    for symbol, ids in zip(calculator.SYMBOLS, symbols, strict=True):
      if len(ids) != 1:
        raise ValueError(f'countdown needs a single token for {symbol!r}.')
    return {
      'numbers': np.array(example.meta['numbers'], np.int32),
      'target': np.array(example.meta['target'], np.int32),
      'symbols': np.array(symbols, np.int32)[:, 0],
    }

  @functools.cached_property
  def _splits(self) -> dict[str, list[task.Example]]:
    splits: dict[str, list[task.Example]] = {name: [] for name in task.SPLITS}
    for key, example in self._examples().items():
      digest = hashlib.blake2b(repr(key).encode(), digest_size=4).digest()
      test = int.from_bytes(digest) < self.held_out * 2**32
      splits['test' if test else 'train'].append(example)
    return splits

  def _examples(self) -> dict[tuple, task.Example]:
    """Returns examples by (sorted numbers, target)."""
    found: dict[tuple, task.Example] = {}
    limit = _TRIES * self.problems
    for numbers, operators, order in itertools.islice(self._draws(), limit):
      value, below = _value(numbers, operators)
      target, rest = divmod(value, below)
      if rest or not 1 <= target <= self.largest_target or target in numbers:
        continue
      key = (*sorted(numbers), target)
      if key in found:
        continue
      signs = zip(operators, numbers[1:], strict=True)
      shown = [numbers[k] for k in order]
      answer = str(numbers[0]) + ''.join(f'{o}{n}' for o, n in signs)
      found[key] = task.Example(
        uid=len(found),
        prompt=f'{" ".join(map(str, shown))}={target}:',
        answer=answer,
        trace=answer,
        meta={'numbers': shown, 'target': target},
      )
      if len(found) == self.problems:
        return found
    raise ValueError(f'only {len(found)} problems found; asked: {self}')

  def _draws(self) -> Iterator[tuple[list[int], list[str], list[int]]]:
    """Yields numbers, operators between them, and an order to show them in."""
    rng = np.random.default_rng(self.seed)
    places = np.tile(np.arange(self.numbers), (_BLOCK, 1))
    while True:
      yield from zip(
        rng.integers(1, self.largest + 1, places.shape).tolist(),
        rng.choice(list('+-*/'), (_BLOCK, self.numbers - 1)).tolist(),
        rng.permuted(places, axis=1).tolist(),
        strict=True,
      )


def reached(text: str, numbers: Sequence[int]) -> fractions.Fraction | None:
  """Returns the value of an expression over `numbers`, or None.

  None for a text of another form, and for one that uses a number which isn't
  given, or more often than it is given.
  """
  if len(text) > _MAX_LETTERS or not _EXPRESSION.fullmatch(text):
    return None
  used = list(map(int, re.findall('[0-9]+', text)))
  if collections.Counter(used) - collections.Counter(numbers):
    return None
  return fractions.Fraction(*_value(used, re.findall('[-+*/]', text)))


def _value(numbers: Sequence[int], operators: Sequence[str]) -> tuple[int, int]:
  """Returns an expression's value as a numerator and a denominator > 0."""
  total, below, sign, term, under = 0, 1, 1, numbers[0], 1
  for operator, number in zip(operators, numbers[1:], strict=True):
    if operator == '*':
      term *= number
    elif operator == '/':
      under *= number
    else:
      total, below = total * under + sign * term * below, below * under
      sign, term, under = -1 if operator == '-' else 1, number, 1
  return total * under + sign * term * below, below * under


def reaches(rollout: types.Rollout) -> jax.Array:
  """Returns 1 where the response is an answer, as `Countdown.verify` does.

  A row that did not stop scores 0.

  Args:
    rollout: with `data` 'numbers' i32 [P, n], 'target' i32 [P] and 'symbols'
      i32 [P, 14], the ids of the digits and of + - * /.

  Returns:
    f32 [B].
  """
  data = {
    name: rollout.data[name][rollout.prompt_of]
    for name in ('numbers', 'target', 'symbols')
  }
  value = calculator.evaluate(
    rollout.response, rollout.length - 1, data['symbols'], data['numbers']
  )
  hit = value.numerator == data['target'] * value.denominator
  hit &= value.valid & (rollout.stop == int(types.Stop.TOKEN))
  return hit.astype(jnp.float32)
