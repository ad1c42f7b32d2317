"""Log-probs, statistics and samples of a large vocabulary, without logits."""

from rljax_kernels.layout import Layout
from rljax_kernels.vocab_logits.api import gather_logits, vocab_topk
from rljax_kernels.vocab_sample.api import gumbel_sample, vocab_sample
from rljax_kernels.vocab_sample.blocks import Drawn
from rljax_kernels.vocab_sample.cdf import pick
from rljax_kernels.vocab_stats.api import token_loss, vocab_js, vocab_stats
from rljax_kernels.vocab_stats.arguments import Reference
from rljax_kernels.vocab_stats.choice import Choice
from rljax_kernels.vocab_stats.xla_token import Sums

__all__ = [
  'Choice',
  'Drawn',
  'Layout',
  'Reference',
  'Sums',
  'gather_logits',
  'gumbel_sample',
  'pick',
  'token_loss',
  'vocab_js',
  'vocab_sample',
  'vocab_stats',
  'vocab_topk',
]
