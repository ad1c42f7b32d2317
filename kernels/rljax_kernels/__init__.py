"""Vocabulary kernels: log-probs and samples without `[tokens, vocab]`."""

from rljax_kernels.layout import Layout
from rljax_kernels.vocab_logits.api import gather_logits, vocab_topk
from rljax_kernels.vocab_sample.api import gumbel_sample, vocab_sample
from rljax_kernels.vocab_sample.cdf import pick
from rljax_kernels.vocab_stats.api import token_loss, vocab_js, vocab_stats
from rljax_kernels.vocab_stats.arguments import Reference

__all__ = [
  'Layout',
  'Reference',
  'gather_logits',
  'gumbel_sample',
  'pick',
  'token_loss',
  'vocab_js',
  'vocab_sample',
  'vocab_stats',
  'vocab_topk',
]
