"""The generators and scorers of reasoning-gym, by name (extra `tasks`).

Some of its scorers evaluate what the policy wrote, pay for garbage, or raise
on an answer of another form (found in version 0.1.25, by running each one).
Those are replaced or guarded here, by name, with the reason; the rest is used
as it is, in a sandbox, with partial credit counted as none.

Like `task`, this module loads neither jax nor grain before it must.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import contextlib
import dataclasses
import functools
import hashlib
import importlib
import io
import json
from typing import TYPE_CHECKING, Any

from rljax.core import spelling
from rljax.rewards import expressions
from rljax.tasks import task

if TYPE_CHECKING:
  import grain
  import numpy as np

  from rljax.data import tokenizers

Entry = Mapping[str, Any]  # 'question', 'answer' and 'metadata'

_REFUSED = {
  'codeio': 'making a problem runs code from its data file in this process',
  'composite': 'its entries do not say which scorer they need',
}
_DENSE = 0.9  # share of different questions below which a space is small


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReasoningGym:
  """One generator.

  Attributes:
    dataset: its name.
    config: fields of its own configuration.
    size: examples of 'train'; they may repeat.
    test_size: most examples of 'test'; they don't repeat.
    seed: of the generator.
    threshold: least score of reasoning-gym that counts, as 1.
    template: what the policy reads, with '{question}' for the question.
  """

  dataset: str
  config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  size: int = 10_000
  test_size: int = 200
  seed: int = 0
  threshold: float = 1.0
  template: str = '{question}\n'

  def __post_init__(self):
    task.check_least(self, size=1, test_size=1)
    if not 0 < self.threshold <= 1:
      why = 'is not above 0 and at most 1'
      raise task.wrong('threshold', self.threshold, why)
    if '{question}' not in self.template:
      why = "does not hold '{question}'"
      raise task.wrong('template', self.template, why)
    if reason := _REFUSED.get(self.dataset):
      raise ValueError(f'reasoning_gym:{self.dataset} is refused: {reason}.')
    _ = self._generator  # what is wrong with the name or config shows now

  @property
  def name(self) -> str:
    """The name that `task.named` takes."""
    return f'reasoning_gym:{self.dataset}'

  @property
  def options(self) -> Mapping[str, Any]:
    """What `task.named` takes besides the name."""
    fields = dataclasses.asdict(self)
    return {k: v for k, v in fields.items() if k != 'dataset'}

  @property
  def trusted(self) -> bool:
    """Whether `verify` may run outside the sandbox."""
    return False

  @property
  def device_verify(self) -> None:
    """Judges a rollout on the device, f32 [B]."""
    return None

  def source(self, split: str) -> grain.MapDataset[task.Example]:
    """Returns the examples of a split; no question is in both.

    'test' holds the different questions of a range of indices of its own.
    Where that range repeats itself, the space of problems is small, and a
    third of its questions is held out.
    """
    import grain

    task.check_split(split)
    if split == 'test':
      return grain.MapDataset.source(self._test)
    return grain.MapDataset.range(self.size).map(self._train_example)

  def verify(self, example: task.Example, text: str) -> float:
    """Returns 1 if the response reaches the threshold, else 0."""
    entry, text = example.meta['entry'], text.strip()
    if check := _REPLACED.get(self.dataset):
      return float(check(text, entry))
    if guard := _GUARDED.get(self.dataset):
      if not guard(text):
        return 0.0
    try:
      score = self._generator.score_answer(text, entry)
    except _WRONG_FORM:
      if self.dataset in _RAISING:
        return 0.0
      raise
    return float(score >= self.threshold)

  def encode(
    self, example: task.Example, tokenizer: tokenizers.Tokenizer
  ) -> dict[str, np.ndarray]:
    """Returns nothing: responses are scored on the host."""
    del example, tokenizer
    return {}

  @functools.cached_property
  def _generator(self) -> Any:
    factory = _factory()
    if self.dataset not in factory.DATASETS:
      hint = spelling.nearest(self.dataset, factory.DATASETS)
      raise ValueError(f'reasoning_gym has no {self.dataset!r}{hint}')
    _, config = factory.DATASETS[self.dataset]
    known = [f.name for f in dataclasses.fields(config)]
    known = [name for name in known if name not in ('seed', 'size')]
    for field in self.config:
      if field not in known:
        hint = spelling.nearest(field, known)
        raise ValueError(f'{self.name} has no field {field!r}{hint}')
    try:
      return factory.create_dataset(
        self.dataset,
        seed=self.seed,
        size=self.size + self.test_size,
        **self.config,
      )
    except (AssertionError, TypeError) as error:
      raise ValueError(f'{self.name}: {error}.') from error

  @functools.cached_property
  def _test(self) -> Sequence[task.Example]:
    indices = range(self.size, self.size + self.test_size)
    examples = {e.prompt: e for e in map(self._example, indices)}
    if len(examples) >= _DENSE * self.test_size:
      return list(examples.values())
    ranked = sorted(examples, key=_digest)
    return [examples[prompt] for prompt in ranked[: -(-len(ranked) // 3)]]

  @functools.cached_property
  def _held_out(self) -> frozenset[str]:
    return frozenset(example.prompt for example in self._test)

  def _train_example(self, index: int) -> task.Example:
    """Returns the next example at or after `index` that isn't held out."""
    for step in range(self.size):
      example = self._example((index + step) % self.size)
      if example.prompt not in self._held_out:
        return example
    raise ValueError(f'{self.name} leaves no question to train on.')

  def _example(self, index: int) -> task.Example:
    with contextlib.redirect_stdout(io.StringIO()):  # 'bf' prints
      entry = _plain(self._generator[index])
    prompt = self.template.replace('{question}', entry['question'])
    answer = entry['answer']
    if answer is None:
      answer = _SAMPLES.get(self.dataset, _no_sample)(entry['metadata'])
    digest = int.from_bytes(_digest(prompt)[:4]) % 2**31
    return task.Example(
      uid=digest, prompt=prompt, answer=str(answer), meta={'entry': entry}
    )


