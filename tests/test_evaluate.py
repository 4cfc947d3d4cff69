"""`striped evaluate`: depths of needles, answers equal to greedy decoding, losses, and clear errors."""

import dataclasses
import json
import math
import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

import striped_attention as sa
from striped_attention import cli, data
from striped_attention.errors import Diverged, UsageError
from striped_attention.evaluation import command
from striped_attention.evaluation.config import EvaluateConfig
from striped_attention.evaluation.forward import BACKWARD, Answering, fitting, make_program
from striped_attention.evaluation.needle import Haystacks
from striped_attention.generation import text
from striped_attention.models.stages import AXES
from striped_attention.planning.cost import estimate
from striped_attention.runtime.mesh import make_mesh
from striped_attention.training import memory
from striped_attention.training.loss_by_position import Losses, Range
from striped_attention.training.source import find
from striped_attention.training.validation import HeldOut
from tests.families import LENGTH, TOKENS, original, save, their_scores
from tests.test_engine import SMALL, TEXT, dense_scores, engine_of, greedy, weights_of
from tests.test_start import rewritten
from tests.test_train_data import write_tokenizer

ROOT = pathlib.Path(__file__).parent.parent
ALPHABET = "abcdefghijklmnopqrstuvwxyz"
CORPUS = data.Corpus(
    np.append(np.frombuffer((ALPHABET * 120).encode(), np.uint8), 256).astype(np.int32), 256, 257, "it"
)
BRIEF = dict(needle="<{key}={value}>", question="<{key}=", answer="{value}", key_length=3, value_length=4)


def config(**options):
    return EvaluateConfig(**{"model": pathlib.Path("nowhere"), **BRIEF, **options})


@pytest.mark.parametrize("depth", [0, 40, 100])
def test_a_needle_lies_at_its_depth_and_the_question_is_at_the_end(depth):
    tokens, answer = Haystacks(config(), CORPUS, text.Bytes()).sequence(123, depth, draw=0)
    said = bytes(tokens.tolist()).decode()
    assert len(said) == 123 + 1, "the last token is only a target"
    assert answer == 4
    hidden, asked = said.index("<"), said.rindex("<")
    key, value = said[hidden + 1 : hidden + 4], said[-4:]
    assert said[hidden : hidden + 10] == f"<{key}={value}>"
    assert said[asked:] == f"<{key}={value}"
    hay = said[:hidden] + said[hidden + 10 : asked]
    assert hidden == round(len(hay) * depth / 100)
    assert hay in ALPHABET * 6, "one contiguous piece of text"


def test_draws_differ_and_depths_share_their_text():
    found = Haystacks(config(), CORPUS, text.Bytes())
    words = {bytes(found.sequence(60, depth, draw)[0][-9:].tolist()) for draw in range(20) for depth in (0, 50)}
    assert len(words) == 20
    assert (
        Haystacks(config(seed=1), CORPUS, text.Bytes()).sequence(60, 0, 0)[0].tolist()
        != found.sequence(60, 0, 0)[0].tolist()
    )


