"""Tests of tokenizers."""

import json
import pathlib
import pickle
import random

import numpy as np
import pytest
import sentencepiece
import tokenizers as hf
from tokenizers import decoders, models, pre_tokenizers, processors

from rljax.data import subwords, tokenizers
from rljax.models.convert import gguf, smollm2

DATA = pathlib.Path(__file__).parents[1] / 'data'
SUMS = tuple(
  f'Q: {a}+{b}=?\nA: {a}+{b} is\n  {a + b}'
  for a in range(0, 99, 7)
  for b in range(0, 99, 5)
)
STRANGE = ('', ' ', '  two  spaces ', 'a\n\n\tb\r\n', 'été 日本 🙂', '\x00')


def tiny() -> subwords.HuggingFace:
  """The first 320 tokens of SmolLM2."""
  return subwords.from_gguf(gguf.read(DATA / 'tiny_llama.gguf').metadata)


def trained() -> subwords.SentencePiece:
  return subwords.train_sentencepiece(SUMS, 400)


MAKERS = {
  'byte': tokenizers.Bytes,
  'char': lambda: tokenizers.Characters('0123456789+=?: \nQAis'),
  'sentencepiece': trained,
  'huggingface': tiny,
}
every = pytest.mark.parametrize('make', MAKERS.values(), ids=MAKERS)


@every
def test_what_each_tokenizer_promises(make):
  tokenizer: tokenizers.Tokenizer = make()
  special = {tokenizer.bos_id, *tokenizer.stop_ids} - {None}
  for text in SUMS[:50]:
    ids = tokenizer.encode(text)
    assert all(type(i) is int and 0 <= i < tokenizer.vocab_size for i in ids)
    assert not special & set(ids)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(np.asarray([*ids, *special], np.int32)) == text
  assert 0 <= tokenizer.pad_id < tokenizer.vocab_size
  assert len(tokenizer.stop_ids) >= 1
  assert tokenizer.encode('') == [] and tokenizer.decode([]) == ''


@every
def test_spec_round_trip(make):
  tokenizer = make()
  loaded = tokenizers.load(json.loads(json.dumps(tokenizer.spec())))
  for other in (loaded, pickle.loads(pickle.dumps(tokenizer))):
    assert other == tokenizer
    assert other.encode(SUMS[5]) == tokenizer.encode(SUMS[5])
    assert other.stop_ids == tokenizer.stop_ids
    assert other.vocab_size == tokenizer.vocab_size


@every
@pytest.mark.parametrize('wrong', [-1, 1 << 20])
def test_ids_outside_of_the_vocabulary(make, wrong):
  with pytest.raises(ValueError, match=f'id {wrong} is outside of the vocab'):
    make().decode([3, wrong])


@pytest.mark.parametrize('make', [tokenizers.Bytes, trained])
def test_any_text_survives(make):
  tokenizer = make()
  rng = random.Random(0)
  made = [''.join(rng.choices('ab 1\n\té日🙂\x7f', k=30)) for _ in range(50)]
  for text in (*STRANGE, *made):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_bytes():
  tokenizer = tokenizers.Bytes()
  assert tokenizer.encode('aé') == [97, 0xC3, 0xA9]
  assert tokenizer.decode([0xC3, 97, 258]) == '\ufffda'
  assert tokenizer.vocab_size == 259


def test_characters():
  tokenizer = tokenizers.Characters('ab+')
  assert tokenizer.encode('b+a') == [4, 5, 3]
  assert tokenizer.decode([1, 4, 5, 3, 2, 0]) == 'b+a'
  assert tokenizer.vocab_size == 6
  with pytest.raises(ValueError, match=r"character 'x' of 'a\+x' is not in"):
    tokenizer.encode('a+x')


@pytest.mark.parametrize(
  'alphabet, message', [('', 'is empty'), ('aba', "'aba' repeats")]
)
def test_bad_alphabets(alphabet, message):
  with pytest.raises(ValueError, match=message):
    tokenizers.Characters(alphabet)


