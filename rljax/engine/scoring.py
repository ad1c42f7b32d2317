"""Scoring: a model, a prompt and a response to per-token statistics."""

from collections.abc import Callable, Iterator, Mapping
import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from rljax.core.types import Array, Head, Params, Rollout, Scores
from rljax.engine import sharding
from rljax.models import decoder
import rljax_kernels


def read(
  model: decoder.Model, params: Params, rollout: Rollout
) -> tuple[Array, Array]:
  """Returns hidden states [B, T, D] and head weight [V, D] of the rows.

  Rows must be contiguous by prompt and of equal number per prompt.
  """
  params = model.working(params)
  hidden = model.hidden(params, rollout.prompts, rollout.response)
  return hidden, model.head(params, rollout.temperature).weight


def scores(
  model: decoder.Model,
  hidden: Array,
  weight: Array,
  rollout: Rollout,
  mesh: Mesh | None,
) -> Scores:
  """Returns the reading of the responses, at the rows' temperature.

  Args:
    model: gave the hidden states.
    hidden: [B, T, D].
    weight: [V, D].
    rollout: B rows.
    mesh: over which rows and vocabulary are split.
  """
  head = head_of(model, weight, rollout.temperature)
  stats = rljax_kernels.vocab_stats(
    flat(hidden),
    weight,
    flat(rollout.response),
    temperature=flat(per_token(rollout.temperature, rollout.response)),
    softcap=head.softcap,
    valid=head.valid,
    want=('logp', 'entropy'),
    layout=sharding.layout(mesh, weight.shape[0]),
  )
  shape = rollout.response.shape
  return Scores(
    logp=stats['logp'].reshape(shape),
    entropy=stats['entropy'].reshape(shape),
    hidden=hidden,
    head=head,
  )


def head_of(model: decoder.Model, weight: Array, temperature: Array) -> Head:
  """Returns the head with this weight [V, D] at temperatures [B]."""
  return Head(
    weight=weight, temperature=temperature, valid=model.config.valid_vocab
  )


def flat(x: Array) -> Array:
  """Returns x [B, T, ...] as [B * T, ...]."""
  return x.reshape(-1, *x.shape[2:])


def per_token(x: Array, like: Array) -> Array:
  """Returns x [B] repeated along the tokens of `like` [B, T]."""
  return jnp.broadcast_to(x[:, None], like.shape)


class Lazy(Mapping[str, Scores]):
  """Signals that are computed when they are read, once each.

  A method declares nothing: a view that credit never reads costs nothing,
  because it is never traced.
  """

  def __init__(self, makers: Mapping[str, Callable[[], Scores]]):
    self._makers = {k: functools.cache(f) for k, f in makers.items()}

  def __getitem__(self, name: str) -> Scores:
    if name not in self._makers:
      raise KeyError(
        f'credit reads {name!r}, but the method has no such view; there are'
        f' {sorted(self._makers)}. Add it to Method(views=...).'
      )
    return jax.lax.stop_gradient(self._makers[name]())

  def __iter__(self) -> Iterator[str]:
    return iter(self._makers)

  def __len__(self) -> int:
    return len(self._makers)
