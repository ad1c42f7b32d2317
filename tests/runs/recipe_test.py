"""Tests of the parts of a run: held-out problems, limits, tokenizers."""

import dataclasses
import json
import math
import re

import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import grpo, quickstart
from rljax.data import tokenizers
from rljax.engine import sampling, seams
from rljax.engine.method import Method
from rljax.runs import evaluation, recipe, run, warmup
from rljax.tasks import task as task_lib
from tests.runs import tiny


def numbers(example):
  """Returns the terms of a problem in no order."""
  return tuple(sorted(re.findall(r'\d+', example.prompt)))


@pytest.mark.parametrize('seed', [0, 1, 2])
def test_the_quickstart_never_trains_on_held_out_problems(seed):
  config = quickstart.Config(seed=seed)
  task = task_lib.named(config.task, **config.options())
  source = task.source('train')
  held = recipe._held(
    config, task, tokenizers.Characters(task.alphabet), 16, None
  )
  # A sum in its other order is the same problem.
  assert held.count == 512
  assert len({numbers(e) for e in held.examples}) == 512
  train = [source[i] for i in range(len(source))]
  assert not {numbers(e) for e in held.examples} & {numbers(e) for e in train}
  assert evaluation.overlap(train, held) == 0
  assert evaluation.overlap([*train, held.examples[3]], held) == 1


def test_traces_verify_and_are_few(tmp_path):
  task = task_lib.named('arithmetic', reverse=True)
  source = warmup.traces(task, 5, seed=0)
  chosen = [source[i] for i in range(len(source))]
  assert len({example.uid for example in chosen}) == 5
  assert all(task.verify(e, e.trace) == 1 for e in chosen)


def test_a_task_without_traces(tmp_path):
  tiny.problems(tmp_path)
  task = task_lib.named(f'jsonl:{tmp_path}/train.jsonl')
  with pytest.raises(ValueError, match='no worked solutions .* --sft_steps=0'):
    warmup.traces(task, 5, seed=0)


def test_options_are_read():
  config = grpo.Config(task_options='a:1,b:x:y,c:')
  assert config.options() == {'a': '1', 'b': 'x:y', 'c': ''}
  with pytest.raises(ValueError, match="write 'a' as name:value"):
    grpo.Config(task_options='a').options()
  with pytest.raises(ValueError, match="'a' twice"):
    grpo.Config(task_options='a:1,a:2').options()


@pytest.mark.parametrize(
  'flags, options',
  [
    ('', 'reverse:true'),
    ('--task=countdown', ''),
    ('--task=countdown --task_options=seed:3', 'seed:3'),
    ('--model=smollm2-135m', ''),
  ],
)
def test_default_options_are_those_of_the_default_task(flags, options):
  got = []
  run.main(quickstart.Config, got.append, ['x.py', *flags.split()])
  assert got[0].task_options == options


def test_a_method_is_taken_at_its_word():
  phase = sampling.Phase(max_tokens=32, temperature=0.7, segment=64)
  method = Method(phase=phase, epochs=2)
  config = recipe.settled(grpo.Config(minibatches=4), method)
  assert (config.epochs, config.minibatches) == (2, 4)
  assert (config.max_tokens, config.temperature) == (32, 0.7)
  assert recipe.settled(config, method) == config  # as when it is resumed
  assert recipe.settled(grpo.Config(epochs=3), Method()).epochs == 3
  tokenizer = tokenizers.Characters('0123456789+=')
  made = recipe._method(config, method, None, tokenizer)
  stop_ids = tokenizer.stop_ids
  assert made.phase == dataclasses.replace(phase, stop_ids=stop_ids)
  assert (made.epochs, made.minibatches) == (2, 4)
  for flag in ({'epochs': 3}, {'temperature': 0.9}):
    with pytest.raises(ValueError, match='but the method asks for'):
      recipe.settled(grpo.Config(**flag), method)


