"""Tests of meshes and of where arrays are placed; there are eight devices."""

from absl.testing import parameterized
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np
import pytest

from rljax.engine import sharding
from rljax.engine import step as step_lib
from rljax.models import decoder, rules
from tests.engine import small, training


class ParseTest(parameterized.TestCase):
  def test_sizes(self):
    found = sharding.parse('data:4,fsdp:2')
    self.assertEqual(found, {'data': 4, 'fsdp': 2})
    self.assertEqual(sharding.parse(''), {})

  @parameterized.parameters(
    ('dat:8', "'dat' is unknown.*fsdp"),
    ('data:2,data:1', "'data' twice"),
    ('sequence:2', 'nothing is split over it.*replica, data, fsdp, tensor'),
    ('data:4,expert:2', 'nothing is split over it'),
    ('data:0', 'name:size'),
    ('data:²', 'name:size'),
    ('data:two', 'name:size'),
    ('data', 'name:size'),
    ('data:-1', 'name:size'),
  )
  def test_mistakes_are_named(self, text, message):
    with self.assertRaisesRegex(ValueError, message):
      sharding.parse(text)


class MeshTest(parameterized.TestCase):
  def test_all_devices_hold_rows_by_default(self):
    mesh = sharding.make_mesh()
    self.assertEqual(mesh.shape['data'], 8)
    self.assertEqual(tuple(mesh.axis_names), rules.AXES)

  @parameterized.parameters('data:4', 'data:16', 'data:3,fsdp:2')
  def test_sizes_must_fit(self, text):
    with self.assertRaisesRegex(ValueError, f'{text}.*8.*--devices'):
      sharding.make_mesh(text)

  @parameterized.parameters(
    ('data:8', 8), ('data:4,fsdp:2', 8), ('data:2,fsdp:2,tensor:2', 4),
    ('tensor:8', 1), ('replica:2,data:2,tensor:2', 4),
  )  # fmt: skip
  def test_row_shards(self, text, wanted):
    self.assertEqual(sharding.row_shards(sharding.make_mesh(text)), wanted)
    self.assertEqual(sharding.row_shards(None), 1)

  @parameterized.parameters(
    ('data:4,tensor:2', 32, 'tensor'),
    ('data:4,tensor:2', 33, None),  # does not divide: whole on each device
    ('data:8', 32, None),
  )
  def test_layout_of_the_kernels(self, text, vocab, axis):
    found = sharding.layout(sharding.make_mesh(text), vocab)
    self.assertEqual(found.vocab, axis)
    self.assertEqual(found.rows, rules.ROWS)
    self.assertIsNone(sharding.layout(None, vocab))


class PlaceTest(parameterized.TestCase):
  def test_rows_of_the_batch(self):
    mesh = sharding.make_mesh('data:2,fsdp:2,tensor:2')
    tree = {'x': np.arange(8.0), 'y': np.ones((8, 3))}
    placed = sharding.place_rows(tree, mesh)
    for name, x in placed.items():
      self.assertEqual(x.sharding.spec[0], rules.ROWS)
      np.testing.assert_array_equal(x, tree[name])
      self.assertEqual(x.addressable_shards[0].data.shape[0], 2)

  def test_constraints(self):
    mesh = sharding.make_mesh('data:2,fsdp:2,tensor:2')
    params = small.params()

    @jax.jit
    def run(params, rows):
      return (
        sharding.constrain_params(params, mesh, rules.SAMPLE),
        sharding.constrain_rows({'rows': rows, 'one': jnp.float32(1)}, mesh),
      )

    found, rows = run(params, jnp.ones((8, 2)))
    self.assertEqual(rows['rows'].addressable_shards[0].data.shape, (2, 2))
    self.assertEqual(found['embed'].sharding.spec, PartitionSpec('tensor'))
    self.assertIs(sharding.constrain_rows(params, None), params)
    self.assertIs(sharding.constrain_params(params, None, rules.TRAIN), params)

  @pytest.mark.slow
  def test_a_fresh_state_is_created_where_it_lives(self):
    # Bit-equal to one device, with no array whole on any.
    model = decoder.Model(small.SHALLOW)
    mesh = sharding.make_mesh('data:2,fsdp:2,tensor:2')
    states = [
      step_lib.init_state(model, training.keeping(), seed=4, mesh=m)
      for m in (None, mesh)
    ]
    one, split = (s.params['policy'] for s in states)
    for x, y in zip(*map(jax.tree.leaves, (one, split)), strict=True):
      np.testing.assert_array_equal(x, y)
    self.assertEqual(split['embed'].addressable_shards[0].data.shape, (16, 16))
    kept = states[1].opt_state.grads['embed']
    self.assertEqual(kept.addressable_shards[0].data.shape, (16, 16))
    other = step_lib.init_state(model, training.keeping(), seed=5)
    self.assertFalse(
      np.array_equal(other.params['policy']['embed'], one['embed'])
    )
