"""Tests of judges: failures are counted, and a control keeps the rewards."""

import types

import jax
import jax.numpy as jnp
import numpy as np

from rljax.data import tokenizers
from rljax.runs import judging


class Task:
  """Says what the answer says, in the process of the run."""

  trusted = True

  def verify(self, example, text):
    if example == 'raise':
      raise KeyError(text)
    return {'text': len(text)}.get(example, example)


def test_failures_are_missing_and_counted():
  tokenizer = tokenizers.Characters('ab')
  host = judging.Host(Task(), tokenizer, tokenizer.stop_ids)
  host.examples = [0.5, 'raise', float('nan'), float('inf'), 'text']
  response = np.array([[3, 4, 2]] * 10, np.int32)
  length = np.array([3, 2] * 5, np.int32)
  got = host.score(response, length, np.ones((10, 3)))
  nan = np.nan
  np.testing.assert_array_equal(
    got, [0.5, 0.5, nan, nan, nan, nan, nan, nan, 2, 2]
  )
  assert host.failures == {'exception': 2, 'not finite': 4}
  host.close()


def test_what_a_tool_said_is_not_judged():
  tokenizer = tokenizers.Characters('ab')
  host = judging.Host(Task(), tokenizer, tokenizer.stop_ids)
  host.examples = ['text']
  response = np.array([[3, 4, 4, 2], [4, 4, 3, 3]], np.int32)
  mask = np.array([[1, 1, 0, 1], [0, 0, 1, 0]])
  got = host.score(response, np.array([4, 3]), mask)
  np.testing.assert_array_equal(got, [2, 1])  # 'ab' and 'a'
  behind = host.score(response[:1], np.array([3]), np.array([[1, 1, 0, 0]]))
  np.testing.assert_array_equal(behind, [2])  # a tool has the last word
  host.close()


def test_a_stop_token_is_no_text():
  tokenizer = tokenizers.Characters('ab')
  response = np.array([3, 4, 2, 3])
  texts = [judging.text(tokenizer, (2,), response, n) for n in range(4)]
  assert texts == ['', 'a', 'ab', 'ab']
  assert judging.text(tokenizer, (4, 2), response, 2) == 'a'


def test_shuffled_keeps_the_multiset_of_rewards():
  rewards = {'task': jnp.arange(64.0), 'other': -jnp.arange(64.0)}
  judge = judging.shuffled(lambda rollout: rewards, seed=0)

  def at(version):
    rollout = types.SimpleNamespace(version=jnp.full((64, 4), version))
    return {k: np.asarray(v) for k, v in judge(rollout).items()}

  first, second = at(0), at(1)
  for name, want in rewards.items():
    np.testing.assert_array_equal(np.sort(first[name]), np.sort(want))
  np.testing.assert_array_equal(first['task'], -first['other'])
  assert (first['task'] == np.arange(64)).mean() < 0.2
  assert (first['task'] == second['task']).mean() < 0.2
  np.testing.assert_array_equal(first['task'], at(0)['task'])


def test_local_rows_come_in_order():
  mesh = jax.make_mesh((8,), ('data',))
  rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('data'))
  x = jax.device_put(jnp.arange(32).reshape(16, 2), rows)
  np.testing.assert_array_equal(judging.local(x), np.arange(32).reshape(16, 2))


def test_the_device_judge_is_the_tasks():
  task = types.SimpleNamespace(device_verify=lambda rollout: rollout * 2)
  judge = judging.device(task)
  assert judge is not None and judge(3) == {'task': 6}
  assert judging.device(types.SimpleNamespace(device_verify=None)) is None
