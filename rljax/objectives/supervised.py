"""Losses of given responses, token by token.

Each takes `(logp, mask)`, f32 [B, T], and returns f32 [B, T], to be weighed
and summed, see `weights`.
"""

import jax
import jax.numpy as jnp

from rljax.core import masked
from rljax.core.types import Array


def sft(logp: Array, mask: Array) -> Array:
  """Returns -log π of each token: the cross-entropy of given responses.

  Args:
    logp: f32 [B, T], nats; differentiated.
    mask: f32 [B, T].

  Returns:
    f32 [B, T], 0 where the mask is zero; weigh it with `weights.token_mean`
    for the mean over tokens of TRL's `sft`.
  """
  return -masked.fill(logp, mask)


def dft(logp: Array, mask: Array) -> Array:
  """Returns -sg(π) log π of each token: cross-entropy, rectified.

  Its gradient is that of -π: an unlikely token does not get a large step.

  Args:
    logp: f32 [B, T], nats; differentiated.
    mask: f32 [B, T].

  Returns:
    f32 [B, T], 0 where the mask is zero.

  Reference: Wu et al., "On the Generalization of SFT: A Reinforcement Learning
    Perspective with Reward Rectification", 2025, arXiv:2508.05629.
  """
  logp = masked.fill(logp, mask)
  return -jax.lax.stop_gradient(jnp.exp(jnp.minimum(logp, 0.0))) * logp
