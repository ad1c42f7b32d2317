"""Vocabulary statistics and their gradients in float64, one row at a time."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np

import rljax_kernels

NAMES = ('logp', 'lse', 'entropy')
ALONE = (
  *NAMES, 'varentropy', 'top_logp', 'collision', 'entropy_drift', 'polarity',
)  # fmt: skip
PAIRED = ('ref_logp', 'kl_pq', 'kl_qp', 'js')
BETA = 0.3


@dataclasses.dataclass(frozen=True)
class Case:
  """Inputs of the kernels, with what is fixed when they are traced."""

  hidden: np.ndarray  # [N, D]
  unembed: np.ndarray  # [V, D]
  targets: np.ndarray  # i32 [N]
  temperature: np.ndarray  # f32 [N]
  softcap: float | None = None
  valid: int | None = None
  other: 'Case | None' = None  # the reference; its targets are not read

  @property
  def arrays(self) -> tuple[np.ndarray, ...]:
    """What `vocab_stats` takes by position."""
    return self.hidden, self.unembed, self.targets

  @property
  def options(self) -> dict:
    """What `vocab_stats` takes by keyword."""
    own = dict(
      temperature=self.temperature, softcap=self.softcap, valid=self.valid
    )
    if self.other is None:
      return own
    q = self.other
    reference = rljax_kernels.Reference(
      q.hidden, q.unembed, q.temperature, q.softcap, q.valid
    )
    return own | dict(reference=reference, beta=BETA)


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


TOKENS, WIDTHS = (1, 5, 128, 300), (8, 64, 128, 300)
VOCABULARIES = (7, 50, 1000, 2048, 50_257, 151_936)


def every_shape() -> list[tuple[int, int, int, int]]:
  """Returns all (index, N, D, V)."""
  sizes = itertools.product(TOKENS, WIDTHS, VOCABULARIES)
  return [(index, *size) for index, size in enumerate(sizes)]


def shapes() -> list[tuple[int, int, int, int]]:
  """Returns (index, N, D, V) such that every pair of sizes is among them.

  But for those of many tokens and a large vocabulary, which take seconds.
  """
  found = []
  for index, n, d, v in every_shape():
    place = TOKENS.index(n) + VOCABULARIES.index(v)
    if WIDTHS.index(d) == place % 4 and n * v < 1_000_000:
      found.append((index, n, d, v))
  return found


def paired(c: Case, width: int, *, seed: int = 9, **changes) -> Case:
  """Returns the case with a reference of another width."""
  n, v = len(c.hidden), len(c.unembed)
  other = case(n, width, v, seed=seed, **changes)
  return dataclasses.replace(c, other=other)


def varied(index, n, d, v) -> tuple[Case, int | None]:
  """Returns a case and a block size that divides little, by index."""
  softcap = (None, 5.0)[index % 2]
  valid = (None, v - 3, max(2, v // 3))[index % 3]
  sizes = (None, 3, 1, 7, 96) if v < 10_000 else (None, 96, 5000, 11_111, 400)
  block = sizes[index % 5]
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


def _log_softmax(z):
  top = z.max(1, keepdims=True)
  return z - top - np.log(np.exp(z - top).sum(1, keepdims=True))


def _mean(p, values):
  return np.where(p > 0, p * np.where(p > 0, values, 0.0), 0.0).sum(1)


def _log_mix(log_p, log_q):
  return np.logaddexp(log_p + np.log(1 - BETA), log_q + np.log(BETA))


@np.errstate(invalid='ignore')
def stats(c: Case) -> dict[str, np.ndarray]:
  """Returns every statistic, f64 [N] each."""
  z = logits(c)
  log_p = _log_softmax(z)
  p = np.exp(log_p)
  rows = np.arange(len(p))
  entropy = -_mean(p, log_p)
  u = np.where(p > 0, log_p + entropy[:, None], 0.0)
  drift = (p * p * u).sum(1)
  found = {
    'logp': log_p[rows, c.targets],
    'lse': z[:, 0] - log_p[:, 0],
    'entropy': entropy,
    'varentropy': (p * u * u).sum(1),
    'top_logp': log_p.max(1),
    'collision': (p * p).sum(1),
    'entropy_drift': drift,
    'polarity': drift - (p * u)[rows, c.targets],
  }
  if c.other is None:
    return found
  log_q = _log_softmax(logits(c.other))
  q, mix = np.exp(log_q), _log_mix(log_p, log_q)
  return found | {
    'ref_logp': log_q[rows, c.targets],
    'kl_pq': _mean(p, log_p - log_q),
    'kl_qp': _mean(q, log_q - log_p),
    'js': (1 - BETA) * _mean(p, log_p - mix) + BETA * _mean(q, log_q - mix),
  }


def _one_hot(ids, size: int) -> np.ndarray:
  return (ids[:, None] == np.arange(size)[None]).astype(np.float64)


def _partials(c: Case, names) -> dict[str, np.ndarray]:
  """Returns d statistic / d log p [N, V], as if all log p were free."""
  log_p = _log_softmax(logits(c))
  p = np.exp(log_p)
  log_p = np.where(p > 0, log_p, 0.0)
  entropy = -(p * log_p).sum(1, keepdims=True)
  u = np.where(p > 0, log_p + entropy, 0.0)
  one = _one_hot(c.targets, p.shape[1])
  of_entropy = -p * (log_p + 1)
  drift = 2 * p * p * u + p * p + (p * p).sum(1, keepdims=True) * of_entropy
  own = (p * one).sum(1, keepdims=True) * of_entropy
  made = {
    'logp': lambda: one,
    'entropy': lambda: of_entropy,
    'varentropy': lambda: p * u * u + 2 * p * u,
    'top_logp': lambda: _one_hot(p.argmax(1), p.shape[1]),
    'collision': lambda: 2 * p * p,
    'entropy_drift': lambda: drift,
    'polarity': lambda: drift - one * (p * u + p) - own,
  }
  if c.other is not None:
    log_q = _log_softmax(logits(c.other))
    ratio = np.where(p > 0, log_p - np.where(p > 0, log_q, 0.0), 0.0)
    far = np.where(p > 0, log_p - _log_mix(log_p, log_q), 0.0)
    made |= {
      'kl_pq': lambda: p * ratio + p,
      'kl_qp': lambda: -np.exp(log_q),
      'js': lambda: (1 - BETA) * p * far,
    }
  return {name: make() for name, make in made.items() if name in names}


def gradients(c: Case, cotangent: dict) -> tuple[np.ndarray, np.ndarray]:
  """Returns d hidden [N, D] and d unembed [V, D] for cotangents [N] each."""
  p = np.exp(_log_softmax(logits(c)))
  dz = np.float64(cotangent.get('lse', np.zeros(len(p))))[:, None] * p
  for name, partial in _partials(c, cotangent).items():
    slope = partial - p * partial.sum(1, keepdims=True)
    dz = dz + np.float64(cotangent[name])[:, None] * slope
  dz = dz / np.asarray(c.temperature, np.float64)[:, None]
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
