"""Compares a file of other libraries' numbers with ours.

  python -m tests.peers tests/data/peers_torch.npz [PREFIX]

Prints a line for each failure and a last line of counts; the exit status is 1
if a case failed. With a prefix, only cases whose id starts with it are run.
"""

import collections
import sys

from tests import environment

environment.prepare()

from tests.peers import adapters, golden


def main(path: str, prefix: str = '') -> int:
  """Evaluates the cases of a file; returns the exit status."""
  file = golden.File(path)
  cases = [case for case in file.cases if case.id.startswith(prefix)]
  counts: collections.Counter[str] = collections.Counter()
  for case in cases:
    verdict, wrong = adapters.evaluate(case, file)
    counts[verdict] += 1
    if verdict == 'failed':
      sys.stdout.write(f'{case.kind} {case.id}: {wrong}\n')
  names = ('matched', 'finite', 'declared', 'failed')
  text = ' '.join(f'{name} {counts[name]}' for name in names)
  sys.stdout.write(f'{text} of {len(cases)}\n')
  return 1 if counts['failed'] else 0


if __name__ == '__main__':
  sys.exit(main(*sys.argv[1:]))