def test_a_tokenizers_first_token_comes_first_and_only_there(tmp_path):
    words = tokenizers.models.WordLevel({"<s>": 0, "[UNK]": 1, "A": 2, "7": 3}, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    asked = config(
        needle="{key} {value}", question="{key}", answer=" {value}", key_characters="A", value_characters="7"
    )
    asked = dataclasses.replace(asked, key_length=1, value_length=1)
    tokens, answer = Haystacks(asked, CORPUS, text.Tokenizer(tokenizer)).sequence(10, 0, 0)
    assert (tokens[:3].tolist(), tokens[-2:].tolist(), answer) == ([0, 2, 3], [2, 3], 1)
    assert 0 not in tokens[1:]


def test_only_the_answer_counts_and_only_in_rows_with_a_case():
    batch = Haystacks(config(), CORPUS, text.Bytes()).batch([(60, 0, 0), (60, 50, 0)], range(1, 4))
    assert batch.weights.sum(axis=1).tolist() == [4, 0, 0]
    assert batch.weights[0, -4:].tolist() == [1] * 4
    np.testing.assert_array_equal(batch.tokens[:, 1:], batch.targets[:, :-1])


def test_an_answer_is_right_if_and_only_if_greedy_decoding_gives_it():
    """What an engine generates is right, and wrong if any of its tokens is changed."""
    prompt, new = 20, 3
    written = greedy(engine_of(SMALL, 1, sa.contiguous()), list(TEXT[:, :prompt]), new)
    rows = np.repeat(np.concatenate([TEXT[:, :prompt], written], axis=1), 4, axis=0)
    changed = np.arange(len(rows)) % 4
    for row, place in enumerate(changed):
        if place > 0:
            rows[row, prompt + place - 1] = (rows[row, prompt + place - 1] + 1) % SMALL.vocabulary
    length = prompt + new - 1
    counts = np.broadcast_to(np.arange(length) >= prompt - 1, (len(rows), length)).astype(np.float32)
    batch = data.Batch(rows[:, :-1], rows[:, 1:], counts, np.zeros_like(rows[:, 1:]))
    options = config(batch=len(rows), layout="zigzag", dtype="float32", strategy="ring")
    mesh = make_mesh({AXES.batch: 2, AXES.sequence: 2}, jax.devices()[:4])
    program = make_program(options, SMALL, mesh, length, documents=False)
    weights = weights_of(SMALL)
    stacked = {**weights, "layers": {n: jnp.stack([w[n] for w in weights["layers"]]) for n in weights["layers"][0]}}
    placed = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), stacked, program.state.weights)
    found = jax.device_get(Answering(program).compiled(placed, program.place(batch)))
    assert ((found.wrong == 0) == (changed == 0)).all()
    logs = jax.nn.log_softmax(dense_scores(SMALL, weights, jnp.asarray(rows[:, :-1])))
    truth = -np.take_along_axis(np.asarray(logs), rows[:, 1:, None], axis=-1)[..., 0]
    np.testing.assert_allclose(found.loss, (truth * counts).sum(axis=1), rtol=1e-5)


def evaluate(capsys, *arguments):
    capsys.readouterr()
    code = cli.main(["evaluate", *map(str, arguments)])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_a_hugging_face_model_has_the_losses_that_transformers_finds(tmp_path, capsys):
    """The loss over two tokenised sequences equals that of transformers and needs no tokenizer."""
    save("qwen 3", tmp_path / "model")
    np.save(tmp_path / "x.npy", np.append(TOKENS, TOKENS[0, 0]))
    common = ("--model", tmp_path / "model", "--data", tmp_path / "x.npy", "--dtype", "float32")
    code, out, error = evaluate(
        capsys, *common, "--length", LENGTH, "--only", "perplexity", "--output", tmp_path / "x.json"
    )
    assert code == 0, error
    logs = jax.nn.log_softmax(their_scores(original("qwen 3")))
    targets = np.append(TOKENS, TOKENS[0, 0])[1:].reshape(TOKENS.shape)
    loss = -np.take_along_axis(np.asarray(logs), targets[..., None], axis=-1).mean()
    found = json.loads((tmp_path / "x.json").read_text())
    assert found["perplexity"]["loss"] == pytest.approx(loss, rel=1e-5)
    assert found["perplexity"]["perplexity"] == pytest.approx(np.exp(loss), rel=1e-5)
    assert found["model"] == {"parameters": 51_200, "step": None, "length": 1024}
    assert found["devices"]["mesh"] == {"data": 1, "sequence": 8}
    assert found["configuration"]["sequence_length"] == LENGTH
    assert f"{np.exp(loss):,.2f}" in out
    code, out, error = evaluate(capsys, *common, "--length", LENGTH, "--only", "needle")
    assert (code, out) == (2, "")
    assert "has no tokenizer.json. Give one with --tokenizer" in error


