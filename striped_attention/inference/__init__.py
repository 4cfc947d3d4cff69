"""Inference: the KV cache, and attention of prompts and new tokens to it."""
