"""Tests of what the warm start trains on."""

import types

import pytest

from rljax.runs import warmup
from rljax.tasks import task as task_lib


def test_a_tokenizer_without_stop_token_is_refused():
  task = task_lib.named('arithmetic')
  source = task.source('train')
  silent = types.SimpleNamespace(stop_ids=(), encode=lambda text: [1])
  with pytest.raises(ValueError, match='names no stop token.*--sft_steps=0'):
    warmup.Traced(task, 16).encode(source[0], silent)
