"""The optimal token baseline, on one turn and on several."""

import functools

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np

from rljax.core import groups
from rljax.objectives import credit, spans, token_baselines
from tests import contracts

_ALL = (
  token_baselines.optimal_baseline,
  token_baselines.optimal_token,
  token_baselines.optimal_token_with_tail,
)


def _softmax(x):
  return np.exp(x) / np.exp(x).sum()


class TokenBaselinesTest(parameterized.TestCase):
  def test_the_energy_is_the_norm_of_the_score(self):
    p = _softmax(np.array([0.3, -0.2, 1.5, 0.1]))
    norms = [np.sum((np.eye(4)[token] - p) ** 2) for token in range(4)]
    logp, collision = np.log(p)[None], np.full((1, 4), np.sum(p * p))
    args = (x.astype(np.float32) for x in (logp, collision, np.ones((1, 4))))
    contracts.close(
      contracts.call(token_baselines.score_energy, *args), [norms]
    )

  def test_masked_scores_have_no_energy(self):
    bad, mask = np.full((1, 2), np.nan, np.float32), np.zeros((1, 2))
    out = contracts.call(
      token_baselines.score_energy, bad, bad, mask.astype(np.float32)
    )
    self.assertFalse(out.any())

  def test_equal_energies_give_the_mean(self):
    returns = np.array([[3, 2, 2], [1, 1, 0], [2, 0, 1]], np.float32)
    ones, every = np.ones((3, 3), np.float32), np.ones(3, bool)
    out = contracts.call(_ALL[0], returns, ones, ones, every)
    contracts.close(out, np.tile(returns.mean(0), (3, 1)))

  def test_it_has_the_least_variance(self):
    # One token, two actions: the variance of (R - b) d log p / d logits.
    rng = np.random.default_rng(0)
    p, reward = _softmax(rng.normal(size=3)), rng.normal(size=3)
    score = np.eye(3) - p
    energy = (score**2).sum(1)
    best = np.sum(p * energy * reward) / np.sum(p * energy)

    def spread(b):
      return np.sum(p * (reward - b) ** 2 * energy)

    # Many rows, as often as their chance: the group's baseline is the best.
    rows = np.repeat(np.arange(3), np.round(p * 1000).astype(int))
    args = [x[rows, None].astype(np.float32) for x in (reward, energy)]
    ones = np.ones((len(rows), 1), np.float32)
    out = contracts.call(_ALL[0], *args, ones, np.ones(len(rows), bool))
    self.assertAlmostEqual(float(out[0, 0]), best, delta=2e-3)
    for other in (best - 0.1, best + 0.1, np.sum(p * reward)):
      self.assertGreater(spread(other), spread(best))

  def test_a_group_of_one(self):
    returns, ones = (
      np.full((1, 2), 3.0, np.float32),
      np.ones((1, 2), np.float32),
    )
    args = returns, ones, ones, np.ones(1, bool)
    self.assertFalse(contracts.call(_ALL[1], *args).any())
    contracts.close(contracts.call(_ALL[2], *args), returns)

  @parameterized.parameters(*_ALL)
  def test_turns_are_aligned_by_sampled_tokens(self, fn):
    rng, mask = np.random.default_rng(1), contracts.ragged_mask()[[0, 4, 3]]
    returns, energy = rng.uniform(size=(2, 3, 8)).astype(np.float32)
    every = np.ones(3, bool)
    out = contracts.call(
      token_baselines.by_turn(fn), returns, energy, mask, every
    )
    front = [np.asarray(spans.pack(x, mask)) for x in (returns, energy, mask)]
    short = contracts.call(fn, *front, every)
    for row, keep, expected in zip(out, mask > 0, short, strict=True):
      contracts.close(row[keep], expected[: keep.sum()])
      self.assertFalse(row[~keep].any())
    solid = np.ones_like(mask)
    contracts.close(
      contracts.call(
        token_baselines.by_turn(fn), returns, energy, solid, every
      ),
      contracts.call(fn, returns, energy, solid, every),
    )

  def test_one_group_after_the_other_is_all_at_once(self):
    rng, mask = np.random.default_rng(2), contracts.ragged_mask()
    returns, energy = rng.uniform(size=(2, 5, 8)).astype(np.float32)
    ids = np.array([1, 0, 1, 2, 1], np.int32)
    valid = jnp.array([1, 1, 1, 1, 0], bool)

    def lift(apply):
      def rows(*data):
        layout = groups.from_ids(ids, 4, 3)
        return apply(_ALL[1], layout, *data, valid=valid)

      return contracts.call(rows, returns, energy, mask)

    np.testing.assert_array_equal(
      lift(token_baselines.apply), lift(groups.apply)
    )

  def test_it_holds_no_copies_of_a_large_batch(self):
    size = 512 * 4096 * 4
    tokens = jax.ShapeDtypeStruct((512, 4096), np.float32)
    layout = groups.uniform(64, 8)
    fn = token_baselines.by_turn(_ALL[2])
    programs = {
      'apply': (functools.partial(token_baselines.apply, fn, layout), 3),
      'reinforce_plus_plus': (credit.reinforce_plus_plus, 2),
      'gae': (functools.partial(credit.gae, discount=0.9, decay=0.9), 3),
    }
    for name, (program, inputs) in programs.items():
      compiled = jax.jit(program).lower(*[tokens] * inputs).compile()
      memory = compiled.memory_analysis()
      self.assertLessEqual(memory.temp_size_in_bytes, 4 * size, name)


if __name__ == '__main__':
  absltest.main()
