"""Judges: a task's verifier as a function of rollouts, wherever it runs.

A device verifier is part of the step. A host verifier joins the fused step
through a callback when one process drives one device; everywhere else the
step is two programs with the host between them. On jax before 0.11 a callback
under several CPU devices deadlocks once its argument passes 64 KiB a shard.
"""

import collections
from collections.abc import Callable, Mapping, Sequence
import contextlib
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
import numpy as np

from rljax.core.types import Rewards, Rollout
from rljax.data import tokenizers
from rljax.engine import sharding
from rljax.tasks import task as task_lib


class Host:
  """Scores responses on the host; untrusted verifiers in a sandbox.

  A verifier that raises, hangs or returns NaN gives NaN: the row leaves the
  statistics of its group, and is counted in `failures`.
  """

  def __init__(
    self,
    task: task_lib.Task,
    tokenizer: tokenizers.Tokenizer,
    stop_ids: Sequence[int],
    *,
    workers: int = 1,
    timeout: float = 5.0,
  ):
    self._task, self._tokenizer = task, tokenizer
    self._stop_ids = stop_ids
    self._stack = contextlib.ExitStack()
    self._box = None
    if not task.trusted:
      box = task_lib.sandboxed(task, workers=workers, timeout=timeout)
      self._box = self._stack.enter_context(box)
    self._own: collections.Counter[str] = collections.Counter()
    self.examples: Sequence[Any] = ()

  @property
  def failures(self) -> Mapping[str, int]:
    """How many responses could not be scored so far, by reason."""
    return dict(self._box.failures if self._box else self._own)

  def score(
    self, response: np.ndarray, length: np.ndarray, mask: np.ndarray
  ) -> np.ndarray:
    """Returns the scores of responses to `self.examples` [P], f32 [B].

    Only what the policy wrote is judged, not what a tool or a forced prefix
    put between.

    Args:
      response: i32 [B, T].
      length: i32 [B].
      mask: f32 [B, T], of the rollout.
    """
    group = response.shape[0] // len(self.examples)
    examples = [example for example in self.examples for _ in range(group)]
    texts = [
      self._text(ids[:count][own[:count] > 0])
      for ids, count, own in zip(response, length, mask, strict=True)
    ]
    if self._box is not None:
      return np.asarray(self._box.score(examples, texts), np.float32)
    return np.array(
      [self._verify(e, t) for e, t in zip(examples, texts, strict=True)],
      np.float32,
    )

  def _text(self, ids: np.ndarray) -> str:
    return text(self._tokenizer, self._stop_ids, ids, len(ids))

  def _verify(self, example: Any, text: str) -> float:
    try:
      score = float(self._task.verify(example, text))
    except Exception:
      # Any error of a verifier is its own; the run goes on and counts it.
      self._own['exception'] += 1
      return math.nan
    if not math.isfinite(score):
      self._own['not finite'] += 1
      return math.nan
    return score

  def close(self) -> None:
    """Ends the sandbox's processes."""
    self._stack.close()


def text(
  tokenizer: tokenizers.Tokenizer,
  stop_ids: Sequence[int],
  response: np.ndarray,
  length: int,
) -> str:
  """Returns a response [T] as text, without its stop token."""
  ids = [int(i) for i in response[:length]]
  if ids and ids[-1] in stop_ids:
    ids.pop()
  return tokenizer.decode(ids)


def device(task: task_lib.Task) -> Callable[[Rollout], Rewards] | None:
  """Returns the judge that is part of the step, or None if there is none."""
  verify = task.device_verify
  return None if verify is None else lambda rollout: {'task': verify(rollout)}


def judged(rollout: Rollout) -> tuple[jax.Array, ...]:
  """Returns what `Host.score` takes: ids [B, T], lengths [B], mask [B, T]."""
  return rollout.response, rollout.length, rollout.mask


def callback(host: Host) -> Callable[[Rollout], Rewards]:
  """Returns a judge that calls the host from within the step."""

  def judge(rollout: Rollout) -> Rewards:
    shape = jax.ShapeDtypeStruct(rollout.length.shape, jnp.float32)

    def call(*arrays):
      return host.score(*map(np.asarray, arrays))

    return {'task': jax.pure_callback(call, shape, *judged(rollout))}

  return judge


def between(host: Host, mesh: Mesh | None) -> Callable[[Rollout], Rewards]:
  """Returns a judge for the host between two programs, on its own rows."""

  def judge(rollout: Rollout) -> Rewards:
    reward = host.score(*map(local, judged(rollout)))
    return {'task': sharding.place_rows(reward, mesh)}

  return judge


def local(x: jax.Array) -> np.ndarray:
  """Returns the rows of a global array that this process holds, in order."""
  if x.is_fully_addressable:
    return np.asarray(x)
  shards = {
    (s.index[0].start or 0): np.asarray(s.data) for s in x.addressable_shards
  }
  return np.concatenate([shards[start] for start in sorted(shards)])


def shuffled(
  judge: Callable[[Rollout], Rewards], seed: int
) -> Callable[[Rollout], Rewards]:
  """Returns the judge with its rewards permuted over the rows: a control."""

  def permuted(rollout: Rollout) -> Rewards:
    key = jax.random.fold_in(jax.random.key(seed), rollout.version[0, 0])
    return {
      name: jax.random.permutation(key, column)
      for name, column in judge(rollout).items()
    }

  return permuted