def _factory() -> Any:
  """Returns the module that knows all generators."""
  try:
    return importlib.import_module('reasoning_gym.factory')
  except ImportError:
    raise task.missing('reasoning_gym') from None


def _plain(value: Any) -> Any:
  """Returns a value with numpy's types replaced by Python's."""
  if isinstance(value, dict):
    return {_plain(k): _plain(v) for k, v in value.items()}
  if isinstance(value, list | tuple | set):
    return type(value)(_plain(v) for v in value)
  if type(value).__module__ == 'numpy':
    return value.tolist()
  return value


def _digest(text: str) -> bytes:
  return hashlib.blake2b(text.encode(), digest_size=8).digest()


def _same(text: str, entry: Entry) -> bool:
  return text == entry['answer'].strip()


def _one_of_queens(text: str, entry: Entry) -> bool:
  return text in entry['metadata']['valid_answers']


def _reaches(text: str, entry: Entry) -> bool:
  """Whether an expression uses each given number once and hits the target."""
  result = expressions.arithmetic(text)
  if result is None:
    return False
  value, numbers = result
  given = entry['metadata']['numbers']
  target = entry['metadata'].get('target', 24)
  return value == target and sorted(numbers) == sorted(given)


# Scorers that are not used, and what decides instead.
_REPLACED: Mapping[str, Callable[[str, Entry], bool]] = {
  # They evaluate the response as Python, for partial credit.
  'binary_matrix': _same,
  'n_queens': _one_of_queens,
  'spiral_matrix': _same,
  'string_insertion': _same,
  # It evaluates the response through sympy, which '9**9**9' hangs.
  'countdown': _reaches,
  # As above; and any four numbers in range that make 24 would do.
  'puzzle24': _reaches,
  # Every text that isn't empty counts as True, and so does the answer.
  'game_of_life_halting': _same,
}


# What a response must look like before the scorer may see it.
_GUARDED: Mapping[str, Callable[[str], bool]] = {
  # 'nan' would be right for every problem.
  'complex_arithmetic': lambda text: 'n' not in text.lower(),
  # They evaluate the response through sympy.
  'intermediate_integration': expressions.is_algebra,
  'polynomial_multiplication': expressions.is_algebra,
  'simple_integration': expressions.is_algebra,
}

# Scorers that raise on an answer of another form, which is a wrong answer.
_RAISING = frozenset(
  ['boxnet', 'coin_flip', 'game_of_life', 'prime_factorization']
)
_WRONG_FORM = (
  *(ArithmeticError, AttributeError, LookupError, TypeError, ValueError),
)  # fmt: skip


def _coloring(metadata: Entry) -> str:
  return json.dumps(metadata['possible_answer'])


def _no_sample(metadata: Entry) -> str:
  del metadata
  return ''


# A right answer where the entry has none of its own; 'boxnet' and 'rush_hour'
# tell no answer at all.
_SAMPLES: Mapping[str, Callable[[Entry], str]] = {
  'graph_color': _coloring,
  'propositional_logic': lambda metadata: metadata['example_answer'],
  'rubiks_cube': lambda metadata: metadata['example_correct_answer'],
}
