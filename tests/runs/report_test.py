"""Tests of the picture and the summary of a run."""

import json
import math
import sys

import matplotlib
import matplotlib.image
import numpy as np
import pytest

from rljax.runs import metrics, report, run


def history(sft=60, rl=150, names=('reward/task', 'entropy', 'length')):
  """Returns rows like those of a run that learns."""
  rows = [
    {'stage': 'sft', 'step': i, 'seconds': 0.3 * i, 'loss': 2.0 / i}
    for i in range(1, sft + 1)
  ]
  for i in range(1, rl + 1):
    values = {
      'reward/task': 0.3 + 0.5 * (1 - math.exp(-i / 50)) + 0.05 * (-1) ** i,
      'entropy': math.exp(-i / 60),
      'length': 4.0 + math.exp(-i / 40),
      'kl/ref': 0.2 * (1 - math.exp(-i / 60)),
    }
    row = {'stage': 'rl', 'step': i, 'seconds': 20.0 + i}
    rows.append(row | {name: values[name] for name in names})
    if i % 50 == 0:
      row = {'stage': 'eval', 'step': i, 'seconds': 20.0 + i}
      low, high = i / 300 - 0.1, i / 300 + 0.1
      rows.append(
        row | {'accuracy': i / 300, 'accuracy_low': low, 'accuracy_high': high}
      )
  return rows


def texts(axes):
  return [text.get_text() for text in axes.texts]


def test_outcome_shows_reward_accuracy_and_intervals():
  outcome = report.figure(history()).axes[0]
  points, mean, accuracy = outcome.lines[:3]
  np.testing.assert_array_equal(points.get_xdata(), np.arange(61, 211))
  np.testing.assert_array_equal(accuracy.get_xdata(), [110, 160, 210])
  np.testing.assert_allclose(accuracy.get_ydata(), [1 / 6, 1 / 3, 1 / 2])
  band = outcome.collections[1].get_paths()[0].vertices
  assert {*np.round(band[band[:, 0] == 160, 1], 6)} == {0.233333, 0.433333}
  assert {'SFT', 'RL', 'accuracy\n0.50', 'reward\n0.78'} == {*texts(outcome)}
  # The mean of steps that alternate by 0.05 is smooth.
  assert np.abs(np.diff(mean.get_ydata())).max() < 0.02


def test_interval_of_the_moving_mean():
  rows = [
    {'stage': 'rl', 'step': i, 'seconds': 0.0, 'reward/task': i % 2}
    for i in range(24)
  ]
  outcome = report.figure(rows).axes[0]
  band = outcome.collections[0].get_paths()[0].vertices
  # Steps 11, 12, 13 have rewards 1, 0, 1: mean 2/3, standard error 1/3.
  got = sorted({*np.round(band[band[:, 0] == 12, 1], 6)})
  np.testing.assert_allclose(
    got, [2 / 3 - 1.96 / 3, 2 / 3 + 1.96 / 3], atol=1e-6
  )


def test_what_is_missing_is_said():
  figure = report.figure(history(names=('reward/task', 'length')))
  missing = [a.get_title(loc='left') for a in figure.axes if not a.lines]
  assert missing == [
    'entropy, nats per token',
    'KL from the reference, nats per token',
  ]
  assert all('not recorded' in texts(a) for a in figure.axes if not a.lines)


def test_labels_never_overlap():
  rows = history(rl=50)
  for row in rows:
    if 'accuracy' in row:
      row['accuracy'] = 0.6
  outcome = report.figure(rows).axes[0]
  ends = [t.xy[1] for t in outcome.texts if '\n' in t.get_text()]
  assert len(ends) == 2 and abs(ends[1] - ends[0]) >= 0.149


@pytest.mark.parametrize('accuracy, reward', [(0, 0), (0, 1), (1, 1)])
def test_labels_stay_inside_of_the_frame(accuracy, reward):
  rows = [{'stage': 'rl', 'step': i, 'seconds': 0.0} for i in range(1, 4)]
  for row in rows:
    row |= {'reward/task': reward, 'accuracy': accuracy}
  outcome = report.figure(rows).axes[0]
  ends = sorted(t.xy[1] for t in outcome.texts if '\n' in t.get_text())
  low, high = outcome.get_ylim()
  assert low + 0.074 <= ends[0] <= ends[1] - 0.149
  assert ends[1] <= high - 0.074


