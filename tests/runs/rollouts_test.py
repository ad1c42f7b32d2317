"""Tests of stored rollouts: every step is there whole, or not at all."""

import subprocess
import sys
import textwrap

import jax
import numpy as np
import pytest

from rljax.runs import rollouts

SHAPES = {
  'response': jax.ShapeDtypeStruct((4, 5), np.int32),
  'logp': jax.ShapeDtypeStruct((4, 5), np.float32),
  'reward': jax.ShapeDtypeStruct((4,), np.float32),
}


def arrays(step, rows=4):
  random = np.random.default_rng(step)
  return {
    name: random.integers(-9, 9, (rows, *x.shape[1:])).astype(x.dtype)
    for name, x in SHAPES.items()
  }


def assert_steps(workdir, steps):
  got = rollouts.read(workdir)
  assert got.keys() == SHAPES.keys()
  for name, value in got.items():
    assert value.dtype == SHAPES[name].dtype
    want = [arrays(step)[name] for step in steps]
    np.testing.assert_array_equal(value, np.reshape(want, value.shape))
    assert len(value) == len(steps)


def test_what_was_written_is_read(tmp_path):
  store = rollouts.Rollouts(tmp_path, SHAPES, steps=5)
  assert_steps(tmp_path, [])
  for step in range(3):
    store.write(step, arrays(step))
  store.wait()
  assert_steps(tmp_path, [0, 1, 2])
  folder = tmp_path / 'rollouts' / 'logp' / 'c'
  assert sorted(p.name for p in folder.iterdir()) == ['0', '1', '2']
  assert [p.is_file() for p in folder.glob('*/0/0')] == [True] * 3


def test_later_steps_are_dropped_on_resume(tmp_path):
  store = rollouts.Rollouts(tmp_path, SHAPES, steps=5)
  for step in (0, 1, 2, 3):
    store.write(step, arrays(step))
  store.wait()
  store = rollouts.Rollouts(tmp_path, SHAPES, steps=5, keep=2)
  assert_steps(tmp_path, [0, 1])
  store.write(2, arrays(7))
  store.wait()
  assert_steps(tmp_path, [0, 1, 7])


def test_a_longer_run_goes_on(tmp_path):
  store = rollouts.Rollouts(tmp_path, SHAPES, steps=2)
  for step in (0, 1):
    store.write(step, arrays(step))
  store.wait()
  store = rollouts.Rollouts(tmp_path, SHAPES, steps=4, keep=2)
  assert_steps(tmp_path, [0, 1])
  store.write(2, arrays(2))
  store.wait()
  assert_steps(tmp_path, [0, 1, 2])


def test_a_short_width_is_padded_and_a_long_one_refused(tmp_path):
  store = rollouts.Rollouts(tmp_path, SHAPES, steps=1)
  short = arrays(0) | {'response': np.ones((4, 3), np.int32)}
  store.write(0, short)
  store.wait()
  want = np.pad(short['response'], [(0, 0), (0, 2)])
  got = rollouts.read(tmp_path)['response'][0]
  np.testing.assert_array_equal(got, want)
  with pytest.raises(ValueError, match='broadcast'):
    store.write(0, arrays(0) | {'response': np.ones((4, 6), np.int32)})


def test_a_step_counts_when_all_processes_wrote_it(tmp_path):
  stores = [
    rollouts.Rollouts(
      tmp_path, SHAPES, steps=3, process_index=i, process_count=2
    )
    for i in range(2)
  ]
  for step, index in ((0, 0), (0, 1), (1, 1)):
    rows = slice(2 * index, 2 * index + 2)
    part = {name: value[rows] for name, value in arrays(step).items()}
    stores[index].write(step, part)
    stores[index].wait()
  assert_steps(tmp_path, [0])
  with pytest.raises(ValueError, match='3 processes cannot share 4'):
    rollouts.Rollouts(tmp_path / 'x', SHAPES, steps=3, process_count=3)


def test_a_killed_writer_leaves_a_prefix(tmp_path):
  program = """
    import os, signal, sys
    from rljax.runs import rollouts
    from tests.runs import rollouts_test as t

    store = rollouts.Rollouts(sys.argv[1], t.SHAPES, steps=9)
    for step in range(4):
      store.write(step, t.arrays(step))
    os.kill(os.getpid(), signal.SIGKILL)
  """
  done = subprocess.run(
    [sys.executable, '-c', textwrap.dedent(program), str(tmp_path)]
  )
  assert done.returncode == -9
  assert_steps(tmp_path, [0, 1, 2])
