"""What setup.py says, without running setuptools."""

from collections.abc import Mapping
import functools
import re
import runpy
from typing import Any
from unittest import mock

from tests.structure import sources


@functools.cache
def metadata() -> Mapping[str, Any]:
  """Returns the arguments of setup()."""
  with mock.patch('setuptools.setup') as setup:
    runpy.run_path(str(sources.ROOT / 'setup.py'))
  return setup.call_args.kwargs


def names(field: str) -> list[str]:
  """Returns the names of the distributions that a field requires."""
  return [re.split(r'[^\w.-]', line)[0] for line in metadata()[field]]
