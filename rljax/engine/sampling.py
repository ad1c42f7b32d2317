"""The sampler: prompts to rollouts, on the device, inside the step.

Each prompt is prefilled once and shared by its group. The cache of the rows
is a list of segments, each a buffer of its own: a new one is opened only when
the last is full and a row still runs, so time and memory follow the live
length, and nothing is copied when the cache grows.

A row's tokens depend on (run key, step, phase, refill round, uid of the
prompt, how often that uid came before in the batch, number of the sample)
alone: not on its place in the batch, on padding, or on the mesh.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from rljax.core import groups
from rljax.core.types import Array, Batch, Params, Prompts, Rollout, Stop
from rljax.engine import sharding
from rljax.models import decoder
import rljax_kernels


@dataclasses.dataclass(frozen=True)
class Phase:
  """How one set of rows is sampled.

  Attributes:
    max_tokens: limit of a response, T.
    group_size: rows per prompt, G.
    temperature: positive; divides the logits.
    greedy: take the most likely token instead of drawing.
    top_k: keep the k most likely tokens; 0 keeps all.
    top_p: keep the most likely tokens up to this mass; 1 keeps all.
    min_p: keep tokens of at least this share of the largest probability.
    stop_ids: ids that end a row; the sampled one is part of the response.
    prefix: name of an array i32 [P, F] in the batch's data: tokens that are
      forced at the start of each response, -1 where the policy draws.
    segment: positions of the first cache segment; then the total doubles.
    number: distinguishes the randomness of phases of one step.
  """

  max_tokens: int
  group_size: int = 8
  temperature: float = 1.0
  greedy: bool = False
  top_k: int = 0
  top_p: float = 1.0
  min_p: float = 0.0
  stop_ids: tuple[int, ...] = ()
  prefix: str = ''
  segment: int = 128
  number: int = 0

  def __post_init__(self):
    for name in ('max_tokens', 'group_size', 'segment', 'temperature'):
      if getattr(self, name) <= 0:
        raise ValueError(f'{name}={getattr(self, name)} must be positive.')
    if not 0 < self.top_p <= 1 or not 0 <= self.min_p <= 1 or self.top_k < 0:
      raise ValueError(
        f'top_p={self.top_p} must be in (0, 1], min_p={self.min_p} in [0, 1]'
        f' and top_k={self.top_k} at least 0.'
      )

  @property
  def truncates(self) -> bool:
    """Whether rows are drawn from less than the full softmax."""
    return bool(self.top_k or self.top_p < 1 or self.min_p > 0)


class _Rows(NamedTuple):
  """What the decode loop carries, apart from the cache."""

  step: Array  # i32 [], tokens decoded so far
  token: Array  # i32 [B], the last one
  done: Array  # bool [B]
  length: Array  # i32 [B]
  stopped: Array  # bool [B], ended by a stop id
  response: Array  # i32 [B, T]
  logp: Array  # f32 [B, T]
  logp_full: Array  # f32 [B, T]
  logp_unit: Array  # f32 [B, T]


@dataclasses.dataclass(frozen=True)
class _Job:
  """One call of the sampler, closed over by its loops."""

  model: decoder.Model
  phase: Phase
  params: Params
  layers: list[Params]
  prompts: Prompts
  prompt: list[decoder.Cache]
  keys: Array  # [B]
  temperature: Array  # f32 [B]
  limit: Array  # i32 [B]
  forced: Array | None  # i32 [B, F]
  mesh: Mesh | None


def row_keys(
  key: Array,
  step: Array,
  phase: int,
  uid: Array,
  group: int,
  refill: int | Array = 0,
) -> Array:
  """Returns the random key of each row, [P * G].

  Args:
    key: of the run.
    step: i32 [], rollout batches begun.
    phase: number of the phase within the step.
    uid: i32 [P].
    group: rows per prompt, G.
    refill: number of the refill round within the phase.
  """
  for number in (step, phase, refill):
    key = jax.random.fold_in(key, number)
  before = jnp.tril(uid[:, None] == uid[None], -1)
  fold = jax.vmap(jax.random.fold_in)
  prompts = fold(fold(jnp.broadcast_to(key, uid.shape), uid), before.sum(1))
  rows = jnp.tile(jnp.arange(group), uid.shape[0])
  return fold(jnp.repeat(prompts, group), rows)


def segments(total: int, first: int) -> list[tuple[int, int]]:
  """Returns (start, size) of cache segments: the total doubles each time."""
  bounds = [0]
  while bounds[-1] < total:
    bounds.append(min(total, max(first, 2 * bounds[-1])))
  return [(a, b - a) for a, b in zip(bounds[:-1], bounds[1:], strict=True)]


def sample(
  model: decoder.Model,
  params: Params,
  batch: Batch,
  phase: Phase,
  *,
  key: Array,
  step: Array,
  version: Array,
  temperature: Array | None = None,
  limit: Array | None = None,
  forced: Array | None = None,
  refill: int | Array = 0,
  mesh: Mesh | None = None,
) -> Rollout:
  """Returns G responses to each prompt.

  Args:
    model: the decoder.
    params: of `model`.
    batch: P prompts and their data.
    phase: how to sample.
    key: of the run.
    step: i32 [], rollout batches begun.
    version: i32 [], optimizer updates that made `params`.
    temperature: f32 [B] in place of `phase.temperature`.
    limit: i32 [B], tokens a row may have, at most `phase.max_tokens`; a row
      of limit 0 is empty.
    forced: i32 [B, F], tokens to take at the first F positions, -1 where the
      policy draws. Forced tokens have mask 0.
    refill: i32 [], number of the batch among those of one step.
    mesh: over which rows and vocabulary are split.

  Raises:
    ValueError: if more tokens are forced than a row may have.
  """
  if forced is not None and forced.shape[1] > phase.max_tokens:
    raise ValueError(
      f'{forced.shape[1]} forced tokens do not fit into'
      f' max_tokens={phase.max_tokens}.'
    )
  params = model.working(params)
  prompts = batch.prompts
  rows = prompts.uid.shape[0] * phase.group_size
  if temperature is None:
    temperature = jnp.full(rows, phase.temperature, jnp.float32)
  if limit is None:
    limit = jnp.full(rows, phase.max_tokens, jnp.int32)
  job = _Job(
    model,
    phase,
    params,
    decoder.unstack(params['layers'], model.config.layers),
    prompts,
    model.prefill(params, prompts),
    row_keys(key, step, phase.number, prompts.uid, phase.group_size, refill),
    temperature,
    limit,
    forced,
    mesh,
  )
  done = _run(job, _start(job))
  return _rollout(job, done, batch, version)


def _start(job: _Job) -> _Rows:
  rows, size = job.limit.shape[0], job.phase.max_tokens
  token = jnp.repeat(job.prompts.tokens[:, -1], job.phase.group_size)
  none = jnp.zeros((rows, size), jnp.float32)
  return _Rows(
    step=jnp.int32(0),
    token=token,
    done=job.limit <= 0,
    length=jnp.zeros(rows, jnp.int32),
    stopped=jnp.zeros(rows, bool),
    response=jnp.zeros((rows, size), jnp.int32),
    logp=none,
    logp_full=none,
    logp_unit=none,
  )


def _run(job: _Job, state: _Rows, number: int = 0, closed: tuple = ()):
  """Decodes one segment and, while rows are left, those after it."""
  spans = segments(job.phase.max_tokens, job.phase.segment)
  start, size = spans[number]
  uniform = _uniform(job, start, size)

  def going(carry):
    rows, _ = carry
    return (rows.step < start + size) & ~jnp.all(rows.done)

  def body(carry):
    rows, live = carry
    before = [[segment[i] for segment in closed] for i in range(len(live))]
    hidden, live = job.model.decode(
      job.params, job.layers, rows.token, rows.step, live, before, start,
      job.prompts, job.prompt,
    )  # fmt: skip
    return _advance(job, rows, hidden, uniform, start), live

  live = job.model.empty(state.token.shape[0], size)
  state, live = jax.lax.while_loop(going, body, (state, live))
  if number + 1 == len(spans):
    return state

  # Nested, so that a segment nobody reaches is neither filled nor passed on.
  def rest(s):
    return _run(job, s, number + 1, (*closed, live))

  return jax.lax.cond(jnp.all(state.done), lambda s: s, rest, state)


def _uniform(job: _Job, start: int, size: int) -> Array | None:
  """Returns the uniforms of each row at the segment's positions, [B, L]."""
  if job.phase.greedy:
    return None
  fold = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)), (0, None))
  keys = fold(job.keys, jnp.arange(start, start + size))
  return jax.vmap(jax.vmap(jax.random.uniform))(keys)


