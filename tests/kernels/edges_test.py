"""Functions of logits at the smallest sizes, and what has no gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rljax_kernels
from tests.kernels import meshes


def topk(hidden, unembed, **options):
  return rljax_kernels.vocab_topk(hidden, unembed, 1, **options)


def gather(hidden, unembed, **options):
  ids = jnp.zeros((len(hidden), 1), jnp.int32)
  return (rljax_kernels.gather_logits(hidden, unembed, ids, **options),)


def sample(hidden, unembed, **options):
  uniform = jnp.full(len(hidden), 0.5)
  return rljax_kernels.vocab_sample(hidden, unembed, uniform, **options)


def greedy(hidden, unembed, **options):
  return rljax_kernels.vocab_sample(hidden, unembed, None, **options)


def gumbel(hidden, unembed, **options):
  keys = jax.random.split(jax.random.key(0), len(hidden))
  return rljax_kernels.gumbel_sample(hidden, unembed, keys, **options)


truncated = functools.partial(sample, top_k=1, top_p=0.5, min_p=0.1)
DRAWS = [
  sample,
  truncated,
  *(pytest.param(x, marks=pytest.mark.slow) for x in (greedy, gumbel)),
]
EVERY = [topk, gather, *DRAWS]
LAYOUT = meshes.layout(*meshes.MORE_VOCAB)


def name(fn) -> str:
  return getattr(fn, '__name__', 'truncated')


@pytest.mark.parametrize('layout', [None, LAYOUT], ids=['whole', 'split'])
@pytest.mark.parametrize('fn', EVERY, ids=name)
def test_no_rows(fn, layout):
  unembed = jnp.ones((1000, 4))
  found = jax.jit(functools.partial(fn, layout=layout))(
    jnp.zeros((0, 4)), unembed
  )
  for x in found:
    assert x.shape[0] == 0 and x.size == 0


@pytest.mark.parametrize('fn', EVERY, ids=name)
@pytest.mark.parametrize('width', [1, 4])
def test_one_id(fn, width):
  hidden, unembed = jnp.full((3, width), 2.0), jnp.ones((1, width))
  found = jax.jit(fn)(hidden, unembed)
  if fn is gather:
    np.testing.assert_array_equal(found[0], np.full((3, 1), 2.0 * width))
    return
  for x in found[:5]:  # an id, log-probs and an entropy
    np.testing.assert_allclose(x, 0, atol=1e-6)


def test_no_id_of_a_row():
  found = rljax_kernels.gather_logits(
    jnp.ones((3, 4)), jnp.ones((9, 4)), jnp.zeros((3, 0), jnp.int32)
  )
  assert found.shape == (3, 0)


def slopes(fn, *args):
  """Returns the gradients of the sum of all numbers that `fn` returns."""

  def total(*args):
    found = [x for x in fn(*args) if jnp.issubdtype(x.dtype, jnp.floating)]
    return sum(jnp.sum(x) for x in found)

  return jax.jit(jax.grad(total, tuple(range(len(args)))))(*args)


@pytest.mark.parametrize('layout', [None, LAYOUT], ids=['whole', 'split'])
@pytest.mark.parametrize('fn', [topk, *DRAWS], ids=name)
def test_samples_and_largest_are_data(fn, layout):
  r = np.random.default_rng(0)
  args = [jnp.float32(r.normal(size=(size, 4))) for size in (8, 40)]

  def run(hidden, unembed, temperature):
    return fn(hidden, unembed, temperature=temperature, layout=layout)

  for x in slopes(run, *args, jnp.full(8, 0.7)):
    np.testing.assert_array_equal(x, 0.0)


def test_pick_is_data():
  mass, uniform = jnp.ones((3, 5)), jnp.full(3, 0.5)

  def run(mass, uniform):
    return (rljax_kernels.pick(mass, uniform) * jnp.sum(uniform * 0),)

  for x in slopes(run, mass, uniform):
    np.testing.assert_array_equal(x, 0.0)


@pytest.mark.parametrize('layout', [None, LAYOUT], ids=['whole', 'split'])
def test_logits_have_no_gradient_in_the_temperature(layout):
  run = functools.partial(gather, layout=layout)

  def at(hidden, unembed, temperature):
    return run(hidden, unembed, temperature=temperature)

  hidden, unembed = jnp.ones((8, 4)), jnp.ones((40, 4))
  of_hidden, of_unembed, of_temperature = slopes(
    at, hidden, unembed, jnp.full(8, 0.5)
  )
  np.testing.assert_array_equal(of_hidden, np.full((8, 4), 2.0))
  np.testing.assert_array_equal(of_unembed[0], np.full(4, 16.0))
  np.testing.assert_array_equal(of_temperature, 0.0)
