"""Every preset can be named by a flag."""

import dataclasses
import typing

import pytest

from experiments import peers
from rljax.engine import presets as engine_presets
from rljax.engine.method import Method
from rljax.objectives import presets
from rljax.runs import run
from tests import contracts

NAMES = typing.get_args(peers.Name)


def test_all_presets_have_a_flag():
  assert set(NAMES) == set(contracts.public(presets))


@pytest.mark.parametrize('name', NAMES)
def test_the_flag_makes_its_method(name):
  got = []
  run.main(peers.Config, got.append, ['peers.py', f'--method={name}'])
  made = peers.method(got[0])
  assert isinstance(made, Method)
  reads = engine_presets.reads_reference(peers.preset(got[0]))
  assert bool(made.views) == reads


def test_the_limit_is_that_of_the_run():
  config = peers.Config(method='dapo', max_tokens=20)
  shape = peers.preset(config).shape
  assert shape is not None
  # The last fifth of 20 tokens, by hand.
  assert shape(contracts.F32([16, 18, 20])).tolist() == [0.0, -0.5, -1.0]
  other = dataclasses.replace(config, max_tokens=10)
  assert peers.preset(other).shape(contracts.F32([10])).tolist() == [-1.0]


def test_unknown_names_are_refused(capsys):
  with pytest.raises(SystemExit):
    run.main(peers.Config, lambda config: None, ['p.py', '--method=verl_gropo'])
  assert 'verl_grpo' in capsys.readouterr().err
