"""A token loss that uses all it is given, and what it should give."""

import jax.numpy as jnp
import numpy as np

from tests.kernels import oracle


def objective(stats, data):
  """Uses every statistic and its data, unevenly."""
  ratio = jnp.exp(0.1 * (stats['logp'] - data['old']))
  total = ratio * data['a'] + 0.3 * stats['entropy'] + 0.05 * stats['lse']
  return total, {'ratio': ratio, 'entropy': stats['entropy']}


def expected(c, weight, data):
  """Returns loss, sums, d hidden and d unembed of `objective`, in float64."""
  live = weight != 0
  s = oracle.stats(c)
  old, a = (np.where(live, data[k], 0.0) for k in ('old', 'a'))
  ratio = np.exp(0.1 * (s['logp'] - old))
  value = ratio * a + 0.3 * s['entropy'] + 0.05 * s['lse']
  sums = {'ratio': ratio[live].sum(), 'entropy': s['entropy'][live].sum()}
  slopes = {
    'logp': -weight * 0.1 * ratio * a,
    'entropy': -weight * 0.3,
    'lse': -weight * 0.05,
  }
  return -(weight * value)[live].sum(), sums, *oracle.gradients(c, slopes)


def inputs(n, dead):
  """Returns weights and data; data at dead tokens is NaN and infinite."""
  r = np.random.default_rng(n)
  live = r.uniform(size=n) >= dead
  weight = np.where(live, r.normal(size=n), 0.0).astype(np.float32)
  old = np.where(live, -r.uniform(0, 3, n), np.nan).astype(np.float32)
  a = np.where(live, r.normal(size=n), np.inf).astype(np.float32)
  return weight, {'old': old, 'a': a}


def compare(c, weight, data, sums, gradient=3e-5):
  """Fails where the kernel is further from float64 than allowed."""
  loss, aux, d_hidden, d_unembed = expected(c, weight, data)
  scale = 1.0 + np.abs(weight).sum()
  np.testing.assert_allclose(sums.loss, loss, atol=3e-6 * scale)
  for name in aux:
    np.testing.assert_allclose(sums.aux[name], aux[name], rtol=1e-5, atol=1e-5)
  assert oracle.error(sums.d_hidden, d_hidden) <= gradient
  assert oracle.error(sums.d_unembed, d_unembed) <= gradient
  live = weight != 0
  for name in sums.stats:
    wanted = np.where(live, oracle.stats(c)[name], 0.0)
    np.testing.assert_allclose(sums.stats[name], wanted, atol=2e-5)
  np.testing.assert_array_equal(sums.d_hidden[~live], 0)
