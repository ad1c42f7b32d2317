"""Tests of sharding rules: every leaf has one, unknown leaves are refused."""

from absl.testing import parameterized
import jax
from jax.sharding import AxisType, PartitionSpec
import numpy as np
import optax

from rljax.models import decoder, rules
from tests.models import dense

CONFIG = decoder.Config(
  vocab_size=24, width=16, layers=2, heads=4, kv_heads=2, head_dim=8,
  mlp_width=32, qk_norm=True, qkv_bias=True, tied=False,
)  # fmt: skip


def mesh_of(**sizes):
  shape = tuple(sizes.get(axis, 1) for axis in rules.AXES)
  types = (AxisType.Auto,) * len(shape)
  return jax.make_mesh(shape, rules.AXES, axis_types=types)


class RulesTest(parameterized.TestCase):
  def test_first_dimensions_split_as_intended(self):
    mesh = mesh_of(data=2, fsdp=2, tensor=2)
    abstract = decoder.Model(CONFIG).abstract()
    found = rules.shardings(abstract, mesh, rules.TRAIN)
    layers, spec = found['layers'], PartitionSpec
    attention, mlp = layers['attention'], layers['mlp']
    wanted = [
      (found['embed'], spec('tensor', 'fsdp')),
      (found['unembed'], spec('tensor', 'fsdp')),
      (attention['q']['kernel'], spec(None, 'fsdp', 'tensor')),
      (attention['k']['bias'], spec(None, 'tensor')),
      (attention['o']['kernel'], spec(None, 'tensor', 'fsdp')),
      (mlp['gate']['kernel'], spec(None, 'fsdp', 'tensor')),
      (mlp['down']['kernel'], spec(None, 'tensor', 'fsdp')),
      (attention['q_norm']['scale'], spec(None, None)),
    ]
    for sharding, expected in wanted:
      self.assertEqual(sharding.spec, expected)

  def test_no_weight_is_whole_on_each_device_but_norms(self):
    mesh = mesh_of(data=2, fsdp=2, tensor=2)
    params = decoder.Model(CONFIG).abstract()
    for which, share in ((rules.TRAIN, 4), (rules.SAMPLE, 2)):
      places = rules.shardings(params, mesh, which)
      for (path, leaf), place in zip(
        jax.tree_util.tree_leaves_with_path(params),
        jax.tree.leaves(places),
        strict=True,
      ):
        name = rules.path_name(path)
        if name.endswith('kernel') or name.endswith('embed'):
          part = place.shard_shape(leaf.shape)
          self.assertEqual(np.prod(leaf.shape) / np.prod(part), share, name)

  def test_the_sampler_has_no_fsdp_axis(self):
    mesh = mesh_of(data=2, fsdp=4)
    places = rules.shardings(
      decoder.Model(CONFIG).abstract(), mesh, rules.SAMPLE
    )
    for place in jax.tree.leaves(places):
      self.assertTrue(place.is_fully_replicated)

  @parameterized.parameters(('adamw', 2), ('sgd', 0), ('lion', 1))
  def test_optimizer_states_are_split(self, name, moments):
    optimizer = optax.chain(
      optax.clip_by_global_norm(1.0), getattr(optax, name)(1e-3)
    )
    params = decoder.Model(CONFIG).abstract()
    state = jax.eval_shape(optimizer.init, params)
    mesh = mesh_of(fsdp=8)
    places = rules.shardings(state, mesh, rules.TRAIN)
    pairs = zip(*map(jax.tree.leaves, (state, places)), strict=True)
    parts = [p.shard_shape(x.shape) for x, p in pairs if x.ndim == 3]
    # Split: q, gate and up, [2, 16, 32] each.
    self.assertLen(parts, 7 * moments)
    self.assertEqual(parts.count((2, 2, 32)), 3 * moments)

  @parameterized.parameters('router/kernel', 'embed/kernel', 'unembed_bias')
  def test_an_unknown_leaf_is_named(self, name):
    with self.assertRaisesRegex(ValueError, name):
      rules.spec_of(name, (4, 4), mesh_of(data=8), rules.TRAIN)

  def test_an_unknown_parameter_is_named(self):
    params = {'embed': np.zeros((4, 4)), 'gate': {'router': np.zeros((4, 4))}}
    with self.assertRaisesRegex(ValueError, 'gate/router'):
      rules.shardings(params, mesh_of(data=8), rules.TRAIN)

  def test_an_axis_that_does_not_divide_is_left_out(self):
    mesh = mesh_of(fsdp=4, tensor=2)
    odd = rules.spec_of('embed', (23, 16), mesh, rules.TRAIN)
    self.assertEqual(odd, PartitionSpec(None, 'fsdp'))
    odd = rules.spec_of('embed', (24, 18), mesh, rules.TRAIN)
    self.assertEqual(odd, PartitionSpec('tensor', None))

  def test_a_split_model_computes_the_same(self):
    mesh = mesh_of(data=2, fsdp=2, tensor=2)
    model, params = decoder.Model(CONFIG), dense.params(CONFIG)
    split = jax.device_put(params, rules.shardings(params, mesh, rules.TRAIN))
    prompts, response = dense.inputs(CONFIG, [5, 3], 5, group=2, size=4)
    found = jax.jit(model.hidden)(split, prompts, response)
    wanted = dense.responses(CONFIG, params, prompts, response)
    np.testing.assert_allclose(found, wanted, atol=1e-5)
