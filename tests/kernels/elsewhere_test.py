"""A program with nothing but jax and the kernels learns as the naive one."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
import numpy as np
import pytest

import rljax_kernels

ROWS, WIDTH, VOCAB, STEPS, RATE = 64, 16, 80, 12, 0.3


def made():
  """Returns parameters of three layers, tied to an embedding [V, D]."""
  keys = jax.random.split(jax.random.key(0), 4)
  layers = [jax.random.normal(k, (WIDTH, WIDTH)) / 4 for k in keys[:3]]
  return {'embed': jax.random.normal(keys[3], (VOCAB, WIDTH)), 'layers': layers}


def hidden(params, tokens):
  x = params['embed'][tokens]
  for layer in params['layers']:
    x = x + jnp.tanh(x @ layer)
  return x


def naive(params, tokens, targets):
  z = hidden(params, tokens) @ params['embed'].T
  log_p = jax.nn.log_softmax(z)
  return -jnp.mean(jnp.take_along_axis(log_p, targets[:, None], axis=1))


def fused(params, tokens, targets, layout=None):
  stats = rljax_kernels.vocab_stats(
    hidden(params, tokens), params['embed'], targets, layout=layout
  )
  return -jnp.mean(stats['logp'])


def curve(
  loss, place=lambda params, tokens, targets: (params, tokens, targets)
):
  """Returns the losses of gradient descent on sequences of a fixed rule."""

  @jax.jit
  def step(params, tokens, targets):
    value, grads = jax.value_and_grad(loss)(params, tokens, targets)
    return jax.tree.map(lambda p, g: p - RATE * g, params, grads), value

  tokens = jnp.arange(ROWS) * 7 % VOCAB
  params, tokens, targets = place(made(), tokens, (3 * tokens + 1) % VOCAB)
  found = []
  for _ in range(STEPS):
    params, value = step(params, tokens, targets)
    found.append(float(value))
  return found


@pytest.mark.parametrize(
  'vocab', [pytest.param(None, marks=pytest.mark.slow), 'tensor']
)
def test_the_curve_is_the_naive_one_on_eight_devices(vocab):
  mesh = jax.make_mesh(
    (4, 2), ('data', 'tensor'), axis_types=(AxisType.Auto,) * 2
  )
  layout = rljax_kernels.Layout(mesh, ('data',), vocab)

  def place(params, tokens, targets):
    def put(x, *axes):
      return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*axes)))

    embed = put(params['embed'], vocab)
    layers = [put(x) for x in params['layers']]
    return (
      {'embed': embed, 'layers': layers},
      put(tokens, 'data'),
      put(targets, 'data'),
    )

  wanted = curve(naive)
  found = curve(functools.partial(fused, layout=layout), place)
  assert wanted[-1] < 0.8 * wanted[0]
  np.testing.assert_allclose(found, wanted, atol=1e-5)