@pytest.mark.parametrize(
  'field,value,words',
  [
    ('steps', -1, '--steps=-1 is negative'),
    ('prompts', 0, '--prompts=0 must be positive'),
    ('max_gen_batches', 0, '--max_gen_batches=0 must be positive'),
    ('temperature', 0.0, '--temperature=0.0 is not between'),
    ('processes', 2, 'needs --coordinator'),
    ('coordinator', 'localhost:1', 'needs --processes'),
    ('temperature', 1e4, 'is not between 0.001 and 1000'),
    ('verify_workers', 2000, 'is not between 1 and 1024'),
    ('eval_samples', -3, '--eval_samples=-3 is negative'),
    ('prompt_len', -5, '--prompt_len=-5 is negative'),
    ('sft_learning_rate', 0.0, 'must be positive'),
    ('max_norm', 0.0, 'must be positive'),
    ('max_norm', float('inf'), 'is not a finite number'),
    ('weight_decay', -0.1, '--weight_decay=-0.1 is negative'),
    ('group_size', 1, 'learns nothing from fewer than 2'),
    ('clip_low', 1.0, 'is not below 1'),
    ('schedule', 'cosin(1,0)', "did you mean 'cosine'"),
    ('process', 1, 'is not below --processes=1'),
    ('learning_rate', float('nan'), 'is not a finite number'),
    ('beta', -1.0, '--beta=-1.0 is negative'),
  ],
)
def test_impossible_values(field, value, words):
  with pytest.raises(ValueError, match=words):
    dataclasses.replace(grpo.Config(), **{field: value}).validate()


def test_the_rate_is_a_warm_up_times_a_schedule():
  config = grpo.Config(
    steps=5, epochs=2, warmup=2, schedule='wsd(1,0,0.6)', learning_rate=0.1
  )
  optimizer = recipe._optimizer(config, 0.1, config.schedule)
  params = {'kernel': jnp.ones(1)}
  state = optimizer.init(params)
  moves = []
  for _ in range(11):
    move, state = optimizer.update(params, state, params)
    moves.append(-float(move['kernel'][0]))
  # Ten updates, a line to 0 after the sixth. The warm-up starts at half the
  # rate. Equal gradients make Adam move by the rate.
  wanted = [0.05, 0.075, 0.1, 0.1, 0.1, 0.1, 0.1, 0.075, 0.05, 0.025, 0]
  np.testing.assert_allclose(moves, wanted, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
  'field,value,log_ratio,adv,change',
  [
    ('beta', 1.0, 0.0, 0.0, -(math.exp(0.3) - 1.3)),
    ('clip_low', 0.5, math.log(0.6), -1.0, 0.2),
    ('clip_high', 0.5, math.log(1.4), 1.0, 0.2),
  ],
)
def test_each_coefficient_reaches_the_objective(
  field, value, log_ratio, adv, change
):
  """With the sign that it should have."""
  data = {'old_logp': -1.0, 'ref_logp': log_ratio - 0.7, 'advantage': adv}
  stats = {'logp': log_ratio - 1.0, 'entropy': 0.5}
  stats, data = jax.tree.map(lambda x: jnp.full(1, x), (stats, data))

  def objective(config):
    method = grpo.method(config)
    assert ('ref' in method.views) == (config.beta > 0)
    read = (
      data if method.views else {k: data[k] for k in set(data) - {'ref_logp'}}
    )
    ctl = seams.Ctl(jnp.int32(0), jnp.int32(0), jnp.float32(0))
    return float(method.loss.fn(stats, read, ctl)[0][0])

  found = objective(grpo.Config(**{field: value})) - objective(grpo.Config())
  assert found == pytest.approx(change, abs=1e-6)


def test_the_quickstart_refuses_a_negative_penalty():
  with pytest.raises(ValueError, match='--beta=-1.0 is negative'):
    quickstart.Config(beta=-1.0).validate()


class Slow:
  """A generator of which only a few problems can be made."""

  name = 'reasoning_gym:slow'

  def __init__(self):
    self.made = 0

  def source(self, split):
    def make(index):
      self.made += 1
      prompt = 'x' * (8 if split == 'train' else 4)
      return task_lib.Example(uid=index, prompt=prompt, answer='1')

    return grain.MapDataset.range(10**6).map(make)


