"""Which implementation computes a program, and why."""

import functools
from typing import Any, NamedTuple

import jax

from rljax_kernels.layout import Layout
from rljax_kernels.vocab_stats import (
  algebra,
  pallas_tpu,
  program,
  tpu_tile,
  xla_token,
  xla_vocab,
)
from rljax_kernels.vocab_stats.program import Inputs, Plan

NAMES = ('pallas_tpu', 'xla_vocab', 'xla_token', 'reference')
# Below this, programs of every platform are alike and tracing one is quicker.
_SMALL = 4096


class Choice(NamedTuple):
  """An implementation and why it was chosen."""

  name: str  # one of NAMES, or 'by_platform': when the program is lowered
  reason: str
  kind: str | None = None  # of the devices, if it is known
  on_tpu: str = 'pallas_tpu'  # for 'by_platform'

  def on(self, platform: str) -> 'Choice':
    """Returns the choice of 'by_platform' for a platform."""
    names = {'tpu': self.on_tpu, 'gpu': 'xla_vocab'}
    return self._replace(name=names.get(platform, 'xla_token'))


def choose(
  plan: Plan, x: Inputs, layout: Layout | None, name: str | None
) -> Choice:
  """Returns the implementation, given or chosen.

  Raises:
    ValueError: there is no such implementation.
    NotImplementedError: the one that was asked for cannot serve.
  """
  if layout is not None:
    vocab = program.vocab_size(x.policy.unembed, plan.wide)
    layout.check(x.targets.shape[0], vocab)
  if name is not None:
    return _asked(plan, x, layout, name)
  if not x.targets.size:
    return Choice('xla_token', 'there is no token')
  device = layout.mesh.devices.flat[0] if layout else None
  kind: Any = device.device_kind if device else None
  refused = tpu_tile.refusal(plan, x, tpu_tile.chip_of(kind))
  if device is not None:
    return _of_platform(device.platform, kind, refused)
  if program.vocab_size(x.policy.unembed, plan.wide) < _SMALL:
    return Choice('xla_token', f'a vocabulary below {_SMALL} is one block')
  why = f' ({refused})' if refused else ''
  on_tpu = 'xla_vocab' if refused else 'pallas_tpu'
  reason = f'{on_tpu} on TPU{why}, xla_vocab on GPU, xla_token elsewhere'
  return Choice('by_platform', reason, on_tpu=on_tpu)


def _asked(plan, x, layout, name: str) -> Choice:
  if name not in NAMES:
    raise ValueError(f'implementation={name!r} is not among {NAMES}.')
  kind = layout.mesh.devices.flat[0].device_kind if layout else None
  if name == 'pallas_tpu':
    refused = tpu_tile.refusal(plan, x, tpu_tile.chip_of(kind))
    if refused:
      raise NotImplementedError(f'pallas_tpu cannot serve: {refused}.')
  if name == 'reference' and (layout or plan.vocab_axis):
    raise NotImplementedError('reference cannot serve: it knows no mesh.')
  return Choice(name, 'it was asked for', kind)


def _of_platform(platform: str, kind: str, refused: str | None) -> Choice:
  if platform == 'tpu':
    if refused:
      return Choice('xla_vocab', f'pallas_tpu cannot serve: {refused}', kind)
    return Choice('pallas_tpu', f'the mesh is of {kind}', kind)
  if platform in ('gpu', 'cuda', 'rocm'):
    return Choice('xla_vocab', f'the mesh is of {kind}', kind)
  return Choice('xla_token', f'the mesh is of {kind}', kind)


def sweep(picked: Choice, plan: Plan, x: Inputs, stats):
  """Returns the moments of all local ids; see `Implementation`."""
  return _dispatch('sweep', picked, plan, x, stats)


def pull(picked: Choice, plan: Plan, x: Inputs, constants: algebra.Columns):
  """Returns cotangents of hidden and unembed; see `Implementation`."""
  return _dispatch('pull', picked, plan, x, constants)


def _dispatch(what: str, picked: Choice, plan: Plan, x: Inputs, columns):
  chip = tpu_tile.chip_of(picked.kind)
  named = {
    'pallas_tpu': functools.partial(getattr(pallas_tpu, what), plan, chip=chip),
    'xla_vocab': functools.partial(getattr(xla_vocab, what), plan),
    'xla_token': functools.partial(getattr(xla_token, what), plan),
  }
  if picked.name != 'by_platform':
    return named[picked.name](x, columns)
  gpu, tpu = named['xla_vocab'], named[picked.on_tpu]
  return jax.lax.platform_dependent(
    x, columns, tpu=tpu, cuda=gpu, rocm=gpu, default=named['xla_token']
  )
