"""Tests of whole runs: they resume bit by bit, and fail in one clear line."""

import fcntl
import json
import os
import re
import resource
import signal
import subprocess
import sys

import numpy as np
import pytest

from rljax.rewards import sandbox
from rljax.runs import checkpoints, metrics, rollouts
from rljax.tasks import files
from rljax.tasks import task as task_lib
from tests.runs import tiny


@pytest.fixture(scope='module')
def problems(tmp_path_factory):
  return tiny.problems(tmp_path_factory.mktemp('problems'))


@pytest.fixture(scope='module')
def whole(problems, tmp_path_factory):
  """A run that nothing stopped."""
  workdir = tmp_path_factory.mktemp('whole')
  tiny.train(workdir, *problems)
  return workdir


@pytest.fixture
def acting(monkeypatch):
  """Undoes what `tiny.at` replaces."""
  monkeypatch.setattr(metrics.Writer, 'write', metrics.Writer.write)
  save = checkpoints.Checkpoints.save
  monkeypatch.setattr(checkpoints.Checkpoints, 'save', save)
  return tiny.at


def assert_same(workdir, whole):
  got, want = tiny.arrays(workdir), tiny.arrays(whole)
  assert got.keys() == want.keys()
  for name, value in want.items():
    assert got[name].dtype == value.dtype
    assert got[name].tobytes() == value.tobytes(), name
  assert tiny.rows(workdir) == tiny.rows(whole)
  samples = [(w / 'samples.jsonl').read_text() for w in (workdir, whole)]
  assert samples[0] == samples[1]
  kept = rollouts.read(workdir), rollouts.read(whole)
  for name in kept[1]:
    np.testing.assert_array_equal(kept[0][name], kept[1][name])
  spent = ('seconds', 'cpu_seconds', 'peak_rss_mb', 'workdir')
  for name, value in tiny.summary(whole).items():
    if name not in spent:
      assert tiny.summary(workdir)[name] == value, name


def test_a_run_writes_what_is_documented(whole):
  written = {p.name for p in whole.iterdir()}
  assert written >= {
    *('config.json', 'summary.json', 'summary.md', 'metrics.jsonl'),
    *('samples.jsonl', 'curves.png', 'tensorboard', 'checkpoints', 'rollouts'),
  }
  summary = tiny.summary(whole)
  for stage in ('sft', 'rl'):
    low, value, high = (
      summary[f'accuracy_{stage}{end}'] for end in ('_low', '', '_high')
    )
    assert 0 <= low <= value <= high <= 1
  assert summary['finished'] and summary['nonfinite'] == 0
  assert (summary['sft_steps'], summary['steps']) == (tiny.SFT, tiny.RL)
  assert summary['held_out'] == 8 and summary['control'] == 'none'
  assert 0 < summary['cpu_seconds'] and 0 < summary['seconds']
  stages = [(row['stage'], row['step']) for row in tiny.rows(whole)]
  begin = [('sft', i) for i in (1, 2, 3)] + [('eval', 3)]
  first = [('rl', i) for i in (1, 2, 3)] + [('eval', 3)]
  last = [('rl', i) for i in (4, 5, 6)] + [('eval', 6)]
  assert stages == begin + first + last


def test_rewards_vary_and_parameters_move(whole):
  """Otherwise equal runs would prove little."""
  rl = [row for row in tiny.rows(whole) if row['stage'] == 'rl']
  assert any(0 < row['reward/task'] < 1 for row in rl)
  assert any(row['grad_norm'] > 1e-4 for row in rl)
  assert all(row['nonfinite'] == 0 for row in rl)
  before, after = tiny.arrays(whole, tiny.SFT), tiny.arrays(whole)
  moved = [
    name
    for name in before.keys() & after.keys()
    if name.startswith('params') and (before[name] != after[name]).any()
  ]
  assert len(moved) > 5


