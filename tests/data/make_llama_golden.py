"""Makes the files of this folder that other libraries computed.

  pip install torch==2.13.0 transformers==5.24.0 accelerate gguf==0.19.0 regex
  python -m tests.data.make_llama_golden SmolLM2-135M-Instruct.Q4_1.gguf

* tiny_llama.gguf: two random layers in every kind of tensor, and the first
  320 tokens of SmolLM2; written by `gguf`.
* tiny_llama.npz: its weights as `transformers` reads them.
* smollm2_logits.npz: logits of SmolLM2 by `transformers`, f32.
* smollm2_tokens.json: texts and their ids by the textbook BPE below.
* families.npz: configs, weights and logits of random models of each family,
  and the logits of tiny_llama.gguf, by `transformers`, f32.
"""

import copy
import json
import pathlib
import sys

import gguf
import numpy as np
import regex
import torch
import transformers

HERE = pathlib.Path(__file__).parent
VOCAB, WIDTH, INNER, HEADS, KV_HEADS, LAYERS = 320, 32, 64, 2, 1, 2
KINDS = ('Q4_1', 'Q8_0', 'F16', 'F32')
PROMPTS = (
  '<|im_start|>user\nWhat is the capital of France?<|im_end|>\n'
  '<|im_start|>assistant\n',
  '3+4=7\n5*6=30\n1+7=8\n2+9=',
)
TEXTS = (
  'What is 17+25?',
  'Q: 1234 * 5 = ?\nA:',
  "It's  two   spaces, don't\ttab\r\n\n end ",
  'été 日本語 🙂 ², ٣',
  '<|im_start|>user\nhi<|im_end|>\n',
  ' leading and trailing ',
  'def f(x):\n    return x**2  # 10%\n',
  '',
)
# The head of Qwen3 is not width / heads; Llama's scaling divides the slowest
# frequencies, keeps the fastest and mixes between: all three occur in 8 pairs.
FAMILY = {
  'vocab_size': 40,
  'hidden_size': 16,
  'intermediate_size': 24,
  'num_hidden_layers': 2,
  'num_attention_heads': 4,
  'num_key_value_heads': 2,
  'max_position_embeddings': 64,
  'rms_norm_eps': 1e-5,
  'tie_word_embeddings': False,
}
FAMILIES = {
  'qwen2': {'rope_theta': 1e4, 'tie_word_embeddings': True},
  'qwen3': {'rope_theta': 1e6, 'head_dim': 8, 'rms_norm_eps': 1e-6},
  'llama': {
    'rope_theta': 500.0,
    'head_dim': 16,
    'rope_scaling': {
      'rope_type': 'llama3',
      'factor': 8.0,
      'low_freq_factor': 1.0,
      'high_freq_factor': 4.0,
      'original_max_position_embeddings': 128,
    },
  },
}
_WORDS = regex.compile(
  r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+"
  r'|\s+(?!\S)|\s+'
)


def fields(path: str) -> dict:
  """Returns the metadata of a file."""
  reader = gguf.GGUFReader(path)
  return {name: field.contents() for name, field in reader.fields.items()}


def byte_names() -> dict[int, str]:
  """Returns how GPT-2 writes each byte."""
  shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
  hidden = [byte for byte in range(256) if byte not in shown]
  names = {byte: chr(byte) for byte in shown}
  return names | {byte: chr(256 + i) for i, byte in enumerate(hidden)}


def merge(pieces: list[str], ranks: dict) -> list[str]:
  """Joins the neighbors of lowest rank until none is left."""
  while True:
    pairs = list(zip(pieces, pieces[1:], strict=False))
    best = min(pairs, key=lambda pair: ranks.get(pair, np.inf), default=None)
    if best not in ranks:
      return pieces
    joined, rest = [], pieces
    while rest:
      size = 2 if tuple(rest[:2]) == best else 1
      joined.append(''.join(rest[:size]))
      rest = rest[size:]
    pieces = joined


def words(text: str) -> list[str]:
  """Splits a text: digits alone, then as GPT-2 does."""
  parts = regex.split(r'(\p{N})', text)
  return [word for part in parts for word in _WORDS.findall(part)]


def encode(text: str, metadata: dict) -> list[int]:
  """Returns the ids of a text by plain BPE."""
  tokens = {x: i for i, x in enumerate(metadata['tokenizer.ggml.tokens'])}
  merges = metadata['tokenizer.ggml.merges']
  ranks = {tuple(pair.split(' ')): i for i, pair in enumerate(merges)}
  ids, names = [], byte_names()
  for part in regex.split(r'(<\|im_start\|>|<\|im_end\|>)', text):
    if part in tokens and part.startswith('<|'):
      ids.append(tokens[part])
      continue
    for word in words(part):
      pieces = merge([names[byte] for byte in word.encode()], ranks)
      ids += [tokens[piece] for piece in pieces]
  return ids


def shapes() -> dict[str, tuple[int, ...]]:
  """Returns the tensors of the tiny model."""
  head = WIDTH // HEADS
  layer = {
    'attn_norm': (WIDTH,),
    'attn_q': (WIDTH, WIDTH),
    'attn_k': (KV_HEADS * head, WIDTH),
    'attn_v': (KV_HEADS * head, WIDTH),
    'attn_output': (WIDTH, WIDTH),
    'ffn_norm': (WIDTH,),
    'ffn_gate': (INNER, WIDTH),
    'ffn_up': (INNER, WIDTH),
    'ffn_down': (WIDTH, INNER),
  }
  found = {'token_embd.weight': (VOCAB, WIDTH), 'output_norm.weight': (WIDTH,)}
  for i in range(LAYERS):
    found |= {f'blk.{i}.{x}.weight': shape for x, shape in layer.items()}
  return found


