"""The version, in a file that can be read without importing JAX."""

__version__ = "0.1.0"
