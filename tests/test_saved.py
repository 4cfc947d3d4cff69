"""Saved caches: answers from one equal those from the whole prompt, on any devices; unusable files are refused."""

import dataclasses
import json
import pickle
import shutil
import struct

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import striped_attention as sa
from striped_attention import cli
from striped_attention.errors import UsageError
from striped_attention.generation.engine import Engine
from striped_attention.generation.prompts import Prompt, opening
from striped_attention.generation.sample import Sampling
from striped_attention.generation.saved import Saved, save
from striped_attention.generation.text import Bytes, Tokenizer
from striped_attention.models.rotary import RopeScaling
from tests.chat_model import oracle, text_of, write_model
from tests.test_chat import Spy, said, terminal, user  # noqa: F401  a fixture
from tests.test_engine import SMALL, TEXT, WINDOW, engine_of, greedy, truth
from tests.test_generate import generate, trained  # noqa: F401  a fixture

ALTERNATING = dataclasses.replace(WINDOW, full_every=2)
CONFIGS = {"full": SMALL, "alternating": ALTERNATING}
PLACES = [(1, sa.contiguous()), (2, sa.zigzag()), (4, sa.striped(2)), (8, sa.striped())]
DOCUMENT, QUESTIONS = TEXT[0, :24], [TEXT[0, 24:32], TEXT[1, :1], []]


def saved_on(tmp_path, config, devices, layout, document=DOCUMENT):
    """Save the cache of an engine's second sequence, and return its path."""
    path, engine = tmp_path / f"{devices}.cache", engine_of(config, devices, layout)
    engine.prefill([TEXT[1, :3], document, TEXT[2, :1]])
    save(engine, document, path, row=1)
    return path


