"""Programs compiled for accelerators that need not be there.

A TPU needs libtpu. A GPU needs the CUDA plugin of the same version as jax
(`jax-cuda13-plugin` and `jax-cuda13-pjrt`; no driver, no other package; tried
with 0.12.0.1) and JAX_PLATFORMS=cpu.
"""

import importlib.util
import os
import pathlib

import jax
from jax.experimental import topologies
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import rljax_kernels

_TPUS = {
  'v5e': 'v5e:2x2',
  'v5p': 'v5p:2x2x1',
  'v6e': 'v6e:2x2',
  'v7x': 'tpu7x:2x2x1',
}
# What XLA's compiler must know of a GPU, as text of its GpuTargetConfigProto.
_GPUS = {
  'h100': """
    platform_name: "CUDA"
    device_description_str: "NVIDIA H100 80GB HBM3"
    dnn_version_info { major: 9 minor: 8 }
    gpu_device_info {
      cuda_compute_capability { major: 9 }
      core_count: 132
      fpus_per_core: 128
      threads_per_warp: 32
      threads_per_block_limit: 1024
      threads_per_core_limit: 2048
      registers_per_core_limit: 65536
      registers_per_block_limit: 65536
      shared_memory_per_block: 49152
      shared_memory_per_block_optin: 232448
      shared_memory_per_core: 233472
      block_dim_limit_x: 2147483647
      block_dim_limit_y: 65535
      block_dim_limit_z: 65535
      l2_cache_size: 52428800
      memory_bandwidth: 3352320000000
      device_memory_size: 84942979072
      clock_rate_ghz: 1.98
    }
  """
}
CHIPS = (*_TPUS, *_GPUS)
NAIVE = 'naive'
_CUDA_PARTS = 'plugin', 'pjrt'


def is_tpu(chip: str) -> bool:
  """Whether one of `CHIPS` is a TPU."""
  return chip in _TPUS


def missing(chip: str) -> str | None:
  """Returns what has to be installed to compile for a chip, or None."""
  if chip in _TPUS:
    there = importlib.util.find_spec('libtpu')
    return None if there else f'{chip} needs a compiler: pip install libtpu'
  plugins = importlib.util.find_spec('jax_plugins')
  places = (plugins and plugins.submodule_search_locations) or ()
  if any(pathlib.Path(place, 'xla_cuda13').exists() for place in places):
    return None
  names = ' '.join(f'jax-cuda13-{x}=={jax.__version__}' for x in _CUDA_PARTS)
  return f'{chip} needs a compiler: pip install --no-deps {names}'


def devices(chip: str) -> list:
  """Returns devices of a chip, which can be compiled for and not run on.

  Args:
    chip: one of `CHIPS`.

  Raises:
    ModuleNotFoundError: the compiler for it is not installed.
  """
  lacking = missing(chip)
  if lacking:
    raise ModuleNotFoundError(lacking)
  if chip in _TPUS:
    # There is no machine to ask, and another process may hold the library.
    os.environ.setdefault('TPU_SKIP_MDS_QUERY', '1')
    os.environ.setdefault('ALLOW_MULTIPLE_LIBTPU_LOAD', '1')
    found = topologies.get_topology_desc(
      platform='tpu', topology_name=_TPUS[chip]
    )
  else:
    found = topologies.get_topology_desc(
      platform='cuda',
      topology_name='',
      topology='1x1x1',
      target_config=_GPUS[chip],
    )
  return list(found.devices)


def _mesh(chip: str, tensor: int) -> Mesh:
  return jax.make_mesh(
    (1, tensor),
    ('data', 'tensor'),
    axis_types=(AxisType.Auto,) * 2,
    devices=devices(chip)[:tensor],
  )


def compiled_for(
  chip: str,
  implementation: str | None,
  *,
  kl: bool = False,
  tensor: int = 1,
  n: int = 8192,
  d: int = 4096,
  v: int = 151_936,
):
  """Returns log-prob and entropy, value and gradients, compiled for a chip.

  Args:
    chip: one of `CHIPS`.
    implementation: as for `vocab_stats`, or `NAIVE` for all logits in float32.
    kl: add KL(p || q) to a reference of the same size.
    tensor: chips that split the vocabulary.
    n: tokens.
    d: model width.
    v: vocabulary, all in bfloat16.
  """
  mesh = _mesh(chip, tensor)
  layout = rljax_kernels.Layout(
    mesh, ('data',), 'tensor' if tensor > 1 else None
  )

  def array(shape, dtype, *axes):
    place = NamedSharding(mesh, PartitionSpec(*axes))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

  hidden = array((n, d), jnp.bfloat16, 'data')
  unembed = array((v, d), jnp.bfloat16, layout.vocab)
  targets = array((n,), jnp.int32, 'data')
  other = (hidden, unembed) if kl else ()
  loss = _naive if implementation == NAIVE else _fused(implementation, layout)
  run = jax.jit(jax.value_and_grad(loss, (0, 1)))
  return run.lower(hidden, unembed, targets, *other).compile()


def _fused(implementation: str | None, layout: rljax_kernels.Layout):
  """Returns the sum of log-probs, entropies and, with two models, KLs."""

  def loss(hidden, unembed, targets, *other):
    reference = rljax_kernels.Reference(*other) if other else None
    want = ('logp', 'entropy', *(('kl_pq',) if other else ()))
    stats = rljax_kernels.vocab_stats(
      hidden, unembed, targets, want=want, reference=reference, layout=layout,
      implementation=implementation,
    )  # fmt: skip
    return sum(jnp.sum(x) for x in stats.values())

  return loss


def _naive(hidden, unembed, targets, *other):
  """Returns the same from all logits, rounded to bfloat16 nowhere."""

  def log_softmax(h, w):
    z = jnp.einsum('nd,vd->nv', h, w, preferred_element_type=jnp.float32)
    return jax.nn.log_softmax(z)

  log_p = log_softmax(hidden, unembed)
  logp = jnp.take_along_axis(log_p, targets[:, None], axis=1)
  total = jnp.sum(logp) - jnp.sum(jnp.exp(log_p) * log_p)
  if other:
    total += jnp.sum(jnp.exp(log_p) * (log_p - log_softmax(*other)))
  return total
