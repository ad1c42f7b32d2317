"""What only the Linux kernel offers to hold a process back.

`filter_calls` installs a seccomp filter: a list of the system calls that
computing and reading files need, with every other one refused. It can't be
taken off, and it holds for native code too.
"""

from collections.abc import Iterator, Mapping
import ctypes
import errno
import os
import platform
import struct
import sys
import types

# Flags of open() of which none may be set in order to only read.
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

# The system calls that computing and reading files need, as
# name: (x86-64, arm64); None where the machine has no such call.
_CALLS: Mapping[str, tuple[int | None, int | None]] = types.MappingProxyType({
  'access': (21, None),
  'brk': (12, 214),
  'clock_getres': (229, 114),
  'clock_gettime': (228, 113),
  'clock_nanosleep': (230, 115),
  'close': (3, 57),
  'dup': (32, 23),
  'exit': (60, 93),
  'exit_group': (231, 94),
  'faccessat': (269, 48),
  'faccessat2': (439, 439),
  'fadvise64': (221, 223),
  'fstat': (5, 80),
  'futex': (202, 98),
  'getcpu': (309, 168),
  'getcwd': (79, 17),
  'getdents64': (217, 61),
  'getegid': (108, 177),
  'geteuid': (107, 175),
  'getgid': (104, 176),
  'getpid': (39, 172),
  'getppid': (110, 173),
  'getrandom': (318, 278),
  'getrlimit': (97, 163),
  'getrusage': (98, 165),
  'gettid': (186, 178),
  'gettimeofday': (96, 169),
  'getuid': (102, 174),
  'lseek': (8, 62),
  'lstat': (6, None),
  'madvise': (28, 233),
  'membarrier': (324, 283),
  'mmap': (9, 222),
  'mprotect': (10, 226),
  'mremap': (25, 216),
  'munmap': (11, 215),
  'nanosleep': (35, 101),
  'newfstatat': (262, 79),
  'poll': (7, None),
  'ppoll': (271, 73),
  'pread64': (17, 67),
  'pselect6': (270, 72),
  'read': (0, 63),
  'readlink': (89, None),
  'readlinkat': (267, 78),
  'readv': (19, 65),
  'restart_syscall': (219, 128),
  'rseq': (334, 293),
  'rt_sigaction': (13, 134),
  'rt_sigprocmask': (14, 135),
  'rt_sigreturn': (15, 139),
  'sched_getaffinity': (204, 123),
  'sched_yield': (24, 124),
  'select': (23, None),
  'set_robust_list': (273, 99),
  'setitimer': (38, 103),
  'sigaltstack': (131, 132),
  'stat': (4, None),
  'statx': (332, 291),
  'sysinfo': (99, 179),
  'time': (201, None),
  'times': (100, 153),
  'uname': (63, 160),
  'write': (1, 64),
  'writev': (20, 66),
})  # fmt: skip
# Calls that one argument makes harmless: (x86-64, arm64), which argument,
# bits that must be clear, bits of which one must be set (0: none need be).
_CLONE_THREAD = 0x00010000
_CHECKED = (
  ((2, None), 1, WRITES, 0),  # open
  ((257, 56), 2, WRITES, 0),  # openat
  ((56, 220), 0, 0, _CLONE_THREAD),  # clone: a thread, not a process
  ((72, 25), 1, ~3 & 0xFFFFFFFF, 0),  # fcntl: flags, no signals on readiness
)
_CLONE3 = 435  # must look absent, so that libc falls back on clone
_MACHINES = {'x86_64': (0, 0xC000003E), 'aarch64': (1, 0xC00000B7)}

_LOAD, _EQUAL, _ABOVE, _BITS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
_SET_PDEATHSIG, _SET_SECCOMP, _SET_CHILD_SUBREAPER = 1, 22, 36
_SET_NO_NEW_PRIVS, _MODE_FILTER = 38, 2


def filter_calls() -> bool:
  """Installs the seccomp filter; False where there is none to install."""
  if sys.platform != 'linux' or platform.machine() not in _MACHINES:
    return False
  program = b''.join(_program(*_MACHINES[platform.machine()]))
  buffer = ctypes.create_string_buffer(program, len(program))
  header = struct.pack('HxxxxxxP', len(program) // 8, ctypes.addressof(buffer))
  return _prctl(_SET_NO_NEW_PRIVS, 1) and _prctl(
    _SET_SECCOMP, _MODE_FILTER, ctypes.create_string_buffer(header)
  )


def _program(column: int, architecture: int) -> Iterator[bytes]:
  """Yields the filter's instructions."""
  yield _operation(_LOAD, _ARCHITECTURE)
  yield _operation(_EQUAL, architecture, 1, 0)
  yield _operation(_RETURN, _KILL)
  yield _operation(_LOAD, _NUMBER)
  for numbers in _CALLS.values():
    if (number := numbers[column]) is not None:
      yield _operation(_EQUAL, number, 0, 1)
      yield _operation(_RETURN, _ALLOW)
  yield _operation(_EQUAL, _CLONE3, 0, 1)
  yield _operation(_RETURN, _ERRNO | errno.ENOSYS)
  for numbers, argument, clear, some in _CHECKED:
    if (number := numbers[column]) is not None:
      yield from _check(number, argument, clear, some)
  yield _operation(_RETURN, _ERRNO | errno.EPERM)


def _check(
  number: int, argument: int, clear: int, some: int
) -> Iterator[bytes]:
  """Yields the test of one argument's low 32 bits, for one call."""
  yield _operation(_EQUAL, number, 0, 4)
  yield _operation(_LOAD, _ARGUMENTS + 8 * argument)
  if some:
    yield _operation(_BITS, some, 0, 1)
  else:
    yield _operation(_BITS, clear, 1, 0)
  yield _operation(_RETURN, _ALLOW)
  yield _operation(_RETURN, _ERRNO | errno.EPERM)


def _operation(code: int, value: int, then: int = 0, other: int = 0) -> bytes:
  return struct.pack('HBBI', code, then, other, value)


def die_with_parent(signal: int) -> None:
  """Asks the kernel for `signal` when the parent ends (Linux only)."""
  _prctl(_SET_PDEATHSIG, signal)


def adopt_orphans() -> None:
  """Makes this process the parent of its orphaned descendants (Linux)."""
  _prctl(_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, *arguments) -> bool:
  if sys.platform != 'linux':
    return False
  arguments = [
    a if isinstance(a, ctypes.Array) else ctypes.c_ulong(a) for a in arguments
  ]
  arguments += [ctypes.c_ulong(0)] * (4 - len(arguments))
  return not ctypes.CDLL(None, use_errno=True).prctl(option, *arguments)
