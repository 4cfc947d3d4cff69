"""Training runs: their files, resuming, and errors. In this process, on all 8 virtual devices."""

import asyncio
import dataclasses
import errno
import gc
import gzip
import json
import os
import pathlib
import re
import shutil
import struct
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from striped_attention import cli
from striped_attention.errors import Diverged, UsageError
from striped_attention.planning.cost import estimate
from striped_attention.training import checkpoint, dry_run, loop, storage, trainer, watch
from striped_attention.training.config import TrainConfig
from striped_attention.training.settle import settle
from striped_attention.training.step import Program
from striped_attention.training.trainer import mesh_sizes, train
from tests.test_data_sources import KINDS, written
from tests.test_train_data import write_tokenizer
from tests.test_weights_and_biases import Service

TINY = dict(layers=1, dim=16, ffn=32, heads=2, kv_heads=1, dtype="float32", sequence_length=64)
TINY |= dict(batch=4, mesh="data=4,sequence=2")  # short rings compile faster
TINY |= dict(data=(__file__,))
STEADY = dict(schedule="constant", warmup=0)  # so that the first 3 steps do not depend on the total number


def config(folder=None, **options):
    return TrainConfig(**{**TINY, **STEADY, "checkpoint_dir": folder, **options})


@pytest.fixture(autouse=True, scope="module")
def _compile_once():
    """Runs of this module differ mostly in their folders and steps: compile each program once."""
    programs = {}

    def same(config, mesh, documents):
        program = Program(config, mesh, documents=documents)
        no_matter = dict(
            checkpoint_dir=None, checkpoint_every=1, resume=False, profile=None, seed=0, keep=1, wandb=None
        )
        no_matter |= dict(data=None, tokenizer=None, end_token=None)
        no_matter |= dict(text_column=None, loss_column=None, chat_column=None, data_cache=None)
        no_matter |= dict(validation=None, validate_every=None, validation_sequences=None)
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
    """An uninterrupted run of 6 steps with checkpoints at 3 and 6; other tests only read it."""
    folder = tmp_path_factory.mktemp("runs") / "straight"
    state = train(config(folder, steps=6, checkpoint_every=3))
    return folder, jax.device_get(state)


@pytest.fixture
def half(straight, tmp_path):
    """A copy of that run, as if interrupted before step 6 was saved: its last checkpoint is step 3."""
    folder = pathlib.Path(shutil.copytree(straight[0], tmp_path / "half"))
    shutil.rmtree(folder / "6")
    return folder


def test_a_run_keeps_its_record_metrics_and_checkpoints(straight):
    folder, _ = straight
    assert {"3", "6", "run.json", "metrics.jsonl", "tensorboard"} == set(os.listdir(folder))
    assert list((folder / "tensorboard").glob("events.out.tfevents.*"))
    (run,) = json.loads((folder / "run.json").read_text())
    assert run["options"]["sequence_length"] == 64
    assert run["mesh"] == {"data": 4, "sequence": 2}
    assert run["versions"]["jax"] == jax.__version__
    line = metrics(folder)[-1]
    assert line["tokens"] == 6 * 256
    assert line["tokens_per_second"] == pytest.approx(256 / line["seconds"])
    assert line["mfu"] is None, "virtual CPU devices have no known peak"


def test_resume_goes_on_bit_for_bit(straight, half):
    folder, whole = straight
    state = train(config(half, steps=6, resume=True))
    assert losses(half) == losses(folder)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), whole)
    assert [run["from_step"] for run in json.loads((half / "run.json").read_text())] == [0, 3]


def npy(path, texts):
    tokens = [token for text in texts for token in [*text.encode(), 256]]
    np.save(path / "x.npy", np.array(tokens))
    return path / "x.npy"


def with_spans(path, texts):
    rows = [{"body": text, "spans": [[2, 8]]} for text in texts]
    return written(path / "x.jsonl.gz", gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))


def two(path, texts):
    return f"{KINDS['parquet'](path, texts)}=0.3", f"{KINDS['datasets'](path, texts[:20])}=0.7"


