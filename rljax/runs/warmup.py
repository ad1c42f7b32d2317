"""What the supervised warm start of a run trains on."""

from collections.abc import Mapping
import dataclasses
import itertools
from typing import Any

import grain
import numpy as np

from rljax.data import prompts, tokenizers
from rljax.tasks import task as task_lib


def traces(task: task_lib.Task, count: int, seed: int) -> Any:
  """Returns `count` training problems with worked solutions that verify.

  Raises:
    ValueError: if the task has too few, or one does not verify.
  """
  source: Any = task.source('train')
  order = np.random.default_rng(seed).permutation(len(source))
  having = (int(i) for i in order if source[int(i)].trace)
  chosen = list(itertools.islice(having, count))
  if not chosen:
    raise ValueError(
      f'Task {task.name!r} has no worked solutions to warm up on: set'
      ' --sft_steps=0 and leave out --control=sft.'
    )
  if len(chosen) < count:
    raise ValueError(
      f'--sft_traces={count}, but task {task.name!r} has {len(chosen)} worked'
      ' solutions; lower it, or set --sft_steps=0.'
    )
  for index in chosen:
    example = source[index]
    if task.verify(example, example.trace) != 1.0:
      raise ValueError(f'The solution of {example.prompt!r} does not verify.')
  return grain.MapDataset.source(chosen).map(lambda i: source[i])


@dataclasses.dataclass(frozen=True)
class Traced:
  """Encodes worked solutions as `trace` [T] and `trace_length`."""

  task: task_lib.Task
  max_tokens: int

  def encode(
    self, example: task_lib.Example, tokenizer: tokenizers.Tokenizer
  ) -> Mapping[str, np.ndarray]:
    """Returns the ids of the solution and its stop token, i32 [T].

    Raises:
      ValueError: if they do not fit in `max_tokens`, or the tokenizer has no
        stop token: a warm start would never show the model where to end.
    """
    if not tokenizer.stop_ids:
      raise ValueError(
        'The tokenizer names no stop token, which a warm start needs: use'
        ' another --tokenizer, or set --sft_steps=0.'
      )
    ids = prompts.continuation(example.prompt, example.trace, tokenizer)
    ids = [*ids, tokenizer.stop_ids[0]]
    if len(ids) > self.max_tokens:
      raise ValueError(
        f'The solution of {example.prompt!r} has {len(ids)} tokens, more than'
        f' --max_tokens={self.max_tokens}.'
      )
    row = np.zeros(self.max_tokens, np.int32)
    row[: len(ids)] = ids
    return {'trace': row, 'trace_length': np.array(len(ids), np.int32)}
