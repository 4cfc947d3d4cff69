"""The library's wheel and source archive: their contents, imports with only the core dependencies, and messages of the
command when packages of an extra are missing."""

import email
import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CORE = {"jax", "numpy", "jaxtyping"}
COMMANDS = ("train", "generate", "import", "export", "plan", "explore", "compile")


FILES = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Build what `python -m build` makes, from a copy: setuptools leaves a folder beside the sources."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    nothing = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "striped_attention", source / "striped_attention", ignore=nothing)
    shutil.copytree(ROOT / "tests", source / "tests", ignore=nothing)  # not to be found in either
    for name in FILES:
        shutil.copy(ROOT / name, source)
    build = f"from setuptools import build_meta as b; b.build_sdist({str(folder)!r}); b.build_wheel({str(folder)!r})"
    done = subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(built):
    (path,) = built.glob("*.whl")
    return path


def test_the_source_archive_holds_what_a_build_needs(built):
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as packed:
        names = {name.partition("/")[2] for name in packed.getnames() if packed.getmember(name).isfile()}
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "striped_attention").rglob("*.py")}
    made = {name for name in names if ".egg-info/" in name} | {"PKG-INFO", "setup.cfg"}
    files = {"striped_attention/py.typed", "striped_attention/cli/explorer.html"}
    assert names == {*modules, *FILES, *files} | made


def test_the_wheel_holds_the_library_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as packed:
        names = [name for name in packed.namelist() if ".dist-info/" not in name]
        (metadata,) = (name for name in packed.namelist() if name.endswith(".dist-info/METADATA"))
        needs = email.message_from_bytes(packed.read(metadata)).get_all("Requires-Dist")
        entries = packed.read(metadata.replace("METADATA", "entry_points.txt")).decode()
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "striped_attention").rglob("*.py")}
    assert set(names) == {*modules, "striped_attention/py.typed", "striped_attention/cli/explorer.html"}
    assert {re.match(r"[\w-]+", need)[0] for need in needs if "extra ==" not in need} == CORE
    assert "striped = striped_attention.cli:main" in entries


def test_the_description_on_pypi_links_to_nothing_that_is_only_in_the_repository(wheel):
    with zipfile.ZipFile(wheel) as packed:
        (metadata,) = (name for name in packed.namelist() if name.endswith(".dist-info/METADATA"))
        message = email.message_from_bytes(packed.read(metadata))
    text, readme = message.get_payload(), (ROOT / "README.md").read_text()
    assert message["Description-Content-Type"] == "text/markdown"
    assert text.splitlines()[0] == readme.splitlines()[0]
    links = re.findall(r"\]\(([^)]*)\)", text)
    assert links == re.findall(r"\]\((https?:[^)]*)\)", readme) != []
    assert "docs/training.md" in text, "still named"


def packages(distributions):
    """Return the top-level modules of these distributions and of all that they require."""
    needed, left = set(), list(distributions)
    while left:
        name = left.pop()
        needed.add(name)
        for text in importlib.metadata.requires(name) or ():
            other = re.sub("[_.]", "-", re.match(r"[\w.-]+", text)[0]).lower()
            if ";" not in text and other not in needed:
                left.append(other)
    found = importlib.metadata.packages_distributions()
    return {module for module, of in found.items() if needed & {re.sub("[_.]", "-", name).lower() for name in of}}


# Puts the wheel first on the path and hides modules in `missing` and outside of `allowed` (None allows all).
CODE = """
import contextlib, importlib, io, json, sys

wheel, allowed, missing, commands = json.loads(sys.argv[1])

class Only:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        top = name.split(".")[0]
        known = allowed is None or top in allowed or top in sys.stdlib_module_names or top.startswith("_sysconfigdata")
        if top in missing or not known:
            return None
        return self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = map(Only, sys.meta_path)
sys.path.insert(0, wheel)
import striped_attention
from striped_attention.cli import main

assert striped_attention.__file__.startswith(wheel), striped_attention.__file__
said = []
for command in commands:
    with contextlib.redirect_stderr(io.StringIO()) as error:
        said.append((main(command), error.getvalue()))
print(json.dumps([said, sorted({name.split(".")[0] for name in sys.modules})]))
"""


def run(wheel, commands, allowed=None, missing=()):
    """Return each command's exit code and error output, and the modules that were imported by all of them."""
    asked = json.dumps([str(wheel), allowed, missing, commands])
    done = subprocess.run(
        [sys.executable, "-c", CODE, asked], env={"PATH": ""}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_with_the_core_dependencies_it_imports_and_the_command_says_what_to_install(wheel):
    allowed = [*packages(CORE), "striped_attention"]
    assert {"jaxlib", "ml_dtypes"} <= set(allowed)
    assert not {"tyro", "optax", "orbax", "rich", "torch"} & set(allowed)
    said, _ = run(wheel, [[], ["--help"], *([name] for name in COMMANDS)], allowed)
    for command, (code, error) in zip([None, None, *COMMANDS], said, strict=True):
        extra = "tpu" if command == "compile" else "train"
        assert (code, error) == (
            2,
            f"striped: this command needs the package tyro: in a clone pip install -e '.[{extra}]', elsewhere "
            f"pip install 'striped-attention[{extra}]'\n",
        )


@pytest.mark.parametrize(
    ("missing", "command"),
    [
        ("optax", ["train"]),
        ("orbax", ["generate", "--model", ".", "--prompt", "a"]),
        ("tokenizers", ["export", "--model", ".", "--output", "hub"]),
    ],
)
def test_a_package_of_an_extra_that_is_missing_is_named(wheel, missing, command):
    ((code, error),), modules = run(wheel, [command], missing=[missing])
    assert missing not in modules
    assert (code, error) == (
        2,
        f"striped: this command needs the package {missing}: in a clone pip install -e '.[train]', elsewhere "
        f"pip install 'striped-attention[train]'\n",
    )
