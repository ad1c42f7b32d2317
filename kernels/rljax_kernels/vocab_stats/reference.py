"""Naive vocabulary statistics: the oracle, with `[N, V]` logits."""

import jax
import jax.numpy as jnp


def logits(hidden, unembed, temperature, *, softcap=None, valid=None):
  """Returns float32 logits [N, V]; ids at or past `valid` are -inf.

  Args:
    hidden: [N, D].
    unembed: [V, D].
    temperature: scalar or [N].
    softcap: None or c, for c * tanh(x / c) before the temperature.
    valid: None or the number of real ids; the rest of V is padding.
  """
  z = jnp.einsum(
    'nd,vd->nv', hidden, unembed, preferred_element_type=jnp.float32
  )
  if softcap is not None:
    z = softcap * jnp.tanh(z / softcap)
  z = z / jnp.broadcast_to(temperature, z.shape[:1])[:, None]
  if valid is not None:
    z = jnp.where(jnp.arange(z.shape[1])[None] < valid, z, -jnp.inf)
  return z


def vocab_stats(hidden, unembed, targets, temperature, **options):
  """Returns logp, lse and entropy, each f32 [N], in nats."""
  z = logits(hidden, unembed, temperature, **options)
  lse = jax.nn.logsumexp(z, axis=-1)
  chosen = jnp.take_along_axis(z, targets[:, None], axis=1)[:, 0]
  p = jnp.exp(z - lse[:, None])
  entropy = lse - jnp.sum(p * jnp.where(p > 0, z, 0.0), axis=-1)
  return {'logp': chosen - lse, 'lse': lse, 'entropy': entropy}
