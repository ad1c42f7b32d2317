"""A verifier that fails in every way, for the sandbox of a run."""

import time

from rljax.tasks import task


def make():
  """Returns a verifier that raises, returns NaN or hangs for some problems."""
  return _verify


def _verify(example: task.Example, text: str) -> float:
  match example.uid % 8:
    case 0:
      raise KeyError('a bug')
    case 1:
      return float('nan')
    case 2:
      time.sleep(600)
  return float(text == example.answer)
