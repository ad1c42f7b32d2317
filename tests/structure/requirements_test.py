"""Every core requirement is used by code that the default tests import."""

import ast

import pytest

from tests.structure import packaging, sources

# Import names that differ from the name of the distribution.
IMPORT_NAMES = {'absl-py': 'absl', 'orbax-checkpoint': 'orbax.checkpoint'}
NOT_DEFAULT = {'slow', 'aot', 'peers', 'tasks'}


def is_default(module: sources.Module) -> bool:
  """Whether a test module is collected by a plain run of pytest."""
  marks = [
    ast.unparse(node.value)
    for node in module.tree.body
    if isinstance(node, ast.Assign)
    and ast.unparse(node).startswith('pytestmark')
  ]
  return not any(name in mark for mark in marks for name in NOT_DEFAULT)


def reached(starts: set[str]) -> set[str]:
  """Returns the modules of the repository that importing some leads to."""
  modules = sources.modules()
  found: set[str] = set()
  fresh = starts & modules.keys()
  while fresh:
    found |= fresh
    used = set().union(*(sources.imports(modules[name]) for name in fresh))
    fresh = (used & modules.keys()) - found
  return found


def users(requirement: str) -> set[str]:
  """Returns the modules outside tests/ that import a requirement."""
  wanted = IMPORT_NAMES.get(requirement, requirement)
  return {
    module.name
    for module in sources.modules().values()
    if module.top != 'tests'
    and any(
      f'{base}.{name}.'.startswith(f'{wanted}.')
      for base, name in sources.imported(module)
    )
  }


@pytest.mark.parametrize('requirement', packaging.names('install_requires'))
def test_is_used_by_default_tests(requirement):
  tests = [m for m in sources.modules().values() if m.path.endswith('_test.py')]
  default = reached({m.name for m in tests if is_default(m)})
  assert users(requirement), f'nothing imports {requirement}'
  assert users(requirement) & default, f'no default test imports {requirement}'


def test_a_requirement_that_nobody_uses_is_found():
  assert users('left-pad') == set()
  assert 'rljax.core.masked' in users('jax')


def test_marked_modules_do_not_count():
  text = 'import pytest\npytestmark = [pytest.mark.slow]\n'
  slow = sources.Module('tests.x_test', 'tests/x_test.py', text)
  assert not is_default(slow)
