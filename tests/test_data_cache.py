"""Tokens on disk: built once, by one of several processes; rebuilt after changes; checked for damage."""

import concurrent.futures
import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading

import pytest

from striped_attention import cli
from striped_attention.data import build, cache, encoder, store
from striped_attention.errors import UsageError
from tests.test_data_sources import lines, load, written
from tests.test_train_data import write_tokenizer


@pytest.fixture
def source(tmp_path):
    return written(tmp_path / "x.jsonl", lines(["one", "two"]))


@pytest.fixture
def builds(monkeypatch):
    """The sources that were tokenised, in order."""
    done = []
    monkeypatch.setattr(cache, "build", lambda files, *rest: (done.append(files.source), build.build(files, *rest))[1])
    return done


def test_a_source_is_tokenised_once(tmp_path, source, builds):
    first = load(source, cache=tmp_path / "cache")
    again = load(source, cache=tmp_path / "cache")
    assert builds == [str(source)]
    assert first.fingerprint == again.fingerprint
    assert first.notes(10) == again.notes(10)
    assert load(source, cache=tmp_path / "other").tokens.tolist() == first.tokens.tolist()
    assert len(builds) == 2


def test_it_is_tokenised_again_when_something_has_changed(tmp_path, source, builds):
    folder = tmp_path / "cache"
    tokenizer = write_tokenizer(tmp_path / "tokenizer.json", {"one": 0, "two": 1, "</s>": 2, "[UNK]": 3})
    assert load(source, cache=folder, tokenizer=tokenizer).tokens.tolist() == [0, 2, 1, 2]
    write_tokenizer(tokenizer, {"one": 1, "two": 0, "</s>": 2, "[UNK]": 3})
    assert load(source, cache=folder, tokenizer=tokenizer).tokens.tolist() == [1, 2, 0, 2]
    (tmp_path / "config.json").write_text('{"eos_token_id": 3}')
    assert load(source, cache=folder, tokenizer=tokenizer).tokens.tolist() == [1, 3, 0, 3]
    stat = source.stat()
    source.write_bytes(lines(["two", "one"]))
    os.utime(source, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert load(source, cache=folder, tokenizer=tokenizer).tokens.tolist() == [0, 3, 1, 3]
    assert len(builds) == 4
    source.write_bytes(b'{"text": "one", "body": "two"}')
    assert load(source, cache=folder, tokenizer=tokenizer).tokens.tolist() == [1, 3]
    assert load(source, cache=folder, tokenizer=tokenizer, text="body").tokens.tolist() == [0, 3]


def test_the_cache_lies_where_caches_lie(tmp_path, source, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    load(source)
    names = sorted(path.name for path in (tmp_path / "caches" / "striped_attention" / "tokens").iterdir())
    assert [name.split("-")[0] for name in names] == ["x.jsonl", "x.jsonl"]
    assert names[1] == names[0] + ".lock"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.default_folder() == pathlib.Path.home() / ".cache" / "striped_attention" / "tokens"


def test_a_cache_that_cannot_be_written_is_told(tmp_path, source):
    with pytest.raises(UsageError, match=r"cannot be used: Not a directory. Choose a .* folder with --data-cache"):
        load(source, cache=source / "cache")


def test_a_source_that_changes_meanwhile_is_told(tmp_path, source, monkeypatch):
    def change(*arguments):
        build.build(*arguments)
        source.write_bytes(lines(["three"]))

    monkeypatch.setattr(cache, "build", change)
    with pytest.raises(UsageError, match=r"x.jsonl changed while it was being tokenised"):
        load(source, cache=tmp_path / "cache")
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


STUCK = """
import pathlib, sys, time
from striped_attention.data import cache
from tests.test_data_sources import load

def build(files, encoder, folder):
    folder.with_name(f".{folder.name}.0123abcd.partial").mkdir()
    print("building", flush=True)
    time.sleep(3600)

cache.build = build
load(sys.argv[1], cache=pathlib.Path(sys.argv[2]))
"""


def waiting(call, monkeypatch):
    """Make a call in a thread; return its future as soon as it reports that it waits for another process."""
    said = threading.Event()
    monkeypatch.setattr(cache, "say", lambda text: said.set() if "waiting for it" in text else None)
    answer = concurrent.futures.ThreadPoolExecutor(1).submit(call)
    while not said.wait(0.1):
        assert not answer.done()
    return answer


def test_while_one_process_tokenises_the_others_wait(tmp_path, source, monkeypatch):
    go_on, entered, builders = threading.Event(), threading.Event(), []

    def slow(*arguments):
        builders.append(threading.get_ident())
        entered.set()
        go_on.wait()
        return build.build(*arguments)

    monkeypatch.setattr(cache, "build", slow)
    call = lambda: load(source, cache=tmp_path / "cache")  # noqa: E731
    first = concurrent.futures.ThreadPoolExecutor(1).submit(call)
    entered.wait()
    second = waiting(call, monkeypatch)
    go_on.set()
    assert first.result().fingerprint == second.result().fingerprint
    assert len(builders) == 1


def test_when_the_process_that_tokenises_is_killed_another_one_does_it(tmp_path, source, monkeypatch):
    arguments = [sys.executable, "-c", STUCK, str(source), str(tmp_path / "cache")]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "building\n"
        answer = waiting(lambda: load(source, cache=tmp_path / "cache"), monkeypatch)
        process.kill()
    assert answer.result().tokens.tolist() == [*b"one", 256, *b"two", 256]
    assert not list((tmp_path / "cache").glob(".*"))


@pytest.fixture
def made(tmp_path, source):
    """A folder written by `striped tokenize`."""
    tokenizer = write_tokenizer(tmp_path / "tokenizer.json", {"one": 0, "two": 1, "</s>": 2, "[UNK]": 3})
    (tmp_path / "tokenizer_config.json").write_text("{}")
    arguments = ["tokenize", source, source, "--tokenizer", tokenizer, "--output", tmp_path / "made"]
    assert cli.main([*map(str, arguments)]) == 0
    return tmp_path / "made"


def test_striped_tokenize_says_what_it_found_and_keeps_the_tokenizer(made, tmp_path, capsys):
    corpus = load(made)
    assert corpus.tokens.tolist() == [0, 2, 1, 2] * 2
    assert corpus.tokenizer == made / "tokenizer.json"
    assert (made / "tokenizer_config.json").read_text() == "{}"
    assert corpus.notes(50) == [f"{made}: 4 documents, 8 tokens."]
    assert load(made, tokenizer=tmp_path / "tokenizer.json").tokens.tolist() == corpus.tokens.tolist()
    assert not list(tmp_path.glob(".*"))


def change(folder, **values):
    """Change values in meta.json; None removes a key."""
    said = json.loads((folder / "meta.json").read_text()) | values
    said = {key: value for key, value in said.items() if value is not None or key not in values}
    (folder / "meta.json").write_text(json.dumps(said))


def test_tokens_of_a_version_without_a_checksum_of_meta_json_are_read(made):
    change(made, check=None)
    assert load(made).tokens.tolist() == [0, 2, 1, 2] * 2


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: os.truncate(folder / "tokens.bin", 8), "tokens.bin has 8 bytes, not 16"),
        (lambda folder: (folder / "starts.bin").unlink(), "starts.bin has no bytes, not 32"),
        (
            lambda folder: (folder / "tokens.bin").write_bytes(bytes(16)),
            "tokens.bin is not what was written, at byte 0",
        ),
        (lambda folder: (folder / "checks.bin").write_bytes(bytes(8)), "checks.bin is not what was written"),
        (lambda folder: (folder / "meta.json").write_text("{"), "meta.json cannot be read"),
        (lambda folder: (folder / "meta.json").unlink(), "made is damaged: meta.json cannot be read"),
        (lambda folder: change(folder, end=1), "meta.json is not what was written"),
        (lambda folder: change(folder, check=None, dtype="<u4x"), "meta.json is not what was written"),
        (lambda folder: change(folder, check=None, vocabulary="a"), "meta.json is not what was written"),
        (lambda folder: change(folder, check=None, sizes=[]), "meta.json (cannot be read|is not what was written)"),
        (
            lambda folder: (folder / "meta.json").write_text('{"format": "striped_attention tokens 0"}'),
            "another version",
        ),
    ],
)
def test_a_damaged_folder_of_tokens_is_refused(made, damage, message):
    damage(made)
    with pytest.raises(UsageError, match=message) as caught:
        load(made)
    assert "\n" not in str(caught.value)


