"""The programs of the step compiled for TPUs that are not here."""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
import pytest

from rljax.core.types import Batch, Prompts
from rljax.engine import grpo, optim, sampling, seams, sharding
from rljax.engine import step as step_lib
from rljax.engine.method import Method
from rljax.models import decoder, rules
from rljax_kernels import chips

pytestmark = [
  pytest.mark.aot,
  pytest.mark.skipif(chips.missing('v5e') is not None, reason='no libtpu'),
]

PROMPTS, GROUP, WIDTH, TOKENS = 8, 4, 16, 64
CONFIG = decoder.Config(
  vocab_size=8192, width=256, layers=2, heads=4, kv_heads=2, head_dim=64,
  mlp_width=512, qk_norm=True, dtype='bfloat16',
)  # fmt: skip


def mesh_of(chip):
  sizes = {'fsdp': 2, 'tensor': 2}
  return jax.make_mesh(
    tuple(sizes.get(axis, 1) for axis in rules.AXES),
    rules.AXES,
    axis_types=(AxisType.Auto,) * len(rules.AXES),
    devices=chips.devices(chip)[:4],
  )


def placed(tree, shardings):
  return jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    tree,
    shardings,
  )


def programs(chip):
  """Returns the step on four chips, with its state and rollout as shapes."""
  mesh, model = mesh_of(chip), decoder.Model(CONFIG)
  phase = sampling.Phase(max_tokens=TOKENS, group_size=GROUP, stop_ids=(1,))
  method = Method(
    phase=phase,
    credit=grpo.credit(ref=True),
    loss=grpo.loss(beta=0.1),
    views={'ref': seams.View('ref')},
  )
  optimizer = optim.adamw(1e-4)
  step = step_lib.make_step(
    method,
    {'policy': model},
    optimizer,
    lambda rollout: {'task': rollout.mask.sum(1)},
    prompts=PROMPTS,
    mesh=mesh,
  )
  params = jax.eval_shape(model.init, jax.random.key(0))
  state = jax.eval_shape(
    lambda p: step_lib.init_state(
      model, optimizer, seed=0, params=p, frozen={'ref': p}
    ),
    params,
  )
  state = placed(state, step_lib.state_shardings(state, mesh))
  rows = NamedSharding(mesh, PartitionSpec(rules.ROWS))

  def ints(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=rows)

  prompts = Prompts(
    tokens=ints(PROMPTS, WIDTH), length=ints(PROMPTS), uid=ints(PROMPTS)
  )
  return step, state, Batch(prompts=prompts, data={}), mesh


@pytest.mark.parametrize('chip', ['v5e', 'v5p'])
def test_score_and_learn_use_the_kernels(chip):
  step, state, batch, mesh = programs(chip)
  assert sharding.layout(mesh, CONFIG.vocab_size).vocab == 'tensor'
  fused = step.fused.lower(state, batch).compile()
  text = fused.as_text()
  # The reference is scored, the policy is read and learns from it.
  assert text.count('vocab_stats_forward') >= 2
  assert 'vocab_stats_backward' in text
  assert 'tpu_custom_call' in text