def _advance(job: _Job, rows: _Rows, hidden, uniform, start) -> _Rows:
  """Draws the next token of each row from its hidden state [B, D]."""
  if uniform is not None:
    uniform = jax.lax.dynamic_index_in_dim(
      uniform, rows.step - start, axis=1, keepdims=False
    )
  drawn = _draw(job, hidden, uniform, _forced(job, rows.step))
  alive = ~rows.done
  stop = alive & _is_stop(drawn.token, job.phase.stop_ids)

  def put(all_, new):
    return jax.lax.dynamic_update_slice_in_dim(
      all_, jnp.where(alive, new, 0)[:, None].astype(all_.dtype), rows.step, 1
    )

  return _Rows(
    step=rows.step + 1,
    token=drawn.token,
    done=rows.done | stop | (rows.step + 1 >= job.limit),
    length=rows.length + alive,
    stopped=rows.stopped | stop,
    response=put(rows.response, drawn.token),
    logp=put(rows.logp, drawn.logp),
    logp_full=put(rows.logp_full, drawn.logp_full),
    logp_unit=put(rows.logp_unit, drawn.logp_unit),
  )


def _draw(job: _Job, hidden, uniform, forced):
  phase, head = job.phase, job.model.head(job.params, job.temperature)
  return rljax_kernels.vocab_sample(
    hidden,
    head.weight,
    uniform,
    temperature=head.temperature,
    softcap=head.softcap,
    valid=head.valid,
    forced=forced,
    top_k=phase.top_k,
    top_p=phase.top_p,
    min_p=phase.min_p,
    layout=sharding.layout(job.mesh, head.weight.shape[0]),
  )


