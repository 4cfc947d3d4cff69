"""Data: documents are packed end to end, each target is the next token, and every token is read exactly once."""

import bz2
import dataclasses
import gzip
import io
import json
import lzma
import struct
import tarfile
import zipfile
import zlib

import numpy as np
import pytest

import striped_attention as sa
from striped_attention import cli, data
from striped_attention.errors import UsageError
from striped_attention.models.config import PRESETS
from striped_attention.training import start
from striped_attention.training.config import TrainConfig


def load(path, tokenizer=None, end=None, vocabulary=320):
    return data.load(path, tokenizer, end, vocabulary)


def test_the_standard_library_is_a_corpus():
    corpus = load(None)
    text = bytes(corpus.tokens[corpus.tokens < 256][:1_000_000].astype(np.uint8))
    assert len(corpus.tokens) > 5_000_000
    assert b"import" in text
    assert np.sum(corpus.tokens == corpus.end) > 300, "one per file"


def test_files_of_a_folder_are_documents_in_order(tmp_path):
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.txt").write_text("first")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / ".hidden").write_text("no")
    corpus = load(tmp_path)
    assert corpus.tokens.tolist() == [*b"first", 256, *b"second", 256]


def test_targets_are_the_next_tokens_of_the_same_document():
    corpus = data.Corpus(np.array([1, 2, 9, 3, 9, 4, 5, 6, 7]), 9, 10, "")
    batch = data.read(corpus, 0, range(1), 8, seed=0)
    assert batch.tokens.tolist() == [[1, 2, 9, 3, 9, 4, 5, 6]]
    assert batch.targets.tolist() == [[2, 9, 3, 9, 4, 5, 6, 7]]
    assert batch.weights.tolist() == [[1, 1, 0, 1, 0, 1, 1, 1]]
    assert batch.segments.tolist() == [[0, 0, 0, 1, 1, 2, 2, 2]]
    assert batch.visible_pairs() == 6 + 3 + 6
    assert batch.visible_pairs(2) == 5 + 3 + 5
    seen = sa.documents(batch.segments).dense(8) & sa.sliding_window(3).dense(8)
    assert batch.visible_pairs(3) == seen.sum()


def test_every_row_is_drawn_once_a_pass_and_passes_differ():
    corpus = data.Corpus(np.arange(101), None, 1000, "")
    firsts = [int(data.read(corpus, place, range(1), 10, seed=3).tokens[0, 0]) for place in range(20)]
    assert sorted(firsts[:10]) == sorted(firsts[10:]) == list(range(0, 100, 10))
    assert firsts[:10] != firsts[10:]


def test_a_batch_depends_on_its_place_alone():
    corpus = data.Corpus(np.arange(1001), None, 2000, "")
    whole = data.read(corpus, 6, range(4), 10, seed=1)
    part = data.read(corpus, 7, range(1, 3), 10, seed=1)
    assert whole.tokens[2:].tolist() == part.tokens.tolist()
    other = data.read(corpus, 6, range(4), 10, seed=2)
    assert whole.tokens.tolist() != other.tokens.tolist()


@pytest.mark.parametrize(
    ("suffix", "vocabulary", "dtype"), [("npy", 300, "int64"), ("bin", 300, "<u2"), ("bin", 70_000, "<u4")]
)
def test_tokens_are_read_where_they_lie(tmp_path, suffix, vocabulary, dtype):
    path = tmp_path / f"tokens.{suffix}"
    tokens = np.arange(250).astype(dtype)
    np.save(path, tokens) if suffix == "npy" else tokens.tofile(path)
    corpus = load(path, end=5, vocabulary=vocabulary)
    assert isinstance(corpus.tokens, np.memmap)
    assert corpus.tokens.tolist() == list(range(250))
    assert data.read(corpus, 0, range(1), 249, 0).segments[0, :8].tolist() == [0] * 6 + [1] * 2


