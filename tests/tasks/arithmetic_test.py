"""Arithmetic problems, their solutions, and both verifiers."""

import dataclasses
import random

from absl.testing import parameterized
import jax
import numpy as np
import pytest

from rljax.data import tokenizers
from rljax.tasks import arithmetic, task
from tests.tasks import rollouts

_ALL = {'operations': '+-*', 'digits': 1, 'terms': 3}


@jax.jit
def _judge(rows):
  with jax.numpy_dtype_promotion('strict'):
    return arithmetic.exact(rows)


class _Joining(tokenizers.Characters):
  """Characters, but ';3' is one token."""

  def encode(self, text):
    ids, joined = super().encode(text), super().encode(';3')
    for i in reversed(range(len(ids) - 1)):
      if ids[i : i + 2] == joined:
        ids[i : i + 2] = [self.vocab_size]
    return ids


class ProblemsTest(parameterized.TestCase):
  @parameterized.parameters(
    ('plain', False, '85'),
    ('plain', True, '58'),
    ('short', False, '15;8;85'),
    ('scratch', False, '7+8=15;4+3+1=8;85'),
    ('scratch', True, '7+8=15;4+3+1=8;58'),
  )
  def test_styles(self, style, reverse, trace):
    made = arithmetic.Arithmetic(style=style, reverse=reverse)
    example = made._example(((47, 38), ('+',)))
    self.assertEqual(example.prompt, '47+38=')
    self.assertEqual(example.trace, trace)
    self.assertEqual(made.verify(example, trace), 1.0)

  @parameterized.parameters(
    ((82, 47), '-', '2-7=-5;8-4-1=3;35'),
    ((12, 47), '-', '-2+7=5;-1+4=3;-35'),
    ((47, 38), '*', '47*8=376;47*30=1410;376+1410=1786;1786'),
    ((7, 6), '*', '7*6=42;42'),
    ((9, 3, 4), '-*', '3*4=12;-9+2=-7;-0+1-1=0;-3'),
  )
  def test_worked_solutions(self, operands, operators, trace):
    made = arithmetic.Arithmetic(operations='+-*', style='scratch')
    self.assertEqual(made._solution(operands, operators), trace)

  def test_every_step_of_every_solution_is_true(self):
    made = arithmetic.Arithmetic(style='scratch', **_ALL)
    for problem in made._problems():
      *steps, answer = made._solution(*problem).split(';')
      for step in steps:
        left, right = step.split('=')
        self.assertEqual(eval(left), int(right))
      self.assertEqual(eval(arithmetic.written(*problem)), int(answer))

  def test_columns_add_up_to_the_answer(self):
    made = arithmetic.Arithmetic(operations='+-', style='short')
    for operands in ((99, 99), (10, 99), (0, 7), (73, 64)):
      for operator in '+-':
        *sums, answer = made._solution(operands, (operator,)).split(';')
        total = sum(int(s) % 10 * 10**k for k, s in enumerate(sums[:-1]))
        total += int(sums[-1]) * 10 ** (len(sums) - 1)
        self.assertEqual(total, abs(int(answer)))

  @parameterized.parameters(
    {}, {'digits': 1, 'operations': '+*'}, {'operations': '-'}, _ALL
  )
  def test_splits_share_no_unordered_problem(self, **options):
    made = arithmetic.Arithmetic(**options)
    keys = {}
    for split in task.SPLITS:
      source = made.source(split)
      examples = [source[i] for i in range(len(source))]
      keys[split] = {_unordered(e.prompt) for e in examples}
      self.assertLen({e.prompt for e in examples}, len(examples))
      self.assertLen({e.uid for e in examples}, len(keys[split]))
    self.assertEmpty(keys['train'] & keys['test'])
    total = len(keys['train']) + len(keys['test'])
    self.assertAlmostEqual(len(keys['test']) / total, 0.2, delta=0.02)

  def test_uid_is_that_of_the_unordered_problem(self):
    made = arithmetic.Arithmetic()
    uid = {
      operands: made._example((operands, ('+',))).uid
      for operands in ((47, 38), (38, 47), (38, 48))
    }
    self.assertEqual(uid[47, 38], uid[38, 47])
    self.assertNotEqual(uid[47, 38], uid[38, 48])

  def test_two_makes_are_equal(self):
    one, two = (arithmetic.Arithmetic().source('train') for _ in range(2))
    self.assertEqual([one[i] for i in range(9)], [two[i] for i in range(9)])

  def test_alphabet_covers_every_text(self):
    made = arithmetic.Arithmetic(style='scratch', **_ALL)
    source = made.source('train')
    used = {c for i in range(500) for c in source[i].prompt + source[i].trace}
    self.assertEqual(used, set(made.alphabet))

  @parameterized.parameters(
    {'operations': '/'},
    {'operations': '++'},
    {'style': 'scratchy'},
    {'terms': 1},
    {'held_out': 1.0},
    {'digits': 4},
    {'digits': 1, 'held_out': 0.999},
  )
  def test_options_out_of_range(self, **options):
    with self.assertRaises(ValueError):
      arithmetic.Arithmetic(**options).source('train')