def test_trained_sentencepiece():
  tokenizer = trained()
  assert trained() == tokenizer
  assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.stop_ids) == (
    0,
    2,
    (3,),
  )
  assert 256 < tokenizer.vocab_size <= 400
  # Digits stand alone, so numbers that never occurred cost no more.
  assert len(tokenizer.encode('98765')) == 5
  # Learned pieces are shorter than characters.
  assert len(tokenizer.encode(SUMS[0])) < len(SUMS[0])


def test_long_texts_are_learned_from():
  tokenizer = subwords.train_sentencepiece(['wxyz ' * 2000], 300)
  assert len(tokenizer.encode('wxyz wxyz')) < 9


@pytest.mark.parametrize('texts, size', [(SUMS, 100), ((), 400)])
def test_sentencepiece_that_cannot_be_trained(texts, size):
  with pytest.raises(ValueError, match=f'cannot train.*vocab_size={size}'):
    subwords.train_sentencepiece(texts, size)


def foreign_model(path: pathlib.Path, **ids) -> pathlib.Path:
  """Writes a tokenizer.model with the trainer's defaults: no padding."""
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(SUMS),
    model_prefix=str(path.with_suffix('')),
    vocab_size=40,
    hard_vocab_limit=False,
    minloglevel=2,
    **ids,
  )
  return path


def test_a_model_without_padding(tmp_path):
  path = foreign_model(tmp_path / 'tokenizer.model')
  raw = sentencepiece.SentencePieceProcessor(model_file=str(path))
  assert raw.pad_id() == -1
  tokenizer = tokenizers.named(str(path))
  assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.stop_ids) == (
    0,
    1,
    (2,),
  )
  assert tokenizer.encode('1+2') == raw.encode('1+2')
  assert tokenizer.decode(tokenizer.encode('1+2 is 3')) == '1+2 is 3'


def test_a_model_without_begin_and_end(tmp_path):
  path = foreign_model(tmp_path / 'tokenizer.model', bos_id=-1, eos_id=-1)
  tokenizer = tokenizers.named(str(path))
  assert tokenizer.bos_id is None
  assert tokenizer.stop_ids == ()


WORDS = ('[PAD]', '<s>', '</s>', '<|eot|>', 'one', 'two', 'three')


def word_level() -> hf.Tokenizer:
  """A tokenizer of words that cuts at 2 and adds <s> and </s>."""
  table = {word: i for i, word in enumerate(WORDS)}
  tokenizer = hf.Tokenizer(models.WordLevel(table, unk_token='[PAD]'))
  tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
  tokenizer.decoder = decoders.Fuse()
  tokenizer.add_special_tokens(list(WORDS[:4]))
  tokenizer.post_processor = processors.TemplateProcessing(
    single='<s> $A </s>', special_tokens=[('<s>', 1), ('</s>', 2)]
  )
  tokenizer.enable_truncation(2)
  tokenizer.enable_padding(length=8)
  return tokenizer


def test_a_file_with_settings_beside_it(tmp_path):
  path = tmp_path / 'tokenizer.json'
  word_level().save(str(path))
  settings = {
    'bos_token': '<s>',
    'eos_token': {'content': '</s>'},
    'pad_token': '[PAD]',
    'chat_template': '{{ messages }}',
  }
  (tmp_path / 'tokenizer_config.json').write_text(json.dumps(settings))
  (tmp_path / 'generation_config.json').write_text('{"eos_token_id": [2, 3]}')
  tokenizer = tokenizers.named(str(path))
  assert isinstance(tokenizer, subwords.HuggingFace)
  assert (tokenizer.bos_id, tokenizer.stop_ids) == (1, (2, 3))
  assert tokenizer.chat_template == '{{ messages }}'
  # Nothing added, nothing cut, nothing filled.
  assert tokenizer.encode('one two three one') == [4, 5, 6, 4]


def test_a_file_alone(tmp_path):
  path = tmp_path / 'other.json'
  tokenizer = word_level()
  tokenizer.post_processor = processors.TemplateProcessing(
    single='$A </s>', special_tokens=[('</s>', 2)]
  )
  tokenizer.save(str(path))
  found = tokenizers.named(str(path))
  assert (found.bos_id, found.stop_ids, found.pad_id) == (None, (), 0)


