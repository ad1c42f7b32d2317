"""From examples to batches of token ids, in an order that can be resumed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

import grain
import numpy as np

from rljax.core import types

if TYPE_CHECKING:
  from rljax.data import tokenizers

_LONG = ('skip', 'refuse')
_NAMED = 10  # skipped prompts that are named; all are counted


class Prompted(Protocol):
  """What a batch needs to know of an example."""

  @property
  def uid(self) -> int:
    """Id of the problem within its task."""
    ...

  @property
  def prompt(self) -> str:
    """What the policy reads."""
    ...


class Encoder(Protocol):
  """What a batch needs to know of a task."""

  def encode(
    self, example: Any, tokenizer: tokenizers.Tokenizer
  ) -> dict[str, np.ndarray]:
    """Returns arrays of the same shapes for every example."""
    ...


class LongPromptError(ValueError):
  """A prompt has more tokens than the limit."""


def encode(text: str, tokenizer: tokenizers.Tokenizer) -> list[int]:
  """Returns the ids of a prompt; a tokenizer's BOS comes exactly once."""
  ids = list(tokenizer.encode(text))
  if tokenizer.bos_id is None or ids[:1] == [tokenizer.bos_id]:
    return ids
  return [tokenizer.bos_id, *ids]


def continuation(
  context: str, text: str, tokenizer: tokenizers.Tokenizer
) -> list[int]:
  """Returns the ids of `text` as it is written right after `context`.

  A SentencePiece model marks the start of a text as if a space stood there,
  so that `encode('85')` is not what follows `encode('47+38=')`. Where a token
  would straddle the boundary, the text is encoded alone.
  """
  head = list(tokenizer.encode(context))
  whole = list(tokenizer.encode(context + text))
  if whole[: len(head)] == head:
    return whole[len(head) :]
  return list(tokenizer.encode(text))


def pack(
  examples: Sequence[Prompted],
  tokenizer: tokenizers.Tokenizer,
  prompt_len: int,
  task: Encoder,
) -> types.Batch:
  """Returns the examples as one batch of numpy arrays.

  Args:
    examples: P examples.
    tokenizer: writes the prompts, and the answers through `task.encode`.
    prompt_len: S; prompts are left-padded to it.
    task: its `encode` gives the arrays of `Batch.data`, stacked to [P, ...].

  Raises:
    LongPromptError: a prompt has more than `prompt_len` tokens.
    ValueError: there are no examples, or a prompt has no token at all.
  """
  if not examples:
    raise ValueError('A batch needs at least one example.')
  tokens = np.full((len(examples), prompt_len), tokenizer.pad_id, np.int32)
  length = np.zeros(len(examples), np.int32)
  for row, example in enumerate(examples):
    ids = _ids(example, tokenizer, prompt_len)
    tokens[row, prompt_len - len(ids) :] = ids
    length[row] = len(ids)
  data = [task.encode(example, tokenizer) for example in examples]
  arrays: Any = {k: np.stack([d[k] for d in data]) for k in data[0]}
  uid = np.array([example.uid for example in examples], np.int32)
  prompts = types.Prompts(
    tokens=cast(Any, tokens), length=cast(Any, length), uid=cast(Any, uid)
  )
  return types.Batch(prompts=prompts, data=arrays)


def _ids(
  example: Prompted, tokenizer: tokenizers.Tokenizer, limit: int
) -> list[int]:
  """Returns the ids of one prompt, or raises if it does not fit."""
  ids = encode(example.prompt, tokenizer)
  if not ids:
    raise ValueError(f'Prompt {example.uid} has no token.')
  if len(ids) > limit:
    raise LongPromptError(
      f'Prompt {example.uid} has {len(ids)} tokens; the limit is {limit}: '
      f'{example.prompt[:40]!r}...'
    )
  return ids