def test_a_tokenizer_json_makes_the_tokens(tmp_path):
    path = write_tokenizer(tmp_path / "tokenizer.json", {"hello": 0, "world": 1, "</s>": 2, "[UNK]": 3})
    (tmp_path / "text.txt").write_text("hello world hello")
    corpus = load(tmp_path / "text.txt", tokenizer=path, vocabulary=4)
    assert corpus.tokens.tolist() == [0, 1, 0, 2]


def test_a_tokenizers_truncation_and_padding_are_for_short_texts(tmp_path):
    import tokenizers

    path = write_tokenizer(tmp_path / "tokenizer.json", {"hello": 0, "</s>": 2, "[UNK]": 3})
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(path))
    (tmp_path / "text.txt").write_text("hello " * 100)
    assert load(tmp_path / "text.txt", tokenizer=path).tokens.tolist() == [0] * 100 + [2]


def write_tokenizer(path, vocabulary):
    import tokenizers

    model = tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(path))
    return path


def bad_npy(path, content):
    np.save(path / "x.npy", content)
    return dict(path=path / "x.npy")


def bad_file(path, name, content, **options):
    (path / name).write_bytes(content)
    return dict(path=path / name, **options)


def bad_tokenizer(path, content, **options):
    (path / "t.txt").write_bytes(b"hello")
    (path / "tokenizer.json").write_text(content)
    return dict(path=path / "t.txt", tokenizer=path / "tokenizer.json", **options)


BAD = {
    "does not exist": lambda path: dict(path=path / "nothing.txt"),
    "is empty": lambda path: bad_file(path, "empty.txt", b""),
    "is not a NumPy file": lambda path: bad_file(path, "x.npy", b"no numbers at all"),
    "one-dimensional": lambda path: bad_npy(path, np.zeros((2, 3), np.int32)),
    "array of integers": lambda path: bad_npy(path, np.zeros(5)),
    "not a multiple of 2": lambda path: bad_file(path, "x.bin", b"abc"),
    "looks like uint32": lambda path: bad_file(path, "x.bin", np.arange(9, dtype="<u4").tobytes()),
    "contains token 400, but the model's vocabulary is 320": lambda path: bad_npy(path, np.array([1, 400])),
    "contains token -1": lambda path: bad_npy(path, np.array([1, -1])),
    "leave out --tokenizer": lambda path: bad_file(path, "x.bin", b"abcd", tokenizer=path),
    "--end-token must be a token": lambda path: bad_file(path, "x.bin", b"abcd", end=320),
    "--end-token is for": lambda path: bad_file(path, "x.txt", b"abcd", end=3),
    "vocabulary of at least 257": lambda path: bad_file(path, "x.txt", b"abcd", vocabulary=256),
    "not a Hugging Face tokenizer.json": lambda path: bad_tokenizer(path, "{}"),
    "Give one token file, not a folder": lambda path: bad_file(path, "shard.bin", b"abcd") | dict(path=path),
    "is not a file": lambda path: bad_file(path, "x.txt", b"abcd", tokenizer=path / "none.json"),
    "holds several arrays": lambda path: bad_file(path, "x.npy", several_arrays()),
}


def several_arrays():
    file = io.BytesIO()
    np.savez(file, a=np.arange(3))
    return file.getvalue()


@pytest.mark.parametrize("message", BAD)
def test_bad_data_gets_one_clear_line(tmp_path, message):
    with pytest.raises(UsageError, match=message) as caught:
        load(**BAD[message](tmp_path))
    assert "\n" not in str(caught.value)


def test_pickled_arrays_are_never_opened(tmp_path):
    np.save(tmp_path / "x.npy", np.array([{"a": 1}], object), allow_pickle=True)
    with pytest.raises(UsageError, match="is not a NumPy file of integers"):
        load(tmp_path / "x.npy")


def test_a_tokenizer_larger_than_the_vocabulary_is_refused(tmp_path):
    path = write_tokenizer(tmp_path / "tokenizer.json", {"a": 0, "</s>": 1, "[UNK]": 2, "b": 3})
    (tmp_path / "text.txt").write_text("a b")
    with pytest.raises(UsageError, match=r"needs a vocabulary of at least 4, but the model's is 3.*--vocabulary 4"):
        load(tmp_path / "text.txt", tokenizer=path, vocabulary=3)


