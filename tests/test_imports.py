"""The folder structure is the architecture: imports only point down the list of layers in CONTRIBUTING.md."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parent.parent
# From top to bottom: a module may import from its own layer and from the layers below.
LAYERS = (
    "striped_bench.report",
    "striped_bench",
    "cli",
    "compiling",
    "evaluation",
    "generation",
    "training",
    "data",
    "huggingface",
    "options",
    "planning",
    "models",
    "inference",
    "adapters",
    "attention",
    "strategies",
    "kernels",
    "runtime",
    "core",
    "errors",
    "_version",
)


def layer(module):
    """Return the index of a module's layer, from the top. The package itself re-exports names from `planning` down."""
    name = module.removeprefix("striped_attention").removeprefix(".")
    found = [i for i, prefix in enumerate(LAYERS) if name == prefix or name.startswith(prefix + ".")]
    return found[0] if found else LAYERS.index("planning")


def imported(path, module):
    """Yield the modules of this repository that a file imports, at any nesting level, with their line numbers."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}, line {node.lineno}: use absolute imports"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from ((name, node.lineno) for name in names if name.startswith(("striped_attention", "striped_bench")))


def modules():
    for folder in (ROOT / "striped_attention", ROOT / "benchmarks" / "striped_bench"):
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder.parent).with_suffix("").parts
            yield ".".join(part for part in parts if part != "__init__"), path


def upward(found):
    """Return the imports that point up, as (module, line, imported name)."""
    return [
        (module, line, name)
        for module, path in found
        for name, line in imported(path, module)
        if layer(name) < layer(module)
    ]


def test_imports_point_down():
    found = list(modules())
    assert len(found) > 80
    assert {layer(module) for module, _ in found} >= set(range(len(LAYERS)))  # every layer in the list has modules
    assert upward(found) == []


def test_every_module_but_the_package_has_a_layer():
    tops = {module.removeprefix("striped_attention.").split(".")[0] for module, _ in modules()}
    assert tops - {layer.split(".")[0] for layer in LAYERS} == {"striped_attention"}


@pytest.mark.parametrize(
    ("module", "line", "fails"),
    [
        ("striped_attention.kernels.xla", "from striped_attention.strategies.ring import Ring", True),
        ("striped_attention.kernels.xla", "from striped_attention.strategies import ring", True),
        ("striped_attention.core.mask", "def f():\n    import striped_attention.kernels.tiles", True),
        ("striped_attention.training.step", "from striped_bench.bench import mock", True),
        ("striped_attention.kernels.xla", "import striped_attention as sa", True),
        ("striped_attention.core.mask", "from striped_attention import KVCache", True),
        ("striped_attention.training.step", "import striped_attention as sa", False),
        ("striped_attention.kernels.xla", "from striped_attention.kernels import tiles", False),
        ("striped_attention.strategies.ring", "from striped_attention.kernels.tiles import tile_spans", False),
    ],
)
def test_the_rule_notices(tmp_path, module, line, fails):
    path = tmp_path / "module.py"
    path.write_text(line)
    assert bool(upward([(module, path)])) == fails


def test_only_the_layout_file_knows_the_names_of_layouts():
    """Elsewhere a layout is an opaque value: code that checks its name or rounds would break with a new layout."""
    names = {"contiguous", "zigzag", "rounds"}
    found = []
    for module, path in modules():
        if module in ("striped_attention.core.layout", "striped_attention") or module.startswith("striped_bench"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            used = {getattr(node, field, None) for field in ("id", "attr", "name")}
            used |= {node.value} if isinstance(node, ast.Constant) and isinstance(node.value, str) else set()
            found += [(module, node.lineno, name) for name in used & names]
    assert found == []


def test_requests_to_kernels_are_built_in_one_function():
    calls = [
        (module, node.lineno)
        for module, path in modules()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and "Request" in (getattr(node.func, "id", None), getattr(node.func, "attr", None))
    ]
    assert [module for module, _ in calls] == ["striped_attention.kernels.contract"]
