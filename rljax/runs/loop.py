"""The loop: a warm start, then reinforcement learning, in one run folder.

A run is one line of steps: `sft_steps` of the warm start, then `steps` of RL.
A checkpoint after step n holds everything that step n + 1 depends on, so a
resumed run computes what one that was never stopped computes, bit for bit.
"""

from collections.abc import Callable
import dataclasses
import functools
import math
import pathlib
import resource
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp

from rljax.core.types import Batch, Params, TrainState
from rljax.data import prompts
from rljax.engine import sharding, step
from rljax.engine.method import Method
from rljax.runs import (
  checkpoints,
  evaluation,
  judging,
  metrics,
  processes,
  recipe,
  refill,
  report,
  rollouts,
  run,
  terminal,
)


def train(
  config: recipe.Config, method: Callable[[Any], Method]
) -> dict[str, Any]:
  """Runs a config to its end and returns the summary.

  Args:
    config: of the run; `workdir` is where everything goes.
    method: config to method.

  Raises:
    ValueError: for settings that cannot work, before anything compiles, and
      for a folder of another run.
    OSError: if the disk is full; the last checkpoint stays.
    KeyboardInterrupt: on Ctrl-C, after all is saved.
  """
  processes.join(config.coordinator, config.processes, config.process)
  parts = recipe.build(config, method)
  try:
    with (
      checkpoints.claimed(parts.config),
      checkpoints.Checkpoints(config.workdir, config.keep) as saved,
    ):
      return _Run(parts, saved).go()
  finally:
    if parts.host is not None:
      parts.host.close()