def test_kept_rollouts_are_those_of_the_run(whole):
  kept = rollouts.read(whole)
  assert kept['response'].shape == (tiny.RL, tiny.ROWS, 2)
  rl = [row for row in tiny.rows(whole) if row['stage'] == 'rl']
  np.testing.assert_allclose(
    kept['reward'].mean(axis=1), [row['reward/task'] for row in rl], rtol=1e-6
  )
  np.testing.assert_allclose(
    kept['length'].mean(axis=1), [row['length'] for row in rl], rtol=1e-6
  )
  within = np.arange(2) < kept['length'][..., None]
  assert (kept['logp'][within] < 0).all() and not kept['logp'][~within].any()
  assert (kept['prompt_length'] == 5).all()
  for line in (whole / 'samples.jsonl').read_text().splitlines():
    sample = json.loads(line)
    step = sample['step'] - 1
    row = (tiny.SFT + step) % tiny.ROWS
    assert kept['uid'][step, row] == sample['uid']
    assert kept['reward'][step, row] == sample['reward']
  # Two steps are an epoch, and a group answers one prompt.
  uids = kept['uid'].reshape(tiny.RL // 2, -1)
  assert (np.sort(uids) == np.repeat(np.sort(uids[0, ::2]), 2)).all()


def _kill(problems, workdir, number):
  """Runs until SIGKILL arrives, after the checkpoint before RL step n."""
  program = (
    'import sys, pathlib; from tests.runs import tiny;'
    'tiny.at(int(sys.argv[1]), tiny.kill);'
    'tiny.train(pathlib.Path(sys.argv[2]), *sys.argv[3:])'
  )
  arguments = [str(number), str(workdir), *problems]
  done = subprocess.run([sys.executable, '-c', program, *arguments])
  assert done.returncode == -signal.SIGKILL
  assert checkpoints.Checkpoints(workdir).latest() == tiny.SFT + number - 1
  assert len(rollouts.read(workdir)['reward']) >= number - 1


def test_resumes_after_sigkill_at_mid_epoch(problems, whole, tmp_path):
  _kill(problems, tmp_path, 4)
  tiny.train(tmp_path, *problems, '--resume')
  assert_same(tmp_path, whole)


@pytest.mark.slow
@pytest.mark.parametrize('number', [1, 3, 6])
def test_resumes_after_sigkill_elsewhere(problems, whole, tmp_path, number):
  """After the warm start, at an epoch boundary, and before the last step."""
  _kill(problems, tmp_path, number)
  tiny.train(tmp_path, *problems, '--resume')
  assert_same(tmp_path, whole)


@pytest.mark.slow
def test_signals_save_and_end_the_run(
  problems, whole, tmp_path, acting, capsys
):
  """SIGTERM at an epoch boundary, then Ctrl-C within one."""
  flags = (*problems, '--checkpoint_every=50')
  acting(2, lambda: os.kill(os.getpid(), signal.SIGTERM))
  tiny.train(tmp_path, *flags)
  assert 'unfinished, saved at step 5 of 9: held' in capsys.readouterr().out
  assert not tiny.summary(tmp_path)['finished']
  with checkpoints.Checkpoints(tmp_path) as saved:
    assert saved.latest() == tiny.SFT + 2
  acting(3, lambda: os.kill(os.getpid(), signal.SIGINT))
  with pytest.raises(SystemExit) as ended:
    tiny.train(tmp_path, *flags, '--resume')
  assert ended.value.code == 130
  out = capsys.readouterr().out
  assert 'saved at step 6 of 9' in out and f'{tmp_path} --resume' in out
  acting(99, lambda: None)
  tiny.train(tmp_path, *flags, '--resume')
  out = capsys.readouterr().out
  assert 'longer: ' in out and ' --steps=12 ' in out
  for name, value in tiny.arrays(whole).items():
    assert tiny.arrays(tmp_path)[name].tobytes() == value.tobytes(), name
  assert tiny.rows(tmp_path) == tiny.rows(whole)


@pytest.mark.slow
def test_a_finished_run_goes_on(problems, whole, tmp_path):
  """From the middle of an epoch, as if it had been meant to."""
  tiny.train(tmp_path, *problems, '--steps=3')
  assert tiny.summary(tmp_path)['finished']
  tiny.train(tmp_path, *problems, '--resume')
  assert_same(tmp_path, whole)
  config = json.loads((tmp_path / 'config.json').read_text())
  assert config['steps'] == 6


@pytest.mark.slow
def test_resumes_with_the_flags_that_a_user_has(problems, tmp_path):
  """On one device, with XLA's own flags; the state is restored, no more."""
  program = (
    'import pathlib, sys; from tests.runs import tiny;'
    'folder, *flags = sys.argv[1:]; folder = pathlib.Path(folder);'
    'tiny.train(folder, *flags); tiny.train(folder, *flags, "--resume")'
  )
  flags = [*problems, '--sft_steps=0', '--steps=1', '--beta=0']
  done = subprocess.run(
    [sys.executable, '-c', program, str(tmp_path), *flags],
    env=dict(os.environ, XLA_FLAGS=''),
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr[-3000:]
  assert done.stdout.count('longer: ') == 2


def test_a_full_disk_ends_the_run_and_keeps_its_checkpoint(
  problems, tmp_path, acting, capsys
):
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  acting(2, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (512, hard)))
  try:
    with pytest.raises(SystemExit) as ended:
      tiny.train(tmp_path, *problems)
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
  assert ended.value.code == 1
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith('error: ') and 'File too large' in line
  with checkpoints.Checkpoints(tmp_path) as saved:
    assert saved.latest() == tiny.SFT + 1


def test_a_verifier_that_fails_is_counted_and_the_run_goes_on(
  problems, tmp_path, monkeypatch
):
  monkeypatch.setattr(files.File, 'trusted', False)

  def sandboxed(task, **limits):
    del task
    return sandbox.Sandbox('tests.runs.faulty:make', **limits)

  monkeypatch.setattr(task_lib, 'sandboxed', sandboxed)
  flags = ('--sft_steps=0', '--steps=2', '--verify_timeout=0.5')
  tiny.train(tmp_path, *problems, *flags)
  rl = [row for row in tiny.rows(tmp_path) if row['stage'] == 'rl']
  # In an epoch, 3 of each 8 problems fail, for both of their rows.
  assert sum(row['verifier/failed'] for row in rl) == 2 * 3 * 2
  kept = rollouts.read(tmp_path)
  failed = kept['uid'] % 8 < 3
  np.testing.assert_array_equal(np.isnan(kept['reward']), failed)
  for row, reward, lost in zip(rl, kept['reward'], failed, strict=True):
    assert row['verifier/failed'] == lost.sum()
    assert row['reward/missing'] == pytest.approx(lost.mean())
    assert row['reward/task'] == pytest.approx(reward[~lost].mean())
    assert row['nonfinite'] == 0


# A fresh policy solves one problem in twenty.
FILLED = ('--sft_steps=0', '--max_gen_batches=60', '--learning_rate=1e-3')


def _vary(rewards):
  """Whether the rewards of each prompt do."""
  pairs = rewards.reshape(-1, 2)  # of a group
  return pairs[:, 0] != pairs[:, 1]


def test_only_groups_that_vary_are_learned_from(problems, tmp_path):
  tiny.train(tmp_path, *problems, *FILLED, '--steps=2')
  kept = rollouts.read(tmp_path)
  assert _vary(kept['reward']).all()
  rl = [row for row in tiny.rows(tmp_path) if row['stage'] == 'rl']
  for row in rl:
    assert row['reward/task'] == 0.5 and row['groups/zero_variance'] == 0
    batches = row['refill/batches']
    assert 1 < batches <= 60 and batches == int(batches)
    # 8 places were taken, and not before the last batch.
    assert 8 <= row['refill/kept'] * batches * 8 < 16
    assert 0 < row['refill/reward'] < 0.5
  for line in (tmp_path / 'samples.jsonl').read_text().splitlines():
    sample = json.loads(line)
    at = sample['step'] - 1, (sample['step'] - 1) % tiny.ROWS
    assert kept['uid'][at] == sample['uid']
    assert kept['reward'][at] == sample['reward']
    assert (sample['reward'] == 1) == (sample['response'] == sample['answer'])
    assert sample['prompt'][0] == sample['answer']


@pytest.mark.slow
def test_a_run_that_fills_its_batches_resumes(problems, tmp_path):
  flags = (*problems, *FILLED, '--eval_every=2')
  tiny.train(tmp_path / 'whole', *flags, '--steps=4')
  tiny.train(tmp_path / 'parts', *flags, '--steps=2')
  tiny.train(tmp_path / 'parts', *flags, '--steps=4', '--resume')
  for name, value in tiny.arrays(tmp_path / 'whole', 4).items():
    found = tiny.arrays(tmp_path / 'parts', 4)[name]
    assert found.tobytes() == value.tobytes(), name
  assert tiny.rows(tmp_path / 'parts') == tiny.rows(tmp_path / 'whole')


@pytest.mark.slow
def test_problems_that_nobody_solves_end_the_run(tmp_path, capsys):
  rows = [{'prompt': f'{x}=', 'answer': 'ccc'} for x in 'abcdefgh']
  text = ''.join(json.dumps(row) + '\n' for row in rows)
  (tmp_path / 'train.jsonl').write_text(text)
  flags = f'--task=jsonl:{tmp_path}/train.jsonl --prompts=8 --eval_problems=1'
  flags = (*flags.split(), *FILLED, '--max_gen_batches=3')
  with pytest.raises(SystemExit) as ended:
    tiny.train(tmp_path / 'run', *flags)
  assert ended.value.code == 1
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith('error: only 0 of 24 groups in 3 batches can be')
  assert 'rewards of all responses: 0: 48.' in line


@pytest.mark.slow
def test_more_warm_start_in_place_of_rl_that_diverges(
  problems, tmp_path, capsys
):
  flags = ('--control=sft', '--sft_learning_rate=1e38')
  tiny.train(tmp_path, *problems, *flags)
  stages = [(row['stage'], row['step']) for row in tiny.rows(tmp_path)]
  trained = [('sft', i + 1) for i in range(tiny.SFT + tiny.RL)]
  assert [s for s in stages if s[0] != 'eval'] == trained
  summary = tiny.summary(tmp_path)
  assert summary['control'] == 'sft'
  assert {'accuracy_sft', 'accuracy_rl', 'accuracy_rl_low'} <= summary.keys()
  lost = sum(row.get('nonfinite', 0) for row in tiny.rows(tmp_path))
  assert summary['nonfinite'] == lost > 5
  assert f'; {lost:.0f} updates not finite' in capsys.readouterr().out


def refused(capsys, workdir, *flags):
  """Returns exit status and error line of a run that compiles nothing."""
  before = len(tiny.compiled)
  with pytest.raises(SystemExit) as ended:
    tiny.train(workdir, *flags)
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith('error: ')
  assert len(tiny.compiled) == before, 'it compiled before it refused'
  return ended.value.code, line


@pytest.mark.parametrize(
  'flag,status,words',
  [
    ('--stepz=3', 2, 'steps'),
    ('--steps=many', 2, 'steps'),
    ('--heads=3', 2, 'multiple of twice --heads=3'),
    ('--mesh=dta:8', 2, "'dta' is unknown; choose among .*data"),
    ('--mesh=sequence:8', 2, 'nothing is split over it'),
    ('--mesh=data:3', 1, 'needs 3 devices, but there are 8'),
    ('--prompts=6', 1, '^error: prompts=6 .* multiple of 8'),
    ('--sft_prompts=7', 1, '^error: sft_prompts=7 .* change --sft_prompts'),
    ('--microbatches=2', 1, 'prompts=8 .* multiple of 16'),
    ('--resume', 1, '--resume: .*/run holds no run'),
    ('--task=arithmetik', 1, "did you mean 'arithmetic'"),
    ('--task=jsonl:/no/such.jsonl', 1, 'There is no file'),
    ('--task_options=trce:trace', 1, "no option 'trce'; did you mean 'trace'"),
    ('--model=llama', 1, "'llama' is unknown; choose small or smollm2-135m"),
    ('--tokenizer=bite', 1, 'byte'),
    ('--prompt_len=4', 1, r'Prompt \d+ has 5 tokens; the limit is 4'),
    ('--sft_traces=17', 1, 'has 16 worked solutions'),
    ('--max_tokens=1', 1, 'has 2 tokens, more than --max_tokens=1'),
    ('--stop_text=ab', 1, 'is 2 tokens, not one'),
  ],
)
def test_refused(problems, tmp_path, capsys, flag, status, words):
  code, line = refused(capsys, tmp_path / 'run', *problems, flag)
  assert code == status
  assert re.search(words, line), line
  assert not (tmp_path / 'run').exists()


def test_an_empty_dataset(tmp_path, capsys):
  (tmp_path / 'empty.jsonl').write_text('\n')
  flag = f'--task=jsonl:{tmp_path}/empty.jsonl'
  code, line = refused(capsys, tmp_path / 'run', flag)
  assert code == 1 and 'empty.jsonl holds no examples' in line


def test_a_missing_extra(tmp_path, capsys, monkeypatch):
  monkeypatch.setitem(sys.modules, 'reasoning_gym', None)
  flag = '--task=reasoning_gym:countdown'
  code, line = refused(capsys, tmp_path / 'run', flag)
  assert code == 1 and "pip install 'rljax[tasks]'" in line


def test_the_folder_of_another_run(problems, whole, capsys):
  before = tiny.rows(whole)
  _, line = refused(capsys, whole, *problems)
  assert 'holds a run already; add --resume' in line
  _, line = refused(capsys, whole, *problems, '--resume', '--steps=5')
  assert 'another config: steps 6 -> 5' in line
  with (whole / '.lock').open() as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    _, line = refused(capsys, whole, *problems, '--resume')
  assert f'{whole} is in use by another process' in line
  assert tiny.rows(whole) == before


def test_long_prompts_are_skipped_and_named(problems, tmp_path, capsys):
  extra = {'prompt': 'abcdabcd=', 'answer': 'a', 'trace': 'a'}
  path = problems[0].removeprefix('--task=jsonl:')
  with open(path) as file:
    lines = file.readlines()
  longer = tmp_path / 'train.jsonl'
  longer.write_text(''.join(lines) + json.dumps(extra) + '\n')
  flags = ('--prompt_len=5', '--long_prompts=skip', '--sft_steps=0')
  tiny.train(
    tmp_path / 'run',
    f'--task=jsonl:{longer}',
    problems[1],
    *flags,
    '--steps=4',
  )
  rl = [row for row in tiny.rows(tmp_path / 'run') if row['stage'] == 'rl']
  # 32 examples are a little less than two epochs of 17.
  assert 1 <= rl[-1]['prompts/skipped'] <= 2
  named = "Prompt 16 has 10 tokens; the limit is 5: 'abcdabcd='"
  assert capsys.readouterr().out.count(named) == 1
  kept = rollouts.read(tmp_path / 'run')
  assert kept['prompt_length'].max() == 5
