"""What the README of the kernels says is true."""

import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rljax_kernels
from rljax_kernels import attention
from tests.structure import sources

TEXT = (sources.ROOT / 'kernels' / 'README.md').read_text()
FUNCTIONS = {
  name: x for name, x in vars(rljax_kernels).items() if inspect.isfunction(x)
}


def rows(header: str) -> dict[str, list[str]]:
  """Returns the rows of a table, by what is in the first column."""
  _, _, rest = TEXT.partition(f'| {header} |')
  table, _, _ = rest.partition('\n\n')
  cells = [x.strip('| ').split(' | ') for x in table.splitlines()[2:]]
  return {first: others for first, *others in cells}


def test_program():
  (code,) = re.findall(r'```python\n(.*?)```', TEXT, re.DOTALL)
  scope = {}
  exec(code, scope)
  r = np.random.default_rng(0)
  hidden, unembed = (jnp.float32(r.normal(size=(n, 8))) for n in (5, 50))
  data = jnp.arange(5), jnp.full(5, -4.0), jnp.ones(5)
  for x in jax.grad(scope['loss'], (0, 1))(hidden, unembed, *data):
    assert np.isfinite(x).all() and np.any(x)


def test_every_function_has_a_row():
  named = {x for row in rows('function') for x in re.findall(r'`(\w+)`', row)}
  assert named == set(FUNCTIONS)
  # What they return and take is exported as well.
  for name in ('Choice', 'Drawn', 'Layout', 'Reference', 'Sums'):
    assert f'`{name}' in TEXT and inspect.isclass(getattr(rljax_kernels, name))
  for name in attention.__all__:
    assert f'`{name}`' in TEXT


@pytest.mark.parametrize(
  'argument', ['layout', 'vocab_axis', 'implementation', 'explain']
)
def test_which_functions_take_an_argument(argument):
  said, _ = rows('argument')[f'`{argument}`']
  takers = {
    name
    for name, fn in FUNCTIONS.items()
    if argument in inspect.signature(fn).parameters
  }
  assert set(re.findall(r'`(\w+)`', said)) == takers


def explained(v=4096, d=128, dtype=jnp.float32):
  """Returns what is chosen without a mesh: (name, its reason)."""

  def shape(*sizes, kind=dtype):
    return jax.ShapeDtypeStruct(sizes, kind)

  found = []

  def trace(hidden, unembed, targets):
    found.append(
      rljax_kernels.vocab_stats(hidden, unembed, targets, explain=True)
    )

  targets = shape(8, kind=jnp.int32)
  jax.eval_shape(trace, shape(8, d), shape(v, d, kind=jnp.float32), targets)
  return found[0]


def test_when_pallas_is_chosen():
  assert explained().reason.startswith('pallas_tpu on TPU')
  assert explained(v=4095).name == 'xla_token'
  for choice in (explained(d=100), explained(dtype=jnp.bfloat16)):
    assert choice.reason.startswith('xla_vocab on TPU')
  assert 'multiples of 128' in TEXT and '4,096' in TEXT and 'one type' in TEXT
