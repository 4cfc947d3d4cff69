"""Compiled: keep compiled programs on disk, so that later runs start sooner.

JAX does the work (its persistent compilation cache); this module sets the folder and the limits. It changes nothing if
JAX_COMPILATION_CACHE_DIR sets another folder or JAX_ENABLE_COMPILATION_CACHE=false disables the cache, and a limit set
by JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS replaces SOONEST.
"""

import os
import pathlib

import jax

LARGEST = 2**32  # bytes in the folder; the least recently used programs are removed first
SOONEST = 0.2  # seconds; programs that compile faster are not kept


def folder() -> pathlib.Path:
    """Return the default folder for compiled programs."""
    caches = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(caches) / "striped_attention" / "programs"


def keep_programs() -> None:
    """Keep programs compiled from now on. Must be called before the first program is compiled."""
    chosen = jax.config.values
    if chosen["jax_compilation_cache_dir"] is not None or not chosen["jax_enable_compilation_cache"]:
        return
    jax.config.update("jax_compilation_cache_dir", str(folder()))
    jax.config.update("jax_compilation_cache_max_size", LARGEST)
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", SOONEST)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
