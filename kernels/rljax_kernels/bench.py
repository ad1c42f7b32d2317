"""What the kernels save, in time and memory.

  python -m rljax_kernels.bench
  python -m rljax_kernels.bench --aot=v5e,v5p,v6e
  python -m rljax_kernels.bench --peer=naive,tokamax --json

Times are CPU seconds of the process, all threads, medians of runs that take
turns, so that a busy machine changes them little and their ratios less.
`--aot` compiles for chips that need not be there (see `chips`) and prints the
memory a program takes beside its arguments and results.
"""

import argparse
from collections.abc import Callable, Sequence
import importlib
import importlib.util
import json
import statistics
import sys
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import rljax_kernels
from rljax_kernels import chips

_MIB = 2**20
_N, _D, _V = 2048, 256, 32_768
_COLUMNS = ('name', 'cpu_s', 'ratio_to_naive', 'temp_mib', 'platform')


class Work(NamedTuple):
  """A program to be measured."""

  name: str
  naive: str  # what it is compared with
  fn: Callable
  args: tuple


def problem(seed: int = 0) -> dict[str, Any]:
  """Returns hidden states, an unembedding and data of a token loss."""
  keys = iter(jax.random.split(jax.random.key(seed), 5))

  def normal(*shape):
    return jax.random.normal(next(keys), shape)

  return {
    'hidden': normal(_N, _D),
    'unembed': normal(_V, _D) * 2 / _D**0.5,
    'targets': jax.random.randint(next(keys), (_N,), 0, _V),
    'weight': jnp.full(_N, 1 / _N, jnp.float32),
    'old': -10.4 + 0.1 * normal(_N),
    'advantage': normal(_N),
  }


def surrogate(logp, data):
  """Returns the clipped surrogate of each token."""
  ratio = jnp.exp(logp - data['old'])
  clipped = jnp.clip(ratio, 0.8, 1.2)
  return jnp.minimum(ratio * data['advantage'], clipped * data['advantage'])


def _objective(entropy: bool):
  def fn(stats, data):
    bonus = 0.01 * stats['entropy'] if entropy else 0.0
    return surrogate(stats['logp'], data) + bonus, {}

  return fn


def _naive_loss(entropy: bool):
  """Returns the loss that forms all logits."""

  def loss(hidden, unembed, p):
    log_p = jax.nn.log_softmax(hidden @ unembed.T)
    logp = jnp.take_along_axis(log_p, p['targets'][:, None], 1)[:, 0]
    stats = {'logp': logp}
    if entropy:
      stats['entropy'] = -jnp.sum(jnp.exp(log_p) * log_p, 1)
    value, _ = _objective(entropy)(stats, p)
    return -jnp.sum(p['weight'] * value)

  return lambda p: jax.value_and_grad(loss, (0, 1))(
    p['hidden'], p['unembed'], p
  )


def _token_loss(entropy: bool, **options):
  want = ('logp', 'entropy') if entropy else ('logp',)

  def run(p):
    data = {k: p[k] for k in ('old', 'advantage')}
    sums = rljax_kernels.token_loss(
      _objective(entropy), p['hidden'], p['unembed'], p['targets'],
      p['weight'], data, want=want, **options,
    )  # fmt: skip
    return sums.loss, sums.d_hidden, sums.d_unembed

  return run


def _stats_loss(entropy: bool, **options):
  """Returns the loss through `vocab_stats`, differentiated by jax."""
  want = ('logp', 'entropy') if entropy else ('logp',)

  def loss(hidden, unembed, p):
    stats = rljax_kernels.vocab_stats(
      hidden, unembed, p['targets'], want=want, **options
    )
    return -jnp.sum(p['weight'] * _objective(entropy)(stats, p)[0])

  return lambda p: jax.value_and_grad(loss, (0, 1))(
    p['hidden'], p['unembed'], p
  )


def works() -> list[Work]:
  """Returns the programs that run on this machine."""
  full = problem()
  half = {**full, 'weight': full['weight'] * (jnp.arange(_N) % 2)}
  found = []
  for entropy, suffix in ((False, ''), (True, ' + entropy')):
    naive = f'naive{suffix}'
    found += [
      Work(naive, naive, _naive_loss(entropy), (full,)),
      Work(f'token_loss{suffix}', naive, _token_loss(entropy), (full,)),
      Work(f'vocab_stats{suffix}', naive, _stats_loss(entropy), (full,)),
      Work(
        f'vocab_stats{suffix}, xla_vocab',
        naive,
        _stats_loss(entropy, implementation='xla_vocab'),
        (full,),
      ),
    ]
  found.append(
    Work('token_loss, half dead', 'naive', _token_loss(False), (half,))
  )
  return found + _sampling()


def _sampling() -> list[Work]:
  keys = jax.random.split(jax.random.key(1), 3)
  hidden = jax.random.normal(keys[0], (64, 576))
  unembed = jax.random.normal(keys[1], (49_152, 576)) / 24
  uniform = jax.random.uniform(keys[2], (64,))

  def head(h, w, u):
    return jnp.max(h @ w.T, axis=1) + u

  name = 'head matmul of 64 rows, V 49,152'
  args = (hidden, unembed, uniform)
  return [
    Work(name, name, head, args),
    Work('vocab_sample of them', name, rljax_kernels.vocab_sample, args),
  ]


