"""Reads the repository's own source: its modules and what they import."""

import ast
from collections.abc import Iterator
import dataclasses
import functools
import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Folder of each import package, relative to the root.
FOLDERS = {
  'rljax': 'rljax',
  'rljax_kernels': 'kernels/rljax_kernels',
  'experiments': 'experiments',
  'tests': 'tests',
}


@dataclasses.dataclass(frozen=True)
class Module:
  """One source file."""

  name: str  # dotted, without a trailing __init__
  path: str  # relative to the root
  text: str

  @property
  def is_package(self) -> bool:
    """Whether this is an __init__.py."""
    return self.path.endswith('__init__.py')

  @property
  def top(self) -> str:
    """The import package that it belongs to."""
    return self.name.partition('.')[0]

  @functools.cached_property
  def tree(self) -> ast.Module:
    """The syntax tree."""
    return ast.parse(self.text, self.path)


def dotted(path: str) -> str:
  """Returns the import name of a file, given relative to the root."""
  parts = list(pathlib.PurePath(path).with_suffix('').parts)
  parts = parts[parts[0] == 'kernels' :]
  return '.'.join(parts[:-1] if parts[-1] == '__init__' else parts)


def _read(path: pathlib.Path) -> Module:
  relative = str(path.relative_to(ROOT))
  return Module(dotted(relative), relative, path.read_text('utf-8'))


@functools.cache
def modules() -> dict[str, Module]:
  """Returns every module of the repository by its dotted name."""
  paths = [
    path
    for folder in FOLDERS.values()
    for path in sorted((ROOT / folder).rglob('*.py'))
  ]
  return {m.name: m for m in map(_read, paths)}


def code() -> list[Module]:
  """Returns the modules of the two installed packages."""
  return [m for m in modules().values() if m.top in ('rljax', 'rljax_kernels')]


def _base(module: Module, node: ast.ImportFrom) -> str:
  """Returns the dotted name after `from`, with its dots resolved."""
  if not node.level:
    return node.module or ''
  package = module.name.split('.')
  drop = node.level - module.is_package
  parts = package[: len(package) - drop]
  return '.'.join(parts + ([node.module] if node.module else []))


def imported(module: Module) -> Iterator[tuple[str, str | None]]:
  """Yields (dotted name, name taken from it or None) of each import."""
  for node in ast.walk(module.tree):
    if isinstance(node, ast.Import):
      yield from ((alias.name, None) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      base = _base(module, node)
      yield from ((base, alias.name) for alias in node.names)


def imports(module: Module) -> set[str]:
  """Returns the modules that it imports, anywhere in the file.

  `from a import b` counts as `a.b` when that is a module of the repository,
  and as `a` otherwise.
  """
  names = set()
  for base, name in imported(module):
    full = f'{base}.{name}'
    names.add(full if name and full in modules() else base)
  return names
