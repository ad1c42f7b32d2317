"""Schedules at hand-worked points, and the flags that name them."""

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp

from rljax.core import schedules
from tests import contracts

# (text, total, values at the counts -1, 0, 25, 50, 75, 100, 130)
CASES = (
  ('0.25', 100, [0.25] * 7),
  ('constant(3)', 100, [3.0] * 7),
  ('linear(1, 0.2)', 100, [1, 1, 0.8, 0.6, 0.4, 0.2, 0.2]),
  ('linear(0,2)', 50, [0, 0, 1, 2, 2, 2, 2]),
  ('cosine(1, 0)', 100, [1, 1, 0.853553, 0.5, 0.146447, 0, 0]),
  ('piecewise(1, 0.5, -2)', 100, [1, 1, 1, -2, -2, -2, -2]),
  ('piecewise(1, 0.25, 2, 0.75, 3)', 100, [1, 1, 2, 2, 3, 3, 3]),
  ('handoff(0.25, 0.75)', 100, [1, 1, 1, 0.5, 0, 0, 0]),
  ('handoff(0.5)', 100, [1, 1, 1, 0, 0, 0, 0]),
  ('warmup(2, 0.5)', 100, [0, 0, 1, 2, 2, 2, 2]),
  ('warmup(2, 0)', 100, [2] * 7),
  ('warmup_linear(3, 0.25)', 100, [0, 0, 3, 2, 1, 0, 0]),
  ('warmup_linear(3, 0.25, 1.5)', 100, [0, 0, 3, 2.5, 2, 1.5, 1.5]),
  ('warmup_cosine(1, 0.5)', 100, [0, 0, 0.5, 1, 0.5, 0, 0]),
  ('warmup_cosine(1, 0, 0.2)', 100, [1, 1, 0.882843, 0.6, 0.317157, 0.2, 0.2]),
  ('wsd(4, 0.25, 0.5)', 100, [0, 0, 4, 4, 2, 0, 0]),
  ('wsd(4, 0, 0.75, 1)', 100, [4, 4, 4, 4, 4, 1, 1]),
  ('wsd(4, 0.5, 1)', 100, [0, 0, 2, 4, 4, 4, 4]),
  ('restarts(1, 0, 1)', 100, [1, 1, 0.853553, 0.5, 0.146447, 0, 0]),
  ('restarts(1, 0, 2)', 100, [1, 1, 0.5, 1, 0.5, 0, 0]),
  # Cycles of a third and two thirds.
  ('restarts(3, 1, 2, 2)', 150, [3, 3, 2, 3, 2.707107, 2, 1.190983]),
  (' linear( 1e-1 , -1 ) ', 100, [0.1, 0.1, -0.175, -0.45, -0.725, -1, -1]),
)
COUNTS = (-1, 0, 25, 50, 75, 100, 130)


class SchedulesTest(parameterized.TestCase):
  @parameterized.parameters(*CASES)
  def test_values(self, text, total, expected):
    schedule = schedules.parse(text, total)
    with contracts.strict():
      compiled = jax.jit(schedule)
      values = [compiled(jnp.int32(count)) for count in COUNTS]
      plain = [schedule(count) for count in COUNTS]
    contracts.close(jnp.stack(values), expected)
    contracts.close(jnp.stack(plain), expected)
    self.assertEqual(
      {(v.shape, v.dtype.name) for v in values + plain}, {((), 'float32')}
    )

  def test_every_builder_is_tested(self):
    builders = set(contracts.public(schedules)) - {'parse', 'as_schedule'}
    named = {text.strip().partition('(')[0] for text, _, _ in CASES}
    self.assertContainsSubset(builders, named)

  def test_as_schedule(self):
    self.assertEqual(schedules.as_schedule(0.5)(7), 0.5)
    self.assertEqual(schedules.as_schedule(2)(7).dtype, jnp.float32)
    line = schedules.linear(0.0, 1.0, total=10)
    self.assertIs(schedules.as_schedule(line), line)

  @parameterized.parameters(
    ('liner(1,0)', "no schedule 'liner'; did you mean 'linear'?"),
    ('zigzag(1)', "no schedule 'zigzag'; known: "),
    ('linear(1)', 'linear does not take 1 numbers'),
    ('linear(1,2,3)', 'linear does not take 3 numbers'),
    ('linear(1,x)', "'x' is no finite number"),
    ('linear(1,)', "'' is no finite number"),
    ('linear(1,nan)', "'nan' is no finite number"),
    ('inf', "'inf' is no finite number"),
    ('', 'is no schedule'),
    ('linear(1,0', 'is no schedule'),
    ('piecewise(1,0.5)', 'value, fraction, value'),
    ('piecewise(1,0.7,2,0.5,3)', 'increasing fractions'),
    ('piecewise(1,50,2)', r'fractions of the run in \[0, 1\]'),
    ('handoff(0.5,0.2)', 'before it begins'),
    ('wsd(1,0.5,0.2)', 'the decay begins at 0.2, before 0.5'),
    ('warmup(1,5)', r'a warm-up takes fractions of the run in \[0, 1\]'),
    ('restarts(1,0,1.5)', 'a whole number of cycles'),
    ('restarts(1,0,0)', 'a whole number of cycles'),
    ('restarts(1,0,2,0)', 'a positive growth, got 2.0 and 0.0'),
    ('handoff(2)', r'fractions of the run in \[0, 1\]'),
  )
  def test_a_bad_flag_is_quoted_and_explained(self, text, message):
    with self.assertRaisesRegex(ValueError, message) as caught:
      schedules.parse(text, 100)
    self.assertIn(repr(text), str(caught.exception))

  def test_a_run_without_steps_has_no_schedule(self):
    with self.assertRaisesRegex(ValueError, 'at least 1, got 0'):
      schedules.parse('linear(1,0)', 0)


if __name__ == '__main__':
  absltest.main()
