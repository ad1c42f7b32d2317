"""The process between a `Sandbox` and the workers that run its verifier.

It loads the verifier once, forks workers that inherit it, hands them one
response at a time, kills the whole process group of a worker that is late,
and forks another in milliseconds. It never unpickles or runs what a worker
wrote: an answer is a status, a number and a short text.

  python -c 'from rljax.rewards import supervisor; supervisor.main()'

Frames on stdin and stdout are pickles behind an 8-byte length; both ends are
trusted. The first one in is a `Setup`; the first one out is the barriers of
the workers, or an error text. Then a list of pickled (example, text) comes in
for each list of `Verdict`s that goes out.
"""

from collections.abc import Callable, Mapping, Sequence
import contextlib
import dataclasses
import importlib
import math
import os
import pickle
import selectors
import shutil
import signal
import struct
import time
import traceback
from typing import IO, Any, NamedTuple

from rljax.rewards import confinement, linux

_LIFETIME = 1000  # responses; a new worker gives leaked memory back
_ANSWER = struct.Struct('<Bd')
_TEXT_BYTES = 300
_LENGTH = struct.Struct('<Q')
_REASONS = ('', 'exception', 'memory', 'not finite')
_FATAL = ('timeout', 'memory', 'died')  # the worker is replaced
_PROGRAM_FILE_MB = 64  # largest file of an unconfined verifier's programs


class Setup(NamedTuple):
  """What a supervisor is told at the start."""

  target: str  # 'module:function'; called with options gives the verifier
  options: Mapping[str, Any]
  workers: int
  timeout: float  # seconds per response
  memory_mb: int
  confined: bool
  folder: str  # where it was started; removed at the end


class Verdict(NamedTuple):
  """The score of a response, NaN with a reason where the verifier failed."""

  score: float
  reason: str = ''
  text: str = ''


@dataclasses.dataclass
class _Worker:
  pid: int
  requests: int  # file descriptors
  answers: int
  item: int | None = None
  deadline: float = math.inf
  left: int = _LIFETIME


def write_frame(file: IO[bytes], value: Any) -> None:
  """Writes one pickle behind its length."""
  data = pickle.dumps(value)
  file.write(_LENGTH.pack(len(data)) + data)
  file.flush()


def read_frame(file: IO[bytes]) -> Any:
  """Reads one pickle; EOFError at the end of the file."""
  head = file.read(_LENGTH.size)
  if len(head) < _LENGTH.size:
    raise EOFError
  return pickle.loads(file.read(_LENGTH.unpack(head)[0]))


def main() -> None:
  """Serves the parent on stdin and stdout until stdin ends."""
  # Whatever the verifier prints must not get between the frames.
  parent_in = os.fdopen(os.dup(0), 'rb')
  parent_out = os.fdopen(os.dup(1), 'wb')
  null = os.open(os.devnull, os.O_RDWR)
  for standard in (0, 1):
    os.dup2(null, standard)
  linux.adopt_orphans()
  setup = read_frame(parent_in)
  pool = _Pool(setup, parent_in.fileno())
  try:
    try:
      answer = pool.start()
    except Exception:
      answer = traceback.format_exc(limit=-2)
    write_frame(parent_out, answer)
    while True:
      write_frame(parent_out, pool.run(read_frame(parent_in)))
  except (EOFError, BrokenPipeError):
    pass  # the parent has gone or wants no more
  finally:
    pool.close()
    shutil.rmtree(setup.folder, ignore_errors=True)


def load(target: str) -> Callable[..., Any]:
  """Returns what 'module:name' names."""
  module, _, name = target.partition(':')
  return getattr(importlib.import_module(module), name)


