"""Imports go one way: each layer sees only the layers before it."""

import dataclasses
import os
import subprocess
import sys

import pytest

from tests.structure import sources

ANY = frozenset(['*'])
JAX = frozenset(['jax', 'numpy'])
HOST = JAX | {'absl'}
TOOLS = ('bench_step', 'list', 'compare', 'claims', 'plan', 'export')


@dataclasses.dataclass(frozen=True)
class Layer:
  """What the modules below one name may import besides each other."""

  ours: tuple[str, ...]
  others: frozenset[str]


def _after(*names: str) -> tuple[str, ...]:
  return 'rljax_kernels', 'rljax.core', *names


# The longest name that covers a module decides.
LAYERS = {
  'rljax_kernels': Layer((), frozenset(['jax'])),
  'rljax.core': Layer((), JAX),
  'rljax.objectives': Layer(_after(), JAX | {'optax'}),
  'rljax.control': Layer(_after(), JAX | {'optax'}),
  'rljax.models': Layer(_after(), JAX | {'flax', 'qwix'}),
  'rljax.models.convert': Layer(
    _after('rljax.models'),
    HOST | {'flax', 'gguf', 'safetensors', 'tensorstore'},
  ),
  'rljax.engine': Layer(
    _after('rljax.objectives', 'rljax.control', 'rljax.models'),
    JAX | {'optax'},
  ),
  'rljax.data': Layer(
    _after('rljax.objectives'),
    HOST | {'grain', 'pyarrow', 'sentencepiece', 'tokenizers'},
  ),
  'rljax.rewards': Layer(
    _after('rljax.objectives', 'rljax.data'),
    HOST | {'math_verify', 'psutil', 'z3'},
  ),
  'rljax.tasks': Layer(
    _after('rljax.objectives', 'rljax.data', 'rljax.rewards'),
    HOST | {'grain', 'pyarrow', 'reasoning_gym'},
  ),
  'rljax.runs': Layer(('rljax_kernels', 'rljax'), ANY),
  'experiments': Layer(('rljax_kernels', 'rljax', 'experiments'), ANY),
}


def _under(name: str, prefixes) -> bool:
  """Whether a dotted name is one of the prefixes or below it."""
  return any(f'{name}.'.startswith(f'{prefix}.') for prefix in prefixes)


def _layer(name: str) -> str:
  """Returns the longest entry of the table that covers a module."""
  found = [entry for entry in LAYERS if _under(name, [entry])]
  if not found:
    raise ValueError(f'{name} is in no layer: add its folder to LAYERS')
  return max(found, key=len)


def _allowed(module: str, name: str) -> bool:
  """Whether the layer of `module` permits importing `name`."""
  own = _layer(module)
  layer = LAYERS[own]
  top = name.partition('.')[0]
  if top in sources.FOLDERS:
    return _under(name, (own, *layer.ours))
  return (
    top in sys.stdlib_module_names
    or top in layer.others
    or (layer.others == ANY)
  )


def _is_other_experiment(module: str, name: str) -> bool:
  """Whether one experiment imports another without being a tool."""
  tools = ('experiments.recipes', *(f'experiments.{t}' for t in TOOLS))
  return (
    _under(module, ['experiments'])
    and _under(name, ['experiments'])
    and name not in ('experiments', module)
    and not _under(module, tools)
  )


def violations(module: sources.Module) -> list[str]:
  """Returns one line for each import that the table forbids."""
  bad = [
    name
    for name in sorted(sources.imports(module))
    if not _allowed(module.name, name)
    or _is_other_experiment(module.name, name)
  ]
  return [f'{module.path} may not import {name}' for name in bad]


def test_layers():
  found = sources.modules().values()
  checked = [m for m in found if m.top != 'tests' and m.name != 'rljax']
  bad = [line for module in checked for line in violations(module)]
  assert not bad, '\n'.join(['', *bad])


def test_importing_the_root_imports_nothing():
  assert sources.imports(sources.modules()['rljax']) == set()


@pytest.mark.parametrize(
  ('path', 'text'),
  [
    ('rljax/core/new.py', 'import flax'),
    ('rljax/core/new.py', 'def f():\n  from rljax.engine import step'),
    ('rljax/objectives/new.py', 'from rljax.engine import step'),
    ('rljax/objectives/new.py', 'from ..control import replay'),
    ('rljax/models/convert/new.py', 'from rljax import engine'),
    ('rljax/engine/new.py', 'import flax.nnx'),
    ('rljax/data/new.py', 'from rljax.tasks import task'),
    ('rljax/rewards/new.py', 'import rljax.tasks.task as task'),
    ('rljax/tasks/new.py', 'from rljax.engine import sampling'),
    ('rljax/runs/new.py', 'from experiments import grpo'),
    ('kernels/rljax_kernels/new.py', 'import numpy as np'),
    ('kernels/rljax_kernels/new.py', 'from rljax.core import types'),
    ('experiments/new.py', 'import experiments.grpo'),
    ('experiments/new.py', 'from tests import contracts'),
  ],
)
def test_a_wrong_import_is_found(path, text):
  bad = sources.Module(sources.dotted(path), path, text)
  assert len(violations(bad)) == 1


@pytest.mark.parametrize(
  ('path', 'text'),
  [
    ('rljax/tasks/new.py', 'from rljax.rewards import sandbox\nimport grain'),
    ('rljax/engine/new.py', 'from . import step\nimport optax, jax.numpy'),
    ('experiments/compare.py', 'from experiments import grpo'),
    ('experiments/recipes/new.py', 'from experiments import grpo'),
  ],
)
def test_a_right_import_passes(path, text):
  good = sources.Module(sources.dotted(path), path, text)
  assert violations(good) == []


def test_a_folder_without_a_layer_is_refused():
  with pytest.raises(ValueError, match='rljax.novel.x is in no layer'):
    violations(sources.Module('rljax.novel.x', 'rljax/novel/x.py', 'import os'))


def test_imports_need_no_extra_and_start_no_backend():
  names = [m.name for m in sources.modules().values() if m.top != 'tests']
  extras = ['pyarrow', 'reasoning_gym', 'math_verify', 'torch', 'transformers']
  program = f"""
import importlib, sys
sys.modules.update(dict.fromkeys({extras}))
for name in {names}:
  importlib.import_module(name)
"""
  path = os.pathsep.join(map(str, (sources.ROOT, sources.ROOT / 'kernels')))
  # A backend of this name cannot start, so starting any is an error.
  environment = dict(os.environ, JAX_PLATFORMS='none', PYTHONPATH=path)
  done = subprocess.run(
    [sys.executable, '-c', program],
    env=environment,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
