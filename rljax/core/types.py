"""Data types that travel between the phases of a training step.

Axes: P prompts, G group, B rows (sum of group sizes), S prompt positions,
T response positions, V vocabulary, D model width, N flattened tokens.
Log-probabilities are in nats. Masks are float32 in {0, 1}.
"""

from collections.abc import Mapping
import dataclasses
import enum
from typing import Any, dataclass_transform

import jax

Array = jax.Array
Params = Any
Rewards = Mapping[str, Array]


@dataclass_transform(
  kw_only_default=True,
  frozen_default=True,
  field_specifiers=(dataclasses.field,),
)
def struct(cls):
  """Returns `cls` as a frozen keyword-only dataclass that is a pytree."""
  cls = dataclasses.dataclass(frozen=True, kw_only=True)(cls)
  static = [f.name for f in dataclasses.fields(cls) if f.metadata.get('static')]
  data = [f.name for f in dataclasses.fields(cls) if f.name not in static]
  return jax.tree_util.register_dataclass(cls, data, static)


def static(default: Any) -> Any:
  """Returns a field that is part of the tree's structure, not a leaf."""
  return dataclasses.field(default=default, metadata={'static': True})


class Stop(enum.IntEnum):
  """Why a row ended."""

  LENGTH = 0  # reached its token limit
  TOKEN = 1  # sampled one of the stop ids
  EMPTY = 2  # was given no token to sample


@struct
class Prompts:
  """What the rows are conditioned on."""

  tokens: Array  # i32 [P, S], left-padded
  length: Array  # i32 [P], real tokens of each prompt
  uid: Array  # i32 [P], id of the prompt in its dataset
  media: Mapping[str, Array] = dataclasses.field(default_factory=dict)


@struct
class Batch:
  """Prompts and what verifiers and views need to know about them."""

  prompts: Prompts
  data: Mapping[str, Array]  # [P, ...] answers, privileged ids, difficulty


@struct
class Groups:
  """Which rows answer the same prompt; ragged groups are padded."""

  index: Array  # i32 [P, G], row of each member
  valid: Array  # bool [P, G]


@struct
class Rollout:
  """Facts about sampling; nothing here depends on a method.

  Index t of a `[B, T]` array speaks about `response[:, t]`. Every score and
  `logp_full` is at the row's temperature; `logp` alone includes truncation.
  """

  prompts: Prompts
  prompt_of: Array  # i32 [B], which prompt a row answers
  response: Array  # i32 [B, T], right-padded, stop token included
  length: Array  # i32 [B], tokens of the response, stop token included
  mask: Array  # f32 [B, T], 1 where the policy sampled the token
  logp: Array  # f32 [B, T], under the distribution it was drawn from
  logp_full: Array  # f32 [B, T], same temperature, without truncation
  logp_unit: Array  # f32 [B, T], temperature 1, without truncation
  unit: Array  # i32 [B, T], step, turn or event id
  seat: Array  # i32 [B], solver, challenger, critic ...
  temperature: Array  # f32 [B]
  groups: Groups
  stop: Array  # i32 [B], a `Stop`
  version: Array  # i32 [B, T], optimizer update of the weights that wrote it
  data: Mapping[str, Array]  # [P, ...], from the batch
  side: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  extra: Mapping[str, Array] = dataclasses.field(default_factory=dict)

  @property
  def uid(self) -> Array:
    """Dataset id of the prompt of each row, i32 [B]."""
    return self.prompts.uid[self.prompt_of]


@struct
class Head:
  """A vocabulary head: logits = cap(hidden @ weight.T) / temperature."""

  weight: Array  # [V, D]
  temperature: Array  # f32 [B]
  softcap: float | None = static(None)
  valid: int | None = static(None)


@struct
class Scores:
  """One reading of the responses by one model under one prompt."""

  logp: Array  # f32 [B, T]
  entropy: Array  # f32 [B, T]
  hidden: Array  # [B, T, D]
  head: Head
  value: Array | None = None  # f32 [B, T], critics
  taps: Mapping[str, Array] = dataclasses.field(default_factory=dict)


Signals = Mapping[str, Scores]


@struct
class Targets:
  """The output of credit and the input of learn: data, no gradient."""

  rollout: Rollout
  advantage: Array  # f32 [B, T]
  weight: Array  # f32 [B, T], aggregation times gate; 0 outside the mask
  old_logp: Array | None = None  # f32 [B, T]; None: the loss's own first read
  extra: Mapping[str, Array] = dataclasses.field(default_factory=dict)
  rewards: Rewards = dataclasses.field(default_factory=dict)
  observed: Mapping[str, Array] = dataclasses.field(default_factory=dict)
  views: Mapping[str, Array] = dataclasses.field(default_factory=dict)
  streams: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@struct
class TrainState:
  """Everything that changes while training, and the key that does not."""

  step: Array  # i32 [], rollout batches begun
  update: Array  # i32 [], optimizer updates applied
  params: Mapping[str, Params]  # 'policy' always
  opt_state: Any
  frozen: Mapping[str, Params]  # 'ref', teachers
  slow: Any  # tables, controllers
  key: Array  # of the run, constant


@struct
class Mean:
  """A metric as a sum and a count, divided once when it is shown."""

  total: Array  # f32 []
  count: Array  # f32 []


@struct
class Peak:
  """A metric that is a maximum over everything seen."""

  value: Array  # f32 []


Metrics = Mapping[str, Mean | Peak]
