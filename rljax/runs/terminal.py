"""The live view of a run: one picture that changes in place, no scrolling."""

from collections.abc import Mapping, Sequence
import dataclasses
import time
from types import TracebackType
from typing import Self

import rich.box
import rich.console
import rich.constrain
import rich.live
import rich.panel
import rich.progress_bar
import rich.table
import rich.text

_STAGES = {'sft': 'supervised warm start', 'rl': 'reinforcement learning'}
_BARS = '▁▂▃▄▅▆▇█'
_WIDTH = 100  # at most; wider, the numbers drift apart
_NARROW = 76  # columns; in less, only the numbers that matter are shown
_HEIGHT = 14  # lines; in less, none is blank
_CURVE = 20  # columns of the reward curve
_LINES = 3  # of a sampled text; fixed, so that the picture keeps its height
_LONGEST = 2000  # characters that are looked at for these lines
_HOLD = 4.0  # seconds for which a sample stays readable
_REFRESH = 2.0  # pictures per second; each costs a few ms of the training


@dataclasses.dataclass(frozen=True)
class Sample:
  """An answer of the policy."""

  prompt: str
  response: str
  reward: float
  step: int


@dataclasses.dataclass(frozen=True)
class State:
  """What the view shows."""

  title: str
  stage: str = 'sft'
  step: int = 0
  steps: int = 0  # of this stage
  seconds: float = 0.0  # since the run began
  left: float | None = None  # seconds to the end of the stage, if known
  doing: str = ''  # what goes on, unless it is a step that was seen before
  warning: str = ''
  values: Mapping[str, float] = dataclasses.field(default_factory=dict)
  rewards: tuple[float, ...] = ()  # of every step so far
  sample: Sample | None = None


class View:
  """Shows a run while it is open; silent where nobody can watch."""

  def __init__(
    self,
    title: str,
    console: rich.console.Console | None = None,
    seconds: float = 0.0,
  ):
    """Prepares a view.

    Args:
      title: what runs, in a few words.
      console: where to; stdout by default.
      seconds: that the run took before it was resumed.
    """
    self._console = console or rich.console.Console(highlight=False)
    self._begin = time.monotonic() - seconds
    self._state = State(title)
    # Step and time of the stage's first update.
    self._first: tuple[int, float] | None = None
    self._shown = -_HOLD
    self._live = rich.live.Live(
      get_renderable=self._picture,
      console=self._console,
      refresh_per_second=_REFRESH,
    )

  @property
  def watched(self) -> bool:
    """Whether somebody can see the view; if not, it shows nothing."""
    console = self._console
    utf8 = console.encoding.lower().startswith('utf')
    return console.is_terminal and not console.is_dumb_terminal and utf8

  def begin(
    self, stage: str, step: int, steps: int, values: Mapping[str, float]
  ) -> None:
    """Announces a stage before its first step is compiled.

    Args:
      stage: 'sft' or 'rl'.
      step: steps of the stage that are done.
      steps: steps that the stage will have.
      values: as in `update`.
    """
    self._first = None
    self._state = dataclasses.replace(
      self._state,
      stage=stage,
      step=step,
      steps=steps,
      left=None,
      doing='compiling',
      values={**self._state.values, **values},
    )

  def update(
    self, stage: str, step: int, steps: int, values: Mapping[str, float]
  ) -> None:
    """Takes in the numbers of one step.

    Args:
      stage: 'sft' or 'rl'.
      step: steps of the stage that are done.
      steps: steps that the stage will have.
      values: metrics by name; those not given keep their last value. Shown
        are reward/task, accuracy, accuracy_low, accuracy_high, accuracy_sft,
        length, entropy, tokens_per_second and loss.
    """
    now = time.monotonic()
    if stage != self._state.stage or self._first is None:
      self._first = (step, now)  # later steps do not compile
    first, since = self._first
    rate = (now - since) / (step - first) if step > first else None
    self._state = dataclasses.replace(
      self._state,
      stage=stage,
      step=step,
      steps=steps,
      left=None if rate is None else rate * (steps - step),
      doing='',
      values={**self._state.values, **values},
      rewards=self._state.rewards + _reward(values),
    )

  def measured(self, values: Mapping[str, float]) -> None:
    """Takes in numbers that are not of a step; see `update`."""
    values = {**self._state.values, **values}
    doing = '' if self._first else 'compiling'
    self._state = dataclasses.replace(self._state, values=values, doing=doing)

  def say_doing(self, what: str) -> None:
    """Shows what goes on until the next numbers come."""
    self._state = dataclasses.replace(self._state, doing=what)

  def warn(self, text: str) -> None:
    """Shows a few words that stay."""
    self._state = dataclasses.replace(self._state, warning=text)

  def sample(
    self, prompt: str, response: str, reward: float, step: int
  ) -> None:
    """Offers a sampled answer; the last one is kept for a few seconds."""
    now = time.monotonic()
    if now - self._shown >= _HOLD:
      self._shown = now
      sample = Sample(prompt, response, reward, step)
      self._state = dataclasses.replace(self._state, sample=sample)

  def say(self, text: str) -> None:
    """Writes lines that stay, also where nobody watches."""
    self._console.print(rich.text.Text(text), soft_wrap=True)

  def _picture(self) -> rich.console.RenderableType:
    seconds = time.monotonic() - self._begin
    state = dataclasses.replace(self._state, seconds=seconds)
    return render(state, *self._console.size)

  def __enter__(self) -> Self:
    if self.watched:
      self._live.start()
    return self

  def __exit__(
    self,
    kind: type[BaseException] | None,
    error: BaseException | None,
    where: TracebackType | None,
  ) -> None:
    self._live.stop()


