"""The sampled policy gradient against the exact one, by enumeration.

A model with four ids and responses of up to three tokens has 40 responses.
The gradient of the expected reward is a sum over them; the step's gradient,
averaged over 20,000 groups, has to agree within its standard error.
"""

import dataclasses
import functools
import itertools
from typing import Any, NamedTuple

from absl.testing import absltest
import jax
import jax.numpy as jnp
import numpy as np

from rljax.core import types
from rljax.engine import grpo, sampling, scoring, supervised
from rljax.engine import method as method_lib
from rljax.engine import step as step_lib
from rljax.models import decoder
from rljax.objectives import advantages, weights
from tests.engine import small, training

CONFIG = decoder.Config(
  vocab_size=4, width=6, layers=1, heads=2, kv_heads=1, head_dim=4, mlp_width=6
)
MODEL = decoder.Model(CONFIG)
LIMIT, STOP = 3, 0
PROMPTS, GROUP, ROUNDS = 1000, 4, 20
DIRECTIONS = 8


def responses():
  """Returns every response [K, T] and its length: all ends are reached."""
  found = []
  for size in range(1, LIMIT + 1):
    for line in itertools.product(range(4), repeat=size):
      ends = line[-1] == STOP or size == LIMIT
      if ends and STOP not in line[:-1]:
        found.append(([*line, 0, 0][:LIMIT], size))
  tokens, length = zip(*found, strict=True)
  return np.array(tokens, np.int32), np.array(length, np.int32)


TOKENS, LENGTH = responses()
# A reward that is no function of length or of the first token alone.
REWARD = np.random.default_rng(2).normal(size=len(TOKENS)).astype(np.float32)


def place(tokens):
  """Returns the place of each response [B, T] among all of them."""
  same = jnp.all(tokens[:, None] == TOKENS[None], axis=-1)
  return jnp.argmax(same, axis=1)


def prompts(count):
  """Returns one prompt of three tokens, `count` times."""
  return types.Prompts(
    tokens=jnp.tile(jnp.array([[2, 1, 3]], jnp.int32), (count, 1)),
    length=jnp.full(count, 3, jnp.int32),
    uid=jnp.arange(count, dtype=jnp.int32),
  )


class Exact(NamedTuple):
  """What enumeration gives."""

  probability: np.ndarray  # [K]
  score: Any  # d log π(y) / dθ of each response, leaves [K, ...]
  gradient: Any  # of the expected reward


@functools.cache
def exact() -> Exact:
  params = small.params(config=CONFIG)
  mask = np.arange(LIMIT)[None] < LENGTH[:, None]

  def logp(params):
    hidden = MODEL.hidden(params, prompts(1), jnp.asarray(TOKENS))
    z = hidden @ params['embed'].T
    each = jax.nn.log_softmax(z) * jax.nn.one_hot(TOKENS, 4)
    return jnp.sum(each.sum(-1) * mask, axis=1)

  score = jax.device_get(jax.jit(jax.jacrev(logp))(params))
  probability = np.exp(np.float64(jax.jit(logp)(params)))
  worth = probability * REWARD
  return Exact(
    probability,
    score,
    jax.tree.map(lambda s: np.tensordot(worth, np.float64(s), 1), score),
  )


class Sampled(NamedTuple):
  """What the step makes of 20,000 groups."""

  gradient: Any  # the mean over all groups, as the optimizer got it
  groups: np.ndarray  # i32 [N, G], places of the responses


@functools.cache
def sampled(centered: bool) -> Sampled:
  step, state = make(), start()
  flag = np.full(PROMPTS, centered, np.float32)
  batch = types.Batch(prompts=prompts(PROMPTS), data={'centered': flag})
  grads, groups = [], []
  for _ in range(ROUNDS):
    state, _, glimpse = step.fused(state, batch)
    grads.append(jax.device_get(state.opt_state.grads))
    groups.append(np.asarray(place(glimpse.response)))
  mean = jax.tree.map(lambda *g: -np.mean(np.float64(g), axis=0), *grads)
  return Sampled(mean, np.concatenate(groups).reshape(-1, GROUP))


@functools.cache
def make():
  """Returns a step whose batch says which of two baselines it wants."""
  aggregate = functools.partial(
    weights.constant, denominator=float(PROMPTS * GROUP)
  )
  alone = grpo.credit(advantages.leave_one_out, aggregate)
  center = grpo.credit(advantages.center, aggregate)

  def assign(*args):
    found, other = alone(*args), center(*args)
    which = args[0].data['centered'][0] > 0
    advantage = jnp.where(which, other.advantage, found.advantage)
    return dataclasses.replace(found, advantage=advantage)

  phase = sampling.Phase(LIMIT, group_size=GROUP, stop_ids=(STOP,))
  return step_lib.make_step(
    method_lib.Method(phase=phase, credit=assign), {'policy': MODEL},
    training.keeping(),
    lambda rollout: {'task': jnp.asarray(REWARD)[place(rollout.response)]},
    prompts=PROMPTS,
  )  # fmt: skip


