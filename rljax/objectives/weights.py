"""Aggregation as data: the weight of each token in the loss.

Every loss is -Σ objective · weight. The weights are computed once, from the
mask of the **whole batch** over all devices, and travel with the rows; so the
sums of any micro-batches add up to the sum of the whole batch. Calling these
functions on part of a batch gives another objective: a mean of means.

What counts in a denominator: every token or row with mask 1, also those of
groups whose rewards are all equal. To take rows out of the numerator alone,
apply `keep_rows` to the weight; to take them out of the denominator too,
apply it to the mask first. Each function returns f32 [B, T], non-negative, 0
where the mask is zero, and all 0 for an empty mask.
"""

import jax.numpy as jnp

from rljax.core import masked
from rljax.core.types import Array


def token_mean(mask: Array) -> Array:
  """Returns 1 / N at each of the batch's N tokens (DAPO, verl, BNPO).

  Args:
    mask: f32 [B, T] of the whole batch.

  Returns:
    f32 [B, T] that sums to 1.

  Reference: Yu et al., "DAPO: An Open-Source LLM Reinforcement Learning System
    at Scale", 2025, arXiv:2503.14476.
  """
  return _over(mask, masked.count(mask, keepdims=True))


def sequence_mean_token_mean(mask: Array) -> Array:
  """Returns the mean over rows of the mean over their tokens (GRPO).

  Rows without tokens are not counted, as in verl; TRL counts them.

  Args:
    mask: f32 [B, T] of the whole batch.

  Returns:
    f32 [B, T] that sums to 1; each non-empty row has the same total.

  Reference: Shao et al., "DeepSeekMath: Pushing the Limits of Mathematical
    Reasoning in Open Language Models", 2024, arXiv:2402.03300.
  """
  return _over(mask, masked.count(mask, 1, keepdims=True) * _rows(mask))


def sequence_mean_token_sum(mask: Array) -> Array:
  """Returns the mean over rows of the sum over their tokens.

  With advantages per row this is the policy gradient itself. Rows without
  tokens are not counted.

  Args:
    mask: f32 [B, T] of the whole batch.

  Returns:
    f32 [B, T] that sums to the mean length of non-empty rows.
  """
  return _over(mask, _rows(mask))


def constant(mask: Array, *, denominator: float | Array) -> Array:
  """Returns 1 / `denominator` at each token.

  Args:
    mask: f32 [B, T].
    denominator: positive and the same for every part of the batch.

  Returns:
    f32 [B, T] that sums to the number of tokens over `denominator`.
  """
  scale = jnp.asarray(denominator, jnp.float32)
  return _over(mask, scale[None, None])


def dr_grpo(mask: Array, *, max_tokens: int) -> Array:
  """Returns 1 / (B · max_tokens) at each token (Dr. GRPO).

  Neither the length of a row nor that of the others changes a token's weight.
  All B rows count, empty ones too.

  Args:
    mask: f32 [B, T] of the whole batch.
    max_tokens: the limit on the length of a response; not T, which may be
      padded.

  Returns:
    f32 [B, T].

  Reference: Liu et al., "Understanding R1-Zero-Like Training: A Critical
    Perspective", 2025, arXiv:2503.20783.
  """
  return constant(mask, denominator=float(mask.shape[0] * max_tokens))


def keep_rows(weight: Array, keep: Array) -> Array:
  """Returns `weight`, or a mask, with the rows that are not kept set to 0.

  Args:
    weight: f32 [B, T].
    keep: bool [B].

  Returns:
    f32 [B, T].
  """
  return masked.fill(
    weight, jnp.broadcast_to(keep.astype(bool)[:, None], weight.shape)
  )


def _rows(mask: Array) -> Array:
  """Returns the number of rows with a token, f32 [1, 1]."""
  return masked.count(masked.count(mask, 1, keepdims=True), 0, keepdims=True)


def _over(mask: Array, denominator: Array) -> Array:
  """Returns 1 / denominator where the mask is not zero, else 0."""
  present = masked.fill(jnp.ones(mask.shape, jnp.float32), mask)
  return present / jnp.where(denominator > 0.0, denominator, 1.0)
