"""Stop strings, log-probabilities and generation_config.json."""

import json
import random
import shutil

import numpy as np
import pytest

from striped_attention.generation.config import GenerateConfig
from striped_attention.generation.run import Answer, Ends
from striped_attention.generation.sample import Sampling, Step
from striped_attention.generation.settings import settle
from striped_attention.generation.stops import StopStrings
from striped_attention.generation.text import Bytes, TokenStream
from striped_attention.training.source import find
from tests.chat_model import ids, oracle, text_of, write_model
from tests.test_generate import generate, spaces

STEPS = 12
COMMON = ("--dtype", "float32", "--max-tokens", STEPS)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("stops") / "model")


@pytest.fixture
def copied(model, tmp_path):
    return shutil.copytree(model, tmp_path / "model")


def cut(text, strings):
    """Return the text before the stop string that is completed first, by checking every prefix."""
    for end in range(1, len(text) + 1):
        starts = [end - len(string) for string in strings if text[:end].endswith(string)]
        if starts:
            return text[: min(starts)], True
    return text, False


def test_a_text_ends_before_a_stop_string_however_it_comes():
    """3000 random short texts and pairs of strings over two letters, in random pieces. No part of a match is shown."""
    rng = random.Random(0)
    for _ in range(3000):
        text = "".join(rng.choices("ab", k=rng.randrange(9)))
        strings = ["".join(rng.choices("ab", k=rng.randrange(1, 5))) for _ in range(2)]
        wanted, found = cut(text, strings)
        stops, shown, left = StopStrings(strings), "", text
        while left:
            n = rng.randrange(1, len(left) + 1)
            shown += stops.add(left[:n])
            assert wanted.startswith(shown), (text, strings)
            left = left[n:]
        assert (shown + stops.finish(), stops.found) == (wanted, found), (text, strings)


def test_text_is_shown_as_soon_as_it_cannot_become_a_stop_string():
    stops = StopStrings(["###"])
    assert [stops.add(piece) for piece in ("Yes.", "\n#", "# no", " ##")] == ["Yes.", "\n", "## no", " "]
    assert stops.finish() == "##"
    assert StopStrings([]).add("everything") == "everything"


def answer(stream, tokens, strings, ends=()):
    """Feed tokens one by one; return the answer and the pieces that were shown."""
    found = Answer(stream, Ends(list(ends), strings, Bytes()))
    pieces = []
    for token in tokens:
        pieces.append(found.add(Step(np.array([token], np.int32)), 0))
        if found.finish is not None:
            break
    return found, [*pieces, found.close()]


def test_stop_strings_span_tokens_and_parts_of_characters():
    text = "naïve 🙂🙂 done"
    tokens = list(text.encode())
    for start in range(len(text)):
        for end in range(start + 1, len(text) + 1):
            stop = text[start:end]
            found, pieces = answer(Bytes().stream([]), tokens, [stop])
            assert found.finish == "stop"
            assert found.text == "".join(pieces) == text[: text.index(stop)]
            assert found.tokens == tokens[: len(text[: text.index(stop) + len(stop)].encode())], "no tokens beyond"
    found, _ = answer(Bytes().stream([]), tokens[:-1], ["done"])
    assert (found.finish, found.text) == ("length", text[:-1])


def test_a_stop_string_in_what_an_end_leaves_over():
    """A partial character is held back until the end; the letter before it may complete a stop string."""
    found, pieces = answer(stream_of([0]), [1, 2, 4], ["bc"])
    assert (found.finish, found.text, pieces) == ("stop", " ", [" ", "", ""])
    found, pieces = answer(stream_of([0]), [1, 4], ["b\N{REPLACEMENT CHARACTER}"])
    assert (found.finish, found.text) == ("stop", " ")
    found, pieces = answer(stream_of([0]), [1, 4, 3], ["zz"], ends=[3])
    assert (found.finish, found.text) == ("end", " b\N{REPLACEMENT CHARACTER}")


def stream_of(prompt):
    return TokenStream(spaces(), prompt)


def rows(out):
    return [json.loads(line) for line in out.splitlines()]


