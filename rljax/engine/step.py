"""The training step: sample, judge, credit, learn.

Four pure functions; `fused` is their composition in one program, and
`sampled` and `learned` are the same four as two programs with the host
between them. Methods never know which. `run` takes the form that fits: two
programs where the judge is on the host, or where the limit on a response is so
long that learning should follow the live length too.
"""

from collections.abc import Callable, Mapping
import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import optax

from rljax.core import masked
from rljax.core.types import (
  Array,
  Batch,
  Mean,
  Metrics,
  Params,
  Peak,
  Rewards,
  Rollout,
  Scores,
  Stop,
  Targets,
  TrainState,
  struct,
)
from rljax.engine import (
  compiling,
  learning,
  optim,
  refill,
  sampling,
  scoring,
  sharding,
)
from rljax.engine.method import Method
from rljax.engine.seams import Ctl
from rljax.models import decoder, rules

Judge = Callable[[Rollout], Rewards]


@struct
class Glimpse:
  """What the host may show of a step."""

  response: Array  # i32 [B, T]
  length: Array  # i32 [B]
  reward: Array  # f32 [B]
  logp: Array  # f32 [B, T]


class Step(NamedTuple):
  """The step of one method, as pure functions and as compiled programs.

  `run` is a whole step. `sampled(state, batch, number)`, `judged(rollout)`,
  `fill(held, drawn, taken)` and `finish(state, rollout, rewards)` are its parts
  for a step that draws several batches, of which `number` tells one.
  """

  sample: Callable[[TrainState, Batch], Rollout]
  judge: Judge
  credit: Callable[[TrainState, Rollout, Rewards], Targets]
  learn: Callable[[TrainState, Targets], tuple[TrainState, Metrics]]
  fused: Callable[[TrainState, Batch], tuple[TrainState, Metrics, Glimpse]]
  sampled: Callable[..., Rollout]
  judged: Judge
  fill: Callable[..., refill.Filled]
  learned: Callable[[TrainState, Rollout, Rewards], Any]
  finish: Callable[..., tuple[TrainState, Metrics, Glimpse]]
  run: Callable[[TrainState, Batch], tuple[TrainState, Metrics, Glimpse]]


