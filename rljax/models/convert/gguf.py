"""A reader of GGUF files, the container of llama.cpp.

A file holds metadata (architecture, tokenizer) and tensors, some of them in
blocks of 32 integers with a scale. Tensors stay on disk until they are used.

Reference: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from collections.abc import Callable, Mapping
import dataclasses
import math
import os
from typing import Any

import numpy as np

MAGIC = b'GGUF'
VERSIONS = (2, 3)
BLOCK = 32  # values that share a scale

_SCALARS = {
  0: '<u1',
  1: '<i1',
  2: '<u2',
  3: '<i2',
  4: '<u4',
  5: '<i4',
  6: '<f4',
  7: '?',
  10: '<u8',
  11: '<i8',
  12: '<f8',
}
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4


def _f32(data: np.ndarray) -> np.ndarray:
  return data.view('<f4').astype(np.float32)


def _f16(data: np.ndarray) -> np.ndarray:
  return data.view('<f2').astype(np.float32)


_Q4_1 = np.dtype([('scale', '<f2'), ('low', '<f2'), ('pairs', 'u1', 16)])
_Q8_0 = np.dtype([('scale', '<f2'), ('values', 'i1', BLOCK)])


def _q4_1(data: np.ndarray) -> np.ndarray:
  """scale · q + low; a byte holds values i (low bits) and i + 16."""
  blocks = data.view(_Q4_1)
  scale = blocks['scale'].astype(np.float32)[:, None]
  out = np.empty((blocks.size, 2, BLOCK // 2), np.float32)
  np.multiply(blocks['pairs'] & 15, scale, out=out[:, 0])
  np.multiply(blocks['pairs'] >> 4, scale, out=out[:, 1])
  out += blocks['low'].astype(np.float32)[:, None, None]
  return out


def _q8_0(data: np.ndarray) -> np.ndarray:
  """scale · q."""
  blocks = data.view(_Q8_0)
  return blocks['values'] * blocks['scale'].astype(np.float32)[:, None]


@dataclasses.dataclass(frozen=True)
class Kind:
  """How values are stored: `values` of them in `size` bytes."""

  name: str
  values: int
  size: int
  decode: Callable[[np.ndarray], np.ndarray]


KINDS: Mapping[int, Kind] = {
  0: Kind('F32', 1, 4, _f32),
  1: Kind('F16', 1, 2, _f16),
  3: Kind('Q4_1', BLOCK, _Q4_1.itemsize, _q4_1),
  8: Kind('Q8_0', BLOCK, _Q8_0.itemsize, _q8_0),
}


@dataclasses.dataclass(frozen=True)
class Tensor:
  """A tensor on disk; the last axis of `shape` is contiguous."""

  name: str
  shape: tuple[int, ...]
  kind: Kind
  data: np.ndarray  # u8 [bytes], a view of the file

  def dequantize(self) -> np.ndarray:
    """Returns the values, f32 of `shape`."""
    return self.kind.decode(self.data).reshape(self.shape)


@dataclasses.dataclass(frozen=True)
class File:
  """The content of a GGUF file."""

  path: str
  metadata: Mapping[str, Any]
  tensors: Mapping[str, Tensor]


class _Cursor:
  """Reads a file front to back and refuses to run over its end."""

  def __init__(self, path: str, data: np.ndarray):
    self.path, self.data, self.at = path, data, 0

  def take(self, size: int) -> np.ndarray:
    """Returns the next `size` bytes."""
    if size > self.data.size - self.at:
      raise ValueError(
        f'{self.path}: the header is cut: expected {size} bytes at '
        f'{self.at}, found {self.data.size - self.at}'
      )
    self.at += size
    return self.data[self.at - size : self.at]

  def numbers(self, dtype: str, count: int) -> list[Any]:
    """Returns the next `count` numbers."""
    return self.take(np.dtype(dtype).itemsize * count).view(dtype).tolist()

  def number(self, size: int) -> int:
    """Returns one unsigned number of 4 or 8 bytes."""
    return int.from_bytes(self.take(size).tobytes(), 'little')

  def string(self) -> str:
    """Returns a string with its length in front."""
    start, text = self.at, self.take(self.number(8)).tobytes()
    try:
      return text.decode()
    except UnicodeDecodeError as error:
      raise ValueError(
        f'{self.path}: expected UTF-8 text at {start}, found {text[:20]!r}'
      ) from error

  def value(self, kind: int) -> Any:
    """Returns a metadata value of a numbered kind."""
    if kind in _SCALARS:
      return self.numbers(_SCALARS[kind], 1)[0]
    if kind == _STRING:
      return self.string()
    if kind == _ARRAY:
      return self.array(self.number(4), self.number(8))
    raise ValueError(
      f'{self.path}: expected a kind of metadata in 0..12 before '
      f'{self.at}, found {kind}'
    )

  def array(self, kind: int, count: int) -> list[Any]:
    """Returns a metadata array."""
    if kind in _SCALARS:
      return self.numbers(_SCALARS[kind], count)
    return [self.value(kind) for _ in range(count)]


@dataclasses.dataclass(frozen=True)
class _Entry:
  """What the header says of a tensor."""

  name: str
  shape: tuple[int, ...]
  kind: int
  offset: int  # bytes from the start of the data


def _entry(cursor: _Cursor) -> _Entry:
  name, dims = cursor.string(), cursor.number(4)
  if dims > _MAX_DIMS:
    raise ValueError(
      f'{cursor.path}: tensor {name}: expected at most {_MAX_DIMS} '
      f'dimensions, found {dims}'
    )
  # GGUF names the contiguous axis first.
  shape = tuple(reversed(cursor.numbers('<u8', dims)))
  return _Entry(name, shape, cursor.number(4), cursor.number(8))


def _kind(path: str, entry: _Entry) -> Kind:
  """Returns how a tensor is stored; refuses what cannot be decoded."""
  if entry.kind not in KINDS:
    known = ', '.join(f'{i} ({kind.name})' for i, kind in KINDS.items())
    raise ValueError(
      f'{path}: tensor {entry.name}: expected type {known}, found {entry.kind}'
    )
  kind = KINDS[entry.kind]
  row = entry.shape[-1] if entry.shape else 1
  if row % kind.values:
    raise ValueError(
      f'{path}: tensor {entry.name}: expected rows of a multiple of '
      f'{kind.values} values for {kind.name}, found {row}'
    )
  return kind


def _tensor(path: str, entry: _Entry, data: np.ndarray) -> Tensor:
  kind = _kind(path, entry)
  size = math.prod(entry.shape) // kind.values * kind.size
  found = max(0, data.size - entry.offset)
  if found < size:
    raise ValueError(
      f'{path}: tensor {entry.name}: the file is cut: expected {size} bytes '
      f'at {entry.offset} of the data, found {found}'
    )
  part = data[entry.offset : entry.offset + size]
  return Tensor(entry.name, entry.shape, kind, part)


def _open(path: str) -> _Cursor:
  """Maps a file and checks how it begins."""
  with open(path, 'rb') as file:
    found = file.read(len(MAGIC))
  if found != MAGIC:
    raise ValueError(f'{path}: expected the magic {MAGIC!r}, found {found!r}')
  # Slices of a plain view cost a third of those of a memmap.
  cursor = _Cursor(path, np.memmap(path, np.uint8, 'r').view(np.ndarray))
  cursor.take(len(MAGIC))
  if (version := cursor.number(4)) not in VERSIONS:
    raise ValueError(f'{path}: expected version {VERSIONS}, found {version}')
  return cursor


def _aligned(cursor: _Cursor, metadata: Mapping[str, Any]) -> int:
  """Returns where the data begins after the header."""
  step = metadata.get('general.alignment', 32)
  if not isinstance(step, int) or step < 1:
    raise ValueError(
      f'{cursor.path}: expected a positive general.alignment, found {step!r}'
    )
  return -(-cursor.at // step) * step


def read(path: str | os.PathLike[str]) -> File:
  """Reads the metadata of a GGUF file and maps its tensors.

  Args:
    path: the file, little-endian, version 2 or 3.

  Returns:
    The metadata by name and the tensors by name, in the order of the file.

  Raises:
    ValueError: if it is no GGUF file, is cut, or has a tensor of a type other
      than F32, F16, Q4_1 and Q8_0.
  """
  name = os.fspath(path)
  cursor = _open(name)
  tensors, pairs = cursor.number(8), cursor.number(8)
  metadata = {
    cursor.string(): cursor.value(cursor.number(4)) for _ in range(pairs)
  }
  entries = [_entry(cursor) for _ in range(tensors)]
  data = cursor.data[_aligned(cursor, metadata) :]
  found = [_tensor(name, entry, data) for entry in entries]
  return File(name, metadata, {tensor.name: tensor for tensor in found})
