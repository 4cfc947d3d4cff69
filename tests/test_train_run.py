"""Runs: what is kept, what is resumed, and what is refused. In this process, on all 8 virtual devices."""

import dataclasses
import json
import os
import pathlib
import shutil
import struct

import jax
import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event

from striped_attention.cost import estimate
from striped_attention.training import dry_run, trainer, watch
from striped_attention.training.config import TrainConfig
from striped_attention.training.errors import Diverged, UsageError
from striped_attention.training.step import Program
from striped_attention.training.trainer import mesh_sizes, train

TINY = dict(layers=1, dim=16, ffn=32, heads=2, kv_heads=1, dtype="float32", sequence_length=64)
TINY |= dict(batch=4, mesh="data=4,sequence=2")  # short rings compile faster
STEADY = dict(schedule="constant", warmup=0)  # so that a run of 3 steps begins like one of 6


def config(folder=None, **options):
    return TrainConfig(**{**TINY, **STEADY, "checkpoint_dir": folder, **options})


@pytest.fixture(autouse=True, scope="module")
def _compile_once():
    """Runs of this module differ in their folders and steps more than in their programs: compile each program once."""
    programs = {}

    def same(config, mesh, documents):
        program = Program(config, mesh, documents=documents)
        no_matter = dict(checkpoint_dir=None, checkpoint_every=1, resume=False, profile=None, data=None, seed=0, keep=1)
        no_matter |= dict(steps=9) if config.schedule == "constant" else {}
        first = programs.setdefault((dataclasses.replace(config, **no_matter), documents), program)
        if first is not program:
            vars(program).update(compiled=first.compiled, fresh=first.fresh)
        return program

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "Program", same)
        yield


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder):
    found = metrics(folder)
    assert [line["step"] for line in found] == list(range(1, len(found) + 1))
    return [line["loss"] for line in found]


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """A run of 6 steps without interruption, checkpoints at 3 and 6; other tests only read it."""
    folder = tmp_path_factory.mktemp("runs") / "straight"
    state = train(config(folder, steps=6, checkpoint_every=3, mesh="data=2,sequence=4"))
    return folder, jax.device_get(state)


def test_a_run_keeps_its_record_metrics_and_checkpoints(straight):
    folder, _ = straight
    assert {"3", "6", "run.json", "metrics.jsonl", "tensorboard"} <= set(os.listdir(folder))
    assert list((folder / "tensorboard").glob("events.out.tfevents.*"))
    (run,) = json.loads((folder / "run.json").read_text())
    assert run["options"]["sequence_length"] == 64
    assert run["mesh"] == {"data": 2, "sequence": 4}
    assert run["versions"]["jax"] == jax.__version__
    line = metrics(folder)[-1]
    assert line["tokens"] == 6 * 256
    assert line["tokens_per_second"] == pytest.approx(256 / line["seconds"])
    assert line["mfu"] is None, "nobody knows a virtual CPU device's peak"


def test_resume_goes_on_bit_for_bit(straight, tmp_path):
    folder, whole = straight
    train(config(tmp_path / "run", steps=3, mesh="data=2,sequence=4"))
    state = train(config(tmp_path / "run", steps=6, mesh="data=2,sequence=4", resume=True))
    assert losses(tmp_path / "run") == losses(folder)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), whole)
    assert [run["from_step"] for run in json.loads((tmp_path / "run" / "run.json").read_text())] == [0, 3]


def test_resume_onto_another_mesh_and_layout(straight, tmp_path):
    folder, _ = straight
    train(config(tmp_path / "run", steps=3, mesh="data=2,sequence=4"))
    train(config(tmp_path / "run", steps=6, mesh="sequence=8", layout="zigzag", resume=True))
    np.testing.assert_allclose(losses(tmp_path / "run"), losses(folder), rtol=1e-5)


def test_a_finished_run_has_nothing_left_to_do(tmp_path, capsys):
    train(config(tmp_path, steps=1))
    train(config(tmp_path, steps=1, resume=True))
    assert "All 1 steps are done." in capsys.readouterr().out
    assert len(losses(tmp_path)) == 1


def test_only_the_newest_checkpoints_are_kept(tmp_path):
    train(config(tmp_path, steps=4, checkpoint_every=1, keep=2))
    assert sorted(name for name in os.listdir(tmp_path) if name.isdecimal()) == ["3", "4"]


def snapshot(folder):
    return {str(p): p.read_bytes() for p in folder.rglob("*") if p.is_file() and "tensorboard" not in p.parts}


def refuse(message, **options):
    with pytest.raises(UsageError, match=message) as caught:
        train(config(**options))
    assert "\n" not in str(caught.value)


