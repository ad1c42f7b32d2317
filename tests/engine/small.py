"""A small model, its batches and its compiled samplers, shared by tests."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from rljax.core import types
from rljax.engine import sampling
from rljax.models import decoder
from tests.models import dense

CONFIG = decoder.Config(
  vocab_size=32, width=32, layers=2, heads=4, kv_heads=2, head_dim=8,
  mlp_width=48, qk_norm=True,
)  # fmt: skip
MODEL = decoder.Model(CONFIG)
KEY = 5
# Pad is a stop id too: masks can come from lengths alone.
STOPS = (0, 9)
PHASE = sampling.Phase(max_tokens=32, group_size=8, stop_ids=STOPS)


# One layer of the same: programs that decode compile in half the time.
SHALLOW = dataclasses.replace(CONFIG, layers=1)


@functools.cache
def params(sharpness: float = 1.0, config: decoder.Config = CONFIG):
  """Returns parameters whose logits deviate by about `sharpness`."""
  made = dense.params(config)
  norm = {'scale': sharpness * made['norm']['scale']}
  return {**made, 'embed': 0.2 * made['embed'], 'norm': norm}


def batch(prompts=16, width=6, seed=0, uid=None, **data) -> types.Batch:
  """Returns prompts of 1 to `width` tokens, padded with noise."""
  r = np.random.default_rng(seed)
  shape = prompts, width
  tokens = r.integers(0, CONFIG.vocab_size, shape, np.int32)
  length = r.integers(1, width + 1, prompts, np.int32)
  length[:2] = 1, width
  uid = 100 + np.arange(prompts) if uid is None else np.asarray(uid)
  return types.Batch(
    prompts=types.Prompts(
      tokens=jnp.asarray(tokens),
      length=jnp.asarray(length),
      uid=jnp.asarray(uid, jnp.int32),
    ),
    data={name: jnp.asarray(x) for name, x in data.items()},
  )


def widen(made: types.Batch, by: int) -> types.Batch:
  """Returns the same prompts behind more padding, of another token."""
  tokens = jnp.pad(made.prompts.tokens, ((0, 0), (by, 0)), constant_values=3)
  prompts = dataclasses.replace(made.prompts, tokens=tokens)
  return dataclasses.replace(made, prompts=prompts)


@functools.cache
def sampler(phase=PHASE, config=CONFIG):
  """Returns (params, batch, step, temperature, limit, forced) -> Rollout."""

  def run(params, batch, step, temperature, limit, forced, key):
    return sampling.sample(
      decoder.Model(config), params, batch, phase, key=jax.random.key(key),
      step=step, version=step + 7, temperature=temperature, limit=limit,
      forced=forced,
    )  # fmt: skip

  return jax.jit(run)


def sample(
  params, batch, phase=PHASE, *, step=0, temperature=1.0, limit=None,
  forced=None, key=KEY, config=CONFIG,
):  # fmt: skip
  """Samples; what differs only in values shares one compiled program."""
  rows = batch.prompts.uid.shape[0] * phase.group_size
  limit = phase.max_tokens if limit is None else limit
  if forced is None:
    forced = np.full((rows, 4), -1, np.int32)
  return sampler(phase, config)(
    params, batch, jnp.int32(step),
    jnp.broadcast_to(jnp.float32(temperature), (rows,)),
    jnp.broadcast_to(jnp.int32(limit), (rows,)), jnp.int32(forced), key,
  )  # fmt: skip


def uniforms(batch, phase=PHASE, step=0, key=KEY) -> np.ndarray:
  """Returns the uniform of each row and position, f32 [B, T]."""
  sizes = phase.group_size, phase.max_tokens
  uid = batch.prompts.uid
  return np.asarray(_uniforms(key, step, phase.number, uid, *sizes))


@functools.partial(jax.jit, static_argnums=(4, 5))
def _uniforms(key, step, phase, uid, group, size):
  keys = sampling.row_keys(jax.random.key(key), step, phase, uid, group)
  fold = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)), (0, None))
  return jax.vmap(jax.vmap(jax.random.uniform))(fold(keys, jnp.arange(size)))


def gaps(params, one, other, uniform, config=CONFIG) -> dict[int, float]:
  """Returns, for each row that differs, how close its uniform was to an edge.

  Where two rollouts of equal prompts first differ, the distance of the uniform
  from the nearest boundary of the CDF, which float64 computes.

  Args:
    params: of the policy that sampled both.
    one: a rollout without truncation.
    other: a rollout of the same prompts.
    uniform: f32 [B, T].
    config: of the policy.
  """
  found = {}
  responses = [np.asarray(x.response) for x in (one, other)]
  differ = responses[0] != responses[1]
  weight = np.float64(params['embed'])
  for row in np.flatnonzero(differ.any(axis=1)):
    at = int(differ[row].argmax())
    prompt = int(one.prompt_of[row])
    length = int(one.prompts.length[prompt])
    line = one.prompts.tokens[prompt][one.prompts.tokens.shape[1] - length :]
    line = np.concatenate([line, responses[0][row, :at]])
    z = dense.hidden(config, params, line)[-1] @ weight.T
    p = np.exp((z - z.max()) / float(one.temperature[row]))
    edges = np.cumsum(p / p.sum())
    found[int(row)] = float(np.abs(edges - uniform[row, at]).min())
  return found


def assert_same_tokens(params, one, other, uniform) -> None:
  """Fails unless rows are equal, or left each other at an edge of the CDF."""
  found = gaps(params, one, other, uniform)
  rows = len(one.response)
  assert len(found) <= max(1, rows / 500), found
  assert all(gap <= 1e-4 for gap in found.values()), found
