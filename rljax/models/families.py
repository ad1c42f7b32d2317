"""Llama and Qwen models: their configs and weights in this library's terms.

Configs are read from the fields of Hugging Face's `config.json`, weights from
the tensors of the checkpoint beside it. What the decoder cannot compute is
refused by name; nothing is assumed.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any

import jax
import numpy as np

from rljax.core.types import Params
from rljax.models import decoder, rope, rules


@dataclasses.dataclass(frozen=True)
class Family:
  """What is fixed by the name of an architecture, not by its fields."""

  qkv_bias: bool = False
  qk_norm: bool = False


FAMILIES = {
  'llama': Family(),
  'qwen2': Family(qkv_bias=True),
  'qwen3': Family(qk_norm=True),
}

# Fields that change what a model computes, and the value the decoder knows.
_ONLY: Mapping[str, Any] = {
  'hidden_act': 'silu',
  'attention_bias': False,
  'mlp_bias': False,
  'use_sliding_window': False,
  'partial_rotary_factor': 1,
  'attention_dropout': 0,
  'quantization_config': None,
}

_SIZES = {
  'vocab_size': 'vocab_size',
  'width': 'hidden_size',
  'layers': 'num_hidden_layers',
  'heads': 'num_attention_heads',
  'kv_heads': 'num_key_value_heads',
  'mlp_width': 'intermediate_size',
}


def config_from_hf(
  fields: Mapping[str, Any], dtype: str = 'float32'
) -> decoder.Config:
  """Returns the architecture that a `config.json` describes.

  Args:
    fields: of the file. Limits of length and ids of special tokens are not
      part of the architecture and are not read.
    dtype: of parameters and activations.

  Raises:
    ValueError: if a field is missing or asks for what the decoder lacks.
  """
  kind = fields.get('model_type')
  if kind not in FAMILIES:
    raise ValueError(f'model_type={kind!r} is not one of {sorted(FAMILIES)}.')
  # Newer files hold rope_theta and rope_scaling as one field.
  inner = fields.get('rope_parameters') or fields.get('rope_scaling') or {}
  fields = {**fields, **inner}
  for name, only in _ONLY.items():
    if fields.get(name) not in (None, only):
      raise ValueError(f'{name}={fields[name]!r}: only {only!r} is known.')
  if odd := set(fields.get('layer_types') or ()) - {'full_attention'}:
    raise ValueError(f'layer_types: {sorted(odd)} is not known.')
  sizes = {ours: _required(fields, name) for ours, name in _SIZES.items()}
  return decoder.Config(
    **sizes,
    head_dim=_head_dim(fields),
    rotary=rope.Rope(
      base=float(_required(fields, 'rope_theta')), scaling=_scaling(fields)
    ),
    norm_eps=_required(fields, 'rms_norm_eps'),
    tied=fields.get('tie_word_embeddings', False),
    dtype=dtype,
    **dataclasses.asdict(FAMILIES[kind]),
  )


def _required(fields: Mapping[str, Any], name: str) -> Any:
  if fields.get(name) is None:
    raise ValueError(f'The config has no {name}.')
  return fields[name]


def _head_dim(fields: Mapping[str, Any]) -> int:
  """Returns the size of a head; only Qwen3's is not the width over heads."""
  if fields.get('head_dim') is not None or fields['model_type'] == 'qwen3':
    return _required(fields, 'head_dim')
  width, heads = fields['hidden_size'], fields['num_attention_heads']
  if width % heads:
    raise ValueError(f'hidden_size={width} is no multiple of {heads} heads.')
  return width // heads


