"""What a process that runs an untrusted verifier may still do.

`limit` bounds memory, processor time and the files a process may write;
`confine` then takes away everything but computing and reading files:

*   On Linux (x86-64, arm64) a seccomp filter lets through a list of system
    calls. No file can be created, written, renamed or removed, no process
    started, no signal sent, no socket made. The kernel holds this boundary,
    whatever Python code or native code runs behind it.
*   Everywhere, an audit hook refuses the same operations by name. Without
    seccomp it is the only barrier: it stops ordinary code, not an attacker
    who knows the interpreter.

Neither hides files that the user may read, and neither protects the verdict
itself from code that runs inside the verifier: a verifier should not evaluate
what the policy wrote in the first place.
"""

from collections.abc import Callable
import resource
import sys

from rljax.rewards import linux

_CPU_SECONDS = 3600  # of a worker's life; its supervisor keeps the real time
_OPEN_FILES = 64

_EVENTS = frozenset({
  *('code.__new__', 'pty.spawn', 'signal.pthread_kill', 'sqlite3.connect'),
  *('subprocess.Popen', 'sys.setprofile', 'sys.settrace', 'urllib.Request'),
  *('gc.get_objects', 'gc.get_referents', 'gc.get_referrers'),
  *('resource.prlimit', 'resource.setrlimit'),
})  # fmt: skip
_FAMILIES = frozenset({
  *('ctypes', 'ftplib', 'shutil', 'smtplib', 'socket', 'tempfile', 'winreg')
})  # fmt: skip
_HARMLESS = frozenset({
  *('os.listdir', 'os.scandir', 'os.walk', 'os.fwalk', 'os.getxattr'),
  *('os.listxattr', 'os.add_dll_directory', 'os.putenv', 'os.unsetenv'),
})  # fmt: skip
_MODULES = frozenset({
  *('_ctypes', '_posixshmem', '_posixsubprocess', '_socket', 'cffi', 'ctypes'),
  *('multiprocessing', 'socket', 'subprocess'),
})  # fmt: skip


def limit(memory_mb: int, written_mb: int) -> None:
  """Bounds this process: address space, written files, processor time.

  Args:
    memory_mb: address space above what the process has now (Linux only).
    written_mb: largest file that it may write; 0 still allows empty ones.
  """
  _lower(resource.RLIMIT_AS, _address_space() + (memory_mb << 20))
  _lower(resource.RLIMIT_FSIZE, written_mb << 20)
  _lower(resource.RLIMIT_CPU, _CPU_SECONDS)
  _lower(resource.RLIMIT_NOFILE, _OPEN_FILES)
  _lower(resource.RLIMIT_CORE, 0)


def _lower(which: int, value: int) -> None:
  """Sets a limit where the platform knows it and it isn't lower already."""
  _, hard = resource.getrlimit(which)
  if hard != resource.RLIM_INFINITY:
    value = min(value, hard)
  try:
    resource.setrlimit(which, (value, value))
  except (OSError, ValueError):
    pass  # macOS has no limit on the address space


def _address_space() -> int:
  """Returns the bytes mapped by this process; 0 where that isn't told."""
  try:
    with open('/proc/self/statm') as file:
      return int(file.read().split()[0]) * resource.getpagesize()
  except OSError:
    return 1 << 36


def confine() -> tuple[str, ...]:
  """Takes away files, processes, signals and sockets from this process.

  There is no way back. Returns the barriers that hold, of 'seccomp' and
  'audit'.
  """
  filtered = linux.filter_calls()
  for name in list(sys.modules):
    if name.partition('.')[0] in _MODULES:
      del sys.modules[name]
  sys.addaudithook(_hook())
  return ('seccomp', 'audit') if filtered else ('audit',)


def _hook() -> Callable[[str, tuple], None]:
  """Returns an audit hook that reads nothing which code could change later."""
  events, families, harmless = _EVENTS, _FAMILIES, _HARMLESS
  modules, writes = _MODULES, linux.WRITES
  denied, absent = PermissionError, ImportError

  def hook(event, args):
    family = event.partition('.')[0]
    if event == 'open':
      _, mode, flags = args
      bad = bool(flags & writes) if isinstance(flags, int) else mode != 'r'
    elif event == 'import':
      if args[0].partition('.')[0] in modules:
        raise absent(f'a verifier may not import {args[0]}')
      bad = False
    else:
      bad = event in events or family in families
      bad = bad or (family == 'os' and event not in harmless)
    if bad:
      raise denied(f'a verifier may not do this: {event} {args!r:.80}')

  return hook
