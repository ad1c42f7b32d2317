"""What the functions are given: checked, and as arrays of a program."""

import dataclasses

import jax
import jax.numpy as jnp

from rljax_kernels import checks
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
    valid: None or the number of real ids; see `vocab_stats`.
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
  count = hidden.shape[0]
  ref = None
  if reference is not None:
    ref = Side(
      jax.lax.stop_gradient(jnp.asarray(reference.hidden)),
      jax.lax.stop_gradient(jnp.asarray(reference.unembed)),
      inverse(reference.temperature, count, 'reference.temperature'),
    )
  scale = inverse(temperature, count)
  policy = Side(jnp.asarray(hidden), jnp.asarray(unembed), scale)
  return Inputs(policy, checks.ids(targets=targets)[:, None], ref)


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


def inverse(temperature, tokens: int, name='temperature') -> jax.Array | None:
  """Returns 1 / temperature [N, 1], or None for 1; see `checks.inverse`."""
  found = checks.inverse(temperature, tokens, name)
  return None if found is None else found[:, None]


def ids_of(hidden, unembed, vocab_axis, layout) -> int:
  """Returns how many ids all shards hold; raises for what does not fit."""
  if layout is not None and vocab_axis is not None:
    raise ValueError(
      f'vocab_axis={vocab_axis!r} is for use inside a shard_map, layout for use'
      ' outside: give one of them.'
    )
  parts = 1 if vocab_axis is None else checks.vocab_axis(vocab_axis)
  wide = checks.pair(hidden, unembed)
  return parts * program.vocab_size(unembed, wide)


def spec_of(vocab: int, want, softcap, valid, reference, beta) -> algebra.Spec:
  """Returns what is to be computed, or raises for what cannot be."""
  paired = _paired(want, reference)
  check_beta(beta)
  policy = bend_of(softcap, valid, vocab)
  ref = None
  if reference is not None:
    ref = bend_of(reference.softcap, reference.valid, vocab, 'reference.')
  names = {'logp', 'lse'}
  for name in want:
    names |= set(algebra.DERIVED.get(name, (name,)))
  order = (*algebra.PLAIN, *(algebra.PAIRED if paired else ()))
  return algebra.Spec(
    tuple(name for name in order if name in names),
    policy,
    ref if paired else None,
    beta,
  )


def _paired(want, reference) -> list[str]:
  """Returns the names that need a reference; raises for what is no name."""
  if isinstance(want, str):
    raise ValueError(f'want={want!r} must be a sequence: want=({want!r},).')
  unknown = [name for name in want if name not in algebra.WANT]
  if unknown:
    raise ValueError(f'want={unknown} is not among {algebra.WANT}.')
  paired = [name for name in want if name in algebra.PAIRED]
  if paired and reference is None:
    raise ValueError(f'want={paired} needs a reference=Reference(...).')
  return paired


def bend_of(softcap, valid, vocab: int, prefix: str = '') -> algebra.Bend:
  """Returns how logits of V ids are bent; `valid` of all of them is None."""
  checks.bend(softcap, valid, vocab, prefix)
  return algebra.Bend(softcap, None if valid == vocab else valid)


def check_beta(beta: float) -> None:
  """Raises ValueError unless beta is a share of a whole."""
  if not 0 < beta < 1:
    raise ValueError(f'beta={beta} must lie between 0 and 1.')


def plan_of(hidden, unembed, targets, reference, **options) -> Plan:
  """Returns the plan of arrays that fit, or raises for what does not."""
  wide = checks.pair(hidden, unembed)
  checks.positive(block=options.get('block'))
  checks.rows(hidden.shape[0], targets=targets)
  if reference is None:
    return Plan(wide=wide, **options)
  checks.arrays(**{'reference.hidden': reference.hidden})
  ref_wide = checks.pair(
    reference.hidden, reference.unembed, 'reference.unembed'
  )
  sizes = (
    program.vocab_size(unembed, wide),
    program.vocab_size(reference.unembed, ref_wide),
  )
  if sizes[0] != sizes[1] or reference.hidden.shape[0] != hidden.shape[0]:
    raise ValueError(
      f'The reference, hidden {reference.hidden.shape} and unembed'
      f' {reference.unembed.shape}, has other tokens or ids than hidden'
      f' {hidden.shape} and unembed {unembed.shape}.'
    )
  return Plan(wide=wide, ref_wide=ref_wide, **options)
