"""What jax reads when it is imported, as the tests set it.

Imports no jax: call `prepare` before anything does.
"""

import hashlib
import importlib.metadata
import os
import pathlib

# Compiling is most of a test's time. Without optimization it takes a third of
# it, and the tests' arrays are too small for slower loops to matter.
_FLAGS = {
  '--xla_force_host_platform_device_count': '8',
  '--xla_backend_optimization_level': '0',
}
if importlib.metadata.version('jax') < '0.11':
  # Its fusion emitters take two thirds of compiling; later ones have no flag.
  _FLAGS['--xla_cpu_use_fusion_emitters'] = 'false'


def _cache_folder() -> pathlib.Path:
  """Returns a folder for compiled programs, one per kind of processor."""
  base = os.environ.get('XDG_CACHE_HOME') or pathlib.Path.home() / '.cache'
  cpuinfo = pathlib.Path('/proc/cpuinfo')
  text = cpuinfo.read_text() if cpuinfo.exists() else ''
  # Compiled code from a processor with other features may crash here.
  flags = next((x for x in text.splitlines() if x.startswith('flags')), '')
  kind = hashlib.sha256(flags.encode()).hexdigest()[:8]
  return pathlib.Path(base, 'rljax', f'compiled-{kind}')


def prepare() -> None:
  """Sets variables of the environment; subprocesses inherit them."""
  given = os.environ.get('XLA_FLAGS', '')
  added = [f'{k}={v}' for k, v in _FLAGS.items() if k not in given]
  os.environ['XLA_FLAGS'] = ' '.join([given, *added]).strip()
  os.environ.setdefault('JAX_PLATFORMS', 'cpu')
  os.environ.setdefault('JAX_COMPILATION_CACHE_DIR', str(_cache_folder()))
  os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0.3')
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')
  os.environ['MPLBACKEND'] = 'agg'
