"""Problems asked few-shot, and both verifiers under SmolLM2's tokenizer."""

import dataclasses
import pathlib
import random

from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.data import subwords
from rljax.models.convert import gguf
from rljax.tasks import few_shot, task
from tests.tasks import rollouts

_ALL = 'sums products long_sums'
_judge = jax.jit(few_shot.FewShot().device_verify)


def _tokenizer():
  """Returns SmolLM2's first 320 tokens; a line break stops too."""
  path = pathlib.Path(__file__).parents[1] / 'data' / 'tiny_llama.gguf'
  tokenizer = subwords.from_gguf(gguf.read(path).metadata)
  stops = (*tokenizer.encode('\n'), *tokenizer.stop_ids)
  return dataclasses.replace(tokenizer, stop_ids=stops)


TOKENIZER = _tokenizer()
LINE = dataclasses.replace(TOKENIZER, stop_ids=TOKENIZER.stop_ids[:1])


def _examples(made, split):
  source = made.source(split)
  return [source[i] for i in range(len(source))]


def _key(line):
  """Returns the problem of 'a+b=...' up to the order of its operands."""
  problem = line.partition('=')[0]
  symbol = '+' if '+' in problem else '*'
  return symbol, *sorted(map(int, problem.split(symbol)))


def _last(example):
  """Returns the line that asks."""
  return example.prompt.split('\n')[-1]


class ProblemsTest(parameterized.TestCase):
  def test_prompt(self):
    example = few_shot.FewShot()._example(('sums', 2, 9))
    shown = '3+4=7\n5*6=30\n8+9=17\n2*4=8\n'
    self.assertEqual(example.prompt, f'{shown}2+9=')
    self.assertEqual(example.answer, '11')
    self.assertLen(TOKENIZER.encode(example.prompt), 30)

  @parameterized.parameters(
    ({'shots': 4}, 77, 115),
    ({'shots': 0}, 78, 122),
    ({'parts': 'products', 'shots': 4, 'held_out': 0.2}, 17, 75),
    ({'parts': _ALL, 'shots': 3}, 122, 184),
  )
  def test_splits_share_no_unordered_problem(self, options, test, train):
    made = few_shot.FewShot(**options)
    splits = {split: _examples(made, split) for split in task.SPLITS}
    self.assertLen(splits['test'], test)
    self.assertLen(splits['train'], train)
    both = splits['test'] + splits['train']
    self.assertLen({e.prompt for e in both}, test + train)
    *shots, _ = both[0].prompt.split('\n')
    keys = {
      split: {_key(_last(e)) for e in examples}
      for split, examples in splits.items()
    } | {'shots': {_key(line) for line in shots}}
    self.assertLen(keys['shots'], options['shots'])
    self.assertEmpty(keys['test'] & keys['train'])
    self.assertEmpty(keys['shots'] & (keys['test'] | keys['train']))
    self.assertLen({e.uid for e in both}, len(keys['test'] | keys['train']))

  def test_every_line_of_every_prompt_is_true(self):
    for example in _examples(few_shot.FewShot(parts=_ALL, shots=12), 'train'):
      for line in f'{example.prompt}{example.answer}'.split('\n'):
        left, right = line.split('=')
        self.assertEqual(eval(left), int(right))

  def test_prompts_fit_in_32_tokens(self):
    for options in ({}, {'parts': _ALL, 'shots': 3}):
      made = few_shot.FewShot(**options)
      both = _examples(made, 'train') + _examples(made, 'test')
      longest = max(len(TOKENIZER.encode(e.prompt)) for e in both)
      self.assertBetween(longest, 28, 32)

  def test_splits_share_every_size_alike(self):
    made = few_shot.FewShot(held_out=0.4)
    keys = {
      s: {_key(_last(e)) for e in _examples(made, s)} for s in task.SPLITS
    }
    for symbol in '+*':
      for size in range(10):
        test, train = (
          sum(key[0] == symbol and key[2] <= size for key in keys[split])
          for split in ('test', 'train')
        )
        self.assertEqual(test, int(0.4 * (test + train)))

  def test_both_orders_are_one_problem(self):
    made = few_shot.FewShot(parts=_ALL)
    uids = {
      problem: made._example(problem).uid
      for problem in (
        ('sums', 2, 9),
        ('sums', 9, 2),
        ('products', 2, 9),
        ('long_sums', 2, 9),
      )
    }
    self.assertLen(set(uids.values()), 3)
    self.assertEqual(uids['sums', 2, 9], uids['sums', 9, 2])

  def test_two_makes_are_equal(self):
    one, two = (_examples(few_shot.FewShot(), 'train') for _ in range(2))
    self.assertEqual(one, two)

  def test_options_build_the_task_again(self):
    made = few_shot.FewShot(parts='sums long_sums', shots=1)
    self.assertEqual(task.named(made.name, **made.options), made)

  @parameterized.parameters(
    ({'parts': 'sums product'}, "did you mean 'products'"),
    ({'parts': 'sums sums'}, 'repeats itself'),
    ({'parts': ''}, 'is empty'),
    ({'shots': 9}, '4 for each part'),
    ({'held_out': 0.0}, 'held_out:0.0 is not between 0 and 1'),
    ({'most': 3}, 'most:3 is less than 4'),
  )
  def test_options_out_of_range(self, options, message):
    with self.assertRaisesRegex(ValueError, message):
      few_shot.FewShot(**options)


