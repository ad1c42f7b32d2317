"""Tests of the live view."""

import dataclasses
import io

import pytest
import rich.console

from rljax.runs import terminal

_VALUES = {
  'reward/task': 0.625,
  'accuracy': 0.71,
  'accuracy_low': 0.65,
  'accuracy_high': 0.77,
  'accuracy_sft': 0.34,
  'length': 5.23,
  'entropy': 0.311,
  'tokens_per_second': 12345.0,
  'loss': -0.0123,
}
_STATE = terminal.State(
  title='quickstart · arithmetic',
  stage='rl',
  step=121,
  steps=400,
  seconds=132.0,
  left=204.0,
  values=_VALUES,
  rewards=(0.0, 0.5, 1.0),
  sample=terminal.Sample('12+7=', '19', 1.0, 118),
)


def console(width=80, terminal=True):
  return rich.console.Console(
    file=io.StringIO(),
    width=width,
    force_terminal=terminal,
    color_system=None,
    legacy_windows=False,
    _environ={'TERM': 'xterm'},
  )


def lines(state, width=80, height=24):
  screen = console(width)
  with screen.capture() as captured:
    screen.print(terminal.render(state, width, height))
  return captured.get().splitlines()


@pytest.mark.parametrize('width', [80, 120])
def test_everything_is_readable(width):
  text = '\n'.join(lines(_STATE, width))
  for shown in (
    'reinforcement learning',
    '121/400',
    '3:24 left',
    '0.62',
    '▁▅█',
    '0.71  0.65–0.77, from 0.34',
    '5.2  tokens',
    '0.311  nats',
    '12,345  tok/s',
    '12+7=',
    '1.00 at step 118',
    '2:12',
  ):
    assert shown in text, (shown, text)
  assert '…' not in text


def test_a_small_terminal_shows_what_matters():
  got = lines(_STATE, 60, 12)
  assert len(got) <= 11  # one line stays for the cursor
  text = '\n'.join(got)
  for shown in (
    '121/400     3:24 left',
    '▁▅█',
    '0.71  0.65–0.77, from 0.34',
    '1.00 at step 118',
  ):
    assert shown in text, (shown, text)
  assert '…' not in text


@pytest.mark.parametrize('width', [60, 80, 120])
def test_height_and_width_never_change(width):
  long = terminal.Sample('x ' * 500, 'y\n' * 500, 0.0, 123456)
  hostile = terminal.Sample('', '\x1b[2J\x1b[1A\r\a\u202e[red]三' * 30, 0.5, 1)
  states = [
    terminal.State('quickstart'),
    _STATE,
    dataclasses.replace(_STATE, sample=long),
    dataclasses.replace(_STATE, sample=hostile),
    dataclasses.replace(_STATE, doing='evaluating', rewards=(0.1,) * 999),
    dataclasses.replace(_STATE, warning='1,234 updates not finite'),
  ]
  shapes = set()
  for state in states:
    got = lines(state, width)
    cells = {rich.console.Text(line).cell_len for line in got}
    shapes.add((len(got), *cells))
  assert shapes == {(13, min(width, 100))}


def test_sampled_text_is_shown_as_it_is_and_moves_nothing():
  response = '[bold]no[/bold] [/oops]\x1b[31m\x07\u202eabc\x9b2J'
  sample = terminal.Sample('p', response, 0.0, 1)
  text = '\n'.join(lines(dataclasses.replace(_STATE, sample=sample)))
  assert '[bold]no[/bold] [/oops]·[31m··abc·2J' in text
  assert not any(c in text for c in '\x1b\x07\u202e\x9b')


def shown(view):
  screen = console()
  with screen.capture() as captured:
    screen.print(view._picture())
  return captured.get()


def test_a_stage_that_compiles_says_so():
  view = terminal.View('quickstart', console())
  view.begin('rl', 0, 400, {})
  text = shown(view)
  assert 'reinforcement learning' in text and '0/400' in text
  assert 'compiling' in text and '0.00' not in text
  view.say_doing('evaluating')
  assert 'evaluating' in shown(view) and 'compiling' not in shown(view)
  view.measured({'accuracy': 0.25})
  assert 'compiling' in shown(view) and '0.25' in shown(view)
  view.update('rl', 1, 400, {})
  assert 'first step' in shown(view)
  view.update('rl', 400, 400, {})
  assert 'done' in shown(view)
  view.begin('rl', 400, 900, {})
  assert 'compiling' in shown(view) and '400/900' in shown(view)
  view.warn('3 updates not finite')
  assert '3 updates not finite' in shown(view)


def test_not_a_number_is_drawn():
  values = dict.fromkeys(_VALUES, float('nan'))
  assert 'nan' in '\n'.join(lines(dataclasses.replace(_STATE, values=values)))


def test_curve():
  assert terminal.curve_of([]) == ''
  assert terminal.curve_of([0.0, 1.0]) == '▁█'
  assert terminal.curve_of([-1.0, 1.0, 3.0]) == '▁▅█'
  assert terminal.curve_of([i / 99 for i in range(100)], 4) == '▂▄▅▇'


def test_clock():
  assert [terminal.clock(s) for s in (0, 59.9, 61, 3600 + 62)] == [
    '0:00',
    '0:59',
    '1:01',
    '1:01:02',
  ]


def test_view_is_quiet_where_nobody_watches():
  screen = console(terminal=False)
  with terminal.View('quickstart', screen) as view:
    view.update('rl', 1, 2, _VALUES)
    view.sample('p', 'r', 1.0, 1)
    assert screen.file.getvalue() == ''
    view.say('accuracy [0.65] after the run')
  assert screen.file.getvalue() == 'accuracy [0.65] after the run\n'


def test_view_draws_in_place(monkeypatch):
  now = [100.0]
  monkeypatch.setattr(terminal.time, 'monotonic', lambda: now[0])
  screen = console()
  with terminal.View('quickstart', screen, seconds=60.0) as view:
    view.update('rl', 1, 11, _VALUES)
    now[0] = 103.0  # the first step compiles and is not counted
    view.sample('first', 'r', 1.0, 1)
    view.update('rl', 3, 11, {'loss': 9.0})
    now[0] = 104.0
    view.sample('second, too soon to read the first', 'r', 1.0, 2)
  text = screen.file.getvalue()
  final = text[text.rindex('╭') :]
  assert '0:12 left' in final  # 1.5 s a step, 8 steps
  assert '1:04' in final  # 60 s before the run was resumed
  assert 'first' in final and 'second' not in final
  assert '0.62' in final and '9.000' in final  # what is not given stays


@pytest.mark.parametrize(
  'encoding, term', [('ascii', 'xterm'), ('utf8', 'dumb')]
)
def test_view_is_quiet_on_a_terminal_that_cannot_show_it(encoding, term):
  file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
  screen = rich.console.Console(
    file=file, force_terminal=True, _environ={'TERM': term}
  )
  with terminal.View('quickstart', screen) as view:
    assert not view.watched
    view.update('rl', 1, 2, _VALUES)
  file.flush()
  assert file.buffer.getvalue() == b''
