"""What the kernels save, in time and memory.

  python -m rljax_kernels.bench
  python -m rljax_kernels.bench --aot=v5e,v5p,v6e
  python -m rljax_kernels.bench --peer=naive,tokamax --json

Times are CPU seconds of the process, all threads, medians of runs that take
turns, so that a busy machine changes them little and their ratios less. With
`--aot`, programs are compiled for chips that need not be there (see `chips`)
and only the memory is shown that they take beside arguments and results.
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
_COLUMNS = ('name', 'cpu_s', 'ratio_to_naive', 'temp_mib', 'platform')
_PEERS = ('naive', 'tokamax')


class Sizes(NamedTuple):
  """How large the arrays are."""

  tokens: int = 2048
  width: int = 256
  vocab: int = 32_768
  drawn: tuple[int, int, int] = (64, 576, 49_152)  # the same, of samples


FULL = Sizes()


class Stop(NamedTuple):
  """When to end: after so many rounds, or so many seconds."""

  rounds: int
  seconds: float


class Work(NamedTuple):
  """A program to be measured."""

  name: str
  naive: str  # what it is compared with
  fn: Callable
  args: tuple
  calls: int = 1  # in a row, so that a short one takes its time


def problem(sizes: Sizes) -> dict[str, Any]:
  """Returns hidden states, an unembedding and data of a token loss."""
  keys = iter(jax.random.split(jax.random.key(0), 5))
  tokens, width, vocab, _ = sizes

  def normal(*shape):
    return jax.random.normal(next(keys), shape)

  return {
    'hidden': normal(tokens, width),
    'unembed': normal(vocab, width) * 2 / width**0.5,
    'targets': jax.random.randint(next(keys), (tokens,), 0, vocab),
    'weight': jnp.full(tokens, 1 / tokens, jnp.float32),
    'old': -jnp.log(vocab) + 0.1 * normal(tokens),
    'advantage': normal(tokens),
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


def works(sizes: Sizes) -> list[Work]:
  """Returns the programs that run on this machine."""
  full = problem(sizes)
  live = jnp.arange(sizes.tokens) % 2
  half = {**full, 'weight': full['weight'] * live}
  found = []
  for entropy, suffix in ((False, ''), (True, ' + entropy')):
    naive, blocks = f'naive{suffix}', {'implementation': 'xla_vocab'}
    programs = {
      naive: _naive_loss(entropy),
      f'token_loss{suffix}': _token_loss(entropy),
      f'vocab_stats{suffix}': _stats_loss(entropy),
      f'vocab_stats{suffix}, xla_vocab': _stats_loss(entropy, **blocks),
    }
    found += [Work(k, naive, fn, (full,)) for k, fn in programs.items()]
  dead = Work('token_loss, half dead', 'naive', _token_loss(False), (half,))
  return [*found, dead, *_sampling(sizes)]


def _sampling(sizes: Sizes) -> list[Work]:
  tokens, width, vocab = sizes.drawn
  keys = jax.random.split(jax.random.key(1), 3)
  hidden = jax.random.normal(keys[0], (tokens, width))
  unembed = jax.random.normal(keys[1], (vocab, width)) / width**0.5
  uniform = jax.random.uniform(keys[2], (tokens,))

  def head(h, w, u):
    return jnp.max(h @ w.T, axis=1) + u

  name = f'head matmul of {tokens} rows, V {vocab:,}'
  args = (hidden, unembed, uniform)
  return [
    Work(name, name, head, args, 10),
    Work('vocab_sample of them', name, rljax_kernels.vocab_sample, args, 10),
  ]


def tokamax(sizes: Sizes) -> list[Work]:
  """Returns the same loss through tokamax; it needs Python 3.12."""
  fused = importlib.import_module('tokamax').linear_softmax_cross_entropy_loss
  p = problem(sizes)

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


def timed(todo: Sequence[Work], stop: Stop) -> list[dict[str, Any]]:
  """Returns a row for each program, after runs that take turns."""
  compiled = {}
  for number, w in enumerate(todo, 1):
    _tell(f'compiling {number} of {len(todo)}: {w.name}')
    compiled[w.name] = jax.jit(w.fn).lower(*w.args).compile()
  spent: dict[str, list[float]] = {w.name: [] for w in todo}
  begun, number = time.monotonic(), 0
  while number <= stop.rounds:
    for w in todo:
      # What a run gives back to the system after its result is not the next's.
      time.sleep(0.2)
      before = time.process_time()
      for _ in range(w.calls):
        jax.block_until_ready(compiled[w.name](*w.args))
      spent[w.name].append((time.process_time() - before) / w.calls)
    passed = time.monotonic() - begun
    _tell(
      f'round {number} of {stop.rounds}, {passed:.0f} s'
      + ('' if number else ' (to warm up; it does not count)')
    )
    number += 1
    if passed > stop.seconds and 1 < number <= stop.rounds:
      _tell(
        f'stopped at --seconds={stop.seconds:g}: medians are of {number - 1} of'
        f' {stop.rounds} rounds'
      )
      break
  median = {name: statistics.median(x[1:]) for name, x in spent.items()}
  platform = jax.devices()[0].device_kind
  return [
    _row(
      w.name,
      platform,
      round(median[w.name], 4),
      round(median[w.name] / median[w.naive], 3),
      _temporaries(compiled[w.name]),
    )
    for w in todo
  ]


def _row(
  name, platform=None, cpu_s=None, ratio=None, temp_mib=None
) -> dict[str, Any]:
  values = name, cpu_s, ratio, temp_mib, platform
  return dict(zip(_COLUMNS, values, strict=True))


def _temporaries(compiled) -> float:
  return round(compiled.memory_analysis().temp_size_in_bytes / _MIB, 1)


# Compiling for chips that are not there.


def _programs_for(chip: str, peers: Sequence[str]):
  """Returns implementations to compile for a chip, with their options."""
  names = ['pallas_tpu', 'xla_vocab'] if chips.is_tpu(chip) else ['xla_vocab']
  if chips.NAIVE in peers:
    names.insert(0, chips.NAIVE)
  found: list[tuple[str, dict]] = []
  for name in names:
    found += [(name, {}), (name, {'kl': True})]
  if chips.is_tpu(chip):
    found.append(('pallas_tpu', {'tensor': 4}))
  return found


def aot(wanted: Sequence[str], peers: Sequence[str]) -> list[dict[str, Any]]:
  """Returns a row for each chip and program."""
  rows = []
  for chip in wanted:
    for name, options in _programs_for(chip, peers):
      title = name + ''.join(f', {k}={v}' for k, v in options.items())
      _tell(f'compiling {title} for {chip}')
      try:
        found = chips.compiled_for(chip, name, **options)
      except jax.errors.JaxRuntimeError as error:
        if 'RESOURCE_EXHAUSTED' not in str(error):
          raise
        rows.append(_row(f'{title} (does not fit)', chip))
        continue
      rows.append(_row(title, chip, temp_mib=_temporaries(found)))
  return rows


def _tell(text: str) -> None:
  """Shows what is being done: on one line of a terminal, or in a log."""
  start, end = ('\r\033[K', '') if sys.stderr.isatty() else ('', '\n')
  sys.stderr.write(f'{start}{text}{end}')
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


def _names(known: Sequence[str]):
  """Returns what reads names with commas between, among `known`."""

  def read(text: str) -> list[str]:
    names = text.split(',')
    if unknown := [x for x in names if x not in known]:
      raise argparse.ArgumentTypeError(
        f'{", ".join(map(repr, unknown))} is not among {", ".join(known)};'
        ' put commas between names'
      )
    return list(dict.fromkeys(names))

  return read


def _at_least(least: float, kind: type):
  """Returns what reads a number that is at least `least`."""

  def read(text: str):
    try:
      number = kind(text)
    except ValueError:
      number = None
    if number is None or not least <= number < float('inf'):
      raise argparse.ArgumentTypeError(
        f'{text!r} must be {"an integer" if kind is int else "a number"} of at'
        f' least {least:g}'
      )
    return number

  return read


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(
    prog='python -m rljax_kernels.bench', description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )  # fmt: skip
  parser.add_argument(
    '--aot', type=_names(chips.CHIPS), metavar='CHIPS',
    help='compile for these instead of running here, with commas between:'
    f' {", ".join(chips.CHIPS)}',
  )  # fmt: skip
  parser.add_argument(
    '--peer', type=_names(_PEERS), default=['naive'], metavar='PEERS',
    help=f'what to compare with, of {", ".join(_PEERS)} (default: naive;'
    ' without --aot it always runs, since ratios are to it)',
  )  # fmt: skip
  parser.add_argument(
    '--rounds', type=_at_least(1, int), default=5,
    help='timed runs of each program, after one that warms up'
    ' (default: %(default)s)',
  )  # fmt: skip
  parser.add_argument(
    '--seconds', type=_at_least(0, float), default=180.0,
    help='start no round after this time, but always time one'
    ' (default: %(default)g)',
  )  # fmt: skip
  parser.add_argument(
    '--json', action='store_true', help='print rows as JSON, not as a table'
  )
  return parser


def _absent(options) -> str | None:
  """Returns why tokamax is not in the table though it was asked for."""
  if 'tokamax' not in options.peer:
    return None
  if options.aot:
    return 'it is only timed, without --aot'
  if importlib.util.find_spec('tokamax') is None:
    return 'not installed; it needs Python 3.12: pip install tokamax'
  return None


def main(argv: Sequence[str] | None = None, sizes: Sizes = FULL) -> int:
  """Prints the table; returns the exit status."""
  parser = _parser()
  options = parser.parse_args(argv)
  for chip in options.aot or ():
    if lacking := chips.missing(chip):
      parser.error(f'--aot={chip}: {lacking}')
  absent = _absent(options)
  if options.aot:
    rows = aot(options.aot, options.peer)
  else:
    peers = 'tokamax' in options.peer and absent is None
    todo = [*works(sizes), *(tokamax(sizes) if peers else ())]
    rows = timed(todo, Stop(options.rounds, options.seconds))
  if absent:
    rows.append(_row(f'tokamax (absent: {absent})'))
  if sys.stderr.isatty():
    _tell('')
  sys.stdout.write((json.dumps(rows) if options.json else _table(rows)) + '\n')
  return 0


if __name__ == '__main__':
  sys.exit(main())
