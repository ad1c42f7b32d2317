"""Distillation: a student policy is drawn to a teacher.

Three kinds. Over the whole vocabulary: `forward_kl`, `reverse_kl` and `jsd` of
logits, and the same of hidden states (`fused_...`), which never hold logits
[N, V]. Over the teacher's K likeliest tokens: `topk_forward_kl`. At tokens that
the student sampled: `advantage` and `penalty` of an estimate from
`divergences`. All return f32 for each token, 0 where the mask is zero, to be
weighed and summed (`weights`). No gradient reaches the teacher.

Divergences are named from the student: forward_kl is KL(teacher ‖ student).
"""

from collections.abc import Callable
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from rljax.core import masked
from rljax.core.types import Array
from rljax.objectives import arguments, divergences
import rljax_kernels

# A banned token counts as one of probability exp(-1e4): its product with a
# probability of 0 is 0, and what should be infinite is merely very large.
FLOOR = -1e4

# The probability mass that the tail keeps at least: log 0 has no gradient.
TAIL = 1e-6

Estimate = Callable[[Array, Array], Array]


def forward_kl(
  logits: Array, teacher: Array, mask: Array, *, temperature: float = 1.0
) -> Array:
  """Returns KL(teacher ‖ student): the student covers all that is taught.

  TRL's GKD with beta = 0; the classical distillation loss.

  Args:
    logits: f32 [..., V], the student's; differentiated.
    teacher: f32 [..., V].
    mask: f32 [...].
    temperature: divides both, positive.

  Returns:
    f32 [...], nats.

  Reference: Hinton et al., "Distilling the Knowledge in a Neural Network",
    2015, arXiv:1503.02531.
  """
  p, q = _log_probs(logits, teacher, mask, temperature)
  return _kl(q, p)


def reverse_kl(
  logits: Array, teacher: Array, mask: Array, *, temperature: float = 1.0
) -> Array:
  """Returns KL(student ‖ teacher): the student picks a mode (MiniLLM).

  TRL's GKD with beta = 1.

  Args:
    logits: f32 [..., V], the student's; differentiated.
    teacher: f32 [..., V].
    mask: f32 [...].
    temperature: divides both, positive.

  Returns:
    f32 [...], nats.

  Reference: Gu et al., "MiniLLM: Knowledge Distillation of Large Language
    Models", 2023, arXiv:2306.08543.
  """
  p, q = _log_probs(logits, teacher, mask, temperature)
  return _kl(p, q)


def jsd(
  logits: Array,
  teacher: Array,
  mask: Array,
  *,
  beta: float = 0.5,
  temperature: float = 1.0,
) -> Array:
  """Returns the generalized Jensen-Shannon divergence of GKD.

  β KL(teacher ‖ m) + (1 - β) KL(student ‖ m), m = β teacher + (1 - β) student.
  It is bounded. Divided by β it tends to `forward_kl` as β → 0, divided by
  1 - β to `reverse_kl` as β → 1; at the ends themselves GKD means those.

  Args:
    logits: f32 [..., V], the student's; differentiated.
    teacher: f32 [..., V].
    mask: f32 [...].
    beta: in (0, 1), the teacher's share.
    temperature: divides both, positive.

  Returns:
    f32 [...], nats, at most log 2 for β = ½.

  Reference: Agarwal et al., "On-Policy Distillation of Language Models:
    Learning from Self-Generated Mistakes" (GKD), 2023, arXiv:2306.13649.
  """
  if not 0.0 < beta < 1.0:
    raise ValueError(
      f'beta={beta} must be in (0, 1); for 0 use forward_kl, for 1 reverse_kl.'
    )
  p, q = _log_probs(logits, teacher, mask, temperature)
  mixture = jnp.logaddexp(
    p + jnp.log1p(jnp.float32(-beta)), q + jnp.log(jnp.float32(beta))
  )
  each = beta * _kl(q, mixture) + (1.0 - beta) * _kl(p, mixture)
  return masked.fill(each, mask)


def fused_forward_kl(
  hidden: Array,
  unembed: Array,
  teacher: rljax_kernels.Reference,
  mask: Array,
  **options: Any,
) -> Array:
  """Returns `forward_kl` of hidden states, without logits in memory.

  Infinite where the student bans an id (`valid`) that the teacher may draw.

  Args:
    hidden: [N, D], the student's; differentiated, as is `unembed`.
    unembed: [V, D] or [D, V].
    teacher: its hidden states [N, Dq] and head, and its own temperature.
    mask: f32 [N].
    **options: of `rljax_kernels.vocab_stats`: temperature (of the student
      alone), softcap, valid, layout, implementation ...

  Returns:
    f32 [N], nats.
  """
  return _fused('kl_qp', hidden, unembed, teacher, mask, options)


