"""Countdown problems, and both verifiers on every kind of expression."""

import fractions
import random
import re

from absl.testing import parameterized
import jax
import numpy as np
import pytest

from rljax.data import tokenizers
from rljax.tasks import countdown, task
from tests.tasks import rollouts


@jax.jit
def _judge(rows):
  with jax.numpy_dtype_promotion('strict'):
    return countdown.reaches(rows)


def _example(numbers, target):
  return task.Example(
    uid=0,
    prompt='?',
    answer='',
    meta={'numbers': list(numbers), 'target': target},
  )


def _on_device(examples, texts, width=32, stopped=None):
  tokenizer = tokenizers.Characters('0123456789+-*/ =:?().')
  rows = rollouts.rollout(
    countdown.Countdown(), examples, texts, tokenizer, width, stopped
  )
  return np.asarray(_judge(rows)).tolist()


class ProblemsTest(parameterized.TestCase):
  @parameterized.parameters(
    {'problems': 500},
    {'numbers': 4, 'largest': 50, 'problems': 500},
    {'numbers': 2, 'largest': 9, 'problems': 80},
  )
  def test_problems_are_new_solved_and_split(self, **options):
    made = countdown.Countdown(**options)
    keys = {}
    for split in task.SPLITS:
      source = made.source(split)
      examples = [source[i] for i in range(len(source))]
      keys[split] = {
        (*sorted(e.meta['numbers']), e.meta['target']) for e in examples
      }
      self.assertLen(keys[split], len(examples))
      for e in examples:
        self.assertEqual(_evaluate(e.answer), e.meta['target'])
        self.assertEqual(made.verify(e, e.answer), 1)
        self.assertNotIn(e.meta['target'], e.meta['numbers'])
        self.assertContainsSubset(e.prompt + e.answer, made.alphabet)
        numbers = ' '.join(map(str, e.meta['numbers']))
        self.assertEqual(e.prompt, f'{numbers}={e.meta["target"]}:')
    self.assertEmpty(keys['train'] & keys['test'])
    total = len(keys['train']) + len(keys['test'])
    self.assertEqual(total, options['problems'])
    self.assertBetween(len(keys['test']) / total, 0.1, 0.3)

  def test_seed_decides(self):
    def first(seed):
      made = countdown.Countdown(problems=50, seed=seed)
      return [made.source('train')[i] for i in range(5)]

    self.assertEqual(first(3), first(3))
    self.assertNotEqual(first(3), first(4))

  @parameterized.parameters(
    ({'numbers': 4, 'largest': 99}, 'overflow'),
    ({'numbers': 2, 'largest': 3, 'problems': 900}, 'problems found'),
    ({'numbers': 1}, 'numbers:1 is less than 2'),
    ({'held_out': 0.0}, 'held_out'),
  )
  def test_options_out_of_range(self, options, message):
    with self.assertRaisesRegex(ValueError, message):
      countdown.Countdown(**options).source('train')

  def test_validates(self):
    task.validate(countdown.Countdown(problems=100))


