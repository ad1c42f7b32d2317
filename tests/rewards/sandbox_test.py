"""Verifiers that hang, crash, hog and break out."""

import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time

from absl.testing import parameterized
import numpy as np
import pytest

from rljax.rewards import linux, sandbox

_GRADERS = 'tests.rewards.graders:make'
_linux_only = pytest.mark.skipif(
  sys.platform != 'linux', reason='the kernel holds the barrier on Linux only'
)


def _score(box, *texts):
  return box.score(['a'] * len(texts), texts).tolist()


def _zombies():
  """Returns the children of this process that nobody waits for."""
  listing = subprocess.run(
    ['ps', '-o', 'stat=', '--ppid', str(os.getpid())],
    capture_output=True,
    text=True,
    check=False,
  )
  return [line for line in listing.stdout.split() if line.startswith('Z')]


def _alive(pid):
  try:
    stat = pathlib.Path(f'/proc/{pid}/stat').read_text()
  except FileNotFoundError:
    return False
  return stat.rpartition(')')[2].split()[0] != 'Z'


def _folder(test):
  """Returns a new folder that the test removes in the end."""
  folder = tempfile.TemporaryDirectory()
  test.addCleanup(folder.cleanup)
  return pathlib.Path(folder.name)


class SandboxTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.box = sandbox.Sandbox(_GRADERS, workers=1, timeout=1.0, memory_mb=256)
    self.addCleanup(self.box.close)

  def test_scores_in_order(self):
    box = sandbox.Sandbox(_GRADERS, {'any': 1}, workers=2)
    self.addCleanup(box.close)
    texts = [f'say {k / 8}' for k in range(50)] + ['equal a', 'equal b']
    got = box.score(['a'] * 52, texts)
    self.assertEqual(got.dtype, np.float32)
    np.testing.assert_array_equal(got, [*(np.arange(50) / 8), 1, 0])
    self.assertEmpty(box.failures)
    self.assertEqual(_score(box), [])

  def test_a_long_text_and_much_output(self):
    self.assertEqual(
      _score(self.box, 'length ' + 'x' * 300000, 'print'), [300000, 1]
    )

  def _check_hangs(self, times):
    self.box.score(['a'], ['equal a'])
    for _ in range(times):
      start = time.monotonic()
      self.assertTrue(np.isnan(_score(self.box, 'sleep 60')[0]))
      self.assertBetween(time.monotonic() - start, 1.0, 3.0)
    self.assertEqual(_score(self.box, 'equal a', 'equal b'), [1, 0])
    self.assertEqual(self.box.failures, {'timeout': times})
    self.assertIn('within 1 s', self.box.errors['timeout'])
    self.assertEmpty(_zombies())

  def test_hanging_verifier(self):
    self._check_hangs(3)

  @pytest.mark.slow
  def test_hanging_verifier_twenty_times(self):
    self._check_hangs(20)

  def test_a_hang_in_native_code(self):
    got = _score(self.box, 'spin', 'equal a')
    np.testing.assert_array_equal(got, [np.nan, 1])

  def test_one_hang_delays_only_itself(self):
    box = sandbox.Sandbox(_GRADERS, workers=2, timeout=1.0)
    self.addCleanup(box.close)
    start = time.monotonic()
    got = _score(box, 'sleep 60', *['equal a'] * 20)
    np.testing.assert_array_equal(got, [np.nan, *[1] * 20])
    self.assertLess(time.monotonic() - start, 3.0)

  @parameterized.parameters(
    ('eval 1/0', 'exception', 'ZeroDivisionError: division by zero'),
    ('unknown', 'exception', 'KeyError'),
    ('eval exit()', 'exception', 'SystemExit'),
    ('eval None', 'exception', 'TypeError'),
    ('say nan', 'not finite', 'nan'),
    ('say inf', 'not finite', 'inf'),
    ('die', 'died', 'the worker ended'),
  )
  def test_failure_is_nan_and_counted(self, text, reason, message):
    got = _score(self.box, 'equal a', text, 'equal a', text)
    np.testing.assert_array_equal(got, [1, np.nan, 1, np.nan])
    self.assertEqual(self.box.failures, {reason: 2})
    self.assertIn(message, self.box.errors[reason])

  @_linux_only
  def test_memory(self):
    got = _score(self.box, 'hog', 'equal a')
    np.testing.assert_array_equal(got, [np.nan, 1])
    self.assertEqual(self.box.failures, {'memory': 1})

  @parameterized.parameters(True, False)
  def test_a_grandchild_dies_too(self, new_session):
    box = sandbox.Sandbox(_GRADERS, workers=1, timeout=1.0, confined=False)
    self.addCleanup(box.close)
    self.assertEqual(box.barriers(), ('limits',))
    note = _folder(self) / 'pid'
    got = _score(box, f'spawn {note} {"new" if new_session else "same"}')
    self.assertTrue(np.isnan(got[0]))
    self.assertFalse(_alive(int(note.read_text())))
    self.assertEqual(_score(box, 'equal a'), [1])

  def test_close_ends_everything(self):
    worker = int(_score(self.box, 'pid')[0])
    pid = self.box._process.pid
    folder = pathlib.Path(f'/proc/{pid}/cwd')
    folder = folder.readlink() if folder.exists() else None
    self.assertTrue(_alive(worker) and _alive(pid))
    self.box.close()
    self.assertFalse(_alive(worker) or _alive(pid))
    self.assertFalse(folder and folder.exists())
    self.assertEmpty(_zombies())
    self.assertEqual(_score(self.box, 'equal a'), [1])

  @_linux_only
  def test_nothing_outlives_a_killed_parent(self):
    code = f"""
      import os
      from rljax.rewards import sandbox
      box = sandbox.Sandbox({_GRADERS!r}, workers=1, timeout=60)
      print(int(box.score([0], ['pid'])[0]), box._process.pid, flush=True)
      box.score([0], ['sleep 60'])
    """
    parent = subprocess.Popen(
      [sys.executable, '-c', textwrap.dedent(code)],
      stdout=subprocess.PIPE,
      env={**os.environ, 'PYTHONPATH': os.pathsep.join(sys.path)},
    )
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    parent.kill()
    parent.communicate()
    deadline = time.monotonic() + 10
    while any(map(_alive, pids)) and time.monotonic() < deadline:
      time.sleep(0.05)
    self.assertFalse(any(map(_alive, pids)))

  def test_a_dead_supervisor_fails_the_batch_and_is_replaced(self):
    _score(self.box, 'equal a')
    os.kill(self.box._process.pid, signal.SIGSTOP)
    timer = threading.Timer(
      0.3, os.kill, (self.box._process.pid, signal.SIGKILL)
    )
    timer.start()
    np.testing.assert_array_equal(
      _score(self.box, 'equal a', 'equal a'), [np.nan] * 2
    )
    self.assertEqual(self.box.failures, {'died': 2})
    self.assertEqual(_score(self.box, 'equal a'), [1])
    self.assertEmpty(_zombies())

  def test_any_thread_may_score(self):
    got = [None] * 6

    def judge(k):
      got[k] = _score(self.box, f'say {k}')

    threads = [threading.Thread(target=judge, args=(k,)) for k in range(6)]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()
    self.assertEqual(got, [[k] for k in range(6)])

  @parameterized.parameters(
    ('tests.rewards.graders:broken', "KeyError: 'no such grader'"),
    ('tests.rewards.graders:absent', 'AttributeError'),
    ('tests.rewards.absent:make', 'ModuleNotFoundError'),
  )
  def test_a_verifier_that_cannot_be_made(self, target, message):
    with sandbox.Sandbox(target) as box:
      with self.assertRaisesRegex(RuntimeError, message):
        box.score([0], ['equal 0'])
    self.assertEmpty(_zombies())

  @parameterized.parameters({'workers': 0}, {'timeout': 0}, {'memory_mb': 0})
  def test_arguments_out_of_range(self, **options):
    with self.assertRaisesRegex(ValueError, 'should be positive'):
      sandbox.Sandbox(_GRADERS, **options)


