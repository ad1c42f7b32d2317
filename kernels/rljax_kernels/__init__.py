"""Vocabulary kernels: log-probs and samples without `[tokens, vocab]`."""

from rljax_kernels.vocab_sample.api import pick, vocab_sample
from rljax_kernels.vocab_stats.api import Layout, token_loss, vocab_stats

__all__ = ['Layout', 'pick', 'token_loss', 'vocab_sample', 'vocab_stats']
