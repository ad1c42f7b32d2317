"""Kernels compiled for chips that are not here: memory and collectives."""

import re

import pytest

from rljax_kernels import chips

pytestmark = pytest.mark.aot

GIB = 2**30


def compiled_for(chip, implementation, **options):
  if lacking := chips.missing(chip):
    pytest.skip(lacking)
  return chips.compiled_for(chip, implementation, **options)


def temporaries(compiled):
  return compiled.memory_analysis().temp_size_in_bytes / GIB


@pytest.mark.parametrize('kl', [False, True])
@pytest.mark.parametrize('chip', ['v5e', 'v5p', 'v6e', 'v7x'])
def test_kernels(chip, kl):
  found = compiled_for(chip, None, kl=kl)
  assert temporaries(found) <= (0.2 if kl else 0.15)
  # Forward, and one or two backward kernels.
  assert found.as_text().count('custom_call_target="tpu_custom_call"') >= 2


def test_vocabulary_blocks():
  assert temporaries(compiled_for('v5e', 'xla_vocab')) <= 0.4


def test_what_a_gpu_runs():
  assert temporaries(compiled_for('h100', None)) <= 0.6


def test_four_chips():
  found = compiled_for('v5e', None, tensor=4)
  assert temporaries(found) <= 80 / 1024
  reduced = re.findall(r' all-reduce(?:-start)?\(', found.as_text())
  assert len(reduced) <= 3
  assert ' all-gather(' not in found.as_text()
