"""Finding and comparing final answers.

The texts of data/math_answers.jsonl are those on which other stacks' parsers
disagree; the verdicts there are this library's, worked out by hand.
"""

import asyncio
import concurrent.futures
import json
import pathlib
import threading
import time

from absl.testing import parameterized
import numpy as np
import pytest

from rljax.rewards import mathematics, sandbox

_TABLE = [
  json.loads(line)
  for line in (pathlib.Path(__file__).parents[1] / 'data/math_answers.jsonl')
  .read_text()
  .splitlines()
]


def verifier():
  """Returns `equivalent` on (gold, text), for a sandbox."""
  mathematics.require()
  return mathematics.equivalent


class FinalAnswerTest(parameterized.TestCase):
  @parameterized.parameters(*_TABLE)
  def test_table(self, text, gold, final, exact, equivalent):
    del equivalent
    self.assertEqual(mathematics.final_answer(text), final)
    self.assertEqual(mathematics.exact(gold, text), exact)

  def test_table_is_whole(self):
    self.assertLen(_TABLE, 24)
    self.assertEqual(sum(row['exact'] for row in _TABLE), 11)
    self.assertEqual(sum(row['equivalent'] for row in _TABLE), 16)

  @parameterized.parameters(
    (r'\boxed{\frac{1}{\sqrt{2}}}', r'\frac{1}{\sqrt{2}}'),
    (r'\boxed{\{1, 2\}}', r'\{1, 2\}'),
    (r'\boxed{x = \boxed{5}}', '5'),
    (r'\boxed {7}', '7'),
    (r'\boxed{5} and \boxed{6', '5'),
    (r'\boxed{6} }} \boxed{{8}}', '{8}'),
    (r'\\boxed{5}', None),
    ('#### 18', '18'),
    ('#### 18 apples\nand more', '18 apples'),
    ('#### ', None),
    ('####\n5', None),
    (r'\boxed{1} #### 5', '5'),
    (r'#### 5 \boxed{1}', '1'),
    (r'\boxed{  }', None),
    ('', None),
  )
  def test_marks(self, text, answer):
    self.assertEqual(mathematics.final_answer(text), answer)

  @parameterized.parameters(
    ('$ 1,234,567.5 $', '1234567.5'),
    ('(1,234)', '(1,234)'),
    ('12,34', '12,34'),
    (r'\left( 1,\ 2 \right).', '(1,2)'),
    (r'\dfrac12', r'\frac{1}{2}'),
    (r'{\text{yes}}', 'yes'),
    (r'{1}+{2}', r'{1}+{2}'),
    (r'\leftarrow x', r'\leftarrowx'),
  )
  def test_normalized(self, answer, plain):
    self.assertEqual(mathematics.normalized(answer), plain)

  def test_gold_may_be_a_solution(self):
    gold = '3 + 15 = <<18>>\n#### 18'
    self.assertEqual(mathematics.exact(gold, r'so \boxed{18}'), 1)

  def test_a_long_row_of_open_boxes_is_quick(self):
    start = time.monotonic()
    self.assertIsNone(mathematics.final_answer(r'\boxed{' * 50_000))
    self.assertLess(time.monotonic() - start, 2)


@pytest.mark.tasks
class EquivalentTest(parameterized.TestCase):
  @parameterized.parameters(*_TABLE)
  def test_table(self, text, gold, final, exact, equivalent):
    del final, exact
    self.assertEqual(mathematics.equivalent(gold, text), equivalent)

  @parameterized.parameters(
    ('x^2-1', r'\boxed{(x-1)(x+1)}', 1),
    (r'\{1,2\}', r'\boxed{\{2,1\}}', 1),
    ('(1,2)', r'\boxed{(2,1)}', 0),
    (r'\frac{1}{3}', r'\boxed{0.333}', 0),
    ('10%', r'\boxed{0.1}', 1),
    ('3', r'\boxed{@@##}', 0),
    ('3', r'\boxed{__import__("os")}', 0),
    ('3', r'3', 0),
    ('yes', r'\boxed{\text{yes}}', 1),
    ('yes', r'\boxed{sey}', 0),
    ('ab', r'\boxed{ba}', 1),
    (r'\pi r^2', r'\boxed{r^2\pi}', 1),
    ('sqrt(4)', r'\boxed{2}', 1),
    ('3', r'\boxed{3\text{ cm}}', 1),
    ('5', r'\boxed{' + '5' * 5000 + '}', 0),
  )
  def test_expressions(self, gold, text, score):
    self.assertEqual(mathematics.equivalent(gold, text), score)

  def test_a_gold_that_is_nothing_is_an_error(self):
    with self.assertRaisesRegex(ValueError, 'the gold answer'):
      mathematics.equivalent('$ $', r'\boxed{3}')

  def test_from_a_thread(self):
    got = []
    thread = threading.Thread(target=lambda: got.append(_third()))
    thread.start()
    thread.join()
    self.assertEqual(got, [1.0])

  def test_from_an_executor(self):
    async def judge():
      loop = asyncio.get_running_loop()
      with concurrent.futures.ThreadPoolExecutor() as pool:
        return await loop.run_in_executor(pool, _third)

    self.assertEqual(asyncio.run(judge()), 1.0)

  def test_in_a_sandbox(self):
    golds = [r'\frac{1}{3}', '4', '', '7']
    texts = [r'\boxed{2/6}', r'\boxed{5}', r'\boxed{3}', r'\boxed{9^{9^9}}']
    target = 'tests.rewards.mathematics_test:verifier'
    with sandbox.Sandbox(target, workers=1, timeout=5.0) as box:
      got = box.score(golds, texts)
      np.testing.assert_array_equal(got[:3], [1, 0, np.nan])
      self.assertNotEqual(got[3], 1)
      self.assertEqual(box.failures['exception'], 1)
      self.assertIn('the gold answer', box.errors['exception'])


def _third():
  return mathematics.equivalent(r'\frac{1}{3}', r'\boxed{\frac{2}{6}}')


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__]))