CHAT = (
    "{% for message in messages %}{{ message.role }} {{ message.content }} {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)


def chat(path, texts):
    """Write conversations, with a tokenizer and its chat template beside them."""
    words = {word: i for i, word in enumerate(["</s>", "[UNK]", "user", "assistant", "of", "some", "length"])}
    write_tokenizer(path / "tokenizer.json", words)
    (path / "chat_template.jinja").write_text(CHAT)
    talks = [[dict(role="user", content=text), dict(role="assistant", content=f"{text} of")] for text in texts * 3]
    rows = "".join(json.dumps({"messages": talk}) + "\n" for talk in talks)
    return written(path / "x.jsonl", rows.encode())


SOURCES = ("text.zst", "jsonl", "jsonl.zst", "one array", "shards", "parquet shards")
SOURCES += ("parquet", "arrow file", "datasets", "striped tokenize")
SOURCES = {name: (KINDS[name], {}) for name in SOURCES}
SOURCES |= {
    "npy": (npy, dict(end_token=256)),
    "loss spans": (with_spans, dict(text_column="body", loss_column="spans")),
    "two with weights": (two, {}),
    "chat": (chat, dict(chat_column="messages", tokenizer="tokenizer.json")),
}


@pytest.mark.parametrize("source", SOURCES)
def test_resume_goes_on_bit_for_bit_whatever_the_source(tmp_path, source):
    """Resume within a pass through the data, without the data cache. A step reads 4 of about 10 sequences."""
    make, options = SOURCES[source]
    made = make(tmp_path, [f"document {i} " + "of some length " * (i % 5) for i in range(24)])
    options = options | dict(data=made if isinstance(made, tuple) else (str(made),), checkpoint_every=2)
    if "tokenizer" in options:
        options["tokenizer"] = tmp_path / options["tokenizer"]
    whole = train(config(tmp_path / "run", steps=4, data_cache=tmp_path / "cache", **options))
    expected = losses(tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "4")
    state = train(config(tmp_path / "run", steps=4, resume=True, data_cache=tmp_path / "another", **options))
    assert losses(tmp_path / "run") == expected
    jax.tree.map(np.testing.assert_array_equal, *jax.device_get((state, whole)))


def test_resume_goes_on_bit_for_bit_with_accumulation(tmp_path):
    options = dict(mesh="data=2,sequence=4", accumulate=2, checkpoint_every=1, keep=3)
    whole = train(config(tmp_path / "run", steps=3, **options))
    expected = losses(tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "half")
    for step in (2, 3):
        shutil.rmtree(tmp_path / "half" / str(step), ignore_errors=True)
    state = train(config(tmp_path / "half", steps=3, resume=True, **options))
    assert losses(tmp_path / "half") == expected
    assert [run["from_step"] for run in json.loads((tmp_path / "half" / "run.json").read_text())] == [0, 1]
    jax.tree.map(np.testing.assert_array_equal, *jax.device_get((state, whole)))


def test_resume_is_refused_for_other_weights_of_the_same_sources(straight, tmp_path):
    sources = [f"{KINDS['jsonl'](tmp_path, ['text ' * 99])}={{}}", f"{__file__}={{}}"]
    options = dict(folder=tmp_path / "run", checkpoint_every=1)
    train(config(steps=1, data=tuple(source.format(1) for source in sources), **options))
    changed = tuple(source.format(weight) for source, weight in zip(sources, (1, 2), strict=True))
    refuse("another --data", steps=2, resume=True, data=changed, **options)


def test_a_run_on_tokens_keeps_their_tokenizer_and_says_what_they_are(tmp_path, capsys):
    tokenizer = write_tokenizer(tmp_path / "my.json", {"a": 0, "</s>": 1, "[UNK]": 2})
    source = written(tmp_path / "x.txt", b"a b " * 400)
    assert cli.main(["tokenize", str(source), "--tokenizer", str(tokenizer), "--output", str(tmp_path / "made")]) == 0
    capsys.readouterr()
    train(config(tmp_path / "run", steps=1, data=(str(tmp_path / "made"),)))
    assert (tmp_path / "run" / "tokenizer.json").read_text() == tokenizer.read_text()
    said = capsys.readouterr().out
    assert f"{tmp_path / 'made'}: 1 document, 801 tokens; 1 document longer than a sequence of 64" in said


def test_a_jump_of_the_learning_rate_is_said():
    first, longer = TrainConfig(steps=60), TrainConfig(steps=2000)
    runs = [{"options": first.record()}]
    (line,) = trainer._schedule_change(longer, runs, 60)
    assert "the learning rate continues at 0.000181; it was 3.0" in line
    assert "at step 60" in line
    assert trainer._schedule_change(dataclasses.replace(first, steps=60), runs, 30) == []
    assert trainer._schedule_change(longer, [], 0) == []


def test_resume_onto_another_mesh_and_layout(straight, half):
    train(config(half, steps=6, mesh="data=2,sequence=4", layout="zigzag", resume=True))
    np.testing.assert_allclose(losses(half), losses(straight[0]), rtol=1e-5)


VALIDATION = dict(validation=(watch.__file__,), validate_every=4, validation_sequences=6)


@pytest.fixture(scope="module")
def validated(tmp_path_factory):
    """The run `straight` with held-out data; other tests only read it."""
    folder = tmp_path_factory.mktemp("runs") / "validated"
    return folder, jax.device_get(train(config(folder, steps=6, checkpoint_every=3, **VALIDATION)))


def validations(folder):
    return [(line["step"], line["validation"]) for line in metrics(folder) if "validation" in line]


def test_a_run_validates_before_its_first_step_every_few_steps_and_after_the_last(validated):
    found = validations(validated[0])
    assert [step for step, _ in found] == [0, 4, 6]
    for _, line in found:
        (whole,) = line["by_position"]
        assert whole == {"from": 0, "to": 63, "tokens": line["tokens"], "loss": pytest.approx(line["loss"])}
        assert line["tokens"] == 6 * 64, "the held-out file is one document"
    assert found[-1][1]["loss"] < found[0][1]["loss"]


def test_validation_changes_nothing_of_a_run(straight, validated):
    folder, state = validated
    assert [line["loss"] for line in metrics(folder) if "loss" in line] == losses(straight[0])
    jax.tree.map(np.testing.assert_array_equal, state, straight[1])


def test_a_resumed_run_has_every_validation_once(validated, tmp_path, capsys):
    folder = pathlib.Path(shutil.copytree(validated[0], tmp_path / "half"))
    shutil.rmtree(folder / "6")
    train(config(folder, steps=6, resume=True, **VALIDATION))
    assert validations(folder) == validations(validated[0])
    loss = validations(folder)[1][1]["loss"]
    assert f"step 4/6 · validation loss {loss:.4f} · 0–63 {loss:.4f}" in capsys.readouterr().out
    written = [
        value for path in (folder / "tensorboard").iterdir() for event in events(path) for value in event.summary.value
    ]
    for tag in ("validation/loss", "validation/loss_by_position/0"):
        assert loss in [pytest.approx(value.simple_value, rel=1e-6) for value in written if value.tag == tag]


@pytest.mark.usefixtures("_never_compile")
def test_held_out_data_that_cannot_be_is_told_before_compiling(tmp_path):
    refuse("--validation nowhere does not exist", validation=("nowhere",))
    refuse("--validation takes no weights, but .*watch.py has one", validation=(f"{watch.__file__}=0.5",))
    (tmp_path / "short.txt").write_text("short")
    refuse("short.txt holds 6 tokens, too few.*with --validation", validation=(str(tmp_path / "short.txt"),))
    refuse("--validate-every needs --validation", validate_every=3)
    (tmp_path / "x.jsonl").write_text('{"body": "x"}\n')
    refuse("x.jsonl, line 1, has no column 'text'; its columns are body", validation=(str(tmp_path / "x.jsonl"),))
    np.save(tmp_path / "x.npy", np.arange(999) % 250)
    np.save(tmp_path / "ends.npy", np.full(999, 250))
    refuse(
        "--validation needs tokens that count in the loss, but none does in 15 sequences of .*ends.npy",
        **dict(data=(str(tmp_path / "x.npy"),), end_token=250, validation=(str(tmp_path / "ends.npy"),)),
    )


def test_weights_and_biases_gets_the_metrics_of_every_step(half, monkeypatch):
    service = Service()
    monkeypatch.setitem(sys.modules, "wandb", service)
    train(config(half, steps=5, resume=True, wandb="project"))
    (run,) = service.runs
    assert [(line["step"], line["loss"]) for line in run.lines] == [(4, losses(half)[3]), (5, losses(half)[4])]
    assert run.ended == 0
    assert run.options["id"] in (half / "wandb.json").read_text()


def test_a_finished_run_has_nothing_left_to_do(straight, tmp_path, capsys):
    folder = pathlib.Path(shutil.copytree(straight[0], tmp_path / "copy"))
    train(config(folder, steps=6, resume=True))
    assert "All 6 steps are done." in capsys.readouterr().out
    assert len(losses(folder)) == 6


def test_only_the_newest_checkpoints_are_kept(tmp_path):
    train(config(tmp_path, steps=4, checkpoint_every=1, keep=2))
    assert sorted(name for name in os.listdir(tmp_path) if name.isdecimal()) == ["3", "4"]


def snapshot(folder):
    return {str(p): p.read_bytes() for p in folder.rglob("*") if p.is_file() and "tensorboard" not in p.parts}


def refuse(message, **options):
    with pytest.raises(UsageError, match=message) as caught:
        train(config(**options))
    assert "\n" not in str(caught.value)


def test_a_folder_with_a_run_is_not_overwritten(half):
    before = snapshot(half)
    refuse("is not empty. Add --resume", folder=half, steps=2)
    assert snapshot(half) == before


@pytest.fixture
def _never_compile(monkeypatch):
    """These errors must be raised before a compilation that could take minutes."""

    class Never(Program):
        @property
        def compiled(self):
            raise AssertionError("compiled before the folder of the run was looked at")

    monkeypatch.setattr(trainer, "Program", Never)


@pytest.mark.usefixtures("_never_compile")
@pytest.mark.parametrize("damage", ["cut", "changed", "gone"])
def test_a_damaged_checkpoint_is_refused_and_left_as_it_is(straight, tmp_path, damage):
    folder = pathlib.Path(shutil.copytree(straight[0], tmp_path / "copy"))
    for path in arrays(folder / "6"):  # all files, as some of them are no longer read
        whole = path.read_bytes()
        kept, rest = whole[: len(whole) // 2], whole[len(whole) // 2 :]
        if damage == "gone":
            path.unlink()
        else:
            path.write_bytes(kept if damage == "cut" else kept + bytes(byte ^ 255 for byte in rest))
    before = snapshot(folder)
    words = (
        r"6 is damaged or has another format: (an array in it|/\S+) cannot be read\. It was left unchanged\. .*step 3"
    )
    refuse(words, folder=folder, steps=7, resume=True)
    assert snapshot(folder) == before
    assert nothing_is_left()


def nothing_is_left():
    """Whether no read is pending. Exceptions of collected reads are raised by pytest in this test."""
    unfinished = [task for task in gc.get_objects() if issubclass(type(task), asyncio.Task) and not task.done()]
    gc.collect()
    return not unfinished


def test_a_failed_read_ends_the_reads_beside_it(tmp_path):
    """One array is damaged while others are being read. Those are pipes, which deliver no data before the error."""
    arrays = dict(zip("abc", jax.random.normal(jax.random.key(0), (3, 64, 64)), strict=True))
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as writer:  # one file per array
        writer.save(tmp_path / "state", args=ocp.args.PyTreeSave(arrays))
    wanted = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), arrays)
    jax.tree.map(np.testing.assert_array_equal, storage.read_arrays(tmp_path / "state", wanted), arrays)
    (tmp_path / "state" / "a" / "0.0").write_bytes(b"no numbers")
    slow = [tmp_path / "state" / name / "0.0" for name in "bc"]
    for path in slow:
        path.unlink()
        os.mkfifo(path)
    with pytest.raises(Exception, match="error while reading array"):
        storage.read_arrays(tmp_path / "state", wanted)
    left = nothing_is_left()
    for path in slow:  # unblocks readers that wait for a writer; later ones find no pipe
        writer = os.open(path, os.O_RDWR)
        path.unlink()
        os.close(writer)
    assert left


