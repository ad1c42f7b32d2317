"""What the functions are given: checked, and as arrays of a program."""

import dataclasses

import jax
import jax.numpy as jnp

from rljax_kernels.vocab_stats import algebra, program
from rljax_kernels.vocab_stats.program import Inputs, Plan, Side


@dataclasses.dataclass(frozen=True)
class Reference:
  """Another model's view of the same tokens; no gradient reaches it.

  Attributes:
    hidden: [N, Dq]; its width may differ.
    unembed: [V, Dq] or [Dq, V], of the same ids.
    temperature: scalar or [N], positive.
    softcap: None or c, for logits c * tanh(x / c).
    valid: None or the number of real ids.
  """

  hidden: jax.Array
  unembed: jax.Array
  temperature: jax.Array | float = 1.0
  softcap: float | None = None
  valid: int | None = None


jax.tree_util.register_dataclass(
  Reference, ['hidden', 'unembed', 'temperature'], ['softcap', 'valid']
)


def inputs(hidden, unembed, targets, temperature, reference) -> Inputs:
  """Returns the arrays of a program, columns [N, 1] where a row has one."""
  rows = hidden.shape[:1]
  ref = None
  if reference is not None:
    ref = Side(
      jax.lax.stop_gradient(reference.hidden),
      jax.lax.stop_gradient(reference.unembed),
      inverse(reference.temperature, rows),
    )
  policy = Side(hidden, unembed, inverse(temperature, rows))
  # Wide integers would wrap around when they become int32.
  if targets.dtype.itemsize > 4:
    targets = targets.clip(-1, 2**31 - 1)
  return Inputs(policy, jnp.asarray(targets, jnp.int32)[:, None], ref)


def folded(x: Inputs, spec: algebra.Spec) -> Inputs:
  """Returns inputs whose temperature is in the hidden states where it may be.

  In float32 and without a soft cap, dividing [N, D] replaces dividing [N, V].
  """
  hidden, unembed, inverse = x.policy
  if inverse is None or spec.policy.softcap is not None:
    return x
  if hidden.dtype != jnp.float32:
    return x
  return x._replace(policy=Side(hidden * inverse, unembed, None))


def inverse(temperature, rows: tuple[int, ...]) -> jax.Array | None:
  """Returns 1 / temperature [N, 1], or None for 1; raises below 0."""
  if not isinstance(temperature, jax.Array):  # which may be traced
    shape = getattr(temperature, 'shape', ())
    if not (temperature.min() if shape else temperature) > 0:
      raise ValueError(f'temperature is {temperature}; it must be positive.')
    if not shape and temperature == 1:
      return None
  inverse = 1.0 / jnp.asarray(temperature, jnp.float32)
  if inverse.shape not in ((), rows):
    raise ValueError(
      f'temperature {inverse.shape} must be a scalar or {rows}, one a token.'
    )
  return jax.lax.stop_gradient(jnp.broadcast_to(inverse, rows)[:, None])


def spec_of(want, softcap, valid, reference, beta) -> algebra.Spec:
  """Returns what is to be computed, or raises for a name that is none."""
  unknown = [name for name in want if name not in algebra.WANT]
  if unknown:
    raise ValueError(f'want={unknown} is not among {algebra.WANT}.')
  paired = [name for name in want if name in algebra.PAIRED]
  if paired and reference is None:
    raise ValueError(f'want={paired} needs a reference=Reference(...).')
  check_beta(beta)
  check_positive(softcap=softcap, valid=valid)
  names = {'logp', 'lse'}
  for name in want:
    names |= set(algebra.DERIVED.get(name, (name,)))
  order = (*algebra.PLAIN, *(algebra.PAIRED if paired else ()))
  ref = None
  if paired:
    ref = algebra.Bend(reference.softcap, reference.valid)
  return algebra.Spec(
    tuple(name for name in order if name in names),
    algebra.Bend(softcap, valid),
    ref,
    beta,
  )


def check_rows(rows: int, **arrays) -> None:
  """Raises ValueError for an array that has not one number for each row."""
  for name, array in arrays.items():
    if jnp.shape(array) != (rows,):
      raise ValueError(
        f'{name} {jnp.shape(array)} must be ({rows},), a number for each token.'
      )


def check_beta(beta: float) -> None:
  """Raises ValueError unless beta is a share of a whole."""
  if not 0 < beta < 1:
    raise ValueError(f'beta={beta} must lie between 0 and 1.')


def check_positive(**numbers) -> None:
  """Raises ValueError for a number that is given and not positive."""
  for name, number in numbers.items():
    if number is not None and not number > 0:
      raise ValueError(f'{name}={number} must be positive.')


def plan_of(hidden, unembed, targets, reference, **options) -> Plan:
  """Returns the plan of arrays that fit, or raises for what does not."""
  shapes = f'hidden {hidden.shape}, unembed {unembed.shape}'
  wide = _wide(hidden, unembed, 'unembed')
  check_positive(block=options.get('block'), N=len(hidden))
  if targets.shape != hidden.shape[:1]:
    raise ValueError(f'targets {targets.shape} must be [N]; {shapes}.')
  if not jnp.issubdtype(targets.dtype, jnp.integer):
    raise ValueError(f'targets are {targets.dtype}; ids are integers.')
  if reference is None:
    return Plan(wide=wide, **options)
  ref_wide = _wide(reference.hidden, reference.unembed, 'reference.unembed')
  sizes = (
    program.vocab_size(unembed, wide),
    program.vocab_size(reference.unembed, ref_wide),
  )
  if sizes[0] != sizes[1] or len(reference.hidden) != len(hidden):
    raise ValueError(
      f'The reference, hidden {reference.hidden.shape} and unembed'
      f' {reference.unembed.shape}, has other tokens or ids than {shapes}.'
    )
  return Plan(wide=wide, ref_wide=ref_wide, **options)


def _wide(hidden, unembed, name: str) -> bool:
  """Returns whether an unembedding is [D, V]; raises if it is neither."""
  shapes = f'hidden {hidden.shape}, {name} {unembed.shape}'
  if hidden.ndim != 2 or unembed.ndim != 2:
    raise ValueError(f'Need hidden [N, D] and unembed [V, D], got {shapes}.')
  if hidden.shape[1] not in unembed.shape:
    raise ValueError(
      f'Model widths differ: {shapes}; {name} is [V, D] or [D, V].'
    )
  for array in (hidden, unembed):
    if array.dtype not in (jnp.float32, jnp.bfloat16):
      raise ValueError(
        f'{array.dtype} is not supported ({shapes}); use bfloat16 or float32.'
      )
  return hidden.shape[1] != unembed.shape[1]
