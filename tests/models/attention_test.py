"""Tests of attention over parts against softmax over their concatenation."""

from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from rljax.models import attention, decoder

P, G, H, K, D = 2, 3, 4, 2, 8
B = P * G


def draw(*shape, seed=0):
  r = np.random.default_rng([seed, *shape])
  return r.normal(size=shape).astype(np.float32)


def softmax(q, k, v):
  """Returns one query's mix, f64 [H, d], of q [H, d] and k, v [L, K, d]."""
  q, k, v = (np.float64(x) for x in (q, k, v))
  out = np.zeros_like(q)
  for h in range(H):
    z = k[:, h * K // H] @ q[h] / np.sqrt(D)
    p = np.exp(z - z.max())
    out[h] = p @ v[:, h * K // H] / p.sum()
  return out


class CausalTest(parameterized.TestCase):
  @parameterized.parameters(1.0, 30.0)
  def test_sees_valid_keys_up_to_its_own(self, spread):
    q, k, v = spread * draw(P, 5, H, D), draw(P, 5, K, D), draw(P, 5, K, D)
    valid = np.array([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]], bool)
    found = jax.jit(attention.causal)(q, k, v, valid)
    for p, t in [(0, 0), (0, 3), (0, 4), (1, 2), (1, 4)]:
      seen = np.flatnonzero(valid[p, : t + 1])
      wanted = softmax(q[p, t], k[p, seen], v[p, seen])
      np.testing.assert_allclose(found[p, t], wanted, atol=1e-5)
    self.assertTrue(np.isfinite(found).all())  # also where nothing is seen


class SharedTest(parameterized.TestCase):
  @parameterized.parameters(0, 1, 4)
  def test_rows_see_their_prompt_and_themselves(self, size):
    length = 3
    total = size + G * length
    q, k, v = draw(P, total, H, D), draw(P, total, K, D), draw(P, total, K, D)
    valid = np.ones((P, size), bool)
    valid[1] = False  # a prompt of one token: nothing before the row
    found = attention.shared(q, k, v, valid, group=G)
    for p in range(P):
      for g in range(G):
        row = size + g * length
        for t in range(length):
          seen = [*np.flatnonzero(valid[p]), *range(row, row + t + 1)]
          wanted = softmax(q[p, row + t], k[p, seen], v[p, seen])
          np.testing.assert_allclose(found[p, row + t], wanted, atol=1e-5)
      for s in range(size if p == 0 else 0):
        wanted = softmax(q[p, s], k[p, : s + 1], v[p, : s + 1])
        np.testing.assert_allclose(found[p, s], wanted, atol=1e-5)


class DecodeTest(parameterized.TestCase):
  @parameterized.parameters(
    (0, (), 1, 0), (3, (), 4, 0), (3, (), 4, 3), (3, (2,), 4, 1),
    (3, (2, 3), 4, 2), (0, (2, 3), 1, 0),
  )  # fmt: skip
  def test_parts_are_one_softmax(self, prompt, closed, size, slot):
    parts = [
      decoder.Cache(draw(B, K, n, D, seed=2 * i), draw(B, K, n, D, seed=i + 9))
      for i, n in enumerate((*closed, size))
    ]
    # What lies past the slot is not there yet.
    for x in parts[-1]:
      x[:, :, slot + 1 :] = 1e6
    shared = decoder.Cache(draw(P, K, prompt, D), draw(P, K, prompt, D, seed=1))
    valid = np.arange(prompt)[None] >= np.array([0, 1])[:, None]
    q = draw(B, H, D)
    found = attention.decode(
      q, shared, valid, parts[:-1], parts[-1], jnp.int32(slot)
    )
    for b in range(B):
      p = b // G
      lines = []
      for i in (0, 1):
        seen = [shared[i][p][:, valid[p]], *(x[i][b] for x in parts[:-1])]
        seen.append(parts[-1][i][b][:, : slot + 1])
        lines.append(np.concatenate(seen, axis=1).swapaxes(0, 1))
      wanted = softmax(q[b], *lines)
      np.testing.assert_allclose(found[b], wanted, atol=1e-5)

  def test_write_changes_one_position(self):
    cache = decoder.Cache(draw(B, K, 4, D), draw(B, K, 4, D, seed=1))
    k, v = draw(B, K, D), draw(B, K, D, seed=1)
    found = attention.write(cache, k, v, jnp.int32(2))
    for new, old, x in zip(found, cache, (k, v), strict=True):
      wanted = old.copy()
      wanted[:, :, 2] = x
      np.testing.assert_array_equal(new, wanted)
