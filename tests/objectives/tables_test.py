"""Tables of other libraries' numbers: shaping, votes, learning rates."""

import json
import pathlib

from absl.testing import absltest, parameterized
import numpy as np

from rljax.core import schedules
from rljax.objectives import advantages, shaping, statistics

PATH = pathlib.Path(__file__).parents[1] / 'data' / 'peers_torch.npz'
FILE = np.load(PATH)
TABLES = json.loads(str(FILE['index']))['tables']


class ShapingTest(absltest.TestCase):
  def test_adaptive_coefficient(self):
    table = TABLES['verl/adaptive_kl']
    value = np.float32(table['init'])
    for row in table['steps']:
      value = shaping.adapt_coefficient(
        value,
        row['current_kl'],
        row['n_steps'],
        target=table['target'],
        horizon=table['horizon'],
      )
      np.testing.assert_allclose(value, row['value'], rtol=1e-6)

  def test_overlong_of_verl(self):
    for row in TABLES['verl/dapo_overlong']:
      penalty = shaping.overlong_unbounded(
        np.array([row['length']]),
        limit=row['max_resp_len'],
        buffer=row['buffer'],
        factor=row['factor'],
      )
      np.testing.assert_allclose(penalty, [row['penalty']], rtol=1e-6)

  def test_overlong_of_trl(self):
    for row in TABLES['trl/soft_overlong']:
      penalty = shaping.overlong(
        np.array([row['length']]), limit=row['max_len'], buffer=row['cache']
      )
      np.testing.assert_allclose(penalty, [row['reward']], rtol=1e-6)


class StepTest(absltest.TestCase):
  def test_advantages_of_the_whole_step(self):
    # The step's file has no rewards; its groups got 1, 0, 0, 1 and all equal.
    reward, every = np.array([1, 0, 0, 1], np.float32), np.ones(4, bool)
    first = advantages.zscore(reward, every, ddof=1, eps=1e-4)
    wanted = FILE['out/trl/e2e/dapo/advantages']
    np.testing.assert_allclose(first, wanted[:4], rtol=1e-6)
    np.testing.assert_array_equal(wanted[4:], np.zeros(8))


class VotesTest(absltest.TestCase):
  def test_majority(self):
    for row in TABLES['verl/calc_maj_val']:
      found = statistics.majority(row['pred'], np.array(row['val']))
      self.assertEqual(found, row['out'])

  def test_validation(self):
    table = TABLES['verl/validation']
    answer, prompt = np.array(table['pred']), np.array(table['uid'])
    value = np.array(table['acc'])
    rows = [np.flatnonzero(prompt == uid) for uid in np.unique(prompt)]
    for n in (2, 4, 8):
      found = {
        f'best@{n}': [statistics.verl_best_at_n(value[i], n) for i in rows],
        f'worst@{n}': [statistics.verl_best_at_n(-value[i], n) for i in rows],
        f'maj@{n}': [
          statistics.verl_maj_at_n(answer[i].tolist(), value[i], n)
          for i in rows
        ],
      }
      for name, pairs in found.items():
        mean, deviation = np.mean(pairs, axis=0)
        mean = -mean if name.startswith('worst') else mean
        metrics = table['metrics']
        self.assertAlmostEqual(mean, metrics[f'{name}/mean'], delta=1e-12)
        self.assertAlmostEqual(deviation, metrics[f'{name}/std'], delta=1e-12)

  def test_what_verl_calls_best_is_not_the_best(self):
    # Both prompts have a right answer among 8: any-of-8 is 1, not 0.8275.
    value = np.array(TABLES['verl/validation']['acc']).reshape(2, 8)
    best = [statistics.best_of_k(row, row, 8) for row in value]
    self.assertEqual(best, [1.0, 1.0])
    self.assertAlmostEqual(
      TABLES['verl/validation']['metrics']['best@8/mean'], 0.8275
    )


WARMUP, TOTAL = 4, 20


class LearningRateTest(parameterized.TestCase):
  """Warm-up from 0 over 4 updates, then a schedule over the other 16."""

  @parameterized.parameters(
    ('hf/linear', schedules.linear(1.0, 0.0, total=TOTAL - WARMUP)),
    ('hf/cosine', schedules.cosine(1.0, 0.0, total=TOTAL - WARMUP)),
    ('hf/constant_with_warmup', schedules.constant(1.0)),
    ('hf/cosine_with_min_lr', schedules.cosine(1.0, 0.1, total=TOTAL - WARMUP)),
    ('hf/polynomial', schedules.linear(1.0, 1e-7, total=TOTAL - WARMUP)),
    ('verl/cosine', schedules.cosine(1.0, 0.1, total=TOTAL - WARMUP)),
    ('verl/constant', schedules.constant(1.0)),
  )
  def test_after_a_warmup(self, name, schedule):
    rise = schedules.linear(0.0, 1.0, total=WARMUP)
    wanted = TABLES['lr_schedules']['values'][name]
    found = [
      rise(i) if i < WARMUP else schedule(i - WARMUP)
      for i in range(len(wanted))
    ]
    # Angles up to π in float32 round by 1e-7 of a rate of 1.
    np.testing.assert_allclose(found, wanted, atol=3e-7, rtol=0)

  def test_constant(self):
    wanted = TABLES['lr_schedules']['values']['hf/constant']
    schedule = schedules.constant(1.0)
    np.testing.assert_array_equal(
      [schedule(i) for i in range(len(wanted))], wanted
    )


if __name__ == '__main__':
  absltest.main()
