"""What a misspelled name may have meant."""

from collections.abc import Iterable
import difflib

# Choices that fit into a line.
_FEW = 12


def nearest(word: str, choices: Iterable[str]) -> str:
  """Returns the end of a sentence that says there is no such word.

  Args:
    word: what was written.
    choices: what is known.

  Returns:
    '; did you mean ...?' if a choice is close, else '; known: ...', or just a
    full stop where they are too many to list.
  """
  choices = list(choices)
  close = difflib.get_close_matches(word, choices, n=1, cutoff=0.5)
  if close:
    return f'; did you mean {close[0]!r}?'
  return f'; known: {", ".join(choices)}.' if len(choices) <= _FEW else '.'
