"""Tests of how programs are compiled."""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
import numpy as np
import pytest

from rljax.engine import compiling


class Device:
  platform = 'tpu'


@pytest.mark.parametrize(
  'flags, mesh, options',
  [
    ('', None, {'xla_backend_optimization_level': 1}),
    ('--xla_backend_optimization_level=2', None, None),
    ('', 'tpu', None),
  ],
)
def test_only_cpus_without_a_level_of_their_own(
  monkeypatch, flags, mesh, options
):
  given = []
  monkeypatch.setenv('XLA_FLAGS', flags)
  monkeypatch.setattr(jax, 'jit', lambda fn, **kwargs: given.append(kwargs))
  if mesh:
    mesh = Mesh(np.array([Device()]), ('data',))
  compiling.jit(jnp.sin, mesh, donate_argnums=0)
  assert given == [{'compiler_options': options, 'donate_argnums': 0}]


def test_the_option_is_one_that_xla_knows(monkeypatch):
  monkeypatch.setenv('XLA_FLAGS', '')
  assert compiling.jit(jnp.sin)(0.0) == 0.0