def arrays(checkpoint):
    """Return the files that hold the arrays' values."""
    return [path for path in checkpoint.glob("state/**/d/*") if path.is_file()]


@pytest.mark.usefixtures("_never_compile")
def test_a_foreign_folder_is_refused_and_left_as_it_is(tmp_path):
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "weights").write_text("of something else")
    before = snapshot(tmp_path)
    refuse("damaged or has another format", folder=tmp_path, steps=9, resume=True)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(dim=32), "of another model: dim 16 there, 32 here"),
        (dict(seed=1), "another --seed"),
        (dict(sequence_length=60), "another --length"),
        (dict(data=(watch.__file__,)), "another --data"),
    ],
)
@pytest.mark.usefixtures("_never_compile")
def test_resume_is_refused_for_another_run(straight, options, message):
    refuse(message, folder=straight[0], steps=9, resume=True, **options)


@pytest.mark.usefixtures("_never_compile")
def test_nothing_to_resume(tmp_path):
    refuse("does not exist", folder=tmp_path / "nowhere", resume=True)
    refuse("found no checkpoint", folder=tmp_path, resume=True)
    (tmp_path / "file").touch()
    refuse("is not a folder", folder=tmp_path / "file", resume=True)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("metrics.jsonl", "metrics.jsonl must be a file that can be written"),
        ("tensorboard", "tensorboard must be a folder that can be written"),
        ("run.json", "run.json is damaged"),
    ],
)
@pytest.mark.usefixtures("_never_compile")
def test_what_has_the_place_of_a_runs_files_is_told_before_compiling(half, tmp_path, name, message):
    folder = shutil.copytree(half, tmp_path / "run")
    shutil.rmtree(folder / name) if (folder / name).is_dir() else (folder / name).unlink()
    (folder / name).write_text("{}") if name != "metrics.jsonl" else (folder / name).mkdir()
    refuse(message, folder=folder, steps=9, resume=True)


