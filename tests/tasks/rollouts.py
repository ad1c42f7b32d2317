"""Rollouts of given texts, and a character tokenizer, for tests."""

import jax.numpy as jnp
import numpy as np

from rljax.core import types
from rljax.data import prompts

STOP = 1


class Characters:
  """One token per character; 0 pads and 1 stops."""

  pad_id = 0
  bos_id = None
  stop_ids = (STOP,)

  def __init__(self, alphabet):
    self.alphabet = alphabet
    self.vocab_size = len(alphabet) + 2

  def encode(self, text):
    return [self.alphabet.index(c) + 2 for c in text]

  def decode(self, ids):
    return ''.join(self.alphabet[i - 2] for i in ids)

  def spec(self):
    return {}


def rollout(task, examples, texts, tokenizer, width, stopped=None):
  """Returns a rollout whose row b is `texts[b]`, an answer to `examples[b]`.

  Rows with `stopped[b]` false end without a stop token.
  """
  batch = prompts.pack(examples, tokenizer, 64, task)
  n = len(texts)
  stopped = [True] * n if stopped is None else stopped
  response = np.zeros((n, width), np.int32)
  length = np.zeros(n, np.int32)
  for row, text in enumerate(texts):
    ids = tokenizer.encode(text) + [STOP] * stopped[row]
    response[row, : len(ids)] = ids
    length[row] = len(ids)
  zeros = jnp.zeros((n, width), jnp.float32)
  index = jnp.arange(n)
  return types.Rollout(
    prompts=batch.prompts,
    prompt_of=index,
    response=jnp.asarray(response),
    length=jnp.asarray(length),
    mask=(jnp.arange(width)[None] < length[:, None]).astype(jnp.float32),
    logp=zeros,
    logp_full=zeros,
    logp_unit=zeros,
    unit=zeros.astype(jnp.int32),
    seat=index * 0,
    temperature=jnp.ones(n),
    groups=types.Groups(index=index[:, None], valid=jnp.ones((n, 1), bool)),
    stop=jnp.asarray([int(types.Stop.TOKEN) * s for s in stopped]),
    version=zeros.astype(jnp.int32),
    data={k: jnp.asarray(v) for k, v in batch.data.items()},
  )
