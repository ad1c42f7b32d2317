"""BUILD names every source file once, and the dependencies there are."""

from collections.abc import Mapping
import json

import pytest
import starlark

from tests.structure import sources

# Its dependencies are all libraries, whatever its empty source imports.
UMBRELLA = 'rljax'
Targets = Mapping[str, Mapping]


def _matches(pattern: str) -> set[str]:
  """Returns the files that a Bazel glob pattern matches."""
  full = pattern + '/*' if pattern.endswith('**') else pattern
  found = (p for p in sources.ROOT.glob(full) if p.is_file())
  return {str(p.relative_to(sources.ROOT)) for p in found}


def glob(include: list[str], exclude: list[str] | None = None) -> list[str]:
  """Stands in for Bazel's glob."""
  found = set().union(*map(_matches, include))
  found -= set().union(*map(_matches, exclude or []))
  return sorted(f for f in found if '__pycache__' not in f)


def evaluate(text: str) -> dict[str, dict]:
  """Returns the attributes of each target that a BUILD file declares."""
  targets: dict[str, dict] = {}

  def declare(rule: str):
    def call(name: str, **attributes):
      if name in targets:
        raise ValueError(f'two targets are called {name}')
      targets[name] = {'rule': rule, 'deps': [], **attributes}

    return call

  rules, module = starlark.Module(), starlark.Module()
  for rule in ('py_library', 'py_binary', 'py_test'):
    rules.add_callable(rule, declare(rule))
  loaded = rules.freeze()
  module.add_callable('glob', glob)
  module.add_callable('package', lambda **_: None)
  tree = starlark.parse('BUILD', text, starlark.Dialect.standard())
  loader = starlark.FileLoader(lambda _: loaded)
  starlark.eval(module, tree, starlark.Globals.standard(), loader)
  return targets


def owners(targets: Targets) -> dict[str, list[str]]:
  """Returns the targets that each file of the repository is in."""
  found: dict[str, list[str]] = {
    module.path: [] for module in sources.modules().values()
  }
  for name, target in targets.items():
    for path in target['srcs']:
      found.setdefault(path, []).append(name)
  return found


def needs(targets: Targets) -> dict[str, set[str]]:
  """Returns the targets that each target's files import."""
  owner = {path: names[0] for path, names in owners(targets).items() if names}
  modules = {m.name: m for m in sources.modules().values() if m.path in owner}
  found: dict[str, set[str]] = {name: set() for name in targets}
  for module in modules.values():
    used = sources.imports(module) & modules.keys()
    found[owner[module.path]] |= {owner[modules[n].path] for n in used}
  return {name: used - {name} for name, used in found.items()}


def key(name: str, target: Mapping) -> str:
  """Returns the entry of DEPS that a target uses."""
  if target['rule'] == 'py_library':
    return name
  return name.rpartition('/')[0] if name.startswith('tests/') else 'experiments'


def table(targets: Targets) -> dict[str, set[str]]:
  """Returns what DEPS should be."""
  used = needs(targets)
  right: dict[str, set[str]] = {}
  for name, target in targets.items():
    entry = key(name, target)
    near = {n for n in used[name] if key(n, targets[n]) == entry}
    right.setdefault(entry, set()).update(used[name] - near)
    if near:
      right[name] = near
  return right


def expected(name: str, target: Mapping, right: Mapping) -> set[str]:
  """Returns the dependencies that a target should have."""
  found = right[key(name, target)] | right.get(name, set())
  # Every test runs under conftest.py, which is in `tests`.
  return found | {'tests'} if target['rule'] == 'py_test' else found


def advice(targets: Targets) -> list[str]:
  """Returns the lines that DEPS should have and has not."""
  right = table(targets)
  right[UMBRELLA] = {n for n in targets if n.startswith(f'{UMBRELLA}/')}
  lines = set()
  for name, target in targets.items():
    want = {f':{dep}' for dep in expected(name, target, right)}
    if want != set(target['deps']) or len(want) != len(target['deps']):
      for entry in {key(name, target), name} & right.keys():
        deps = sorted(f':{dep}' for dep in right[entry] - {'tests'})
        lines.add(f'    "{entry}": {json.dumps(deps)},')
  return sorted(lines)


@pytest.fixture(scope='module')
def targets() -> Targets:
  return evaluate((sources.ROOT / 'BUILD').read_text())


def test_each_file_is_in_one_target(targets):
  bad = [f'{p}: {n}' for p, n in owners(targets).items() if len(n) != 1]
  assert not bad, '\n'.join(['DEPS of BUILD may lack a folder:', *bad])


def test_dependencies_are_the_imports(targets):
  lines = advice(targets)
  assert not lines, '\n'.join(
    ['DEPS of BUILD should have these lines:', *lines]
  )


def test_every_test_and_experiment_has_a_target(targets):
  rules = {path: targets[n[0]]['rule'] for path, n in owners(targets).items()}
  tests = {path for path, rule in rules.items() if rule == 'py_test'}
  programs = {path for path, rule in rules.items() if rule == 'py_binary'}
  assert tests == set(glob(['tests/**/*_test.py']))
  assert programs == set(glob(['experiments/**/*.py'])) - {
    'experiments/__init__.py'
  }


def test_a_file_in_two_targets_is_found(targets):
  twice = {**targets, 'more': {'srcs': ['setup.py', 'rljax/__init__.py']}}
  assert owners(twice)['rljax/__init__.py'] == ['rljax', 'more']


@pytest.mark.parametrize('change', ['drop', 'add'])
def test_a_wrong_dependency_is_found(targets, change):
  name = 'tests/structure/build_test'
  right = targets[name]['deps']
  wrong = [] if change == 'drop' else [*right, ':rljax/core']
  bad = advice({**targets, name: {**targets[name], 'deps': wrong}})
  assert any('"tests/structure": ' in line for line in bad)


def test_a_name_used_twice_is_refused():
  library = 'py_library(name = "a", srcs = [])\n'
  with pytest.raises(Exception, match='two targets are called a'):
    evaluate(f'load("rules", "py_library")\n{library}{library}')
