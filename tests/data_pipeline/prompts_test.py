"""The order, the packing and the cursor of prompts."""

import collections
import dataclasses
import json

from absl.testing import parameterized
import grain
import numpy as np
import pytest

from rljax.data import prompts


class _Letters:
  """One token per character: its code point."""

  vocab_size = 256
  pad_id = 0
  stop_ids = (10,)

  def __init__(self, bos_id=None):
    self.bos_id = bos_id

  def encode(self, text):
    return [ord(c) for c in text]

  def decode(self, ids):
    return ''.join(map(chr, ids))


@dataclasses.dataclass(frozen=True)
class _Prompt:
  uid: int
  prompt: str


class _Task:
  def encode(self, example, tokenizer):
    del tokenizer
    return {'double': np.int32(2 * example.uid)}


def _source(n, prompt=str):
  return grain.MapDataset.range(n).map(lambda i: _Prompt(i, prompt(i)))


def _loader(source, **options):
  options = {'batch': 4, 'prompt_len': 6, **options}
  return prompts.Loader(source, _Letters(), _Task(), **options)


def _uids(loader, steps):
  return [next(loader)[0].prompts.uid.tolist() for _ in range(steps)]


class PackTest(parameterized.TestCase):
  def test_left_pads_and_stacks(self):
    examples = [_Prompt(7, 'ab'), _Prompt(3, 'c')]
    batch = prompts.pack(examples, _Letters(), 3, _Task())
    np.testing.assert_array_equal(
      batch.prompts.tokens, [[0, 97, 98], [0, 0, 99]]
    )
    np.testing.assert_array_equal(batch.prompts.length, [2, 1])
    np.testing.assert_array_equal(batch.prompts.uid, [7, 3])
    np.testing.assert_array_equal(batch.data['double'], [14, 6])
    self.assertEqual(batch.prompts.tokens.dtype, np.int32)

  @parameterized.parameters('ab', '\x01ab')
  def test_bos_comes_exactly_once(self, text):
    batch = prompts.pack([_Prompt(0, text)], _Letters(1), 4, _Task())
    np.testing.assert_array_equal(batch.prompts.tokens, [[0, 1, 97, 98]])

  def test_long_prompt_is_named(self):
    with self.assertRaisesRegex(
      prompts.LongPromptError, 'Prompt 5 has 4 tokens; the limit is 3'
    ):
      prompts.pack([_Prompt(5, 'abcd')], _Letters(), 3, _Task())

  def test_empty_prompt_is_refused(self):
    with self.assertRaisesRegex(ValueError, 'Prompt 5 has no token'):
      prompts.pack([_Prompt(5, '')], _Letters(), 3, _Task())

  def test_continuation_drops_a_mark_of_the_start(self):
    class Marked(_Letters):
      def encode(self, text):
        return [1, *super().encode(text)]

    self.assertEqual(prompts.continuation('1+1=', '2', Marked()), [50])

  def test_continuation_of_a_merging_tokenizer(self):
    class Merged(_Letters):
      def encode(self, text):
        return super().encode(text.replace('=2', '\xff'))

    self.assertEqual(prompts.continuation('1+1=', '2', Merged()), [50])


class LoaderTest(parameterized.TestCase):
  def test_each_epoch_is_whole_and_in_another_order(self):
    uids = sum(_uids(_loader(_source(10)), 10), [])
    epochs = [uids[k : k + 10] for k in range(0, 40, 10)]
    for epoch in epochs:
      self.assertCountEqual(epoch, range(10))
    self.assertLen(set(map(tuple, epochs)), 4)
    self.assertNotIn(list(range(10)), epochs)

  def test_seeds_are_not_shifted_epochs(self):
    first = sum(_uids(_loader(_source(8), seed=0), 4), [])
    second = sum(_uids(_loader(_source(8), seed=1), 4), [])
    self.assertNotEqual(first[8:], second[:8])
    self.assertEqual(first, sum(_uids(_loader(_source(8), seed=0), 4), []))

  def test_a_dataset_smaller_than_the_batch_wraps(self):
    (uids,) = _uids(_loader(_source(3), batch=7), 1)
    self.assertEqual(sorted(collections.Counter(uids).values()), [2, 2, 3])

  # 10 examples in batches of 4: in the middle of an epoch, and (20 examples)
  # right where the second one ends.
  @parameterized.parameters(1, 3, 5)
  def test_resumes_bit_equal(self, steps):
    straight = _loader(_source(10))
    _uids(straight, steps)
    state = json.loads(json.dumps(straight.get_state()))
    resumed = _loader(_source(10))
    _uids(resumed, 2)
    resumed.set_state(state)
    for _ in range(6):
      (batch, examples), (other, others) = next(straight), next(resumed)
      self.assertEqual(examples, others)
      np.testing.assert_array_equal(batch.prompts.tokens, other.prompts.tokens)

  def test_resumes_bit_equal_with_skipped_prompts(self):
    source = _source(10, lambda i: 'x' * (9 if i % 3 == 0 else 2))
    straight, resumed = _loader(source), _loader(source)
    _uids(straight, 3)
    resumed.set_state(straight.get_state())
    self.assertEqual(_uids(straight, 5), _uids(resumed, 5))
    self.assertEqual(straight.skipped, resumed.skipped)

  def test_processes_share_the_single_process_batch(self):
    whole = _uids(_loader(_source(10), batch=6), 7)
    parts = [
      _uids(_loader(_source(10), batch=2, process_index=k, process_count=3), 7)
      for k in range(3)
    ]
    self.assertEqual(whole, [sum(p, []) for p in zip(*parts, strict=True)])

  def test_long_prompts_are_skipped_counted_and_named(self):
    source = _source(10, lambda i: 'x' * (7 if i < 3 else 6))
    loader = _loader(source, batch=7)
    (uids,) = _uids(loader, 1)
    self.assertCountEqual(uids, range(3, 10))
    _uids(loader, 1)
    self.assertBetween(loader.skipped, 3, 6)
    self.assertLen(loader.notes, 3)  # each is named once
    self.assertRegex(loader.notes[0], 'skipped: Prompt [012] has 7 tokens')

  def test_long_prompts_are_refused(self):
    loader = _loader(_source(10, lambda i: 'x' * 7), long_prompts='refuse')
    with self.assertRaisesRegex(prompts.LongPromptError, 'the limit is 6'):
      next(loader)

  def test_nothing_but_long_prompts_ends(self):
    loader = _loader(_source(10, lambda i: 'x' * 7))
    with self.assertRaisesRegex(ValueError, 'All of 10 prompts'):
      next(loader)

  def test_empty_dataset(self):
    with self.assertRaisesRegex(ValueError, 'no examples'):
      _loader(_source(10)[:0])

  @parameterized.parameters(
    {'batch': 0}, {'long_prompts': 'cut'}, {'process_index': 1}
  )
  def test_arguments_out_of_range(self, **options):
    with self.assertRaises(ValueError):
      _loader(_source(10), **options)

  @parameterized.parameters({'seed': 1}, {'batch': 5}, {'prompt_len': 9})
  def test_state_of_another_loader_is_refused(self, **options):
    state = _loader(_source(10)).get_state()
    with self.assertRaisesRegex(ValueError, 'data cursor belongs to'):
      _loader(_source(10), **options).set_state(state)


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__]))