def test_few_examples_of_a_slow_generator_are_made():
  task = Slow()
  text = ''.join(recipe._corpus(task))
  assert set('x1aZ9 \n') <= set(text)
  tokenizer = tokenizers.Characters(''.join(sorted(set(text))))
  # A quarter more than the longest that was seen, which has 9 tokens.
  assert recipe._limit(grpo.Config(), task, tokenizer) == 11
  assert task.made <= 4 * 256


def test_every_prompt_of_a_file_is_looked_at(tmp_path):
  rows = [{'prompt': f'{i}', 'answer': '1'} for i in range(5000)]
  rows[4990]['prompt'] = 'x' * 20
  path = tmp_path / 'many.jsonl'
  path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
  task = task_lib.named(f'jsonl:{path}', held_out='0.001')
  text = ''.join(recipe._corpus(task))
  assert 'x' in text
  tokenizer = tokenizers.Characters(''.join(sorted(set(text))))
  assert recipe._limit(grpo.Config(), task, tokenizer) == 21
  with pytest.raises(ValueError, match='has 21 tokens; the limit is 9'):
    recipe._limit(grpo.Config(prompt_len=9), task, tokenizer)


def test_held_out_prompts_that_are_too_long(tmp_path):
  tiny.problems(tmp_path)
  lines = (tmp_path / 'test.jsonl').read_text()
  long = '{"prompt": "abcabcabc=", "answer": "a"}\n'
  (tmp_path / 'test.jsonl').write_text(lines + long)
  task = task_lib.named(
    f'jsonl:{tmp_path}/train.jsonl', test_path=f'{tmp_path}/test.jsonl'
  )
  tokenizer = tokenizers.Characters('abcd=')
  sizes = {'problems': 99, 'batch': 4, 'seed': 0}
  held = evaluation.hold(
    task, tokenizer, prompt_len=5, long_prompts='skip', **sizes
  )
  assert held.count == 16
  with pytest.raises(ValueError, match='has 11 tokens; the limit is 5'):
    evaluation.hold(task, tokenizer, prompt_len=5, **sizes)
  with pytest.raises(ValueError, match='All held-out prompts exceed 3 tokens'):
    evaluation.hold(task, tokenizer, prompt_len=3, long_prompts='skip', **sizes)
  padded = evaluation.hold(task, tokenizer, prompt_len=99, **sizes)
  assert padded.count == 17 and len(padded.examples) == 20
  uids = np.concatenate([b.prompts.uid for b in padded.batches])
  assert len(set(uids.tolist())) == 17


def test_answers_that_failed_are_wrong():
  # One right of four, two of four; partial credit and failures are no answer.
  scores = np.array([[1, 0, 0.5, np.nan], [np.nan, 1, 0, 1]])
  found = evaluation.pass_at(scores, [1, 2, 4])
  wanted = {'pass@1': 0.375, 'pass@2': (0.5 + 5 / 6) / 2, 'pass@4': 1.0}
  assert found == pytest.approx(wanted)
  assert evaluation.accuracy(scores)['accuracy'] == 0.375


@pytest.mark.slow
@pytest.mark.parametrize('tokenizer', ['sentencepiece', 'byte'])
def test_the_quickstart_with_another_tokenizer(tmp_path, tokenizer):
  def train(config):
    return quickstart.loop.train(config, quickstart.method)

  flags = (
    '--width=16 --layers=1 --prompts=8 --group_size=2 --max_tokens=8 --steps=2'
    ' --sft_steps=2 --sft_traces=16 --sft_prompts=8 --eval_samples=2'
    f' --eval_problems=8 --tokenizer={tokenizer} --workdir={tmp_path}'
  )
  run.main(quickstart.Config, train, ['quickstart.py', *flags.split()])
  summary = tiny.summary(tmp_path)
  assert summary['finished'] and summary['steps'] == 2
  assert {'pass@1_rl', 'pass@2_sft', 'accuracy_rl'} <= summary.keys()
