"""Tests of scoring: statistics against float64, and signals read lazily."""

import dataclasses
import functools

from absl.testing import absltest
import jax
import jax.numpy as jnp
import numpy as np

from rljax.engine import scoring
from rljax.models import decoder
from tests.engine import small
from tests.models import dense

CONFIG = dataclasses.replace(small.SHALLOW, valid_vocab=27)
MODEL = decoder.Model(CONFIG)


def rollout():
  """Returns 12 rows at three temperatures."""
  phase = dataclasses.replace(small.PHASE, max_tokens=6, group_size=4)
  batch = small.batch(3)
  rows = jnp.tile(jnp.array([0.6, 1.0, 1.3]), 4)
  found = small.sample(
    small.params(config=CONFIG), batch, phase, temperature=rows, config=CONFIG
  )
  return dataclasses.replace(found, temperature=rows)


@functools.partial(jax.jit, static_argnames='entropy')
def total(params, rollout, toward, entropy=False):
  hidden, weight = scoring.read(MODEL, params, rollout)
  read = scoring.scores(MODEL, hidden, weight, rollout, None)
  return jnp.sum(toward * (read.entropy if entropy else read.logp)), read


class ScoresTest(absltest.TestCase):
  def test_against_float64(self):
    params, rows = small.params(config=CONFIG), rollout()
    found = total(params, rows, 1.0)[1]
    states = dense.responses(CONFIG, params, rows.prompts, rows.response)
    z = states @ np.float64(params['embed']).T
    z = z[..., :27] / np.float64(rows.temperature)[:, None, None]
    log_p = z - np.log(np.exp(z).sum(-1, keepdims=True))
    logp = np.take_along_axis(log_p, np.asarray(rows.response)[..., None], -1)
    np.testing.assert_allclose(found.logp, logp[..., 0], atol=1e-5)
    entropy = -(np.exp(log_p) * log_p).sum(-1)
    np.testing.assert_allclose(found.entropy, entropy, atol=1e-5)
    np.testing.assert_allclose(found.hidden, states, atol=1e-5)
    self.assertEqual(found.head.valid, 27)
    np.testing.assert_array_equal(found.head.temperature, rows.temperature)

  def test_rows_without_a_place_in_the_response_are_scored_too(self):
    # Padding is read as tokens and must be finite; the mask removes it.
    rows = rollout()
    self.assertTrue((np.asarray(rows.length) < 6).any())
    self.assertTrue(np.isfinite(total(small.params(), rows, 1.0)[1].logp).all())


class LazyTest(absltest.TestCase):
  def test_reads_once_and_only_what_is_asked(self):
    calls = []

    def maker(name):
      def make():
        calls.append(name)
        return rollout()

      return make

    signals = scoring.Lazy({name: maker(name) for name in ('policy', 'ref')})
    self.assertEqual(set(signals), {'policy', 'ref'})
    self.assertLen(signals, 2)
    self.assertEmpty(calls)
    for _ in range(2):
      self.assertEqual(signals['ref'].logp.shape, (12, 6))
    self.assertEqual(calls, ['ref'])
    with self.assertRaises(KeyError):
      signals['teacher']

  def test_no_gradient_flows_through_signals(self):
    params, rows = small.params(config=CONFIG), rollout()

    @jax.grad
    def gradient(params):
      makers = {'policy': lambda: total(params, rows, 1.0)[1]}
      return jnp.sum(scoring.Lazy(makers)['policy'].logp)

    for leaf in jax.tree.leaves(gradient(params)):
      np.testing.assert_array_equal(leaf, 0)