def tokamax() -> list[Work]:
  """Returns the same loss through tokamax; it needs Python 3.12."""
  fused = importlib.import_module('tokamax').linear_softmax_cross_entropy_loss
  p = problem()

  def run(implementation):
    def loss(hidden, unembed, p):
      # Its only output is -logp, so that a surrogate needs no more of it.
      nll = fused(
        hidden, p['targets'], unembed.T, reduction='none',
        implementation=implementation,
      )  # fmt: skip
      return -jnp.sum(p['weight'] * surrogate(-nll, p))

    return lambda p: jax.value_and_grad(loss, (0, 1))(
      p['hidden'], p['unembed'], p
    )

  return [
    Work(f'tokamax {name}', 'naive', run(name), (p,))
    for name in ('chunked_xla', 'xla')
  ]


def timed(todo: Sequence[Work], rounds: int) -> list[dict[str, Any]]:
  """Returns a row for each program, after runs that take turns."""
  compiled = {w.name: jax.jit(w.fn).lower(*w.args).compile() for w in todo}
  spent: dict[str, list[float]] = {w.name: [] for w in todo}
  for number in range(rounds + 1):
    for w in todo:
      begun = time.process_time()
      jax.block_until_ready(compiled[w.name](*w.args))
      spent[w.name].append(time.process_time() - begun)
    _tell(f'round {number} of {rounds}')
  median = {name: statistics.median(x[1:]) for name, x in spent.items()}
  platform = jax.devices()[0].device_kind
  return [
    {
      'name': w.name,
      'cpu_s': round(median[w.name], 4),
      'ratio_to_naive': round(median[w.name] / median[w.naive], 3),
      'temp_mib': _temporaries(compiled[w.name]),
      'platform': platform,
    }
    for w in todo
  ]


def _temporaries(compiled) -> float:
  return round(compiled.memory_analysis().temp_size_in_bytes / _MIB, 1)


# Compiling for chips that are not there.


def _programs(chip: str) -> list[tuple[str, dict[str, Any]]]:
  """Returns implementations to compile for a chip, with their options."""
  blocks = [('xla_vocab', {}), ('xla_vocab', {'kl': True})]
  if not chip.startswith('v'):
    return blocks
  kernels = [{}, {'kl': True}, {'tensor': 4}]
  return [*(('pallas_tpu', options) for options in kernels), *blocks]


def aot(wanted: Sequence[str]) -> list[dict[str, Any]]:
  """Returns a row for each chip and program."""
  rows = []
  for chip in wanted:
    for name, options in _programs(chip):
      more = ''.join(f', {k}={v}' for k, v in options.items())
      _tell(f'compiling {name}{more} for {chip}')
      found = chips.compiled_for(chip, name, **options)
      rows.append(
        {
          'name': name + more,
          'cpu_s': None,
          'ratio_to_naive': None,
          'temp_mib': _temporaries(found),
          'platform': chip,
        }
      )
  return rows


def _tell(text: str) -> None:
  """Shows what is being done, on a terminal."""
  if sys.stderr.isatty():
    sys.stderr.write(f'\r\033[K{text}')
    sys.stderr.flush()


def _table(rows: Sequence[dict[str, Any]]) -> str:
  cells = [_COLUMNS] + [
    tuple('-' if row[k] is None else f'{row[k]}' for k in _COLUMNS)
    for row in rows
  ]
  widths = [max(len(row[i]) for row in cells) for i in range(len(_COLUMNS))]
  lines = []
  for row in cells:
    numbers = [f'{x:>{w}}' for x, w in zip(row[1:], widths[1:], strict=True)]
    lines.append('  '.join([f'{row[0]:<{widths[0]}}', *numbers]).rstrip())
  return '\n'.join(lines)


def _peers(names: Sequence[str]) -> tuple[list[Work], list[str]]:
  """Returns programs of other libraries, and why some are absent."""
  if 'tokamax' not in names:
    return [], []
  if importlib.util.find_spec('tokamax') is None:
    return [], ['tokamax: not installed; it needs Python 3.12']
  return tokamax(), []


def main(argv: Sequence[str] | None = None) -> int:
  """Prints the table; returns the exit status."""
  parser = argparse.ArgumentParser(
    prog='python -m rljax_kernels.bench', description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )  # fmt: skip
  parser.add_argument('--aot', default='', help='chips to compile for')
  parser.add_argument('--peer', default='naive', help='naive, tokamax')
  parser.add_argument('--rounds', type=int, default=7)
  parser.add_argument('--json', action='store_true')
  options = parser.parse_args(argv)
  wanted = [x for x in options.aot.split(',') if x]
  for chip in wanted:
    if chip not in chips.CHIPS:
      parser.error(f'--aot knows {", ".join(chips.CHIPS)}, not {chip!r}')
    if lacking := chips.missing(chip):
      parser.error(lacking)
  peers, absent = _peers(options.peer.split(','))
  rows = aot(wanted) if wanted else timed([*works(), *peers], options.rounds)
  _tell('')
  sys.stdout.write((json.dumps(rows) if options.json else _table(rows)) + '\n')
  for line in absent:
    sys.stderr.write(line + '\n')
  return 0


if __name__ == '__main__':
  sys.exit(main())