@pytest.mark.parametrize(("kind", "wanted"), [("roomy", 8192), ("between", 2048), ("small", 1024)])
def test_chunks_follow_from_memory(kind, wanted):
    """Chunk sizes follow from the estimates without the backward pass and the optimiser, which evaluation lacks."""
    mesh = make_mesh({AXES.batch: 1, AXES.sequence: 2}, jax.devices()[:2])
    model = dataclasses.replace(SMALL, ffn=4096)

    def made(room, **options):
        return make_program(config(strategy="ring", **options), model, mesh, 2 * 8192, False, room).config

    def needs(chunk):
        parts = estimate(dataclasses.replace(made(0.0), chunk=chunk), {"data": 1, "sequence": 2}).memory
        return float(sum(size for part, size in parts.items() if part not in BACKWARD))

    room = {"roomy": needs(8192), "between": needs(2048), "small": 1.0}[kind]
    assert made(room).chunk == wanted
    assert made(room, chunk=5).chunk == 5


def test_a_program_that_needs_more_than_was_estimated_takes_smaller_chunks():
    mesh = make_mesh({AXES.batch: 1, AXES.sequence: 1}, jax.devices()[:1])
    model = dataclasses.replace(SMALL, ffn=2048)
    roomy = Answering(make_program(config(strategy="ring"), model, mesh, 4096, False))
    needs = memory.peak(lambda: roomy.compiled)
    smaller = fitting(roomy, config(), 0.7 * needs)
    assert (roomy.program.config.chunk, smaller.program.config.chunk) in ((4096, 2048), (4096, 1024))
    assert memory.peak(lambda: smaller.compiled) <= 0.7 * needs
    assert fitting(roomy, config(chunk=4096), 0.7 * needs) is roomy, "--chunk was given"
    assert fitting(roomy, config(), 1.0).program.config.chunk == 1024, "the smallest chunk"


BAD = [
    (dict(memory=1.5), "--memory must be above 0 and at most 1"),
    (dict(needle="no place"), "--needle must contain {value}"),
    (dict(question="{"), "--question may use {key} and {value}"),
    (dict(depths=(50, 101)), "--depths must be percentages from 0 to 100; got 50 101"),
    (dict(lengths=(0,)), "--lengths must be one or more numbers of tokens; got 0"),
    (dict(draws=0), "--draws must be at least 1; got 0"),
    (dict(key_characters=""), "--key-characters must have at least one character"),
]


@pytest.mark.parametrize(("options", "message"), BAD)
def test_bad_options_get_one_clear_line(options, message):
    with pytest.raises(UsageError, match=re.escape(message)) as caught:
        config(**options)
    assert "\n" not in str(caught.value)


def test_a_haystack_without_room_or_text_is_refused():
    with pytest.raises(UsageError, match=r"of 17 tokens has no room .* which need 18. Give longer ones with --lengths"):
        Haystacks(config(), CORPUS, text.Bytes()).sequence(17, 0, 0)
    ends = data.Corpus(np.full(100, 256, np.int32), 256, 257, "ends")
    with pytest.raises(UsageError, match="ends has no text, only end-of-document tokens"):
        Haystacks(config(), ends, text.Bytes()).sequence(40, 0, 0)


def test_what_cannot_be_evaluated_is_told(tmp_path, capsys):
    for options, message in (
        (("--model", tmp_path / "x"), "is not a folder"),
        (("--model", tmp_path, "--output", tmp_path), "is a folder. Give a file"),
        (("--model", tmp_path, "--output", tmp_path / "a" / "b"), "there is no folder"),
    ):
        code, out, error = evaluate(capsys, *options)
        assert (code, out, error.count("\n")) == (2, "", 1)
        assert message in error


