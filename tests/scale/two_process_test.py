"""The same run in two processes, over loopback."""

import json
import os
import socket
import subprocess
import sys
import time

import pytest

from experiments import grpo
from rljax.runs import metrics, rollouts
from tests.runs import tiny

FLAGS = (
  '--width=16 --heads=2 --layers=1 --prompts=8 --group_size=2 --max_tokens=5'
  ' --steps=2 --eval_problems=8 --eval_every=0 --keep_rollouts=all'
).split()


def _port() -> int:
  with socket.socket() as free:
    free.bind(('127.0.0.1', 0))
    return free.getsockname()[1]


def start_all(workdir, *flags, processes=2, devices=1):
  """Runs GRPO in several processes; returns status, stdout, stderr of each."""
  command = [sys.executable, '-m', 'experiments.grpo', f'--workdir={workdir}']
  command += [*FLAGS, *flags, f'--devices={devices}']
  if processes > 1:
    address = f'--coordinator=127.0.0.1:{_port()}'
    command += [f'--processes={processes}', address]
  # Without the eight devices of the tests; compiled as cheaply.
  environment = dict(os.environ, XLA_FLAGS='--xla_backend_optimization_level=0')
  started = [
    subprocess.Popen(
      [*command, f'--process={i}'],
      env=environment,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )
    for i in range(processes)
  ]
  outputs = [process.communicate(timeout=280) for process in started]
  return [
    (process.returncode, *texts)
    for process, texts in zip(started, outputs, strict=True)
  ]


def run_all(workdir, *flags, **how):
  """Returns what the processes of a run that succeeds write."""
  ended = start_all(workdir, *flags, **how)
  for status, _, error in ended:
    assert status == 0, error[-3000:]
  return [out for _, out, _ in ended]


def assert_run(workdir, outputs):
  assert 'summary:' in outputs[0]
  rl = [row for row in metrics.read(workdir) if row['stage'] == 'rl']
  assert [row['step'] for row in rl] == [1, 2]
  assert all(row['nonfinite'] == 0 for row in rl)
  kept = rollouts.read(workdir)
  assert kept['response'].shape[:2] == (2, 16)
  got = kept['reward'].mean(axis=1)
  assert list(got) == pytest.approx([row['reward/task'] for row in rl])
  assert (workdir / 'checkpoints' / '2').is_dir()
  assert tiny.summary(workdir)['finished']
  return kept


def test_a_device_verifier_in_two_processes(tmp_path):
  outputs = run_all(tmp_path, '--task=arithmetic')
  assert_run(tmp_path, outputs)
  assert 'summary:' not in outputs[1]


def test_both_processes_say_that_the_folder_is_of_another_run(tmp_path):
  config = grpo.Config(steps=77).to_json()
  (tmp_path / 'config.json').write_text(json.dumps(config))
  begun = time.monotonic()
  ended = start_all(tmp_path, '--task=arithmetic', '--resume')
  assert time.monotonic() - begun < 60  # a lost process is waited for longer
  for status, _, error in ended:
    assert status == 1
    (line,) = error.splitlines()
    assert line.startswith(f'error: {tmp_path} holds a run of another config')
    assert 'steps 77 -> 2' in line


@pytest.mark.slow
def test_two_processes_draw_what_one_draws(tmp_path):
  flags = ('--task=arithmetic', '--steps=1')
  kept = []
  for processes, devices in ((1, 4), (2, 2)):
    workdir = tmp_path / str(processes)
    run_all(workdir, *flags, processes=processes, devices=devices)
    kept.append(rollouts.read(workdir))
  for name in ('uid', 'prompt', 'response', 'reward'):
    assert (kept[0][name] == kept[1][name]).all(), name


@pytest.mark.slow
def test_two_processes_fill_their_batch_as_one_does(tmp_path):
  """They draw as often, whose groups ever vary, and learn from the same."""
  flags = tiny.problems(tmp_path)
  flags += ['--max_gen_batches=60', '--max_tokens=2']
  kept, rows = [], []
  for processes, devices in ((1, 4), (2, 2)):
    workdir = tmp_path / str(processes)
    run_all(workdir, *flags, processes=processes, devices=devices)
    kept.append(rollouts.read(workdir))
    rows.append([r for r in metrics.read(workdir) if r['stage'] == 'rl'])
  pairs = kept[0]['reward'].reshape(2, -1, 2)
  assert (pairs[..., 0] != pairs[..., 1]).all()
  for name in ('uid', 'prompt', 'response', 'reward'):
    assert (kept[0][name][0] == kept[1][name][0]).all(), name
  names = 'refill/batches', 'refill/kept', 'refill/reward', 'verifier/failed'
  first = [[row[0][name] for name in names] for row in rows]
  assert first[0] == pytest.approx(first[1])
  assert first[0][0] > 1


@pytest.mark.slow
@pytest.mark.parametrize('processes,devices', [(1, 8), (2, 2)])
def test_a_host_verifier(tmp_path, processes, devices):
  flags = tiny.problems(tmp_path)
  workdir = tmp_path / 'run'
  outputs = run_all(workdir, *flags, processes=processes, devices=devices)
  assert_run(workdir, outputs)


@pytest.mark.slow
def test_a_device_verifier_on_eight_devices(tmp_path):
  outputs = run_all(tmp_path, '--task=arithmetic', processes=1, devices=8)
  assert_run(tmp_path, outputs)
