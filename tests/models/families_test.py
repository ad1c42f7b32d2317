"""Configs and weights of Llama and Qwen models.

`tests/data/make_llama_golden.py` made the logits they are compared with.
"""

import json
import pathlib

from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rljax.core import types
from rljax.models import decoder, families, rope
from rljax.models.convert import gguf, smollm2

DATA = pathlib.Path(__file__).parents[1] / 'data'
GOLDEN = dict(np.load(DATA / 'families.npz'))
KINDS = ('llama', 'qwen2', 'qwen3')


def golden(kind):
  """Returns the config and weights of a random model."""
  prefix = f'{kind}/weights/'
  weights = {
    name.removeprefix(prefix): value
    for name, value in GOLDEN.items()
    if name.startswith(prefix)
  }
  return json.loads(str(GOLDEN[f'{kind}/config'])), weights


def logits(config, params, ids, prompt=1):
  """Returns logits [B, T - prompt + 1, V] after ids [B, T] from the prompt."""
  model, count = decoder.Model(config), len(ids)
  prompts = types.Prompts(
    tokens=jnp.asarray(ids[:, :prompt]),
    length=jnp.full(count, prompt),
    uid=jnp.arange(count),
  )
  # The last position predicts one more token; which one does not matter.
  response = np.pad(ids[:, prompt:], ((0, 0), (0, 1)))
  hidden = jax.jit(model.hidden)(params, prompts, response)
  return np.asarray(hidden @ model.head(params, jnp.ones(count)).weight.T)


class LogitsTest(parameterized.TestCase):
  @parameterized.product(kind=KINDS, prompt=(1, 7))
  def test_random_models_equal_transformers(self, kind, prompt):
    fields, weights = golden(kind)
    config = families.config_from_hf(fields)
    params = families.params_from_hf(config, weights)
    found = logits(config, params, GOLDEN['ids'], prompt)
    wanted = GOLDEN[f'{kind}/logits'][:, prompt - 1 :]
    # Rounding: logits are up to 5, and either program adds up some 100 terms.
    np.testing.assert_allclose(found, wanted, atol=2e-5, rtol=0)

  def test_a_gguf_file_equals_transformers(self):
    fields, weights = smollm2.parameters(gguf.read(DATA / 'tiny_llama.gguf'))
    config = families.config_from_hf(fields)
    params = families.params_from_hf(config, weights)
    found = logits(config, params, GOLDEN['ids'])
    # Weights of size 1 make scores of some 100 in its attention: rounding one
    # by 1e-5 moves a logit of 36 by as many parts.
    np.testing.assert_allclose(found, GOLDEN['tiny/logits'], atol=1e-3, rtol=0)

  @parameterized.parameters(
    ('llama', 'rope_scaling', None),
    ('qwen3', 'rms_norm_eps', 1e-2),
    ('qwen3', 'rope_theta', 1e4),
  )
  def test_every_field_matters(self, kind, name, value):
    fields, weights = golden(kind)
    config = families.config_from_hf({**fields, name: value})
    params = families.params_from_hf(config, weights)
    gap = logits(config, params, GOLDEN['ids']) - GOLDEN[f'{kind}/logits']
    self.assertGreater(np.abs(gap).max(), 0.01)