@pytest.mark.parametrize("asked", ["evaluate --only perplexity", "evaluate", "generate --prompt the"])
def test_a_tokenizer_with_another_vocabulary_than_the_models_is_refused(asked, tmp_path, capsys):
    folder = rewritten(tmp_path / "model")
    write_tokenizer(folder / "tokenizer.json", {"the": 0, "</s>": 1, "[UNK]": 2})
    other = write_tokenizer(tmp_path / "other.json", {"the": 1, "</s>": 0, "[UNK]": 2})
    assert cli.main([*asked.split(), "--model", str(folder), "--tokenizer", str(other)]) == 2
    error = capsys.readouterr().err
    assert f"{other} has another vocabulary than {folder / 'tokenizer.json'}. Leave --tokenizer out." in error
    assert error.count("\n") == 1


def measured(tmp_path, tokens, **options):
    """Return an evaluation run before its weights are read, for a model with 64 positions."""
    np.save(tmp_path / "x.npy", np.array(tokens, np.uint16))
    folder = tmp_path / "model"
    source = find(folder if folder.is_dir() else rewritten(folder))
    asked = dict(model=folder, data=(str(tmp_path / "x.npy"),), end_token=7, only="perplexity")
    return command.Run(EvaluateConfig(**{**asked, **options}), source)


def test_data_without_a_token_that_counts_is_refused(tmp_path):
    with pytest.raises(UsageError, match="--data needs tokens that count in the loss, but none does in 1 sequence of"):
        measured(tmp_path, [7] * 100)


@pytest.mark.parametrize(("length", "warned"), [(64, ""), (65, "--length 65 is longer than the 64 positions")])
def test_sequences_longer_than_the_models_positions_are_warned_of(length, warned, tmp_path, capsys):
    measured(tmp_path, [1] * 100, sequence_length=length)
    error = capsys.readouterr().err
    assert "Evaluates " in error
    assert warned in error if warned else "Warning" not in error


def test_json_never_holds_infinity_or_nan(tmp_path, capsys, monkeypatch):
    run = measured(tmp_path, range(60), sequence_length=8)
    monkeypatch.setattr(HeldOut, "losses", lambda *_: Losses(800.0, 3, (Range(0, 7, 3, 800.0),)))
    said = run.perplexity(run.held_out, {})
    assert (said["loss"], said["perplexity"]) == (800, None)
    assert "inf" in capsys.readouterr().out
    monkeypatch.setattr(HeldOut, "losses", lambda *_: Losses(math.nan, 3, ()))
    with pytest.raises(Diverged, match=r"loss must be finite, but for .*model it is nan\. Try --dtype float32"):
        run.perplexity(run.held_out, {})


def test_a_model_that_went_on_with_long_documents_beats_its_short_self_on_far_positions(tmp_path):
    """examples/recall.py shows this; it runs with XLA's default flags, because it is slower with those of the tests."""
    program = [sys.executable, str(ROOT / "examples" / "recall.py"), str(tmp_path)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    done = subprocess.run(program, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    short, long = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("short", "long"))
    losses = [[one["loss"] for one in found["perplexity"]["by_position"]] for found in (short, long)]
    (short_near, *short_far), (long_near, *long_far) = losses
    assert abs(short_near - long_near) < 0.3
    assert min(short_far) > max(long_far) + 0.4
    assert max(long_far) < long_near + 0.2, "as good on far positions as on near ones"
    assert needles(short, 128) > 0.7 > 0.3 > needles(short, 1024)
    assert needles(long, 1024) > 0.7
    validations = [json.loads(line) for line in (tmp_path / "long" / "metrics.jsonl").read_text().splitlines()]
    assert validations[-1]["validation"]["by_position"][-1]["loss"] == pytest.approx(long_far[-1], rel=1e-4)


def needles(found, length):
    """Return the share of needles found in haystacks of this length."""
    cells = [cell for cell in found["needle"]["cells"] if cell["length"] == length]
    return sum(cell["correct"] for cell in cells) / sum(cell["draws"] for cell in cells)
