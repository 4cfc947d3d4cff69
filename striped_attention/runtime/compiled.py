"""Compiled: programs that were compiled once are kept on disk, and later runs start sooner.

JAX does the work (its persistent compilation cache); this says where and how much. Who has chosen a folder by
JAX_COMPILATION_CACHE_DIR, or none by JAX_ENABLE_COMPILATION_CACHE=false, is left alone.
"""

import os
import pathlib

import jax

LARGEST = 2**32  # bytes of the folder; what was not used for the longest time goes first
SOONEST = 0.2  # seconds; what compiles faster is not kept


def folder() -> pathlib.Path:
    """Where programs are kept, if nobody says otherwise."""
    caches = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(caches) / "striped_attention" / "programs"


def keep_programs() -> None:
    """Keep what is compiled from now on. To be called before the first program is compiled."""
    chosen = jax.config.values
    if chosen["jax_compilation_cache_dir"] is not None or not chosen["jax_enable_compilation_cache"]:
        return
    jax.config.update("jax_compilation_cache_dir", str(folder()))
    jax.config.update("jax_compilation_cache_max_size", LARGEST)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", SOONEST)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
