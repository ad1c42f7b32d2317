"""Tests of the kernels over a mesh: rows split, and rows and vocabulary."""

import dataclasses
import functools

from absl.testing import parameterized
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
import numpy as np

import rljax_kernels
from tests.kernels import meshes, oracle, token_losses

N, D, V = 48, 8, 96

LAYOUTS = (
  ('rows', meshes.ROWS),
  ('rows_of_two_axes', meshes.ROWS_OF_TWO_AXES),
  ('rows_and_vocab', meshes.ROWS_AND_VOCAB),
  ('more_vocab', meshes.MORE_VOCAB),
  ('vocab', meshes.VOCAB),
)


def split(layout, c):
  """Returns the arrays of a case placed as the layout says."""
  axes = layout.rows, layout.vocab, layout.rows
  places = [NamedSharding(layout.mesh, PartitionSpec(x)) for x in axes]
  return jax.device_put(c.arrays, tuple(places))


class ShardedTest(parameterized.TestCase):
  @parameterized.named_parameters(*LAYOUTS)
  def test_statistics_and_gradients(self, spec):
    layout = meshes.layout(*spec)
    # 20 real ids: most shards of the vocabulary hold padding alone.
    c = oracle.case(N, D, V, softcap=6.0, valid=20)
    name = 'xla_token' if len(layout.rows) == 1 else 'xla_vocab'
    self.check(layout, c, oracle.NAMES, implementation=name)

  @parameterized.parameters('xla_token', 'xla_vocab')
  def test_every_statistic(self, name):
    layout = meshes.layout(*meshes.MORE_VOCAB)
    c = oracle.paired(oracle.case(N, D, V), D)
    names = (*oracle.ALONE, *oracle.PAIRED)
    self.check(layout, c, names, implementation=name)

  def test_one_model_at_two_temperatures(self):
    layout = meshes.layout(*meshes.MORE_VOCAB)
    c = oracle.case(N, D, V)
    hidden, unembed, _ = split(layout, c)

    @jax.jit
    def js(h, w):
      return rljax_kernels.vocab_js(
        h, w, (0.5, c.temperature), beta=oracle.BETA, layout=layout
      )

    found = js(hidden, unembed)
    half = np.full(N, 0.5, np.float32)
    pair = dataclasses.replace(c, temperature=half, other=c)
    np.testing.assert_allclose(found, oracle.stats(pair)['js'], atol=1e-5)

  def check(self, layout, c, names, **options):
    given = oracle.cotangents(N, names)
    h, w, t = split(layout, c)

    def fn(h, w):
      return rljax_kernels.vocab_stats(
        h, w, t, **c.options, want=names, layout=layout, block=4, **options
      )

    found, pulled = jax.jit(oracle.pull(fn))(h, w, given)
    expected = oracle.stats(c)
    for name in names:
      np.testing.assert_allclose(found[name], expected[name], atol=1e-5)
    given = {k: v for k, v in given.items() if k != 'ref_logp'}
    for got, wanted in zip(pulled, oracle.gradients(c, given), strict=True):
      self.assertLess(oracle.error(got, wanted), 3e-6)

  @parameterized.product(name=('xla_token', 'xla_vocab'), inside=(True, False))
  def test_within_a_shard_map(self, name, inside):
    layout = meshes.layout(*meshes.MORE_VOCAB)
    c = oracle.case(N, D, V)
    rows, vocab = PartitionSpec('data'), PartitionSpec('tensor')

    def loss(h, w, t, i):
      found = rljax_kernels.vocab_stats(
        h, w, t, temperature=i, want=('logp', 'entropy'), vocab_axis='tensor',
        block=4, implementation=name,
      )  # fmt: skip
      total = jnp.sum(found['logp'] + 0.1 * found['entropy'])
      return jax.lax.psum(total, 'data')

    args = (*c.arrays, c.temperature)
    specs = dict(mesh=layout.mesh, in_specs=(rows, vocab, rows, rows))
    if inside:
      gradient = jax.shard_map(
        jax.grad(loss, (0, 1)), out_specs=(rows, vocab), **specs
      )
    else:
      whole = jax.shard_map(loss, out_specs=PartitionSpec(), **specs)
      gradient = jax.grad(whole, (0, 1))
    given = {'logp': np.ones(N), 'entropy': np.full(N, 0.1)}
    pulled = jax.jit(gradient)(*args)
    for got, wanted in zip(pulled, oracle.gradients(c, given), strict=True):
      self.assertLess(oracle.error(got, wanted), 3e-6)

  def test_under_jit_with_shardings_alone(self):
    layout = meshes.layout(*meshes.MORE_VOCAB)
    c = oracle.case(N, D, V)
    given = oracle.cotangents(N)
    h, w, t = split(layout, c)

    def fn(h, w):
      return rljax_kernels.vocab_stats(h, w, t, **c.options, want=oracle.NAMES)

    _, pulled = jax.jit(oracle.pull(fn))(h, w, given)
    for got, wanted in zip(pulled, oracle.gradients(c, given), strict=True):
      self.assertLess(oracle.error(got, wanted), 3e-6)

  @parameterized.named_parameters(*LAYOUTS)
  def test_token_loss(self, spec):
    layout = meshes.layout(*spec)
    c = oracle.case(N, D, V, valid=90)
    weight, data = token_losses.inputs(N, dead=0.0)
    # Some shards of the rows hold three blocks, some one, most none.
    weight[5:40] = weight[41:] = 0.0
    data = {k: np.where(weight == 0, np.nan, x) for k, x in data.items()}

    @jax.jit
    def run(h, w, t, weight, data):
      return rljax_kernels.token_loss(
        token_losses.objective, h, w, t, weight, data,
        **c.options, layout=layout, block=2,
      )  # fmt: skip

    sums = run(*split(layout, c), weight, data)
    token_losses.compare(c, weight, data, sums)
    wanted = NamedSharding(layout.mesh, PartitionSpec(layout.vocab))
    self.assertTrue(sums.d_unembed.sharding.is_equivalent_to(wanted, 2))

  def test_more_vocabulary_than_one_device_is_not_gathered(self):
    layout = meshes.layout(*meshes.MORE_VOCAB)
    c = oracle.case(N, D, V)

    def total(h, w, t):
      out = rljax_kernels.vocab_stats(h, w, t, layout=layout)
      return jnp.sum(out['logp'])

    run = jax.jit(jax.grad(total, (0, 1)))
    text = run.lower(*split(layout, c)).compile().as_text()
    self.assertNotIn('all-gather', text)
    self.assertIn('all-reduce', text)


