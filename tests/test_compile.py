"""`striped compile` where it needs no compiler for TPUs: what it refuses, and how it finds the longest length."""

import pytest
import rich.console

from striped_attention import cli
from striped_attention.compiling import command
from striped_attention.compiling.command import Compiled
from striped_attention.compiling.topology import describe
from striped_attention.training.errors import UsageError


@pytest.mark.parametrize("name", ["v9:2x2", "v4", "v4:", "v4:2x0", "v4:2x2x2x2", "v4:axb", "cuda"])
def test_names_of_topologies(name):
    with pytest.raises(UsageError, match="--topology must be one of v4, v5e, v5p, v6e, tpu7x with its chips, like"):
        describe(name)


def test_a_missing_compiler_is_named(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
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
        return Compiled(length, length <= most, 0.0, length, None)

    found = command._longest(attempt(first), attempt, rich.console.Console(quiet=True))
    best = max(one.length for one in found if one.fits)
    assert [one.length for one in found] == tried
    assert best <= most < best * (1 + 1 / 8)
    assert len(tried) == len(set(tried)) < 24


def test_nothing_fits():
    attempt = lambda length: Compiled(length, False, 0.0, None, None)  # noqa: E731
    with pytest.raises(UsageError, match=r"Not even 1,024 tokens fit: use more devices or a smaller model\."):
        command._longest(attempt(4096), attempt, rich.console.Console(quiet=True))
