"""The TPU kernels in the TPU interpreter, and bugs that it must see.

`on_wait` makes a copy happen when it is waited for, so that a missing wait
leaves old numbers; `eager` copies at once and looks for races.
"""

import contextlib
import dataclasses
from unittest import mock

from absl.testing import parameterized
import jax
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
from jax.sharding import AxisType
import numpy as np
import pytest

import rljax_kernels
from rljax_kernels.vocab_stats import pallas_tpu, tpu_tile
from tests.kernels import oracle, token_losses

EVERY = (*oracle.ALONE, *oracle.PAIRED)
FEW = ('logp', 'entropy')


@contextlib.contextmanager
def interpreted(mode='on_wait'):
  """Makes TPU kernels run in the interpreter."""
  params = pltpu.InterpretParams(
    dma_execution_mode=mode, detect_races=mode == 'eager'
  )
  with pltpu.force_tpu_interpret_mode(params):
    yield


def measure(c, names, wide=False):
  """Returns statistics and gradients of the kernels, in blocks of 128."""

  def fn(h, w):
    return rljax_kernels.vocab_stats(
      h, w.T if wide else w, c.targets, **c.options, want=names,
      implementation='pallas_tpu', block=128,
    )  # fmt: skip

  given = oracle.cotangents(len(c.targets), names)
  found, pulled = jax.jit(oracle.pull(fn))(c.hidden, c.unembed, given)
  return found, pulled, given


def check(c, names, **options):
  """Fails where the kernels are further from float64 than allowed."""
  found, pulled, given = measure(c, names, **options)
  expected = oracle.stats(c)
  for name in names:
    np.testing.assert_allclose(found[name], expected[name], atol=2e-5)
  given = {k: v for k, v in given.items() if k != 'ref_logp'}
  for got, wanted in zip(pulled, oracle.gradients(c, given), strict=True):
    assert oracle.error(got, wanted) <= 3e-6


def ragged(tokens=300):
  """Returns a case with more blocks than one of everything, none full."""
  c = oracle.case(tokens, 128, 300, softcap=5.0, valid=290)
  return oracle.paired(c, 128, softcap=9.0, valid=290)


class KernelTest(parameterized.TestCase):
  @parameterized.parameters('on_wait', 'eager')
  def test_every_statistic(self, mode):
    with interpreted(mode):
      check(ragged(), EVERY)

  def test_a_kernel_for_each_cotangent(self):
    # Fewer tokens than a block: there is no block to wait for.
    with interpreted():
      check(oracle.case(100, 128, 300), FEW)

  @pytest.mark.slow
  def test_one_model_at_two_temperatures(self):
    c = oracle.case(140, 128, 300)
    other = dataclasses.replace(c, temperature=c.temperature + 0.5)
    with interpreted():
      found = rljax_kernels.vocab_js(
        c.hidden, c.unembed, (c.temperature, other.temperature),
        beta=oracle.BETA, implementation='pallas_tpu', block=128,
      )  # fmt: skip
    wanted = oracle.stats(dataclasses.replace(c, other=other))['js']
    np.testing.assert_allclose(found, wanted, atol=2e-5)

  @pytest.mark.slow
  def test_unembeddings_of_both_layouts(self):
    with interpreted():
      check(oracle.case(300, 128, 260), FEW, wide=True)
      check(oracle.case(130, 128, 128), FEW)

  @pytest.mark.slow
  def test_split_on_a_chip_of_two_cores(self):
    two = tpu_tile.Chip(cores=2)
    with (
      interpreted(),
      mock.patch.object(tpu_tile, 'chip_of', lambda kind: two),
    ):
      check(oracle.case(300, 128, 300), FEW)

  def test_token_loss(self):
    c = oracle.case(260, 128, 300, valid=290)
    weight, data = token_losses.inputs(260, dead=0.4)
    with interpreted():
      sums = jax.jit(
        lambda *x: rljax_kernels.token_loss(
          token_losses.objective, *x, implementation='pallas_tpu', block=128,
          **c.options,
        )
      )(*c.arrays, weight, data)  # fmt: skip
    token_losses.compare(c, weight, data, sums)

  def test_over_rows_and_vocabulary(self):
    mesh = jax.make_mesh(
      (2, 2), ('data', 'tensor'), axis_types=(AxisType.Auto,) * 2,
      devices=jax.devices()[:4],
    )  # fmt: skip
    layout = rljax_kernels.Layout(mesh, ('data',), 'tensor')
    # A shard holds 150 ids of two blocks: its padded columns bear the ids that
    # the next shard owns.
    c = oracle.case(260, 128, 300)
    c.targets[:20] = np.arange(145, 165)
    given = oracle.cotangents(260, FEW)

    def fn(h, w):
      return rljax_kernels.vocab_stats(
        h, w, c.targets, **c.options, want=FEW, layout=layout,
        implementation='pallas_tpu', block=128,
      )  # fmt: skip

    with interpreted():
      found, pulled = jax.jit(oracle.pull(fn))(c.hidden, c.unembed, given)
    for name in FEW:
      np.testing.assert_allclose(found[name], oracle.stats(c)[name], atol=2e-5)
    for got, wanted in zip(pulled, oracle.gradients(c, given), strict=True):
      self.assertLess(oracle.error(got, wanted), 3e-6)


