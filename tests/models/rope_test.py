"""Tests of rotary embedding: bases, scalings, rotation."""

import math

from absl.testing import parameterized
import jax.numpy as jnp
import numpy as np

from rljax.models import decoder, rope
from tests.models import dense

LLAMA3 = rope.Llama3(8.0, 1.0, 4.0, 8192)
ROPES = {
  'base_1e4': rope.Rope(),
  'llama_3': rope.Rope(5e5, LLAMA3),
  'qwen3_2507': rope.Rope(5e6),
  'small_scaled': rope.Rope(100.0, rope.Llama3(4.0, 1.0, 3.0, 64)),
  'interpolated': rope.Rope(1e4, rope.Linear(2.5)),
}


class FrequenciesTest(parameterized.TestCase):
  @parameterized.parameters(*ROPES)
  def test_against_the_papers_formula(self, name):
    for size in (2, 6, 64, 128):
      found = ROPES[name].frequencies(size)
      self.assertEqual(found.dtype, np.float32)
      wanted = dense.frequencies(ROPES[name], size)
      np.testing.assert_allclose(found, wanted, rtol=1e-6)

  def test_llama_3_by_hand(self):
    # Of 64 pairs: pair 0 turns once in 2π positions and stays; pair 63 turns
    # once in 2π · 5e5^(63/64) ≈ 2.6 million and slows down by 8; pair 30 turns
    # every 2947, between 8192 / 4 and 8192, and slows down a little.
    found = rope.Rope(5e5, LLAMA3).frequencies(128)
    self.assertAlmostEqual(found[0], 1.0)
    np.testing.assert_allclose(found[63], 5e5 ** (-63 / 64) / 8, rtol=1e-6)
    plain = 5e5 ** (-30 / 64)
    turns = 8192 / (2 * math.pi / plain)
    self.assertBetween(turns, 1.0, 4.0)
    smooth = (turns - 1.0) / 3.0
    wanted = plain * (smooth + (1 - smooth) / 8)
    np.testing.assert_allclose(found[30], wanted, rtol=1e-6)


class RotateTest(parameterized.TestCase):
  @parameterized.parameters(*ROPES)
  def test_against_complex_numbers(self, name):
    x = np.random.default_rng(0).normal(size=(40, 3, 8)).astype(np.float32)
    table = ROPES[name].table(jnp.arange(40), 8)
    found = rope.rotate(jnp.asarray(x), table)
    wanted = dense.rotate(x.astype(np.float64), ROPES[name])
    np.testing.assert_allclose(found, wanted, atol=1e-5)

  def test_products_depend_on_distance(self):
    r = np.random.default_rng(0)
    q, k = jnp.asarray(r.normal(size=(2, 1, 1, 8)), jnp.float32)

    def product(first, second):
      tables = [rope.Rope().table(jnp.array([p]), 8) for p in (first, second)]
      return float(jnp.vdot(*map(rope.rotate, (q, k), tables)))

    near, far, other = product(9, 4), product(109, 104), product(9, 3)
    self.assertAlmostEqual(near, far, places=4)
    self.assertGreater(abs(near - other), 0.01)

  def test_bfloat16_stays(self):
    x = jnp.ones((1, 1, 4), jnp.bfloat16)
    out = rope.rotate(x, rope.Rope().table(jnp.array([3]), 4))
    self.assertEqual(out.dtype, jnp.bfloat16)


class ModelTest(parameterized.TestCase):
  """The config's base and scaling reach the states; some libraries' do not."""

  @parameterized.parameters(
    (rope.Rope(1e4), rope.Rope(5e5)),
    (rope.Rope(1e6), rope.Rope(5e6)),
    (rope.Rope(5e5), rope.Rope(5e5, rope.Llama3(8.0, 1.0, 4.0, 16))),
    (rope.Rope(1e4), rope.Rope(1e4, rope.Linear(2.0))),
  )
  def test_states_follow(self, *rotaries):
    found = []
    for rotary in rotaries:
      config = decoder.Config(
        vocab_size=11, width=8, layers=1, heads=2, kv_heads=1, head_dim=4,
        mlp_width=8, rotary=rotary,
      )  # fmt: skip
      params = dense.params(config)
      prompts, response = dense.inputs(config, [20], 20, group=1, size=3)
      x = decoder.Model(config).hidden(params, prompts, response)
      wanted = dense.responses(config, params, prompts, response)
      np.testing.assert_allclose(x, wanted, atol=1e-5)
      found.append(x)
    self.assertGreater(float(jnp.abs(found[0] - found[1]).max()), 1e-3)
