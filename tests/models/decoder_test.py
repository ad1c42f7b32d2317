"""Tests of the decoder against a dense one in float64."""

import dataclasses
import functools

from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.models import decoder, rope, rules
from tests.models import dense

# Each variant compiles anew: the sizes are as small as they can differ.
BASE = decoder.Config(
  vocab_size=23, width=16, layers=2, heads=4, kv_heads=2, head_dim=6,
  mlp_width=20, rotary=rope.Rope(100.0),
)  # fmt: skip
change = functools.partial(dataclasses.replace, BASE)
VARIANTS = {
  'grouped': BASE,
  'one_key_head': change(kv_heads=1),
  'all_key_heads': change(kv_heads=4),
  'qk_norm': change(qk_norm=True),
  'biases': change(qkv_bias=True),
  'untied': change(tied=False),
  'scaled': change(
    rotary=rope.Rope(100.0, rope.Llama3(8.0, 1.0, 4.0, 64)),
    norm_eps=1e-3,
  ),
  'all': change(
    layers=3, kv_heads=1, qk_norm=True, qkv_bias=True, tied=False,
    rotary=rope.Rope(50.0, rope.Linear(2.0)),
  ),
}  # fmt: skip
# Float32 through three layers of width 16; states have size 1.
CLOSE = 1e-5


@functools.cache
def made(config):
  """Returns a model and parameters in which no bias is 0, no scale 1."""
  model = decoder.Model(config)
  return model, dense.params(config)


@functools.cache
def compiled(config):
  return jax.jit(decoder.Model(config).hidden)


@functools.partial(jax.jit, static_argnums=(0, 1))
def decode_one(config, start, params, *state):
  """Runs `Model.decode` on (token, step, live, closed, prompts, prompt)."""
  token, step, live, closed, prompts, prompt = state
  layers = decoder.unstack(params['layers'], config.layers)
  return decoder.Model(config).decode(
    params, layers, token, step, live, closed, start, prompts, prompt
  )


def decode(config, params, prompts, response, spans):
  """Returns states [B, T, D] decoded token by token over cache segments."""
  model = decoder.Model(config)
  rows, size = response.shape
  group = rows // prompts.uid.shape[0]
  prompt = jax.jit(model.prefill)(params, prompts)
  closed, out = [[] for _ in prompt], []
  tokens = jnp.concatenate(
    [jnp.repeat(prompts.tokens[:, -1:], group, 0), response], axis=1
  )
  start = 0
  for span in spans:
    live = model.empty(rows, span)
    for step in range(start, min(start + span, size)):
      state = tokens[:, step], step, live, closed, prompts, prompt
      x, live = decode_one(config, start, params, *state)
      out.append(x)
    closed = [[*c, new] for c, new in zip(closed, live, strict=True)]
    start += span
  return jnp.stack(out, axis=1)


class EqualTest(parameterized.TestCase):
  """hidden = decode = dense, for prompts of different lengths."""

  @parameterized.parameters(*VARIANTS)
  def test_variants(self, name):
    config = VARIANTS[name]
    model, params = made(config)
    prompts, response = dense.inputs(config, [6, 3, 1], 6, group=2, size=5)
    wanted = dense.responses(config, params, prompts, response)
    found = compiled(config)(params, prompts, response)
    np.testing.assert_allclose(found, wanted, atol=CLOSE)
    if name == 'all':
      found = decode(config, params, prompts, response, (2, 3))
      np.testing.assert_allclose(found, wanted, atol=CLOSE)
    weight = params['embed' if config.tied else 'unembed']
    head = model.head(params, jnp.ones(6))
    np.testing.assert_array_equal(head.weight, weight)

  @parameterized.parameters(
    # (lengths, width of the prompts, group, size of the responses)
    ([1, 1], 1, 3, 4),
    ([2, 5], 7, 2, 1),
  )
  def test_shapes_at_the_edge(self, lengths, width, group, size):
    _, params = made(BASE)
    prompts, response = dense.inputs(BASE, lengths, width, group, size)
    wanted = dense.responses(BASE, params, prompts, response)
    found = compiled(BASE)(params, prompts, response)
    np.testing.assert_allclose(found, wanted, atol=CLOSE)
    found = decode(BASE, params, prompts, response, (size,))
    np.testing.assert_allclose(found, wanted, atol=CLOSE)

  def test_bfloat16(self):
    config = change(dtype='bfloat16')
    _, params = made(config)
    for leaf in jax.tree.leaves(params):
      self.assertEqual(leaf.dtype, jnp.bfloat16)
    prompts, response = dense.inputs(config, [6, 3], 6, group=2, size=5)
    found = compiled(config)(params, prompts, response)
    self.assertEqual(found.dtype, jnp.bfloat16)
    wanted = dense.responses(config, params, prompts, response)
    gap = np.abs(np.asarray(found, np.float64) - wanted)
    # 8 bits, a few roundings per layer; a mistake would be of size 1.
    self.assertLess(gap.mean(), 0.02)
    self.assertLess(gap.max(), 0.1)
    slow = decode(config, params, prompts, response, (5,))
    gap = np.abs(np.asarray(slow, np.float64) - wanted)
    self.assertLess(gap.max(), 0.1)


