"""One step from one state: fused, two programs, micro-batches, meshes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rljax.core.types import Batch, Prompts
from rljax.engine import grpo, sampling, sharding, step
from rljax.engine.method import Method
from rljax.engine.seams import View
from rljax.models import decoder

PROMPTS, GROUP, SIZE, TOKENS, VOCAB = 8, 4, 7, 8, 48
MESHES = ('data:8', 'data:4,fsdp:2', 'data:2,fsdp:2,tensor:2')
MODEL = decoder.Model(
  decoder.Config(
    vocab_size=VOCAB,
    width=16,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
    mlp_width=32,
    qk_norm=True,
  )
)
METHOD = Method(
  phase=sampling.Phase(max_tokens=TOKENS, group_size=GROUP, stop_ids=(1, 2)),
  credit=grpo.credit(ref=True),
  loss=grpo.loss(beta=0.1),
  views={'ref': View('ref')},
)


def judge(rollout):
  """Returns the share of even ids."""
  even = (rollout.response % 2 == 0) * rollout.mask
  return {'task': even.sum(axis=1) / jnp.maximum(rollout.length, 1)}


def batch():
  """Returns prompts of 2 to 7 ids; two are the same problem."""
  random = np.random.default_rng(0)
  prompts = Prompts(
    tokens=random.integers(3, VOCAB, (PROMPTS, SIZE)).astype(np.int32),
    length=random.integers(2, SIZE + 1, PROMPTS).astype(np.int32),
    uid=np.array([5, 9, 5, 3, 2, 1, 0, 7], np.int32),
  )
  return Batch(prompts=prompts, data={})


@functools.cache
def taken(mesh_text: str = '', form: str = 'fused', microbatches: int = 1):
  """Returns (glimpse, metrics, gradients by leaf) of one step."""
  mesh = sharding.make_mesh(mesh_text) if mesh_text else None
  # Its state is the gradient itself: differences of parameters would round.
  optimizer = optax.trace(0.0)
  made = step.make_step(
    METHOD,
    {'policy': MODEL},
    optimizer,
    judge,
    prompts=PROMPTS,
    mesh=mesh,
    microbatches=microbatches,
  )
  params = jax.tree.map(lambda x: 2.0 * x, MODEL.init(jax.random.key(3)))
  ref = MODEL.init(jax.random.key(4))
  state = step.init_state(
    MODEL, optimizer, seed=1, params=params, frozen={'ref': ref}, mesh=mesh
  )
  placed = sharding.place_rows(batch(), mesh)
  if form == 'fused':
    state, metrics, glimpse = made.fused(state, placed)
  else:
    rollout = made.sampled(state, placed)
    state, metrics = made.learned(state, rollout, judge(rollout))
    glimpse = rollout
  return jax.device_get((glimpse, metrics, state.opt_state.trace))


def assert_close(grads, wanted, limit):
  """Checks every leaf relative to its norm."""
  for (path, a), b in zip(
    jax.tree.leaves_with_path(grads), jax.tree.leaves(wanted), strict=True
  ):
    gap = np.linalg.norm(a - b) / np.linalg.norm(b)
    assert gap <= limit, f'{jax.tree_util.keystr(path)}: {gap}'


def assert_same_step(found, wanted):
  rollout, metrics, grads = found
  wanted_rollout, wanted_metrics, wanted_grads = wanted
  np.testing.assert_array_equal(rollout.response, wanted_rollout.response)
  np.testing.assert_array_equal(rollout.length, wanted_rollout.length)
  for name, metric in wanted_metrics.items():
    for a, b in zip(
      jax.tree.leaves(metrics[name]), jax.tree.leaves(metric), strict=True
    ):
      np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5, err_msg=name)
  assert_close(grads, wanted_grads, 1e-5)


def test_step_is_not_trivial():
  rollout, metrics, grads = taken()
  assert len({tuple(r) for r in rollout.response}) == PROMPTS * GROUP
  assert set(rollout.length) != {TOKENS}
  assert metrics['kl/ref'].total > 0.1
  assert all(np.linalg.norm(g) > 1e-4 for g in jax.tree.leaves(grads))


def test_two_programs():
  assert_same_step(taken(form='two'), taken())


def test_micro_batches_add_up():
  assert_same_step(taken(microbatches=4), taken())


@pytest.mark.parametrize(
  'mesh',
  [pytest.param(m, marks=pytest.mark.slow) for m in MESHES[:2]] + [MESHES[2]],
)
def test_meshes(mesh):
  assert_same_step(taken(mesh), taken())


@pytest.mark.slow
def test_micro_batches_on_a_mesh():
  assert_same_step(taken(MESHES[2], microbatches=2), taken())


@pytest.mark.parametrize('mesh', ['', MESHES[2]])
def test_uniforms_are_bit_equal(mesh):
  mesh = sharding.make_mesh(mesh) if mesh else None
  uid = sharding.place_rows(batch().prompts.uid, mesh)

  @jax.jit
  def draw(uid):
    keys = sampling.row_keys(jax.random.key(1), jnp.int32(3), 0, uid, GROUP)
    return jax.vmap(lambda k: jax.random.uniform(k, (TOKENS,)))(keys)

  wanted = draw(jnp.asarray(batch().prompts.uid))
  np.testing.assert_array_equal(draw(uid), wanted)


def test_leaves_are_split_over_the_mesh():
  mesh = sharding.make_mesh(MESHES[2])
  state = step.init_state(MODEL, optax.adam(1e-3), seed=0, mesh=mesh)
  for tree in (state.params['policy'], state.opt_state[0].mu):
    kernel = tree['layers']['mlp']['gate']['kernel']
    assert kernel.addressable_shards[0].data.size == kernel.size // 4


def test_batch_that_cannot_be_split_is_refused():
  mesh = sharding.make_mesh('data:8')
  with pytest.raises(ValueError, match='prompts=12 .* multiple of 8'):
    step.make_step(
      METHOD, {'policy': MODEL}, optax.sgd(1.0), judge, prompts=12, mesh=mesh
    )
  with pytest.raises(ValueError, match='minibatches=3'):
    step.make_step(
      dataclasses.replace(METHOD, minibatches=3),
      {'policy': MODEL},
      optax.sgd(1.0),
      judge,
      prompts=8,
    )