def write_architecture(writer: gguf.GGUFWriter) -> None:
  """Writes what the tiny model is."""
  writer.add_block_count(LAYERS)
  writer.add_context_length(64)
  writer.add_embedding_length(WIDTH)
  writer.add_feed_forward_length(INNER)
  writer.add_head_count(HEADS)
  writer.add_head_count_kv(KV_HEADS)
  writer.add_rope_freq_base(10000.0)
  writer.add_rope_dimension_count(WIDTH // HEADS)
  writer.add_layer_norm_rms_eps(1e-5)
  writer.add_vocab_size(VOCAB)


def write_tokenizer(writer: gguf.GGUFWriter, metadata: dict) -> None:
  """Writes the first tokens of a tokenizer and the merges among them."""
  tokens = metadata['tokenizer.ggml.tokens'][:VOCAB]
  merges = [
    pair
    for pair in metadata['tokenizer.ggml.merges']
    if {*pair.split(' '), pair.replace(' ', '')} <= set(tokens)
  ]
  writer.add_tokenizer_model('gpt2')
  writer.add_tokenizer_pre('smollm')
  writer.add_token_list(tokens)
  writer.add_token_types(metadata['tokenizer.ggml.token_type'][:VOCAB])
  writer.add_token_merges(merges)
  writer.add_bos_token_id(1)
  writer.add_eos_token_id(2)
  writer.add_pad_token_id(2)
  writer.add_add_bos_token(False)
  writer.add_chat_template(metadata['tokenizer.chat_template'])


def write_tiny(path: pathlib.Path, metadata: dict) -> None:
  """Writes the tiny model."""
  writer, rng = gguf.GGUFWriter(path, 'llama'), np.random.default_rng(0)
  write_architecture(writer)
  write_tokenizer(writer, metadata)
  for i, (name, shape) in enumerate(shapes().items()):
    kind = gguf.GGMLQuantizationType[
      KINDS[i % len(KINDS)] if len(shape) > 1 else 'F32'
    ]
    values = rng.normal(size=shape).astype(np.float32)
    writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()


def load(path: pathlib.Path) -> transformers.PreTrainedModel:
  """Returns a model as `transformers` reads it."""
  return transformers.AutoModelForCausalLM.from_pretrained(
    path.parent,
    gguf_file=path.name,
    dtype=torch.float32,
    attn_implementation='eager',
  ).eval()


def reading(model, ids: list[int], vocabulary: np.ndarray) -> dict:
  """Returns a summary of the logits at every position."""
  with torch.no_grad():
    logits = model(torch.tensor([ids])).logits[0].float()
  return {
    'ids': np.asarray(ids, np.int32),
    'logits': logits[:, vocabulary].numpy(),
    'logsumexp': logits.logsumexp(-1).numpy(),
    'argmax': logits.argmax(-1).numpy().astype(np.int32),
  }


def write_logits(path: pathlib.Path, metadata: dict) -> None:
  """Writes the logits of the prompts at 64 tokens of the vocabulary."""
  model, rng = load(path), np.random.default_rng(0)
  size = len(metadata['tokenizer.ggml.tokens'])
  vocabulary = np.sort(rng.choice(size, 64, replace=False)).astype(np.int32)
  arrays = {'vocabulary': vocabulary}
  for i, prompt in enumerate(PROMPTS):
    found = reading(model, encode(prompt, metadata), vocabulary)
    arrays |= {f'{name}_{i}': value for name, value in found.items()}
  np.savez_compressed(HERE / 'smollm2_logits.npz', **arrays)


def random_model(fields: dict) -> transformers.PreTrainedModel:
  """Returns a model whose every weight matters."""
  # A copy, since the package writes into it.
  config = transformers.AutoConfig.for_model(**copy.deepcopy(fields))
  model = transformers.AutoModelForCausalLM.from_config(
    config, dtype=torch.float32, attn_implementation='eager'
  ).eval()
  for weight in model.parameters():
    torch.nn.init.normal_(weight, 1.0 if weight.ndim == 1 else 0.0, 0.3)
  return model


def write_families(path: pathlib.Path) -> None:
  """Writes a random model of each family, and logits of the tiny one."""
  torch.manual_seed(0)
  ids = np.random.default_rng(0).integers(0, FAMILY['vocab_size'], (2, 24))
  models, arrays = {'tiny': load(path)}, {'ids': ids.astype(np.int32)}
  for kind, own in FAMILIES.items():
    fields = {'model_type': kind, **FAMILY, **own}
    models[kind] = random_model(fields)
    arrays[f'{kind}/config'] = np.array(json.dumps(fields))
    for name, weight in models[kind].state_dict().items():
      arrays[f'{kind}/weights/{name}'] = weight.numpy()
  for kind, model in models.items():
    with torch.no_grad():
      logits = model(torch.tensor(ids)).logits
    arrays[f'{kind}/logits'] = logits.numpy()
  np.savez_compressed(HERE / 'families.npz', **arrays)


def main(path: str) -> None:
  """Writes all files."""
  metadata, tiny = fields(path), HERE / 'tiny_llama.gguf'
  write_tiny(tiny, metadata)
  weights = {k: v.numpy() for k, v in load(tiny).state_dict().items()}
  np.savez_compressed(HERE / 'tiny_llama.npz', **weights)
  texts = (*TEXTS, *PROMPTS)
  rows = [{'text': x, 'ids': encode(x, metadata)} for x in texts]
  (HERE / 'smollm2_tokens.json').write_text(json.dumps(rows, indent=1))
  write_logits(pathlib.Path(path), metadata)
  write_families(tiny)


if __name__ == '__main__':
  main(sys.argv[1])