def test_a_loss_that_is_no_number_stops_the_run_and_names_the_last_good_checkpoint(half, monkeypatch):
    once = trainer.Program

    def diverging(config, mesh, documents):
        """A program whose steps are far too large, as with a learning rate of 1e30."""
        program = once(config, mesh, documents)
        step = program.compiled

        def too_long(state, inputs):
            state, metrics = step(state, inputs)
            return state._replace(weights=jax.tree.map(lambda x: 1e30 * x, state.weights)), metrics

        too_long.memory_analysis = step.memory_analysis
        vars(program)["compiled"] = too_long
        return program

    monkeypatch.setattr(trainer, "Program", diverging)
    with pytest.raises(Diverged, match=r"step 5 is not finite.*step 3 \(move .*4 away.*learning-rate"):
        train(config(half, steps=9, checkpoint_every=1, resume=True))
    assert [line["step"] for line in metrics(half)] == [1, 2, 3, 4]
    monkeypatch.setattr(trainer, "Program", once)
    shutil.rmtree(half / "4")
    train(config(half, steps=4, resume=True))
    assert np.isfinite(losses(half)[-1])


@pytest.mark.usefixtures("straight")  # its compiled program is modified
def test_a_step_that_is_no_number_names_its_batch(tmp_path, monkeypatch):
    """One token, which occurs in one row of the data, has an infinite embedding."""
    once, tokens = trainer.Program, np.arange(20 * 64 + 1) % 50
    tokens[13 * 64 + 5] = 60
    np.save(tmp_path / "x.npy", tokens)

    def broken(config, mesh, documents):
        program = once(config, mesh, documents)
        fresh = program.fresh

        def infinite(key):
            state = fresh(key)
            embedding = state.weights["embedding"].at[60].set(jnp.inf)
            return state._replace(weights={**state.weights, "embedding": embedding})

        vars(program)["fresh"] = infinite
        return program

    monkeypatch.setattr(trainer, "Program", broken)
    with pytest.raises(Diverged, match=r"is not finite.*Its batch: row .*There is no good checkpoint") as caught:
        train(config(data=(str(tmp_path / "x.npy"),), end_token=49, steps=5))
    step = int(re.search(r"of step (\d)", str(caught.value))[1])
    rows = re.findall(rf"row (\d+) of {tmp_path}/x.npy in pass 1: tokens ([\d,]+) to", str(caught.value))
    assert len(rows) == 4
    assert ("13", "832") in rows
    order = np.random.default_rng([0, 0]).permutation(20)
    assert [int(row) for row, _ in rows] == order[4 * step - 4 : 4 * step].tolist()


