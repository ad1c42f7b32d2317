"""Optimizers, and the guard around their updates."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from rljax.core.types import Array

# Last names of parameters that are pulled to zero for no good reason: biases,
# and the scales of norms, whose neutral value is 1.
_KEPT = ('bias', 'scale')


def decaying(params: Any) -> Any:
  """Returns which parameters decay: all but biases and the scales of norms.

  What Hugging Face's trainer does; embeddings decay.

  Args:
    params: any tree; leaves are told by the last name of their path.

  Returns:
    The same tree of bool.
  """

  def decays(path, leaf) -> bool:
    del leaf
    return jax.tree_util.keystr(path[-1:], simple=True) not in _KEPT

  return jax.tree_util.tree_map_with_path(decays, params)


def adamw(
  learning_rate: optax.ScalarOrSchedule,
  *,
  weight_decay: float = 0.0,
  b2: float = 0.95,
  max_norm: float = 1.0,
  decays: Callable[[Any], Any] = decaying,
) -> optax.GradientTransformation:
  """Returns AdamW behind clipping by global norm.

  Args:
    learning_rate: constant, or a function of the number of updates.
    weight_decay: decoupled, times the learning rate.
    b2: decay of the second moment.
    max_norm: largest global gradient norm.
    decays: parameters to a tree of bool, which of them decay.
  """
  return optax.chain(
    optax.clip_by_global_norm(max_norm),
    optax.adamw(learning_rate, b2=b2, weight_decay=weight_decay, mask=decays),
  )


def guarded_update(
  optimizer: optax.GradientTransformation,
  grads: Any,
  loss: Array,
  params: Any,
  opt_state: Any,
  counted: Array | bool = True,
) -> tuple[Any, Any, Array, Array]:
  """Returns new parameters and optimizer state, gradient norm, and whether ok.

  If the loss or the gradient is not finite, or no token counted, parameters
  and optimizer state come back as they were.

  Args:
    optimizer: any optax chain.
    grads: of `params`.
    loss: f32 [].
    params: what is trained.
    opt_state: of the optimizer.
    counted: bool [], whether any token entered the loss. Without one the
      gradient is 0, but momentum and weight decay would still move.
  """
  norm = optax.tree.norm(grads)
  ok = jnp.isfinite(norm) & jnp.isfinite(loss)

  def take(params, opt_state):
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state

  # A branch, not a choice between two results: those would both be held.
  params, opt_state = jax.lax.cond(
    ok & counted, take, lambda *same: same, params, opt_state
  )
  return params, opt_state, norm, ok