def _scaling(fields: Mapping[str, Any]) -> rope.Llama3 | rope.Linear | None:
  kind = fields.get('rope_type', fields.get('type', 'default'))
  if kind == 'default':
    return None
  if kind == 'linear':
    return rope.Linear(_required(fields, 'factor'))
  if kind == 'llama3':
    return rope.Llama3(
      factor=_required(fields, 'factor'),
      low_freq_factor=_required(fields, 'low_freq_factor'),
      high_freq_factor=_required(fields, 'high_freq_factor'),
      original_length=_required(fields, 'original_max_position_embeddings'),
    )
  raise ValueError(
    f'rope_scaling of type {kind!r} is not one of default, linear, llama3.'
  )


_QWEN2 = {
  'model_type': 'qwen2',
  'vocab_size': 151936,
  'rope_theta': 1e6,
  'rms_norm_eps': 1e-6,
}
_QWEN3 = {**_QWEN2, 'model_type': 'qwen3', 'head_dim': 128}
_LLAMA3 = {
  'model_type': 'llama',
  'vocab_size': 128256,
  'rope_theta': 5e5,
  'rms_norm_eps': 1e-5,
}


def _stretched(factor: float) -> dict[str, Any]:
  """Returns Llama 3 with the frequency scaling of its later releases."""
  scaling = {
    'rope_type': 'llama3',
    'factor': factor,
    'low_freq_factor': 1.0,
    'high_freq_factor': 4.0,
    'original_max_position_embeddings': 8192,
  }
  return {**_LLAMA3, 'rope_scaling': scaling}


def _sized(
  family: Mapping[str, Any],
  width: int,
  mlp_width: int,
  layers: int,
  heads: int,
  kv_heads: int,
  tied: bool = False,
) -> dict[str, Any]:
  return {
    **family,
    'hidden_size': width,
    'intermediate_size': mlp_width,
    'num_hidden_layers': layers,
    'num_attention_heads': heads,
    'num_key_value_heads': kv_heads,
    'tie_word_embeddings': tied,
  }


# Of released models, as their `config.json` states them.
PUBLISHED: Mapping[str, Mapping[str, Any]] = {
  'llama3-8b': _sized(_LLAMA3, 4096, 14336, 32, 32, 8),
  'llama3.1-8b': _sized(_stretched(8.0), 4096, 14336, 32, 32, 8),
  'llama3.1-70b': _sized(_stretched(8.0), 8192, 28672, 80, 64, 8),
  'llama3.2-1b': _sized(_stretched(32.0), 2048, 8192, 16, 32, 8, True),
  'llama3.2-3b': _sized(_stretched(32.0), 3072, 8192, 28, 24, 8, True),
  'qwen2.5-0.5b': _sized(_QWEN2, 896, 4864, 24, 14, 2, True),
  'qwen3-0.6b': _sized(_QWEN3, 1024, 3072, 28, 16, 8, True),
  'qwen3-1.7b': _sized(_QWEN3, 2048, 6144, 28, 16, 8, True),
  'qwen3-4b': _sized(_QWEN3, 2560, 9728, 36, 32, 8, True),
  'qwen3-8b': _sized(_QWEN3, 4096, 12288, 36, 32, 8),
  'qwen3-14b': _sized(_QWEN3, 5120, 17408, 40, 40, 8),
  'qwen3-32b': _sized(_QWEN3, 5120, 25600, 64, 64, 8),
}


def published(name: str, dtype: str = 'bfloat16') -> decoder.Config:
  """Returns the config of a released model, a key of `PUBLISHED`.

  Raises:
    ValueError: if there is none of that name.
  """
  if name not in PUBLISHED:
    raise ValueError(f'{name!r} is not one of {", ".join(PUBLISHED)}.')
  return config_from_hf(PUBLISHED[name], dtype)


