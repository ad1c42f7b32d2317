"""The limits of the style sheet that a program can check."""

import ast
from collections.abc import Callable, Iterable, Iterator
import re
import statistics

import pytest

from tests.structure import sources

LONGEST_FILE = 500
LONGEST_BODY, LONG_BODY, LONG_SHARE, MEDIAN_BODY = 60, 35, 0.05, 12
# Public names below these that take or return arrays state shapes.
SHAPED = ('rljax.core', 'rljax.objectives', 'rljax_kernels')
NAMES_TO_IMPORT = {'struct', 'targets'}

# Split so that this file passes its own test.
BANNED = {
  'unfinished': r'\b(?-i:TO' + 'DO|FIX' + r'ME)\b',
  'about how it was made': (
    r'\b(?:this|previous|next|last|later) ses' + r'sion\b|\bissue #?\d'
    r'|\bamend' + r'ments?\b|\bdesign\.' + r'md|\bpain[_ ]lo' + r'g\b'
    r'|/wo' + r'rk/|\.\./sha' + r'red|\bchat' + r'gpt\b|\bclau' + r'de\b'
  ),
  'a checker told to look away': (
    '#' + ' noqa|type:' + ' ignore|pyright:' + ' ignore'
  ),
  'British spelling': (
    'behavi' + 'our|colo' + 'ur|neighbo' + 'ur|favo' + 'ur|artef' + 'act|'
    'cent' + 're[ds]?\\b|(?:normal|optim|initial|serial|random|regular|quant'
    '|general|penal|minim|maxim|organ)is' + '(?:e[ds]?|ing|ation)\\b'
  ),
}

Definition = ast.FunctionDef | ast.ClassDef


def definitions(
  node: ast.AST, public: bool = True
) -> Iterator[tuple[Definition, bool]]:
  """Yields each function and class below `node`, and whether it is public."""
  for child in ast.iter_child_nodes(node):
    if isinstance(child, Definition):
      shown = public and not child.name.startswith('_')
      yield child, shown
      yield from definitions(child, shown and isinstance(child, ast.ClassDef))
    else:
      yield from definitions(child, public)


def body_length(node: ast.FunctionDef, lines: list[str]) -> int:
  """Returns the lines of a body that are neither blank nor docstring."""
  body = node.body[ast.get_docstring(node) is not None :]
  if not body:
    return 0
  span = lines[body[0].lineno - 1 : body[-1].end_lineno]
  return sum(bool(line.strip()) for line in span)


def body_lengths(module: sources.Module) -> dict[str, int]:
  """Returns the length of every function, by 'path:line name'."""
  lines = module.text.splitlines()
  return {
    f'{module.path}:{node.lineno} {node.name}': body_length(node, lines)
    for node, _ in definitions(module.tree)
    if isinstance(node, ast.FunctionDef)
  }


def too_long(module: sources.Module) -> Iterator[str]:
  """Long files and functions."""
  if (n := len(module.text.splitlines())) >= LONGEST_FILE:
    yield f'{module.path} has {n} lines'
  for name, n in body_lengths(module).items():
    if n > LONGEST_BODY:
      yield f'{name} has a body of {n} lines'


def undocumented(module: sources.Module) -> Iterator[str]:
  """Public things without a docstring, or without the shapes in it."""
  if module.tree.body and not ast.get_docstring(module.tree):
    yield f'{module.path} has no docstring'
  for node, public in definitions(module.tree):
    doc = ast.get_docstring(node)
    where = f'{module.path}:{node.lineno} {node.name}'
    if public and not doc:
      yield f'{where} has no docstring'
    elif public and _handles_arrays(module, node) and '[' not in str(doc):
      yield f'{where} takes or returns arrays: say shapes, such as [B, T]'


def _handles_arrays(module: sources.Module, node: Definition) -> bool:
  """Whether shapes belong in the docstring of a function."""
  if not module.name.startswith(SHAPED) or isinstance(node, ast.ClassDef):
    return False
  parts = ast.walk(node.args), ast.walk(node.returns or node.args)
  names = (getattr(n, 'id', getattr(n, 'attr', '')) for p in parts for n in p)
  return 'Array' in names


def printing(module: sources.Module) -> Iterator[str]:
  """Calls of print, which a library leaves to its caller."""
  for node in ast.walk(module.tree):
    if isinstance(node, ast.Call) and ast.unparse(node.func) == 'print':
      yield f'{module.path}:{node.lineno} prints'


def names_imported(module: sources.Module) -> Iterator[str]:
  """Functions of ours imported by name; types are fine."""
  for base, name in sources.imported(module):
    ours = base.partition('.')[0] in sources.FOLDERS and not module.is_package
    if ours and name and f'{base}.{name}' not in sources.modules():
      if not (name[0].isupper() or name in NAMES_TO_IMPORT):
        yield f'{module.path} imports {name}: import {base} instead'