def render(
  state: State, width: int = _WIDTH, height: int = _HEIGHT
) -> rich.console.RenderableType:
  """Returns the picture of a state.

  Args:
    state: what is shown.
    width: columns there are; below 76 the numbers that explain are left out.
    height: lines there are; below 14 the blank ones are left out.
  """
  blank = [''] if height >= _HEIGHT else []
  body = rich.table.Table.grid(expand=True)
  numbers = _numbers(state, explained=width >= _NARROW)
  for part in (_progress(state), *blank, numbers, *blank, _sample(state)):
    body.add_row(part)
  panel = rich.panel.Panel(
    body,
    title=rich.text.Text(f' {_clean(state.title)} ', style='bold'),
    title_align='left',
    subtitle=rich.text.Text(f' {clock(state.seconds)} ', style='dim'),
    subtitle_align='right',
    box=rich.box.ROUNDED,
    border_style='dim',
    padding=(len(blank), 2, 0, 2),
  )
  return rich.constrain.Constrain(panel, _WIDTH)


def clock(seconds: float) -> str:
  """Returns 1:02:03, or 2:03 within the first hour."""
  minutes, second = divmod(int(seconds), 60)
  hour, minute = divmod(minutes, 60)
  if hour:
    return f'{hour}:{minute:02}:{second:02}'
  return f'{minute}:{second:02}'


def _progress(state: State) -> rich.table.Table:
  """Stage, bar, count and time left."""
  bar = rich.progress_bar.ProgressBar(
    total=max(state.steps, 1),
    completed=state.step,
    complete_style='cyan',
    finished_style='green',
  )
  row = rich.table.Table.grid(expand=True, padding=(0, 2, 0, 0))
  row.add_column(no_wrap=True)
  row.add_column(ratio=1)
  row.add_column(no_wrap=True, justify='right')
  row.add_column(no_wrap=True, justify='right', min_width=12)
  name = _STAGES.get(state.stage, state.stage)
  count = f'{state.step:,}/{state.steps:,}'
  row.add_row(_text(name, 'bold cyan'), bar, count, _text(_left(state), 'dim'))
  return row


def _left(state: State) -> str:
  """What goes on, or the time left."""
  if state.doing:
    return state.doing
  if state.step >= state.steps:
    return 'done' if state.steps else ''
  return 'first step' if state.left is None else f'{clock(state.left)} left'