@pytest.mark.parametrize('add, expected', [(True, 1), (False, None)])
def test_only_the_settings_ask_for_a_beginning(tmp_path, add, expected):
  path = tmp_path / 'tokenizer.json'
  tokenizer = word_level()
  tokenizer.post_processor = processors.Sequence([])
  tokenizer.save(str(path))
  settings = {'bos_token': '<s>', 'add_bos_token': add}
  (tmp_path / 'tokenizer_config.json').write_text(json.dumps(settings))
  assert tokenizers.named(str(path)).bos_id == expected


def test_settings_that_do_not_fit(tmp_path):
  path = tmp_path / 'tokenizer.json'
  word_level().save(str(path))
  (tmp_path / 'tokenizer_config.json').write_text('{"eos_token": "<eos>"}')
  with pytest.raises(ValueError, match="the vocabulary lacks '<eos>'"):
    tokenizers.named(str(path))


@pytest.mark.parametrize('text', ['{}', ''])
@pytest.mark.parametrize('suffix', ['json', 'model'])
def test_files_of_another_kind(tmp_path, suffix, text):
  path = tmp_path / f'tokenizer.{suffix}'
  path.write_text(text)
  with pytest.raises(ValueError, match=rf'tokenizer\.{suffix}: .* no [tS]'):
    tokenizers.named(str(path))


def test_names():
  assert tokenizers.named('byte') == tokenizers.Bytes()
  assert tokenizers.named('char', ['ba', 'ca']) == tokenizers.Characters('abc')
  found = tokenizers.named('sentencepiece', SUMS, vocab_size=300)
  assert found.vocab_size <= 300
  assert found == subwords.train_sentencepiece(SUMS, 300)


@pytest.mark.parametrize(
  'name, message',
  [
    ('chars', "unknown tokenizer 'chars'; did you mean 'char'"),
    ('sentence-piece', "did you mean 'sentencepiece'"),
    ('zzz', "'zzz'; known: char, byte, sentencepiece. An existing tok"),
    ('gone.model', "unknown tokenizer 'gone.model'.*existing tokenizer.json"),
  ],
)
def test_unknown_names(name, message):
  with pytest.raises(ValueError, match=message):
    tokenizers.named(name, SUMS)


def test_unknown_spec():
  with pytest.raises(ValueError, match="unknown kind of tokenizer 'tekken'"):
    tokenizers.load({'kind': 'tekken'})


def test_gguf_tokenizer():
  tokenizer = tiny()
  assert tokenizer.vocab_size == 320
  # <|im_end|> and <|endoftext|>; padding is a stop id here.
  assert (tokenizer.stop_ids, tokenizer.pad_id) == ((2, 0), 2)
  assert tokenizer.bos_id is None
  assert tokenizer.chat_template and 'im_start' in tokenizer.chat_template
  # '1' is 33, ' the' 260, ' in' 281: digits stand alone.
  assert tokenizer.encode('12<|im_start|> the in') == [33, 34, 1, 260, 281]
  assert tokenizer.decode([1, 33, 34, 2]) == '12'


@pytest.mark.parametrize(
  'change', [{'tokenizer.ggml.pre': 'qwen2'}, {'tokenizer.ggml.model': 'llama'}]
)
def test_gguf_tokenizers_of_another_kind(change):
  metadata = gguf.read(DATA / 'tiny_llama.gguf').metadata
  with pytest.raises(ValueError, match=r"expected .* \('gpt2', 'smollm'\)"):
    subwords.from_gguf({**metadata, **change})


@pytest.mark.slow
def test_smollm2_equals_textbook_bpe():
  file = gguf.read(smollm2.fetch())
  tokenizer = subwords.from_gguf(file.metadata)
  cases = json.loads((DATA / 'smollm2_tokens.json').read_text())
  assert len(cases) == 10
  for case in cases:
    assert tokenizer.encode(case['text']) == case['ids'], case
