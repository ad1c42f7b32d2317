"""Which of our functions computes each case of the peers."""

from tests.peers import (
  advantages,
  correction,
  golden,
  models,
  policy,
  preferences,
  trl,
)

_MODULES = (advantages, correction, models, policy, preferences, trl)
# By the name of the peer's function.
ADAPTERS = {k: v for m in _MODULES for k, v in m.ADAPTERS.items()}
# Comparable cases that we do not match, by id, with the derivation.
DECLARED = {k: v for m in _MODULES for k, v in m.DECLARED.items()}


def evaluate(case: golden.Case, file: golden.File) -> str | None:
  """Returns what is wrong with our outputs of a case, or None."""
  adapter = ADAPTERS.get(case.fn)
  if adapter is None:
    return f'nothing computes {case.fn}'
  try:
    found = adapter(case, file)
  except Exception as error:  # a failure of one case is not that of all
    return f'{type(error).__name__}: {error}'
  return golden.failure(case, found)


def verdict(case: golden.Case, wrong: str | None) -> str:
  """Returns 'matched', 'finite', 'declared' or 'failed'."""
  if wrong and case.id in DECLARED:
    return 'declared'
  if wrong:
    return 'failed'
  return 'matched' if case.kind == 'comparable' else 'finite'
