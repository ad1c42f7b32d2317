"""Steps that draw batches until each of their groups has something to learn."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
import numpy as np

from rljax.core.types import Batch, Mean, Metrics, TrainState
from rljax.engine import sharding
from rljax.engine import step as step_lib
from rljax.runs import judging, metrics, processes

_VALUES = 8  # rewards that are listed one by one
_BINS = 8


class Stepped(NamedTuple):
  """The outcome of a step and the prompts it took, those of this process."""

  state: TrainState
  metrics: Metrics
  glimpse: step_lib.Glimpse
  batch: Batch  # without data
  examples: Sequence[Any]  # None where another process has the example


def run(
  step: step_lib.Step,
  state: TrainState,
  draw: Callable[[], tuple[Batch, Sequence[Any]]],
  *,
  most: int,
  mesh: Mesh | None = None,
) -> Stepped:
  """Runs a step on a batch whose groups all pass the method's `keep`.

  How many batches are drawn follows from the groups of all processes, so it is
  the same in each.

  Args:
    step: of the method.
    state: before the step.
    draw: gives the next batch and its examples, those of this process.
    most: batches that may be drawn.
    mesh: over which rows are split.

  Raises:
    ValueError: the batches together hold too few groups that pass; it says
      which rewards there were.
  """
  known, columns = {}, []
  held, taken, seen, places = None, 0, {}, 0
  for number in range(most):
    batch, examples = draw()
    known |= dict(zip(_names(batch), examples, strict=True))
    placed = sharding.place_rows(batch, mesh)
    rollout = step.sampled(state, placed, np.int32(number))
    drawn = rollout, step.judged(rollout)
    columns.append(drawn[1]['task'])
    filled = step.fill(held or drawn, drawn, np.int32(taken))
    held = filled.rollout, filled.rewards
    seen = metrics.add(seen, _seen(filled, rollout))
    taken, places = taken + int(filled.passed), rollout.groups.index.shape[0]
    if taken >= places:
      break
  else:
    raise ValueError(_too_few(taken, places, columns))
  assert held is not None
  prompts = jax.tree.map(judging.local, held[0].prompts)
  took = Batch(prompts=prompts, data={})
  state, found, glimpse = step.finish(state, *held)
  found = {**found, **seen, 'refill/batches': _one(len(columns))}
  examples = [known.get(name) for name in _names(took)]
  return Stepped(state, found, glimpse, took, examples)


def histogram(reward: np.ndarray) -> str:
  """Returns how often each reward occurs, in one line.

  Args:
    reward: f32 [N]; many different values are put into equal bins.
  """
  there = reward[np.isfinite(reward)]
  values, counts = np.unique(there, return_counts=True)
  names = [f'{value:.6g}' for value in values]
  if len(values) > _VALUES:
    counts, edges = np.histogram(there, _BINS)
    names = [
      f'{low:.3g} to {high:.3g}'
      for low, high in zip(edges[:-1], edges[1:], strict=True)
    ]
  parts = [f'{name}: {n}' for name, n in zip(names, counts, strict=True)]
  if missing := len(reward) - len(there):
    parts.append(f'missing: {missing}')
  return ', '.join(parts)


def _too_few(taken: int, places: int, columns: Sequence[jax.Array]) -> str:
  """Returns why there is no batch to learn from."""
  rewards = np.concatenate([processes.everywhere(x) for x in columns])
  count = len(columns)
  return (
    f'only {taken} of {count * places} groups in {count} batches can be learned'
    f' from, for {places} places; rewards of all responses: '
    f'{histogram(rewards)}. Change --max_gen_batches, --group_size or the task.'
  )


def _names(batch: Batch) -> list[tuple[int, bytes]]:
  """Returns what tells a prompt from others."""
  uids, tokens = batch.prompts.uid, np.asarray(batch.prompts.tokens)
  return [
    (int(uid), row.tobytes()) for uid, row in zip(uids, tokens, strict=True)
  ]


def _seen(filled, rollout) -> Metrics:
  """Returns metrics of all groups that were drawn, also of those dropped."""
  groups = jnp.float32(rollout.groups.index.shape[0])
  passed = filled.passed.astype(jnp.float32)
  return {
    'refill/kept': Mean(total=passed, count=groups),
    'refill/reward': filled.reward,
  }


def _one(value: float) -> Mean:
  return Mean(total=jnp.float32(value), count=jnp.float32(1))
