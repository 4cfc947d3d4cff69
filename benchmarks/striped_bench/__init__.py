"""Benchmarks of striped_attention (`striped bench`) and reports of their results (`striped report`)."""

__version__ = "0.1.0"
