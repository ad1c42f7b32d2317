"""Memory of the process itself."""

import ctypes
import functools
import sys
from typing import Any

import jax

_LONG = 0.5  # seconds; handing back takes up to a tenth of one


@functools.cache
def free_after_compiling() -> None:
  """Makes every compilation hand the heap it freed back to the system.

  glibc keeps what LLVM freed, some 400 MB after a training step, and the
  step's own buffers come on top of it. Without glibc nothing is done.
  """
  libc: Any = ctypes.CDLL(None) if sys.platform == 'linux' else None
  if not hasattr(libc, 'malloc_trim'):
    return

  def listen(event: str, duration_secs: float, **unused: object) -> None:
    if event.endswith('backend_compile_duration') and duration_secs > _LONG:
      libc.malloc_trim(0)

  jax.monitoring.register_event_duration_secs_listener(listen)
