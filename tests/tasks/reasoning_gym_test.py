"""reasoning-gym by name, its faults, and its danger."""

import pathlib
import pickle
import tempfile
import time

from absl.testing import parameterized
import numpy as np
import pytest

from rljax.rewards import sandbox
from rljax.tasks import reasoning_gym, task

# Their scorers run the response.
_EXECUTING = (
  *('binary_matrix', 'n_queens', 'spiral_matrix', 'string_insertion'),
  *('countdown', 'puzzle24', 'polynomial_multiplication'),
  *('simple_integration',),
)
_RAW = 'tests.tasks.scorers:raw'
_ONE_DIGIT = {'min_digits': 1, 'max_digits': 1, 'min_terms': 2, 'max_terms': 2}


def _make(dataset, **options):
  options = {'size': 40, 'test_size': 8, **options}
  return task.named(f'reasoning_gym:{dataset}', **options)


def _all(made, split):
  source = made.source(split)
  return [source[i] for i in range(len(source))]


def test_without_the_extra():
  try:
    import reasoning_gym as installed

    pytest.skip(f'{installed.__name__} is installed')
  except ImportError:
    pass
  with pytest.raises(ImportError, match=r"pip install 'rljax\[tasks\]'"):
    task.named('reasoning_gym:chain_sum')


def test_plain_values():
  value = {
    np.str_('a'): [np.int64(1), (np.float32(0.5), {np.bool_(True)})],
    'b': np.arange(3),
    'c': None,
  }
  plain = reasoning_gym._plain(value)
  assert plain == {'a': [1, (0.5, {True})], 'b': [0, 1, 2], 'c': None}
  assert b'numpy' not in pickle.dumps(plain)


@pytest.mark.tasks
class ProblemsTest(parameterized.TestCase):
  def test_problems(self):
    made = _make('chain_sum', config={'min_digits': 3}, template='{question} ')
    train, test = _all(made, 'train'), _all(made, 'test')
    self.assertLen(train, 40)
    self.assertLen(test, 8)
    self.assertEqual(train, _all(_make(**_rebuild(made)), 'train'))
    self.assertEmpty({e.prompt for e in train} & {e.prompt for e in test})
    self.assertEmpty({e.uid for e in train} & {e.uid for e in test})
    for e in train + test:
      self.assertBetween(e.uid, 0, 2**31 - 1)
      self.assertEqual(made.verify(e, f' {e.answer}\n'), 1)
      self.assertEqual(made.verify(e, f'it is {e.answer}'), 0)
    self.assertFalse(made.trusted)

  def test_a_small_space_is_split_by_question(self):
    made = _make('chain_sum', config=_ONE_DIGIT, size=400, test_size=200)
    train, test = _all(made, 'train'), _all(made, 'test')
    self.assertBetween(len(test), 30, 80)
    self.assertLen({e.prompt for e in test}, len(test))
    self.assertGreater(len({e.prompt for e in train}), 80)
    self.assertEmpty({e.prompt for e in train} & {e.prompt for e in test})
    same = {e.prompt: e.uid for e in train + test}
    self.assertLen(set(same.values()), len(same))

  def test_examples_travel_without_numpy(self):
    example = _make('knights_knaves').source('train')[0]
    self.assertNotIn(b'numpy', pickle.dumps(example))

  @parameterized.parameters(
    ('chainsum', {}, "did you mean 'chain_sum'"),
    ('chain_sum', {'config': {'min_digit': 1}}, "did you mean 'min_digits'"),
    ('chain_sum', {'config': {'size': 1}}, "no field 'size'"),
    ('chain_sum', {'config': {'min_digits': 0}}, 'reasoning_gym:chain_sum'),
    ('chain_sum', {'min_digits': 1}, 'has no option'),
    ('chain_sum', {'template': 'Q'}, 'does not hold'),
    ('chain_sum', {'threshold': 0}, 'threshold'),
    ('codeio', {}, 'refused: making a problem runs code'),
    ('composite', {}, 'refused'),
  )
  def test_wrong_options(self, dataset, options, message):
    with self.assertRaisesRegex(ValueError, message):
      _make(dataset, **options)

  @parameterized.parameters('chain_sum', 'countdown', 'game_of_life_halting')
  def test_validates(self, dataset):
    task.validate(_make(dataset, size=4, test_size=2), 2)

  @pytest.mark.slow
  def test_all_validate(self):
    from reasoning_gym import factory

    for dataset in sorted(factory.DATASETS):
      if dataset not in (*reasoning_gym._REFUSED, 'knight_swap'):
        with self.subTest(dataset):
          # In this process: the strings are ours, and a sandbox a generator
          # takes minutes.
          made = _make(dataset, size=3, test_size=1)
          task._validate(made, 1, made.verify)


