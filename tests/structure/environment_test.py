"""The conditions that tests/conftest.py sets really hold."""

import socket
import sys
import types
import warnings

import jax
import jax.numpy as jnp
import pytest


def test_eight_devices_without_x64():
  assert jax.device_count() == 8
  assert jnp.asarray(1.5).dtype == jnp.float32


def test_rank_promotion_is_an_error():
  with pytest.raises(ValueError, match='rank_promotion'):
    jnp.ones((2, 3)) + jnp.ones(3)


@pytest.mark.parametrize('call', ['connect', 'connect_ex'])
def test_other_machines_are_out_of_reach(call):
  with socket.socket() as sock, pytest.raises(RuntimeError, match='192.0.2.1'):
    getattr(sock, call)(('192.0.2.1', 80))


def test_this_machine_is_in_reach():
  with socket.create_server(('127.0.0.1', 0)) as server:
    with socket.create_connection(server.getsockname()) as sock:
      assert sock.getpeername() == server.getsockname()


def _warn_from(name: str) -> None:
  module = types.ModuleType(name)
  exec('def run(warn):\n  warn("old")', module.__dict__)
  module.run(lambda text: warnings.warn(text, FutureWarning, stacklevel=2))


@pytest.mark.parametrize(
  'name', ['rljax.core.masked', 'rljax_kernels', 'experiments.grpo']
)
def test_warnings_from_here_are_errors(name):
  with pytest.raises(FutureWarning):
    _warn_from(name)


@pytest.mark.filterwarnings('ignore:old')
def test_warnings_from_elsewhere_pass():
  _warn_from('rljaxlike.module')


def test_tests_have_their_own_folder_of_compiled_programs():
  assert jax.config.jax_compilation_cache_dir
  assert 'jax' in sys.modules
