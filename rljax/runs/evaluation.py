"""Held-out evaluation: greedy accuracy and unbiased pass@k."""

from collections.abc import Callable, Iterable, Iterator, Sequence
import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
import numpy as np

from rljax.core.types import Batch, Params, Rollout
from rljax.data import prompts, tokenizers
from rljax.engine import compiling, sampling, sharding
from rljax.models import decoder, rules
from rljax.objectives import statistics
from rljax.runs import judging, processes
from rljax.tasks import task as task_lib


@dataclasses.dataclass(frozen=True)
class Held:
  """Problems that are never trained on, in batches of one size.

  Attributes:
    examples: all of them, a multiple of the batch size by repetition.
    batches: their prompts.
    count: how many are distinct; later ones only fill the last batch.
    skipped: how many were left out because their prompts are too long.
  """

  examples: Sequence[Any]
  batches: Sequence[Batch]
  count: int
  skipped: int = 0


def hold(
  task: task_lib.Task,
  tokenizer: tokenizers.Tokenizer,
  *,
  problems: int,
  batch: int,
  shards: int = 1,
  prompt_len: int,
  seed: int,
  long_prompts: str = 'refuse',
) -> Held:
  """Returns `problems` of the task's test split, no two of them equal.

  Args:
    task: of the problems.
    tokenizer: writes the prompts.
    problems: how many at most.
    batch: how many at most are answered at once.
    shards: what the size of a batch must be a multiple of.
    prompt_len: most tokens of a prompt.
    seed: of the draw.
    long_prompts: 'skip' leaves out those that do not fit.

  Raises:
    ValueError: the split is empty, or a prompt is too long.
  """
  source: Any = task.source('test')
  if not len(source):
    raise ValueError(f'Task {task.name!r} has no held-out problems.')
  drawn = list(itertools.islice(_distinct(source, seed), problems))
  chosen = drawn
  if long_prompts == 'skip':
    chosen = [
      e for e in drawn if len(prompts.encode(e.prompt, tokenizer)) <= prompt_len
    ]
    if not chosen:
      raise ValueError(f'All held-out prompts exceed {prompt_len} tokens.')
  count = -(-len(chosen) // batch)
  size = -(-len(chosen) // (count * shards)) * shards
  padded = [chosen[i % len(chosen)] for i in range(count * size)]
  parts = [padded[i : i + size] for i in range(0, len(padded), size)]
  packed = [prompts.pack(p, tokenizer, prompt_len, task) for p in parts]
  return Held(padded, packed, len(chosen), len(drawn) - len(chosen))


def _distinct(source: Any, seed: int) -> Iterator[Any]:
  """Yields examples in random order; of equal problems, such as a sum in
  either order of its terms, only the first."""
  seen = set()
  for index in np.random.default_rng(seed).permutation(len(source)):
    example = source[int(index)]
    if example.uid not in seen:
      seen.add(example.uid)
      yield example


def overlap(examples: Iterable[task_lib.Example], held: Held) -> int:
  """Returns how many held-out problems are among the examples."""
  seen = {example.uid for example in examples}
  return sum(example.uid in seen for example in held.examples[: held.count])


class Evaluator:
  """Samples answers to held-out problems with one compiled program."""

  def __init__(
    self,
    model: decoder.Model,
    task: task_lib.Task,
    held: Held,
    phase: sampling.Phase,
    *,
    seed: int,
    mesh: Mesh | None = None,
    host: judging.Host | None = None,
  ):
    """Makes an evaluator.

    Args:
      model: the policy.
      task: judges the answers.
      held: the problems.
      phase: how to sample; greedy or with `group_size` answers a problem.
      seed: of the samples, the same at every evaluation.
      mesh: over which rows are split.
      host: of the task's verifier, where it has none for the device.
    """
    self._held, self._host, self._mesh = held, host, mesh
    judge = judging.device(task)
    key = jax.random.key(seed)

    def answer(params: Params, batch: Batch, number: jax.Array):
      batch = sharding.constrain_rows(batch, mesh)
      params = sharding.constrain_params(params, mesh, rules.SAMPLE)
      rollout = sampling.sample(
        model, params, batch, phase, key=key, step=number, version=number,
        mesh=mesh,
      )  # fmt: skip
      return rollout if judge is None else judge(rollout)['task']

    self._answer: Callable[..., Rollout | jax.Array] = compiling.jit(
      answer, mesh
    )

  def __call__(self, params: Params) -> np.ndarray:
    """Returns the scores of the answers, f32 [problems, G]; failures are 0."""
    scores = []
    size = len(self._held.examples) // len(self._held.batches)
    for number, batch in enumerate(self._held.batches):
      placed = sharding.place_rows(self._own(batch), self._mesh)
      out = self._answer(params, placed, jnp.int32(number))
      begin = number * size
      scores.append(self._score(out, begin, size))
    return np.concatenate(scores)[: self._held.count]

  def _own(self, batch: Batch) -> Batch:
    """Returns this process's part of a batch that all processes made."""
    count, index = jax.process_count(), jax.process_index()
    return jax.tree.map(lambda x: np.array_split(x, count)[index], batch)

  def _score(self, out: Any, begin: int, size: int) -> np.ndarray:
    if isinstance(out, Rollout):
      assert self._host is not None
      rows = size // jax.process_count()
      begin += rows * jax.process_index()
      self._host.examples = self._held.examples[begin : begin + rows]
      reward = self._host.score(*map(judging.local, judging.judged(out)))
      out = sharding.place_rows(reward, self._mesh)
    reward = np.nan_to_num(processes.everywhere(out), nan=0.0)
    return reward.reshape(size, -1)


def accuracy(scores: np.ndarray) -> dict[str, float]:
  """Returns accuracy over problems with its 95 % Wilson interval.

  Args:
    scores: [problems, G]; right answers score 1.
  """
  right = scores == 1.0
  low, high = statistics.wilson(int(right.sum()), right.size)
  return {
    'accuracy': float(right.mean()),
    'accuracy_low': float(low),
    'accuracy_high': float(high),
  }


def pass_at(scores: np.ndarray, ks: Sequence[int]) -> dict[str, float]:
  """Returns unbiased pass@k, averaged over problems.

  Args:
    scores: [problems, n].
    ks: each at most n.
  """
  right = (scores == 1.0).sum(axis=1)
  n = scores.shape[1]
  return {
    f'pass@{k}': float(np.mean(statistics.pass_at_k(n, right, k))) for k in ks
  }
