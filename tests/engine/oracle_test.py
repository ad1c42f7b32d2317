"""The sampled policy gradient against the exact one, by enumeration."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rljax.core.types import Batch, Prompts
from rljax.engine import grpo, sampling, step
from rljax.engine.method import Method
from rljax.models import decoder
from rljax.objectives import advantages, weights

VOCAB, TOKENS, STOP, GROUP = 5, 2, 1, 4
PROMPTS, BATCHES = 400, 50  # 20,000 groups
MODEL = decoder.Model(
  decoder.Config(
    vocab_size=VOCAB,
    width=8,
    layers=1,
    heads=2,
    kv_heads=1,
    head_dim=4,
    mlp_width=16,
    qk_norm=True,
  )
)
PROMPT = (2, 4, 3)


def prompts(count):
  return Prompts(
    tokens=jnp.broadcast_to(jnp.array(PROMPT, jnp.int32), (count, 3)),
    length=jnp.full(count, 3, jnp.int32),
    uid=jnp.arange(count, dtype=jnp.int32),
  )


def reward(response, length):
  """Returns a reward that depends on both tokens and on stopping, f32 [B]."""
  first, second = response[:, 0], jnp.where(length > 1, response[:, 1], 0)
  both = (first == 2) & (second == 3)
  return (
    1.0 * both
    + 0.5 * (first == 4)
    - 0.7 * (length == 1)
    + 0.3 * (second == STOP)
  )


@functools.cache
def parameters():
  # Far from uniform, so that no direction is trivial.
  return jax.tree.map(lambda x: 3.0 * x, MODEL.init(jax.random.key(5)))


@functools.cache
def exact():
  """Returns the gradient of the expected reward, over all responses."""
  free = [t for t in range(VOCAB) if t != STOP]
  rows = [(STOP, 0)] + list(itertools.product(free, range(VOCAB)))
  response = jnp.array(rows, jnp.int32)
  length = jnp.where(response[:, 0] == STOP, 1, 2)
  inside = jnp.arange(TOKENS)[None] < length[:, None]

  def expected(params):
    hidden = MODEL.hidden(params, prompts(1), response)
    logits = hidden @ params['embed'].T
    logp = jnp.take_along_axis(
      jax.nn.log_softmax(logits), response[..., None], axis=-1
    )[..., 0]
    p = jnp.exp(jnp.sum(jnp.where(inside, logp, 0.0), axis=1))
    return jnp.sum(p * reward(response, length)), p.sum()

  (_, total), grads = jax.value_and_grad(expected, has_aux=True)(parameters())
  np.testing.assert_allclose(total, 1.0, atol=1e-5)
  return grads


@functools.cache
def sampled(advantage):
  """Returns the negative gradient of each of the batches, by leaf."""
  method = Method(
    phase=sampling.Phase(max_tokens=TOKENS, group_size=GROUP, stop_ids=(STOP,)),
    credit=grpo.credit(
      advantage,
      functools.partial(weights.constant, denominator=PROMPTS * GROUP),
    ),
  )
  # The optimizer keeps the gradient and leaves the parameters alone.
  optimizer = optax.chain(optax.trace(0.0), optax.scale(0.0))
  made = step.make_step(
    method,
    {'policy': MODEL},
    optimizer,
    lambda r: {'task': reward(r.response, r.length)},
    prompts=PROMPTS,
  )
  state = step.init_state(MODEL, optimizer, seed=0, params=parameters())
  batch = Batch(prompts=prompts(PROMPTS), data={})
  found = []
  for _ in range(BATCHES):
    state, _, _ = made.fused(state, batch)
    found.append(jax.device_get(state.opt_state[0].trace))
  return jax.tree.map(lambda *x: -np.stack(x), *found)


def deviations(advantage, factor):
  """Returns |mean - factor * exact| in standard errors, [leaves, 8]."""
  random = np.random.default_rng(0)
  out = []
  for got, wanted in zip(
    jax.tree.leaves(sampled(advantage)), jax.tree.leaves(exact()), strict=True
  ):
    ways = random.normal(size=(8, wanted.size))
    along = got.reshape(BATCHES, -1) @ ways.T
    error = along.std(axis=0, ddof=1) / np.sqrt(BATCHES)
    goal = factor * ways @ np.asarray(wanted).reshape(-1)
    out.append(np.abs(along.mean(axis=0) - goal) / error)
  return np.stack(out)


@pytest.mark.parametrize(
  'advantage, factor',
  [
    (advantages.leave_one_out, 1.0),
    (advantages.center, 1.0 - 1.0 / GROUP),
    (advantages.reinforce, 1.0),
  ],
)
def test_sampled_gradient_is_the_exact_one(advantage, factor):
  assert deviations(advantage, factor).max() <= 4.0


@pytest.mark.parametrize(
  'advantage, factor',
  [(advantages.leave_one_out, -1.0), (advantages.center, 1.0)],
)
def test_wrong_sign_or_scale_is_seen(advantage, factor):
  assert deviations(advantage, factor).max() > 4.0