# From a path in the parameters to the name of a tensor. Kernels [in, out] are
# stored transposed, those of all layers as one array.
_OUTER = {
  'embed': 'model.embed_tokens.weight',
  'norm/scale': 'model.norm.weight',
  'unembed': 'lm_head.weight',
}
_INNER = {
  'attention_norm': 'input_layernorm',
  'attention/q': 'self_attn.q_proj',
  'attention/k': 'self_attn.k_proj',
  'attention/v': 'self_attn.v_proj',
  'attention/o': 'self_attn.o_proj',
  'attention/q_norm': 'self_attn.q_norm',
  'attention/k_norm': 'self_attn.k_norm',
  'mlp_norm': 'post_attention_layernorm',
  'mlp/gate': 'mlp.gate_proj',
  'mlp/up': 'mlp.up_proj',
  'mlp/down': 'mlp.down_proj',
}
_LEAVES = {'scale': 'weight', 'kernel': 'weight', 'bias': 'bias'}
_STACK = 'layers/'


def tensor_names(path: str, layers: int) -> list[str]:
  """Returns the tensors that make up a leaf, one or one per layer.

  Args:
    path: of the leaf, 'layers/attention/q/kernel'.
    layers: of the model.
  """
  if path in _OUTER:
    return [_OUTER[path]]
  module, leaf = path.removeprefix(_STACK).rsplit('/', 1)
  name = f'{_INNER[module]}.{_LEAVES[leaf]}'
  return [f'model.layers.{i}.{name}' for i in range(layers)]


def params_from_hf(
  config: decoder.Config, tensors: Mapping[str, np.ndarray]
) -> Params:
  """Returns the tensors of a checkpoint as parameters on the host.

  Args:
    config: of the model.
    tensors: by name, read one at a time, so that a mapping may load each when
      it is asked for. A tied model may repeat its embedding as the head.

  Returns:
    A nested dict of arrays of `config.dtype`; where they go is up to the
    caller.

  Raises:
    ValueError: if a tensor is missing, has another shape, or has no place.
  """
  shapes, tree = jax.tree_util.tree_flatten_with_path(
    decoder.Model(config).abstract()
  )
  leaves = [(rules.path_name(path), like) for path, like in shapes]
  _check_names(config, [path for path, _ in leaves], tensors)
  built = [_stacked(config, path, like, tensors) for path, like in leaves]
  return jax.tree.unflatten(tree, built)


def _check_names(config, paths, tensors) -> None:
  wanted = {n for path in paths for n in tensor_names(path, config.layers)}
  extra = set(tensors) - wanted
  embed, head = _OUTER['embed'], _OUTER['unembed']
  if config.tied and head in extra and embed in tensors:
    if np.array_equal(tensors[embed], tensors[head]):
      extra -= {head}
  for problem, names in (('lacks', wanted - set(tensors)), ('has', extra)):
    if names:
      shown, rest = sorted(names)[:5], len(names) - 5
      more = f' and {rest} more' if rest > 0 else ''
      place = '' if problem == 'lacks' else ', which have no place in the model'
      raise ValueError(
        f'The checkpoint {problem} {", ".join(shown)}{more}{place}.'
      )


def _stacked(config, path: str, like, tensors) -> np.ndarray:
  """Returns one leaf, made of one tensor or of one per layer."""
  out = np.empty(like.shape, like.dtype)
  parts = out if path.startswith(_STACK) else out[None]
  for i, name in enumerate(tensor_names(path, config.layers)):
    target = parts[i].T if path.endswith('kernel') else parts[i]
    tensor = tensors[name]
    if tensor.shape != target.shape:
      raise ValueError(
        f'{name} should have shape {target.shape}, not {tensor.shape}.'
      )
    target[...] = tensor
  return out


def params_to_hf(
  config: decoder.Config, params: Params
) -> dict[str, np.ndarray]:
  """Returns parameters as the tensors of a checkpoint, on the host."""
  tensors = {}
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    name, whole = rules.path_name(path), np.asarray(leaf)
    parts = whole if name.startswith(_STACK) else whole[None]
    parts = parts.swapaxes(1, 2) if name.endswith('kernel') else parts
    names = tensor_names(name, config.layers)
    tensors |= dict(zip(names, parts, strict=True))
  return tensors
