"""What the processes of one run tell each other on the host."""

import jax
import numpy as np

_LONGEST = 1024  # bytes of a message


def join(coordinator: str, processes: int, process: int) -> None:
  """Joins the other processes of a run, if there are any.

  Args:
    coordinator: host:port of process 0.
    processes: how many there are.
    process: the number of this one.
  """
  if processes > 1 and not jax.distributed.is_initialized():
    jax.distributed.initialize(
      coordinator, processes, process, initialization_timeout=60
    )


def of_each(value: int) -> np.ndarray:
  """Returns a number of every process."""
  if jax.process_count() == 1:
    return np.array([value])
  from jax.experimental import multihost_utils

  return np.asarray(multihost_utils.process_allgather(np.array(value)))


def everywhere(x: jax.Array) -> np.ndarray:
  """Returns a global array, whole, in every process."""
  if x.is_fully_addressable:
    return np.asarray(x)
  from jax.experimental import multihost_utils

  return np.asarray(multihost_utils.process_allgather(x, tiled=True))


def anyone(asked: bool) -> bool:
  """Returns whether it is so in any process."""
  return bool(of_each(asked).any())


def from_first(text: str) -> str:
  """Returns the text of process 0, in every process."""
  if jax.process_count() == 1:
    return text
  from jax.experimental import multihost_utils

  data = text.encode()[:_LONGEST]
  row = np.zeros(_LONGEST, np.uint8)
  row[: len(data)] = np.frombuffer(data, np.uint8)
  sent = np.asarray(multihost_utils.broadcast_one_to_all(row))
  return sent.tobytes().rstrip(b'\0').decode(errors='ignore')