def fused_reverse_kl(
  hidden: Array,
  unembed: Array,
  teacher: rljax_kernels.Reference,
  mask: Array,
  **options: Any,
) -> Array:
  """Returns `reverse_kl` of hidden states, without logits in memory.

  Args:
    hidden: [N, D], the student's; differentiated, as is `unembed`.
    unembed: [V, D] or [D, V].
    teacher: as in `fused_forward_kl`.
    mask: f32 [N].
    **options: as in `fused_forward_kl`.

  Returns:
    f32 [N], nats.
  """
  return _fused('kl_pq', hidden, unembed, teacher, mask, options)


def fused_jsd(
  hidden: Array,
  unembed: Array,
  teacher: rljax_kernels.Reference,
  mask: Array,
  *,
  beta: float = 0.5,
  **options: Any,
) -> Array:
  """Returns `jsd` of hidden states, without logits in memory.

  Args:
    hidden: [N, D], the student's; differentiated, as is `unembed`.
    unembed: [V, D] or [D, V].
    teacher: as in `fused_forward_kl`.
    mask: f32 [N].
    beta: in (0, 1), the teacher's share.
    **options: as in `fused_forward_kl`.

  Returns:
    f32 [N], nats.
  """
  options = {**options, 'beta': beta}
  return _fused('js', hidden, unembed, teacher, mask, options)


def topk_logp(logits: Array, ids: Array) -> Array:
  """Returns log-probs of given ids under the whole softmax.

  Args:
    logits: f32 [..., V]; differentiated.
    ids: i32 [..., K].

  Returns:
    f32 [..., K], nats.
  """
  logits = logits.astype(jnp.float32)
  chosen = jnp.take_along_axis(logits, ids, axis=-1)
  return chosen - jax.nn.logsumexp(logits, axis=-1, keepdims=True)


def fused_topk_logp(
  hidden: Array, unembed: Array, ids: Array, **options: Any
) -> Array:
  """Returns `topk_logp` of hidden states, without logits in memory.

  Args:
    hidden: [N, D]; differentiated, as is `unembed`.
    unembed: [V, D] or [D, V].
    ids: i32 [N, K].
    **options: temperature, softcap, valid, layout; of
      `rljax_kernels.vocab_stats` and `gather_logits`.

  Returns:
    f32 [N, K], nats.
  """
  chosen = rljax_kernels.gather_logits(hidden, unembed, ids, **options)
  stats = rljax_kernels.vocab_stats(
    hidden, unembed, ids[:, 0], want=('lse',), **options
  )
  return chosen - stats['lse'][:, None]


def topk_forward_kl(
  logp: Array, teacher_logp: Array, mask: Array, *, floor: float | None = -10.0
) -> Array:
  """Returns Σₖ q (log q - log p) over the teacher's likeliest tokens.

  p is the student, q the teacher; neither sums to 1 over K tokens, so that the
  value may be negative and is least where p > q. With `with_tail` of both it
  is a KL divergence; with K = V it is `forward_kl`.

  Args:
    logp: f32 [..., K], the student's log-probs (`topk_logp`); differentiated.
    teacher_logp: f32 [..., K].
    mask: f32 [...].
    floor: log-probs below count as this, without gradient; -10 in verl. None
      for no floor: then an impossible token costs 1e4 nats.

  Returns:
    f32 [...], nats. verl cuts it at 0 below and 10 above, its gradient too.
  """
  _check_same('teacher_logp', teacher_logp, logp)
  least = FLOOR if floor is None else floor
  p, q = _present(logp, mask), _present(teacher_logp, mask)
  return masked.fill(_kl(jnp.maximum(q, least), jnp.maximum(p, least)), mask)


def with_tail(logp: Array) -> Array:
  """Returns log-probs of K tokens and, as one more, of all the others.

  They are logits of a small vocabulary: `jsd`, `reverse_kl` and `forward_kl` of
  them are divergences of the likeliest tokens and a tail, never above those of
  the whole vocabulary.

  Args:
    logp: f32 [..., K]; differentiated.

  Returns:
    f32 [..., K + 1]; the tail has a probability of at least 1e-6.
  """
  rest = 1.0 - jnp.sum(jnp.exp(logp), axis=-1, keepdims=True)
  return jnp.concatenate([logp, jnp.log(jnp.maximum(rest, TAIL))], axis=-1)


def topk_mass(logp: Array) -> Array:
  """Returns the probability of K tokens together; a meter.

  Args:
    logp: f32 [..., K].

  Returns:
    f32 [...].
  """
  return jax.lax.stop_gradient(jnp.sum(jnp.exp(logp), axis=-1))