def _forced(job: _Job, step: Array) -> Array | None:
  if job.forced is None:
    return None
  size = job.forced.shape[1]
  token = jax.lax.dynamic_index_in_dim(
    job.forced, jnp.minimum(step, size - 1), axis=1, keepdims=False
  )
  return jnp.where(step < size, token, -1)


def _is_stop(token: Array, stop_ids: tuple[int, ...]) -> Array:
  if not stop_ids:
    return jnp.zeros(token.shape, bool)
  stop = jnp.asarray(stop_ids, jnp.int32)
  return jnp.any(token[:, None] == stop[None], axis=1)


def _rollout(job: _Job, rows: _Rows, batch: Batch, version: Array) -> Rollout:
  phase, prompts = job.phase, job.prompts
  count, size = rows.response.shape
  index = jnp.arange(size)[None]
  inside = index < rows.length[:, None]
  if job.forced is not None:
    width = ((0, 0), (0, size - job.forced.shape[1]))
    inside &= jnp.pad(job.forced, width, constant_values=-1) < 0
  ended = jnp.where(rows.stopped, Stop.TOKEN, Stop.LENGTH)
  return Rollout(
    prompts=prompts,
    prompt_of=jnp.repeat(jnp.arange(prompts.uid.shape[0]), phase.group_size),
    response=rows.response,
    length=rows.length,
    mask=inside.astype(jnp.float32),
    logp=rows.logp,
    logp_full=rows.logp_full,
    logp_unit=rows.logp_unit,
    unit=jnp.zeros((count, size), jnp.int32),
    seat=jnp.zeros(count, jnp.int32),
    temperature=job.temperature,
    groups=groups.uniform(prompts.uid.shape[0], phase.group_size),
    stop=jnp.where(rows.length == 0, Stop.EMPTY, ended).astype(jnp.int32),
    version=jnp.broadcast_to(version, (count, size)).astype(jnp.int32),
    data=batch.data,
  )
