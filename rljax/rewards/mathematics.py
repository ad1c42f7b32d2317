r"""Answers to mathematics problems: found in a text, compared with the truth.

The final answer is the content of the last \boxed{} or \fbox{} whose braces
match, or what follows the last '####' on its line; whichever comes later. A
text without one has no answer and scores 0: to grade the whole text instead
would reward naming many numbers.

`exact` compares normalized text and is quick and safe. `equivalent` also asks
math-verify (extra `tasks`) whether two expressions are equal; it sets no
timer, since timers need the main thread, and so belongs into a sandbox.
"""

import functools
import logging
import re
from typing import Any

_MAX_LETTERS = 1000  # of an answer that is compared
_BOX = re.compile(r'\\(?:boxed|fbox)\s*\{|\\.|[{}]', re.DOTALL)
_HASHES = re.compile(r'####[ \t]*(\S[^\n]*)')
_WRAPPER = re.compile(r'(?:\\(?:text|textbf|mathrm|mathbf))?(?=\{)')
_SHORT_FRACTION = re.compile(r'\\frac([0-9])([0-9])')
_THOUSANDS = re.compile(r'-?[1-9][0-9]{0,2}(?:,[0-9]{3})+(?:\.[0-9]+)?')
_SPACING = re.compile(r'\\left(?![a-z])|\\right(?![a-z])|\\[!,;: ]|\s|~')
_FRACTION = re.compile(r'\\[dtc]frac(?![a-z])')


# Words of a gold answer that is a text. math-verify would read 'yes' as a
# product of three variables and find it equal to 'sey'.
_WORD = re.compile(
  r'(?<![\\a-zA-Z])(?!sqrt|sin|cos|tan|log|exp|inf)[a-zA-Z]{3,}'
)


def final_answer(text: str) -> str | None:
  """Returns the final answer in a text; None where there is none to read."""
  box, place = _last_box(text)
  for match in _HASHES.finditer(text):
    if match.start() > place:
      box, place = match.group(1), match.start()
  return box.strip() or None


def _last_box(text: str) -> tuple[str, int]:
  """Returns the closed box that opens last and where; ('', -1) for none."""
  box, place = '', -1
  opened: list[int] = []  # where the content of a box starts; -1 for a brace
  for match in _BOX.finditer(text):
    token = match.group()
    if token == '}':
      start = opened.pop() if opened else -1
      if start > place:
        box, place = text[start : match.start()], start
    elif token.endswith('{') and token != r'\{':
      opened.append(match.end() if len(token) > 1 else -1)
  return box, place


def normalized(answer: str) -> str:
  r"""Returns an answer without what does not change its meaning.

  Spaces, $, \left, \right, a final period, thousands' commas, \text{} and
  braces around the whole go; \dfrac and \frac12 become \frac{}{}.
  """
  answer = _SPACING.sub('', answer.strip().strip('$').rstrip('.'))
  answer = _FRACTION.sub(r'\\frac', answer)
  answer = _SHORT_FRACTION.sub(r'\\frac{\1}{\2}', answer)
  while (inner := _unwrapped(answer)) is not None:
    answer = inner
  if _THOUSANDS.fullmatch(answer):
    answer = answer.replace(',', '')
  return answer


def _unwrapped(answer: str) -> str | None:
  """Returns the content of braces around a whole answer; None without."""
  wrapper = _WRAPPER.match(answer)
  if not wrapper:
    return None
  text = rf'\boxed{answer[wrapper.end() :]}'
  box, place = _last_box(text)
  return box if place + len(box) == len(text) - 1 else None


def exact(gold: str, text: str) -> float:
  """Returns 1 if the final answer in `text` is written like the gold one.

  Args:
    gold: the right answer, or a solution that marks it like a response does.
    text: a response.
  """
  answer = final_answer(text)
  if answer is None or len(answer) > _MAX_LETTERS:
    return 0.0
  return float(normalized(answer) == normalized(final_answer(gold) or gold))


def equivalent(gold: str, text: str) -> float:
  """Returns 1 if the final answer in `text` equals the gold one.

  A gold answer in words is compared as by `exact`.

  Args:
    gold: the right answer, or a solution that marks it like a response does.
    text: a response.

  Raises:
    ValueError: the gold answer can't be read.
    ImportError: math-verify is not installed.
  """
  answer = final_answer(text)
  if answer is None or len(answer) > _MAX_LETTERS:
    return 0.0
  if exact(gold, text):
    return 1.0
  gold = normalized(final_answer(gold) or gold)
  if _WORD.search(gold):
    return 0.0
  return float(_compare(gold, normalized(answer)))


def require() -> None:
  """Loads math-verify and its grammar; ImportError if it isn't installed."""
  _parsed('1')


def _compare(gold: str, answer: str) -> bool:
  """Asks math-verify. An answer that it can't parse isn't equal."""
  parse, verify = _math_verify()
  truth = _parsed(gold)
  if not truth:
    raise ValueError(f'the gold answer {gold!r} is nothing to compare with')
  said = parse(f'\\boxed{{{answer}}}', parsing_timeout=None)
  return verify(truth, said, timeout_seconds=None, raise_on_error=True)


@functools.lru_cache(maxsize=1024)
def _parsed(gold: str) -> list[Any]:
  parse, _ = _math_verify()
  return parse(f'\\boxed{{{gold}}}', parsing_timeout=None, raise_on_error=True)


@functools.cache
def _math_verify() -> tuple[Any, Any]:
  """Returns math-verify's parse and verify, loaded when first needed."""
  try:
    import math_verify
  except ImportError:
    raise ImportError(
      "'math_verify' is not installed: pip install 'rljax[tasks]'",
      name='math_verify',
    ) from None
  # It warns on every call that no timer is set.
  logging.getLogger('math_verify').setLevel(logging.ERROR)
  return math_verify.parse, math_verify.verify
