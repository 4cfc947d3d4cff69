"""Benchmarks of striped_attention, and reports drawn from their results: `striped bench` and `striped report`."""

__version__ = "0.1.0"
