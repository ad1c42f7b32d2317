"""Cases of whole models: AdamW, and a step of TRL's trainer on a tiny Qwen2."""

import functools
import math

import jax
import jax.numpy as jnp
import optax

from rljax.core import types
from rljax.engine import optim
from rljax.models import decoder, families
from rljax.objectives import credit, ratios, surrogates, weights
import rljax_kernels
from tests.peers import golden

# What the peer was started with and the file does not hold.
_MAX_TOKENS = 8
_AGGREGATIONS = {
  'dapo': weights.token_mean,
  'cispo': weights.token_mean,
  'grpo': weights.sequence_mean_token_mean,
  'dr_grpo': functools.partial(weights.dr_grpo, max_tokens=_MAX_TOKENS),
}


def adamw(case: golden.Case, file: golden.File) -> golden.Outputs:
  """Returns parameters and gradient norms along a run of AdamW."""
  del file
  kwargs = case.kwargs
  optimizer = optim.adamw(
    kwargs['lr'],
    weight_decay=kwargs['weight_decay'],
    b2=kwargs['betas'][1],
    max_norm=math.inf if kwargs['max_norm'] is None else kwargs['max_norm'],
  )

  @jax.jit
  def update(carry, grads):
    params, state, norm, _ = optim.guarded_update(
      optimizer, grads, jnp.zeros(()), *carry
    )
    return (params, state), (params, norm)

  start = jnp.asarray(case.inputs['p0'])
  carry = (start, optimizer.init(start))
  _, (params, norm) = jax.lax.scan(update, carry, case.inputs['grads'])
  return {'params': params, 'grad_norm': norm}


def step(case: golden.Case, file: golden.File) -> golden.Outputs:
  """Returns what one step of GRPO computes, from weights to new weights.

  The sampled tokens and their advantages are data of the step.
  """
  config = families.config_from_hf(file.index['tables']['tiny_qwen2_config'])
  before = file.fixture('tiny_qwen2')
  params = families.params_from_hf(config, before)
  data = {
    name: case.outputs[name]
    for name in ('input_ids', 'attention_mask', 'completion_mask', 'advantages')
  }
  settings = case.kwargs
  model = decoder.Model(config), settings['temperature']
  stats = _read(*model, params, data)
  (loss, stats), slope = _loss(settings['loss_type'], settings['epsilon_high'])(
    stats, data
  )
  grads = _pull(*model, params, data, slope)
  after, norm = _update(
    tuple(settings[name] for name in ('lr', 'weight_decay', 'max_grad_norm')),
    jax.tree.map(jnp.asarray, params),
    grads,
    loss,
  )
  return {
    **data,
    'loss': loss,
    'per_token_logps': stats['logp'],
    'entropies': stats['entropy'],
    'entropy': stats['entropy'].sum() / data['completion_mask'].sum(),
    'grad_norm': norm,
    **_named('grad', config, grads),
    **_named('after', config, after),
  }


def _named(head: str, config: decoder.Config, params) -> golden.Outputs:
  tensors = families.params_to_hf(config, params)
  return {f'{head}/{name}': value for name, value in tensors.items()}


@functools.cache
def _loss(kind: str, high: float | None):
  """Returns the program of a loss of statistics, and of its gradient."""

  def loss(stats, data):
    mask = data['completion_mask'].astype(jnp.float32)
    # The peer has 0 for the tokens that it does not train on.
    stats = {name: jnp.where(mask > 0, x, 0.0) for name, x in stats.items()}
    old = jax.lax.stop_gradient(stats['logp'])
    ratio = ratios.token(stats['logp'], old, mask)
    adv = credit.broadcast(data['advantages'], mask)
    if kind == 'cispo':
      # The value of ours is 0 on-policy; the peer's has the whole log-prob.
      objective = surrogates.cispo(ratio, adv, cap=high or 5.0) + adv * old
    else:
      objective = surrogates.clip(ratio, adv, high=high or 0.2)
    return -jnp.sum(objective * _AGGREGATIONS[kind](mask)), stats

  return jax.jit(jax.value_and_grad(loss, has_aux=True))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _pull(model: decoder.Model, temperature: float, params, data, slope):
  """Returns the gradient of the parameters from that of the statistics."""
  read = functools.partial(_read, model, temperature)
  return jax.vjp(lambda params: read(params, data), params)[1](slope)[0]


@functools.partial(jax.jit, static_argnums=0)
def _update(settings: tuple[float, float, float], params, grads, loss):
  """Returns the parameters after a step, and the norm of the gradient."""
  optimizer = _optimizer(*settings)
  after, _, norm, _ = optim.guarded_update(
    optimizer, grads, loss, params, optimizer.init(params)
  )
  return after, norm


@functools.partial(jax.jit, static_argnums=(0, 1))
def _read(model: decoder.Model, temperature: float, params, data):
  """Returns log-probs and entropies [B, T] of the responses."""
  ids, size = data['input_ids'], data['completion_mask'].shape[1]
  prompt, response = ids[:, :-size], ids[:, -size:]
  prompts = types.Prompts(
    tokens=prompt,
    length=jnp.sum(data['attention_mask'][:, :-size], axis=1),
    uid=jnp.arange(len(ids)),
  )
  hidden = model.hidden(params, prompts, response)
  stats = rljax_kernels.vocab_stats(
    hidden.reshape(-1, hidden.shape[-1]),
    model.head(params, jnp.ones(len(ids))).weight,
    response.reshape(-1),
    temperature=temperature,
    want=('logp', 'entropy'),
  )
  return {name: x.reshape(response.shape) for name, x in stats.items()}


def _optimizer(lr: float, weight_decay: float, max_norm: float):
  """Returns Hugging Face's AdamW: biases and norms do not decay."""

  def decays(params):
    return jax.tree_util.tree_map_with_path(
      lambda path, _: path[-1].key not in ('bias', 'scale'), params
    )

  return optax.chain(
    optax.clip_by_global_norm(max_norm),
    optax.adamw(lr, weight_decay=weight_decay, mask=decays),
  )


ADAPTERS = {
  'AdamW+clip_grad_norm_': adamw,
  'GRPOTrainer real step on tiny Qwen2': step,
}
_FIRST = golden.Declared(
  ('after/',),
  'The first step of AdamW is lr g / (abs(g) + 1e-8). Where g is a sum over'
  ' rows and tokens that cancels to 1.9e-8, its rounding, 3e-11 of terms of'
  ' 1e-3, moves a parameter by 4e-4 of a step, 3.7e-6; 2.2e-6 is allowed. All'
  ' gradients match, and AdamW in the cases of its own.',
)
DECLARED = {
  f'trl/e2e/{kind}': _FIRST for kind in ('dapo', 'grpo', 'dr_grpo', 'cispo')
}