@pytest.mark.parametrize("name", CONFIGS)
def test_answers_from_a_saved_cache_are_those_of_the_whole_prompt(tmp_path, name):
    """A cache may be saved and loaded on any devices and in any layout. The file does not depend on them."""
    config = CONFIGS[name]
    whole = [[*DOCUMENT, *question] for question in QUESTIONS]
    wanted = greedy(engine_of(config, 1, sa.contiguous()), whole, 8).tolist()
    paths = [saved_on(tmp_path, config, devices, layout) for devices, layout in PLACES]
    for path, (devices, layout) in zip([paths[2], paths[3], paths[0], paths[1]], PLACES, strict=True):
        engine = engine_of(config, devices, layout)
        found = Saved(path, engine.config, "float32")
        assert found.tokens.tolist() == DOCUMENT.tolist()
        found.load(engine)
        if config is SMALL:  # the dense model has a single kind of layer
            wanted_scores = truth(config)[0, len(DOCUMENT) - 1]
            assert np.abs(np.asarray(engine.scores) - wanted_scores).max() < 1e-5 * np.abs(wanted_scores).max()
        assert greedy(engine, QUESTIONS, 8).tolist() == wanted, (path, devices)
        assert engine.lengths.tolist() == [len(prompt) + 8 for prompt in whole]
    files = [load_file(path) for path in paths]
    for file in files[1:]:
        for key in files[0].keys() - {"checksums"}:
            np.testing.assert_allclose(file[key], files[0][key], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("length", [1, 4, 5, 6, 39])
def test_windows_keep_the_window_only(tmp_path, length):
    """Also with prompts shorter than the window, and with prompts so long that the cache of a layer has wrapped."""
    path = saved_on(tmp_path, ALTERNATING, 4, sa.striped(2), TEXT[0, :length])
    shapes = {key: x.shape for key, x in load_file(path).items()}
    assert shapes["layers.0.key"] == shapes["layers.0.value"] == (min(length, 5), 2, 16)
    assert shapes["layers.1.key"] == (length, 2, 16)
    engine = engine_of(ALTERNATING, 2, sa.zigzag())
    Saved(path, engine.config, "float32").load(engine)
    found = greedy(engine, [TEXT[1, :2], [], []], 7).tolist()
    engine.clear()
    assert greedy(engine, [[*TEXT[0, :length], *TEXT[1, :2]], *[TEXT[0, :length]] * 2], 7).tolist() == found


def test_a_cache_may_be_saved_after_an_answer(tmp_path):
    """The saved sequence includes generated tokens, the last of which is in no cache yet; the engine can continue."""
    engine, prompts = engine_of(SMALL, 4, sa.striped(2)), [TEXT[0, :9], TEXT[1, :3], TEXT[2, :5]]
    tokens = [*prompts[0], *greedy(engine, prompts, 6)[0].tolist()]
    with pytest.raises(ValueError, match="with all of its tokens, at least one; got 14 tokens, but sequence 0 has 15"):
        save(engine, tokens[:-1], tmp_path / "x")
    save(engine, tokens, tmp_path / "x")
    wanted = np.stack([step.tokens for step in engine.decode(5, Sampling())], axis=1)[0]
    other = engine_of(SMALL, 2, sa.striped())
    Saved(tmp_path / "x", other.config, "float32").load(other)
    assert greedy(other, [[]] * 3, 5).tolist() == [wanted.tolist()] * 3


def flip(path, at):
    content = bytearray(path.read_bytes())
    content[at] ^= 4
    path.write_bytes(bytes(content))


def rewrite(path, change):
    """Change the header of a file; its JSON and its length stay valid."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])


def say(**metadata):
    return lambda path: rewrite(path, lambda header: header["__metadata__"].update(metadata))


def plain_safetensors(path):
    save_file({"tokens": np.zeros(3, np.int32)}, path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: path.unlink(), "cannot be read: No such file or directory"),
        (lambda path: [path.unlink(), path.mkdir()], "cannot be read: Is a directory"),
        (lambda path: path.write_bytes(b""), "is not a cache saved by striped generate"),
        (lambda path: path.write_bytes(pickle.dumps({"a": [1] * 999})), "is not a cache saved by striped generate"),
        (plain_safetensors, "is not a cache saved by striped generate"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "is cut short"),
        (lambda path: path.write_bytes(path.read_bytes()[:300]), "is cut short"),
        (lambda path: path.write_bytes(path.read_bytes() + b"x"), "is damaged"),
        (lambda path: flip(path, 150), "is damaged"),
        (lambda path: flip(path, path.read_bytes().index(b'"layers.1.key"') + 3), "is damaged"),
        (lambda path: flip(path, path.read_bytes().index(b'"dtype"')), "is damaged"),
        (say(weights="0" * 32), "is damaged"),
        (lambda path: rewrite(path, lambda header: header.pop("layers.0.key")), "is damaged"),
        (say(format="striped_attention cache 2"), "another version of striped_attention ('striped_attention cache 2'"),
    ],
)
def test_what_is_no_whole_cache_is_refused_before_it_is_loaded(tmp_path, change, message):
    path = saved_on(tmp_path, SMALL, 2, sa.striped())
    change(path)
    with pytest.raises(UsageError) as error:
        Saved(path, SMALL, "float32")
    assert message in str(error.value)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("key", ["tokens", "scores", "layers.0.key", "layers.1.value", "checksums"])
def test_a_changed_bit_is_noticed_and_leaves_an_engine_as_good_as_new(tmp_path, key):
    path, engine = saved_on(tmp_path, SMALL, 2, sa.striped()), engine_of(SMALL, 2, sa.striped())
    wanted = greedy(engine, [*QUESTIONS[:2], TEXT[2, :4]], 4).tolist()
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    flip(path, 8 + length + json.loads(content[8 : 8 + length])[key]["data_offsets"][1] - 2)
    with pytest.raises(UsageError, match=r"is damaged\. Save it again\."):
        Saved(path, SMALL, "float32").load(engine)
    engine.clear()
    assert greedy(engine, [*QUESTIONS[:2], TEXT[2, :4]], 4).tolist() == wanted


def test_another_model_dtype_or_window_is_named(tmp_path):
    path = saved_on(tmp_path, WINDOW, 1, sa.contiguous())
    for changes, message in [
        (dict(window=8), "is of another model: window 5 there, 8 here. Give the --model it was saved with."),
        (
            dict(layers=3, head_norms=False),
            "of another model: layers 2 there, 3 here, head_norms True there, False here",
        ),
        (dict(rope_theta=500.0), "rope_theta 10000.0 there, 500.0 here"),
    ]:
        with pytest.raises(UsageError) as error:
            Saved(path, dataclasses.replace(WINDOW, **changes), "float32")
        assert message in str(error.value)
    with pytest.raises(
        UsageError, match=r"was saved in float32, but this run computes in bfloat16\. Give --dtype float32"
    ):
        Saved(path, WINDOW, "bfloat16")


def test_factors_of_longrope_that_hold_for_another_length_are_said(tmp_path):
    factors = dict(short=tuple([1.0] * 8), long=tuple([2.0] * 8))
    config = dataclasses.replace(WINDOW, window=None, rope_scaling=RopeScaling("longrope", 4.0, 16, **factors))
    path = saved_on(tmp_path, config, 1, sa.contiguous())
    Saved(path, config.at_length(48), "float32")
    with pytest.raises(UsageError, match="was saved with a capacity for which longrope uses other"):
        Saved(path, config.at_length(16), "float32")


def test_other_weights_are_refused_on_any_devices(tmp_path):
    """A single changed value is enough; the same weights on other devices are accepted."""
    path = saved_on(tmp_path, SMALL, 2, sa.striped())
    prints = {engine_of(SMALL, devices, layout).fingerprint for devices, layout in PLACES}
    assert len(prints) == 1
    engine = engine_of(SMALL, 4, sa.striped(2))
    for name in ("gate_up", "attention_norm"):
        layers = [dict(layer) for layer in engine.weights["layers"]]
        layers[1][name] = layers[1][name].at[(0,) * layers[1][name].ndim].add(1e-6)
        other = Engine(SMALL, {**engine.weights, "layers": layers}, engine.mesh, engine.options)
        with pytest.raises(UsageError, match="was saved with other weights of the same architecture"):
            Saved(path, SMALL, "float32").load(other)
        assert other.lengths.tolist() == [0, 0, 0]


def test_a_prompt_that_does_not_begin_with_the_cache_says_where_it_differs(tmp_path):
    found = Saved(saved_on(tmp_path, SMALL, 1, sa.contiguous(), np.array([7, 8, 9])), SMALL, "float32")
    found.check_prompt([7, 8, 9], "The prompt", Bytes())
    found.check_prompt([7, 8, 9, 1], "The prompt", Bytes())
    for tokens, message in [
        ([7, 50, 9, 1], r"but token 2 is '2' (50), and that of the cache is '\x08' (8)."),
        ([7, 8], r"but it ends before token 3, and that of the cache is '\t' (9)."),
    ]:
        with pytest.raises(UsageError) as error:
            found.check_prompt(tokens, "Line 3 of a.txt", Bytes())
        assert f"Line 3 of a.txt must begin with the 3 tokens of --cache {found.path}, {message}" in str(error.value)


def test_nothing_is_left_of_a_cache_that_could_not_be_written(tmp_path, monkeypatch):
    engine = engine_of(SMALL, 2, sa.striped())
    engine.prefill([TEXT[0, :5], TEXT[1, :3], TEXT[2, :8]])
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(0, 0, 100))
    with pytest.raises(UsageError, match=r"it needs 0\.0 MB and the disk has 0\.0 MB left\. No file was left"):
        save(engine, TEXT[0, :5], tmp_path / "x")
    with pytest.raises(UsageError, match="could not be saved"):
        save(engine, TEXT[0, :5], tmp_path / "no" / "x")
    assert list(tmp_path.iterdir()) == []


def merging():
    """A tokenizer that merges letters, as real ones do: "ab" is one token."""
    from tokenizers import Tokenizer as Library
    from tokenizers import models

    vocabulary = {"a": 0, "b": 1, "c": 2, "ab": 3, "ca": 4, ".": 5, "<unk>": 6}
    return Tokenizer(Library(models.BPE(vocabulary, [("a", "b"), ("c", "a")], unk_token="<unk>")))


@pytest.mark.parametrize(("text", "stays"), [("abc", [3]), ("abcb", [3, 2, 1]), ("ab.", [3, 5]), ("c", [])])
def test_only_tokens_that_stay_when_more_text_follows_are_saved(text, stays):
    encoder = merging()
    tokens = encoder.encode(text)
    assert opening(Prompt({"prompt": text}, ""), tokens, encoder, None) == stays
    assert encoder.encode(text + "ab")[: len(stays)] == stays
    assert opening(Prompt({"prompt": "Gruß"}, ""), list("Gruß".encode()), Bytes(), None) == list("Gruß".encode())


COMMON = ("--dtype", "float32", "--max-tokens", 6)
BOOK = "Call me Ishmael. Some years ago - never mind how long precisely - having little money, I went to sea."


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("saved") / "model")


def test_many_questions_about_a_document_that_is_prefilled_once(model, capsys, monkeypatch, tmp_path):
    """Saved in one layout and loaded in another; the answers equal those of transformers on the whole prompts."""
    spy, theirs, path = Spy(monkeypatch), oracle(model), tmp_path / "book.cache"
    command = ("--model", model, *COMMON)
    plain = generate(capsys, *command, "--prompt", BOOK)[:2]
    spy.read.clear()
    code, out, err = generate(capsys, *command, "--prompt", BOOK, "--save-cache", path, "--layout", "zigzag")
    assert (code, out) == plain
    assert f"{path}: the cache of {len(BOOK) + 1} tokens" in err
    assert [len(read) for read in spy.read] == [len(BOOK) + 1]
    questions = [" Who?", " Where to?", "", " Why is that so, Ishmael"]
    (tmp_path / "asked.jsonl").write_text("".join(json.dumps({"prompt": BOOK + text}) + "\n" for text in questions))
    spy.read.clear()
    options = ("--prompts", tmp_path / "asked.jsonl", "--cache", path, "--batch", 3)
    code, out, err = generate(capsys, *command, *options)
    assert code == 0
    assert [len(read) for read in spy.read] == [len(questions[0]), len(questions[3])], "the first of each batch"
    found = [json.loads(line) for line in out.splitlines()]
    assert [row["prompt_tokens"] for row in found] == [len(BOOK + text) + 1 for text in questions]
    for row, text in zip(found, questions, strict=True):
        assert row["tokens"] == theirs.greedy(theirs.tokenizer.encode(BOOK + text), 6)
    sampled = ("--temperature", 1, "--seed", 5, "--prompt", BOOK + questions[1], "--logprobs", 2, "--output")
    assert generate(capsys, *command, *sampled, tmp_path / "with", "--cache", path)[0] == 0
    assert generate(capsys, *command, *sampled, tmp_path / "without")[0] == 0
    one, two = (json.loads((tmp_path / name).read_text()) for name in ("with", "without"))
    assert np.allclose(one.pop("logprobs"), two.pop("logprobs"), atol=1e-4)
    assert one["tokens"] == two["tokens"]


def test_a_cache_grows(model, capsys, monkeypatch, tmp_path):
    """--cache with --save-cache: only the new text is prefilled, and it is saved together with the old."""
    paths, spy = [tmp_path / "one", tmp_path / "two"], Spy(monkeypatch)
    command = ("--model", model, *COMMON, "--prompt")
    assert generate(capsys, *command, BOOK[:40], "--save-cache", paths[0])[0] == 0
    assert generate(capsys, *command, BOOK[:60], "--cache", paths[0], "--save-cache", paths[1])[0] == 0
    found = generate(capsys, *command, BOOK, "--cache", paths[1])[:2]
    assert [len(read) for read in spy.read] == [41, 20, len(BOOK) - 60]
    assert found == generate(capsys, *command, BOOK)[:2]


def test_a_message_that_is_made_longer_goes_on_from_its_cache(model, capsys, monkeypatch, terminal, tmp_path):  # noqa: F811
    """With --chat all but the end of the message is saved. Covers a single prompt and an interactive conversation."""
    spy, theirs, path = Spy(monkeypatch), oracle(model), tmp_path / "chat.cache"
    command = ("--model", model, *COMMON, "--chat", "--system", BOOK[:60])
    code, out, err = generate(capsys, *command, "--prompt", "I: ", "--save-cache", path)
    whole = theirs.prompt([said("system", BOOK[:60]), user("I: ")])
    assert (code, out) == (0, text_of(theirs.greedy(whole, 6)) + "\n")
    assert spy.read == [whole[:-2], whole[-2:]]
    assert f"the cache of {len(whole) - 2} tokens" in err
    spy.read.clear()
    terminal("I: who?\nso?\n\n")
    code, out, _ = generate(capsys, *command, "--cache", path)
    first = theirs.prompt([said("system", BOOK[:60]), user("I: who?")])
    answer = text_of(theirs.greedy(first, 6))
    second = theirs.prompt([said("system", BOOK[:60]), user("I: who?"), said("assistant", answer), user("so?")])
    assert (code, out) == (0, f"> {answer}\n> {text_of(theirs.greedy(second, 6))}\n> ")
    assert spy.read == [first[len(whole) - 2 :], second[len(first) + 6 :]]
    terminal("I was\n\n")
    code, _, err = generate(capsys, *command, "--cache", path)
    assert code == 2
    assert "The conversation must begin with the" in err
    assert "is ' '" in err, "a space where the cache has a colon"


@pytest.fixture(scope="module")
def book_cache(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("cache") / "book.cache"
    options = ("--prompt", BOOK[:40], "--save-cache", path)
    assert cli.main(["generate", "--model", str(model), *map(str, COMMON), *map(str, options)]) == 0
    return path


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--prompt", "Call us"),
            "The prompt must begin with the 41 tokens of --cache copy, but token 7 is 'u' (26), and",
        ),
        (("--prompt", BOOK[:9]), "but it ends before token 11, and that of the cache is 's' (24). Begin the prompt"),
        (("--prompt", BOOK, "--dtype", "bfloat16"), "was saved in float32, but this run computes in bfloat16. Give"),
        (("--prompt", BOOK, "--cache", "nowhere"), "The cache nowhere cannot be read: No such file or directory."),
        (("--prompt", BOOK, "--cache", "cut"), "The cache cut is cut short: its end is missing. Save it again."),
        (("--prompt", BOOK, "--cache", "prompts.txt"), "prompts.txt is not a cache saved by striped generate."),
        (("--prompt", BOOK, "--save-cache", "copy"), "--save-cache copy already exists. Choose a new file"),
        (("--prompt", BOOK, "--save-cache", "no/where"), "--save-cache no/where: there is no folder"),
        (("--prompts", "prompts.txt", "--save-cache", "x"), "--save-cache x is for one prompt; got 2. Give the one"),
    ],
    ids=str,
)
def test_what_cannot_go_on_is_one_line(model, book_cache, capsys, monkeypatch, tmp_path, options, message):
    """The error comes before any weights are read."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(book_cache, "copy")
    (tmp_path / "cut").write_bytes(book_cache.read_bytes()[:-9])
    (tmp_path / "prompts.txt").write_text(f"{BOOK}\n{BOOK} Who?\n")
    monkeypatch.setattr("striped_attention.generation.command.load", None)
    before = sorted(tmp_path.iterdir())
    code, out, err = generate(capsys, "--model", model, *COMMON, "--cache", "copy", *options)
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith("striped: ")
    assert message in line
    assert sorted(tmp_path.iterdir()) == before


def test_a_cache_of_another_model_or_of_other_weights_is_one_line(model, trained, book_cache, capsys, tmp_path):  # noqa: F811
    code, _, err = generate(capsys, "--model", trained, *COMMON, "--prompt", BOOK, "--cache", book_cache)
    assert code == 2
    assert (
        f"The cache {book_cache} is of another model: ffn 48 there, 64 here, heads 4 there, 2 here"
        in err.splitlines()[-1]
    )
    other = shutil.copytree(model, tmp_path / "model")
    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"][3] += 1e-3
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    code, out, err = generate(capsys, "--model", other, *COMMON, "--prompt", BOOK, "--cache", book_cache)
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith(f"striped: The cache {book_cache} was saved with other weights")


def test_two_processes_go_on_from_what_they_saved(model, tmp_path):
    command = ["generate", "--model", str(model), *map(str, COMMON), "--prompt"]
    two = ["--local-processes", "2", "--cpu-devices", "1"]
    assert cli.main([*command, BOOK[:40], *two, "--save-cache", str(tmp_path / "book"), "--output", "/dev/null"]) == 0
    assert cli.main([*command, BOOK, *two, "--cache", str(tmp_path / "book"), "--output", str(tmp_path / "two")]) == 0
    assert cli.main([*command, BOOK, "--output", str(tmp_path / "one")]) == 0
    assert (tmp_path / "one").read_text() == (tmp_path / "two").read_text() != ""
