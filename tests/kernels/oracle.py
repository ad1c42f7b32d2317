"""Vocabulary statistics and their gradients in float64, one row at a time."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np

NAMES = ('logp', 'lse', 'entropy')


@dataclasses.dataclass(frozen=True)
class Case:
  """Inputs of the kernels, with what is fixed when they are traced."""

  hidden: np.ndarray  # [N, D]
  unembed: np.ndarray  # [V, D]
  targets: np.ndarray  # i32 [N]
  temperature: np.ndarray  # f32 [N]
  softcap: float | None = None
  valid: int | None = None

  @property
  def arrays(self) -> tuple[np.ndarray, ...]:
    """What `vocab_stats` takes by position."""
    return self.hidden, self.unembed, self.targets

  @property
  def options(self) -> dict:
    """What `vocab_stats` takes by keyword."""
    return dict(
      temperature=self.temperature, softcap=self.softcap, valid=self.valid
    )


def case(n, d, v, *, seed=0, spread=2.0, softcap=None, valid=None) -> Case:
  """Returns random inputs whose logits have standard deviation `spread`."""
  r = np.random.default_rng([seed, n, d, v])
  scale = spread / np.sqrt(d)
  return Case(
    r.normal(size=(n, d)).astype(np.float32),
    (scale * r.normal(size=(v, d))).astype(np.float32),
    r.integers(0, valid or v, n).astype(np.int32),
    r.uniform(0.5, 1.5, n).astype(np.float32),
    softcap,
    valid,
  )


def shapes(parity: int) -> list[tuple[int, int, int, int]]:
  """Returns half of all (index, N, D, V); every pair of sizes is among them."""
  sizes = itertools.product((1, 5, 128, 300), (8, 64), (7, 50, 1000, 2048))
  found = []
  for index, (n, d, v) in enumerate(sizes):
    place = (1, 5, 128, 300).index(n) + (7, 50, 1000, 2048).index(v)
    if (place + (d == 8)) % 2 == parity:
      found.append((index, n, d, v))
  return found


def varied(index, n, d, v) -> tuple[Case, int | None]:
  """Returns a case and a block size that divides little, by index."""
  softcap = (None, 5.0)[index % 2]
  valid = (None, v - 3, max(2, v // 3))[index % 3]
  block = (None, 3, 1, 7, 96)[index % 5]
  return case(n, d, v, softcap=softcap, valid=valid), block


def bfloat16(c: Case) -> Case:
  """Returns the case with inputs rounded to bfloat16."""
  hidden, unembed = (x.astype(jnp.bfloat16) for x in (c.hidden, c.unembed))
  return dataclasses.replace(c, hidden=hidden, unembed=unembed)


def cotangents(n: int, names=NAMES) -> dict[str, np.ndarray]:
  """Returns random cotangents of the statistics, f32 [N] each."""
  r = np.random.default_rng(n)
  return {k: r.normal(size=n).astype(np.float32) for k in names}


def logits(c: Case) -> np.ndarray:
  """Returns the scaled logits, f64 [N, V]."""
  z = np.asarray(c.hidden, np.float64) @ np.asarray(c.unembed, np.float64).T
  if c.softcap is not None:
    z = c.softcap * np.tanh(z / c.softcap)
  z = z / np.asarray(c.temperature, np.float64)[:, None]
  if c.valid is not None:
    z[:, c.valid :] = -np.inf
  return z


def stats(c: Case) -> dict[str, np.ndarray]:
  """Returns logp, lse and entropy, f64 [N] each."""
  z = logits(c)
  top = z.max(1)
  lse = top + np.log(np.exp(z - top[:, None]).sum(1))
  log_p = z - lse[:, None]
  p = np.exp(log_p)
  entropy = -(p * np.where(p > 0, log_p, 0.0)).sum(1)
  chosen = log_p[np.arange(len(p)), c.targets]
  return {'logp': chosen, 'lse': lse, 'entropy': entropy}


def gradients(c: Case, cotangent: dict) -> tuple[np.ndarray, np.ndarray]:
  """Returns d hidden [N, D] and d unembed [V, D] for cotangents [N] each."""
  found, z = stats(c), logits(c)
  log_p = z - found['lse'][:, None]
  p = np.exp(log_p)
  log_p = np.where(p > 0, log_p, 0.0)
  one = np.eye(p.shape[1])[c.targets]
  slopes = {
    'logp': one - p,
    'lse': p,
    'entropy': -p * (log_p + found['entropy'][:, None]),
  }
  dz = sum(np.float64(g)[:, None] * slopes[k] for k, g in cotangent.items())
  dz /= np.asarray(c.temperature, np.float64)[:, None]
  hidden = np.asarray(c.hidden, np.float64)
  unembed = np.asarray(c.unembed, np.float64)
  if c.softcap is not None:
    dz *= 1.0 - np.tanh(hidden @ unembed.T / c.softcap) ** 2
  return dz @ unembed, dz.T @ hidden


def pull(fn):
  """Returns (*args, cotangent) -> (fn(*args), cotangents of args)."""

  def both(*args):
    found, back = jax.vjp(fn, *args[:-1])
    return found, back(args[-1])

  return both


def error(found, expected) -> float:
  """Returns the norm of the difference over the norm of `expected`."""
  found = np.asarray(found, np.float64)
  assert found.shape == expected.shape, (found.shape, expected.shape)
  norm = np.linalg.norm(expected)
  return float(np.linalg.norm(found - expected) / (norm if norm else 1.0))