class ReadsTest(parameterized.TestCase):
  """Which inputs a state depends on."""

  def setUp(self):
    super().setUp()
    self.prompts, self.response = dense.inputs(BASE, [5, 3], 6, 2, size=4)
    self.params = made(BASE)[1]
    self.found = self.run_with()

  def run_with(self, tokens=None, response=None):
    prompts = self.prompts
    if tokens is not None:
      prompts = dataclasses.replace(prompts, tokens=tokens)
    response = self.response if response is None else response
    return np.asarray(compiled(BASE)(self.params, prompts, response))

  @parameterized.parameters(*range(4))
  def test_a_response_token_moves_only_what_follows(self, t):
    other = (self.response[1, t] + 1) % BASE.vocab_size
    moved = self.run_with(response=self.response.at[1, t].set(other))
    gap = np.abs(moved - self.found).max(axis=2)
    np.testing.assert_array_equal(gap[[0, 2, 3]], 0)
    np.testing.assert_array_equal(gap[1, : t + 1], 0)
    self.assertTrue((gap[1, t + 1 :] > 1e-4).all())

  def test_a_prompt_token_moves_its_rows(self):
    tokens = self.prompts.tokens
    for column in (3, 5):  # the first and the last token of prompt 1
      changed = tokens.at[1, column].set((tokens[1, column] + 1) % 23)
      gap = np.abs(self.run_with(tokens=changed) - self.found).max(axis=2)
      np.testing.assert_array_equal(gap[:2], 0)
      self.assertTrue((gap[2:] > 1e-4).all())

  def test_padding_is_not_read(self):
    tokens = self.prompts.tokens.at[0, :1].set(7).at[1, :3].set(11)
    np.testing.assert_array_equal(self.run_with(tokens=tokens), self.found)

  def test_padding_does_not_move_positions(self):
    wide = jnp.pad(self.prompts.tokens, ((0, 0), (5, 0)), constant_values=9)
    # The sums over keys are split differently: rounding alone.
    np.testing.assert_allclose(self.run_with(wide), self.found, atol=3e-6)


class GradientTest(parameterized.TestCase):
  def test_against_differences_in_float64(self):
    config = VARIANTS['all']
    _, params = made(config)
    prompts, response = dense.inputs(config, [5, 2], 5, group=2, size=4)
    r = np.random.default_rng(1)
    toward = r.normal(size=(4, 4, config.width))
    model = decoder.Model(config)

    @jax.jit
    @jax.grad
    def gradients(p):
      return jnp.sum(model.hidden(p, prompts, response) * toward)

    def scores(p):
      return np.sum(dense.responses(config, p, prompts, response) * toward)

    grads = gradients(params)
    wide = jax.tree.map(np.float64, params)
    for seed in range(3):
      noise = jax.tree.map(np.float64, dense.params(config, seed=seed + 5))
      ahead, behind = (
        scores(jax.tree.map(lambda x, n, e=e: x + e * n, wide, noise))
        for e in (1e-5, -1e-5)
      )
      pairs = zip(*map(jax.tree.leaves, (grads, noise)), strict=True)
      slope = sum(np.vdot(g, n) for g, n in pairs)
      wanted = (ahead - behind) / 2e-5
      np.testing.assert_allclose(slope, wanted, rtol=1e-4, atol=1e-3)

  def test_fresh_parameters_learn_in_every_leaf(self):
    model = decoder.Model(change(qk_norm=True, qkv_bias=True, tied=False))
    prompts, response = dense.inputs(BASE, [5, 2], 5, group=2, size=4)

    @jax.jit
    def gradients(params):
      def loss(p):
        x = model.hidden(p, prompts, response).reshape(16, -1)
        z = x @ model.head(p, jnp.ones(4)).weight.T
        return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(z)))

      return jax.grad(loss)(params)

    found = gradients(jax.jit(model.init)(jax.random.key(0)))
    for path, leaf in jax.tree_util.tree_leaves_with_path(found):
      name = rules.path_name(path)
      size = np.abs(leaf).reshape(len(leaf), -1).max(axis=1)
      smallest = size.min() if 'layers' in name else size.max()
      self.assertGreater(smallest, 1e-6, name)
      if 'mlp/' in name:
        self.assertGreater(smallest, 1e-4, name)

  @pytest.mark.slow
  def test_remat_changes_memory_alone(self):
    prompts, response = dense.inputs(BASE, [9, 4], 9, group=2, size=24)
    _, params = made(BASE)
    grads, memory = {}, {}
    for name in decoder.REMAT:
      model = decoder.Model(change(remat=name))

      def total(p, model=model):
        return jnp.sum(jnp.sin(model.hidden(p, prompts, response)))

      run = jax.jit(jax.grad(total)).lower(params).compile()
      memory[name] = run.memory_analysis().temp_size_in_bytes
      grads[name] = run(params)
    for name in ('dots', 'full'):
      pairs = zip(
        *map(jax.tree.leaves, (grads[name], grads['none'])), strict=True
      )
      for x, y in pairs:
        scale = max(float(jnp.abs(y).max()), 1.0)
        np.testing.assert_allclose(x, y, atol=3e-6 * scale)
    self.assertLess(memory['dots'], 0.9 * memory['none'])
    self.assertLess(memory['full'], 0.9 * memory['dots'])


class ConfigTest(parameterized.TestCase):
  @parameterized.parameters(
    (dict(heads=4, kv_heads=3), 'heads=4.*kv_heads=3'),
    (dict(remat='some'), "'some'"),
    (dict(dtype='float16'), "'float16'"),
  )
  def test_impossible_ones_are_named(self, changes, message):
    with self.assertRaisesRegex(ValueError, message):
      change(**changes)

  @parameterized.parameters(*VARIANTS)
  def test_shapes_are_known_without_arrays(self, name):
    model, params = made(VARIANTS[name])
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), params)
    found = jax.tree.map(lambda x: (x.shape, x.dtype), model.abstract())
    self.assertEqual(found, shapes)
    self.assertEqual('unembed' in params, not VARIANTS[name].tied)