@dataclasses.dataclass(frozen=True)
class _Engine:
  """What the four functions close over."""

  method: Method
  models: Mapping[str, decoder.Model]
  optimizer: optax.GradientTransformation
  judge: Judge
  mesh: Mesh | None
  prompts: int
  microbatches: int
  total_steps: int

  def sample(
    self, state: TrainState, batch: Batch, number: int | Array = 0
  ) -> Rollout:
    found = batch.prompts.uid.shape[0]
    if found != self.prompts:
      raise ValueError(
        f'The step was made for prompts={self.prompts}, the batch has {found}.'
      )
    batch = sharding.constrain_rows(batch, self.mesh)
    params = sharding.constrain_params(
      state.params['policy'], self.mesh, rules.SAMPLE
    )
    phase = self.method.phase
    forced = None
    if phase.prefix:
      forced = jnp.repeat(batch.data[phase.prefix], phase.group_size, axis=0)
    rollout = sampling.sample(
      self.models['policy'],
      params,
      batch,
      phase,
      key=state.key,
      step=state.step,
      version=state.update,
      forced=forced,
      refill=number,
      mesh=self.mesh,
    )
    return sharding.constrain_rows(rollout, self.mesh)

  def fill(self, held, drawn, taken: Array) -> refill.Filled:
    filled = refill.fill(self.method.keep, held, drawn, taken)
    rollout, rewards = sharding.constrain_rows(filled[:2], self.mesh)
    return filled._replace(rollout=rollout, rewards=rewards)

  def credit(self, state, rollout, rewards, policy=None) -> Targets:
    policy = policy or functools.partial(self._read, 'policy', state, rollout)
    makers = {'policy': policy}
    for name, view in self.method.views.items():
      makers[name] = functools.partial(self._read, view.params, state, rollout)
    signals = scoring.Lazy(makers)
    ctl = self._ctl(state)
    targets = self.method.credit(rollout, rewards, signals, ctl)
    if self.method.updates > 1 and targets.old_logp is None:
      targets = dataclasses.replace(targets, old_logp=signals['policy'].logp)
    return jax.lax.stop_gradient(targets)

  def learn(
    self, state: TrainState, targets: Targets, reading=None
  ) -> tuple[TrainState, Metrics]:
    if self.method.updates == 1:
      state, metrics = self._update(state, targets, reading)
    else:
      state, metrics = self._updates(state, targets)
    state = dataclasses.replace(state, step=state.step + 1)
    if self.mesh is not None:
      # Left to propagation, norms came back split: the next step compiled anew.
      state = jax.lax.with_sharding_constraint(
        state, state_shardings(state, self.mesh)
      )
    return state, metrics

  def advance(self, state: TrainState, rollout: Rollout, rewards: Rewards):
    """Credit and learn, reading the policy once where one update allows."""
    if 'task' not in rewards:
      raise ValueError(
        f"The judge returned {sorted(rewards)}; 'task' must be among them."
      )
    reading = policy = None
    if self.method.updates == 1 and self.microbatches == 1:
      read = functools.partial(
        learning.differentiate,
        self.models['policy'],
        state.params['policy'],
        rollout,
      )
      reading = functools.cache(read)
      policy = functools.partial(self._reread, reading, rollout)
    targets = self.credit(state, rollout, rewards, policy)
    seen = observe(rollout, rewards, targets, state.update)
    state, metrics = self.learn(state, targets, reading)
    return state, {**metrics, **seen}

  def fused(self, state: TrainState, batch: Batch):
    rollout = self.sample(state, batch)
    rewards = self.judge(rollout)
    state, metrics = self.advance(state, rollout, rewards)
    return state, metrics, _glimpse(rollout, rewards)

  def _ctl(self, state: TrainState) -> Ctl:
    progress = jnp.minimum(state.step / self.total_steps, 1.0)
    return Ctl(state.step, state.update, progress.astype(jnp.float32))

  def _read(self, name: str, state: TrainState, rollout: Rollout) -> Scores:
    held = {**state.frozen, **state.params}
    if name not in held:
      raise ValueError(
        f'A view reads parameters {name!r}; the state has {sorted(held)}.'
        ' Give them to init_state(frozen=...).'
      )
    params = held[name]
    model = self.models.get(name, self.models['policy'])
    return self._scores(name, *scoring.read(model, params, rollout), rollout)

  def _reread(self, reading, rollout: Rollout) -> Scores:
    hidden, weight, _ = reading()
    return self._scores('policy', hidden, weight, rollout)

  def _scores(self, name, hidden, weight, rollout) -> Scores:
    model = self.models.get(name, self.models['policy'])
    return scoring.scores(model, hidden, weight, rollout, self.mesh)

  def _update(self, state, targets, reading=None):
    model, loss, ctl = self.models['policy'], self.method.loss, self._ctl(state)
    params = state.params['policy']
    if reading is not None:
      found = learning.gradient(model, loss, reading(), targets, ctl, self.mesh)
    else:
      found = learning.accumulate(
        model, loss, params, targets, ctl, self.mesh, self.microbatches
      )
    counted = jnp.any(targets.weight != 0)
    params, opt_state, norm, ok = optim.guarded_update(
      self.optimizer, found.grads, found.loss, params, state.opt_state, counted
    )
    state = dataclasses.replace(
      state,
      update=state.update + (ok & counted),
      params={**state.params, 'policy': params},
      opt_state=opt_state,
    )
    one = jnp.float32(1)
    return state, {
      **found.metrics,
      'loss': Mean(total=found.loss, count=one),
      'grad_norm': Mean(total=norm, count=one),
      'nonfinite': Mean(total=1 - ok.astype(jnp.float32), count=one),
    }

  def _updates(self, state, targets):
    """Several updates: each epoch deals the prompts into minibatches."""
    prompts = targets.rollout.prompts.uid.shape[0]
    epochs, parts = self.method.epochs, self.method.minibatches
    keys = jax.random.split(
      jax.random.fold_in(jax.random.fold_in(state.key, state.step), _DEAL),
      epochs,
    )
    deal = jax.vmap(lambda key: jax.random.permutation(key, prompts))
    orders = deal(keys).reshape(epochs * parts, prompts // parts)

    def body(state, order):
      part = learning.select(targets, order)
      # Weights were normalized over the rollout, a minibatch stands for all.
      part = dataclasses.replace(part, weight=part.weight * parts)
      return self._update(state, part)

    state, stacked = jax.lax.scan(body, state, orders)
    return state, {k: learning.collapse(m) for k, m in stacked.items()}


def _glimpse(rollout: Rollout, rewards: Rewards) -> Glimpse:
  return Glimpse(
    response=rollout.response,
    length=rollout.length,
    reward=rewards['task'],
    logp=rollout.logp,
  )


@functools.partial(jax.jit, static_argnums=1)
def trim(rollout: Rollout, width: int) -> Rollout:
  """Returns the rollout with its [B, T] arrays cut to [B, width]."""
  rows, size = rollout.response.shape

  def cut(x):
    return x[:, :width] if x.shape == (rows, size) else x

  fixed = dataclasses.replace(rollout, prompts=None, data={}, groups=None)
  return dataclasses.replace(
    jax.tree.map(cut, fixed),
    prompts=rollout.prompts,
    data=rollout.data,
    groups=rollout.groups,
  )


def _finish(learned, widths: list[int]):
  """Returns what follows judging, compiled for the width of the live rows.

  Args:
    learned: compiled (state, rollout, rewards) -> (state, metrics); compiled
      once for each width that occurs.
    widths: what T may be cut to; none keeps it.
  """

  def finish(state: TrainState, rollout: Rollout, rewards: Rewards):
    if widths:
      longest = int(jnp.max(rollout.length))
      rollout = trim(rollout, next(w for w in widths if w >= longest))
    glimpse = _glimpse(rollout, rewards)
    state, metrics = learned(state, rollout, rewards)
    return state, metrics, glimpse

  return finish


# Limits on a response above this are worth a program for each live length.
_LONG = 512

# A stream of the step's key that no phase uses.
_DEAL = 1 << 30


def observe(
  rollout: Rollout, rewards: Rewards, targets: Targets, update: Array
) -> Metrics:
  """Returns metrics of a rollout and of its credit, as sums and counts.

  Args:
    rollout: B rows.
    rewards: columns of the judge.
    targets: what credit made of them.
    update: i32 [], optimizer updates before this step learns.
  """
  age = jnp.where(rollout.mask > 0, update - rollout.version, 0)
  rows = jnp.float32(rollout.length.shape[0])

  def share(x):
    return Mean(total=jnp.sum(x.astype(jnp.float32)), count=rows)

  metrics = {
    'length': share(rollout.length),
    'stop/length': share(rollout.stop == Stop.LENGTH),
    'staleness': Peak(value=jnp.max(age).astype(jnp.float32)),
  }
  for name, column in {**rewards, **targets.rewards}.items():
    there = jnp.isfinite(column)
    metrics[f'reward/{name}'] = Mean(
      total=masked.sum(column, there), count=jnp.sum(there.astype(jnp.float32))
    )
  for name, x in targets.observed.items():
    metrics[name] = Mean(total=jnp.sum(x), count=jnp.float32(max(x.size, 1)))
  return metrics


def make_step(
  method: Method,
  models: Mapping[str, decoder.Model],
  optimizer: optax.GradientTransformation,
  judge: Judge,
  *,
  prompts: int,
  mesh: Mesh | None = None,
  microbatches: int = 1,
  total_steps: int = 1,
  host_judge: bool = False,
) -> Step:
  """Returns the step of a method.

  Args:
    method: what to do.
    models: 'policy', and any model of another architecture by its name.
    optimizer: any optax chain.
    judge: rollout to rewards, f32 [B] columns; 'task' always.
    prompts: P, prompts of a batch over all devices.
    mesh: axes as in `sharding.make_mesh`; None for one device.
    microbatches: parts that each update's gradient is added up from.
    total_steps: rollout batches of the run, for schedules.
    host_judge: the judge cannot be traced; `fused` is not to be called then.

  Raises:
    ValueError: if P cannot be split as the arguments ask.
  """
  check_split(method, prompts, mesh, microbatches)
  engine = _Engine(
    method, models, optimizer, judge, mesh, prompts, microbatches, total_steps
  )
  fused = compiling.jit(engine.fused, mesh, donate_argnums=0)
  sampled = compiling.jit(engine.sample, mesh)
  learned = compiling.jit(engine.advance, mesh, donate_argnums=0)
  judged = judge if host_judge else compiling.jit(judge, mesh)
  spans = sampling.segments(method.phase.max_tokens, method.phase.segment)
  long = method.phase.max_tokens > _LONG
  finish = _finish(learned, [start + size for start, size in spans if long])

  def run(state: TrainState, batch: Batch):
    rollout = sampled(state, batch)
    return finish(state, rollout, judged(rollout))

  return Step(
    sample=engine.sample,
    judge=judge,
    credit=engine.credit,
    learn=engine.learn,
    fused=fused,
    sampled=sampled,
    judged=judged,
    fill=compiling.jit(engine.fill, mesh),
    learned=learned,
    finish=finish,
    run=run if host_judge or long else fused,
  )


def check_split(
  method: Method,
  prompts: int,
  mesh: Mesh | None,
  microbatches: int,
  name: str = 'prompts',
) -> None:
  """Raises ValueError if a batch cannot be split as it has to be.

  Args:
    method: says into how many minibatches.
    prompts: of a batch over all devices.
    mesh: over which rows are split.
    microbatches: parts that each gradient is added up from.
    name: of the number of prompts, for whoever can change it.
  """
  parts = {
    'minibatches': method.minibatches,
    'microbatches': microbatches,
    'row shards of the mesh': sharding.row_shards(mesh),
  }
  whole = math.prod(parts.values())
  if prompts % whole:
    named = ', '.join(f'{k}={v}' for k, v in parts.items())
    raise ValueError(
      f'{name}={prompts} per batch must be a multiple of {whole}'
      f' ({named}): change --{name} or those.'
    )


def init_state(
  model: decoder.Model,
  optimizer: optax.GradientTransformation,
  *,
  seed: int,
  params: Params | None = None,
  frozen: Mapping[str, Params] | None = None,
  mesh: Mesh | None = None,
) -> TrainState:
  """Returns a state whose arrays are created where they will live.

  Args:
    model: the policy.
    optimizer: any optax chain.
    seed: of the run; also of fresh parameters.
    params: of the policy, kept in float32; None makes fresh ones.
    frozen: parameters that are never trained, by name.
    mesh: over which parameters and optimizer state are split.
  """

  def make(params):
    key = jax.random.key(seed)
    if params is None:
      params = model.init(jax.random.fold_in(key, _DEAL))
    params = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    return TrainState(
      step=jnp.int32(0),
      update=jnp.int32(0),
      params={'policy': params},
      opt_state=optimizer.init(params),
      frozen=dict(frozen or {}),
      slow={},
      key=key,
    )

  if mesh is None:
    return jax.jit(make)(params)
  shape = jax.eval_shape(make, params)
  where = state_shardings(shape, mesh)
  return jax.jit(make, out_shardings=where)(params)


def state_shardings(state: TrainState, mesh: Mesh) -> TrainState:
  """Returns the sharding of each array of a state."""
  whole: Any = NamedSharding(mesh, PartitionSpec())

  def place(tree):
    return rules.shardings(tree, mesh, rules.TRAIN)

  return TrainState(
    step=whole,
    update=whole,
    params=place(state.params),
    opt_state=place(state.opt_state),
    frozen=place(state.frozen),
    slow=jax.tree.map(lambda _: whole, state.slow),
    key=whole,
  )
