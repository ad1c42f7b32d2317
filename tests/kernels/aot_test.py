"""Kernels compiled for TPUs that are not here: memory and collectives."""

import importlib.util
import os
import re

import pytest

from rljax_kernels import bench

pytestmark = [
  pytest.mark.aot,
  pytest.mark.skipif(
    importlib.util.find_spec('libtpu') is None,
    reason='libtpu, which compiles for TPUs, is not installed',
  ),
]

GIB = 2**30


@pytest.fixture(autouse=True, scope='module')
def _alone():
  # Another process may hold the library, and there is no machine to ask.
  os.environ['ALLOW_MULTIPLE_LIBTPU_LOAD'] = '1'
  os.environ['TPU_SKIP_MDS_QUERY'] = '1'


def temporaries(compiled):
  return compiled.memory_analysis().temp_size_in_bytes / GIB


@pytest.mark.parametrize('kl', [False, True])
@pytest.mark.parametrize('chip', ['v5e', 'v5p', 'v6e'])
def test_kernels(chip, kl):
  found = bench.compiled_for(chip, None, kl=kl)
  assert temporaries(found) <= (0.2 if kl else 0.15)
  # Forward, and one or two backward kernels.
  assert found.as_text().count('custom_call_target="tpu_custom_call"') >= 2


def test_vocabulary_blocks():
  assert temporaries(bench.compiled_for('v5e', 'xla_vocab')) <= 0.4


def test_four_chips():
  found = bench.compiled_for('v5e', None, tensor=4)
  assert temporaries(found) <= 80 / 1024
  reduced = re.findall(r' all-reduce(?:-start)?\(', found.as_text())
  assert len(reduced) <= 3
  assert ' all-gather(' not in found.as_text()
