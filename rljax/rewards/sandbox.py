"""A pool of processes in which a verifier may hang, crash or misbehave.

  with sandbox.Sandbox('module:function', options) as box:
    scores = box.score(examples, texts)  # NaN where the verifier failed

See `confinement` for what a verifier may still do in there, and for what the
barrier is not.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
import os
import pickle
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from typing import Any
import weakref

import numpy as np

from rljax.rewards import supervisor

_START_SECONDS = 120.0
_GRACE_SECONDS = 10.0
_COMMAND = 'from rljax.rewards import supervisor; supervisor.main()'
# Worker processes are the unit of parallelism: no thread pools inside them.
_THREADS = {
  f'{library}_NUM_THREADS': '1' for library in ('OMP', 'OPENBLAS', 'MKL')
}
_FAILED = supervisor.Verdict(float('nan'), 'died', 'the supervisor ended')


class Sandbox:
  """Scores responses in confined worker processes.

  Any thread may call `score`; calls take turns. Start-up is on first use.

  Attributes:
    failures: how many responses the verifier failed on, by reason: 'timeout',
      'exception', 'memory', 'died' or 'not finite'.
    errors: the last message for each reason.
  """

  def __init__(
    self,
    target: str,
    options: Mapping[str, Any] | None = None,
    *,
    workers: int = 2,
    timeout: float = 10.0,
    memory_mb: int = 1024,
    confined: bool = True,
  ):
    """Makes a sandbox; no process is started yet.

    Args:
      target: 'module:function'. Called with the options in the sandbox, it
        returns the verifier: (example, text) -> float.
      options: plain keyword arguments of the function.
      workers: processes.
      timeout: seconds for one response, after which its worker is killed.
      memory_mb: address space of a worker above that of an idle one.
      confined: whether workers lose files, processes and the network. Only a
        verifier that has a sandbox of its own should go without.
    """
    if workers < 1 or timeout <= 0 or memory_mb < 1:
      raise ValueError(
        f'{workers=}, {timeout=} and {memory_mb=} should be positive.'
      )
    self._setup = supervisor.Setup(
      target, dict(options or {}), workers, timeout, memory_mb, confined, ''
    )
    self._lock = threading.Lock()
    self._process: subprocess.Popen[bytes] | None = None
    self._stop = None
    self.failures: collections.Counter[str] = collections.Counter()
    self.errors: dict[str, str] = {}

  def __enter__(self) -> Sandbox:
    return self

  def __exit__(self, *unused) -> None:
    self.close()

  def score(self, examples: Sequence[Any], texts: Sequence[str]) -> np.ndarray:
    """Returns f32 [n], the score of each text; NaN where there is none.

    Raises:
      RuntimeError: the verifier can't be loaded.
    """
    items = [pickle.dumps(pair) for pair in zip(examples, texts, strict=True)]
    with self._lock:
      verdicts = self._verdicts(items) if items else []
      for verdict in verdicts:
        if verdict.reason:
          self.failures[verdict.reason] += 1
          self.errors[verdict.reason] = verdict.text
    return np.array([verdict.score for verdict in verdicts], np.float32)

  def barriers(self) -> tuple[str, ...]:
    """Returns what holds the workers: 'limits', 'seccomp', 'audit'."""
    with self._lock:
      self._start()
      return self._barriers

  def close(self) -> None:
    """Ends all processes; a later `score` starts them again."""
    with self._lock:
      self._end()

  def _end(self) -> None:
    if self._stop is not None:
      self._stop()
    self._process = self._stop = None

  def _verdicts(self, items: list[bytes]) -> list[supervisor.Verdict]:
    """Returns a verdict on each item; a supervisor that dies fails all."""
    process = self._start()
    rounds = -(-len(items) // self._setup.workers)
    limit = rounds * (self._setup.timeout + 1.0) + _GRACE_SECONDS
    try:
      return _ask(process, items, limit)
    except (EOFError, OSError):
      self._end()
      return [_FAILED] * len(items)
    except BaseException:
      self._end()  # an interrupt must not leave an answer behind
      raise

  def _start(self) -> subprocess.Popen[bytes]:
    """Returns the supervisor, started if there is none."""
    if self._process is not None and self._process.poll() is None:
      return self._process
    self._end()
    folder = tempfile.mkdtemp(prefix='rljax-sandbox-')
    process = subprocess.Popen(
      [sys.executable, '-c', _COMMAND],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      cwd=folder,
      env=_environment(folder),
      start_new_session=True,
    )
    self._process = process
    self._stop = weakref.finalize(self, _stop, process, folder)
    try:
      answer = _ask(
        process, self._setup._replace(folder=folder), _START_SECONDS
      )
    except (EOFError, OSError) as error:
      answer = f'its process ended: {error!r}'
    if isinstance(answer, str):
      self._end()
      raise RuntimeError(f'{self._setup.target} does not load: {answer}')
    self._barriers = answer
    return process


def _ask(process: subprocess.Popen[bytes], value: Any, limit: float) -> Any:
  """Sends one frame and returns the next; EOFError if none comes in time."""
  assert process.stdin and process.stdout, 'both are pipes'
  supervisor.write_frame(process.stdin, value)
  if not select.select([process.stdout], [], [], limit)[0]:
    raise EOFError(f'no answer within {limit:.0f} s')
  return supervisor.read_frame(process.stdout)


def _environment(folder: str) -> dict[str, str]:
  """Returns the variables of the sandbox: no secrets, the same imports."""
  path = os.pathsep.join(os.path.abspath(p) for p in sys.path)
  keep = {k: os.environ[k] for k in ('PATH', 'LANG') if k in os.environ}
  return {
    **keep,
    **_THREADS,
    'HOME': folder,
    'TMPDIR': folder,
    'PYTHONPATH': path,
    'PYTHONSAFEPATH': '1',
    'PYTHONDONTWRITEBYTECODE': '1',
    'PYTHONHASHSEED': '0',
  }


def _stop(process: subprocess.Popen[bytes], folder: str) -> None:
  """Ends a supervisor, which ends its workers; leaves no zombie."""
  for file in (process.stdin, process.stdout):
    if file is not None:
      try:
        file.close()
      except OSError:
        pass
  try:
    process.wait(timeout=_GRACE_SECONDS)
  except subprocess.TimeoutExpired:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
  shutil.rmtree(folder, ignore_errors=True)
