"""`striped bench`: what is refused, and what a summary makes of times."""

import pytest

from striped_attention.bench.config import BenchConfig
from striped_attention.bench.gpu import summary
from striped_attention.cli import main
from striped_attention.training.errors import UsageError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(heads=("3:2",)), "--heads must be written like 32:8"),
        (dict(heads=("16",)), "--heads must be written like 32:8"),
        (dict(members=(1,)), "--members must be at least 2"),
        (dict(lengths=(1001,)), "--lengths multiples of twice that"),
        (dict(lengths=()), "--lengths needs at least one value"),
    ],
)
def test_bad_options_get_one_clear_line(options, message):
    with pytest.raises(UsageError, match=message) as caught:
        BenchConfig("gpu", **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("suite", ["gpu", "overlap"])
def test_without_a_gpu_the_suites_say_so(suite, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert main(["bench", suite, "--output", str(tmp_path / "result.json")]) == 2
    assert capsys.readouterr().err.startswith("striped: This suite measures the cudnn kernel. It needs an NVIDIA GPU")
    assert not list(tmp_path.iterdir())


def test_a_summary_takes_the_busiest_member():
    def row(layout, rank, both):
        times = {"forward": both / 4, "both": both, "forward_flops": 1e12, "both_flops": 3.5e12}
        ring = {"members": 4, "length": 1024, "heads": "16:16", "layout": layout, "rank": rank}
        return {**ring, **times, "hop_bytes": 450, "hidden": 3, "transfers": 4}

    rows = [row("contiguous()", 3, 0.02), row("striped(1)", 0, 0.0125), row("striped(1)", 3, 0.0120)]
    ideal = [
        {"length": n, "heads": "16:16", "forward_rate": 1e15, "both_rate": rate}
        for n, rate in ((512, 4e14), (2048, 9e14))
    ]
    contiguous, striped = summary({"members": rows, "ideal": ideal})
    assert contiguous["over_contiguous"]["both"] == 1
    assert striped["both"] == 0.0125
    assert striped["over_contiguous"]["both"] == pytest.approx(1.6)
    assert striped["tflops"]["both"] == pytest.approx(280)
    assert striped["of_ideal"]["both"] == pytest.approx(0.7), "of the longest text that is not longer"
    assert striped["bound"] == 1.75
    assert set(striped["hop_seconds"].values()) == {450 / 450e9, 450 / 50e9}
