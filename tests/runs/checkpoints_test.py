"""Tests of checkpoints: every bit comes back, whatever ends the run."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading

from absl.testing import parameterized
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np
import pytest

from rljax.core import types
from rljax.runs import checkpoints, run


@dataclasses.dataclass(frozen=True)
class Config(run.Config):
  learning_rate: float = run.field(0.1, 'step size')
  layers: tuple[int, ...] = run.field((1, 2), 'layers')


def mesh(*shape):
  devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
  return jax.sharding.Mesh(devices, ('data', 'fsdp'))


def state(devices, seed=0):
  """Returns a training state whose leaves are sharded in several ways."""
  key = jax.random.key(seed)
  rows = NamedSharding(devices, PartitionSpec(('data', 'fsdp')))
  both = NamedSharding(devices, PartitionSpec('data', 'fsdp'))
  one = NamedSharding(devices, PartitionSpec())
  embed = jax.device_put(jax.random.normal(key, (16, 8)), both)
  half = jax.device_put(embed.astype(jnp.bfloat16).at[0, 0].set(jnp.nan), rows)
  scalars = {'step': jnp.int32(7), 'update': jnp.int32(14)}
  return types.TrainState(
    **{k: jax.device_put(v, one) for k, v in scalars.items()},
    params={'policy': {'embed': embed, 'head': half}},
    opt_state=(None, [jax.device_put(embed * embed, rows)], ()),
    frozen={'ref': {'on': jax.device_put(jnp.array([True, False]), one)}},
    slow={'none': jax.device_put(jnp.zeros((0, 3)), one)},
    key=jax.device_put(jax.random.fold_in(key, 3), one),
  )


def abstract(tree):
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree
  )


def bits(leaf):
  if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
    leaf = jax.random.key_data(leaf)
  return np.asarray(leaf).tobytes()


def assert_same(got, want):
  assert jax.tree.structure(got) == jax.tree.structure(want)
  for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    assert (g.dtype, g.shape) == (w.dtype, w.shape)
    assert g.sharding.is_equivalent_to(w.sharding, g.ndim), (g, w)
    assert bits(g) == bits(w)


RECORD = {'cursor': {'epoch': 1, 'at': [3, 4]}, 'stage': 'rl', 'none': None}


def test_every_bit_and_sharding_comes_back(tmp_path):
  want = state(mesh(4, 2))
  with checkpoints.Checkpoints(tmp_path) as saved:
    assert saved.latest() is None
    saved.save(7, want, RECORD)
  with checkpoints.Checkpoints(tmp_path) as saved:
    assert saved.latest() == 7
    got, record = saved.restore(7, abstract(want))
    assert record == RECORD
    assert_same(got, want)
    got_from_arrays, _ = saved.restore(7, state(mesh(4, 2), seed=1))
  assert_same(got_from_arrays, want)
  assert jax.random.uniform(got.key) == jax.random.uniform(want.key)


def test_another_mesh(tmp_path):
  want = state(mesh(4, 2))
  with checkpoints.Checkpoints(tmp_path) as saved:
    saved.save(1, want, {})
    for shape in ((2, 1), (2, 4)):
      like = state(mesh(*shape), seed=1)
      got, _ = saved.restore(1, abstract(like))
      assert_same(got, state(mesh(*shape)))


def test_other_generators(tmp_path):
  want = {
    'key': jax.random.key(5, impl='rbg'),
    'many': jax.random.split(jax.random.key(1), 4),
  }
  with checkpoints.Checkpoints(tmp_path) as saved:
    saved.save(1, want, {})
    assert_same(saved.restore(1, abstract(want))[0], want)
    with pytest.raises(ValueError, match='no checkpoint .*/2'):
      saved.restore(2, abstract(want))
    with pytest.raises(ValueError, match=r'key is uint32\[4\] there and'):
      saved.restore(1, abstract(want | {'key': jax.random.key(5)}))


def test_arrays_may_be_donated_while_they_are_written(tmp_path):
  advance = jax.jit(lambda x: x * 2 + 1, donate_argnums=0)
  value = jax.random.normal(jax.random.key(0), (1024, 1024))
  with checkpoints.Checkpoints(tmp_path, keep=3) as saved:
    want = {}
    for step in range(3):
      want[step] = np.array(value)
      saved.save(step, {'x': value}, {})
      for _ in range(3):
        value = advance(value)
      value.block_until_ready()
    for step in range(3):
      got, _ = saved.restore(step, {'x': value})
      np.testing.assert_array_equal(got['x'], want[step])


def test_the_newest_are_kept(tmp_path):
  with checkpoints.Checkpoints(tmp_path, keep=2) as saved:
    for step in (1, 2, 5):
      saved.save(step, {'x': jnp.float32(step)}, {'step': step})
    saved.save(5, {'x': jnp.float32(0)}, {})  # stays as it is
    assert saved.latest() == 5
    assert saved.restore(5, {'x': jnp.float32(0)}) == ({'x': 5.0}, {'step': 5})
  kept = sorted(p.name for p in (tmp_path / 'checkpoints').iterdir())
  assert kept == ['2', '5']


class DoesNotFitTest(parameterized.TestCase):
  @pytest.fixture(autouse=True)
  def _folder(self, tmp_path):
    self.tmp_path = tmp_path

  @parameterized.named_parameters(
    ('shape', {'a': jnp.zeros((2, 4))}, r'a is float32\[2, 3\] there'),
    ('dtype', {'a': jnp.zeros((2, 3), jnp.bfloat16)}, r'bfloat16\[2, 3\] here'),
    ('missing', {'b': jnp.zeros((2, 3))}, r'a is float32.* there and missing'),
  )
  def test_is_refused_by_name(self, like, message):
    with checkpoints.Checkpoints(self.tmp_path) as saved:
      saved.save(1, {'a': jnp.zeros((2, 3))}, {})
      saved.wait()
      with self.assertRaisesRegex(ValueError, message):
        saved.restore(1, like)


@pytest.mark.parametrize(
  'victim', ['arrays/**/d/*', 'arrays/manifest.ocdbt', 'record/metadata']
)
def test_a_damaged_checkpoint_is_named(tmp_path, victim):
  x = jax.random.normal(jax.random.key(0), (64, 64))
  with checkpoints.Checkpoints(tmp_path) as saved:
    saved.save(3, {'x': x}, {'a': 1})
  folder = tmp_path / 'checkpoints' / '3'
  for path in folder.glob(victim):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
  with checkpoints.Checkpoints(tmp_path) as saved:
    with pytest.raises(ValueError, match=f'{folder} is damaged'):
      saved.restore(3, {'x': x})


_SCRIPT = """
  import dataclasses, os, pathlib, resource, signal, sys
  import jax
  from rljax.runs import checkpoints, run

  tree = {'x': jax.random.normal(jax.random.key(0), (256, 256))}

  def train(config):
    with checkpoints.Checkpoints(config.workdir) as saved:
      saved.save(1, tree, {'step': 1})
      saved.wait()
      prepare()
      saved.save(2, tree, {'step': 2})

  %s

  run.main(run.Config, train)
