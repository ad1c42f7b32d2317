"""From targets to gradients: micro-batches that add up exactly.

Weights and credit are data, computed on the whole batch, so the gradient of a
batch is the sum over any parts of it.
"""

from collections.abc import Callable
import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from rljax.core import groups
from rljax.core.types import (
  Array,
  Mean,
  Metrics,
  Params,
  Peak,
  Rollout,
  Targets,
)
from rljax.engine import scoring, sharding
from rljax.engine.seams import Ctl, RowLoss, TokenLoss
from rljax.models import decoder
import rljax_kernels


class Reading(NamedTuple):
  """One differentiable forward pass."""

  hidden: Array  # [B, T, D]
  weight: Array  # [V, D]
  pull: Callable  # cotangents of (hidden, weight) -> (gradient,)


class Learned(NamedTuple):
  """The gradient of a batch, and sums over it."""

  grads: Params
  loss: Array  # f32 []
  metrics: Metrics


def differentiate(
  model: decoder.Model, params: Params, rollout: Rollout
) -> Reading:
  """Returns the forward pass over a rollout and its pullback."""
  (hidden, weight), pull = jax.vjp(
    lambda p: scoring.read(model, p, rollout), params
  )
  return Reading(hidden, weight, pull)


def gradient(
  model: decoder.Model,
  loss: TokenLoss | RowLoss,
  reading: Reading,
  targets: Targets,
  ctl: Ctl,
  mesh: Mesh | None,
) -> Learned:
  """Returns the gradient of one part of a batch.

  Args:
    model: the policy.
    loss: what to differentiate.
    reading: of the rows of `targets`.
    targets: B rows.
    ctl: where the run stands.
    mesh: over which rows and vocabulary are split.
  """
  if isinstance(loss, TokenLoss):
    return _token_gradient(model, loss, reading, targets, ctl, mesh)
  return _row_gradient(model, loss, reading, targets, ctl, mesh)


def _token_gradient(model, loss, reading, targets, ctl, mesh):
  rollout, flat = targets.rollout, scoring.flat
  data = {
    'advantage': targets.advantage,
    'behavior_logp': rollout.logp_full,
    **targets.extra,
  }
  if targets.old_logp is not None:
    data['old_logp'] = targets.old_logp

  def fn(stats, data):
    # On the first update the old policy is the one that is being read.
    own = jax.lax.stop_gradient(stats['logp'])
    data = {'old_logp': own, **data}
    objective, seen = loss.fn(stats, data, ctl)
    gap = own - data['behavior_logp']
    return objective, {
      'entropy': stats['entropy'],
      'mismatch/k3': jnp.expm1(gap) - gap,
      **seen,
    }

  head = scoring.head_of(model, reading.weight, rollout.temperature)
  sums = rljax_kernels.token_loss(
    fn,
    flat(reading.hidden),
    reading.weight,
    flat(rollout.response),
    flat(targets.weight),
    {name: flat(x) for name, x in data.items()},
    temperature=flat(scoring.per_token(rollout.temperature, rollout.response)),
    softcap=head.softcap,
    valid=head.valid,
    layout=sharding.layout(mesh, reading.weight.shape[0]),
  )
  hidden = sums.d_hidden.reshape(reading.hidden.shape)
  (grads,) = reading.pull((hidden, sums.d_unembed))
  live = jnp.sum(targets.weight != 0).astype(jnp.float32)
  metrics = {k: Mean(total=v, count=live) for k, v in sums.aux.items()}
  return Learned(grads, sums.loss, metrics)


def _row_gradient(model, loss, reading, targets, ctl, mesh):
  rollout = targets.rollout

  def total(hidden, weight):
    read = scoring.scores(model, hidden, weight, rollout, mesh)
    return loss.fn({'policy': read}, targets, ctl)

  (value, metrics), cotangent = jax.value_and_grad(total, (0, 1), has_aux=True)(
    reading.hidden, reading.weight
  )
  (grads,) = reading.pull(cotangent)
  return Learned(grads, value, metrics)


def accumulate(
  model: decoder.Model,
  loss: TokenLoss | RowLoss,
  params: Params,
  targets: Targets,
  ctl: Ctl,
  mesh: Mesh | None,
  parts: int,
) -> Learned:
  """Returns the gradient of all rows, computed `parts` micro-batches at a time.

  Args:
    model: the policy.
    loss: what to differentiate.
    params: of `model`.
    targets: of P prompts; `parts` must divide P.
    ctl: where the run stands.
    mesh: over which rows and vocabulary are split.
    parts: how many micro-batches.
  """

  def one(part: Targets) -> Learned:
    part = sharding.constrain_rows(part, mesh)
    reading = differentiate(model, params, part.rollout)
    return gradient(model, loss, reading, part, ctl, mesh)

  if parts == 1:
    return one(targets)
  prompts = targets.rollout.prompts.uid.shape[0]
  # Strided, so that each part draws equally from each shard of the rows.
  orders = jnp.arange(prompts).reshape(prompts // parts, parts).T
  start = jax.tree.map(
    lambda x: jnp.zeros(x.shape, x.dtype),
    jax.eval_shape(lambda: one(select(targets, orders[0]))),
  )

  def body(total, order):
    return add(total, one(select(targets, order))), None

  return jax.lax.scan(body, start, orders)[0]


def add(a: Learned, b: Learned) -> Learned:
  """Returns the sum of two parts of a batch."""
  return Learned(
    jax.tree.map(jnp.add, a.grads, b.grads),
    a.loss + b.loss,
    {k: _add_metric(v, b.metrics[k]) for k, v in a.metrics.items()},
  )


def _add_metric(a: Mean | Peak, b: Mean | Peak) -> Mean | Peak:
  merge = jnp.maximum if isinstance(a, Peak) else jnp.add
  return jax.tree.map(merge, a, b)


def collapse(metric: Mean | Peak) -> Mean | Peak:
  """Returns a metric whose arrays [N] came from N updates as one metric."""
  merge = jnp.max if isinstance(metric, Peak) else jnp.sum
  return jax.tree.map(merge, metric)


def select(targets: Targets, order: Array) -> Targets:
  """Returns the targets of some prompts, with all their rows.

  Args:
    targets: of P prompts whose rows are contiguous and of equal number.
    order: i32 [Q], which prompts, in which order.
  """
  rollout = targets.rollout
  prompts = rollout.prompts.uid.shape[0]
  group = rollout.response.shape[0] // prompts

  def by_prompt(tree):
    return jax.tree.map(lambda x: x[order], tree)

  def by_row(x):
    grouped = x.reshape(prompts, group, *x.shape[1:])[order]
    return grouped.reshape(-1, *x.shape[1:])

  rows = dataclasses.replace(
    rollout, prompts=None, data={}, groups=None, prompt_of=None
  )
  chosen = dataclasses.replace(
    jax.tree.map(by_row, rows),
    prompts=by_prompt(rollout.prompts),
    data=by_prompt(dict(rollout.data)),
    groups=groups.uniform(order.shape[0], group),
    prompt_of=jnp.repeat(jnp.arange(order.shape[0]), group),
  )
  # What credit observed has been logged; learning does not read it.
  rest = dataclasses.replace(targets, rollout=None, observed={})
  return dataclasses.replace(jax.tree.map(by_row, rest), rollout=chosen)
