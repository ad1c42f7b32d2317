"""Tokenizers with a vocabulary of pieces: SentencePiece and BPE."""

import base64
from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import functools
import io
import json
import pathlib
from typing import Any

import sentencepiece
import tokenizers
from tokenizers import decoders, models, pre_tokenizers


def plain_ids(ids: Iterable[int], size: int) -> list[int]:
  """Returns plain integers and refuses ids outside of the vocabulary."""
  plain = [int(i) for i in ids]
  if plain and not 0 <= min(plain) <= max(plain) < size:
    wrong = next(i for i in plain if not 0 <= i < size)
    raise ValueError(f'id {wrong} is outside of the vocabulary of {size}')
  return plain


@dataclasses.dataclass(frozen=True)
class SentencePiece:
  """A SentencePiece model, given by the bytes of its `tokenizer.model`."""

  model: bytes = dataclasses.field(repr=False)

  def __post_init__(self):
    if not self.model:
      raise ValueError('an empty file is no SentencePiece model')
    try:
      _ = self._processor
    except RuntimeError as error:
      raise ValueError(
        f'{len(self.model)} bytes starting {self.model[:8]!r} are no '
        'SentencePiece model'
      ) from error

  @functools.cached_property
  def _processor(self) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_proto=self.model)

  @property
  def vocab_size(self) -> int:
    """Pieces of the model."""
    return self._processor.vocab_size()

  @property
  def pad_id(self) -> int:
    """The model's padding id, 0 where it has none (-1 in the file)."""
    return max(self._processor.pad_id(), 0)

  @property
  def bos_id(self) -> int | None:
    """The model's <s>, if any."""
    bos = self._processor.bos_id()
    return bos if bos >= 0 else None

  @property
  def stop_ids(self) -> tuple[int, ...]:
    """The model's </s>, if any."""
    eos = self._processor.eos_id()
    return (eos,) if eos >= 0 else ()

  def encode(self, text: str) -> list[int]:
    """Returns the pieces of a text, normalized as the model says."""
    return self._processor.encode(text, add_bos=False, add_eos=False)

  def decode(self, ids: Sequence[int]) -> str:
    """Returns the text of pieces."""
    return self._processor.decode(plain_ids(ids, self.vocab_size))

  def spec(self) -> dict[str, Any]:
    """Returns the bytes of the model in base 64."""
    text = base64.b64encode(self.model).decode()
    return {'kind': 'sentencepiece', 'model': text}

  @classmethod
  def from_spec(cls, fields: Mapping[str, Any]) -> 'SentencePiece':
    """Returns the tokenizer of a `spec()`."""
    return cls(base64.b64decode(fields['model']))


def train_sentencepiece(
  texts: Iterable[str], vocab_size: int = 512
) -> SentencePiece:
  """Trains a SentencePiece model that returns every text unchanged.

  Spaces and line breaks are kept, digits stand alone, and characters that the
  texts lack are spelled in bytes. Equal texts give an equal model.

  Args:
    texts: what to learn from, read once.
    vocab_size: an upper limit; small corpora give fewer pieces.

  Raises:
    ValueError: if there is no text or the limit is below the characters of
      the texts and the 256 bytes.
  """
  model = io.BytesIO()
  try:
    sentencepiece.SentencePieceTrainer.train(
      sentence_iterator=iter(texts),
      model_writer=model,
      vocab_size=vocab_size,
      hard_vocab_limit=False,
      model_type='bpe',  # unigram learns nothing from few distinct words
      normalization_rule_name='identity',
      remove_extra_whitespaces=False,
      add_dummy_prefix=False,
      split_digits=True,
      byte_fallback=True,
      character_coverage=1.0,
      max_sentence_length=1 << 20,  # bytes; longer texts would be skipped
      num_threads=1,  # others may order equal pairs differently
      minloglevel=2,
      pad_id=0,
      unk_id=1,
      bos_id=2,
      eos_id=3,
    )
  except RuntimeError as error:
    raise ValueError(
      f'cannot train a tokenizer with vocab_size={vocab_size}: {error}'
    ) from error
  return SentencePiece(model.getvalue())


@dataclasses.dataclass(frozen=True)
class HuggingFace:
  """A tokenizer of the package `tokenizers`, given by its JSON.

  Special tokens in a text are encoded as such, so that chat templates work.
  The JSON does not say which ids end a text.
  """

  json: str = dataclasses.field(repr=False)
  stop_ids: tuple[int, ...] = ()
  pad_id: int = 0
  bos_id: int | None = None
  chat_template: str | None = dataclasses.field(default=None, repr=False)

  def __post_init__(self):
    for i in (*self.stop_ids, self.pad_id, self.bos_id or 0):
      plain_ids([i], self.vocab_size)

  @functools.cached_property
  def _tokenizer(self) -> tokenizers.Tokenizer:
    return _parse(self.json)

  @functools.cached_property
  def _size(self) -> int:
    return max(self._tokenizer.get_vocab().values(), default=-1) + 1

  @property
  def vocab_size(self) -> int:
    """One more than the largest id; there may be gaps."""
    return self._size

  def encode(self, text: str) -> list[int]:
    """Returns the ids of a text."""
    return self._tokenizer.encode(text, add_special_tokens=False).ids

  def decode(self, ids: Sequence[int]) -> str:
    """Returns the text of ids."""
    return self._tokenizer.decode(plain_ids(ids, self.vocab_size))

  def spec(self) -> dict[str, Any]:
    """Returns the JSON and the special ids."""
    fields = dataclasses.asdict(self)
    return {
      'kind': 'huggingface',
      **fields,
      'stop_ids': list(self.stop_ids),
    }

  @classmethod
  def from_spec(cls, fields: Mapping[str, Any]) -> 'HuggingFace':
    """Returns the tokenizer of a `spec()`."""
    return cls(**{**fields, 'stop_ids': tuple(fields['stop_ids'])})


