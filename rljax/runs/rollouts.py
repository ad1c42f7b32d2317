"""Rollouts of a run on disk, one chunk a step, for analysis and replay.

Each array is one zarr store of [steps, rows, ...], of which a killed run
leaves a prefix that can be read.
"""

from collections.abc import Mapping
import math
import os
import pathlib
from typing import Any

import jax
import numpy as np
import tensorstore

from rljax.core.types import Batch
from rljax.engine import step
from rljax.runs import judging, recipe

_FOLDER = 'rollouts'
_COMPLETE = 'complete'
_METADATA = 'zarr.json'  # of a store that exists


class Rollouts:
  """Writes the rollouts of each step while the next step computes.

  Process k of K writes the k-th of K blocks of rows. A step counts once all
  of its arrays are on disk, in all processes.
  """

  def __init__(
    self,
    workdir: str | os.PathLike[str],
    shapes: Mapping[str, Any],
    *,
    steps: int,
    keep: int = 0,
    process_index: int = 0,
    process_count: int = 1,
  ):
    """Opens the stores, made where there are none.

    Args:
      workdir: folder of the run.
      shapes: [rows, ...] with a dtype of each array, all processes together.
      steps: of the whole run.
      keep: steps that stay; later ones are dropped.
      process_index: which process this is.
      process_count: how many processes write.
    """
    self._index, self._count = process_index, process_count
    self._pending: tuple[int, list[Any]] | None = None
    folder = pathlib.Path(workdir, _FOLDER).absolute()
    self._stores = {
      name: _store(folder / name, (steps, *x.shape), x.dtype, process_count)
      for name, x in shapes.items()
    }
    self._complete = _store(
      folder / _COMPLETE, (steps, process_count), np.dtype(bool), process_count
    )
    self._complete[keep:, process_index].write(False).result()

  def write(self, number: int, arrays: Mapping[str, np.ndarray]) -> None:
    """Starts to write this process's rows of a step; waits for the last one.

    Args:
      number: of the step, from 0.
      arrays: [rows / K, ...]; the second dimension may be shorter than in the
        store, the rest of which is 0.

    Raises:
      ValueError: an array does not fit, or the disk is full.
    """
    self.wait()
    writes = []
    for name, store in self._stores.items():
      block = store[number].translate_to[0][self._rows(store.shape[1])]
      rows = np.zeros(block.shape, store.dtype.numpy_dtype)
      value = arrays[name]
      rows[tuple(map(slice, value.shape))] = value
      writes.append(block.write(rows))
    self._pending = number, writes

  def wait(self) -> None:
    """Returns when the last step is complete on disk."""
    if self._pending is None:
      return
    number, writes = self._pending
    self._pending = None
    for write in writes:
      write.result()
    self._complete[number, self._index].write(True).result()

  def _rows(self, rows: int) -> slice:
    size = rows // self._count
    return slice(self._index * size, (self._index + 1) * size)


def gather(batch: Batch, glimpse: step.Glimpse) -> dict[str, np.ndarray]:
  """Returns this process's rows of a step; prompts repeated for each row."""
  length = judging.local(glimpse.length)
  groups = len(length) // len(batch.prompts.uid)
  prompts = {
    'prompt': batch.prompts.tokens,
    'prompt_length': batch.prompts.length,
    'uid': batch.prompts.uid,
  }
  return {k: np.repeat(v, groups, axis=0) for k, v in prompts.items()} | {
    'length': length,
    'response': judging.local(glimpse.response),
    'logp': judging.local(glimpse.logp),
    'reward': judging.local(glimpse.reward),
  }


def begin(
  config: recipe.Config, arrays: Mapping[str, np.ndarray], keep: int
) -> Rollouts:
  """Returns the store of a run, as wide as its responses may get."""
  count = jax.process_count()
  shapes = {}
  for name, x in arrays.items():
    width = (
      (config.max_tokens,) if name in ('response', 'logp') else x.shape[1:]
    )
    shapes[name] = jax.ShapeDtypeStruct((len(x) * count, *width), x.dtype)
  return Rollouts(
    config.workdir,
    shapes,
    steps=config.steps,
    keep=keep,
    process_index=jax.process_index(),
    process_count=count,
  )


def read(workdir: str | os.PathLike[str]) -> dict[str, np.ndarray]:
  """Returns each array, [steps, rows, ...], up to the last complete step."""
  folder = pathlib.Path(workdir, _FOLDER).absolute()
  complete = _open(folder / _COMPLETE).read().result().all(axis=1)
  steps = int(np.append(complete, False).argmin())
  names = sorted(p.name for p in folder.iterdir() if p.name != _COMPLETE)
  return {name: _open(folder / name)[:steps].read().result() for name in names}


def _store(
  path: pathlib.Path, shape: tuple[int, ...], dtype: Any, parts: int
) -> tensorstore.TensorStore:
  """Opens or makes a store with a chunk for each step and process.

  One that was made for fewer steps grows.
  """
  _, rows, *rest = shape
  if rows % parts:
    raise ValueError(f'{path.name}: {parts} processes cannot share {rows}')
  chunk = [1, rows // parts, *rest]
  assert math.prod(chunk), f'{path.name} is empty'
  if (path / _METADATA).exists():
    end = [shape[0], *[None] * (len(shape) - 1)]
    _open(path).resize(exclusive_max=end, expand_only=True).result()
  return tensorstore.open(
    _spec(path),
    open=True,
    create=True,
    dtype=np.dtype(dtype).name,
    shape=shape,
    chunk_layout=tensorstore.ChunkLayout(chunk_shape=chunk),
  ).result()


def _open(path: pathlib.Path) -> tensorstore.TensorStore:
  return tensorstore.open(_spec(path), open=True).result()


def _spec(path: pathlib.Path) -> dict[str, Any]:
  store = {'driver': 'file', 'path': f'{path}/'}
  return {'driver': 'zarr3', 'kvstore': store}