class _Skipped:
  """A copy whose start or wait does nothing."""

  def __init__(self, copy, skip):
    self._copy, self._skip = copy, skip

  def start(self):
    if self._skip != 'start':
      self._copy.start()

  def wait(self):
    if self._skip != 'wait':
      self._copy.wait()


def _without(which):
  """Returns a mutant whose copies of one kind are never waited for."""
  original = getattr(pallas_tpu._Slots, which)
  return mock.patch.object(
    pallas_tpu._Slots,
    which,
    lambda *args: _Skipped(original(*args), 'wait'),
  )


def _parallel_reduction():
  """Returns a mutant that lets blocks of a reduction run in any order."""
  original = tpu_tile.Blocks.compiler
  return mock.patch.object(
    tpu_tile.Blocks,
    'compiler',
    lambda self, *kinds: original(self, *['parallel'] * len(kinds)),
  )


def _garbage_past_the_edge():
  """Returns a mutant that multiplies whatever lies past the edges."""
  return mock.patch.object(tpu_tile, 'inside', lambda x, axis, begin, limit: x)


def _columns_of_the_next_shard():
  """Returns a mutant that takes padded columns for those of another shard."""
  original = tpu_tile.logits

  def tile(*args):
    t = original(*args)
    begin, x = args[2], args[3]
    return t._replace(hit=(t.ids == x.targets) & (begin[0] >= 0))

  return mock.patch.object(tpu_tile, 'logits', tile)


@pytest.mark.slow
class MutantTest(parameterized.TestCase):
  """Each planted bug is caught by the tests above."""

  @parameterized.named_parameters(
    ('a_wait_for_what_is_read', lambda: _without('read')),
    ('a_wait_for_what_is_written', lambda: _without('write')),
    ('an_order', _parallel_reduction),
    ('zeros_past_the_edge', _garbage_past_the_edge),
  )
  def test_without(self, mutant):
    with self.assertRaises(AssertionError), mutant(), interpreted():
      check(oracle.case(300, 128, 300), FEW)

  def test_without_a_shard_boundary(self):
    with self.assertRaises(AssertionError), _columns_of_the_next_shard():
      KernelTest('test_over_rows_and_vocabulary').debug()


def test_sizes_a_chip_cannot_take():
  c = oracle.case(300, 128, 300)
  for options, message in (
    (dict(block=64), 'block=64 is no multiple of 128'),
    (dict(block=4096), 'no tile fits 64 MiB'),
  ):
    with pytest.raises(NotImplementedError, match=message):
      rljax_kernels.vocab_stats(
        *c.arrays, implementation='pallas_tpu', **options
      )
  with pytest.raises(NotImplementedError, match='different types'):
    rljax_kernels.vocab_stats(
      c.hidden, jnp.asarray(c.unembed, jnp.bfloat16), c.targets,
      implementation='pallas_tpu',
    )  # fmt: skip
