"""Credit and losses of a large batch are fused loops, not copies of it."""

from absl.testing import absltest, parameterized
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import contracts, masking_contracts

ROWS, TOKENS = 512, 4096
# Temporaries of value and gradient, beside arguments and results.
LIMIT = 4 * ROWS * TOKENS * 4
# Lines of StableHLO; a loop of Python over rows would make thousands.
LINES = 1000

SHAPES = {
  'mask': ((ROWS, TOKENS), np.float32),
  'token': ((ROWS, TOKENS), np.float32),
  'paid': ((ROWS, TOKENS), np.float32),
  'row': ((ROWS,), np.float32),
}


# What makes data, through which no gradient passes.
DATA = ('advantages', 'credit', 'spans', 'targets')
# Of rows, and of groups one after the other.
OTHERS = ('preferences', 'token_baselines')


def cases():
  """Yields every function of tokens; those of OTHERS have their own tests."""
  for label, fn, claim, _ in contracts.cases(masking_contracts.FAMILIES):
    module = label.partition('.')[0]
    if module not in OTHERS and set(claim.inputs) <= set(SHAPES):
      yield label, claim.call(fn), claim.inputs, module not in DATA


def lowered(fn, inputs, differentiated=True):
  """Returns value and gradient in the first argument, not yet compiled."""

  def total(*arrays):
    out = fn(*arrays)
    out = jnp.stack(out) if isinstance(out, tuple) else out
    return jnp.sum(out.astype(jnp.float32)), out

  arrays = [jax.ShapeDtypeStruct(*SHAPES[kind]) for kind in inputs]
  program = jax.grad(total, has_aux=True) if differentiated else fn
  return jax.jit(program).lower(*arrays)


def temporaries(program) -> int:
  return program.compile().memory_analysis().temp_size_in_bytes


class MemoryTest(parameterized.TestCase):
  @parameterized.named_parameters(*cases())
  @pytest.mark.slow
  def test_no_copies(self, fn, inputs, differentiated):
    program = lowered(fn, inputs, differentiated)
    self.assertLess(program.as_text().count('\n'), LINES)
    self.assertLessEqual(temporaries(program), LIMIT)

  def test_a_copy_for_each_token_would_show(self):
    def greedy(x, mask):
      return jnp.sort(jnp.stack([x] * 6), axis=2).sum(0) * mask

    program = lowered(greedy, ('token', 'mask'))
    self.assertGreater(temporaries(program), LIMIT)

  @pytest.mark.slow
  def test_a_loop_over_rows_would_show(self):
    def slow(x, mask):
      return jnp.stack([jnp.sum(row) for row in x])

    program = lowered(slow, ('token', 'mask'), differentiated=False)
    self.assertGreater(program.as_text().count('\n'), LINES)


if __name__ == '__main__':
  absltest.main()
