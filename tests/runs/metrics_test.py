"""Tests of metric sums and of the files of a run."""

import json
import math
import pathlib
import struct

import jax
import jax.numpy as jnp
import pytest
from tensorboardX.proto import event_pb2

from rljax.core.types import Mean, Peak
from rljax.runs import metrics


def mean(total, count):
  return Mean(total=jnp.float32(total), count=jnp.float32(count))


def peak(value):
  return Peak(value=jnp.float32(value))


def events(workdir):
  """Returns (tag, step, value) of every TensorBoard scalar of a run."""
  found = []
  for path in sorted(pathlib.Path(workdir, 'tensorboard').iterdir()):
    data, at = path.read_bytes(), 0
    while at < len(data):
      (size,) = struct.unpack_from('<Q', data, at)
      event = event_pb2.Event.FromString(data[at + 12 : at + 12 + size])
      found += [
        (v.tag, event.step, round(v.simple_value, 5))
        for v in event.summary.value
      ]
      at += 12 + size + 4
  return found


def test_sums_of_microbatches_are_the_sums_of_the_whole():
  # Means of means would give 2.0 here: rows [4] and [0, 0, 0].
  whole = {'loss': mean(4, 4), 'ratio/max': peak(3)}
  parts = [
    {'loss': mean(4, 1), 'ratio/max': peak(-1)},
    {'loss': mean(0, 3), 'ratio/max': peak(3)},
  ]
  added = jax.jit(metrics.add)(*parts)
  assert metrics.finalize(added) == metrics.finalize(whole)
  assert metrics.finalize(whole) == {'loss': 1.0, 'ratio/max': 3.0}


def test_add_keeps_single_names_and_refuses_mixed_kinds():
  added = metrics.add({'a': mean(1, 2)}, {'b': peak(5)})
  assert metrics.finalize(added) == {'a': 0.5, 'b': 5.0}
  with pytest.raises(TypeError, match="'a'"):
    metrics.add({'a': mean(1, 2)}, {'a': peak(5)})


def test_nothing_seen_is_left_out_and_nan_stays():
  numbers = metrics.finalize(
    {
      'empty': mean(0, 0),
      'unseen': peak(-math.inf),
      'nan': mean(math.nan, 2),
      'inf': peak(math.inf),
      'zero': mean(0, 2),
    }
  )
  assert sorted(numbers) == ['inf', 'nan', 'zero']
  assert math.isnan(numbers['nan']) and numbers['inf'] == math.inf


def test_finalize_makes_one_transfer(monkeypatch):
  calls, get = [], jax.device_get
  monkeypatch.setattr(jax, 'device_get', lambda x: calls.append(x) or get(x))
  metrics.finalize({str(i): mean(i, 1) for i in range(10)})
  assert len(calls) == 1


def test_rows_are_valid_json_with_null_for_nan(tmp_path):
  with metrics.Writer(tmp_path) as writer:
    writer.write('rl', 1, {'loss': math.nan, 'entropy': jnp.float32(0.5)}, 2.0)
    text = (tmp_path / 'metrics.jsonl').read_text()  # flushed while open
    writer.sample({'step': 1, 'reward': math.nan, 'response': 'a\n"b" \u2028'})
  row = json.loads(text, parse_constant=pytest.fail)
  want = {'stage': 'rl', 'step': 1, 'seconds': 2.0}
  assert row == want | {'loss': None, 'entropy': 0.5}
  (read,) = metrics.read(tmp_path)
  assert math.isnan(read['loss']) and read['entropy'] == 0.5
  lines = (tmp_path / 'samples.jsonl').read_text().splitlines()
  assert len(lines) == 1 and json.loads(lines[0])['response'] == 'a\n"b" \u2028'
  assert events(tmp_path) == [('rl/entropy', 1, 0.5)]


def write(writer, steps):
  for step in steps:
    writer.write('rl', step, {'loss': step / 8}, float(step))
    writer.sample({'step': step, 'response': 'é' * step})


def test_resumed_files_are_those_of_an_uninterrupted_run(tmp_path):
  with metrics.Writer(tmp_path / 'whole') as writer:
    write(writer, range(1, 7))
  killed = metrics.Writer(tmp_path / 'killed')
  write(killed, range(1, 4))
  position = json.loads(json.dumps(killed.position()))
  write(killed, range(4, 6))  # after the checkpoint
  with (tmp_path / 'killed' / 'metrics.jsonl').open('a') as file:
    file.write('{"stage": "rl", "st')  # cut off by the kill
  assert len(metrics.read(tmp_path / 'killed')) == 5
  with metrics.Writer(tmp_path / 'killed', position) as writer:
    write(writer, range(4, 7))
  for name in ('metrics.jsonl', 'samples.jsonl'):
    whole = (tmp_path / 'whole' / name).read_bytes()
    assert (tmp_path / 'killed' / name).read_bytes() == whole
  assert events(tmp_path / 'killed') == events(tmp_path / 'whole')
  killed.close()


def test_lost_bytes_are_not_padded(tmp_path):
  with metrics.Writer(tmp_path) as writer:
    write(writer, [1, 2])
    position = writer.position()
  path = tmp_path / 'metrics.jsonl'
  path.write_text(path.read_text().splitlines(keepends=True)[0])
  with metrics.Writer(tmp_path, position) as writer:
    write(writer, [3])
  assert [row['step'] for row in metrics.read(tmp_path)] == [1, 3]


def test_clock_continues_when_a_stage_starts_again():
  clock = metrics.Clock()
  assert [clock(s) for s in (0, 5, 5, 0, 1, 1, 2)] == [0, 5, 5, 5, 6, 6, 7]
  clock = metrics.Clock()
  assert [clock(s) for s in (1, 2, 3, 3, 4)] == [1, 2, 3, 3, 4]


def test_no_metrics_yet(tmp_path):
  assert metrics.read(tmp_path) == []


@pytest.mark.parametrize('bad', ['{oops', '[1]', '{"a": 1}', '\x00'])
def test_a_bad_line_is_named(tmp_path, bad):
  good = '{"stage": "rl", "step": 1}\n'
  (tmp_path / 'metrics.jsonl').write_text(f'{good}{bad}\n{good}')
  with pytest.raises(ValueError, match='metrics.jsonl, line 2: not'):
    metrics.read(tmp_path)
