"""The package as a stranger meets it: light to import, silent until used, with a README that runs."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PUBLIC = {
    "contiguous", "striped", "zigzag", "causal", "full", "sliding_window", "documents", "prefix", "attention",
    "attention_shard", "alibi", "relative_bias", "Partial", "merge", "plan", "make_mesh",
    "KVCache", "decode_attention", "prefill_attention",
}  # fmt: skip


def run(code, **environment):
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={"PATH": "", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_public_surface():
    names = set(json.loads(run("import json, striped_attention as sa; print(json.dumps(dir(sa)))")))
    modules = {"attention", "bias", "cudnn", "kernel", "kernel_cudnn", "kernel_xla", "layout", "mask", "ring"}
    modules |= {"cache", "cached_attention", "kernel_few", "kernel_pallas_tpu", "mesh", "tile_list"}
    modules |= {"cost", "count", "hardware", "model", "parallel", "rotary", "timeline"}  # what a plan is made of
    assert {name for name in names if not name.startswith("_")} == PUBLIC | modules


def test_import_needs_only_jax_numpy_and_jaxtyping_and_starts_no_backend():
    code = """
import json, sys
import jax, numpy, jaxtyping
before = set(sys.modules)
import striped_attention
from jax._src import xla_bridge
print(json.dumps([sorted({m.split(".")[0] for m in set(sys.modules) - before}), xla_bridge.backends_are_initialized()]))
"""
    added, started = json.loads(run(code))
    assert set(added) <= {"striped_attention", "jax", "numpy", "jaxtyping", *sys.stdlib_module_names}
    assert started is False


@pytest.mark.parametrize("name", ["README.md", "docs/planning.md", "docs/inference.md"])
def test_examples_of_the_documentation_run_word_for_word(name):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        run(block, XLA_FLAGS="--xla_force_host_platform_device_count=8", JAX_PLATFORMS="cpu")


def test_the_notebook_runs_and_shows_what_it_prints(tmp_path):
    cells = [
        cell
        for cell in json.loads((ROOT / "examples" / "planning.ipynb").read_text())["cells"]
        if cell["cell_type"] == "code"
    ]
    code = "\n".join("".join(cell["source"]) for cell in cells)
    shown = "".join("".join(output.get("text", "")) for cell in cells for output in cell["outputs"])
    assert run(code, MPLBACKEND="agg", MPLCONFIGDIR=str(tmp_path)) == shown
    assert sum("image/png" in output.get("data", {}) for cell in cells for output in cell["outputs"]) == 4


@pytest.mark.parametrize("name", ["flax_nnx", "equinox_model"])
def test_models_of_other_libraries_give_the_same_losses_and_gradients(name):
    text = run(f"import runpy; runpy.run_path('examples/{name}.py', run_name='__main__')")
    assert "largest difference of a gradient" in text


def test_the_quickstart_checks_itself_and_shows_the_work_of_each_device():
    text = run("import runpy; runpy.run_path('examples/quickstart.py', run_name='__main__')")
    assert "equals the oracle" in text
    for layout in ("contiguous", "striped", "zigzag"):
        assert layout in text
