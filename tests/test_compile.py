"""`striped compile` without the compiler for TPUs: rejected options, and the search for the longest sequence."""

import importlib.util

import jax
import pytest
import rich.console

from striped_attention import cli
from striped_attention.cli.plan import parse_length
from striped_attention.compiling import command
from striped_attention.compiling.command import Compiled
from striped_attention.compiling.config import CompileConfig
from striped_attention.compiling.topology import describe
from striped_attention.errors import UsageError
from striped_attention.runtime.mesh import make_mesh
from striped_attention.training.config import TrainConfig
from striped_attention.training.step import Program


@pytest.mark.parametrize("name", ["v9:2x2", "v4", "v4:", "v4:2x0", "v4:2x2x2x2", "v4:axb", "cuda"])
def test_names_of_topologies(name):
    with pytest.raises(
        UsageError, match="--topology must be one of v4, v5e, v5p, v6e, tpu7x with the shape of the pod, like"
    ):
        describe(name)


def test_a_missing_compiler_is_named(monkeypatch, capsys):
    found = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "libtpu" else found(name))
    assert cli.main(["compile", "--topology", "v4:2x2x4"]) == 2
    wanted = "striped: Compiling for TPUs needs the package libtpu: pip install 'striped-attention[tpu]'\n"
    assert capsys.readouterr().err == wanted


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--length", "many"), "--length must be a number of tokens, like 786432, 256k or 1M; got 'many'."),
        (("--stripe", "4", "--layout", "zigzag"), "--stripe is for --layout striped"),
        (("--kernel", "magic"), "--kernel must be one of"),
        (("--batch", "0"), "--batch must be at least 1; got 0."),
        (("--output", "no/where.json"), "--output no/where.json cannot be written: there is no folder no."),
    ],
)
def test_nonsense_is_one_line(options, message, capsys):
    assert cli.main(["compile", "--topology", "v4:2x2x4", *options]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"striped: {message}")
    assert len(said.err.splitlines()) == 1


@pytest.mark.parametrize("first", [4096, 100_000, 1_000_000, 30_000_000])
@pytest.mark.parametrize("most", [5000, 786_432, 1_234_567])
def test_the_longest_length_is_found(first, most):
    tried = []

    def attempt(length):
        tried.append(length)
        return Compiled(length, "xla", length <= most, 0.0, length)

    found = command._longest(attempt(first), attempt, rich.console.Console(quiet=True))
    best = max(one.length for one in found if one.fits)
    assert [one.length for one in found] == tried
    assert best <= most < best * (1 + 1 / 8)
    assert len(tried) == len(set(tried)) < 24


def test_what_compilers_say_of_memory():
    """The needed and the available memory are read from the messages of XLA."""
    giga = 2**30
    for said, wanted in [
        ("memory required for HLO temporaries (71.01G) exceeds available HBM (30.75G).", (71.01 * giga, 30.75 * giga)),
        ("Ran out of memory in memory space hbm. Used 3.00T of 15.75G hbm.", (3072 * giga, 15.75 * giga)),
        ("Out of memory.", (None, None)),
    ]:
        assert command._need(said) == tuple(None if n is None else round(n) for n in wanted)


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ("RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem. Used 17.5M of 16.0M vmem.", "try --tile 128"),
        ("RESOURCE_EXHAUSTED: Ran out of memory on HBM: 71.01G exceeds available HBM (30.75G).", None),
        ("INTERNAL: a bug", "a bug"),
    ],
)
def test_errors_of_the_compiler(said, wanted, monkeypatch):
    def fail(self):
        raise jax.errors.JaxRuntimeError(said)

    program = Program(TrainConfig(), make_mesh({"data": 1, "sequence": 8}))
    monkeypatch.setattr(Program, "compiled", property(fail))
    if wanted is None:
        assert not command.compile_step(program).fits
    else:
        with pytest.raises((UsageError, jax.errors.JaxRuntimeError), match=wanted):
            command.compile_step(program)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(length="8"), "--length must be at least the 16 devices of a ring; got 8."),
        (dict(length="4g"), "Positions are int32, so a length may be at most"),
        (dict(mesh="data=2,sequence=4"), "needs 8 devices, but there are 16"),
        (dict(mesh="data=2,sequence=8", batch=3), "--batch must be a multiple of data=2; got 3."),
        (dict(mesh="rows=2"), "The mesh must be written like"),
    ],
    ids=str,
)
def test_meshes_that_do_not_fit_the_pod(options, message):
    config = CompileConfig(topology="v4:2x2x4", **options)
    with pytest.raises(UsageError, match=message):
        command._sizes(config, parse_length(config.length), 16)


def test_nothing_fits():
    attempt = lambda length: Compiled(length, "xla", False, 0.0, None)  # noqa: E731
    with pytest.raises(UsageError, match=r"Even 1,024 tokens do not fit: use more devices or a smaller model\."):
        command._longest(attempt(4096), attempt, rich.console.Console(quiet=True))
