"""Supervised fine-tuning on the same machinery as the step.

A worked response is a rollout that nobody sampled: it is scored and
differentiated by the same functions, with the log-prob as the objective.
"""

from collections.abc import Callable
import dataclasses

import jax.numpy as jnp
from jax.sharding import Mesh
import optax

from rljax.core import groups
from rljax.core.types import (
  Array,
  Batch,
  Metrics,
  Rollout,
  Stop,
  Targets,
  TrainState,
)
from rljax.engine import compiling, sampling, sharding, step
from rljax.engine.method import Method
from rljax.engine.seams import TokenLoss
from rljax.models import decoder
from rljax.objectives import weights


def given(batch: Batch, response: Array, length: Array) -> Rollout:
  """Returns responses that were given, one a prompt, as a rollout.

  Args:
    batch: P prompts and their data.
    response: i32 [P, T].
    length: i32 [P], tokens of each response, stop token included.
  """
  rows, size = response.shape
  none = jnp.zeros((rows, size), jnp.float32)
  inside = jnp.arange(size)[None] < length[:, None]
  return Rollout(
    prompts=batch.prompts,
    prompt_of=jnp.arange(rows),
    response=response,
    length=length,
    mask=inside.astype(jnp.float32),
    logp=none,
    logp_full=none,
    logp_unit=none,
    unit=jnp.zeros((rows, size), jnp.int32),
    seat=jnp.zeros(rows, jnp.int32),
    temperature=jnp.ones(rows, jnp.float32),
    groups=groups.uniform(rows, 1),
    stop=jnp.full(rows, Stop.TOKEN, jnp.int32),
    version=jnp.full((rows, size), -1, jnp.int32),
    data=batch.data,
  )


def make_sft(
  model: decoder.Model,
  optimizer: optax.GradientTransformation,
  *,
  prompts: int,
  mesh: Mesh | None = None,
  microbatches: int = 1,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
  """Returns one compiled step of maximum likelihood.

  The batch's `data` holds `trace` i32 [P, T] and `trace_length` i32 [P]. The
  state is donated.

  Args:
    model: the policy.
    optimizer: any optax chain.
    prompts: P, of a batch over all devices.
    mesh: over which rows and parameters are split.
    microbatches: parts that each gradient is added up from.
  """
  method = Method(
    phase=sampling.Phase(max_tokens=1, group_size=1), loss=TokenLoss(_logp)
  )
  step.check_split(method, prompts, mesh, microbatches, 'sft_prompts')
  learn = step.make_step(
    method,
    {'policy': model},
    optimizer,
    lambda rollout: {},
    prompts=prompts,
    mesh=mesh,
    microbatches=microbatches,
  ).learn

  def sft(state: TrainState, batch: Batch):
    batch = sharding.constrain_rows(batch, mesh)
    data = {k: v for k, v in batch.data.items() if not k.startswith('trace')}
    rollout = given(
      dataclasses.replace(batch, data=data),
      batch.data['trace'],
      batch.data['trace_length'],
    )
    targets = Targets(
      rollout=rollout,
      advantage=rollout.mask,
      weight=weights.token_mean(rollout.mask),
    )
    state, metrics = learn(state, targets)
    # Nobody sampled these rows: there is no behavior to disagree with.
    return state, {k: v for k, v in metrics.items() if k != 'mismatch/k3'}

  return compiling.jit(sft, mesh, donate_argnums=0)


def _logp(stats, data, ctl):
  del data, ctl
  return stats['logp'], {}
