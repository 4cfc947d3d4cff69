"""Inference: the KV cache, and attention of a prompt or a new token to it."""
