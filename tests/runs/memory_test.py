"""Tests of the process's own memory."""

import subprocess
import sys
import textwrap

import pytest


@pytest.mark.skipif(sys.platform != 'linux', reason='glibc only')
def test_what_compiling_freed_goes_back():
  # In a process of its own: a heap that others have used proves nothing.
  script = textwrap.dedent("""
    import resource
    import jax
    from rljax.runs import memory

    def held():
      with open('/proc/self/statm') as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 1e6

    memory.free_after_compiling()
    memory.free_after_compiling()
    freed = [bytes(1000) for _ in range(200_000)]
    last = bytes(1000)  # keeps the top of the heap from shrinking by itself
    full = held()
    del freed
    jax.monitoring.record_event_duration_secs('backend_compile_duration', 0.1)
    short = held()
    jax.monitoring.record_event_duration_secs('backend_compile_duration', 9.0)
    print(full, short, held())
  """)
  command = [sys.executable, '-c', script]
  done = subprocess.run(
    command,
    capture_output=True,
    text=True,
    check=True,
    env={'PYTHONMALLOC': 'malloc', 'PYTHONPATH': ':'.join(sys.path)},
  )
  full, short, after = map(float, done.stdout.split())
  assert short > full - 20
  assert after < full - 150
