"""Aggregation as data: the weight of each token in the loss.

Every loss is -Σ objective · weight. The weights are computed once, from the
mask of the **whole batch** over all devices, and travel with the rows; so the
sums of any micro-batches add up to the sum of the whole batch. Calling these
functions on part of a batch gives another objective: a mean of means. Where a
part is all there is, take one whose denominator is an argument (`constant`,
`sequence_token_mean`): a global count, divided by the data-parallel size if
gradients are averaged over devices, times the accumulation steps if they are
averaged over those.

| peer's name | ours |
|---|---|
| verl `token-mean`, TRL `bnpo` | `token_mean` |
| TRL `dapo`, `cispo`, `vespo` | `constant` over the tokens of all parts |
| verl `token-sum` | `token_sum` |
| verl `seq-mean-token-mean` | `sequence_mean_token_mean` |
| verl `seq-mean-token-sum` | `sequence_mean_token_sum` |
| verl `seq-mean-token-sum-norm` | `sequence_mean_token_sum_norm` |
| TRL `grpo`, `sapo` | `all_rows_mean_token_mean` |
| TRL `luspo` | `all_rows_mean_token_sum` |
| TRL `dr_grpo` | `dr_grpo` |
| SkyRL `prompt_mean` | `group_mean_token_mean` |

What counts in a denominator: every token or row with mask 1, also those of
groups whose rewards are all equal. To take rows out of the numerator alone,
apply `keep_rows` to the weight; to take them out of the denominator too,
apply it to the mask first. Each function returns f32 [B, T], non-negative, 0
where the mask is zero, and all 0 for an empty mask.
"""

import jax.numpy as jnp

from rljax.core import groups as groups_lib
from rljax.core import masked
from rljax.core.types import Array, Groups
from rljax.objectives import arguments


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


def sequence_mean_token_sum_norm(mask: Array, *, scale: float | Array) -> Array:
  """Returns `sequence_mean_token_sum` over a constant (verl's Dr. GRPO).

  Unlike `dr_grpo`, rows without tokens are not counted.

  Args:
    mask: f32 [B, T] of the whole batch.
    scale: positive; verl takes the padded length unless told otherwise, which
      then changes the loss from batch to batch.

  Returns:
    f32 [B, T] that sums to the mean length of non-empty rows over `scale`.

  Raises:
    ValueError: if scale is not positive.
  """
  arguments.positive(scale=scale)
  return sequence_mean_token_sum(mask) / scale


def sequence_token_mean(mask: Array, *, sequences: float | Array) -> Array:
  """Returns 1 / (length · `sequences`) at each token of a row.

  `sequence_mean_token_mean` of a part of a batch.

  Args:
    mask: f32 [B, T], any part.
    sequences: rows that count, over all parts; positive.

  Returns:
    f32 [B, T]; each non-empty row sums to 1 / sequences.

  Raises:
    ValueError: if sequences is not positive.
  """
  arguments.positive(sequences=sequences)
  scale = jnp.asarray(sequences, jnp.float32)
  return _over(mask, masked.count(mask, 1, keepdims=True) * scale)


def all_rows_mean_token_mean(mask: Array) -> Array:
  """Returns the mean over *all* rows of the mean over their tokens.

  TRL's `grpo` and `sapo`: rows without tokens are counted, so the loss is
  `sequence_mean_token_mean` times the share of non-empty rows.

  Args:
    mask: f32 [B, T] of the whole batch.

  Returns:
    f32 [B, T] that sums to the share of non-empty rows.
  """
  return sequence_token_mean(mask, sequences=float(max(mask.shape[0], 1)))


def all_rows_mean_token_sum(mask: Array) -> Array:
  """Returns the mean over *all* rows of the sum over their tokens (LUSPO).

  With `surrogates.clip` of `ratios.sequence` it is LUSPO: GSPO with each row
  weighted by its length.

  Args:
    mask: f32 [B, T] of the whole batch.

  Returns:
    f32 [B, T] that sums to the mean length of the rows.

  Reference: "Length-Unbiased Sequence Policy Optimization", 2026,
    arXiv:2602.05261.
  """
  return constant(mask, denominator=float(max(mask.shape[0], 1)))


def group_mean_token_mean(mask: Array, groups: Groups) -> Array:
  """Returns the mean over groups of the mean over their tokens (ScaleRL).

  Prompts count alike, the tokens of all answers to one prompt too; SkyRL's
  `prompt_mean`. Groups without tokens are not counted.

  Args:
    mask: f32 [B, T] of the whole batch.
    groups: [P, G].

  Returns:
    f32 [B, T] that sums to 1; rows in no group get 0.

  Reference: Khatri et al., "The Art of Scaling Reinforcement Learning Compute
    for LLMs", 2025, arXiv:2510.13786.
  """
  total = groups_lib.reduce(masked.sum, groups, masked.count(mask, 1))
  each = jnp.broadcast_to(total[:, None], groups.index.shape)
  # Absent members point past the last row, where `drop` discards them.
  place = jnp.where(groups.valid, groups.index, mask.shape[0])
  own = jnp.zeros(mask.shape[:1], jnp.float32).at[place].set(each, mode='drop')
  denominator = (own * masked.count(total))[:, None]
  return masked.fill(
    _over(mask, denominator), jnp.broadcast_to(denominator > 0.0, mask.shape)
  )


def token_sum(mask: Array) -> Array:
  """Returns 1 at each token: the loss is a sum (verl `token-sum`, tinker).

  Args:
    mask: f32 [B, T], any part.

  Returns:
    f32 [B, T], the mask itself.
  """
  return constant(mask, denominator=1.0)


def constant(mask: Array, *, denominator: float | Array) -> Array:
  """Returns 1 / `denominator` at each token.

  Args:
    mask: f32 [B, T].
    denominator: positive and the same for every part of the batch.

  Returns:
    f32 [B, T] that sums to the number of tokens over `denominator`.

  Raises:
    ValueError: if denominator is not positive.
  """
  arguments.positive(denominator=denominator)
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

  Raises:
    ValueError: if max_tokens is not positive.

  Reference: Liu et al., "Understanding R1-Zero-Like Training: A Critical
    Perspective", 2025, arXiv:2503.20783.
  """
  arguments.positive(max_tokens=max_tokens)
  return constant(mask, denominator=float(max(mask.shape[0], 1) * max_tokens))


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
  if mask.ndim != 2:
    raise ValueError(f'mask{list(mask.shape)} must be [B, T], rows of tokens.')
  present = masked.fill(jnp.ones(mask.shape, jnp.float32), mask)
  return present / jnp.where(denominator > 0.0, denominator, 1.0)
