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
    ('', None, [{'xla_backend_optimization_level': 1}, None]),
    ('--xla_backend_optimization_level=2', None, [None]),
    ('', 'tpu', [None]),
  ],
)
def test_only_cpus_without_a_level_of_their_own(
  monkeypatch, flags, mesh, options
):
  given = []
  jit = jax.jit

  def listen(fn, **kwargs):
    given.append(kwargs.pop('compiler_options', None))
    assert kwargs == {'donate_argnums': 0}
    return jit(fn, **kwargs)

  monkeypatch.setenv('XLA_FLAGS', flags)
  monkeypatch.setattr(jax, 'jit', listen)
  if mesh:
    mesh = Mesh(np.array([Device()]), ('data',))
  compiling.jit(jnp.sin, mesh, donate_argnums=0)
  assert given == options


def test_a_program_works_alone_and_inside_another(monkeypatch):
  monkeypatch.setenv('XLA_FLAGS', '')
  sin = compiling.jit(jnp.sin)
  x = jnp.arange(3.0)
  np.testing.assert_allclose(sin(x), np.sin(x), rtol=1e-6)
  np.testing.assert_allclose(jax.jit(lambda x: sin(x))(x), sin(x), rtol=1e-6)
  assert jax.eval_shape(sin, x).shape == (3,)
  last, every = jax.lax.scan(lambda c, _: (sin(c), c), x, length=2)
  np.testing.assert_allclose(last, np.sin(np.sin(x)), rtol=1e-6)
  assert sin.lower(x).compile()(x).shape == (3,)
