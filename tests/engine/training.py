"""Steps on the small model, shared by tests."""

from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import functools
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rljax.core import masked
from rljax.engine import grpo, seams, sharding
from rljax.engine import method as method_lib
from rljax.engine import step as step_lib
from rljax.models import decoder
from tests.engine import small

PROMPTS, BETA = 32, 0.5
PHASE = dataclasses.replace(
  small.PHASE, max_tokens=12, group_size=16, temperature=0.7
)
MODEL = decoder.Model(small.SHALLOW)
REF = {'ref': seams.View('ref')}


class Kept(NamedTuple):
  """Optimizer state: the gradient as it came, and a learning rate."""

  grads: Any
  rate: jax.Array


def keeping() -> optax.GradientTransformation:
  """Returns plain descent that keeps its last gradient, for tests to read."""

  def init(params):
    return Kept(jax.tree.map(jnp.zeros_like, params), jnp.float32(1.0))

  def update(grads, state, params=None):
    del params
    moves = jax.tree.map(lambda g: -state.rate * g, grads)
    return moves, Kept(grads, state.rate)

  return optax.GradientTransformation(init, update)


def batch(seed=0, **data):
  """Returns prompts; `bad` rows lose their reward, `poison` is added to it."""
  fill = {'bad': np.zeros(PROMPTS), 'poison': np.zeros(PROMPTS)}
  return small.batch(PROMPTS, seed=seed, **{**fill, **data})


def judge(rollout):
  """Rewards tokens below 16; NaN where the prompt is marked as bad."""
  low = (rollout.response < 16).astype(jnp.float32)
  bad = rollout.data['bad'][rollout.prompt_of] > 0
  return {'task': jnp.where(bad, jnp.nan, masked.mean(low, rollout.mask, 1))}


def credit(**options) -> seams.CreditFn:
  """Returns GRPO's credit plus what the batch poisons it with."""
  plain = grpo.credit(**options)

  def assign(rollout, rewards, signals, ctl):
    found = plain(rollout, rewards, signals, ctl)
    poison = rollout.data['poison'][rollout.prompt_of]
    advantage = found.advantage + poison[:, None]
    return dataclasses.replace(found, advantage=advantage)

  return assign


def method(**changes) -> method_lib.Method:
  """Returns GRPO with a KL penalty, or what differs from it."""
  plain = dict(
    phase=PHASE, credit=credit(ref=True), loss=grpo.loss(beta=BETA), views=REF
  )
  return method_lib.Method(**{**plain, **changes})


@functools.cache
def make(mesh: str = '', microbatches: int = 1, **changes) -> step_lib.Step:
  """Returns a step; '' is one device. Equal calls share their programs."""
  return make_with(
    judge,
    method(**changes),
    mesh=sharding.make_mesh(mesh) if mesh else None,
    microbatches=microbatches,
  )


def make_with(judge, given=None, **options) -> step_lib.Step:
  """Returns a step with this judge, of GRPO with a KL penalty or `given`."""
  return step_lib.make_step(
    given or method(), {'policy': MODEL}, keeping(), judge, prompts=PROMPTS,
    total_steps=10, **options,
  )  # fmt: skip


def state(mesh: str = '', *, params=None, ref=None, rate=1.0):
  """Returns a state whose reference is near the policy, but another."""
  params = small.params(config=small.SHALLOW) if params is None else params
  ref = jax.tree.map(lambda x: 0.9 * x, params) if ref is None else ref
  made = step_lib.init_state(
    MODEL, keeping(), seed=3, params=params, frozen={'ref': ref},
    mesh=sharding.make_mesh(mesh) if mesh else None,
  )  # fmt: skip
  rate = jnp.float32(rate)
  if mesh:  # an array elsewhere would be another type to the compiler
    rate = jax.device_put(rate, made.opt_state.rate.sharding)
  opt_state = made.opt_state._replace(rate=rate)
  return dataclasses.replace(made, opt_state=opt_state)