def start():
  """Returns a state that never moves: its learning rate is 0."""
  made = step_lib.init_state(
    MODEL, training.keeping(), seed=1, params=small.params(config=CONFIG)
  )
  still = made.opt_state._replace(rate=jnp.float32(0.0))
  return dataclasses.replace(made, opt_state=still)


def deviations(found: Sampled, factor: float, centered: bool) -> np.ndarray:
  """Returns how many standard errors the mean is from `factor` times exact.

  For each leaf and each of 8 random directions, [leaves, 8].
  """
  reward = REWARD[found.groups]
  adv = reward - reward.mean(axis=1, keepdims=True)
  adv = adv if centered else adv * GROUP / (GROUP - 1)
  r = np.random.default_rng(0)
  out = []
  leaves = map(jax.tree.leaves, (exact().score, exact().gradient, found[0]))
  for score, gradient, mean in zip(*leaves, strict=True):
    toward = r.normal(size=(DIRECTIONS, gradient.size))
    along = score.reshape(len(score), -1) @ toward.T
    groups = (adv[..., None] * along[found.groups]).mean(axis=1)
    error = groups.std(axis=0) / np.sqrt(len(groups))
    gap = toward @ (mean - factor * gradient).reshape(-1)
    out.append(gap / error)
  return np.array(out)


class OracleTest(absltest.TestCase):
  def test_enumeration_is_complete(self):
    self.assertLen(TOKENS, 40)
    self.assertAlmostEqual(exact().probability.sum(), 1.0, places=5)
    self.assertLess(exact().probability.max(), 0.6)
    for leaf in jax.tree.leaves(exact().gradient):
      self.assertGreater(np.abs(leaf).max(), 1e-4)

  def test_scorer_agrees_with_enumeration(self):
    given = types.Batch(prompts=prompts(len(TOKENS)), data={})
    rollout = supervised.given(given, jnp.asarray(TOKENS), jnp.asarray(LENGTH))

    @jax.jit
    def read(params):
      hidden, weight = scoring.read(MODEL, params, rollout)
      return scoring.scores(MODEL, hidden, weight, rollout, None)

    read = read(small.params(config=CONFIG))
    mask = np.arange(LIMIT)[None] < LENGTH[:, None]
    found = np.exp((np.asarray(read.logp) * mask).sum(axis=1))
    np.testing.assert_allclose(found, exact().probability, rtol=1e-5)

  def test_frequencies(self):
    groups = sampled(False).groups
    self.assertEqual(groups.shape, (20_000, GROUP))
    count = np.bincount(groups.reshape(-1), minlength=40)
    expected = groups.size * exact().probability
    chi = ((count - expected) ** 2 / expected).sum()
    self.assertLess(chi, 39 + 4 * np.sqrt(2 * 39))

  def test_leave_one_out_is_unbiased(self):
    found = deviations(sampled(False), 1.0, centered=False)
    self.assertEqual(found.shape[1], 8)
    self.assertLess(np.abs(found).max(), 4.0)
    # Standard errors are what they say: deviations are of size 1.
    self.assertBetween(np.sqrt(np.mean(found**2)), 0.5, 1.6)

  def test_the_step_averages_the_groups(self):
    # Its mean is that of the same groups by the table of scores.
    found = sampled(False)
    reward = REWARD[found.groups]
    adv = (reward - reward.mean(1, keepdims=True)) * GROUP / (GROUP - 1)
    worth = np.bincount(
      found.groups.reshape(-1), adv.reshape(-1) / adv.size, minlength=40
    )
    wanted = jax.tree.map(lambda s: np.tensordot(worth, s, 1), exact().score)
    training.assert_close_leaves(found.gradient, wanted, 1e-4)

  def test_a_baseline_with_the_own_reward_shrinks(self):
    found = sampled(True)
    shrunk = deviations(found, 1 - 1 / GROUP, centered=True)
    self.assertLess(np.abs(shrunk).max(), 4.0)
    self.assertGreater(np.abs(deviations(found, 1.0, True)).max(), 8.0)

  def test_a_wrong_sign_is_seen_in_every_leaf(self):
    right = sampled(False)
    flipped = jax.tree.map(lambda g: -g, right.gradient)
    wrong = deviations(right._replace(gradient=flipped), 1.0, False)
    self.assertGreater(np.abs(wrong).max(axis=1).min(), 4.0)
    # One flipped leaf alone is found too.
    one = {**right.gradient, 'embed': -right.gradient['embed']}
    wrong = deviations(right._replace(gradient=one), 1.0, False)
    self.assertGreater(np.abs(wrong).max(), 8.0)
