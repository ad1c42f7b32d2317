"""Checkpoints of a run, and the signals that ask for a last one."""

from collections.abc import Iterator
import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import pathlib
import signal
import threading
from types import FrameType, TracebackType
from typing import Any, NoReturn, Self, TypeVar

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from rljax.runs import processes, run

_Tree = TypeVar('_Tree')

_CONFIG = 'config.json'
_LOCK = '.lock'
_FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)


class Checkpoints:
  """Saves and restores a run; only complete checkpoints ever count.

  Arrays are written in the background into a temporary folder, which gets its
  name when all is on disk: a run killed at any time leaves the checkpoint
  before. All processes of a run make the same calls.
  """

  def __init__(self, workdir: str | os.PathLike[str], keep: int = 2):
    """Opens the folder, and removes what a killed run left unfinished.

    Args:
      workdir: folder of the run.
      keep: how many checkpoints stay, newest first.
    """
    self._path = pathlib.Path(workdir, 'checkpoints').absolute()
    options = ocp.CheckpointManagerOptions(
      max_to_keep=keep, cleanup_tmp_directories=True
    )
    self._manager = ocp.CheckpointManager(
      self._path,
      options=options,
      item_handlers={
        'arrays': ocp.StandardCheckpointHandler(),
        'record': ocp.JsonCheckpointHandler(),
      },
    )

  def latest(self) -> int | None:
    """Returns the newest step saved, or None; waits for one being written."""
    self.wait()
    return self._manager.latest_step()

  def save(self, step: int, arrays: Any, record: dict[str, Any]) -> None:
    """Starts to write a checkpoint; the arrays may be donated afterwards.

    Waits for the previous one first. A step that was saved before stays as it
    is.

    Args:
      step: grows over the whole run, through all its stages.
      arrays: pytree of arrays, typed PRNG keys included.
      record: what else the run needs to go on; goes through `json`.

    Raises:
      OSError: no space for this checkpoint or the one before.
    """
    if step == self.latest():
      return
    leaves = _named(arrays)
    keys = {k: _implementation(v) for k, v in leaves.items() if _is_key(v)}
    data = {k: _data(v) for k, v in leaves.items() if v.size}
    args = ocp.args.Composite(
      arrays=ocp.args.StandardSave(data),
      record=ocp.args.JsonSave({'record': record, 'keys': keys}),
    )
    try:
      self._manager.save(step, args=args, force=True)
    except (OSError, ValueError) as error:
      self._fail(error)

  def restore(self, step: int, like: _Tree) -> tuple[_Tree, dict[str, Any]]:
    """Returns what was saved at a step.

    Args:
      step: one that was saved.
      like: pytree of arrays, or of ShapeDtypeStructs that have shardings.

    Returns:
      The arrays, bit for bit, in the shardings of `like`; and the record.

    Raises:
      ValueError: there is none, it holds other arrays, or it is damaged.
    """
    self.wait()
    path = self._path / str(step)
    if step not in self._manager.all_steps():
      raise ValueError(f'there is no checkpoint {path}')
    want = _named(like)
    specs = {k: _spec(v) for k, v in want.items() if v.size}
    with _damaged(path):
      saved = self._manager.item_metadata(step)['arrays'].tree
    _check(path, saved, specs)
    args = ocp.args.Composite(
      arrays=ocp.args.StandardRestore(specs), record=ocp.args.JsonRestore()
    )
    with _damaged(path):
      got = self._manager.restore(step, args=args)
    keys, record = got['record']['keys'], got['record']['record']
    leaves = [
      _leaf(got['arrays'].get(k), v, keys.get(k)) for k, v in want.items()
    ]
    return jax.tree.unflatten(jax.tree.structure(like), leaves), record

  def wait(self) -> None:
    """Returns when everything is on disk.

    Raises:
      OSError: there was no space.
    """
    try:
      self._manager.wait_until_finished()
    except (OSError, ValueError) as error:
      self._fail(error)

  def close(self) -> None:
    """Waits, raises like `wait`, and ends the threads."""
    try:
      self.wait()
    finally:
      # Orbax raises here what `wait` has raised already.
      with contextlib.suppress(OSError, ValueError):
        self._manager.close()

  def __enter__(self) -> Self:
    return self

  def __exit__(
    self,
    kind: type[BaseException] | None,
    error: BaseException | None,
    where: TracebackType | None,
  ) -> None:
    if error is None:
      self.close()
    else:
      with contextlib.suppress(OSError, ValueError):
        self.close()

  def _fail(self, error: Exception) -> NoReturn:
    """Raises an OSError if the disk is full, otherwise the error itself."""
    for code in _FULL:
      # Tensorstore has no type for it, only the system's words.
      text = os.strerror(code)
      if getattr(error, 'errno', None) == code or text in str(error):
        last = self._manager.latest_step()
        kept = 'none was written before' if last is None else f'{last} is kept'
        raise OSError(
          code, f'{text}; checkpoint not written, {kept}', str(self._path)
        ) from error
    raise error


@contextlib.contextmanager
def claimed(config: run.Config) -> Iterator[None]:
  """Holds the folder of a config for as long as its run lasts.

  Process 0 looks, and what it finds wrong is raised in all of them.

  Raises:
    ValueError: another process holds the folder, it holds a run of another
      config or one that was not asked to be resumed, or there is none to
      resume.
  """
  with contextlib.ExitStack() as held:
    error = None
    if jax.process_index() == 0:
      try:
        held.enter_context(_claim(config))
      except (OSError, ValueError) as raised:
        error = raised
    refusal = processes.from_first(str(error or ''))
    if error:
      raise error
    if refusal:
      raise ValueError(refusal)
    yield