@pytest.mark.usefixtures("straight")
def test_a_slow_step_names_its_batch(monkeypatch, capsys):
    """Every step takes 0.25 s, except for 30 s in step 15."""
    once, now = trainer.Program, [0.0]

    def slow(config, mesh, documents):
        program = once(config, mesh, documents)
        step = program.compiled

        def slower(state, inputs):
            now[0] += 30 if int(state.step) == 14 else 0.25
            return step(state, inputs)

        slower.memory_analysis = step.memory_analysis
        vars(program)["compiled"] = slower
        return program

    monkeypatch.setattr(trainer, "Program", slow)
    monkeypatch.setattr(loop.time, "perf_counter", lambda: now[0])
    train(config(steps=17))
    said = [line for line in capsys.readouterr().out.splitlines() if "Slow" in line]
    assert len(said) == 1
    assert re.match(
        r"Slow: step 15 took 30 s, 120.0 times the median of 0.25 s. Its batch: "
        r"row \d+ of .*test_train_run.py in pass \d: tokens \S+ to .*; row ",
        said[0],
    )


def test_devices_without_room_are_not_taken_for_a_damaged_checkpoint(half, monkeypatch):
    def full(*_, **__):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setattr(checkpoint, "read_arrays", full)
    with pytest.raises(UsageError, match="The devices' memory is too small"):
        train(config(half, steps=4, resume=True))


