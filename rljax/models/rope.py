"""Rotary position embedding, with the frequency scalings that configs name."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np

from rljax.core.types import Array


@dataclasses.dataclass(frozen=True)
class Llama3:
  """Frequency scaling of Llama 3.1 and later (Grattafiori et al., 2024)."""

  factor: float
  low_freq_factor: float
  high_freq_factor: float
  original_length: int

  def __call__(self, frequency: np.ndarray) -> np.ndarray:
    """Returns scaled frequencies [d / 2]: slow ones divided by `factor`."""
    turns = self.original_length * frequency / (2 * math.pi)
    span = self.high_freq_factor - self.low_freq_factor
    smooth = np.clip((turns - self.low_freq_factor) / span, 0.0, 1.0)
    return frequency * (smooth + (1.0 - smooth) / self.factor)


@dataclasses.dataclass(frozen=True)
class Linear:
  """Linear position interpolation (Chen et al., 2023, arXiv 2306.15595)."""

  factor: float

  def __call__(self, frequency: np.ndarray) -> np.ndarray:
    """Returns frequencies [d / 2] divided by `factor`."""
    return frequency / self.factor


@dataclasses.dataclass(frozen=True)
class Rope:
  """Rotates pairs (i, i + d / 2) (Su et al., 2021, arXiv 2104.09864)."""

  base: float = 10_000.0
  scaling: Llama3 | Linear | None = None

  def frequencies(self, size: int) -> np.ndarray:
    """Returns radians per position, f32 [size / 2]."""
    exponent = np.arange(0, size, 2, dtype=np.float64) / size
    frequency = self.base**-exponent
    if self.scaling is not None:
      frequency = self.scaling(frequency)
    return frequency.astype(np.float32)

  def table(self, position: Array, size: int) -> tuple[Array, Array]:
    """Returns cosines and sines [..., 1, d / 2] at `position` [...].

    Made once for all layers: trigonometry costs more than the rotation.
    """
    angle = jnp.multiply.outer(position, self.frequencies(size))
    angle = angle[..., None, :]
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x: Array, table: tuple[Array, Array]) -> Array:
  """Returns x [..., n, d] rotated by a table of its positions."""
  cos, sin = table
  a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  out = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
  return out.astype(x.dtype)
