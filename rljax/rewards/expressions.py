"""Arithmetic and algebra that came from a policy, read without running it.

Python's own parser makes a syntax tree; only trees of known nodes pass.
"""

import ast
from collections.abc import Iterator
import fractions
import operator

_MAX_LETTERS = 1000
_MAX_EXPONENT = 100
_OPERATORS = {
  ast.Add: operator.add,
  ast.Sub: operator.sub,
  ast.Mult: operator.mul,
  ast.Div: operator.truediv,
}
_FUNCTIONS = frozenset(
  'exp log ln sqrt Abs sin cos tan sec csc cot asin acos atan sinh cosh '
  'tanh'.split()
)
_CONSTANTS = frozenset(['pi'])
_ALGEBRA = (
  *(ast.Expression, ast.BinOp, ast.UnaryOp, ast.USub, ast.UAdd, ast.Pow),
  *(ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Load),
)  # fmt: skip


def arithmetic(text: str) -> tuple[fractions.Fraction, list[int]] | None:
  """Returns the exact value of an expression and the numbers it uses.

  None where it isn't whole numbers joined by + - * / and parentheses, or
  divides by zero.
  """
  tree = _parsed(text)
  if tree is None:
    return None
  numbers: list[int] = []
  try:
    return _value(tree.body, numbers), numbers
  except (ValueError, ZeroDivisionError):
    return None


def _value(node: ast.expr, numbers: list[int]) -> fractions.Fraction:
  """Returns the value of a tree; ValueError for another kind of node."""
  if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
    left = _value(node.left, numbers)
    return _OPERATORS[type(node.op)](left, _value(node.right, numbers))
  if isinstance(node, ast.Constant) and type(node.value) is int:
    numbers.append(node.value)
    return fractions.Fraction(node.value)
  raise ValueError(f'{type(node).__name__} is no arithmetic')


def is_algebra(text: str) -> bool:
  """Whether a text is an expression of numbers, letters and functions.

  Names have one letter or are those of common functions, so that evaluating
  the text in a computer algebra system runs nothing else. Exponents are free of
  powers and of numbers above 100, which '9**9**9' isn't; a text that takes very
  long may still pass.
  """
  tree = _parsed(text)
  return tree is not None and all(map(_is_algebra, _nodes(tree)))


def _nodes(tree: ast.Expression) -> Iterator[ast.AST]:
  """Yields the nodes of a tree, a function's name within its call."""
  waiting: list[ast.AST] = [tree]
  while waiting:
    node = waiting.pop()
    yield node
    children = ast.iter_child_nodes(node)
    waiting += [c for c in children if not isinstance(node, ast.Call)]
    if isinstance(node, ast.Call):
      waiting += node.args


def _is_algebra(node: ast.AST) -> bool:
  if isinstance(node, ast.Constant):
    return type(node.value) in (int, float)
  if isinstance(node, ast.Name):
    return len(node.id) == 1 or node.id in _CONSTANTS
  if isinstance(node, ast.Call):
    known = isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS
    return known and len(node.args) == 1 and not node.keywords
  if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
    return all(map(_is_small, ast.walk(node.right)))
  return isinstance(node, _ALGEBRA)


def _is_small(node: ast.AST) -> bool:
  """Whether a node may be part of an exponent."""
  if isinstance(node, ast.Constant):
    value = node.value
    return isinstance(value, int | float) and value <= _MAX_EXPONENT
  return not isinstance(node, ast.Pow | ast.Call)


def _parsed(text: str) -> ast.Expression | None:
  """Returns the tree of an expression; None for anything else."""
  if len(text) > _MAX_LETTERS or not text.isascii():
    return None
  try:
    return ast.parse(text.strip(), mode='eval')
  except (SyntaxError, ValueError, RecursionError, MemoryError):
    return None
