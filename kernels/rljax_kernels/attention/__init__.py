"""Attention by whoever does it best on a platform; no kernel of its own."""

from rljax_kernels.attention.api import attention, paged_decode

__all__ = ['attention', 'paged_decode']