def test_a_run_interrupted_before_its_first_checkpoint_starts_again(half):
    shutil.rmtree(half / "3")
    train(config(half, steps=2, resume=True))
    assert len(losses(half)) == 2


@pytest.mark.usefixtures("_never_compile")
@pytest.mark.parametrize("content", ["[{", "7"])
def test_a_damaged_record_is_told_and_left_as_it_is(half, content):
    (half / "run.json").write_text(content)
    before = snapshot(half)
    refuse("run.json is damaged", folder=half, steps=4, resume=True)
    assert snapshot(half) == before


@pytest.mark.parametrize("what", ["metrics", "tensorboard"])
def test_metrics_that_cannot_be_written_are_told(tmp_path, monkeypatch, what):
    full = pathlib.Path("/dev/full").open("a" if what == "metrics" else "wb")  # noqa: SIM115
    monkeypatch.setattr(watch, f"_open_{what}", lambda *_: full)
    refuse("Metrics cannot be written.*No space left on device", folder=tmp_path, steps=2)


def test_tensorboard_reads_what_was_written(half):
    """Each step appears once. Repeated steps replace earlier ones, by TensorBoard's rule for restarts."""
    train(config(half, steps=4, resume=True))
    found = {}
    for path in sorted((half / "tensorboard").iterdir(), key=lambda path: path.stat().st_mtime_ns):
        first, *others = events(path)
        assert first.file_version == "brain.Event:2"
        for event in others:
            assert abs(event.wall_time - path.stat().st_mtime) < 24 * 3600
            if event.HasField("session_log"):
                found = {step: values for step, values in found.items() if step < event.step}
            if event.HasField("summary"):
                found[event.step] = {value.tag: value.simple_value for value in event.summary.value}
    assert {step: values["loss"] for step, values in found.items()} == pytest.approx(
        dict(enumerate(losses(half), 1)), rel=1e-6
    )


def events(path):
    """Yield the events of a file. A record is a length and its checksum, then an event and its checksum."""
    from tensorboardX.proto.event_pb2 import Event  # takes seconds, as it imports torch
    from tensorboardX.record_writer import masked_crc32c

    content = path.read_bytes()
    while content:
        (length,) = struct.unpack("<Q", content[:8])
        event = content[12 : 12 + length]
        assert struct.unpack("<I", content[8:12])[0] == masked_crc32c(content[:8])
        assert struct.unpack("<I", content[12 + length : 16 + length])[0] == masked_crc32c(event)
        yield Event.FromString(event)
        content = content[16 + length :]


def disk(free):
    """Stand-in for `shutil.disk_usage`: each call reports the next number of free bytes; the last one repeats."""
    left = list(free)
    return lambda _: shutil._ntuple_diskusage(10**9, 0, left.pop(0) if len(left) > 1 else left[0])


