"""Procedural arithmetic: every problem of a small space, split by problem.

A prompt is '47+38='. The answer is what follows the last ';' of a response,
or the whole response if it has none, and must be right to the character. The
worked solution of style

  'plain'    is the answer:              '85'
  'short'    gives the column sums:      '15;8;85'
  'scratch'  writes each column out:     '7+8=15;4+3+1=8;85'

and `reverse` writes the final answer from its last digit: '58'.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import functools
import hashlib
import itertools
import math
from typing import TYPE_CHECKING, Any

import grain
import jax
import jax.numpy as jnp
import numpy as np

from rljax.core import spelling, types
from rljax.data import prompts
from rljax.tasks import task

if TYPE_CHECKING:
  from rljax.data import tokenizers

SEPARATOR = ';'
STYLES = ('plain', 'short', 'scratch')
_MAX_SPACE = 2**20  # ordered problems; the space is enumerated in memory


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arithmetic:
  """Sums, differences and products of small numbers.

  Attributes:
    operations: any of '+-*', each once.
    digits: operands are 0 .. 10**digits - 1.
    terms: operands of a problem.
    style: 'plain', 'short' or 'scratch'; see the module.
    reverse: the answer's digits are written last to first.
    held_out: share of the unordered problems that is kept for 'test'.
  """

  operations: str = '+'
  digits: int = 2
  terms: int = 2
  style: str = 'plain'
  reverse: bool = False
  held_out: float = 0.2

  def __post_init__(self):
    if not self.operations or set(self.operations) - set('+-*'):
      why = 'should be some of "+-*"'
      raise task.wrong('operations', self.operations, why)
    if len(set(self.operations)) < len(self.operations):
      raise task.wrong('operations', self.operations, 'repeats itself')
    if self.style not in STYLES:
      hint = spelling.nearest(self.style, STYLES)
      raise task.wrong('style', self.style, f'is no style{hint}')
    task.check_least(self, digits=1, terms=2)
    task.check_share(self, 'held_out')
    size = 10 ** (self.digits * self.terms)
    size *= len(self.operations) ** (self.terms - 1)
    if size > _MAX_SPACE:
      raise ValueError(
        f'{size} problems are more than {_MAX_SPACE}: take fewer digits, '
        'terms or operations.'
      )

  @property
  def name(self) -> str:
    """The name that `task.named` takes."""
    return 'arithmetic'

  @property
  def title(self) -> str:
    """The name for people, who may wonder at what they see."""
    return self.name + (
      ', answers written from the last digit' if self.reverse else ''
    )

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
    return exact

  @property
  def alphabet(self) -> str:
    """Every character that a prompt or a worked solution may hold."""
    return '0123456789+-*=;'

  def source(self, split: str) -> grain.MapDataset[task.Example]:
    """Returns the problems of a split, both orders of each."""
    task.check_split(split)
    return grain.MapDataset.source(self._splits[split]).map(self._example)

  def verify(self, example: task.Example, text: str) -> float:
    """Returns 1 if the text after the last separator is the answer, else 0."""
    return float(text.rpartition(SEPARATOR)[2] == example.answer)

  def encode(
    self, example: task.Example, tokenizer: tokenizers.Tokenizer
  ) -> dict[str, np.ndarray]:
    """Returns 'answer' i32 [A], 'answer_length' and 'separator' i32 [].

    The separator is -1 where answers are plain and it is no token.

    Raises:
      ValueError: worked solutions need a separator that this tokenizer joins
        to what stands beside it.
    """
    context = example.prompt if self.style == 'plain' else SEPARATOR
    ids = prompts.continuation(context, example.answer, tokenizer)
    answer = np.zeros(self._answer_tokens, np.int32)
    answer[: len(ids)] = ids
    mark = self._mark(example.answer, ids, tokenizer)
    return {
      'answer': answer,
      'answer_length': np.array(len(ids), np.int32),
      'separator': np.array(mark, np.int32),
    }

  def _mark(self, answer: str, ids: list[int], tokenizer) -> int:
    """Returns the id of the separator before an answer of these ids."""
    mark = prompts.continuation('0', SEPARATOR, tokenizer)
    if self.style == 'plain':
      return mark[0] if len(mark) == 1 else -1
    written = prompts.continuation('0', SEPARATOR + answer, tokenizer)
    if len(mark) != 1 or written != [*mark, *ids]:
      raise ValueError(
        f'style:{self.style} needs a tokenizer in which {SEPARATOR!r} is a'
        ' token of its own: take --tokenizer=char, or style:plain.'
      )
    return mark[0]

  @property
  def _answer_tokens(self) -> int:
    """Most tokens of an answer: a sign, its digits, a mark of the start."""
    return self.digits * self.terms + 3

  @functools.cached_property
  def _ranks(self) -> dict[str, int]:
    """The place of each unordered problem in an order that looks random."""
    keys = {canonical(*problem) for problem in self._problems()}
    order = sorted(keys, key=lambda key: (_digest(key), key))
    return {key: rank for rank, key in enumerate(order)}

  @functools.cached_property
  def _splits(self) -> dict[str, list[tuple]]:
    """The ordered problems of each split; the first ranks are held out."""
    held = math.ceil(self.held_out * len(self._ranks))
    if held == len(self._ranks):
      raise ValueError(f'{self.held_out=} leaves nothing to train on.')
    splits: dict[str, list[tuple]] = {name: [] for name in task.SPLITS}
    for problem in self._problems():
      rank = self._ranks[canonical(*problem)]
      splits['test' if rank < held else 'train'].append(problem)
    return splits

  def _problems(self) -> Iterator[tuple[tuple[int, ...], tuple[str, ...]]]:
    """Yields every (operands, operators)."""
    operands = itertools.product(range(10**self.digits), repeat=self.terms)
    operators = list(itertools.product(self.operations, repeat=self.terms - 1))
    return itertools.product(operands, operators)

  def _example(self, problem: tuple) -> task.Example:
    operands, operators = problem
    return task.Example(
      uid=self._ranks[canonical(operands, operators)],
      prompt=f'{written(operands, operators)}=',
      answer=self._answer(operands, operators),
      trace=self._solution(operands, operators),
    )

  def _answer(self, operands, operators) -> str:
    answer = str(sum(math.prod(term) for term in _terms(operands, operators)))
    return answer[::-1] if self.reverse else answer

  def _solution(self, operands, operators) -> str:
    """Returns a response that is right and of the wanted style."""
    answer = self._answer(operands, operators)
    if self.style == 'plain':
      return answer
    steps = worked(operands, operators)
    if self.style == 'scratch':
      lines = [f'{left}={right}' for left, right in steps]
    else:
      lines = [str(right) for _, right in steps]
    return SEPARATOR.join([*lines, answer])


def written(operands: Sequence[int], operators: Sequence[str]) -> str:
  """Returns the problem as text, '47+38'."""
  rest = (f'{o}{x}' for o, x in zip(operators, operands[1:], strict=True))
  return f'{operands[0]}{"".join(rest)}'


def canonical(operands: Sequence[int], operators: Sequence[str]) -> str:
  """Returns a text that is equal for problems equal up to order.

  Products may swap their factors, sums their signed terms: 38+47 is 47+38,
  and 5-2*3 is 5-3*2, but 5-2 isn't 2-5.
  """
  terms = _terms(operands, operators)
  return ' '.join(sorted('*'.join(map(str, sorted(t))) for t in terms))


def worked(
  operands: Sequence[int], operators: Sequence[str]
) -> list[tuple[str, int]]:
  """Returns the steps (expression, value): products first, then columns.

  Columns go from the last digit to the first and carry. If the result is
  negative, the columns are those of its negative.
  """
  steps: list[tuple[str, int]] = []
  values = [_multiply(term, steps) for term in _terms(operands, operators)]
  if len(values) > 1:
    sign = -1 if sum(values) < 0 else 1
    steps.extend(_columns([sign * value for value in values]))
  return steps


def _terms(operands, operators) -> list[list[int]]:
  """Returns the factors of each term; a minus goes to the smallest one."""
  terms = [[operands[0]]]
  signs = [1]
  for operator, operand in zip(operators, operands[1:], strict=True):
    if operator == '*':
      terms[-1].append(operand)
    else:
      terms.append([operand])
      signs.append(-1 if operator == '-' else 1)
  return [
    [sign, *term] if sign < 0 else term
    for sign, term in zip(signs, terms, strict=True)
  ]


def _multiply(term: list[int], steps: list[tuple[str, int]]) -> int:
  """Returns the product of a term; appends one step per nonzero digit."""
  sign = -1 if term[0] == -1 else 1
  product, *factors = term[1:] if sign < 0 else term
  for factor in factors:
    places = [d * 10**k for k, d in enumerate(_digits(factor)) if d] or [0]
    parts = [product * place for place in places]
    steps.extend(
      (f'{product}*{place}', part)
      for place, part in zip(places, parts, strict=True)
    )
    if len(parts) > 1:
      steps.append(('+'.join(map(str, parts)), sum(parts)))
    product *= factor
  return sign * product


def _columns(values: list[int]) -> Iterator[tuple[str, int]]:
  """Yields the step of each column of a sum that is not negative."""
  width = max(len(_digits(abs(value))) for value in values)
  carry = 0
  for place in range(width):
    column = [
      (-1 if value < 0 else 1, abs(value) // 10**place % 10) for value in values
    ]
    total = sum(sign * digit for sign, digit in column) + carry
    text = ''.join(f'{"-" if sign < 0 else "+"}{d}' for sign, d in column)
    text += f'{carry:+d}' if carry else ''
    yield text.removeprefix('+'), total
    carry = total // 10


def _digits(value: int) -> list[int]:
  """Returns the digits of a number, the last one first."""
  return [int(digit) for digit in reversed(str(value))]


def _digest(text: str) -> bytes:
  return hashlib.blake2b(text.encode(), digest_size=8).digest()


def exact(rollout: types.Rollout) -> jax.Array:
  """Returns 1 where the final answer's tokens are exactly the example's.

  The final answer is what stands between the last separator token (the start
  of the response if there is none) and the stop token. A row that did not
  stop scores 0.

  Args:
    rollout: with `data` 'answer' i32 [P, A], 'answer_length' i32 [P] and
      'separator' i32 [P], -1 for none.

  Returns:
    f32 [B].
  """
  data = {k: rollout.data[k][rollout.prompt_of] for k in _FIELDS}
  end = rollout.length - 1
  place = jnp.arange(rollout.response.shape[1])
  cut = rollout.response == data['separator'][:, None]
  cut &= place[None] < end[:, None]
  start = jnp.max(jnp.where(cut, place[None] + 1, 0), axis=1)
  offset = jnp.arange(data['answer'].shape[1])
  index = jnp.clip(start[:, None] + offset[None], 0, place.size - 1)
  said = jnp.take_along_axis(rollout.response, index, axis=1)
  inside = offset[None] < data['answer_length'][:, None]
  same = jnp.all((said == data['answer']) | ~inside, axis=1)
  same &= end - start == data['answer_length']
  same &= rollout.stop == int(types.Stop.TOKEN)
  return same.astype(jnp.float32)


_FIELDS = ('answer', 'answer_length', 'separator')