class Loader:
  """An endless iterator over (batch, its examples).

  Each epoch is shuffled anew, and a batch may hold the end of one epoch and
  the start of the next. Process k of K takes the k-th block of `batch`
  examples of every K blocks, so that (where no prompt is skipped) the batches
  of all processes together are the one batch of a single process.

  Attributes:
    skipped: how often a prompt was left out for its length so far.
    notes: what the first of them were, a line each; whoever shows them may
      empty the list.
  """

  def __init__(
    self,
    source: grain.MapDataset[Any],
    tokenizer: tokenizers.Tokenizer,
    task: Encoder,
    *,
    batch: int,
    prompt_len: int,
    long_prompts: str = 'skip',
    seed: int = 0,
    process_index: int = 0,
    process_count: int = 1,
  ):
    """Makes a loader at the start of the first epoch.

    Args:
      source: random access to examples, unshuffled.
      tokenizer: writes the prompts.
      task: see `pack`.
      batch: examples per batch of this process, P.
      prompt_len: most tokens of a prompt, S.
      long_prompts: 'skip' notes, counts and leaves out a longer prompt;
        'refuse' raises LongPromptError when it comes up.
      seed: of the order.
      process_index: which process this is.
      process_count: how many processes share the examples.

    Raises:
      ValueError: the dataset is empty, or an argument is out of range.
    """
    if not len(source):
      raise ValueError('The dataset has no examples.')
    if long_prompts not in _LONG:
      raise ValueError(f'{long_prompts=} should be one of {_LONG}.')
    if batch < 1 or prompt_len < 1:
      raise ValueError(f'{batch=} and {prompt_len=} should be positive.')
    if not 0 <= process_index < process_count:
      raise ValueError(f'{process_index=} is not below {process_count=}.')
    self._tokenizer, self._task = tokenizer, task
    self._batch, self._prompt_len = batch, prompt_len
    self._refuse = long_prompts == 'refuse'
    self._size = len(source)
    self._identity = {
      'size': len(source),
      'batch': batch,
      'prompt_len': prompt_len,
      'long_prompts': long_prompts,
      'seed': seed,
      'process': [process_index, process_count],
    }
    stream = source.shuffle(seed=_mixed(seed)).repeat()
    first, period = process_index * batch, process_count * batch
    own = grain.MapDataset.range(2**62 // process_count).map(
      lambda n: stream[n // batch * period + first + n % batch]
    )
    options = grain.ReadOptions(num_threads=0)
    self._examples = iter(own.to_iter_dataset(options))
    self.skipped = 0
    self.notes: list[str] = []
    self._named: set[int] = set()

  def __iter__(self) -> Iterator[tuple[types.Batch, list[Any]]]:
    return self

  def __next__(self) -> tuple[types.Batch, list[Any]]:
    examples = [self._next_example() for _ in range(self._batch)]
    batch = pack(examples, self._tokenizer, self._prompt_len, self._task)
    return batch, examples

  def _next_example(self) -> Any:
    """Returns the next example whose prompt fits."""
    for _ in range(self._size):
      example: Any = next(self._examples)
      try:
        _ids(example, self._tokenizer, self._prompt_len)
        return example
      except LongPromptError as error:
        if self._refuse:
          raise
        if example.uid not in self._named and len(self._named) < _NAMED:
          self._named.add(example.uid)
          self.notes.append(f'skipped: {error}')
        self.skipped += 1
    raise ValueError(
      f'All of {self._size} prompts in a row have more than '
      f'{self._prompt_len} tokens.'
    )

  def get_state(self) -> dict[str, Any]:
    """Returns where the iterator stands, as JSON values."""
    return {
      'examples': self._examples.get_state(),
      'skipped': self.skipped,
      'loader': self._identity,
    }

  def set_state(self, state: Mapping[str, Any]) -> None:
    """Moves to a state of a loader that was made with the same arguments.

    Raises:
      ValueError: the state belongs to another dataset size, batch, limit,
        seed or process.
    """
    if state['loader'] != self._identity:
      raise ValueError(
        f'The data cursor belongs to {state["loader"]}, this loader is '
        f'{self._identity}.'
      )
    self._examples.set_state(state['examples'])
    self.skipped = state['skipped']


def _mixed(seed: int) -> int:
  """Spreads seeds: grain shuffles epoch e of seed s like epoch 0 of s + e."""
  return int(np.random.SeedSequence(seed).generate_state(1)[0])
