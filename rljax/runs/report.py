"""What is left of a run for people: curves.png, summary.json, summary.md."""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import json
import math
import os
import pathlib
import shlex
from typing import Any

import matplotlib.axes
import matplotlib.backends.backend_agg
import matplotlib.figure
import matplotlib.ticker
import numpy as np

from rljax.runs import metrics, run, terminal

CURVES = 'curves.png'
SUMMARY = 'summary.json'
SUMMARY_TEXT = 'summary.md'

# Told apart with any color vision (Okabe and Ito).
_BLUE, _ORANGE, _GREEN, _PINK = '#0072B2', '#D55E00', '#009E73', '#AA4499'
_GRAY, _DARK = '#666666', '#222222'
_TEXT = 11  # points
_FEW = 30  # points that are drawn large
_Z = 1.96  # normal quantile of a 95 % interval
_WINDOWS = 12  # of the moving mean, in a whole curve


@dataclasses.dataclass(frozen=True)
class _Panel:
  """A plot of one metric."""

  title: str
  name: str
  color: str


_PANELS = (
  _Panel('entropy, nats per token', 'entropy', _GREEN),
  _Panel('response length, tokens', 'length', _PINK),
  _Panel('KL from the reference, nats per token', 'kl/ref', _DARK),
)


def curves(workdir: str | os.PathLike[str]) -> pathlib.Path:
  """Draws the metrics of a run into curves.png and returns its path."""
  path = pathlib.Path(workdir, CURVES)
  canvas = matplotlib.backends.backend_agg.FigureCanvasAgg(
    figure(metrics.read(workdir))
  )
  canvas.print_png(str(path))
  return path


def figure(rows: Sequence[Mapping[str, Any]]) -> matplotlib.figure.Figure:
  """Returns the picture of a run.

  Reward, entropy, length and KL are shown as measured and as a moving mean,
  held-out accuracy with its 95 % interval. What was not recorded is said so.

  Args:
    rows: what `metrics.read` returns.
  """
  clock = metrics.Clock()
  steps = [clock(row['step']) for row in rows]
  drawn = matplotlib.figure.Figure(figsize=(12, 7.5), dpi=120)
  drawn.set_layout_engine('constrained', hspace=0.06, wspace=0.03)
  grid = drawn.subplots(2, 2)
  _draw_outcome(grid[0, 0], rows, steps)
  for axes, panel in zip(grid.flat[1:], _PANELS, strict=True):
    _draw_panel(axes, panel, rows, steps)
  boundary = _boundary(rows, steps)
  for axes in grid.flat:
    _style(axes, max(steps, default=1))
    if boundary is not None and axes.lines:
      _mark(axes, boundary)
  label = 'step' if boundary is None else 'SFT updates, then rollout batches'
  for axes in grid[1]:
    axes.set_xlabel(label, fontsize=_TEXT, color=_GRAY)
  return drawn


def headline(values: Mapping[str, Any]) -> str:
  """Returns the result of a run in one line.

  Args:
    values: accuracy_sft, accuracy_rl, each with _low and _high, seconds,
      sft_steps, control, finished, done and total, nonfinite; what is missing
      is left out.
  """
  parts = [
    f'{_interval(values, name)} {when}'
    for name, when in _moments(values).items()
    if name in values
  ]
  text = f'held-out accuracy {", ".join(parts)}' if parts else 'done'
  if not values.get('finished', True):
    text = f'unfinished, saved at step {values["done"]} of {values["total"]}'
    text += f': held-out accuracy {", ".join(parts)}' if parts else ''
  if len(parts) == 2:
    gain = 100 * (values['accuracy_rl'] - values['accuracy_sft'])
    text += f': {gain:+.0f} points'
  if 'seconds' in values:
    text += f' in {terminal.clock(values["seconds"])}'
  if values.get('nonfinite'):
    text += f'; {lost(values["nonfinite"])}'
  return text


def lost(count: int) -> str:
  """Returns what is said about updates that changed nothing."""
  return f'{count:,} update{"s" * (count > 1)} not finite'