class VerifierTest(parameterized.TestCase):
  @parameterized.parameters(
    ((3, 5, 7), 26, '7*3+5', 1),
    ((3, 5, 7), 26, '5+3*7', 1),
    ((3, 5, 7), 26, '(7*3)+5', 0),
    ((3, 5, 7), 26, '+7*3+5', 0),
    ((3, 5, 7), 26, '7*3+5=', 0),
    ((3, 5, 7), 26, '7*3+05', 0),
    ((3, 5, 7), 26, '7 *3+5', 0),
    ((3, 5, 7), 26, '7*3+5+', 0),
    ((3, 5, 7), 26, '7*+3', 0),
    ((3, 5, 7), 26, '', 0),
    ((3, 5, 7), 26, '26', 0),
    ((3, 5, 7), 12, '5+7', 1),
    ((3, 5, 7), 14, '7+7', 0),
    ((7, 5, 7), 14, '7+7', 1),
    ((7, 7, 7), 28, '7+7+7+7', 0),
    ((2, 3, 6), 4, '6/3*2', 1),
    ((2, 3, 6), 1, '6/3/2', 1),
    ((2, 3, 6), 4, '2/3*6', 1),
    ((2, 3, 6), 9, '6*3/2', 1),
    ((2, 3, 6), -5, '3-6-2', 1),
    ((4, 8, 8, 4), 1, '4/8+4/8', 1),
    ((1, 4, 4, 1), 0, '1/4-1/4', 1),
    ((9, 9, 9), 9, '9**9**9', 0),
    ((9, 9, 9), 1, '9//9', 0),
    ((1, 2, 3), 5, '4294967298+3', 0),
    ((1, 2, 3), 5, '12-7', 0),
    ((20, 20, 20), 8000, '20*20*20', 1),
  )
  def test_hand_worked(self, numbers, target, text, score):
    example = _example(numbers, target)
    self.assertEqual(countdown.Countdown().verify(example, text), score)
    got = _on_device([example] * 2, [text] * 2, stopped=[True, False])
    self.assertEqual(got, [score, 0])

  @parameterized.parameters(0, 1, 2)
  def test_host_and_device_agree(self, seed):
    rng = random.Random(seed)
    examples, texts = [], []
    for _ in range(1000):
      numbers = [rng.randint(1, 20) for _ in range(3)]
      text = _attempt(numbers, rng)
      examples.append(_example(numbers, _target(text, rng)))
      texts.append(text)
    made = countdown.Countdown()
    wanted = [made.verify(e, t) for e, t in zip(examples, texts, strict=True)]
    self.assertEqual(_on_device(examples, texts), wanted)
    self.assertBetween(np.mean(wanted), 0.2, 0.8)

  def test_host_agrees_with_python(self):
    rng = random.Random(0)
    for _ in range(2000):
      numbers = [rng.randint(1, 20) for _ in range(4)]
      text = _attempt(numbers, rng)
      value = countdown.reached(text, numbers)
      if value is not None:
        self.assertEqual(value, _evaluate(text))

  def test_no_place_for_a_stop(self):
    example = _example((3, 5, 7), 12)
    got = _on_device([example] * 2, ['5+7', '5+71'], 4, [True, False])
    self.assertEqual(got, [1, 0])

  def test_a_tokenizer_without_a_digit(self):
    with self.assertRaisesRegex(ValueError, "single token for '0'"):
      countdown.Countdown().encode(_example((1, 2, 3), 4), _Doubled())


class _Doubled:
  """A tokenizer that writes every letter twice."""

  def encode(self, text):
    return [ord(letter) for letter in text for _ in range(2)]


def _evaluate(text):
  """Returns what Python makes of the expression over fractions."""
  exact = re.sub('([0-9]+)', r'F(\1)', text)
  return eval(exact, {'F': fractions.Fraction})


def _attempt(numbers, rng):
  """Returns an expression over the numbers, now and then broken."""
  chosen = rng.sample(numbers, rng.randint(1, len(numbers)))
  text = str(chosen[0]) + ''.join(
    f'{rng.choice("+-*/")}{n}' for n in chosen[1:]
  )
  if rng.random() < 0.4:
    place = rng.randrange(len(text) + 1)
    text = text[:place] + rng.choice('0123456789+-*/ ().') + text[place:]
  if rng.random() < 0.1:
    place = rng.randrange(len(text))
    text = text[:place] + text[place + 1 :]
  return text


def _target(text, rng):
  """Returns what the text is worth where it is an integer; else anything."""
  try:
    value = _evaluate(text)
  except (SyntaxError, TypeError, AttributeError, ZeroDivisionError):
    value = fractions.Fraction(7)
  return int(value) % 10**9 + (rng.random() < 0.1)


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__]))
