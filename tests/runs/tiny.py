"""The smallest runs that have everything: a warm start, RL, held-out problems.

There are 16 training problems and batches of 8, so that epochs end after
every second step.
"""

import json
import os
import pathlib
import signal
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from experiments import grpo
from rljax.runs import checkpoints, loop, metrics, run

SFT, RL = 3, 6
ROWS = 16  # a batch
FLAGS = (
  '--width=16 --heads=2 --layers=1 --prompts=8 --group_size=2 --max_tokens=2'
  f' --sft_steps={SFT} --steps={RL} --sft_traces=16 --sft_prompts=8'
  ' --sft_learning_rate=0.03 --learning_rate=0.01 --warmup=1 --beta=0.01'
  ' --eval_every=3 --eval_problems=8 --checkpoint_every=1 --keep=20'
  ' --keep_rollouts=all'
).split()

compiled: list[str] = []


def _listen(event: str, seconds: float, **unused: Any) -> None:
  if event.endswith('backend_compile_duration'):
    compiled.append(event)


jax.monitoring.register_event_duration_secs_listener(_listen)


def problems(folder: pathlib.Path) -> list[str]:
  """Writes problems of which half have the answer 'a'; returns their flags."""
  texts = [f'{x}{y}{z}' for x in 'ab' for y in 'abcd' for z in 'abcd']
  rows = [
    {'prompt': text + '=', 'answer': text[0], 'trace': text[0]}
    for text in texts
  ]
  lines = [json.dumps(row) + '\n' for row in rows]
  (folder / 'train.jsonl').write_text(''.join(lines[::2]))
  (folder / 'test.jsonl').write_text(''.join(lines[1::2]))
  return [
    f'--task=jsonl:{folder}/train.jsonl',
    f'--task_options=trace:trace,test_path:{folder}/test.jsonl',
  ]


def train(workdir: pathlib.Path, *flags: str) -> None:
  """Runs GRPO as the command line does; SystemExit where it fails."""
  run.main(
    grpo.Config,
    lambda config: loop.train(config, grpo.method),
    ['grpo.py', f'--workdir={workdir}', *FLAGS, *flags],
  )


def at(number: int, action) -> None:
  """Calls an action once the row of an RL step was written."""
  write, save = metrics.Writer.write, checkpoints.Checkpoints.save

  def acting(self, stage, step, values, seconds):
    write(self, stage, step, values, seconds)
    if (stage, step) == ('rl', number):
      action()

  def waiting(self, *args):
    save(self, *args)
    self.wait()

  metrics.Writer.write = acting
  checkpoints.Checkpoints.save = waiting


def kill() -> None:
  """Ends this process as a lost machine does."""
  os.kill(os.getpid(), signal.SIGKILL)


def rows(workdir: pathlib.Path) -> list[dict[str, Any]]:
  """Returns the metrics but for the times."""
  times = ('seconds', 'tokens_per_second')
  return [
    {k: v for k, v in row.items() if k not in times}
    for row in metrics.read(workdir)
  ]


def summary(workdir: pathlib.Path) -> dict[str, Any]:
  """Returns the summary of a run."""
  return json.loads((workdir / 'summary.json').read_text())


def arrays(workdir: pathlib.Path, step: int = SFT + RL) -> dict[str, Any]:
  """Returns the arrays of a checkpoint by name."""
  path = workdir.absolute() / 'checkpoints' / str(step) / 'arrays'
  saved = ocp.PyTreeCheckpointer().restore(path)
  return {name: np.asarray(value) for name, value in saved.items()}
