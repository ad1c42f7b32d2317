"""Expressions are read, never run."""

import fractions

from absl.testing import parameterized
import pytest

from rljax.rewards import expressions

_CODE = (
  '',
  'x =',
  '1;2',
  'a.b',
  "__import__('os')",
  'exp.__class__',
  'f(x)',
  'eval(1)',
  'exp(x, y)',
  'exp(x=1)',
  'exp(*x)',
  'exp(exp)(x)',
  '(lambda: 1)()',
  '[1]',
  '{1}',
  'x[0]',
  "'x'",
  'True',
  'None',
  '1j',
  'x if x else y',
  'x < y',
  'x and y',
  'x := 1',
  '(x := 1)',
  'x // y',
  'x % y',
  'x ^ y',
  'name',
  '\uff11',
  '(' * 500 + '1',
  '1+' * 600 + '1',
)


class ExpressionsTest(parameterized.TestCase):
  @parameterized.parameters(
    ('1+2*3', 7, [1, 2, 3]),
    ('(1+2)*3', 9, [1, 2, 3]),
    (' 8/(3-8/3) ', 24, [8, 3, 8, 3]),
    ('2-3-4', -5, [2, 3, 4]),
    ('1/3', fractions.Fraction(1, 3), [1, 3]),
    ('10', 10, [10]),
  )
  def test_arithmetic(self, text, value, numbers):
    self.assertEqual(expressions.arithmetic(text), (value, numbers))

  @parameterized.parameters(
    *_CODE, '9**9**9', '1/0', '1/(2-2)', '-1', '+1', '1.0', 'x', '007', 'exp(1)'
  )
  def test_not_arithmetic(self, text):
    self.assertIsNone(expressions.arithmetic(text))

  @parameterized.parameters(
    'x**2/2 + C',
    '-3*x',
    '2.5*exp(-x)*sin(2*x)',
    'log(Abs(x))',
    'pi*r**2',
    '(x**2+1)**-3',
    'x**(3/2)',
    '1',
  )
  def test_algebra(self, text):
    self.assertTrue(expressions.is_algebra(text))

  @parameterized.parameters(
    *_CODE, '9**9**9', '9**(9**9)', 'x**101', '9**exp(9)', "x**'2'"
  )
  def test_not_algebra(self, text):
    self.assertFalse(expressions.is_algebra(text))


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__]))