class ConfigTest(parameterized.TestCase):
  # Counts as the model cards give them, rounded there to one or two digits.
  @parameterized.parameters(
    ('llama3-8b', 8_030_261_248),
    ('llama3.1-8b', 8_030_261_248),
    ('llama3.2-1b', 1_235_814_400),
    ('qwen2.5-0.5b', 494_032_768),
    ('qwen3-0.6b', 596_049_920),
    ('qwen3-8b', 8_190_735_360),
    ('qwen3-32b', 32_762_123_264),
  )
  def test_published_sizes(self, name, size):
    params = decoder.Model(families.published(name)).abstract()
    leaves = jax.tree.leaves(params)
    self.assertEqual(sum(int(np.prod(x.shape)) for x in leaves), size)
    self.assertEqual({str(x.dtype) for x in leaves}, {'bfloat16'})

  def test_published_rotations(self):
    self.assertEqual(families.published('qwen3-4b').rotary, rope.Rope(1e6))
    scaling = rope.Llama3(32.0, 1.0, 4.0, 8192)
    self.assertEqual(
      families.published('llama3.2-3b').rotary, rope.Rope(5e5, scaling)
    )
    with self.assertRaisesRegex(ValueError, "'qwen4' is not one of llama3-8b"):
      families.published('qwen4')

  def test_new_and_old_forms_of_rope_are_equal(self):
    fields, _ = golden('llama')
    base, scaling = fields.pop('rope_theta'), fields.pop('rope_scaling')
    old = {**fields, 'rope_theta': base, 'rope_scaling': scaling}
    new = {**fields, 'rope_parameters': {'rope_theta': base, **scaling}}
    found = families.config_from_hf(new)
    self.assertEqual(found, families.config_from_hf(old))
    self.assertEqual(found.rotary.scaling, rope.Llama3(8.0, 1.0, 4.0, 128))

  def test_legacy_name_of_linear_scaling(self):
    fields = {**golden('llama')[0], 'rope_scaling': {'type': 'linear'}}
    with self.assertRaisesRegex(ValueError, 'The config has no factor'):
      families.config_from_hf(fields)
    fields['rope_scaling']['factor'] = 4.0
    config = families.config_from_hf(fields)
    self.assertEqual(config.rotary, rope.Rope(500.0, rope.Linear(4.0)))

  def test_head_dim_of_llama_is_its_width_over_heads(self):
    fields = {**golden('llama')[0], 'head_dim': None}
    self.assertEqual(families.config_from_hf(fields).head_dim, 4)
    fields['hidden_size'] = 18
    with self.assertRaisesRegex(ValueError, 'no multiple of 4 heads'):
      families.config_from_hf(fields)

  @parameterized.parameters(
    ('model_type', 'gemma3', r"'gemma3' is not one of \['llama', 'qwen2'"),
    ('hidden_act', 'gelu', "hidden_act='gelu': only 'silu'"),
    ('attention_bias', True, 'attention_bias=True: only False'),
    ('mlp_bias', True, 'mlp_bias=True'),
    ('use_sliding_window', True, 'use_sliding_window=True'),
    ('layer_types', ['sliding_attention'], "layer_types: .'sliding_attention"),
    ('rope_scaling', {'rope_type': 'yarn'}, "'yarn' is not one of default"),
    ('rope_scaling', {'partial_rotary_factor': 0.5}, 'partial_rotary_factor'),
    ('quantization_config', {'bits': 4}, 'quantization_config='),
    ('num_hidden_layers', None, 'The config has no num_hidden_layers'),
    ('head_dim', None, 'The config has no head_dim'),
    ('rope_theta', None, 'The config has no rope_theta'),
  )
  def test_what_the_decoder_lacks_is_refused(self, name, value, message):
    fields, _ = golden('qwen3')
    with self.assertRaisesRegex(ValueError, message):
      families.config_from_hf({**fields, name: value})


class ParamsTest(parameterized.TestCase):
  @parameterized.parameters(*KINDS)
  def test_there_and_back(self, kind):
    fields, weights = golden(kind)
    config = families.config_from_hf(fields)
    found = families.params_to_hf(
      config, families.params_from_hf(config, weights)
    )
    if config.tied:
      del weights['lm_head.weight']
    self.assertEqual(set(found), set(weights))
    for name, value in weights.items():
      np.testing.assert_array_equal(found[name], value, err_msg=name)

  @parameterized.parameters(
    ({'model.norm.weight': None}, r'lacks model\.norm\.weight\.'),
    ({'model.norm.bias': np.ones(16)}, r'has model\.norm\.bias, which have no'),
    ({'model.norm.weight': np.ones(8)}, r'model\.norm\.weight .*\(16,\), not'),
    ({'lm_head.weight': np.ones((40, 16))}, r'has lm_head\.weight, which'),
    (
      {'model.layers.1.self_attn.q_proj.bias': None},
      r'lacks model\.layers\.1\.self_attn\.q_proj\.bias',
    ),
    (
      {'model.layers.1.mlp.up_proj.weight': np.ones((16, 24))},
      r'up_proj\.weight should have shape \(24, 16\), not \(16, 24\)',
    ),
  )
  def test_other_tensors_are_refused(self, change, message):
    fields, weights = golden('qwen2')
    weights = {k: v for k, v in (weights | change).items() if v is not None}
    config = families.config_from_hf(fields)
    with self.assertRaisesRegex(ValueError, message):
      families.params_from_hf(config, weights)

  def test_bfloat16(self):
    fields, weights = golden('qwen3')
    config = families.config_from_hf(fields, 'bfloat16')
    params = families.params_from_hf(config, weights)
    found = params['layers']['mlp']['up']['kernel'][1]
    wanted = jnp.asarray(weights['model.layers.1.mlp.up_proj.weight'].T)
    np.testing.assert_array_equal(found, wanted.astype(jnp.bfloat16))


@pytest.mark.slow
def test_smollm2_equals_transformers():
  fields, weights = smollm2.parameters(gguf.read(smollm2.fetch()))
  config = families.config_from_hf(fields)
  params = families.params_from_hf(config, weights)
  wanted = dict(np.load(DATA / 'smollm2_logits.npz'))
  for i in range(2):
    found = logits(config, params, wanted[f'ids_{i}'][None])[0]
    for name, value in {
      'logits': found[:, wanted['vocabulary']],
      'logsumexp': jax.nn.logsumexp(found, axis=-1),
    }.items():
      np.testing.assert_allclose(value, wanted[f'{name}_{i}'], atol=1e-3)
    np.testing.assert_array_equal(found.argmax(-1), wanted[f'argmax_{i}'])
