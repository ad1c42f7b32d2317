"""Tests of optimizers and of the guard around their updates."""

from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np
import optax

from rljax.engine import optim
from rljax.models import decoder

PARAMS = {'a': jnp.array([1.0, -2.0]), 'b': jnp.array([[0.5]])}
GRADS = {'a': jnp.array([3.0, 0.0]), 'b': jnp.array([[-4.0]])}  # norm 5


def update(optimizer, grads=GRADS, loss=1.0, state=None):
  state = optimizer.init(PARAMS) if state is None else state
  return optim.guarded_update(
    optimizer, grads, jnp.float32(loss), PARAMS, state
  )


def moves(params):
  return np.concatenate([
    (np.asarray(params[k]) - PARAMS[k]).ravel() for k in 'ab'
  ])  # fmt: skip


class AdamwTest(parameterized.TestCase):
  def test_by_hand(self):
    # First step: both moments cancel, so each entry moves by the rate.
    params, *_ = update(optim.adamw(0.1))
    np.testing.assert_allclose(moves(params), [-0.1, 0, 0.1], atol=1e-6)

  def test_weight_decay_pulls_to_zero(self):
    params, *_ = update(optim.adamw(0.1, weight_decay=0.5))
    wanted = [-0.1 - 0.05 * 1.0, 0.05 * 2.0, 0.1 - 0.05 * 0.5]
    np.testing.assert_allclose(moves(params), wanted, atol=1e-6)

  def test_biases_and_norms_do_not_decay(self):
    model = decoder.Model(
      decoder.Config(
        vocab_size=11, width=8, layers=2, heads=2, kv_heads=1, head_dim=4,
        mlp_width=24, qk_norm=True, qkv_bias=True,
      )
    )  # fmt: skip
    params = jax.eval_shape(model.init, jax.random.key(0))
    found = jax.tree_util.tree_leaves_with_path(optim.decaying(params))
    names = {jax.tree_util.keystr(path): decays for path, decays in found}
    kept = {name for name, decays in names.items() if not decays}
    wanted = {n for n in names if 'norm' in n or 'bias' in n}
    self.assertLen(kept, 2 + 2 + 1 + 3)
    self.assertEqual(kept, wanted)
    self.assertTrue(names["['embed']"])

  def test_what_does_not_decay_only_follows_its_gradient(self):
    params = {'kernel': jnp.full(2, 2.0), 'scale': jnp.full(2, 2.0)}
    optimizer = optim.adamw(0.1, weight_decay=0.5)
    zero = jax.tree.map(jnp.zeros_like, params)
    moved, _ = optimizer.update(zero, optimizer.init(params), params)
    np.testing.assert_allclose(moved['kernel'], -0.1 * 0.5 * 2.0, rtol=1e-6)
    np.testing.assert_array_equal(moved['scale'], 0.0)
    every = optim.adamw(
      0.1, weight_decay=0.5, decays=lambda p: jax.tree.map(lambda _: True, p)
    )
    moved, _ = every.update(zero, every.init(params), params)
    np.testing.assert_allclose(moved['scale'], -0.1, rtol=1e-6)
    # A tree that is one array has no name.
    self.assertTrue(optim.decaying(jnp.ones(2)))

  def test_largest_norm(self):
    # Adam forgets the scale, its second moment remembers the clipped one.
    for norm, share in ((1.0, 1 / 5), (10.0, 1.0)):
      _, state, *_ = update(optim.adamw(0.1, max_norm=norm, b2=0.9))
      nu = optax.tree.get(state, 'nu')
      wanted = 0.1 * np.square(share * np.array([3.0, 0.0]))
      np.testing.assert_allclose(nu['a'], wanted, rtol=1e-5)

  def test_rate_follows_the_updates(self):
    optimizer = optim.adamw(lambda count: 0.1 / (1.0 + count))
    _, state, *_ = update(optimizer)
    second, *_ = update(optimizer, state=state)
    self.assertAlmostEqual(float(moves(second)[0]), -0.05, places=5)


class GuardTest(parameterized.TestCase):
  def test_a_finite_update_is_the_optimizers(self):
    optimizer = optim.adamw(0.1)
    params, state, norm, ok = update(optimizer)
    moved, wanted = optimizer.update(GRADS, optimizer.init(PARAMS), PARAMS)
    for x, y in zip(
      jax.tree.leaves((params, state)),
      jax.tree.leaves((optax.apply_updates(PARAMS, moved), wanted)),
      strict=True,
    ):
      np.testing.assert_array_equal(x, y)
    self.assertAlmostEqual(float(norm), 5.0, places=5)
    self.assertTrue(ok)

  def test_without_a_token_not_even_momentum_moves(self):
    optimizer = optim.adamw(0.1, weight_decay=0.1)
    _, state, *_ = update(optimizer)
    zero = jax.tree.map(jnp.zeros_like, GRADS)
    for counted in (True, False):
      params, after, _, ok = optim.guarded_update(
        optimizer, zero, jnp.float32(0), PARAMS, state, counted
      )
      self.assertTrue(ok)
      pairs = zip(
        jax.tree.leaves((params, after)),
        jax.tree.leaves((PARAMS, state)),
        strict=True,
      )
      same = all(np.array_equal(x, y) for x, y in pairs)
      self.assertEqual(same, not counted)

  @parameterized.product(value=(np.nan, np.inf), where=('loss', 'gradient'))
  def test_others_change_nothing(self, value, where):
    optimizer = optim.adamw(0.1)
    _, state, *_ = update(optimizer)  # not the empty state
    grads, loss = GRADS, value
    if where == 'gradient':
      grads, loss = {**GRADS, 'b': jnp.array([[value]])}, 1.0
    params, after, _, ok = update(optimizer, grads, loss, state)
    self.assertFalse(ok)
    for x, y in zip(
      jax.tree.leaves((params, after)),
      jax.tree.leaves((PARAMS, state)),
      strict=True,
    ):
      np.testing.assert_array_equal(x, y)
