"""What every test runs under: eight CPU devices, strict ranks, no network."""

import hashlib
import importlib.metadata
import os
import pathlib
import socket

# Compiling is most of a test's time. Without optimization it takes a third of
# it, and the tests' arrays are too small for slower loops to matter.
_FLAGS = {
  '--xla_force_host_platform_device_count': '8',
  '--xla_backend_optimization_level': '0',
}
if importlib.metadata.version('jax') < '0.11':
  # Its fusion emitters take two thirds of compiling; later ones have no flag.
  _FLAGS['--xla_cpu_use_fusion_emitters'] = 'false'


def _cache_folder() -> pathlib.Path:
  """Returns a folder for compiled programs, one per kind of processor."""
  base = os.environ.get('XDG_CACHE_HOME') or pathlib.Path.home() / '.cache'
  cpuinfo = pathlib.Path('/proc/cpuinfo')
  text = cpuinfo.read_text() if cpuinfo.exists() else ''
  # Compiled code from a processor with other features may crash here.
  flags = next((x for x in text.splitlines() if x.startswith('flags')), '')
  kind = hashlib.sha256(flags.encode()).hexdigest()[:8]
  return pathlib.Path(base, 'rljax', f'compiled-{kind}')


def _set_environment() -> None:
  """Sets what jax reads when it is imported; subprocesses inherit it."""
  given = os.environ.get('XLA_FLAGS', '')
  added = [f'{k}={v}' for k, v in _FLAGS.items() if k not in given]
  os.environ['XLA_FLAGS'] = ' '.join([given, *added]).strip()
  os.environ.setdefault('JAX_PLATFORMS', 'cpu')
  os.environ.setdefault('JAX_COMPILATION_CACHE_DIR', str(_cache_folder()))
  os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0.3')
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')
  os.environ['MPLBACKEND'] = 'agg'


_set_environment()

import jax
import pytest

from tests.structure import budget

jax.config.update('jax_enable_x64', False)
jax.config.update('jax_numpy_rank_promotion', 'raise')


def _is_local(sock: socket.socket, address) -> bool:
  """Whether `address` is on this machine."""
  if sock.family not in (socket.AF_INET, socket.AF_INET6):
    return True
  host = str(address[0])
  return host in ('', 'localhost', '::', '::1', '0.0.0.0') or host.startswith(
    '127.'
  )


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
  """Makes a connection to another machine an error."""
  connect, connect_ex = socket.socket.connect, socket.socket.connect_ex

  def guard(call):
    def guarded(sock, address):
      if not _is_local(sock, address):
        raise RuntimeError(f'a test tried to connect to {address}')
      return call(sock, address)

    return guarded

  monkeypatch.setattr(socket.socket, 'connect', guard(connect))
  monkeypatch.setattr(socket.socket, 'connect_ex', guard(connect_ex))


@pytest.fixture(autouse=True)
def other_compilers(
  request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
  """Hides the flags of the CPU's compiler from those of other chips."""
  if request.node.get_closest_marker('aot'):
    monkeypatch.setenv('XLA_FLAGS', '')


def pytest_configure(config: pytest.Config) -> None:
  """Records CPU time per test folder when RLJAX_DURATIONS names a file."""
  if path := os.environ.get('RLJAX_DURATIONS'):
    config.pluginmanager.register(budget.Recorder(path), 'rljax-durations')