class _Run:
  """One run: its parts, its place, and what it writes."""

  def __init__(self, parts: recipe.Parts, saved):
    self.parts, self.config, self.saved = parts, parts.config, saved
    self.total = parts.config.sft_steps + parts.config.steps
    self.begun = time.monotonic()
    self.before = {'seconds': 0.0, 'cpu_seconds': 0.0}
    self.done = 0
    self.results: dict[str, float] = {}
    self.nonfinite = 0
    self.position: dict[str, int] | None = None
    self.rollouts: rollouts.Rollouts | None = None

  def go(self) -> dict[str, Any]:
    """Runs to the end, or until asked to stop."""
    state = self._restore()
    lead = jax.process_index() == 0
    title = f'{run.program(self.config).name} · {self._task}'
    with (
      metrics.Writer(self.config.workdir, self.position)
      if lead
      else _Silent() as self.writer,
      terminal.View(title, seconds=self.before['seconds']) as self.view,
      checkpoints.Interrupt() as interrupt,
    ):
      self._announce()
      if self.done == 0:
        self._evaluate('begin', state)
      while self.done < self.total:
        if self.done == self.config.sft_steps and self._rl:
          self._announce()
          # Here, so that no caller keeps the state before it alive.
          state = self._begin_rl(state)
        state = self._advance(state)
        stop = processes.anyone(interrupt.requested)
        if stop or self._due(self.config.checkpoint_every):
          self._save(state)
        if stop:
          break
      self._save(state)
      self.saved.wait()
    values = self._finish(lead)
    if interrupt.by_hand and not values['finished']:
      raise KeyboardInterrupt
    return values

  @property
  def _task(self) -> str:
    """The task for people; some have more to say than their name."""
    return getattr(self.parts.task, 'title', self.parts.task.name)

  def _announce(self) -> None:
    """Shows the stage whose first step, as a rule, compiles now."""
    stage = 'rl' if self._rl else 'sft'
    before = self.config.sft_steps if self._rl else 0
    count = self.config.steps if self._rl else self._place()[2]
    found = {k: v for k, v in self.results.items() if k == 'accuracy_sft'}
    self.view.begin(stage, self.done - before, count, found)
    self._warn()

  # What one step is.

  def _advance(self, state: TrainState) -> TrainState:
    begun = time.monotonic()
    if self._rl:
      state, found = self._rl_step(state)
    else:
      state, found = self._sft_step(state)
    seconds = time.monotonic() - begun
    if 'length' in found:
      rows = self.config.prompts * self.config.group_size
      found['tokens_per_second'] = found['length'] * rows / seconds
    self._count(found.get('nonfinite', 0.0))
    self.done += 1
    stage, number, count = self._place()
    self.writer.write(stage, number, found, self._seconds())
    self.view.update(stage, number, count, found)
    ends = (self.config.sft_steps, self.total)
    if self.done in ends or (
      stage == 'rl' and self._due(self.config.eval_every)
    ):
      self._evaluate('end' if self.done in ends else 'middle', state)
    return state

  def _count(self, share: float) -> None:
    """Adds up the updates that were not finite, a share of the step's."""
    updates = self.parts.method.updates if self._rl else 1
    self.nonfinite += round(share * updates)
    self._warn()

  def _warn(self) -> None:
    if self.nonfinite:
      self.view.warn(report.lost(self.nonfinite))

  @property
  def _rl(self) -> bool:
    """Whether the next step is one of reinforcement learning."""
    return self.config.control != 'sft' and self.done >= self.config.sft_steps

  def _place(self) -> tuple[str, int, int]:
    """Returns stage, steps done in it, and its length."""
    warm = self.config.sft_steps
    if self.done <= warm:
      return 'sft', self.done, warm
    if self.config.control == 'sft':
      return 'sft', self.done, self.total
    return 'rl', self.done - warm, self.config.steps

  def _due(self, every: int) -> bool:
    _, number, _ = self._place()
    return bool(every) and number % every == 0

  def _sft_step(self, state: TrainState):
    assert self.parts.sft_loader is not None
    batch, _ = self._next(self.parts.sft_loader)
    placed = sharding.place_rows(batch, self.parts.mesh)
    state, found = self.parts.sft(state, placed)
    return state, metrics.finalize(found)

  def _rl_step(self, state: TrainState):
    parts, most = self.parts, self.config.max_gen_batches
    failed = self._failed()
    if most > 1:
      state, found, glimpse, batch, examples = refill.run(
        parts.step, state, self._draw, most=most, mesh=parts.mesh
      )
    else:
      batch, examples = self._draw()
      placed = sharding.place_rows(batch, parts.mesh)
      state, found, glimpse = parts.step.run(state, placed)
    numbers = metrics.finalize(found)
    if parts.host is not None:
      count = processes.of_each(self._failed() - failed)
      numbers['verifier/failed'] = float(count.sum())
    if parts.loader.skipped:
      numbers['prompts/skipped'] = float(parts.loader.skipped)
    self._show(examples, glimpse)
    if self.config.keep_rollouts == 'all':
      self._keep(batch, glimpse)
    return state, numbers

  def _draw(self):
    """Returns a batch and its examples, which the verifier judges next."""
    batch, examples = self._next(self.parts.loader)
    if self.parts.host is not None:
      self.parts.host.examples = examples
    return batch, examples

  def _next(self, loader: prompts.Loader):
    """Returns a batch and its examples, none of which is held out."""
    batch, examples = next(loader)
    while loader.notes:
      self.view.say(loader.notes.pop(0))
    if evaluation.overlap(examples, self.parts.held):
      raise ValueError(
        f'Task {self.config.task!r} trains on problems that are held out.'
      )
    return batch, examples

  def _failed(self) -> int:
    """Returns how many responses the verifier failed on so far."""
    host = self.parts.host
    return sum(host.failures.values()) if host else 0

  def _show(self, examples, glimpse: step.Glimpse) -> None:
    """Logs one sampled answer, in turn from each place of the batch."""
    response, length, reward = (
      judging.local(x)
      for x in (glimpse.response, glimpse.length, glimpse.reward)
    )
    row = self.done % len(length)
    example = examples[row * len(examples) // len(length)]
    if example is None:
      return  # of another process
    text = judging.text(
      self.parts.tokenizer,
      self.parts.method.phase.stop_ids,
      response[row],
      int(length[row]),
    )
    score, number = float(reward[row]), self.done - self.config.sft_steps + 1
    self.view.sample(example.prompt, text, score, number)
    self.writer.sample(
      {
        'step': number,
        'uid': example.uid,
        'prompt': example.prompt,
        'response': text,
        'answer': example.answer,
        'reward': score,
      }
    )

  def _keep(self, batch: Batch, glimpse: step.Glimpse) -> None:
    """Stores the rollouts of a step."""
    number = self.done - self.config.sft_steps
    arrays = rollouts.gather(batch, glimpse)
    if self.rollouts is None:
      self.rollouts = rollouts.begin(self.config, arrays, number)
    self.rollouts.write(number, arrays)

  # Beginnings.

  def _fresh(self, params: Params | None) -> TrainState:
    parts = self.parts
    return step.init_state(
      parts.model,
      parts.sft_optimizer,
      seed=self.config.seed,
      params=params,
      mesh=parts.mesh,
    )

  def _begin_rl(self, state: TrainState) -> TrainState:
    """Returns the state RL starts from: counters and optimizer anew."""
    params = state.params['policy']
    names = {view.params for view in self.parts.method.views.values()}
    copy = functools.partial(jax.tree.map, jnp.copy)
    return step.init_state(
      self.parts.model,
      self.parts.optimizer,
      seed=self.config.seed,
      params=params,
      frozen={name: copy(params) for name in names},
      mesh=self.parts.mesh,
    )

  def _restore(self) -> TrainState:
    latest = self.saved.latest() if self.config.resume else None
    if latest is None:
      read = self.parts.read_params
      return self._fresh(read() if read else None)
    self.done = latest
    state = jax.eval_shape(self._fresh, self.parts.model.abstract())
    if latest > self.config.sft_steps and self.config.control != 'sft':
      state = jax.eval_shape(self._begin_rl, state)
    state, record = self.saved.restore(latest, self._placed(state))
    self.before = record['spent']
    self.results, self.nonfinite = record['results'], record['nonfinite']
    self.position = record['position']
    self.parts.loader.set_state(record['loader'])
    if self.parts.sft_loader is not None:
      self.parts.sft_loader.set_state(record['sft_loader'])
    return state

  def _placed(self, shape: TrainState) -> TrainState:
    mesh = self.parts.mesh
    if mesh is None:
      place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
      where = jax.tree.map(lambda _: place, shape)
    else:
      where = step.state_shardings(shape, mesh)
    return jax.tree.map(
      lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
      shape,
      where,
    )

  # What is written.

  def _save(self, state: TrainState) -> None:
    if self.rollouts is not None:
      self.rollouts.wait()  # a resumed run goes on after these
    sft_loader = self.parts.sft_loader
    record = {
      'spent': {'seconds': self._seconds(), 'cpu_seconds': self._cpu_seconds()},
      'results': self.results,
      'nonfinite': self.nonfinite,
      'position': self.writer.position(),
      'loader': self.parts.loader.get_state(),
      'sft_loader': sft_loader.get_state() if sft_loader else None,
    }
    self.saved.save(self.done, state, record)

  @functools.cached_property
  def _greedy(self) -> evaluation.Evaluator:
    return self._evaluator(greedy=True, group_size=1, temperature=1.0)

  @functools.cached_property
  def _sampled(self) -> evaluation.Evaluator:
    return self._evaluator(greedy=False, group_size=self.config.eval_samples)

  def _evaluator(self, **changes) -> evaluation.Evaluator:
    parts = self.parts
    phase = dataclasses.replace(
      parts.method.phase, number=_EVAL_PHASE, **changes
    )
    return evaluation.Evaluator(
      parts.model,
      parts.task,
      parts.held,
      phase,
      seed=self.config.seed,
      mesh=parts.mesh,
      host=parts.host,
    )

  def _evaluate(self, when: str, state: TrainState) -> None:
    """Measures the policy on held-out problems; more of it at the ends."""
    if when == 'begin' and self.config.sft_steps:
      return
    self.view.say_doing('evaluating')
    params = state.params['policy']
    found = evaluation.accuracy(self._greedy(params))
    if when != 'middle' and self.config.eval_samples:
      found |= self._pass_at(params)
    stage = 'sft' if self.done <= self.config.sft_steps else 'rl'
    if when != 'middle':
      self.results |= {
        k.replace('accuracy', f'accuracy_{stage}')
        if k.startswith('accuracy')
        else f'{k}_{stage}': v
        for k, v in found.items()
      }
    base = {k: v for k, v in self.results.items() if k == 'accuracy_sft'}
    _, number, _ = self._place()
    self.writer.write('eval', number, found, self._seconds())
    self.view.measured({**found, **base})

  def _pass_at(self, params) -> dict[str, float]:
    scores = self._sampled(params)
    count = self.config.eval_samples
    ks = [2**i for i in range(int(math.log2(count)) + 1)]
    return evaluation.pass_at(scores, ks)

  def _seconds(self) -> float:
    return self.before['seconds'] + time.monotonic() - self.begun

  def _cpu_seconds(self) -> float:
    return self.before['cpu_seconds'] + time.process_time()

  def _values(self) -> dict[str, Any]:
    """Returns what the summary says."""
    warm = min(self.done, self.config.sft_steps)
    return {
      'task': self._task,
      **self.results,
      'finished': self.done >= self.total,
      'sft_steps': warm,
      'steps': self.done - warm,
      'done': self.done,
      'total': self.total,
      'nonfinite': self.nonfinite,
      'seconds': self._seconds(),
      'cpu_seconds': self._cpu_seconds(),
      'peak_rss_mb': _peak_rss_mb(),
      'held_out': self.parts.held.count,
      'held_out_skipped': self.parts.held.skipped,
      'control': self.config.control,
      'workdir': str(self.config.workdir),
    }

  def _finish(self, lead: bool) -> dict[str, Any]:
    """Writes what is left of the run and says where it is."""
    values = self._values()
    if lead:
      folder = pathlib.Path(self.config.workdir)
      again = self._again(values['finished'])
      report.curves(folder)
      report.summary(folder, values, run.program(self.config), again)
      view = terminal.View('')
      view.say(report.headline(values))
      view.say(f'summary: {folder / report.SUMMARY_TEXT}')
      view.say(f'picture: {folder / report.CURVES}')
      label = 'longer: ' if values['finished'] else 'resume: '
      view.say(f'{label} {again}')
    return values

  def _again(self, finished: bool) -> str:
    """Returns the command line that goes on, for twice as long at the end."""
    steps = self.config.steps * (2 if finished else 1)
    return run.resumption(dataclasses.replace(self.config, steps=steps))


# Far from the numbers that phases of a step use.
_EVAL_PHASE = 1 << 20


class _Silent:
  """The writer of processes that do not write."""

  def __enter__(self):
    return self

  def __exit__(self, *unused):
    pass

  def write(self, *unused):
    pass

  def sample(self, *unused):
    pass

  def position(self) -> dict[str, int]:
    return {}


def _peak_rss_mb() -> float:
  """Returns the most memory this process has held, in MB."""
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  return peak / 1e6 if sys.platform == 'darwin' else peak / 1e3