class VerifierTest(parameterized.TestCase):
  @parameterized.parameters(
    ('85', 1),
    ('7+8=15;85', 1),
    (';;85', 1),
    ('', 0),
    ('85;', 0),
    ('085', 0),
    (' 85', 0),
    ('8', 0),
    ('850', 0),
    ('85;84', 0),
    ('47+38=85', 0),
  )
  def test_host_and_device(self, text, score):
    made = arithmetic.Arithmetic(style='scratch')
    example = made._example(((47, 38), ('+',)))
    self.assertEqual(made.verify(example, text), score)
    if ' ' in text:
      return
    tokenizer = tokenizers.Characters(made.alphabet)
    rows = rollouts.rollout(
      made, [example] * 2, [text] * 2, tokenizer, 16, [True, False]
    )
    np.testing.assert_array_equal(_judge(rows), [score, 0])

  @parameterized.parameters({}, {'style': 'short'}, _ALL)
  def test_host_and_device_agree_on_edits_of_the_gold(self, **options):
    made = arithmetic.Arithmetic(**options)
    tokenizer = tokenizers.Characters(made.alphabet)
    source, rng = made.source('test'), random.Random(0)
    examples = [source[rng.randrange(len(source))] for _ in range(400)]
    texts = [_edited(e.trace, made.alphabet, rng) for e in examples]
    wanted = [made.verify(e, t) for e, t in zip(examples, texts, strict=True)]
    rows = rollouts.rollout(made, examples, texts, tokenizer, 40)
    got = _judge(rows)
    np.testing.assert_array_equal(got, wanted)
    self.assertBetween(np.mean(wanted), 0.1, 0.8)

  def test_a_response_that_fills_every_place(self):
    made = arithmetic.Arithmetic()
    example = made._example(((47, 38), ('+',)))
    tokenizer = tokenizers.Characters(made.alphabet)
    texts, stopped = ['85', '850', ';85'], [True, False, False]
    rows = rollouts.rollout(made, [example] * 3, texts, tokenizer, 3, stopped)
    np.testing.assert_array_equal(_judge(rows), [1, 0, 0])

  def test_answers_are_read_through_prompt_of(self):
    made = arithmetic.Arithmetic()
    examples = [made._example(((a, 1), ('+',))) for a in (1, 2)]
    tokenizer = tokenizers.Characters(made.alphabet)
    rows = rollouts.rollout(made, examples, ['3', '2'], tokenizer, 4)
    rows = dataclasses.replace(rows, prompt_of=np.array([1, 0]))
    np.testing.assert_array_equal(_judge(rows), [1, 1])

  def test_a_separator_that_is_no_token_of_its_own(self):
    made = arithmetic.Arithmetic(style='short', digits=1)
    (example,) = [e for e in made.source('train') if e.prompt == '1+2=']
    joined = _Joining(made.alphabet)
    self.assertLen(joined.encode('3;3'), 2)
    with self.assertRaisesRegex(ValueError, 'style:short needs a tokenizer'):
      made.encode(example, joined)
    plain = arithmetic.Arithmetic().encode(example, joined)
    self.assertEqual([plain['separator']], joined.encode(';'))

  @parameterized.parameters({}, {'style': 'scratch'}, _ALL)
  def test_validates(self, **options):
    task.validate(arithmetic.Arithmetic(**options), 50)


def _unordered(line):
  """Returns the problem of 'a+b=...', its signed terms and factors sorted."""
  problem = line.partition('=')[0].replace('-', '+-')
  return tuple(sorted(_factors(term) for term in problem.split('+')))


def _factors(term):
  factors = term.removeprefix('-')
  return '-' in term, tuple(sorted(factors.split('*')))


def _edited(text, alphabet, rng):
  """Returns the text, often with one character changed, cut or added."""
  place, other = rng.randrange(len(text)), rng.choice(alphabet)
  return rng.choice(
    [
      text,
      text[:place] + other + text[place + 1 :],
      text[:place] + other + text[place:],
      text[:place] + text[place + 1 :],
      text + other,
      other + text,
    ]
  )


def test_title_says_what_looks_wrong():
  title = 'arithmetic, answers written from the last digit'
  assert task.named('arithmetic', reverse=True).title == title
  assert task.named('arithmetic').title == 'arithmetic'


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__]))