@pytest.mark.usefixtures("_never_compile")
def test_a_full_disk_is_noticed_before_a_run_begins(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", disk([10_000]))
    refuse("has no room for a checkpoint: it needs up to 0.2 MB and .* has 0.0 MB", folder=tmp_path / "run", steps=2)
    assert list((tmp_path / "run").iterdir()) == [], "the command can be repeated"


def test_a_full_disk_is_noticed_before_a_save_begins(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", disk([10**9, 10_000]))
    refuse("checkpoint of step 2 could not be written.*has 0.0 MB left.*Make room", folder=tmp_path / "run", steps=2)
    assert {"metrics.jsonl", "run.json"} <= set(os.listdir(tmp_path / "run"))


def test_too_little_memory_says_how_much_is_needed(monkeypatch):
    def full(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 12345 bytes.")

    monkeypatch.setattr(Program, "fresh_state", full)
    refuse(r"memory is too small: a step of 4 × 64 tokens needs about [\d.]+ kB per device. Use more devices", steps=2)


def test_a_profile_is_written(tmp_path):
    train(config(steps=6, profile=tmp_path))
    assert list(tmp_path.rglob("*.xplane.pb"))


BAD = [
    (dict(mesh="data=3,sequence=2"), "needs 6 devices, but there are 8.*--cpu-devices"),
    (dict(mesh="rows=8"), "must be written like data=2,sequence=4"),
    (dict(mesh="data=8", batch=6), "--batch must be a multiple of 8, the mesh's data axis"),
    (dict(mesh="sequence=8", sequence_length=7), "--length must be at least the 8 devices"),
    (dict(kernel="magic"), r"kernel must be one of .*'xla'.*'magic'"),
    (dict(heads=3), "dim must be its heads times an even head width"),
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


@pytest.mark.usefixtures("_never_compile")
def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    refuse("cannot be used: Not a directory. Choose a writable folder", folder=tmp_path / "file" / "run")

    def read_only(**_):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(tempfile, "TemporaryFile", read_only)
    refuse("cannot be used: Read-only file system", folder=tmp_path / "run")


def test_a_copy_of_the_tokenizer_is_kept(tmp_path, capsys):
    """Together with its other files. A resumed run may name the copy."""
    (tmp_path / "given").mkdir()
    tokenizer = write_tokenizer(tmp_path / "given" / "my.json", {"import": 0, "</s>": 1, "[UNK]": 2})
    (tmp_path / "given" / "tokenizer_config.json").write_text('{"a": 1}')
    train(config(tmp_path / "run", steps=1, tokenizer=tokenizer))
    content = tokenizer.read_text()
    shutil.rmtree(tmp_path / "given")
    kept = tmp_path / "run" / "tokenizer.json"
    assert kept.read_text() == content
    assert (tmp_path / "run" / "tokenizer_config.json").read_text() == '{"a": 1}'
    train(config(tmp_path / "run", steps=2, tokenizer=kept, resume=True))
    assert kept.read_text() == content
    assert not list((tmp_path / "run").glob("*.tmp"))


def test_an_end_token_that_never_occurs_is_told_once(tmp_path, capsys):
    np.save(tmp_path / "x.npy", np.arange(1000) % 250)
    train(config(steps=1, data=(str(tmp_path / "x.npy"),), end_token=255))
    said = [line for line in capsys.readouterr().out.splitlines() if "--end-token" in line]
    assert len(said) == 1
    assert said[0].startswith("Warning: --end-token 255 does not occur in")


def test_a_dry_run_says_what_is_needed(capsys):
    asked = TrainConfig(preset="1b", sequence_length=262_144, mesh="sequence=8", strategy="ring", dry_run=True)
    sizes = mesh_sizes(asked, None)
    dry_run.show(settle(asked, sizes, documents=True), sizes)
    text = capsys.readouterr().out
    for part in (
        "1,244,227,584 parameters",
        "weights",
        "optimiser",
        "kept for the backward pass",
        "total",
        "FLOPs",
        "attention",
        "hop",
    ):
        assert part in text


def test_hop_bytes_count_key_heads_in_the_compute_dtype():
    cost = estimate(
        TrainConfig(preset="llama3-8b", sequence_length=131_072, strategy="ring", remat="attention"),
        {"data": 1, "sequence": 8},
    )
    assert cost.hop_bytes == 2 * 16_384 * 8 * 128 * 2, "k and v, 8 heads of 128, bfloat16"
    assert cost.sent["keys and values, forward"] == 32 * 7 * cost.hop_bytes
    assert cost.sent["keys and values, backward"] == cost.sent["keys and values, forward"]
    assert cost.sent["gradients of keys and values"] == 2 * cost.sent["keys and values, forward"], "in float32"


def test_the_dry_run_keeps_less_for_a_kernel_that_needs_less():
    config = TrainConfig(preset="1b", sequence_length=65_536, strategy="ring", remat="attention")
    most, least = (
        estimate(dataclasses.replace(config, kernel=k), {"data": 1, "sequence": 8}) for k in ("auto", "cudnn")
    )
    kept = "kept for the backward pass"
    assert most.memory[kept] - least.memory[kept] == 22 * 8192 * 2048 * 2, "cudnn keeps no rounding errors of outputs"