def place(tree, mesh: str = ''):
  """Returns host arrays where a step on this mesh reads its rows."""
  if not mesh:
    return tree
  return sharding.place_rows(
    jax.tree.map(np.asarray, tree), sharding.make_mesh(mesh)
  )


@functools.cache
def rollout():
  """Returns a rollout of the start, and its rewards."""
  sampled = make().sampled(state(), batch())
  return sampled, judge(sampled)


class Result(NamedTuple):
  """The outcome of a step, on the host."""

  before: Any
  state: Any
  metrics: Any

  @property
  def grads(self):
    """The gradient that the optimizer was given."""
    return self.state.opt_state.grads

  def mean(self, name: str) -> float:
    """Returns a metric of sums, divided."""
    found = self.metrics[name]
    return float(found.total) / float(found.count)


def learn(step: step_lib.Step, start=None, given=None, mesh='') -> Result:
  """Returns what `learned` makes of a rollout; the common one by default."""
  start = state(mesh) if start is None else start
  before = jax.device_get(start.params['policy'])
  given = place(given or rollout(), mesh)
  found = jax.device_get(step.learned(start, *given))
  return Result(before, *found)


def assert_close_leaves(found, wanted, tolerance: float) -> None:
  """Compares each leaf, relative to its norm."""
  pairs = zip(
    jax.tree_util.tree_leaves_with_path(wanted),
    jax.tree.leaves(found),
    strict=True,
  )
  for (path, w), f in pairs:
    gap = np.linalg.norm(np.float64(f) - np.float64(w))
    size = np.linalg.norm(np.float64(w))
    assert gap <= tolerance * size, (jax.tree_util.keystr(path), gap / size)


@contextlib.contextmanager
def compilations() -> Iterator[list[float]]:
  """Gives a list that grows by the seconds of each compilation inside."""
  found, active = [], [True]

  def listen(event, seconds, **_):
    if active and event.endswith('backend_compile_duration'):
      found.append(seconds)

  jax.monitoring.register_event_duration_secs_listener(listen)
  try:
    yield found
  finally:
    active.clear()


def in_loops(program: str, what: str) -> list[str]:
  """Returns the lines with `what` that a compiled program runs in loops."""
  parts, name = {}, ''
  for line in program.splitlines():
    if start := re.match(r'(?:ENTRY )?%?([\w.\-]+) \(.*\{$', line):
      name = start[1]
    parts.setdefault(name, []).append(line)
  called = {
    name: set(re.findall(r'[=\s{]%([\w.\-]+)', '\n'.join(lines)))
    for name, lines in parts.items()
  }
  todo = set(re.findall(r'body=%?([\w.\-]+)', program))
  seen = set()
  while todo:
    seen |= todo
    todo = {x for name in todo for x in called[name] & parts.keys()} - seen
  return [x for name in seen for x in parts[name] if what in x]


def scans(fn: Callable, *args, length: int) -> tuple[int, int]:
  """Returns how many scans of `length` run forward and in reverse.

  A scan over the layers is a pass of the model; those inside another loop
  count as often as it runs.
  """
  return _scans(jax.make_jaxpr(fn)(*args).jaxpr, length)


def _scans(jaxpr, length: int) -> tuple[int, int]:
  forward = backward = 0
  for eqn in jaxpr.eqns:
    times = 1
    if eqn.primitive.name == 'scan':
      if eqn.params['length'] == length:
        backward += eqn.params['reverse']
        forward += not eqn.params['reverse']
      times = eqn.params['length']
    for inner in jax.tree.leaves(
      list(eqn.params.values()), is_leaf=lambda x: hasattr(x, 'eqns')
    ):
      inner = getattr(inner, 'jaxpr', inner)
      if hasattr(inner, 'eqns'):
        a, b = _scans(inner, length)
        forward, backward = forward + times * a, backward + times * b
  return forward, backward
