"""Package metadata of rljax; tool settings are in pyproject.toml."""

import pathlib

import setuptools

ROOT = pathlib.Path(__file__).parent
README = ROOT / 'README.md'

# Lower bounds: Python 3.11 installs jax 0.10, Python 3.12 the newest.
CORE = [
  'absl-py>=2.3',
  'flax>=0.12.6',
  'grain>=0.2.16',
  'jax>=0.10.2',
  'matplotlib>=3.10',
  'numpy>=2.2',
  'optax>=0.2.8',
  'orbax-checkpoint>=0.11.39',
  'rich>=14.0',
  'sentencepiece>=0.2.1',
  'tensorboardX>=2.6.4',
  'tensorstore>=0.1.80',
  'tokenizers>=0.22',
]

EXTRAS = {
  'test': [
    'pyright[nodejs]>=1.1.400',
    'pytest>=8.4',
    'pytest-xdist>=3.6',
    'ruff>=0.12',
    'setuptools>=77',
    'starlark-pyo3>=2025.1',
  ],
  'tasks': [
    'math-verify==0.9.0',
    'pyarrow>=20.0',
    'reasoning-gym==0.1.25',
  ],
  'peers': [
    'safetensors>=0.5',
    'torch==2.13.0',
    'transformers>=5.0',
  ],
  'notebooks': ['ipykernel>=6.29', 'nbclient>=0.10', 'nbformat>=5.10'],
  'tpu': ['jax[tpu]>=0.10.2'],
  'cuda': ['jax[cuda13]>=0.10.2'],
}

setuptools.setup(
  name='rljax',
  version='0.1.0',
  description='Reinforcement learning of language models in JAX.',
  long_description=README.read_text('utf-8') if README.exists() else '',
  long_description_content_type='text/markdown',
  license='Apache-2.0',
  license_files=['LICENSE'],
  python_requires='>=3.11',
  # One project, two import names; `kernels` alone would collide with a
  # package of that name on PyPI.
  packages=[
    *setuptools.find_packages(include=['rljax', 'rljax.*']),
    *setuptools.find_packages('kernels'),
  ],
  package_dir={
    'rljax': 'rljax',
    'rljax_kernels': 'kernels/rljax_kernels',
  },
  package_data={'rljax': ['py.typed'], 'rljax_kernels': ['py.typed']},
  install_requires=CORE,
  extras_require=EXTRAS,
)
