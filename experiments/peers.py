r"""The methods of papers and of other libraries, by name.

Trains with the credit and loss that a paper states or that a library has by
default at one version; `rljax/objectives/presets.py` says which, part by part.

Fixed by the paper: everything that `--method` names.
Chosen here: what a preset leaves open, such as group size, rate and epochs.

Delta on GRPO: credit, loss.
Reduces to GRPO with `--method=grpo_paper`.

  python -m experiments.peers --method=trl_dapo --steps=50
"""

import dataclasses
import inspect
from typing import Literal

from rljax.engine import presets as engine_presets
from rljax.engine.method import Method
from rljax.objectives import presets
from rljax.runs import loop, recipe, run

Name = Literal[
  'cispo_minimax',
  'cispo_scalerl',
  'dapo',
  'dr_grpo',
  'gspo_paper',
  'grpo_paper',
  'nemo_grpo',
  'openrlhf_reinforce_pp',
  'sapo_paper',
  'tinker_importance',
  'trl_dapo',
  'trl_grpo',
  'verl_grpo',
]


@dataclasses.dataclass(frozen=True)
class Config(recipe.Config):
  """Whose method."""

  method: Name = run.field('verl_grpo', 'whose credit and loss')


def preset(config: Config) -> presets.Preset:
  """Returns the preset that the flag names."""
  make = getattr(presets, config.method)
  limited = 'max_tokens' in inspect.signature(make).parameters
  return make(max_tokens=config.max_tokens) if limited else make()


def method(config: Config) -> Method:
  """Returns the preset on the seams of the step."""
  return engine_presets.method(preset(config))


if __name__ == '__main__':
  run.main(Config, lambda config: loop.train(config, method))
