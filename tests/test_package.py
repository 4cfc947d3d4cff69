"""The package as a new user meets it: light to import, no backend started on import, and a README that runs."""

import json
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PUBLIC = {
    "contiguous", "striped", "zigzag", "causal", "full", "sliding_window", "documents", "prefix", "attention",
    "attention_shard", "alibi", "relative_bias", "Partial", "merge", "plan", "make_mesh",
    "KVCache", "decode_attention", "prefill_attention", "compiler_options", "SlowKernelWarning",
    "strategy", "best_layout", "ranges", "window", "shard_batch", "attention_fn", "dot_product_attention",
}  # fmt: skip

AS_TESTS_COMPILE = {name: os.environ.get(name, "") for name in ("XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR")}


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
    modules = {"adapters", "attention", "core", "inference", "kernels", "models", "planning", "runtime", "strategies"}
    modules |= {"errors"}
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


def test_examples_of_the_documentation_run_word_for_word():
    """Every Python example of the documentation runs, in order, each in its own namespace."""
    texts = {name: (ROOT / name).read_text() for name in ("README.md", "docs/planning.md", "docs/inference.md")}
    found = {name: re.findall(r"```python\n(.*?)```", text, re.DOTALL) for name, text in texts.items()}
    assert all(found.values())
    blocks = [(f"{name}, example {i}", block) for name, blocks in found.items() for i, block in enumerate(blocks, 1)]
    code = f"for name, block in {blocks!r}:\n    exec(compile(block, name, 'exec'), {{'__name__': '__main__'}})"
    run(code, **AS_TESTS_COMPILE, JAX_PLATFORMS="cpu", JAX_NUM_CPU_DEVICES="8")


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
    text = run(f"import runpy; runpy.run_path('examples/{name}.py', run_name='__main__')", **AS_TESTS_COMPILE)
    assert "largest difference of a gradient" in text


def test_the_quickstart_checks_itself_and_shows_the_work_of_each_device():
    """The quickstart runs with the compiler settings of users, unlike most of the tests."""
    text = run("import runpy; runpy.run_path('examples/quickstart.py', run_name='__main__')")
    assert "equals dense attention" in text
    for layout in ("contiguous", "striped", "zigzag"):
        assert layout in text


def test_names_of_modules_in_the_documents_exist():
    """Every dotted name in the documents, like striped_attention.core.mask, and every file path exists."""
    documents = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*")]
    text = "\n".join(path.read_text() for path in documents if path.is_file())
    text = re.sub(r"https?://\S+", "", text)  # may name files of other repositories
    names = set(re.findall(r"\bstriped_(?:attention|bench)(?:\.\w+)+", text))
    assert len(names) > 3
    for name in sorted(names):
        assert pkgutil.resolve_name(name) is not None
    files = set(re.findall(r"\b(?:striped_attention|benchmarks|tests|docs|examples)/[\w/.]+\.\w+", text))
    assert len(files) > 10
    assert [name for name in sorted(files) if not (ROOT / name).exists()] == []


def test_make_does_not_clear_a_folder_that_it_did_not_make(tmp_path):
    (tmp_path / "mine").write_text("precious")
    done = subprocess.run(["make", "setup", f"VENV={tmp_path}"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert f"{tmp_path} exists but was not made by make, which would clear it." in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