def topk_overlap(
  ids: Array,
  teacher_ids: Array,
  logp: Array,
  teacher_logp: Array,
  *,
  floor: float | None = -10.0,
) -> tuple[Array, Array]:
  """Returns how many of the likeliest tokens both models share; a meter.

  Args:
    ids: i32 [..., K], the student's likeliest.
    teacher_ids: i32 [..., K].
    logp: f32 [..., K], the student's log-probs of `teacher_ids`.
    teacher_logp: f32 [..., K].
    floor: as in `topk_forward_kl`.

  Returns:
    The number of shared tokens f32 [...], and the mean over them of
    -q (log q - log p), f32 [...], 0 where there are none.

  Reference: "Rethinking On-Policy Distillation of Large Language Models",
    2026, arXiv:2604.13016.
  """
  least = FLOOR if floor is None else floor
  shared = jnp.any(teacher_ids[..., :, None] == ids[..., None, :], axis=-1)
  p, q = jnp.maximum(logp, least), jnp.maximum(teacher_logp, least)
  gain = masked.mean(-jnp.exp(q) * (q - p), shared, -1)
  return jax.lax.stop_gradient((masked.count(shared, -1), gain))


def advantage(
  logp: Array,
  teacher_logp: Array,
  mask: Array,
  *,
  estimate: Estimate = divergences.k1,
  limit: float = 10.0,
) -> Array:
  """Returns minus an estimate of reverse_kl as advantage of sampled tokens.

  On-policy distillation as reinforcement learning: in a surrogate, k1 gives
  the gradient of reverse_kl of the next token. No baseline is needed.

  Args:
    logp: f32 [B, T], of the student that sampled the tokens, nats.
    teacher_logp: f32 [B, T].
    mask: f32 [B, T].
    estimate: of `divergences`.
    limit: bound on the absolute value; 10 in verl.

  Returns:
    f32 [B, T], without gradient.

  Reference: Lu et al., "On-Policy Distillation", Thinking Machines, 2025,
    https://thinkingmachines.ai/blog/on-policy-distillation.
  """
  each = penalty(logp, teacher_logp, mask, estimate=estimate, limit=limit)
  return jax.lax.stop_gradient(-each)


def penalty(
  logp: Array,
  teacher_logp: Array,
  mask: Array,
  *,
  estimate: Estimate = divergences.k2,
  limit: float = 10.0,
) -> Array:
  """Returns an estimate of reverse_kl at sampled tokens, to be minimized.

  Its gradient in expectation is that which `divergences` states: of k2 that of
  reverse_kl, of k3 that of forward_kl, of k1 none, which only adds noise.

  Args:
    logp: f32 [B, T], of the student, nats; differentiated.
    teacher_logp: f32 [B, T].
    mask: f32 [B, T].
    estimate: of `divergences`.
    limit: bound on the absolute value, past which there is no gradient; 10 in
      verl.

  Returns:
    f32 [B, T].
  """
  arguments.positive(limit=limit)
  teacher_logp = jax.lax.stop_gradient(masked.fill(teacher_logp, mask))
  each = estimate(masked.fill(logp, mask), teacher_logp)
  return masked.fill(jnp.clip(each, -limit, limit), mask)


def _log_probs(
  logits: Array, teacher: Array, mask: Array, temperature: float
) -> tuple[Array, Array]:
  """Returns log-probs [..., V] of student and teacher, equal off the mask."""
  _check_same('teacher', teacher, logits)
  arguments.positive(temperature=temperature)

  def one(x):
    x = _present(x, mask) / temperature
    return jnp.maximum(jax.nn.log_softmax(x, axis=-1), FLOOR)

  return one(logits), jax.lax.stop_gradient(one(teacher))


def _present(x: Array, mask: Array) -> Array:
  """Returns x [..., V] with 0 for all of a masked token, f32."""
  if mask.shape != x.shape[:-1]:
    raise ValueError(
      f'mask{list(mask.shape)} must be {list(x.shape[:-1])}, one a token.'
    )
  return masked.fill(x, jnp.broadcast_to(mask[..., None], x.shape))


def _kl(p: Array, q: Array) -> Array:
  """Returns Σ p (log p - log q) of log-probs [..., V], f32 [...]."""
  return jnp.sum(jnp.exp(p) * (p - q), axis=-1)


def _fused(
  name: str,
  hidden: Array,
  unembed: Array,
  teacher: rljax_kernels.Reference,
  mask: Array,
  options: dict[str, Any],
) -> Array:
  """Returns one divergence of the kernel, 0 where the mask is zero."""
  clean = dataclasses.replace(teacher, hidden=_kept(teacher.hidden, mask))
  stats = rljax_kernels.vocab_stats(
    _kept(hidden, mask),
    unembed,
    jnp.zeros(mask.shape, jnp.int32),
    reference=clean,
    want=(name,),
    **options,
  )
  return masked.fill(stats[name], mask)


def _kept(hidden: Array, mask: Array) -> Array:
  """Returns hidden [N, D] with zeros off the mask, in its own dtype."""
  if mask.shape != hidden.shape[:1]:
    raise ValueError(
      f'mask{list(mask.shape)} must be [{hidden.shape[0]}], one a token.'
    )
  return jnp.where(mask.astype(bool)[:, None], hidden, jnp.zeros_like(hidden))


def _check_same(name: str, x: Array, like: Array) -> None:
  if x.shape != like.shape:
    raise ValueError(
      f'{name}{list(x.shape)} must have the shape of the student,'
      f' {list(like.shape)}.'
    )