def test_damage_far_inside_of_a_large_file_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "BLOCK", 64)
    monkeypatch.setattr(store, "LOOKS", 1000)
    corpus = load(written(tmp_path / "x.jsonl", lines(["x" * 1000])), cache=tmp_path / "cache")
    path = pathlib.Path(corpus.tokens.filename)
    content = bytearray(path.read_bytes())
    content[1500] ^= 1
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"tokens.bin is not what was written, at byte 1,472 or after"):
        store.open_store(path.parent)


def test_damage_in_the_cache_is_told_and_mended(tmp_path, source, capsys):
    corpus = load(source, cache=tmp_path / "cache")
    path = pathlib.Path(corpus.tokens.filename)
    whole = path.read_bytes()
    del corpus
    path.write_bytes(whole[:-1])
    assert load(source, cache=tmp_path / "cache").tokens.tolist() == [*b"one", 256, *b"two", 256]
    assert f"{path.parent} is damaged and will be rebuilt." in capsys.readouterr().out
    assert path.read_bytes() == whole


def test_tokens_of_another_tokenizer_or_model_are_refused(made, tmp_path):
    other = write_tokenizer(tmp_path / "other.json", {"one": 1, "two": 0, "</s>": 2, "[UNK]": 3})
    with pytest.raises(UsageError, match=r"made was tokenised with another tokenizer, not with .*other.json"):
        load(made, tokenizer=other)
    with pytest.raises(UsageError, match="made needs a vocabulary of at least 4, but the model's is 3"):
        load(made, vocabulary=3)
    with pytest.raises(UsageError, match=r"must use the same tokenizer, but .*made and .*x.jsonl differ"):
        load(made, tmp_path / "x.jsonl")
    with pytest.raises(UsageError, match="--end-token is for"):
        load(made, end=2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x.jsonl", "--output", "made"], "--output made is not empty"),
        (["made", "--output", "new"], "made holds tokens already. Give it to striped train"),
        (["nothing", "--output", "new"], "nothing does not exist"),
        (["--output", "new"], "striped tokenize needs a source"),
        (["x.jsonl", "--output", "new", "--text-column", "body"], "has no column 'body'; its columns are id, text"),
        (["x.jsonl", "--output", "x.jsonl/new"], "cannot be written to x.jsonl: File exists"),
    ],
)
@pytest.mark.usefixtures("made")
def test_striped_tokenize_refuses_with_one_clear_line(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["tokenize", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "new").exists()


def test_a_folder_of_the_user_and_the_work_of_others_are_left_alone(tmp_path, source, capsys):
    (tmp_path / "made.partial").mkdir()
    (tmp_path / "made.partial" / "mine.txt").write_text("mine")
    other = tmp_path / ".made.0123abcd.partial"
    other.mkdir()
    assert cli.main(["tokenize", str(source), "--output", str(tmp_path / "made")]) == 0
    assert (tmp_path / "made.partial" / "mine.txt").read_text() == "mine"
    assert f"{other} is incomplete" in capsys.readouterr().out
    assert load(tmp_path / "made").size == 8
    assert sorted(tmp_path.glob(".*")) == [other]


@pytest.fixture
def _python_s_own_ctrl_c():
    """Restore Python's handler of Ctrl-C: a shell that starts the tests in the background makes them ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_python_s_own_ctrl_c")
@pytest.mark.parametrize("where", ["reading", "a callback that drops exceptions"])
def test_ctrl_c_stops_tokenising_and_leaves_nothing(tmp_path, monkeypatch, capsys, where):
    content = lines(["text"] * 20)
    seen = []

    def encode(self, documents, encode=encoder.Encoder.encode):
        seen.append(len(documents))
        if len(seen) == 2:
            with contextlib.suppress(KeyboardInterrupt) if "drops" in where else contextlib.nullcontext():
                signal.raise_signal(signal.SIGINT)
        return encode(self, documents)

    monkeypatch.setattr(encoder.Encoder, "encode", encode)
    monkeypatch.setattr(build, "DOCUMENTS", 2)
    path = written(tmp_path / "x.jsonl", content)
    assert cli.main(["tokenize", str(path), "--output", str(tmp_path / "made")]) == 130
    assert capsys.readouterr().err == "striped: stopped by Ctrl-C.\n"
    assert len(seen) == 2
    assert list(tmp_path.iterdir()) == [path]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
