"""What every test runs under: eight CPU devices, strict ranks, no network."""

import os
import socket

from tests import environment

environment.prepare()

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