def test_every_prompt_of_a_batch_ends_at_its_own_stop_string(model, capsys, tmp_path):
    prompts = ["Hello!", "a longer prompt than that", "?"]
    (tmp_path / "prompts.txt").write_text("\n".join(prompts))
    command = ("--model", model, *COMMON, "--prompts", tmp_path / "prompts.txt")
    free = [text_of(oracle(model).greedy([1, *ids(prompt)], STEPS)) for prompt in prompts]
    stops = [free[0][2:4], free[1][7:9]]
    for batch in (1, 3):
        code, out, _ = generate(capsys, *command, "--stop", stops[0], "--stop", stops[1], "--batch", batch)
        assert code == 0
        for row, text in zip(rows(out), free, strict=True):
            wanted, found = cut(text, stops)
            assert (row["text"], row["finish"]) == (wanted, "stop" if found else "length")
            assert row["new_tokens"] == len(row["tokens"]) == (len(wanted) + 2 if found else STEPS)
    assert "stop" in {row["finish"] for row in rows(out)}
    shown = generate(capsys, "--model", model, *COMMON, "--prompt", prompts[0], "--stop", stops[0])[1]
    assert shown == cut(free[0], stops[:1])[0] + "\n"


SAMPLED = ("--temperature", 1.5, "--top-k", 30, "--seed", 1)


@pytest.mark.parametrize("sampling", [(), SAMPLED], ids=["greedy", "sampled"])
def test_log_probabilities_are_those_of_transformers(model, capsys, tmp_path, sampling):
    """To 1e-5, greedy and sampled, in a batch and alone; top_logprobs has the most likely tokens in order."""
    (tmp_path / "prompts.txt").write_text("Hello!\na longer prompt than that\n?")
    command = ("--model", model, *COMMON, *sampling, "--prompts", tmp_path / "prompts.txt", "--logprobs", 3)
    for batch in (1, 3):
        code, out, _ = generate(capsys, *command, "--batch", batch)
        assert code == 0
        for row in rows(out):
            prompt = [1, *ids(row["prompt"])]
            wanted = oracle(model).logprobs([*prompt, *row["tokens"]])[len(prompt) - 1 : -1]
            assert np.abs(wanted[np.arange(STEPS), row["tokens"]] - row["logprobs"]).max() < 1e-5
            for said, true in zip(row["top_logprobs"], wanted, strict=True):
                assert [one["token"] for one in said] == np.argsort(-true)[:3].tolist()
                assert np.abs(np.array([one["logprob"] for one in said]) - np.sort(true)[::-1][:3]).max() < 1e-5
    plain = rows(generate(capsys, *command[:-1])[1])
    assert [row["logprobs"] for row in plain] == [pytest.approx(row["logprobs"], abs=1e-6) for row in rows(out)]
    assert "top_logprobs" not in plain[0]


def settled(folder, said, **options):
    (folder / "generation_config.json").write_text(json.dumps(said))
    return settle(GenerateConfig(model=folder, **options), find(folder))


LLAMA = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "max_new_tokens": 77, "eos_token_id": [2]}


@pytest.mark.parametrize(
    ("said", "options", "wanted"),
    [
        ({}, {}, Sampling()),
        (LLAMA, {}, Sampling(0.6, 20, 0.9)),
        (LLAMA | {"min_p": 0.1}, dict(seed=3), Sampling(0.6, 20, 0.9, 0.1, 3)),
        (LLAMA | {"do_sample": False}, {}, Sampling()),
        ({"temperature": 0.6, "top_p": 0.9}, {}, Sampling()),
        ({"do_sample": True}, {}, Sampling(1.0)),
        ({"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": None}, {}, Sampling(1.0)),
        (LLAMA, dict(temperature=0.0), Sampling()),
        (LLAMA, dict(temperature=1.2), Sampling(1.2, 20, 0.9)),
        (LLAMA, dict(top_k=5, top_p=1.0, min_p=0.2), Sampling(0.6, 5, 1.0, 0.2)),
        (LLAMA | {"do_sample": False}, dict(temperature=1.2), Sampling(1.2, 20, 0.9)),
    ],
    ids=str,
)
def test_options_win_over_generation_config(copied, said, options, wanted):
    assert settled(copied, said, **options).sampling == wanted


