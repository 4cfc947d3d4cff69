"""Every test runs on 8 virtual CPU devices, with strict dtypes and with shapes and types checked at run time.

With JAX_PLATFORMS=cuda the tests of tests/test_gpu.py run on a GPU instead, and `--results` keeps what they saw.
"""

import atexit
import json
import os
import pathlib
import shutil
import tempfile

import jax
import pytest
from jaxtyping import install_import_hook

if os.environ.get("JAX_PLATFORMS", "cpu") == "cpu":
    # Compiling is most of the work. With less of LLVM's it takes up to a quarter less; and what one process has
    # compiled no other need: the tests start many that run the same programs.
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=1")
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = COMPILED = tempfile.mkdtemp(prefix="striped-tests-")
        atexit.register(shutil.rmtree, COMPILED, ignore_errors=True)  # by whoever made it, so after all workers
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
    jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")

install_import_hook("striped_attention", "beartype.beartype")


def pytest_addoption(parser):
    parser.addoption("--results", type=pathlib.Path, help="write every test's outcome and what it printed, as JSON")


def pytest_configure(config):
    if config.getoption("--results") is not None and not hasattr(config, "workerinput"):  # no worker of xdist
        config.pluginmanager.register(Results(config.getoption("--results")))


class Results:
    """Writes down what a run of the tests saw."""

    def __init__(self, path):
        from striped_attention.bench.record import metadata

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