# What careless graders run when they evaluate an answer; each one would leave
# a mark, start a program, or talk to somebody.
_ESCAPES = (
  "__import__('pathlib').Path({mark!r}).touch() or 1",
  "open({mark!r}, 'a') and 1",
  "__import__('os').mkdir({mark!r}) or 1",
  "__import__('os').system('touch {mark}')",
  "__import__('subprocess').run(['touch', {mark!r}]) and 1",
  "__import__('os').symlink('/', {mark!r}) or 1",
  "__import__('os').rename({victim!r}, {mark!r}) or 1",
  "__import__('os').unlink({victim!r}) or 1",
  "__import__('os').truncate({victim!r}, 0) or 1",
  "__import__('os').chmod({victim!r}, 0) or 1",
  "__import__('os').fork() * 0 + 1",
  "__import__('os').kill(__import__('os').getppid(), 9) or 1",
  "__import__('socket').socket() and 1",
  "__import__('_posixsubprocess') and 1",
  "__import__('ctypes').CDLL(None).creat(b'{mark}', 511) and 1",
  "__import__('sqlite3').connect({mark!r}).execute('create table t(x)') and 1",
  "__import__('resource').setrlimit(1, (9, 9)) or 1",
)


class ConfinementTest(parameterized.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.box = sandbox.Sandbox(_GRADERS, workers=1, timeout=5.0)

  @classmethod
  def tearDownClass(cls):
    cls.box.close()
    super().tearDownClass()

  @_linux_only
  def test_the_kernel_holds_the_barrier(self):
    self.assertEqual(self.box.barriers(), ('limits', 'seccomp', 'audit'))

  @parameterized.parameters(*_ESCAPES)
  def test_escapes_fail(self, escape):
    folder = _folder(self)
    victim = folder / 'victim'
    victim.write_text('kept')
    mode = victim.stat().st_mode
    escape = escape.format(mark=str(folder / 'mark'), victim=str(victim))
    self.assertTrue(np.isnan(_score(self.box, f'eval {escape}')[0]))
    self.assertEqual([p.name for p in folder.iterdir()], ['victim'])
    self.assertEqual(victim.read_text(), 'kept')
    self.assertEqual(victim.stat().st_mode, mode)
    self.assertEqual(_score(self.box, 'equal a'), [1])

  @parameterized.parameters(*_ESCAPES[:7])
  def test_without_confinement_they_succeed(self, escape):
    folder = _folder(self)
    victim = folder / 'victim'
    victim.write_text('lost')
    escape = escape.format(mark=str(folder / 'mark'), victim=str(victim))
    with sandbox.Sandbox(_GRADERS, workers=1, confined=False) as box:
      _score(box, f'eval {escape}')
    self.assertIn('mark', [path.name for path in folder.iterdir()])

  @_linux_only
  @parameterized.parameters(*(e for e in _ESCAPES if 'ctypes' not in e))
  def test_the_kernel_alone_refuses_them_too(self, escape):
    folder = _folder(self)
    victim = folder / 'victim'
    victim.write_text('kept')
    escape = escape.format(mark=str(folder / 'mark'), victim=str(victim))
    code = f"""
      import os, pathlib, resource, socket, sqlite3, subprocess
      from rljax.rewards import linux
      assert linux.filter_calls()
      try:
        {escape}
      except BaseException as error:
        print(error)
    """
    subprocess.run(
      [sys.executable, '-c', textwrap.dedent(code)],
      env={**os.environ, 'PYTHONPATH': os.pathsep.join(sys.path)},
      capture_output=True,
      check=True,
    )
    self.assertEqual([p.name for p in folder.iterdir()], ['victim'])
    self.assertEqual(victim.read_text(), 'kept')

  @parameterized.parameters(
    "len(open('/etc/passwd').read()) > 0",
    "__import__('fractions').Fraction(1, 2)",
    "__import__('numpy').linalg.inv(__import__('numpy').eye(300)).sum()",
    "[__import__('threading').Thread(target=int).start()] and 1",
    "__import__('datetime').datetime.now().year > 2000",
    "__import__('random').random() < 2",
    "__import__('decimal').Decimal('0.5')",
  )
  def test_computing_and_reading_go_on(self, expression):
    (score,) = _score(self.box, f'eval {expression}')
    self.assertGreater(score, 0, self.box.errors)

  def test_an_answer_that_nobody_asked_for(self):
    forged = (
      "[__import__('os').write(fd, bytes(9)) for fd in range(3, 9) "
      "if __import__('os').path.exists(f'/proc/self/fd/{fd}') and "
      "__import__('os').get_blocking(fd) and fd != 0] and 1"
    )
    self.box.score(['a'], [f'eval {forged}'])
    self.assertEqual(_score(self.box, *['equal a'] * 3), [1, 1, 1])

  def test_no_secret_is_inherited(self):
    os.environ['RLJAX_TEST_SECRET'] = 'x'
    self.addCleanup(os.environ.pop, 'RLJAX_TEST_SECRET')
    with sandbox.Sandbox(_GRADERS, workers=1) as box:
      names = "'RLJAX_TEST_SECRET' in __import__('os').environ"
      self.assertEqual(_score(box, f'eval {names}'), [0])

  def test_system_call_numbers_are_distinct(self):
    for column in (0, 1):
      numbers = [n[column] for n in linux._CALLS.values()]
      numbers += [n[0][column] for n in linux._CHECKED]
      numbers = [n for n in numbers if n is not None]
      self.assertLen(set(numbers), len(numbers))


def test_the_pool_starts_without_jax():
  code = 'import sys; import rljax.rewards.supervisor; print(*sys.modules)'
  run = subprocess.run(
    [sys.executable, '-c', code],
    env={**os.environ, 'PYTHONPATH': os.pathsep.join(sys.path)},
    capture_output=True,
    check=True,
    text=True,
  )
  assert not {'jax', 'numpy', 'grain'} & set(run.stdout.split())


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__]))
