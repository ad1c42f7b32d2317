r"""Times one GRPO step, whole and by part, and its compilation.

The work is that of a small Qwen3-like decoder (4 layers, width 128, tied
embeddings, float32) with a frozen reference and a KL penalty: 8 prompts of 20
to 32 tokens, 8 responses to each, one AdamW update. Sizes:

  S          64 new tokens, vocabulary 2,048
  V16k       S with vocabulary 16,384
  T256       S with 256 new tokens
  limit4096  S with a limit of 4,064 new tokens, of which each row uses 64

Time is CPU time of the process, all threads, and wall time; medians over the
steps after a warm-up. Machines are shared: compare medians of runs that
alternate with the other program's.

  python -m experiments.bench_step --size=S --json
"""

import dataclasses
import json
import resource
import statistics
import sys
import time
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rljax.core.types import Batch, Prompts
from rljax.engine import compiling, grpo, optim, sampling, scoring, step
from rljax.engine.method import Method
from rljax.engine.seams import View
from rljax.models import decoder
from rljax.runs import run

_STOP = 1


class _Size(NamedTuple):
  tokens: int  # limit on a response
  vocab: int = 2048
  segment: int = 64  # first of the cache
  ends: int = 0  # where a stop is forced; 0: nowhere


_SIZES = {
  'S': _Size(64),
  'V16k': _Size(64, vocab=16_384),
  'T256': _Size(256, segment=128),
  'limit4096': _Size(4064, ends=64),
}


@dataclasses.dataclass(frozen=True)
class Config(run.Config):
  """What is timed."""

  size: Literal['S', 'V16k', 'T256', 'limit4096'] = run.field('S', 'the work')
  steps: int = run.field(12, 'steps')
  warm: int = run.field(3, 'steps that are not counted')
  parts: bool = run.field(True, 'also time sample, score and learn apart')
  json: bool = run.field(False, 'print one JSON line instead of a table')

  def validate(self) -> None:
    """Raises ValueError if nothing can be timed."""
    super().validate()
    if not 0 <= self.warm < self.steps:
      raise ValueError(f'--warm={self.warm} must be below --steps={self.steps}')


def method(config: Config) -> Method:
  """Returns GRPO with a reference."""
  size = _SIZES[config.size]
  phase = sampling.Phase(
    max_tokens=size.tokens,
    group_size=8,
    stop_ids=(_STOP,),
    segment=size.segment,
    prefix='prefix' if size.ends else '',
  )
  return Method(
    phase=phase,
    credit=grpo.credit(ref=True),
    loss=grpo.loss(beta=0.04),
    views={'ref': View('ref')},
  )


class Bench:
  """The step of one size, and its data."""

  def __init__(self, config: Config):
    size = _SIZES[config.size]
    self.vocab, self.ends = size.vocab, size.ends
    self.random = np.random.default_rng(0)
    self.model = decoder.Model(
      decoder.Config(
        vocab_size=self.vocab,
        width=128,
        layers=4,
        heads=4,
        kv_heads=2,
        head_dim=32,
        mlp_width=384,
        qk_norm=True,
      )
    )
    optimizer = optim.adamw(3e-4)
    self.step = step.make_step(
      method(config), {'policy': self.model}, optimizer, self.judge, prompts=8
    )
    state = step.init_state(self.model, optimizer, seed=config.seed)
    copy = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))
    frozen = {'ref': copy(state.params['policy'])}
    self.state = dataclasses.replace(state, frozen=frozen)

  def judge(self, rollout):
    """Returns the share of tokens from the lower half of the vocabulary."""
    low = (rollout.response < self.vocab // 2) * (
      jnp.arange(rollout.response.shape[1]) < rollout.length[:, None]
    )
    return {'task': low.sum(axis=1) / jnp.maximum(rollout.length, 1)}

  def batch(self) -> Batch:
    """Returns prompts of random ids, 20 to 32 of them each."""
    length = self.random.integers(20, 33, 8).astype(np.int32)
    tokens = self.random.integers(2, self.vocab, (8, 32)).astype(np.int32)
    uid = self.random.integers(0, 2**31 - 1, 8).astype(np.int32)
    data = {}
    if self.ends:
      # The policy draws all but the last token of a row, which is a stop.
      data['prefix'] = np.full((8, self.ends), -1, np.int32)
      data['prefix'][:, -1] = _STOP
    batch = Batch(
      prompts=Prompts(tokens=tokens, length=length, uid=uid), data=data
    )
    return jax.device_put(batch)

  def once(self) -> None:
    """Takes one step, and waits for it."""
    self.state, *rest = self.step.run(self.state, self.batch())
    jax.block_until_ready((self.state, rest))


def timed(fn, count: int, warm: int) -> dict[str, float]:
  """Returns median CPU and wall seconds of fn() after `warm` calls."""
  cpu, wall = [], []
  for _ in range(count):
    begun = time.process_time(), time.perf_counter()
    fn()
    cpu.append(time.process_time() - begun[0])
    wall.append(time.perf_counter() - begun[1])
  return {
    'cpu_s': round(statistics.median(cpu[warm:]), 4),
    'wall_s': round(statistics.median(wall[warm:]), 4),
    'first_s': round(wall[0], 2),
  }


def parts(bench: Bench, config: Config) -> dict[str, Any]:
  """Returns the times of sample, score and learn as programs of their own."""
  batch, state = bench.batch(), bench.state
  rollout = bench.step.sampled(state, batch)
  longest = int(rollout.length.max())
  rollout = step.trim(rollout, max(64, longest))
  rewards = bench.judge(rollout)

  @compiling.jit
  def score(params, rollout):
    read = scoring.read(bench.model, params, rollout)
    return scoring.scores(bench.model, *read, rollout, None).logp

  targets = compiling.jit(bench.step.credit)(state, rollout, rewards)
  learn = compiling.jit(bench.step.learn).lower(state, targets).compile()
  calls = {
    'sample': lambda: bench.step.sampled(state, batch),
    'score': lambda: score(state.frozen['ref'], rollout),
    'learn': lambda: learn(state, targets),
  }
  found = {}
  for name, call in calls.items():
    times = timed(
      lambda call=call: jax.block_until_ready(call()), config.steps, config.warm
    )
    found[name] = {k: times[k] for k in ('cpu_s', 'wall_s')}
  memory = learn.memory_analysis()
  return {'parts': found, 'loss_temp_bytes': memory.temp_size_in_bytes}


def measure(config: Config) -> dict[str, Any]:
  """Returns all figures of a size."""
  compiled: list[float] = []

  def listen(event: str, seconds: float, **unused):
    if event.endswith('backend_compile_duration'):
      compiled.append(seconds)

  jax.monitoring.register_event_duration_secs_listener(listen)
  bench = Bench(config)
  begun = time.process_time()
  times = timed(bench.once, config.steps, config.warm)
  figures = {
    'size': config.size,
    'jax': jax.__version__,
    'python': sys.version.split()[0],
    'cpu_s_per_step': times['cpu_s'],
    'wall_s_per_step': times['wall_s'],
    'first_step_s': times['first_s'],
    'compilations': len(compiled),
    'compile_s': round(sum(compiled), 2),
    'cpu_s': round(time.process_time() - begun, 2),
    'peak_rss_mb': resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
  }
  return figures | (parts(bench, config) if config.parts else {})


def main(config: Config) -> None:
  """Prints the figures."""
  figures = measure(config)
  if config.json:
    print(json.dumps(figures))
    return
  for name, value in figures.items():
    print(f'{name:18} {value}')


if __name__ == '__main__':
  run.main(Config, main)
