"""Rollouts of given texts, for tests of device verifiers."""

import jax.numpy as jnp
import numpy as np

from rljax.core import types
from rljax.data import prompts


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
    ids = tokenizer.encode(text) + [*tokenizer.stop_ids] * stopped[row]
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