def test_a_folder_with_a_run_is_not_overwritten(tmp_path):
    train(config(tmp_path, steps=1))
    before = snapshot(tmp_path)
    refuse("is not empty. Add --resume", folder=tmp_path, steps=2)
    assert snapshot(tmp_path) == before


def test_a_damaged_checkpoint_is_refused_and_left_as_it_is(tmp_path):
    train(config(tmp_path, steps=2, checkpoint_every=1, dim=64, ffn=256))
    largest = largest_array(tmp_path / "2")
    whole = largest.read_bytes()
    half, middle = len(whole) // 2, bytes([whole[len(whole) // 2] ^ 255])
    for damaged in (whole[:half], whole[:half] + middle + whole[half + 1 :]):
        largest.write_bytes(damaged)
        before = snapshot(tmp_path)
        refuse(
            "2 cannot be read.*left as it is.*go on from step 1", folder=tmp_path, steps=3, dim=64, ffn=256, resume=True
        )
        assert snapshot(tmp_path) == before


def largest_array(checkpoint):
    """The file with most of the numbers: tiny models have descriptions that are larger."""
    return max((p for p in checkpoint.glob("state/**/d/*") if p.is_file()), key=lambda p: p.stat().st_size)


def test_a_foreign_folder_is_refused_and_left_as_it_is(tmp_path):
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "weights").write_text("of something else")
    before = snapshot(tmp_path)
    refuse("damaged or foreign", folder=tmp_path, steps=9, resume=True)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(dim=32), "of another model: dim 16 there, 32 here"),
        (dict(seed=1), "another --seed"),
        (dict(sequence_length=60), "another --sequence-length"),
        (dict(data=pathlib.Path(__file__)), "another --data"),
    ],
)
def test_resume_is_refused_for_another_run(straight, options, message):
    refuse(message, folder=straight[0], steps=9, resume=True, **options)


def test_nothing_to_resume(tmp_path):
    refuse("does not exist", folder=tmp_path / "nowhere", resume=True)
    refuse("found no checkpoint", folder=tmp_path, resume=True)


def test_a_loss_that_is_no_number_stops_the_run_and_names_the_last_good_checkpoint(tmp_path):
    train(config(tmp_path, steps=3, checkpoint_every=1))
    broken = config(tmp_path, steps=9, learning_rate=1e30, clip=1e30, checkpoint_every=1, resume=True)
    with pytest.raises(Diverged, match=r"step 5 is not finite.*step 3's \(move .*4 away.*learning-rate"):
        train(broken)
    assert [line["step"] for line in metrics(tmp_path)] == [1, 2, 3, 4]
    shutil.rmtree(tmp_path / "4")
    train(config(tmp_path, steps=4, resume=True))
    assert np.isfinite(losses(tmp_path)[-1])


def test_a_run_interrupted_before_its_first_checkpoint_starts_again(tmp_path):
    train(config(tmp_path, steps=2))
    shutil.rmtree(tmp_path / "2")
    train(config(tmp_path, steps=2, resume=True))
    assert len(losses(tmp_path)) == 2


def test_a_damaged_record_is_told_and_left_as_it_is(tmp_path):
    train(config(tmp_path, steps=1))
    (tmp_path / "run.json").write_text("[{")
    before = snapshot(tmp_path)
    refuse("run.json is damaged", folder=tmp_path, steps=2, resume=True)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("what", ["metrics", "tensorboard"])
def test_metrics_that_cannot_be_written_are_told(tmp_path, monkeypatch, what):
    full = pathlib.Path("/dev/full").open("a" if what == "metrics" else "wb")  # noqa: SIM115
    monkeypatch.setattr(watch, f"_open_{what}", lambda *_: full)
    refuse("Metrics cannot be written.*No space left on device", folder=tmp_path, steps=2)


def test_tensorboard_reads_what_was_written(tmp_path):
    """Each step once, a step that was done again in its last form, by TensorBoard's own rule for restarts."""
    for steps in (2, 3):
        train(config(tmp_path, steps=steps, resume=steps > 2))
    found = {}
    for path in sorted((tmp_path / "tensorboard").iterdir(), key=lambda path: path.stat().st_mtime_ns):
        for event in events(path):
            if event.HasField("session_log"):
                found = {step: values for step, values in found.items() if step < event.step}
            if event.HasField("summary"):
                found[event.step] = {value.tag: value.simple_value for value in event.summary.value}
    assert {step: values["loss"] for step, values in found.items()} == pytest.approx(
        dict(enumerate(losses(tmp_path), 1)), rel=1e-6
    )


def events(path):
    """The records of an event file: length, its checksum, an event, its checksum."""
    content = path.read_bytes()
    while content:
        (length,) = struct.unpack("<Q", content[:8])
        yield Event.FromString(content[12 : 12 + length])
        content = content[12 + length + 4 :]


