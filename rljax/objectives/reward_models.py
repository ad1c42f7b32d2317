"""Losses of reward models, which give one number to a response.

Each takes the rewards of the better and of the worse response, f32 [N], and
returns f32 [N], to be weighted and summed by the caller.
"""

import jax
import jax.numpy as jnp

from rljax.core.types import Array


def bradley_terry(
  chosen: Array, rejected: Array, *, margin: Array | float = 0.0
) -> Array:
  """Returns -log σ(chosen - rejected - margin) of a reward model.

  Args:
    chosen: f32 [N], rewards of the better responses.
    rejected: f32 [N].
    margin: scalar or f32 [N], by how much raters preferred it (Llama 2).

  Returns:
    f32 [N].

  Reference: Bradley and Terry, 1952; Ouyang et al., "Training language models
    to follow instructions with human feedback", 2022, arXiv:2203.02155.
  """
  _check_pair(chosen, rejected)
  return -jax.nn.log_sigmoid(chosen - rejected - margin)


def centering(chosen: Array, rejected: Array) -> Array:
  """Returns (chosen + rejected)²: keeps rewards around 0 when it is added.

  Differences alone leave the level of a reward model free. TRL advises a
  coefficient of 0.01.

  Args:
    chosen: f32 [N].
    rejected: f32 [N].

  Returns:
    f32 [N].

  Reference: Eisenstein et al., "Helping or Herding? Reward Model Ensembles
    Mitigate but do not Eliminate Reward Hacking", 2023, arXiv:2312.09244.
  """
  _check_pair(chosen, rejected)
  return jnp.square(chosen + rejected)


def _check_pair(chosen: Array, rejected: Array) -> None:
  if chosen.shape != rejected.shape or chosen.ndim != 1:
    raise ValueError(
      f'chosen{list(chosen.shape)} and rejected{list(rejected.shape)} must both'
      ' be [N]: one reward a response.'
    )
