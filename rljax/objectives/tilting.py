"""Tilted cross-entropy: a teacher that is not followed into the unlikely.

With q the teacher, p the student and τ the tilt,

  L = -(1 / τ) log Σᵥ q(v) p(v)^τ,  dL / d logits = p - w,  w ∝ q p^τ

so that the student is drawn to the teacher's distribution times a power of its
own: tokens that it holds for impossible do not count. It is a cross-entropy of
Rényi's kind, of order 1 - τ. As τ → 0 it is the cross-entropy -Σ q log p, whose
gradient p - q is that of `distillation.forward_kl`; at τ = 1 it is -log of the
chance that both draw the same token, whose gradient is that of a policy
gradient with the reward q(v). No gradient reaches the teacher.

The paper has an exponential tilt that vanishes during training and this limit;
the formula is the simplest that has them, and ours.

Reference: "SKALD: Skill-Anchored Latent Distillation", 2026; Rényi, "On
  Measures of Entropy and Information", 1961.
"""

from typing import Any

import jax
import jax.numpy as jnp

from rljax.core import masked
from rljax.core.types import Array
from rljax.objectives import arguments
import rljax_kernels

# A banned token counts as one of probability exp(-1e4), as in `distillation`.
FLOOR = -1e4

# The smallest tilt. What is divided by it is good to 1e-7 with logits, where
# log1p keeps it small, and to 1e-6 fused, where normalizers cancel.
LEAST = 1e-3


def tilted_cross_entropy(
  logits: Array,
  teacher: Array,
  mask: Array,
  *,
  tilt: float | Array,
  temperature: float = 1.0,
) -> Array:
  """Returns -(1 / τ) log Σ q p^τ of each token.

  Never negative, and at most the cross-entropy.

  Args:
    logits: f32 [..., V], the student's; differentiated.
    teacher: f32 [..., V].
    mask: f32 [...].
    tilt: τ, not negative; below 1e-3 it is the cross-entropy.
    temperature: divides both, positive.

  Returns:
    f32 [...], nats, 0 where the mask is zero.

  Raises:
    ValueError: for shapes or numbers that do not fit.
  """
  arguments.nonnegative(tilt=tilt)
  arguments.positive(temperature=temperature)
  if teacher.shape != logits.shape or mask.shape != logits.shape[:-1]:
    raise ValueError(
      f'teacher{list(teacher.shape)} must have the shape of logits'
      f'{list(logits.shape)}, and mask{list(mask.shape)} all of it but V.'
    )
  tilt = jnp.asarray(tilt, jnp.float32)
  p = _log_probs(logits, mask, temperature)
  q = jax.lax.stop_gradient(_log_probs(teacher, mask, temperature))
  plain = -jnp.sum(jnp.exp(q) * p, axis=-1)
  tilted = _tilted(p, q, jnp.maximum(tilt, LEAST))
  return masked.fill(jnp.where(tilt < LEAST, plain, tilted), mask)


def fused_tilted_cross_entropy(
  hidden: Array,
  unembed: Array,
  teacher: rljax_kernels.Reference,
  mask: Array,
  *,
  tilt: float | Array,
  temperature: float | Array = 1.0,
  valid: int | None = None,
  **options: Any,
) -> Array:
  """Returns `tilted_cross_entropy` of hidden states, without logits in memory.

  log q + τ log p is linear in both hidden states, so the sum over the
  vocabulary is the normalizer of one model of width D + Dq. Its head is held,
  in float32.

  Args:
    hidden: [N, D], the student's; differentiated, as is `unembed`.
    unembed: [V, D] or [D, V].
    teacher: its hidden states [N, Dq] and head, and its own temperature.
    mask: f32 [N].
    tilt: τ, not negative; below 1e-3 it counts as that, and the value then is
      good to 1e-3 nats. The gradient keeps its digits.
    temperature: of the student, scalar or [N].
    valid: None or the number of real ids of the student.
    **options: block, implementation, layout or vocab_axis of
      `rljax_kernels.vocab_stats`.

  Returns:
    f32 [N], nats, 0 where the mask is zero.

  Raises:
    ValueError: for shapes or numbers that do not fit.
    NotImplementedError: for a soft cap, under which logits do not add up.
  """
  arguments.nonnegative(tilt=tilt)
  if options.get('softcap') is not None or teacher.softcap is not None:
    raise NotImplementedError(
      'softcap: capped logits of two models are not the logits of one; use'
      ' tilted_cross_entropy of logits, or distillation.fused_forward_kl.'
    )
  tilt = jnp.maximum(jnp.asarray(tilt, jnp.float32), LEAST)
  theirs, head = jax.lax.stop_gradient((teacher.hidden, teacher.unembed))
  ours = _warm(hidden, mask, temperature)
  theirs = _warm(theirs, mask, teacher.temperature)
  wide = _by_id(unembed, hidden), _by_id(head, teacher.hidden)
  both = [n for n in (valid, teacher.valid) if n is not None]
  joint = _normalizer(
    jnp.concatenate([tilt * ours, theirs], axis=1),
    jnp.concatenate(wide, axis=1),
    valid=min(both) if both else None,
    **options,
  )
  own = _normalizer(ours, wide[0], valid=valid, **options)
  other = _normalizer(theirs, wide[1], valid=teacher.valid, **options)
  return masked.fill((tilt * own + other - joint) / tilt, mask)


def _tilted(p: Array, q: Array, tilt: Array) -> Array:
  """Returns -(1 / τ) log Σ q p^τ of log-probs [..., V], f32 [...]."""
  # Σ q p^τ - 1, which is small for small tilts: log1p keeps its digits.
  less = jnp.sum(jnp.exp(q) * jnp.expm1(tilt * p), axis=-1)
  near = less > -0.5
  small = jnp.log1p(jnp.where(near, less, 0.0))
  far = jax.nn.logsumexp(q + tilt * p, axis=-1)
  return -jnp.where(near, small, far) / tilt


def _log_probs(x: Array, mask: Array, temperature: float) -> Array:
  """Returns log-probs [..., V] of logits, those of zeros off the mask."""
  there = jnp.broadcast_to(mask[..., None], x.shape)
  logp = jax.nn.log_softmax(masked.fill(x, there) / temperature, axis=-1)
  return jnp.maximum(logp, FLOOR)


def _warm(hidden: Array, mask: Array, temperature: float | Array) -> Array:
  """Returns hidden states over temperature, 0 off the mask, f32 [N, D]."""
  if mask.shape != hidden.shape[:1]:
    raise ValueError(
      f'mask{list(mask.shape)} must be [{hidden.shape[0]}], one a token.'
    )
  there = jnp.broadcast_to(mask[:, None], hidden.shape)
  scale = jnp.broadcast_to(
    jnp.asarray(temperature, jnp.float32), hidden.shape[:1]
  )
  return masked.fill(hidden, there) / scale[:, None]


def _by_id(unembed: Array, hidden: Array) -> Array:
  """Returns a head as f32 [V, D]."""
  wide = unembed if unembed.shape[1] == hidden.shape[1] else unembed.T
  return wide.astype(jnp.float32)


def _normalizer(hidden: Array, unembed: Array, **options: Any) -> Array:
  """Returns the log of Σᵥ exp(logit), f32 [N]."""
  ids = jnp.zeros(hidden.shape[:1], jnp.int32)
  found = rljax_kernels.vocab_stats(
    hidden, unembed, ids, want=('lse',), **options
  )
  return found['lse']
