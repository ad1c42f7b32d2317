"""Which of our functions computes each case of the peers."""

from tests.peers import (
  advantages,
  correction,
  divergence,
  golden,
  models,
  policy,
  preferences,
  trl,
)

_MODULES = (
  advantages,
  correction,
  divergence,
  models,
  policy,
  preferences,
  trl,
)
# By the name of the peer's function.
ADAPTERS = {k: v for m in _MODULES for k, v in m.ADAPTERS.items()}
# Comparable cases that we do not match, by id, with the derivation.
DECLARED = {k: v for m in _MODULES for k, v in m.DECLARED.items()}


def evaluate(case: golden.Case, file: golden.File) -> tuple[str, str | None]:
  """Returns how a case fares, and what is wrong with our outputs, or None.

  It has 'failed' or is 'matched', 'finite' (a case whose numbers in the peer
  are not) or 'declared'.
  """
  adapter = ADAPTERS.get(case.fn)
  if adapter is None:
    return 'failed', f'nothing computes {case.fn}'
  try:
    found = adapter(case, file)
  except Exception as error:  # a failure of one case is not that of all
    return 'failed', f'{type(error).__name__}: {error}'
  wrong, declared = golden.failure(case, found), DECLARED.get(case.id)
  if wrong is None:
    return ('matched' if case.kind == 'comparable' else 'finite'), None
  if declared and golden.failure(case, found, declared) is None:
    return 'declared', wrong
  return 'failed', wrong