def test_a_tokenizer_without_an_end_and_text_that_is_none(tmp_path):
    (tmp_path / "text.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="has no end-of-text token"):
        load(tmp_path / "text.txt", tokenizer=write_tokenizer(tmp_path / "t.json", {"[UNK]": 0}))
    with pytest.raises(UsageError, match="is UTF-16 text"):
        load(tmp_path / "text.txt", tokenizer=write_tokenizer(tmp_path / "t.json", {"[UNK]": 0, "</s>": 1}))


TEXT = b"the quick brown fox jumps over the lazy dog. " * 99


def png():
    """A PNG image of one white pixel."""
    chunk = lambda kind, data: struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))  # noqa: E731
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"\0\xff")) + chunk(b"IEND", b"")


def archive(kind):
    file = io.BytesIO()
    if kind == "zip":
        with zipfile.ZipFile(file, "w") as packed:
            packed.writestr("text.txt", TEXT)
    else:
        with tarfile.open(fileobj=file, mode="w") as packed:
            packed.addfile(tarfile.TarInfo("text.txt"))
    return file.getvalue()


def saved_array():
    file = io.BytesIO()
    np.save(file, np.arange(5))
    return file.getvalue()


# Error message by content of the file. The file's name does not give the content away.
NO_TEXT = {
    "is gzip. Unpack it first, or give it a name that ends in .gz": gzip.compress(TEXT),
    "is bzip2. Unpack it first": bz2.compress(TEXT),
    "is xz. Unpack it first": lzma.compress(TEXT),
    "is zstandard. Unpack it first, or give it a name that ends in .zst": b"\x28\xb5\x2f\xfd\x04\x00abc",
    "is a zip archive": archive("zip"),
    "is a tar archive. Unpack it first": archive("tar"),
    "is a PNG picture. Keep it out of the data": png(),
    "is a JPEG picture": b"\xff\xd8\xff\xe0\x00\x10JFIF\x00",
    "is PDF. Extract its text": b"%PDF-1.7\n1 0 obj\n",
    "is Parquet. Give it a name that ends in .parquet": b"PAR1\x15\x00\x15\x8a",
    "is a NumPy array. If it holds tokens, give it a name that ends in .npy": saved_array(),
    "is UTF-16 text. Convert it to UTF-8": "hello".encode("utf-16"),
    r"is not UTF-8 text \(byte 3\). Convert it to UTF-8": "café".encode("latin-1"),
    r"is not text \(byte 5 is 0\). Keep it out": b"hello\0world",
    "is JSON lines. Give it a name that ends in .jsonl": b'{"text": "one"}\n\n{"text": "two"}\n',
}