def _moments(values: Mapping[str, Any]) -> dict[str, str]:
  """Returns when the accuracies of a run were measured."""
  warm = values.get('sft_steps', 1)
  more = values.get('control') == 'sft'
  return {
    'accuracy_sft': 'after SFT' if warm else 'before RL',
    'accuracy_rl': 'after more SFT' if more else 'after RL',
  }


def summary(
  workdir: str | os.PathLike[str],
  values: Mapping[str, Any],
  program: run.Program,
  resume: str,
) -> None:
  """Writes summary.json and summary.md.

  Args:
    workdir: folder of the run.
    values: see `headline`; others are listed as they are.
    program: what was started.
    resume: the command line that goes on.
  """
  root = pathlib.Path(workdir)
  finite = {k: _json(v) for k, v in values.items()}
  text = json.dumps(finite, indent=2, allow_nan=False) + '\n'
  _write(root / SUMMARY, text)
  _write(root / SUMMARY_TEXT, _markdown(root, values, program, resume))


def _markdown(
  root: pathlib.Path,
  values: Mapping[str, Any],
  program: run.Program,
  resume: str,
) -> str:
  """Returns the summary for people."""
  lines = [f'# {program.name}', '', headline(values) + '.', '']
  lines += ['| | |', '|---|---|']
  lines += [f'| {name} | {value} |' for name, value in _table(values)]
  logs = shlex.quote(f'--logdir={root / "tensorboard"}')
  lines += ['', '## Files', '']
  lines += [
    f'- `{root / name}`: {what}'
    for name, what in (
      (CURVES, 'reward, held-out accuracy, entropy, length and KL'),
      (metrics.FILE, 'every number of every step'),
      ('samples.jsonl', 'sampled answers with their rewards'),
      ('tensorboard', f'for `tensorboard {logs}`'),
      ('checkpoints', 'the last states of the run'),
      ('config.json', 'its settings'),
    )
    if (root / name).exists()
  ]
  source = program.source or 'the program'
  lines += ['', '## Next', '']
  ended = values.get('finished', True)
  lines += [
    f'- {"Resume, for longer" if ended else "Resume"}: `{resume}`',
    f'- Settings: `{program.start} --help`',
    f'- Another method: change `method` in `{source}`, or run another module '
    'of `experiments/` on the same task.',
  ]
  return '\n'.join(lines) + '\n'


# What summary.json calls a value, and what a person does.
_NAMES = {
  'task': 'task',
  'sft_steps': 'updates of the warm start',
  'steps': 'rollout batches',
  'nonfinite': 'updates that were not finite and changed nothing',
  'seconds': 'time',
  'cpu_seconds': 'CPU time',
  'peak_rss_mb': 'most memory',
  'held_out': 'held-out problems',
  'held_out_skipped': 'held-out problems with too long prompts',
  'control': 'control',
}
_UNITS = {'seconds': 's', 'cpu_seconds': 's', 'peak_rss_mb': 'MB'}
_SAID = ('finished', 'done', 'total', 'workdir')  # elsewhere