def test_a_full_disk_is_noticed_before_a_save_begins(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10_000))
    refuse("checkpoint of step 2 could not be written.*has 0.0 MB left.*Make room", folder=tmp_path / "run", steps=2)
    assert {"metrics.jsonl", "run.json"} <= set(os.listdir(tmp_path / "run"))


def test_too_little_memory_says_how_much_is_needed(monkeypatch):
    def full(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 12345 bytes.")

    monkeypatch.setattr(Program, "fresh_state", full)
    refuse(r"memory is too small: a step of 4 × 64 tokens needs about [\d.]+ kB on each. Use more devices", steps=2)


def test_a_profile_is_written(tmp_path):
    train(config(steps=6, profile=tmp_path))
    assert list(tmp_path.rglob("*.xplane.pb"))


BAD = [
    (dict(mesh="data=3,sequence=2"), "needs 6 devices, but there are 8.*--cpu-devices"),
    (dict(mesh="rows=8"), "must be written like data=2,sequence=4"),
    (dict(mesh="data=8", batch=6), "--batch must be a multiple of the mesh's data axis, 8; got 6"),
    (dict(mesh="sequence=8", sequence_length=7), "--sequence-length must be at least the 8 devices"),
    (dict(kernel="magic"), r"kernel must be one of .*'xla'.*'magic'"),
    (dict(heads=3), "dim must be its heads times an even number"),
    (dict(kv_heads=3, heads=4), "multiple of its kv_heads"),
    (dict(layout="zigzag", stripe=4), "--stripe is for --layout striped"),
    (dict(steps=0), "--steps must be at least 1; got 0"),
    (dict(clip=float("nan")), "--clip must be above 0; got nan"),
    (dict(seed=2**40), "--seed must be less than 4294967296"),
    (dict(learning_rate=float("nan")), "--learning-rate must be at least 0; got nan"),
    (dict(warmup=5, steps=5), "--warmup must be at least 0 and less than the 5 steps"),
    (dict(resume=True), "--resume needs --checkpoint-dir"),
    (dict(num_processes=2), "go together"),
]


@pytest.mark.parametrize(("options", "message"), BAD)
def test_bad_options_get_one_clear_line(options, message):
    refuse(message, **options)


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    refuse("cannot be used", folder=tmp_path / "file" / "run")


def test_a_dry_run_says_what_is_needed(capsys):
    asked = TrainConfig(preset="1b", sequence_length=262_144, mesh="sequence=8", dry_run=True)
    dry_run.show(asked, mesh_sizes(asked, None))
    text = capsys.readouterr().out
    for part in (
        "1,244,227,584 parameters",
        "weights",
        "optimiser",
        "kept for the backward pass",
        "together",
        "FLOPs",
        "attention",
        "hop",
    ):
        assert part in text


def test_the_dry_runs_memory_is_that_of_the_compiled_step():
    """Where activations matter and where weights do."""
    from tests.test_train_model import program

    for options in (
        dict(sequence_length=8192, batch=1, dim=64, ffn=128, heads=4, kv_heads=2, chunk=256, dtype="float32"),
        dict(sequence_length=512, batch=1, dim=256, ffn=1024, heads=4, kv_heads=4, chunk=64, dtype="float32"),
    ):
        run = program((1, 4), **options)
        stats = run.compiled.memory_analysis()
        compiled = stats.argument_size_in_bytes + stats.temp_size_in_bytes
        said = estimate(run.config, {"data": 1, "sequence": 4}).total_memory
        assert 0.75 < said / compiled < 1.25, (said, compiled)


def test_hop_bytes_count_key_heads_in_the_compute_dtype():
    cost = estimate(TrainConfig(preset="llama3-8b", sequence_length=131_072), {"data": 1, "sequence": 8})
    assert cost.hop_bytes == 2 * 16_384 * 8 * 128 * 2, "k and v, 8 heads of 128, bfloat16"
    assert cost.wire["keys and values, forward"] == 32 * 7 * cost.hop_bytes
    assert cost.wire["keys and values, backward"] == cost.wire["keys and values, forward"]
    assert cost.wire["their gradients"] == 2 * cost.wire["keys and values, forward"], "in float32"


def test_the_dry_run_keeps_less_for_a_kernel_that_needs_less():
    config = TrainConfig(preset="1b", sequence_length=65_536)
    most, least = (
        estimate(dataclasses.replace(config, kernel=k), {"data": 1, "sequence": 8}) for k in ("auto", "cudnn")
    )
    kept = "kept for the backward pass"
    assert most.memory[kept] - least.memory[kept] == 22 * 8192 * 2048 * 2, "what rounding took from a layer's result"