class VerifierTest(parameterized.TestCase):
  @parameterized.parameters(
    ('11', True, 1),
    ('11', False, 0),
    ('', True, 0),
    ('1', True, 0),
    ('111', True, 0),
    (' 11', True, 0),
    ('11 ', True, 0),
    ('011', True, 0),
    ('+11', True, 0),
    ('11=', True, 0),
    ('2+9=11', True, 0),
  )
  def test_host_and_device(self, text, stopped, score):
    made = few_shot.FewShot()
    example = made._example(('sums', 2, 9))
    rows = rollouts.rollout(made, [example], [text], LINE, 8, [stopped])
    np.testing.assert_array_equal(_judge(rows), [score])
    if stopped:
      self.assertEqual(made.verify(example, text), score)

  def test_agree_on_any_tokens(self):
    made, rng = few_shot.FewShot(parts=_ALL), random.Random(0)
    examples = rng.choices(_examples(made, 'test'), k=2000)
    used = [*TOKENIZER.encode('0123456789'), *TOKENIZER.encode('1+2*-= a,')]
    ids = [_some_ids(TOKENIZER.encode(e.answer), used, rng) for e in examples]
    texts = [TOKENIZER.decode(row) for row in ids]
    wanted = [made.verify(e, t) for e, t in zip(examples, texts, strict=True)]
    np.testing.assert_array_equal(_judged(made, examples, ids), wanted)
    self.assertBetween(np.mean(wanted), 0.2, 0.8)

  def test_any_stop_token_counts(self):
    made = few_shot.FewShot()
    example = made._example(('products', 0, 7))
    for stop in TOKENIZER.stop_ids:
      ended = dataclasses.replace(TOKENIZER, stop_ids=(stop,))
      rows = rollouts.rollout(made, [example] * 2, ['0', '7'], ended, 4)
      np.testing.assert_array_equal(_judge(rows), [1, 0])

  def test_validates(self):
    task.validate(few_shot.FewShot(parts=_ALL), 200)


def _some_ids(gold, used, rng):
  """Returns the gold, often with a token changed, cut or added."""
  place, other = rng.randrange(len(gold)), rng.choice(used)
  return rng.choice(
    [
      gold,
      gold[:place] + [other] + gold[place + 1 :],
      gold[:place] + [other] + gold[place:],
      gold[:place] + gold[place + 1 :],
      gold + [other],
    ]
  )


def _judged(made, examples, ids):
  """Returns the device's scores of tokens that a line break ends."""
  rows = rollouts.rollout(made, examples, [''] * len(ids), LINE, 6)
  response = np.zeros((len(ids), 6), np.int32)
  for row, own in zip(response, ids, strict=True):
    row[: len(own) + 1] = [*own, *LINE.stop_ids]
  length = np.array([len(own) + 1 for own in ids])
  return _judge(
    dataclasses.replace(
      rows, response=jnp.asarray(response), length=jnp.asarray(length)
    )
  )


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__]))