def test_what_is_taken_from_generation_config_is_said(copied, capsys):
    """The line that describes the run lists these settings; options take precedence over them."""
    found = settled(copied, LLAMA)
    assert (found.max_tokens, found.stop, found.warning) == (77, (), "")
    found = settled(copied, LLAMA | {"stop_strings": ["a", "b"]}, max_tokens=5, top_p=0.5)
    assert (found.max_tokens, found.stop) == (5, ("a", "b"))
    assert found.note == (
        'do_sample true, temperature 0.6, top_k 20, stop_strings ["a", "b"] from generation_config.json'
    )
    assert settled(copied, {"stop_strings": "a"}, stop=("c",)).stop == ("c",)
    assert settled(copied, {}).max_tokens == 256
    settled(copied, LLAMA | {"max_new_tokens": 4, "repetition_penalty": 1.1, "num_beams": 1, "typical_p": 0.5})
    code, out, err = generate(capsys, "--model", copied, "--dtype", "float32", "--prompt", "Hello!")
    assert code == 0
    assert "decode 4 tokens" in err
    words = " ".join(err.split())
    assert "temperature 0.6, top_k 20, top_p 0.9, max_new_tokens 4 from generation_config.json" in words
    assert "asks for repetition_penalty 1.1, typical_p 0.5, which striped generate does not support" in words
    assert err.count("Warning") == 1
    again = ("--temperature", 0.6, "--top-k", 20, "--top-p", 0.9, "--max-tokens", 4)
    (copied / "generation_config.json").unlink()
    assert generate(capsys, "--model", copied, "--dtype", "float32", "--prompt", "Hello!", *again)[1] == out


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"do_sample": "yes"}, "must give true or false as do_sample; got 'yes'"),
        ({"do_sample": True, "temperature": 0}, "must give a number above 0 as temperature; got 0"),
        ({"do_sample": True, "temperature": "hot"}, "must give a number above 0 as temperature; got 'hot'"),
        ({"do_sample": True, "temperature": True}, "must give a number above 0 as temperature; got True"),
        ({"do_sample": True, "top_k": 2.5}, "must give a whole number of at least 0 as top_k; got 2.5"),
        ({"do_sample": True, "top_p": 1.5}, "must give a number above 0 and at most 1 as top_p; got 1.5"),
        ({"do_sample": True, "min_p": -1}, "must give a number of at least 0 and at most 1 as min_p; got -1"),
        ({"max_new_tokens": 0}, "must give a whole number of at least 1 as max_new_tokens; got 0"),
        ({"stop_strings": [""]}, "must give a list of strings that are not empty as stop_strings; got ['']"),
    ],
    ids=str,
)
def test_a_wrong_generation_config_is_one_line(copied, capsys, said, message):
    (copied / "generation_config.json").write_text(json.dumps(said))
    code, out, err = generate(capsys, "--model", copied, "--prompt", "Hello!")
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith("striped: ")
    assert f"generation_config.json {message}" in line


def test_filters_without_sampling_are_refused(copied, capsys):
    (copied / "generation_config.json").write_text('{"top_p": 0.9}')
    for option in (("--top-k", 5), ("--top-p", 0.5), ("--min-p", 0.5)):
        code, _, err = generate(capsys, "--model", copied, "--prompt", "Hello!", *option)
        assert code == 2
        assert "are for sampling: also give a --temperature above 0" in err
    (copied / "generation_config.json").write_text('{"do_sample": true}')
    assert generate(capsys, "--model", copied, "--prompt", "a", "--max-tokens", 2, "--top-k", 5)[0] == 0


def test_a_prompt_beyond_the_models_positions_is_said(model, capsys):
    command = ("--model", model, "--dtype", "float32", "--max-tokens", 2, "--prompt")
    code, _, err = generate(capsys, *command, "a" * 130)
    assert code == 0
    words = " ".join(err.split())
    assert "Warning: The prompt has 131 tokens, more than the model's maximum of 128: expect poor text" in words
    assert "Warning" not in generate(capsys, *command, "a" * 125)[2]
    words = " ".join(generate(capsys, *command, "a" * 126)[2].split())
    assert "has 127 tokens; with --max-tokens 2, the sequence may exceed the model's maximum of 128" in words
