"""Run benchmarks/kill_test.py with two kills (its default is ten) and a smaller model."""

import json
import pathlib
import subprocess
import sys

SCRIPT = pathlib.Path(__file__).parent.parent / "benchmarks" / "kill_test.py"
SMALL = "--layers 1 --dim 16 --ffn 32 --heads 2 --kv-heads 1"


def test_two_kills_leave_no_trace_in_the_bits(tmp_path):
    result = tmp_path / "result.json"
    command = [
        sys.executable,
        SCRIPT,
        "--kills",
        "2",
        "--steps",
        "24",
        "--seed",
        "2",
        "--output",
        result,
        "--options",
        SMALL,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(result.read_text())
    assert [kill["moment"] for kill in found["kills"]] == ["while saving", "in the middle"]
    assert found["kills"][0]["half_written"]
    assert set(found["same"].values()) == {True}
    assert found["steps"] == 24
