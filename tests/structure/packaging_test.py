"""One installation gives both packages and nothing else."""

import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile

import pytest

from tests.structure import packaging, sources

FILES = 'setup.py', 'pyproject.toml', 'LICENSE', 'rljax', 'kernels'
EXTRAS = {'test', 'peers', 'tasks', 'tpu', 'cuda', 'notebooks'}


def test_metadata():
  found = packaging.metadata()
  assert found['name'] == 'rljax'
  assert found['python_requires'] == '>=3.11'
  assert set(found['extras_require']) == EXTRAS


def test_packages_are_the_two_and_complete():
  folders = {m.name for m in sources.code() if m.is_package}
  modules = {m.name.rpartition('.')[0] for m in sources.code()} - {''}
  assert set(packaging.metadata()['packages']) == folders
  assert modules <= folders, 'a folder lacks its __init__.py'


def test_core_is_what_everybody_needs():
  assert set(packaging.names('install_requires')) == {
    'absl-py',
    'flax',
    'grain',
    'jax',
    'matplotlib',
    'numpy',
    'optax',
    'orbax-checkpoint',
    'rich',
    'sentencepiece',
    'tensorboardX',
    'tensorstore',
    'tokenizers',
  }


def test_license_is_complete():
  text = (sources.ROOT / 'LICENSE').read_text()
  assert 'Apache License' in text and 'END OF TERMS AND CONDITIONS' in text


@pytest.fixture(scope='module')
def copy(tmp_path_factory) -> pathlib.Path:
  """A copy of what is installed: setuptools writes beside its sources."""
  target = tmp_path_factory.mktemp('source') / 'rljax'
  target.mkdir()
  for name in FILES:
    source = sources.ROOT / name
    if source.is_dir():
      ignore = shutil.ignore_patterns('__pycache__', '*.egg-info')
      shutil.copytree(source, target / name, ignore=ignore)
    else:
      shutil.copy(source, target)
  return target


def _pip(*arguments: str, python: pathlib.Path | str = sys.executable) -> None:
  """Runs pip on what is here, without an index."""
  offline = '--no-deps', '--no-index', '--no-build-isolation'
  command = [sys.executable, '-m', 'pip', '--python', str(python), *arguments]
  subprocess.run([*command, *offline], check=True, capture_output=True)


def _environment(folder: pathlib.Path) -> pathlib.Path:
  """Returns the Python of a new environment with this one's packages."""
  venv.create(folder, with_pip=False, symlinks=True)
  version = f'python{sys.version_info.major}.{sys.version_info.minor}'
  # Paths in a .pth file are searched, but not for .pth files of their own: an
  # editable rljax of this environment stays out.
  link = folder / 'lib' / version / 'site-packages' / 'outer.pth'
  link.write_text(sysconfig.get_path('purelib') + '\n')
  return folder / 'bin' / 'python'


def _where(python: pathlib.Path, folder: pathlib.Path) -> list[pathlib.Path]:
  """Returns the folders that both packages are imported from."""
  program = """
import importlib.util, rljax, rljax.core.types, rljax_kernels
print(rljax.__path__[0], rljax_kernels.__path__[0], sep='\\n')
assert not importlib.util.find_spec('tests')
assert not importlib.util.find_spec('experiments')
"""
  environment = {k: v for k, v in os.environ.items() if k != 'PYTHONPATH'}
  done = subprocess.run(
    [python, '-c', program],
    cwd=folder,
    env=environment,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  return [pathlib.Path(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_wheel(copy, tmp_path):
  _pip('wheel', str(copy), '--wheel-dir', str(tmp_path))
  (wheel,) = tmp_path.glob('*.whl')
  files = zipfile.ZipFile(wheel).namelist()
  assert {'rljax/py.typed', 'rljax_kernels/py.typed'} <= set(files)
  tops = {name.split('/')[0] for name in files}
  assert tops == {'rljax', 'rljax_kernels', 'rljax-0.1.0.dist-info'}
  python = _environment(tmp_path / 'env')
  _pip('install', str(wheel), python=python)
  for where in _where(python, tmp_path):
    assert where.is_relative_to(tmp_path / 'env')


@pytest.mark.slow
def test_kernels_alone(copy, tmp_path):
  _pip('wheel', str(copy / 'kernels'), '--wheel-dir', str(tmp_path))
  (wheel,) = tmp_path.glob('*.whl')
  archive = zipfile.ZipFile(wheel)
  files = {n for n in archive.namelist() if n.endswith('.py')}
  kernels = copy / 'kernels'
  assert files == {
    str(p.relative_to(kernels)) for p in kernels.glob('rljax_kernels/**/*.py')
  }
  text = archive.read('rljax_kernels-0.1.0.dist-info/METADATA').decode()
  needs = [x for x in text.splitlines() if x.startswith('Requires-Dist')]
  assert needs == ['Requires-Dist: jax>=0.10.2']
  assert 'License-Expression: Apache-2.0' in text.splitlines()
  license = archive.read('rljax_kernels-0.1.0.dist-info/licenses/LICENSE')
  assert license == (sources.ROOT / 'LICENSE').read_bytes()
  # Type checkers read the annotations of a package that says so.
  assert 'rljax_kernels/py.typed' in archive.namelist()


@pytest.mark.slow
def test_editable(copy, tmp_path):
  python = _environment(tmp_path / 'env')
  _pip('install', '--editable', str(copy), python=python)
  places = copy / 'rljax', copy / 'kernels' / 'rljax_kernels'
  assert _where(python, tmp_path) == list(places)
