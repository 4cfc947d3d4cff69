"""Every test runs on 8 virtual CPU devices, with strict dtypes and with shapes and types checked at run time.

With JAX_PLATFORMS=cuda the tests of tests/test_gpu.py run on a GPU instead; `--results` saves their outcomes.
"""

import atexit
import gc
import importlib.util
import json
import os
import pathlib
import shutil
import tempfile

import jax
import pytest
from jaxtyping import install_import_hook

if os.environ.get("JAX_PLATFORMS", "cpu") == "cpu":
    # Compilation takes most of the time; programs run for milliseconds. So this process and its children compile with
    # the cheapest flags, which halves the total time. `XLA_FLAGS= make fuzz` compiles with XLA's defaults.
    flags = ["--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1"]
    # Newer versions of XLA and the compiler for TPUs lack this flag, and an unknown flag ends the process.
    if jax.__version_info__ < (0, 11) and importlib.util.find_spec("libtpu") is None:
        flags.append("--xla_cpu_use_fusion_emitters=false")
    os.environ.setdefault("XLA_FLAGS", " ".join(flags))
    # The tests use a token cache of their own, which is deleted at the end.
    if "STRIPED_TESTS_CACHE" not in os.environ:
        TOKENS = tempfile.mkdtemp(prefix="striped-data-")
        os.environ["STRIPED_TESTS_CACHE"] = os.environ["XDG_CACHE_HOME"] = TOKENS
        atexit.register(shutil.rmtree, TOKENS, ignore_errors=True)
    # Processes share compiled programs. The folder is deleted after the run: JAX's cache key omits the names of
    # operations, which tests read, so a persistent folder could return outdated names.
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = COMPILED = tempfile.mkdtemp(prefix="striped-tests-")
        atexit.register(shutil.rmtree, COMPILED, ignore_errors=True)  # by the process that made it, after all workers
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
    # A process that finds a partially written program compiles it itself and issues this warning.
    os.environ.setdefault("PYTHONWARNINGS", "ignore:Error reading persistent compilation cache")
    # Interpreted kernels wait for each other inside callbacks, so each needs a thread, however many cores there are.
    os.environ.setdefault("NPROC", "16")
    jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")

install_import_hook("striped_attention", "beartype.beartype")

# Tracing creates millions of long-lived objects. Garbage collection with the default thresholds takes a tenth of the
# time; without it, memory grows by gigabytes.
gc.set_threshold(50_000, 10, 10)


def pytest_addoption(parser):
    parser.addoption("--results", type=pathlib.Path, help="write every test's outcome and what it printed, as JSON")


def pytest_configure(config):
    if config.getoption("--results") is not None and not hasattr(config, "workerinput"):  # not in a worker of xdist
        config.pluginmanager.register(Results(config.getoption("--results")))


class Results:
    """Writes the outcomes of a test run to a JSON file."""

    def __init__(self, path):
        from striped_attention.runtime.record import metadata

        self.path, self.document = path, metadata("tests", {"devices": [d.device_kind for d in jax.local_devices()]})
        self.document["tests"] = []

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            row = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 2)}
            self.document["tests"].append({**row, "printed": report.capstdout.splitlines()})

    @pytest.hookimpl
    def pytest_sessionfinish(self):
        self.path.write_text(json.dumps(self.document, indent=1, ensure_ascii=False) + "\n")


@pytest.fixture(autouse=True)
def _warn_anew(monkeypatch):
    """Issue once-per-process warnings again in every test, whatever ran before it."""
    from striped_attention.kernels import choice

    monkeypatch.setattr(choice, "_warned", set())
