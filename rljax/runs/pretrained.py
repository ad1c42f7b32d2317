"""Pretrained models by name: parameters, decoder and tokenizer."""

from collections.abc import Callable
import dataclasses

from rljax.core.types import Params
from rljax.data import subwords, tokenizers
from rljax.models import decoder, families
from rljax.models.convert import gguf, smollm2

NAMES = ('smollm2-135m',)


def load(
  name: str, *, dtype: str, remat: str
) -> tuple[decoder.Model, Callable[[], Params], tokenizers.Tokenizer]:
  """Returns a pretrained model, what reads its parameters, and its tokenizer.

  Parameters are read when they are needed, so that no second copy stays.

  Args:
    name: one of `NAMES`; weights are fetched with pip once and cached.
    dtype: of parameters and activations.
    remat: what the backward pass recomputes.

  Raises:
    ValueError: if the name is unknown.
    ConnectionError: if the weights cannot be fetched.
  """
  if name not in NAMES:
    raise ValueError(
      f'--model={name!r} is unknown; choose small or {", ".join(NAMES)}.'
    )
  file = gguf.read(smollm2.fetch())
  hf, _ = smollm2.parameters(file)
  config = families.config_from_hf(hf, dtype=dtype)
  config = dataclasses.replace(config, remat=remat)

  def read() -> Params:
    return families.params_from_hf(config, smollm2.parameters(file)[1])

  return (
    decoder.Model(config),
    read,
    subwords.from_gguf(file.metadata),
  )