class ExplicitAxesTest(parameterized.TestCase):
  """Meshes as `jax.make_mesh` makes them when it is told no types."""

  def setUp(self):
    super().setUp()
    mesh = jax.make_mesh((2, 4), ('data', 'tensor'))
    self.assertIn(AxisType.Explicit, mesh.axis_types)
    self.layout = rljax_kernels.Layout(mesh, ('data',), 'tensor')

  @parameterized.parameters(False, True)
  def test_statistics_and_gradients(self, placed):
    c = oracle.case(N, D, V)
    given = oracle.cotangents(N, ('logp', 'entropy'))
    arrays = split(self.layout, c)[:2] if placed else c.arrays[:2]

    def total(h, w):
      found = rljax_kernels.vocab_stats(
        h, w, c.targets, **c.options, want=tuple(given), layout=self.layout
      )
      return sum(jnp.sum(found[k] * given[k]) for k in given)

    pulled = jax.jit(jax.grad(total, (0, 1)))(*arrays)
    for got, wanted in zip(pulled, oracle.gradients(c, given), strict=True):
      self.assertLess(oracle.error(got, wanted), 3e-6)

  @parameterized.parameters('xla_token', 'xla_vocab')
  def test_token_loss(self, name):
    c = oracle.case(N, D, V)
    weight, data = token_losses.inputs(N, dead=0.3)

    @jax.jit
    def run(*args):
      return rljax_kernels.token_loss(
        token_losses.objective, *args, layout=self.layout,
        implementation=name, **c.options,
      )  # fmt: skip

    sums = jax.tree.map(np.asarray, run(*c.arrays, weight, data))
    token_losses.compare(c, weight, data, sums)

  def test_samples_and_gathered_logits(self):
    c = oracle.case(N, D, V)
    uniform = np.linspace(0, 1, N, endpoint=False, dtype=np.float32)
    ids = np.stack([c.targets, c.targets], axis=1)
    for layout in (self.layout, None):
      options = dict(layout=layout, temperature=c.temperature)
      token = jax.jit(functools.partial(rljax_kernels.vocab_sample, **options))
      gather = jax.jit(
        functools.partial(rljax_kernels.gather_logits, **options)
      )
      likely = jax.jit(
        functools.partial(rljax_kernels.vocab_topk, k=3, **options)
      )
      found = [
        token(*c.arrays[:2], uniform).token,
        gather(*c.arrays[:2], ids),
        *likely(*c.arrays[:2]),
      ]
      if layout is not None:
        first = found
    for x, y in zip(first, found, strict=True):
      np.testing.assert_allclose(x, y, atol=1e-5)