def _table(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
  """Yields the rows of a summary: what it is and how much."""
  moments = _moments(values)
  for name, value in values.items():
    if name in moments:
      yield f'held-out accuracy {moments[name]}', _interval(values, name)
    elif name.startswith(tuple(moments)) or name in _SAID:
      continue
    else:
      stem, _, stage = name.rpartition('_')
      when = moments.get(f'accuracy_{stage}') if '@' in name else None
      label = f'{stem} {when}' if when else _NAMES.get(name, name)
      yield label, f'{_cell(value)} {_UNITS.get(name, "")}'.strip()


def _draw_outcome(
  axes: matplotlib.axes.Axes,
  rows: Sequence[Mapping[str, Any]],
  steps: Sequence[int],
) -> None:
  """Reward of the sampled answers and accuracy on held-out prompts."""
  x, reward = _series(rows, steps, 'reward/task')
  ends = []
  if len(x):
    _draw_mean(axes, x, reward, _ORANGE, band=True)
    last = _moving(reward)[0][-1]
    ends.append((last, f'reward\n{last:.2f}', _ORANGE))
  x, accuracy = _series(rows, steps, 'accuracy')
  if len(x):
    _draw_accuracy(axes, x, accuracy, rows, steps)
    last = accuracy[-1]
    ends.append((last, f'accuracy\n{last:.2f}', _BLUE))
  low = min([0.0, *reward])
  high = max([1.0, *reward])
  axes.set_ylim(low - 0.02 * (high - low), high + 0.02 * (high - low))
  _label_ends(axes, ends, 0.15 * (high - low))
  axes.set_title(
    'reward and held-out accuracy, with 95 % intervals',
    loc='left',
    fontsize=_TEXT + 1,
    color=_DARK,
  )
  if not ends:
    _say_missing(axes)


def _draw_accuracy(
  axes: matplotlib.axes.Axes,
  x: np.ndarray,
  accuracy: np.ndarray,
  rows: Sequence[Mapping[str, Any]],
  steps: Sequence[int],
) -> None:
  """Measured points, joined, with the band of their intervals."""
  axes.plot(x, accuracy, '-o', color=_BLUE, lw=2.2, ms=5, zorder=4)
  at, low = _series(rows, steps, 'accuracy_low')
  _, high = _series(rows, steps, 'accuracy_high')
  if len(at) and len(low) == len(high):
    axes.fill_between(at, low, high, color=_BLUE, alpha=0.18, lw=0, zorder=2)
    axes.vlines(at, low, high, color=_BLUE, alpha=0.5, lw=1.2, zorder=4)


def _draw_panel(
  axes: matplotlib.axes.Axes,
  panel: _Panel,
  rows: Sequence[Mapping[str, Any]],
  steps: Sequence[int],
) -> None:
  """One metric of the policy's answers."""
  x, values = _series(rows, steps, panel.name)
  axes.set_title(panel.title, loc='left', fontsize=_TEXT + 1, color=_DARK)
  if not len(x):
    _say_missing(axes)
    return
  _draw_mean(axes, x, values, panel.color, band=False)
  mean = _moving(values)[0]
  low, high = min(0.0, *values, *mean), max(*values, *mean)
  axes.set_ylim(low * 1.05, high * 1.08 if high > 0 else 1.0)
  _label_ends(axes, [(mean[-1], _short(mean[-1]), panel.color)], 0.0)


def _draw_mean(
  axes: matplotlib.axes.Axes,
  x: np.ndarray,
  y: np.ndarray,
  color: str,
  *,
  band: bool,
) -> None:
  """Every step thin, their moving mean thick, its 95 % interval as a band."""
  mean, error = _moving(y)
  size = 9 if len(x) < _FEW else 4
  axes.plot(x, y, '.', color=color, ms=size, alpha=0.4, mew=0, zorder=1)
  axes.plot(x, mean, color=color, lw=2.2, zorder=3)
  if band:
    axes.fill_between(
      x, mean - error, mean + error, color=color, alpha=0.2, lw=0, zorder=2
    )


def _moving(y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Returns the mean of the steps around each, and 1.96 standard errors."""
  half = len(y) // (2 * _WINDOWS)
  windows = [y[max(0, i - half) : i + half + 1] for i in range(len(y))]
  mean = np.array([w.mean() for w in windows])
  error = np.array(
    [w.std(ddof=1) / math.sqrt(len(w)) if len(w) > 1 else 0 for w in windows]
  )
  return mean, _Z * error


def _series(
  rows: Sequence[Mapping[str, Any]], steps: Sequence[int], name: str
) -> tuple[np.ndarray, np.ndarray]:
  """Returns the places and values at which a metric is a number."""
  points = [
    (step, row[name])
    for step, row in zip(steps, rows, strict=True)
    if math.isfinite(row.get(name, math.nan))
  ]
  x, y = zip(*points, strict=True) if points else ((), ())
  return np.array(x, float), np.array(y, float)


def _boundary(
  rows: Sequence[Mapping[str, Any]], steps: Sequence[int]
) -> int | None:
  """Returns the last step of SFT, if RL follows."""
  sft = [s for s, row in zip(steps, rows, strict=True) if row['stage'] == 'sft']
  rl = any(row['stage'] == 'rl' for row in rows)
  return max(sft) if sft and rl else None


def _label_ends(
  axes: matplotlib.axes.Axes,
  ends: Sequence[tuple[float, str, str]],
  room: float,
) -> None:
  """Names one or two curves at their right ends, inside of the frame.

  Args:
    axes: of the curves, with its limits set.
    ends: last value, text and color of each.
    room: height of a text, which is kept between two.
  """
  ends = sorted(ends)
  low, high = axes.get_ylim()
  overlap = max(0.0, room - (ends[-1][0] - ends[0][0])) if ends[1:] else 0.0
  places: list[float] = []
  for (y, *_), side in zip(ends, (-0.5, 0.5), strict=False):
    above = places[-1] + room if places else low + room / 2
    others = len(ends) - len(places) - 1
    top = high - room / 2 - room * others
    places.append(min(max(y + side * overlap, above), top))
  for (_, label, color), y in zip(ends, places, strict=True):
    axes.annotate(
      label,
      (1, y),
      xycoords=('axes fraction', 'data'),
      xytext=(6, 0),
      textcoords='offset points',
      color=color,
      fontsize=_TEXT,
      fontweight='bold',
      va='center',
      annotation_clip=False,
    )


def _say_missing(axes: matplotlib.axes.Axes) -> None:
  axes.text(
    0.5,
    0.5,
    'not recorded',
    transform=axes.transAxes,
    ha='center',
    va='center',
    color=_GRAY,
    fontsize=_TEXT,
  )
  axes.set_yticks([])


def _style(axes: matplotlib.axes.Axes, last: int) -> None:
  """A light frame from step 0 to the last one."""
  axes.set_xlim(0, 1.015 * max(last, 1))
  axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(8, integer=True))
  axes.grid(color='#DDDDDD', lw=0.8)
  axes.set_axisbelow(True)
  axes.spines[['top', 'right']].set_visible(False)
  axes.spines[['left', 'bottom']].set_color('#AAAAAA')
  axes.tick_params(labelsize=_TEXT, colors=_GRAY)


def _mark(axes: matplotlib.axes.Axes, boundary: int) -> None:
  """Shows where RL takes over from SFT."""
  axes.axvspan(0, boundary, color='#F2F2F2', lw=0, zorder=0)
  axes.axvline(boundary, color=_GRAY, lw=1, ls=(0, (4, 3)), zorder=1)
  for text, align, shift in (('SFT', 'right', -6), ('RL', 'left', 6)):
    axes.annotate(
      text,
      (boundary, 1),
      xycoords=('data', 'axes fraction'),
      xytext=(shift, -4),
      textcoords='offset points',
      ha=align,
      va='top',
      fontsize=_TEXT,
      color=_GRAY,
    )


def _short(value: float) -> str:
  """Returns three digits, or all before the point."""
  return f'{value:,.0f}' if abs(value) >= 1000 else f'{value:#.3g}'.rstrip('.')


def _interval(values: Mapping[str, Any], name: str) -> str:
  """Returns 0.71 (0.65–0.77), or without the interval if it is unknown."""
  text = f'{values[name]:.2f}'
  low, high = values.get(f'{name}_low'), values.get(f'{name}_high')
  return (
    text if low is None or high is None else f'{text} ({low:.2f}–{high:.2f})'
  )


def _cell(value: Any) -> str:
  """Returns a value for a table."""
  return f'{value:.4g}' if isinstance(value, float) else str(value)


def _json(value: Any) -> Any:
  """Returns None for a float that JSON has no word for."""
  return (
    None if isinstance(value, float) and not math.isfinite(value) else value
  )


def _write(path: pathlib.Path, text: str) -> None:
  """Replaces a file at once, so that no half of it is ever read."""
  partial = path.with_suffix('.tmp')
  partial.write_text(text, encoding='utf-8')
  partial.replace(path)