@pytest.mark.parametrize(
  'rows',
  [
    [],
    history(0, 1),
    history(1, 0),
    history(2, 1),
    [{'stage': 'eval', 'step': 0, 'seconds': 0.0, 'accuracy': 0.5}],
    [{'stage': 'rl', 'step': 1, 'seconds': 0.0, 'reward/task': math.nan}],
    [{'stage': 'rl', 'step': 1, 'seconds': 0.0, 'entropy': -1.0}],
    [{'stage': 'rl', 'step': 1, 'seconds': 0.0, 'length': 0.0}],
    [{'stage': 'rl', 'step': 1, 'seconds': 0.0, 'reward/task': -7.0}],
  ],
)
def test_any_beginning_of_a_run_is_drawn(rows):
  drawn = report.figure(rows)
  drawn.draw_without_rendering()
  for row in rows:
    low, high = drawn.axes[0].get_ylim()
    reward = row.get('reward/task', 0.0)
    assert low < reward < high or math.isnan(reward)


def test_picture_of_a_folder(tmp_path):
  with metrics.Writer(tmp_path) as writer:
    writer.write('rl', 1, {'reward/task': 0.5, 'entropy': math.nan}, 1.0)
  path = report.curves(tmp_path)
  assert path == tmp_path / 'curves.png'
  picture = matplotlib.image.imread(path)
  assert picture.shape == (900, 1440, 4)
  assert picture.std() > 0.02


def test_nothing_global_is_touched(tmp_path):
  before = dict(matplotlib.rcParams)
  report.curves(tmp_path)
  assert dict(matplotlib.rcParams) == before
  assert 'matplotlib.pyplot' not in sys.modules


VALUES = {
  'accuracy_sft': 0.344,
  'accuracy_sft_low': 0.288,
  'accuracy_sft_high': 0.404,
  'accuracy_rl': 0.84,
  'accuracy_rl_low': 0.79,
  'accuracy_rl_high': 0.88,
  'seconds': 291.2,
  'final_loss': math.nan,
}


def test_headline():
  assert report.headline(VALUES) == (
    'held-out accuracy 0.34 (0.29–0.40) after SFT, 0.84 (0.79–0.88) after RL: '
    '+50 points in 4:51'
  )
  assert report.headline({'accuracy_rl': 0.5}) == (
    'held-out accuracy 0.50 after RL'
  )
  cold = {'accuracy_sft': 0.4, 'accuracy_rl': 0.5, 'sft_steps': 0}
  assert report.headline(cold) == (
    'held-out accuracy 0.40 before RL, 0.50 after RL: +10 points'
  )
  more = {'accuracy_rl': 0.5, 'control': 'sft'}
  assert report.headline(more) == 'held-out accuracy 0.50 after more SFT'
  assert report.headline({}) == 'done'
  stopped = {'finished': False, 'done': 5, 'total': 9}
  said = 'unfinished, saved at step 5 of 9'
  assert report.headline(stopped) == said
  stopped['accuracy_sft'] = 0.5
  said += ': held-out accuracy 0.50 after SFT'
  assert report.headline(stopped) == said
  lost = {'accuracy_rl': 0.5, 'nonfinite': 1234}
  assert report.headline(lost).endswith('; 1,234 updates not finite')


PROGRAM = run.Program('quickstart', 'some/quickstart.py', 'python -m x')


def test_summary(tmp_path):
  report.curves(tmp_path)
  resume = "python -m x '--workdir=a b' --resume"
  values = VALUES | {'peak_rss_mb': 812.04, 'pass@4_rl': 0.9}
  report.summary(tmp_path, values, PROGRAM, resume)
  text = (tmp_path / 'summary.json').read_text()
  read = json.loads(text, parse_constant=pytest.fail)
  assert read == values | {'final_loss': None}
  text = (tmp_path / 'summary.md').read_text()
  for shown in (
    report.headline(VALUES),
    '| held-out accuracy after RL | 0.84 (0.79–0.88) |',
    '| pass@4 after RL | 0.9 |',
    '| time | 291.2 s |',
    '| most memory | 812 MB |',
    f'`{tmp_path}/curves.png`',
    f'- Resume, for longer: `{resume}`',
    '`some/quickstart.py`',
    '`python -m x --help`',
  ):
    assert shown in text
  assert 'tensorboard' not in text  # there is none
  assert not list(tmp_path.glob('*.tmp'))
