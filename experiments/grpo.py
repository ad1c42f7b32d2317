r"""Group relative policy optimization (GRPO).

Shao et al., "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in
Open Language Models", 2024, arXiv:2402.03300.

Rewards are standardized within the group of responses to one prompt and
credited to all their tokens, under a clipped surrogate and a KL penalty.

Fixed by the paper: the z-score, the mean over rows of token means, the k3
penalty in the loss.
Chosen here: the unbiased standard deviation; a penalty of 0 by default, as in
most later work.

Delta on GRPO: none.
Reduces to REINFORCE with a group baseline when the ratio is 1, on-policy.

  python -m experiments.grpo --task=arithmetic --steps=50
"""

import dataclasses

from rljax.engine import grpo
from rljax.engine.method import Method
from rljax.engine.seams import View
from rljax.runs import loop, recipe, run


@dataclasses.dataclass(frozen=True)
class Config(recipe.Config):
  """GRPO's own settings."""

  beta: float = run.field(0.0, 'coefficient of the KL penalty')
  clip_low: float = run.field(0.2, 'how far below 1 the ratio may go')
  clip_high: float = run.field(0.2, 'how far above 1 the ratio may go')

  def validate(self) -> None:
    """Raises ValueError if no run can have these values."""
    super().validate()
    for name in ('beta', 'clip_low', 'clip_high'):
      if getattr(self, name) < 0:
        raise ValueError(f'--{name}={getattr(self, name)} is negative')
    if self.clip_low >= 1:
      raise ValueError(f'--clip_low={self.clip_low} is not below 1')


def method(config: Config) -> Method:
  """Returns GRPO."""
  ref = config.beta > 0
  return Method(
    credit=grpo.credit(ref=ref),
    loss=grpo.loss(
      low=config.clip_low, high=config.clip_high, beta=config.beta
    ),
    views={'ref': View('ref')} if ref else {},
  )


if __name__ == '__main__':
  run.main(Config, lambda config: loop.train(config, method))
