"""Naive vocabulary statistics: the oracle, with `[N, V]` logits."""

import jax
import jax.numpy as jnp

from rljax_kernels.vocab_stats import algebra, program
from rljax_kernels.vocab_stats.program import Inputs, Plan, Side


def logits(side: Side, bend: algebra.Bend, wide: bool = False) -> jax.Array:
  """Returns scaled float32 logits [N, V]; banned ids are -inf."""
  z = program.dot(side.hidden, side.unembed, wide)
  if bend.softcap is not None:
    z = bend.softcap * jnp.tanh(z / bend.softcap)
  z = z if side.inverse is None else z * side.inverse
  if bend.valid is not None:
    z = jnp.where(jnp.arange(z.shape[1])[None] < bend.valid, z, -jnp.inf)
  return z


def _mean(p, values):
  """Returns the mean of values [N, V] under p."""
  return jnp.sum(p * values, axis=1)


def _at(log_p, targets):
  """Returns log p of the targets, -inf where there is no such id."""
  ids = jnp.clip(targets, 0, log_p.shape[1] - 1)
  found = jnp.take_along_axis(log_p, ids, axis=1)
  there = (ids == targets) & jnp.isfinite(found)
  return jnp.where(there, found, -jnp.inf)[:, 0]


def _finite(log_p):
  """Returns 0 for the log of 0, which has no gradient."""
  return jnp.where(jnp.isfinite(log_p), log_p, 0.0)


def vocab_stats(plan: Plan, x: Inputs) -> dict[str, jax.Array]:
  """Returns all statistics of the plan, f32 [N] each, in nats."""
  z = logits(x.policy, plan.spec.policy, plan.wide)
  full = jax.nn.log_softmax(z)
  p, log_p = jnp.exp(full), _finite(full)
  entropy = -_mean(p, log_p)
  found = {
    'logp': _at(full, x.targets),
    'lse': jax.nn.logsumexp(z, axis=1),
    'entropy': entropy,
    'varentropy': _mean(p, (log_p + entropy[:, None]) ** 2),
    'top_logp': jnp.max(full, axis=1),
    'collision': jnp.sum(p * p, axis=1),
    'entropy_drift': _mean(p, p * (log_p + entropy[:, None])),
  }
  if x.reference is not None and plan.spec.reference is not None:
    q, wide = x.reference, plan.ref_wide
    if q.hidden is None:
      q, wide = x.policy._replace(inverse=q.inverse), plan.wide
    z = logits(q, plan.spec.reference, wide)
    found |= _paired(plan, jax.lax.stop_gradient(z), x.targets, full)
  return {name: found[name] for name in plan.spec.names}


def _paired(plan: Plan, z, targets, full) -> dict[str, jax.Array]:
  log_q, beta = jax.nn.log_softmax(z), plan.spec.beta
  p, q = jnp.exp(full), jnp.exp(log_q)
  mixed = (1 - beta) * p + beta * q
  mix = jnp.log(jnp.where(mixed > 0, mixed, 1.0))
  js = (1 - beta) * _mean(p, _finite(full) - mix)
  return {
    'ref_logp': _at(log_q, targets),
    'kl_pq': _divergence(full, log_q),
    'kl_qp': _divergence(log_q, full),
    'js': js + beta * _mean(q, _finite(log_q) - mix),
  }


def _divergence(log_p, log_q):
  """Returns KL(p || q), [N]; inf, without a gradient, where q bans more."""
  may, can = jnp.isfinite(log_p), jnp.isfinite(log_q)
  gap = jnp.where(may & can, _finite(log_p) - _finite(log_q), 0.0)
  kl = _mean(jnp.exp(log_p), gap)
  return jnp.where(jnp.any(may & ~can, axis=1), jnp.inf, kl)