def _parse(text: str) -> tokenizers.Tokenizer:
  try:
    tokenizer = tokenizers.Tokenizer.from_str(text)
  except Exception as error:  # the package raises no narrower type
    raise ValueError(f'this is no tokenizer.json: {error}') from error
  # A limit in the file would cut prompts silently.
  tokenizer.no_truncation()
  tokenizer.no_padding()
  return tokenizer


def _settings(path: pathlib.Path) -> dict[str, Any]:
  """Returns the content of a JSON file, {} if there is none."""
  return json.loads(path.read_text('utf-8')) if path.exists() else {}


def _token_id(
  tokenizer: tokenizers.Tokenizer, token: str | Mapping[str, Any] | None
) -> list[int]:
  """Returns the id of a token that tokenizer_config.json names, if any."""
  if token is None:
    return []
  text = token if isinstance(token, str) else token['content']
  found = tokenizer.token_to_id(text)
  if found is None:
    raise ValueError(f'the vocabulary lacks {text!r} of tokenizer_config.json')
  return [found]


def _bos_id(
  tokenizer: tokenizers.Tokenizer, config: Mapping[str, Any]
) -> int | None:
  """Returns what the tokenizer itself would put in front of a text."""
  if config.get('add_bos_token'):
    return _token_id(tokenizer, config['bos_token'])[0]
  plain = tokenizer.encode('a', add_special_tokens=False).ids
  first = tokenizer.encode('a', add_special_tokens=True).ids[:1]
  return first[0] if plain and first != plain[:1] else None


def huggingface_file(path: pathlib.Path) -> HuggingFace:
  """Reads a tokenizer.json and the settings that lie beside it.

  What ends a text comes from tokenizer_config.json and generation_config.json;
  without them `stop_ids` is empty.
  """
  text = path.read_text('utf-8')
  tokenizer = _parse(text)
  config = _settings(path.with_name('tokenizer_config.json'))
  stops = _settings(path.with_name('generation_config.json'))
  more = stops.get('eos_token_id') or []
  end = _token_id(tokenizer, config.get('eos_token'))
  end += more if isinstance(more, list) else [more]
  template = config.get('chat_template')
  return HuggingFace(
    text,
    stop_ids=tuple(dict.fromkeys(end)),
    pad_id=(*_token_id(tokenizer, config.get('pad_token')), 0)[0],
    bos_id=_bos_id(tokenizer, config),
    chat_template=template if isinstance(template, str) else None,
  )


_CONTROL = 3
_ENDS = ('<|endoftext|>', '<|im_end|>')


def _byte_level_bpe(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
  tokens = metadata['tokenizer.ggml.tokens']
  merges = [
    tuple(pair.split(' ', 1)) for pair in metadata['tokenizer.ggml.merges']
  ]
  vocabulary = {token: i for i, token in enumerate(tokens)}
  tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
  tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
    [
      pre_tokenizers.Digits(individual_digits=True),
      pre_tokenizers.ByteLevel(add_prefix_space=False),
    ]
  )
  tokenizer.decoder = decoders.ByteLevel()
  kinds = metadata['tokenizer.ggml.token_type']
  tokenizer.add_special_tokens(
    [tokens[i] for i, kind in enumerate(kinds) if kind == _CONTROL]
  )
  return tokenizer


def from_gguf(metadata: Mapping[str, Any]) -> HuggingFace:
  """Builds the tokenizer of a GGUF file that splits text as SmolLM does.

  Digits stand alone, then words are split as in GPT-2. Bytes that the
  vocabulary lacks (SmolLM2: six control characters, unassigned planes) vanish.

  Args:
    metadata: of the file, with `tokenizer.ggml.*`.

  Raises:
    ValueError: if the file's tokenizer is of another kind.
  """
  found = tuple(metadata.get(f'tokenizer.ggml.{x}') for x in ('model', 'pre'))
  if found != ('gpt2', 'smollm'):
    raise ValueError(f"expected a tokenizer ('gpt2', 'smollm'), found {found}")
  tokenizer = _byte_level_bpe(metadata)
  end = [metadata['tokenizer.ggml.eos_token_id']]
  end += [
    i for token in _ENDS if (i := tokenizer.token_to_id(token)) is not None
  ]
  with_bos = metadata.get('tokenizer.ggml.add_bos_token', False)
  return HuggingFace(
    tokenizer.to_str(),
    stop_ids=tuple(dict.fromkeys(end)),
    pad_id=metadata.get('tokenizer.ggml.padding_token_id', 0),
    bos_id=metadata['tokenizer.ggml.bos_token_id'] if with_bos else None,
    chat_template=metadata.get('tokenizer.chat_template'),
  )
