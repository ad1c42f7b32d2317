"""Top-k, top-p and min-p: they look at all logits of a row."""

import numbers
from typing import NamedTuple

import jax
import jax.numpy as jnp

from rljax_kernels import logits
from rljax_kernels.vocab_sample import blocks, cdf


class Limits(NamedTuple):
  """What a truncated draw keeps; see `vocab_sample`."""

  top_k: int = 0
  top_p: float = 1.0
  min_p: float = 0.0

  def check(self) -> None:
    """Raises ValueError for a limit that is none."""
    if not isinstance(self.top_k, numbers.Integral) or self.top_k < 0:
      raise ValueError(
        f'top_k={self.top_k} must be an integer of Python, at least 0; 0 keeps'
        ' all.'
      )
    if not isinstance(self.top_p, numbers.Real) or not 0 < self.top_p <= 1:
      raise ValueError(
        f'top_p={self.top_p} must be a number of Python in (0, 1]; 1 keeps all.'
      )
    if not isinstance(self.min_p, numbers.Real) or not 0 <= self.min_p <= 1:
      raise ValueError(
        f'min_p={self.min_p} must be a number of Python in [0, 1]; 0 keeps all.'
      )


def draw(
  hidden, unembed, rows: blocks.Rows, form: logits.Form, limits: Limits
) -> blocks.Drawn:
  """Returns ids drawn from what `limits` keep, on [N, V] logits."""
  z = logits.of_range(hidden, unembed, 0, form.width(unembed), form)
  if form.axis is not None:
    z = jax.lax.all_gather(z, form.axis, axis=1, tiled=True)
  sums = blocks.summarize(cdf.split(z, -jnp.inf), rows, 0)
  found = blocks.moments(sums, rows.inverse)
  mass = jnp.exp(blocks.times(z - found.top[:, None], rows.inverse))
  total = jnp.sum(mass, axis=1)
  kept = jnp.where(keep(mass, total, *limits), mass, 0.0)
  kept_total = jnp.sum(kept, axis=1)
  if rows.uniform is None:
    token = jnp.argmax(z, axis=1).astype(jnp.int32)
  else:
    token = cdf.pick(kept, rows.uniform)
  token = blocks.force(token, rows.forced)
  inside = (token >= 0) & (token < z.shape[1])
  chosen = cdf.take(z, jnp.clip(token, 0, z.shape[1] - 1))
  chosen = jnp.where(inside, chosen, -jnp.inf)
  log_kept = jnp.log(kept_total)
  if rows.forced is not None:
    log_kept = jnp.where(rows.forced >= 0, found.log_total, log_kept)
  drawn = blocks.drawn(token, chosen, found, rows.inverse)
  logp = drawn.logp_full + (found.log_total - log_kept)
  return drawn._replace(logp=logp, kept=kept_total / total)


def keep(
  mass: jax.Array, total: jax.Array, top_k: int, top_p: float, min_p: float
) -> jax.Array:
  """Returns which ids stay, bool [N, V]: those that every limit keeps.

  Each limit looks at all of `mass`, so their order does not matter and nothing
  is renormalized between them. Ids of equal mass stay or go together.

  Args:
    mass: f32 [N, V], the largest of a row is 1.
    total: f32 [N], sums of `mass`.
    top_k: keep ids with fewer than k strictly larger ones; 0 keeps all.
    top_p: keep ids whose strictly larger ones hold less than this share of
      the total; 1 keeps all.
    min_p: keep masses of at least this share of the largest.
  """
  floor = jnp.full(mass.shape[:1], min_p)
  if top_k or top_p < 1.0:
    ordered = -jnp.sort(-mass, axis=1)
    if top_k:
      floor = jnp.maximum(floor, ordered[:, min(top_k, mass.shape[1]) - 1])
    if top_p < 1.0:
      before = jnp.cumsum(ordered, axis=1) - ordered
      inside = before < top_p * total[:, None]
      last = jnp.min(jnp.where(inside, ordered, jnp.inf), axis=1)
      floor = jnp.maximum(floor, last)
  return mass >= floor[:, None]