@contextlib.contextmanager
def _claim(config: run.Config) -> Iterator[None]:
  """Locks the folder, then checks it or writes its config."""
  folder = pathlib.Path(config.workdir)
  if config.resume and not (folder / _CONFIG).exists():
    raise ValueError(f'--resume: {folder} holds no run')
  folder.mkdir(parents=True, exist_ok=True)
  # The system takes the lock back however the process ends.
  with (folder / _LOCK).open('a') as lock:
    try:
      fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      raise ValueError(f'{folder} is in use by another process') from None
    _check_config(folder / _CONFIG, config)
    yield


def _check_config(path: pathlib.Path, config: run.Config) -> None:
  """Writes the config of a new folder, or compares it with the one there."""
  if not path.exists():
    return _write_config(path, config)
  try:
    old = type(config).from_json(json.loads(path.read_text()))
  except ValueError as error:
    raise ValueError(f'{path} is of another kind of run: {error}') from error
  changed = run.diff(old, config)
  if changed:
    listed = ', '.join(f'{k} {a!r} -> {b!r}' for k, (a, b) in changed.items())
    raise ValueError(f'{path.parent} holds a run of another config: {listed}')
  if not config.resume:
    raise ValueError(
      f'{path.parent} holds a run already; add --resume or choose another'
      ' --workdir'
    )
  grows = [f.name for f in dataclasses.fields(old) if f.metadata.get('grows')]
  grown = {name: getattr(config, name) for name in grows}
  if dataclasses.replace(old, **grown) != old:
    _write_config(path, dataclasses.replace(old, **grown))


def _write_config(path: pathlib.Path, config: run.Config) -> None:
  partial = path.with_suffix('.tmp')
  partial.write_text(json.dumps(config.to_json(), indent=2) + '\n')
  partial.replace(path)


class Interrupt:
  """Turns SIGTERM and Ctrl-C into a question that the loop can ask.

    with Interrupt() as interrupt:
      while not interrupt.requested:
        ...

  A second Ctrl-C raises KeyboardInterrupt at once. Outside the main thread,
  where Python takes no signals, nothing is ever requested.
  """

  def __init__(self):
    self._signals: list[int] = []
    self._handlers: dict[signal.Signals, Any] = {}

  @property
  def requested(self) -> bool:
    """Whether the run was asked to stop."""
    return bool(self._signals)

  @property
  def by_hand(self) -> bool:
    """Whether it was by Ctrl-C."""
    return signal.SIGINT in self._signals

  def _handle(self, number: int, frame: FrameType | None) -> None:
    del frame
    if number == signal.SIGINT and number in self._signals:
      raise KeyboardInterrupt
    self._signals.append(number)

  def __enter__(self) -> Self:
    if threading.current_thread() is threading.main_thread():
      for number in (signal.SIGTERM, signal.SIGINT):
        self._handlers[number] = signal.signal(number, self._handle)
    return self

  def __exit__(
    self,
    kind: type[BaseException] | None,
    error: BaseException | None,
    where: TracebackType | None,
  ) -> None:
    for number, handler in self._handlers.items():
      signal.signal(number, handler)


def _named(tree: Any) -> dict[str, Any]:
  """Returns the leaves by their path, such as 'params.policy.embed'."""
  leaves = jax.tree.leaves_with_path(tree)
  named = {
    jax.tree_util.keystr(path, simple=True, separator='.'): leaf
    for path, leaf in leaves
  }
  if len(named) != len(leaves):
    raise ValueError('two leaves have the same path')
  return named


def _is_key(leaf: Any) -> bool:
  return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _data(leaf: Any) -> Any:
  """Returns what is stored for a leaf."""
  return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _spec(leaf: Any) -> jax.ShapeDtypeStruct:
  """Returns how the stored leaf is read."""
  plain = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
  data = jax.eval_shape(_data, plain)
  sharding = getattr(leaf, 'sharding', None)
  return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=sharding)


def _implementation(key: jax.Array) -> str:
  """Returns the name of the generator of a typed key."""
  return str(jax.random.key_impl(key))


def _leaf(data: Any, like: Any, implementation: str | None) -> jax.Array:
  """Returns the leaf that was stored; empty ones are not."""
  if data is None:
    return jnp.zeros(like.shape, like.dtype, device=like.sharding)
  if implementation is None:
    return data
  return jax.random.wrap_key_data(data, impl=implementation)


def _check(path: pathlib.Path, saved: Any, specs: dict[str, Any]) -> None:
  """Raises ValueError if the checkpoint holds other arrays."""
  there = {k: f'{v.dtype}{list(v.shape)}' for k, v in saved.items()}
  here = {k: f'{v.dtype}{list(v.shape)}' for k, v in specs.items()}
  wrong = [
    f'{k} is {there.get(k, "missing")} there and {here.get(k, "missing")} here'
    for k in sorted(there.keys() | here.keys())
    if there.get(k) != here.get(k)
  ]
  if wrong:
    more = f' and {len(wrong) - 3} more' if len(wrong) > 3 else ''
    raise ValueError(f'{path} does not fit: {"; ".join(wrong[:3])}{more}')


@contextlib.contextmanager
def _damaged(path: pathlib.Path):
  """Names the checkpoint that could not be read."""
  try:
    yield
  except Exception as error:
    first = str(error).split('\n')[0][:200]
    raise ValueError(f'checkpoint {path} is damaged: {first}') from error
