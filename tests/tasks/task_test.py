"""Finding a task by name, and checking its verifier."""

import os
import subprocess
import sys

from absl.testing import parameterized
import grain
import pytest

from rljax.tasks import arithmetic, task


class NamedTest(parameterized.TestCase):
  def test_options_build_the_task_again(self):
    made = task.named('arithmetic', operations='+*', digits=1)
    self.assertEqual(made, arithmetic.Arithmetic(operations='+*', digits=1))
    self.assertEqual(task.named(made.name, **made.options), made)

  @parameterized.parameters(
    ('arithmetik', "did you mean 'arithmetic'"),
    ('reasoning-gym:chain_sum', "did you mean 'reasoning_gym'"),
    ('zzz', 'known: arithmetic, countdown, few_shot, reasoning_gym'),
    ('jsonl', "should read 'jsonl:<path>'"),
    ('reasoning_gym:', "should read 'reasoning_gym:<dataset>'"),
    ('arithmetic:sums', "should read 'arithmetic'"),
  )
  def test_wrong_name(self, name, message):
    with self.assertRaisesRegex(ValueError, message):
      task.named(name)

  def test_wrong_option(self):
    with self.assertRaisesRegex(ValueError, "did you mean 'digits'"):
      task.named('arithmetic', digit=2)

  def test_texts_are_read_as_their_fields_are_annotated(self):
    texts = {'digits': '1', 'reverse': 'true', 'held_out': '0.5'}
    made = task.named('arithmetic', **texts)
    values = {'digits': 1, 'reverse': True, 'held_out': 0.5}
    self.assertEqual(made, arithmetic.Arithmetic(**values))
    self.assertIs(made.reverse, True)

  @parameterized.parameters(
    ('arithmetic', 'digits', 'two', 'is not a whole number'),
    ('arithmetic', 'digits', '1.5', 'is not a whole number'),
    ('arithmetic', 'digits', 1.5, 'is not a whole number'),
    ('arithmetic', 'digits', True, 'is not a whole number'),
    ('arithmetic', 'digits', '0', 'is less than 1'),
    ('arithmetic', 'reverse', 'maybe', 'is not true or false'),
    ('arithmetic', 'reverse', 1, 'is not true or false'),
    ('arithmetic', 'operations', '5', 'should be some of'),
    ('countdown', 'seed', '-1', 'is less than 0'),
    ('few_shot', 'shots', 'abc', 'is not a whole number'),
    ('jsonl:x', 'held_out', 'half', 'is not a number'),
    ('jsonl:x', 'held_out', '2', 'is not between 0 and 1'),
    ('jsonl:x', 'held_out', 'nan', 'is not between 0 and 1'),
    ('jsonl:x', 'prompt', 5, 'is not a text'),
  )
  def test_wrong_value(self, name, option, value, message):
    found = f'^--task_options={option}:.* {message}'
    with self.assertRaisesRegex(ValueError, found):
      task.named(name, **{option: value})

  def test_wrong_split(self):
    with self.assertRaisesRegex(ValueError, "did you mean 'test'"):
      task.named('arithmetic').source('tests')

  @parameterized.parameters('task', 'files', 'reasoning_gym')
  def test_is_light_to_import(self, module):
    code = f'import sys; import rljax.tasks.{module}; print(*sys.modules)'
    run = subprocess.run(
      [sys.executable, '-c', code],
      env={**os.environ, 'PYTHONPATH': os.pathsep.join(sys.path)},
      capture_output=True,
      check=True,
      text=True,
    )
    self.assertEmpty({'jax', 'grain'} & set(run.stdout.split()))


class _Always:
  """A task whose verifier is wrong in one way."""

  name = 'always'
  options = {}
  device_verify = None

  def __init__(self, score, trusted=True):
    self._score, self.trusted = score, trusted

  def source(self, split):
    del split
    example = task.Example(uid=4, prompt='1+1=', answer='2')
    return grain.MapDataset.source([example])

  def verify(self, example, text):
    return self._score(example, text)

  def encode(self, example, tokenizer):
    del example, tokenizer
    return {}


class ValidateTest(parameterized.TestCase):
  def test_right(self):
    task.validate(_Always(lambda e, t: float(t == e.answer)))

  @parameterized.parameters(
    (lambda e, t: 0.0, "example 4: '2' scores 0.0, not 1.0"),
    (lambda e, t: 1.0, "example 4: '' scores 1.0, not 0.0"),
    (lambda e, t: float(e.answer in t), None),
    (lambda e, t: float(float(t) == 2), "example 4: '' raised ValueError"),
    (lambda e, t: float('nan') if t != e.answer else 1.0, 'scores nan'),
    (lambda e, t: 1.0 if t == e.answer else 0.1, 'scores 0.1'),
  )
  def test_wrong(self, score, message):
    if message is None:
      return task.validate(_Always(score))
    with self.assertRaisesRegex(ValueError, message):
      task.validate(_Always(score))


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__]))
