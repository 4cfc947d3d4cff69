"""Every test runs on 8 virtual CPU devices, with strict dtypes and with shapes and types checked at run time.

With JAX_PLATFORMS=cuda the tests of tests/test_gpu.py run on a GPU instead, and `--results` keeps what they saw.
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
    # Compiling is most of the work, and programs run for milliseconds: one way to compile for this process and for all
    # that it starts, the cheapest. Together these flags halve the time. `XLA_FLAGS= make fuzz` compiles as users do.
    flags = ["--xla_backend_optimization_level=0", "--xla_cpu_parallel_codegen_split_count=1"]
    # Newer ones, and the compiler for TPUs, know no other emitters, and an unknown flag ends the process.
    if jax.__version_info__ < (0, 11) and importlib.util.find_spec("libtpu") is None:
        flags.append("--xla_cpu_use_fusion_emitters=false")
    os.environ.setdefault("XLA_FLAGS", " ".join(flags))
    # Tokens that the tests make are kept apart from those of whoever runs them, and go away with the tests.
    if "STRIPED_TESTS_CACHE" not in os.environ:
        TOKENS = tempfile.mkdtemp(prefix="striped-data-")
        os.environ["STRIPED_TESTS_CACHE"] = os.environ["XDG_CACHE_HOME"] = TOKENS
        atexit.register(shutil.rmtree, TOKENS, ignore_errors=True)
    # What one process has compiled, no other need. The folder lasts as long as the run: JAX's key for a program leaves
    # out the names of its operations, which tests read, so a folder that lasts could show those of yesterday.
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = COMPILED = tempfile.mkdtemp(prefix="striped-tests-")
        atexit.register(shutil.rmtree, COMPILED, ignore_errors=True)  # by whoever made it, so after all workers
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
    # A process may meet a program that another has not yet written to its end; it compiles it itself, and says so.
    os.environ.setdefault("PYTHONWARNINGS", "ignore:Error reading persistent compilation cache")
    # Interpreted kernels wait for each other inside of callbacks: they need a thread each, whatever cores there are.
    os.environ.setdefault("NPROC", "16")
    jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")

install_import_hook("striped_attention", "beartype.beartype")

# Tracing makes millions of objects that live on. Looking through all of them again and again takes a tenth of the time,
# never looking takes gigabytes.
gc.set_threshold(50_000, 10, 10)


def pytest_addoption(parser):
    parser.addoption("--results", type=pathlib.Path, help="write every test's outcome and what it printed, as JSON")


def pytest_configure(config):
    if config.getoption("--results") is not None and not hasattr(config, "workerinput"):  # no worker of xdist
        config.pluginmanager.register(Results(config.getoption("--results")))


class Results:
    """Writes down what a run of the tests saw."""

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
    """Warnings that are issued once per process are issued in every test, whatever ran before it."""
    from striped_attention.kernels import choice

    monkeypatch.setattr(choice, "_warned", set())
