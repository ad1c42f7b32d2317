"""Tests of scoring: statistics against float64, and signals read lazily."""

import dataclasses

from absl.testing import absltest
import jax
import jax.numpy as jnp
import numpy as np

from rljax.core import types
from rljax.engine import scoring, supervised
from rljax.models import decoder
from tests.engine import small
from tests.models import dense

CONFIG = dataclasses.replace(small.SHALLOW, valid_vocab=27)
MODEL = decoder.Model(CONFIG)


def rollout():
  """Returns 12 rows at three temperatures."""
  r = np.random.default_rng(0)
  response = jnp.asarray(r.integers(0, 27, (12, 6), np.int32))
  length = jnp.asarray(r.integers(1, 7, 12, np.int32))
  found = supervised.given(small.batch(12), response, length)
  temperature = jnp.tile(jnp.array([0.6, 1.0, 1.3]), 4)
  return dataclasses.replace(found, temperature=temperature)


@jax.jit
def read(params, rollout):
  """Returns the scores of a rollout."""
  hidden, weight = scoring.read(MODEL, params, rollout)
  return scoring.scores(MODEL, hidden, weight, rollout, None)


class ScoresTest(absltest.TestCase):
  def test_against_float64(self):
    params, rows = small.params(config=CONFIG), rollout()
    found = read(params, rows)
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


class MemoryTest(absltest.TestCase):
  def temporaries(self, size, vocab, width=32):
    """Returns the bytes of log-probs, entropies and both their gradients."""
    config = dataclasses.replace(
      small.SHALLOW, width=width, vocab_size=vocab, valid_vocab=None
    )
    shape = 4, size
    rows = supervised.given(
      small.batch(4), jnp.zeros(shape, jnp.int32), jnp.full(4, size)
    )

    def total(hidden, weight):
      read = scoring.scores(decoder.Model(config), hidden, weight, rows, None)
      return jnp.sum(read.logp + read.entropy)

    shapes = (*shape, width), (vocab, width)
    args = [jax.ShapeDtypeStruct(x, jnp.float32) for x in shapes]
    program = jax.jit(jax.grad(total, (0, 1))).lower(*args).compile()
    self.assertNotIn(f'f32[4,{size},{vocab}]', program.as_text())
    self.assertNotIn(f'f32[{4 * size},{vocab}]', program.as_text())
    return program.memory_analysis().temp_size_in_bytes

  def test_grows_with_the_block_and_not_with_all_logits(self):
    vocab = 32_771
    one, four = (self.temporaries(size, vocab) for size in (512, 2048))
    logits = 4 * 4 * (2048 - 512) * vocab
    self.assertLess(four - one, 0.02 * logits)
    self.assertGreater(one, 4 * vocab)


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
    def total(x, lazy):
      head = types.Head(weight=x, temperature=x)
      read = types.Scores(logp=x * x, entropy=x, hidden=x, head=head)
      signals = {'policy': read}
      if lazy:
        signals = scoring.Lazy({'policy': lambda: read})
      return jnp.sum(signals['policy'].logp)

    slope = jax.grad(total)
    np.testing.assert_array_equal(slope(jnp.ones(3), lazy=True), 0)
    np.testing.assert_array_equal(slope(jnp.ones(3), lazy=False), 2)