@pytest.mark.tasks
class VerifierTest(parameterized.TestCase):
  def _score(self, dataset, entry, text):
    example = task.Example(uid=0, prompt='', answer='', meta={'entry': entry})
    return _make(dataset).verify(example, text)

  @parameterized.parameters(
    ('(3+5)*8', 1),
    ('8*(5 + 3)', 1),
    ('3+5', 0),
    ('3*8+5*8', 0),
    ('64', 0),
    ('(3+5)*8.0', 0),
    ('9**9**9', 0),
    ('', 0),
  )
  def test_countdown(self, text, score):
    entry = {'answer': '', 'metadata': {'numbers': [3, 5, 8], 'target': 64}}
    start = time.monotonic()
    self.assertEqual(self._score('countdown', entry, text), score)
    self.assertLess(time.monotonic() - start, 5)

  @parameterized.parameters(
    ('4*6*1*1', 1), ('8*3*1*1', 0), ('4*6', 0), ('99/4-1/4*6+1', 0)
  )
  def test_puzzle24_wants_the_given_numbers(self, text, score):
    entry = {'answer': '', 'metadata': {'numbers': [4, 6, 1, 1]}}
    self.assertEqual(self._score('puzzle24', entry, text), score)

  @parameterized.parameters(('False', 1), ('True', 0), ('?', 0), ('0', 0))
  def test_game_of_life_halting(self, text, score):
    entry = {'answer': 'False', 'metadata': {}}
    self.assertEqual(self._score('game_of_life_halting', entry, text), score)

  @parameterized.parameters(
    ('complex_arithmetic', 'nan'),
    ('prime_factorization', 'x'),
    ('boxnet', '0'),
    ('boxnet', '[[1]]'),
    ('coin_flip', '1e999'),
    ('game_of_life', '{}'),
    ('spell_backward', 'olle'),
    ('chain_sum', 'The answer is 1234567890 or so'),
  )
  def test_garbage_is_worth_nothing(self, dataset, text):
    made = _make(dataset)
    self.assertEqual(made.verify(made.source('test')[0], text), 0)

  @parameterized.parameters(
    ('graph_color', 1), ('propositional_logic', 1), ('rubiks_cube', 1)
  )
  def test_a_sample_answer_where_there_is_none(self, dataset, score):
    made = _make(dataset)
    example = made.source('test')[0]
    self.assertEqual(made.verify(example, example.answer), score)


@pytest.mark.tasks
class DangerTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    folder = tempfile.TemporaryDirectory()
    self.addCleanup(folder.cleanup)
    self.mark = pathlib.Path(folder.name) / 'mark'
    self.attack = f"__import__('pathlib').Path({str(self.mark)!r}).touch()"

  @parameterized.parameters(*_EXECUTING)
  def test_a_response_is_not_run(self, dataset):
    made = _make(dataset, size=2, test_size=1)
    self.assertEqual(made.verify(made.source('test')[0], self.attack), 0)
    self.assertFalse(self.mark.exists())

  def test_the_sandbox_holds_even_without_our_guards(self):
    with sandbox.Sandbox(_RAW, workers=1) as box:
      for dataset in _EXECUTING:
        box.score([dataset], [self.attack])
        self.assertFalse(self.mark.exists(), dataset)

  def test_without_the_sandbox_it_would_be_run(self):
    with sandbox.Sandbox(_RAW, workers=1, confined=False) as box:
      box.score(['spiral_matrix'], [self.attack])
    self.assertTrue(self.mark.exists())

  def test_a_hang_ends(self):
    with sandbox.Sandbox(_RAW, workers=1, timeout=2.0) as box:
      box.barriers()
      start = time.monotonic()
      got = box.score(['countdown'] * 3, ['9**9**9', '1+1', '9**9**9'])
      self.assertLess(time.monotonic() - start, 10)
      self.assertFalse(np.any(got == 1))
      self.assertGreaterEqual(box.failures['timeout'], 2)


def _rebuild(made):
  return {'dataset': made.dataset, **made.options}


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__]))