"""


def run_script(workdir, prepare):
  """Runs the script with `prepare` called between the two checkpoints."""
  script = textwrap.dedent(_SCRIPT) % textwrap.dedent(prepare)
  return subprocess.run(
    [sys.executable, '-c', script, f'--workdir={workdir}'],
    capture_output=True,
    text=True,
    timeout=120,
  )


def assert_only_first(workdir):
  like = {'x': jnp.zeros((256, 256))}
  with checkpoints.Checkpoints(workdir) as saved:
    assert saved.latest() == 1
    got, record = saved.restore(1, like)
  want = jax.random.normal(jax.random.key(0), (256, 256))
  assert bits(got['x']) == bits(want) and record == {'step': 1}
  assert [p.name for p in (workdir / 'checkpoints').iterdir()] == ['1']


def test_kill_between_write_and_commit(tmp_path):
  kill = """
    def rename(self, target):
      if pathlib.Path(target).name == '2':  # all is written, not yet named
        os.kill(os.getpid(), signal.SIGKILL)
      return os.rename(self, target)

    def prepare():
      from etils import epath
      type(epath.Path('/')).rename = rename
  """
  done = run_script(tmp_path, kill)
  assert done.returncode == -signal.SIGKILL, done.stderr
  left = sorted(p.name for p in (tmp_path / 'checkpoints').iterdir())
  assert left == ['1', '2.orbax-checkpoint-tmp']
  written = tmp_path / 'checkpoints' / left[1] / 'arrays'
  assert sum(p.stat().st_size for p in written.rglob('*')) > 200_000
  assert_only_first(tmp_path)


@pytest.mark.parametrize('limit', [100_000, 10])
def test_no_space_is_one_line_and_keeps_the_checkpoint_before(tmp_path, limit):
  cap = f"""
    def prepare():
      resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
  """
  done = run_script(tmp_path, cap)
  assert done.returncode == 1, done.stderr
  assert done.stderr.count('\n') == 1, done.stderr
  assert done.stderr.startswith('error: [Errno 27] File too large; checkpoint')
  assert '1 is kept' in done.stderr
  assert_only_first(tmp_path)


def claim(config):
  with checkpoints.claimed(config):
    pass


def test_a_folder_belongs_to_its_config(tmp_path):
  workdir = tmp_path / 'new' / 'run'
  config = Config(workdir=str(workdir))
  resumed = dataclasses.replace(config, resume=True, devices=4)
  with pytest.raises(ValueError, match=f'--resume: {workdir} holds no run'):
    claim(resumed)
  assert not workdir.exists()
  claim(config)
  written = json.loads((workdir / 'config.json').read_text())
  assert Config.from_json(written) == config
  with pytest.raises(ValueError, match='add --resume'):
    claim(config)
  claim(resumed)
  other = dataclasses.replace(resumed, learning_rate=0.2, layers=(3,))
  message = r'learning_rate 0.1 -> 0.2, layers \(1, 2\) -> \(3,\)'
  with pytest.raises(ValueError, match=message):
    claim(other)
  with pytest.raises(ValueError, match='another kind of run'):
    claim(run.Config(workdir=str(workdir), resume=True))
  assert json.loads((workdir / 'config.json').read_text()) == written


def test_a_folder_in_use_is_left_alone(tmp_path):
  config = Config(workdir=str(tmp_path))
  resumed = dataclasses.replace(config, resume=True)
  with checkpoints.claimed(config):
    for second in (config, resumed):
      with pytest.raises(ValueError, match=f'{tmp_path} is in use by another'):
        claim(second)
  claim(resumed)


def test_signals_become_a_question():
  before = [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)]
  with checkpoints.Interrupt() as interrupt:
    assert not interrupt.requested
    os.kill(os.getpid(), signal.SIGTERM)
    assert interrupt.requested
    os.kill(os.getpid(), signal.SIGTERM)  # schedulers repeat themselves
    os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
      os.kill(os.getpid(), signal.SIGINT)
  after = [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)]
  assert after == before


def test_signals_are_left_alone_in_a_thread():
  seen = []

  def work():
    with checkpoints.Interrupt() as interrupt:
      seen.append(interrupt.requested)

  thread = threading.Thread(target=work)
  thread.start()
  thread.join()
  assert seen == [False]