class _Pool:
  """The workers of one supervisor."""

  def __init__(self, setup: Setup, parent: int):
    self._setup = setup
    self._workers: list[_Worker] = []
    self._barriers: tuple[str, ...] = ()
    self._selector = selectors.DefaultSelector()
    self._selector.register(parent, selectors.EVENT_READ)

  def start(self) -> tuple[str, ...]:
    """Loads the verifier, forks all workers; returns their barriers."""
    self._verify = load(self._setup.target)(**self._setup.options)
    for _ in range(self._setup.workers):
      self._fork()
    return self._barriers

  def run(self, items: Sequence[bytes]) -> list[Verdict]:
    """Returns the verdict on each item.

    Raises:
      EOFError: the parent is gone.
    """
    verdicts: dict[int, Verdict] = {}
    waiting = list(reversed(range(len(items))))
    while len(verdicts) < len(items):
      for worker in self._workers:
        if waiting and worker.item is None:
          self._send(worker, waiting.pop(), items)
      for worker, verdict in self._finished():
        self._settle(worker, verdict, verdicts)
    return [verdicts[item] for item in range(len(items))]

  def _settle(
    self, worker: _Worker, verdict: Verdict, verdicts: dict[int, Verdict]
  ) -> None:
    """Notes a verdict and replaces a worker that is of no more use."""
    spent = verdict.reason in _FATAL or not worker.left
    if worker.item is None:
      spent = True  # it spoke without being asked
    else:
      verdicts[worker.item] = verdict
    worker.item, worker.deadline = None, math.inf
    worker.left -= 1
    if spent:
      self._kill(worker)
      self._fork()

  def _send(self, worker: _Worker, item: int, items: Sequence[bytes]) -> None:
    worker.item = item
    worker.deadline = time.monotonic() + self._setup.timeout
    data = _LENGTH.pack(len(items[item])) + items[item]
    # A worker that is gone is noticed when its answer is read.
    with contextlib.suppress(BrokenPipeError):
      while data:
        data = data[os.write(worker.requests, data) :]

  def _finished(self) -> list[tuple[_Worker, Verdict]]:
    """Waits for an answer or a deadline; returns who is done."""
    deadline = min(worker.deadline for worker in self._workers)
    wait = max(0.0, deadline - time.monotonic())
    done = []
    for key, _ in self._selector.select(wait):
      if key.data is None:
        raise EOFError  # the parent sends nothing now, so it has gone
      done.append((key.data, self._read(key.data)))
    now = time.monotonic()
    late = Verdict(
      math.nan, 'timeout', f'no answer within {self._setup.timeout:g} s'
    )
    for worker in self._workers:
      if worker.deadline <= now and all(worker is not w for w, _ in done):
        done.append((worker, late))
    return done

  def _read(self, worker: _Worker) -> Verdict:
    """Returns the verdict that a worker has written."""
    data = os.read(worker.answers, _ANSWER.size + _TEXT_BYTES)
    if len(data) < _ANSWER.size or data[0] >= len(_REASONS):
      return Verdict(math.nan, 'died', 'the worker ended')
    status, score = _ANSWER.unpack_from(data)
    text = data[_ANSWER.size :].decode(errors='replace')
    return Verdict(math.nan if status else score, _REASONS[status], text)

  def _fork(self) -> None:
    """Adds a worker and waits until it is confined."""
    request_read, request_write = os.pipe()
    answer_read, answer_write = os.pipe()
    pid = os.fork()
    if not pid:
      try:
        _work(self._setup, self._verify, request_read, answer_write)
      finally:
        os._exit(1)
    os.close(request_read)
    os.close(answer_write)
    worker = _Worker(pid, request_write, answer_read)
    barriers = os.read(answer_read, _TEXT_BYTES).decode()
    self._workers.append(worker)
    self._selector.register(answer_read, selectors.EVENT_READ, worker)
    if not barriers:
      raise RuntimeError('a worker could not be confined')
    self._barriers = tuple(barriers.split())

  def _kill(self, worker: _Worker) -> None:
    """Kills a worker with its descendants and reaps them all."""
    self._workers.remove(worker)
    self._selector.unregister(worker.answers)
    os.close(worker.requests)
    os.close(worker.answers)
    with contextlib.suppress(ProcessLookupError, PermissionError):
      os.killpg(worker.pid, signal.SIGKILL)
    os.kill(worker.pid, signal.SIGKILL)
    os.waitpid(worker.pid, 0)
    self._bury_orphans()

  def _bury_orphans(self) -> None:
    """Kills what a dead worker left behind in other process groups."""
    own = {worker.pid for worker in self._workers}
    while orphans := _children() - own:
      for pid in orphans:
        with contextlib.suppress(ProcessLookupError):
          os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
          os.waitpid(pid, 0)

  def close(self) -> None:
    """Kills all workers."""
    for worker in list(self._workers):
      self._kill(worker)


def _children() -> set[int]:
  """Returns the children of this process where the kernel lists them."""
  pid = os.getpid()
  try:
    with open(f'/proc/{pid}/task/{pid}/children') as file:
      return set(map(int, file.read().split()))
  except OSError:
    return set()


def _work(setup: Setup, verify: Callable, requests: int, answers: int) -> None:
  """Runs a worker: confines itself, then judges until the requests end."""
  os.setpgid(0, 0)
  linux.die_with_parent(signal.SIGKILL)
  keep = sorted((0, 1, 2, requests, answers))
  for low, high in zip(keep, [*keep[1:], 4096], strict=True):
    os.closerange(low + 1, high)
  null = os.open(os.devnull, os.O_RDWR)
  os.dup2(null, 2)
  os.close(null)
  confinement.limit(setup.memory_mb, 0 if setup.confined else _PROGRAM_FILE_MB)
  barriers = confinement.confine() if setup.confined else ()
  os.write(answers, ' '.join(('limits', *barriers)).encode())
  with os.fdopen(requests, 'rb') as file:
    while True:
      try:
        example, text = read_frame(file)
      except EOFError:
        return
      os.write(answers, _judge(verify, example, text))


def _judge(verify: Callable, example: Any, text: str) -> bytes:
  """Returns the bytes of an answer."""
  try:
    score = float(verify(example, text))
    if math.isfinite(score):
      return _ANSWER.pack(0, score)
    status, text = 3, f'the verifier returned {score}'
  except MemoryError:
    status, text = 2, 'out of memory'
  except BaseException as error:
    status, text = 1, f'{type(error).__name__}: {error}'
  return _ANSWER.pack(status, 0.0) + text.encode()[:_TEXT_BYTES]
