"""Verifiers that behave in every wrong way, for the sandbox's tests."""

import os
import pathlib
import subprocess
import sys
import time


def make(**answers):
  """Returns a verifier that does what the text says."""
  del answers
  return _judge


def broken():
  """Can't be made."""
  raise KeyError('no such grader')


def _judge(example, text):
  word, _, argument = text.partition(' ')
  return _ACTIONS[word](example, argument)


def _evaluate(example, argument):
  """Runs what the policy wrote, as careless graders do."""
  del example
  return float(eval(argument))


def _hog(example, argument):
  del example, argument
  return len(bytearray(8 << 30))


def _die(example, argument):
  del example, argument
  os._exit(3)


def _spawn(example, argument):
  """Starts a program that outlives this worker, then hangs."""
  del example
  pid, session = argument.split()
  child = subprocess.Popen(
    [sys.executable, '-c', 'import time; time.sleep(600)'],
    start_new_session=session == 'new',
  )
  pathlib.Path(pid).write_text(str(child.pid))
  time.sleep(600)


_ACTIONS = {
  'equal': lambda example, argument: float(example == argument),
  'say': lambda example, argument: float(argument),
  'sleep': lambda example, argument: time.sleep(float(argument)),
  'spin': lambda example, argument: len(str(9**9**9)),
  'print': lambda example, argument: print('x' * 100000) or 1.0,
  'length': lambda example, argument: len(argument),
  'pid': lambda example, argument: os.getpid(),
  'eval': _evaluate,
  'hog': _hog,
  'die': _die,
  'spawn': _spawn,
}
