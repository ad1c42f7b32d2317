"""A method: what to sample, how to assign credit, what to maximize.

Every field defaults to GRPO, so that another method is the difference.
"""

from collections.abc import Mapping
import dataclasses

from rljax.engine import grpo, refill
from rljax.engine.sampling import Phase
from rljax.engine.seams import CreditFn, Keep, RowLoss, TokenLoss, View


@dataclasses.dataclass(frozen=True)
class Method:
  """What distinguishes one reinforcement-learning method from another.

  Attributes:
    phase: how rows are sampled.
    credit: rollout and rewards to targets; data, no gradient.
    loss: what `learn` differentiates.
    views: other readings of the responses that credit or loss may use.
    epochs: passes over each rollout.
    minibatches: updates per pass; prompts are dealt anew in each.
    keep: which groups are learned from, where a batch may be filled with
      those of several.
  """

  phase: Phase = Phase(max_tokens=64)
  credit: CreditFn = grpo.credit()
  loss: TokenLoss | RowLoss = grpo.loss()
  views: Mapping[str, View] = dataclasses.field(default_factory=dict)
  epochs: int = 1
  minibatches: int = 1
  keep: Keep = refill.by_group()

  @property
  def updates(self) -> int:
    """Optimizer updates per rollout."""
    return self.epochs * self.minibatches
