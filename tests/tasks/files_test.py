"""Prompt files, and what is said about broken ones."""

import json

from absl.testing import parameterized
import pytest

from rljax.tasks import files, task


@pytest.fixture(name='folder', autouse=True)
def _folder(request, tmp_path):
  request.cls.folder = tmp_path


def _all(made, split):
  source = made.source(split)
  return [source[i] for i in range(len(source))]


class FileTest(parameterized.TestCase):
  def _write(self, text, name='some.jsonl'):
    path = self.folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)

  def _lines(self, *rows, name='some.jsonl'):
    return self._write(''.join(json.dumps(r) + '\n' for r in rows), name)

  def test_examples(self):
    path = self._lines(
      *({'prompt': f'{k}+1', 'answer': k + 1} for k in range(20))
    )
    made = task.named(f'jsonl:{path}', template='{prompt}=', held_out=0.25)
    train, test = _all(made, 'train'), _all(made, 'test')
    self.assertLen(train, 15)
    self.assertLen(test, 5)
    self.assertCountEqual([e.uid for e in train + test], range(20))
    for e in train + test:
      self.assertEqual(e.prompt, f'{e.uid}+1=')
      self.assertEqual(e.answer, str(e.uid + 1))
      self.assertEqual(made.verify(e, f' {e.uid + 1}\n'), 1)
      self.assertEqual(made.verify(e, f'={e.uid + 1}'), 0)
    self.assertTrue(made.trusted)
    self.assertEqual(task.named(made.name, **made.options), made)
    task.validate(made)

  def test_equal_prompts_are_one_problem(self):
    rows = [{'prompt': f'p{k % 7}', 'answer': 'x'} for k in range(70)]
    made = task.named(f'jsonl:{self._lines(*rows)}', held_out=0.3)
    train, test = _all(made, 'train'), _all(made, 'test')
    self.assertLen(train + test, 70)
    self.assertLen({e.uid for e in train + test}, 7)
    self.assertEmpty({e.prompt for e in train} & {e.prompt for e in test})

  def test_own_fields_and_test_file(self):
    train = [
      {'q': 'a', 'gold': 1.5, 'why': 'since'},
      {'q': 'b', 'gold': 'y', 'why': 'so'},
    ]
    test = [{'q': 'b', 'gold': 'y', 'why': ''}]
    made = task.named(
      f'jsonl:{self._lines(*train)}',
      prompt='q',
      answer='gold',
      trace='why',
      test_path=self._lines(*test, name='test.jsonl'),
    )
    (example,) = _all(made, 'train')
    self.assertEqual(
      (example.prompt, example.answer, example.trace), ('a', '1.5', 'since')
    )
    self.assertEqual([e.prompt for e in _all(made, 'test')], ['b'])

  @parameterized.parameters(
    ('{"prompt": "a", "answer": "b"}\n\n{oops}\n', 'line 3: not JSON'),
    ('{"prompt": "a", "answer": "b"}\n[1]\n', 'line 2: not a JSON object'),
    ('{"prompt": "a", "answers": "b"}\n', "line 1: no field 'answer'; did"),
    ('{"prompt": ["a"], "answer": "b"}\n', "line 1: 'prompt' is"),
    ('{"prompt": "a", "answer": null}\n', "line 1: 'answer' is None"),
    ('{"prompt": "a", "answer": true}\n', "line 1: 'answer' is True"),
    (b'{"prompt": "\xff", "answer": "b"}\n', 'line 1: not JSON'),
    ('{"prompt": "a", "answer": NaN}\n', "line 1: 'answer' is nan"),
    ('{"prompt": "a", "answer": 1e999}\n', "line 1: 'answer' is inf"),
    ('{"prompt": "\\ud800", "answer": 1}\n', "line 1: 'prompt' is no text"),
    ('', 'holds no examples'),
    ('\n\n', 'holds no examples'),
    ('{"prompt": "a", "answer": "b"}\n', 'leaves no prompt to train on'),
  )
  def test_broken_file(self, text, message):
    path = self._write(text)
    with self.assertRaisesRegex(ValueError, f'{path}.*{message}'):
      task.named(f'jsonl:{path}').source('train')

  def test_no_file(self):
    with self.assertRaisesRegex(ValueError, "no file '/nowhere/x.jsonl'"):
      task.named('jsonl:/nowhere/x.jsonl').source('train')

  @parameterized.parameters(
    ({'compare': 'maths'}, "did you mean 'math'"),
    ({'template': 'x'}, 'does not hold'),
    ({'held_out': 1}, 'held_out'),
    ({'promt': 'x'}, "did you mean 'prompt'"),
    ({'kind': 'x'}, 'no option'),
  )
  def test_wrong_options(self, options, message):
    with self.assertRaisesRegex(ValueError, message):
      task.named('jsonl:x', **options)

  @pytest.mark.tasks
  def test_mathematics_in_the_sandbox(self):
    rows = [
      {'prompt': f'{k}/6', 'answer': f'\\boxed{{{k}/6}}'} for k in range(20)
    ]
    made = task.named(f'jsonl:{self._lines(*rows)}', compare='math')
    self.assertFalse(made.trusted)
    task.validate(made, 2)
    examples = _all(made, 'train')[:3]
    with task.sandboxed(made, workers=1, timeout=20.0) as box:
      texts = [rf'it is \boxed{{\frac{{{2 * e.uid}}}{{12}}}}' for e in examples]
      self.assertEqual(box.score(examples, texts).tolist(), [1, 1, 1])
      texts = [f'it is {e.uid}/6' for e in examples]
      self.assertEqual(box.score(examples, texts).tolist(), [0, 0, 0])
      self.assertEmpty(box.failures)

  @pytest.mark.tasks
  def test_parquet(self):
    pa = pytest.importorskip('pyarrow')
    from pyarrow import parquet

    path = str(self.folder / 'some.parquet')
    table = {'prompt': ['a', 'b', 'c'], 'answer': [1, 2, 3], 'x': [0, 0, 0]}
    parquet.write_table(pa.table(table), path)
    made = task.named(f'parquet:{path}', held_out=0.3)
    examples = _all(made, 'train') + _all(made, 'test')
    self.assertEqual(
      sorted((e.prompt, e.answer) for e in examples),
      [('a', '1'), ('b', '2'), ('c', '3')],
    )
    with self.assertRaisesRegex(ValueError, f"{path}: no column 'promt'; did"):
      task.named(f'parquet:{path}', prompt='promt').source('train')
    table['answer'][1] = None
    parquet.write_table(pa.table(table), path)
    with self.assertRaisesRegex(ValueError, f"{path}, row 2: 'answer' is None"):
      task.named(f'parquet:{path}').source('train')
    with self.assertRaisesRegex(ValueError, 'not a Parquet file'):
      task.named(f'parquet:{self._write("no")}').source('train')

  def test_parquet_without_pyarrow(self):
    try:
      import pyarrow

      self.skipTest(f'{pyarrow.__name__} is installed')
    except ImportError:
      path = self._write('x')
    with self.assertRaisesRegex(ImportError, r'rljax\[tasks\]'):
      files.File(kind='parquet', path=path).source('train')


if __name__ == '__main__':
  raise SystemExit(pytest.main([__file__]))
