"""Reinforcement learning for language-model reasoning, native to JAX."""