def _numbers(state: State, explained: bool) -> rich.table.Table:
  """The numbers that matter, and beside them those that explain them."""
  table = rich.table.Table.grid(expand=True, padding=(0, 2, 0, 0))
  table.add_column(no_wrap=True, style='dim')
  table.add_column(no_wrap=True, justify='right', min_width=6)
  table.add_column(no_wrap=True, ratio=1)
  values = state.values
  reward = _text(_number(values, 'reward/task', '.2f'), 'bold')
  accuracy = _text(_number(values, 'accuracy', '.2f'), 'bold green')
  curve = _text(curve_of(state.rewards), 'cyan')
  loss = _number(values, 'loss', '.3f')
  rows = [
    ['reward', reward, curve],
    ['held-out accuracy', accuracy, _interval(values)],
    ['loss', loss, _text(state.warning, 'bold red')],
  ]
  if explained:
    table.add_column(no_wrap=True, style='dim')
    table.add_column(no_wrap=True, justify='right', min_width=6)
    table.add_column(no_wrap=True, style='dim', min_width=6)
    rows[0] += ['length', _number(values, 'length', '.1f'), 'tokens']
    rows[1] += ['entropy', _number(values, 'entropy', '.3f'), 'nats']
    rows[2] += ['speed', _number(values, 'tokens_per_second', ',.0f'), 'tok/s']
  for row in rows:
    table.add_row(*row)
  return table


def _interval(values: Mapping[str, float]) -> rich.text.Text:
  """The 95 % interval of the accuracy, and what it was before RL."""
  parts = []
  if 'accuracy_low' in values and 'accuracy_high' in values:
    low, high = values['accuracy_low'], values['accuracy_high']
    parts.append(f'{low:.2f}–{high:.2f}')
  if 'accuracy_sft' in values:
    parts.append(f'from {values["accuracy_sft"]:.2f}')
  return _text(', '.join(parts), 'dim')


def _sample(state: State) -> rich.table.Table:
  """One answer with its reward; as high as any other."""
  table = rich.table.Table.grid(padding=(0, 2, 0, 0))
  table.add_column(no_wrap=True, style='dim', width=8)
  table.add_column(overflow='fold')
  sample = state.sample
  if sample is None:
    table.add_row('prompt', '\n' * _LINES)
    return table
  good = sample.reward >= 1
  verdict = _text(f'{sample.reward:.2f}', 'green' if good else 'yellow')
  verdict.append(f' at step {sample.step:,}', style='dim')
  table.add_row('prompt', _Clipped(sample.prompt, 1, 'dim'))
  table.add_row('answer', _Clipped(sample.response, _LINES - 1, ''))
  table.add_row('reward', verdict)
  return table


class _Clipped:
  """Foreign text folded into a fixed number of lines."""

  def __init__(self, text: str, lines: int, style: str):
    self._text = _clean(text[:_LONGEST])
    self._lines = lines
    self._style = style

  def __rich_console__(
    self,
    console: rich.console.Console,
    options: rich.console.ConsoleOptions,
  ) -> rich.console.RenderResult:
    width = options.max_width
    text = rich.text.Text(self._text, self._style, overflow='fold')
    lines = list(text.wrap(console, width))
    if len(lines) > self._lines:
      lines = lines[: self._lines]
      lines[-1].truncate(width - 1)
      lines[-1].append('…')
    lines += [rich.text.Text()] * (self._lines - len(lines))
    yield rich.text.Text('\n').join(lines)


def curve_of(values: Sequence[float], columns: int = _CURVE) -> str:
  """Returns a bar per bin of `values`, in the order they came."""
  if not values:
    return ''
  columns = min(columns, len(values))
  low, high = min(0.0, *values), max(1.0, *values)
  edges = [i * len(values) // columns for i in range(columns + 1)]
  bins = [values[a:b] for a, b in zip(edges[:-1], edges[1:], strict=True)]
  heights = [(sum(x) / len(x) - low) / (high - low) for x in bins]
  return ''.join(_BARS[round(h * (len(_BARS) - 1))] for h in heights)


def _reward(values: Mapping[str, float]) -> tuple[float, ...]:
  """The reward of a step, unless it has none that can be drawn."""
  reward = values.get('reward/task')
  if reward is None or reward != reward:
    return ()
  return (reward,)


def _number(values: Mapping[str, float], name: str, form: str) -> str:
  """A metric, or a dash before it is known."""
  return format(values[name], form) if name in values else '–'


def _text(text: str, style: str) -> rich.text.Text:
  """Text that is never read as markup."""
  return rich.text.Text(text, style)


def _clean(text: str) -> str:
  """Shows line ends, and hides what could move a terminal's cursor."""
  text = text.strip().replace('\n', ' ⏎ ')
  return ''.join(c if c.isprintable() else '·' for c in text)