class BadLayoutTest(parameterized.TestCase):
  @parameterized.parameters(
    (dict(mesh=None), 'mesh=None .*layout=None'),
    (dict(rows='data'), "rows='data' must be a tuple"),
  )
  def test_what_is_no_layout(self, change, message):
    mesh = meshes.layout(*meshes.MORE_VOCAB).mesh
    with self.assertRaisesRegex(ValueError, message):
      rljax_kernels.Layout(**(dict(mesh=mesh) | change))

  def test_what_does_not_split_evenly(self):
    layout = meshes.layout(*meshes.MORE_VOCAB)
    uniform = np.zeros(N, np.float32)
    for n, v, message in (
      (N - 1, V, r"47 tokens .*rows=\('data',\), 2 parts"),
      (N, V - 2, "94 ids .*vocab='tensor', 4 parts.*valid="),
    ):
      c = oracle.case(n, D, v)
      with self.assertRaisesRegex(ValueError, message):
        rljax_kernels.vocab_stats(*c.arrays, layout=layout)
      with self.assertRaisesRegex(ValueError, message):
        rljax_kernels.vocab_sample(*c.arrays[:2], uniform[:n], layout=layout)

  def test_a_shard_map_that_does_not_track_what_varies(self):
    layout = meshes.layout(*meshes.MORE_VOCAB)
    c = oracle.case(N, D, V)

    def loss(h, w, t):
      found = rljax_kernels.vocab_stats(h, w, t, vocab_axis='tensor')
      return found['logp']

    rows, vocab = PartitionSpec('data'), PartitionSpec('tensor')
    specs = dict(in_specs=(rows, vocab, rows), out_specs=rows)
    mapped = jax.shard_map(loss, mesh=layout.mesh, check_vma=False, **specs)
    with self.assertRaisesRegex(ValueError, "'tensor' needs.*check_vma=True"):
      mapped(*c.arrays)

  def test_axes_are_those_of_the_mesh_and_each_for_one_thing(self):
    mesh = meshes.layout(*meshes.MORE_VOCAB).mesh
    for rows, vocab in ((('dat',), None), (('data',), 'data'), ((), 'model')):
      with self.assertRaisesRegex(ValueError, "of the mesh, .'data', 'tens"):
        rljax_kernels.Layout(mesh, rows, vocab)

  def test_a_layout_and_an_axis_contradict(self):
    c = oracle.case(N, D, V)
    with self.assertRaisesRegex(ValueError, "vocab_axis='tensor'.*one of"):
      rljax_kernels.vocab_stats(
        *c.arrays, layout=meshes.layout(*meshes.MORE_VOCAB),
        vocab_axis='tensor',
      )  # fmt: skip