def misnamed(module: sources.Module) -> Iterator[str]:
  """Modules named for being shared and not for what they hold."""
  if {'utils', 'util', 'helpers', 'misc', 'common'} & {*module.name.split('.')}:
    yield f'{module.path}: name a module for what is in it'


def banned_words(path: str, text: str) -> Iterator[str]:
  """Words that do not belong in the repository."""
  for number, line in enumerate(text.splitlines(), 1):
    for what, pattern in BANNED.items():
      if found := re.search(pattern, line, re.IGNORECASE):
        yield f'{path}:{number} {found.group()!r}: {what}'


def _expect_none(problems: Iterable[str]) -> None:
  """Fails with every problem on a line of its own."""
  lines = list(problems)
  assert not lines, '\n'.join(['', *lines])


def _everything(check: Callable, modules) -> Iterator[str]:
  return (problem for module in modules for problem in check(module))


@pytest.mark.parametrize('check', [undocumented, printing])
def test_libraries(check):
  _expect_none(_everything(check, sources.code()))


@pytest.mark.parametrize('check', [too_long, names_imported, misnamed])
def test_all_code(check):
  modules = [m for m in sources.modules().values() if m.top != 'tests']
  _expect_none(_everything(check, modules))


def test_tests_are_not_long_either():
  modules = [m for m in sources.modules().values() if m.top == 'tests']
  _expect_none(_everything(too_long, modules))


def test_functions_are_short():
  lengths = [n for m in sources.code() for n in body_lengths(m).values() if n]
  long = sum(n > LONG_BODY for n in lengths) / len(lengths)
  assert statistics.median(lengths) <= MEDIAN_BODY
  assert long <= LONG_SHARE, f'{long:.1%} are over {LONG_BODY} lines'


def test_words():
  patterns = '*.md', 'BUILD', '*.bazel', '*.toml', '.ci/*', 'setup.py'
  texts = [p for pattern in patterns for p in sources.ROOT.glob(pattern)]
  texts += sources.ROOT.glob('[kert]*/**/*.md')
  found = {str(p.relative_to(sources.ROOT)): p.read_text() for p in texts}
  found |= {m.path: m.text for m in sources.modules().values()}
  _expect_none(
    line for path, text in found.items() for line in banned_words(path, text)
  )


def _module(text: str, path: str = 'rljax/core/new.py') -> sources.Module:
  return sources.Module(sources.dotted(path), path, text)


ARRAYS = """'''Doc.'''
def total(x: jax.Array, *, axis: int = 0) -> float:
  '''Returns the sum.'''
class Box:
  '''Doc.'''
  def size(self) -> Array:
    '''Returns the size, [B].'''
  def _hidden(self) -> Array: ...
"""


@pytest.mark.parametrize(
  ('check', 'text', 'count'),
  [
    (undocumented, 'x = 1', 1),
    (undocumented, "'''Doc.'''\ndef f(): ...\nclass A:\n  def g(): ...", 3),
    (undocumented, "'''Doc.'''\ndef f():\n  '''Doc.'''\n  def g(): ...", 0),
    (undocumented, ARRAYS, 1),
    (printing, 'if x:\n  print(x)\nconsole.print(x)', 1),
    (names_imported, 'from rljax.core.types import Array, static', 1),
    (names_imported, 'from rljax.core import types', 0),
    (too_long, 'x = 1\n' * LONGEST_FILE, 1),
    (too_long, 'def f():\n' + '  x = 1\n\n' * LONGEST_BODY, 0),
    (too_long, 'def f():\n' + '  x = 1\n' * (LONGEST_BODY + 1), 1),
  ],
)
def test_bad_source_is_found(check, text, count):
  assert len(list(check(_module(text)))) == count


def test_bad_names_are_found():
  assert list(misnamed(_module('', 'rljax/core/utils.py')))
  assert not list(misnamed(_module('', 'rljax/core/masked.py')))


@pytest.mark.parametrize(
  'line',
  [
    '# TO' + 'DO: later',
    'x = f()  # type:' + ' ignore[arg-type]',
    'as in iss' + 'ue #12',
    '/wo' + 'rk/main/x.py',
    'normal' + 'ised by its mean',
    'the behavi' + 'our policy',
  ],
)
def test_banned_words_are_found(line):
  assert list(banned_words('x.py', f'fine\n{line}\nfine'))


@pytest.mark.parametrize(
  'line',
  ['optimistic prior', 'the issue is', 'a session of pytest', 'center of mass'],
)
def test_other_words_are_not(line):
  assert not list(banned_words('x.py', line))


def test_docstring_is_not_counted_as_body():
  text = 'def f():\n  """Doc.\n\n  More.\n  """\n\n  # Why.\n  return 1\n'
  (length,) = body_lengths(_module(text)).values()
  assert length == 1