@pytest.mark.parametrize("message", NO_TEXT)
@pytest.mark.parametrize("where", ["file", "folder", "tokenizer"])
def test_what_is_no_text_is_refused_by_its_content(tmp_path, where, message):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b.txt").write_bytes(NO_TEXT[message])
    tokenizer = None
    if where == "tokenizer":
        (tmp_path / ".t").mkdir()
        tokenizer = write_tokenizer(tmp_path / ".t" / "tokenizer.json", {"text": 0, "</s>": 1, "[UNK]": 2})
    with pytest.raises(UsageError, match=f"By its name .*b.txt must be UTF-8 text, but it {message}") as caught:
        load(tmp_path / "b.txt" if where == "file" else tmp_path, tokenizer=tokenizer)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("riff.txt", b"RIFF is how the chapter begins"),  # as WAV files do
        ("package.json", b'{\n  "name": "x"\n}\n'),
        ("settings.json", b'{"a": 1}\n'),
        ("list.txt", b'{"a": 1}\nand then some prose\n'),
        ("numbers.txt", b"1\n2\n3\n"),
        ("greek.txt", "Ἐν ἀρχῇ ἦν ὁ λόγος".encode()),
        ("marked.txt", "\ufeffone".encode()),
    ],
)
def test_text_that_only_looks_like_something_else_is_text(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    assert load(tmp_path / name).tokens.tolist() == [*content, 256]


def test_an_end_token_that_never_occurs_is_told(tmp_path, monkeypatch):
    np.save(tmp_path / "x.npy", np.arange(250))
    assert load(tmp_path / "x.npy", end=249).warning is None
    assert load(tmp_path / "x.npy").warning is None, "no --end-token was given"
    found = load(tmp_path / "x.npy", end=250).warning
    assert found.startswith(f"--end-token 250 does not occur in {tmp_path / 'x.npy'}, so all of it counts as one")
    monkeypatch.setattr(data.raw, "LOOK", 10)
    monkeypatch.setattr(data.raw, "LOOKS", 5)  # 5 samples of 10 tokens
    assert "does not occur in the 50 sampled tokens of" in load(tmp_path / "x.npy", end=30).warning


def test_tokens_outside_the_vocabulary_and_too_few_of_them():
    with pytest.raises(UsageError, match="contains token 12, but the model's vocabulary is 10"):
        data.read(data.Corpus(np.full(20, 12), None, 10, "x.npy"), 0, range(1), 4, 0)
    with pytest.raises(UsageError, match="contains token -1"):
        data.read(data.Corpus(np.full(20, -1), None, 10, "x.npy"), 0, range(1), 4, 0)
    with pytest.raises(UsageError, match=r"x.npy holds 5 tokens, too few for one sequence of 5"):
        data.read(data.Corpus(np.zeros(5, int), None, 10, "x.npy"), 0, range(1), 5, 0)


def test_fingerprints_tell_corpora_apart():
    one, other = (data.Corpus(np.arange(n), None, 9999, "") for n in (5000, 5001))
    same = data.Corpus(np.arange(5000), None, 9999, "elsewhere")
    assert one.fingerprint == same.fingerprint != other.fingerprint
    assert json.loads(json.dumps(one.fingerprint)) == one.fingerprint


def test_rows_in_order_are_the_corpus_from_its_beginning():
    corpus = data.Corpus(np.arange(101), None, 1000, "")
    batch = data.rows_in_order(corpus, 8, 4, 10)
    assert batch.tokens[:, 0].tolist() == [80, 90, 0, 10], "the first row follows the last whole one"
    assert batch.targets[:, -1].tolist() == [90, 100, 10, 20]
    part = data.rows_in_order(corpus, 9, 2, 10)
    assert part.tokens.tolist() == batch.tokens[1:3].tolist()


def test_the_tokenizer_sets_the_vocabulary_of_a_model_from_scratch(tmp_path):
    """Rounded up to a multiple of 128, and the same when the run is resumed; --vocabulary takes precedence."""
    tokenizer = write_tokenizer(tmp_path / "tokenizer.json", {"</s>": 0, "[UNK]": 1, "far": 300})
    (tmp_path / "text.txt").write_text("far " * 900)
    config = TrainConfig(data=(str(tmp_path / "text.txt"),), tokenizer=tokenizer, checkpoint_dir=tmp_path / "run")
    begin = start.look(config).config
    assert begin.model.vocabulary == begin.record()["vocabulary"] == 384
    assert start.look(dataclasses.replace(config, vocabulary=301)).config.model.vocabulary == 301
    assert start.look(TrainConfig(preset="1b")).config.model.vocabulary == PRESETS["1b"].vocabulary
    assert cli.main(["tokenize", *config.data, "--tokenizer", str(tokenizer), "--output", str(tmp_path / "made")]) == 0
    stored = TrainConfig(data=(str(tmp_path / "made"),))
    assert start.look(stored).config.model.vocabulary == 384, "tokens come with their tokenizer"
    (tmp_path / "run").mkdir()
    (tmp_path / "run/run.json").write_text(json.dumps([{"options": begin.record()}]))
    assert start.look(dataclasses.replace(config, resume=True)).config.model.vocabulary == 384
