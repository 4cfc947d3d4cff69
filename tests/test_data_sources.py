"""Data sources: the same documents give the same batches in every format; bad input is counted or rejected."""

import functools
import gzip
import json

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from striped_attention import cli, data
from striped_attention.data import records
from striped_attention.errors import UsageError
from striped_attention.training.config import TrainConfig
from tests.test_train_data import write_tokenizer

TEXTS = ["The first document.\n", "Ἐν ἀρχῇ ἦν ὁ λόγος, ", "x", "a\nlonger\tone " * 40, "", "the last"]


def load(*sources, vocabulary=320, tokenizer=None, end=None, cache=None, **columns):
    columns = data.Columns(**columns)
    return data.load([str(source) for source in sources], tokenizer, end, vocabulary, columns, cache)


def folder_of(path, names, contents):
    path.mkdir()
    for name, content in zip(names, contents, strict=True):
        (path / name).write_bytes(content)
    return path


def lines(texts, column="text"):
    records = [{"id": i, column: text} for i, text in enumerate(texts)]
    return "".join(json.dumps(r, ensure_ascii=i % 2 == 0) + "\n" for i, r in enumerate(records)).encode()


def array(texts, indent=2):
    """Return one JSON array of records, with a byte order mark as Windows writes it."""
    text = json.dumps([{"id": i, "text": text} for i, text in enumerate(texts)], indent=indent, ensure_ascii=False)
    return b"\xef\xbb\xbf" + text.encode()


def zst(content):
    return pa.compress(content, codec="zstd", asbytes=True)


def table(texts):
    return pa.table({"id": range(len(texts)), "text": texts})


def parquet(path, texts):
    pyarrow.parquet.write_table(table(texts), path, row_group_size=2)
    return path


def arrow(path, texts, stream):
    make = pa.ipc.new_stream if stream else pa.ipc.new_file
    with make(path, table(texts).schema) as writer:
        for batch in table(texts).to_batches(max_chunksize=2):
            writer.write_batch(batch)
    return path


def written(path, content):
    path.write_bytes(content)
    return path


def saved_dataset(path, texts):
    datasets.Dataset.from_dict({"id": range(len(texts)), "text": texts}).save_to_disk(path, num_shards=2)
    return path


def tokenised(path, texts):
    source = written(path / "x.jsonl", lines(texts))
    assert cli.main(["tokenize", str(source), "--output", str(path / "tokens")]) == 0
    return path / "tokens"


def text_folder(path, texts, pack=bytes, suffix=""):
    return folder_of(path / "t", [f"{i}.txt{suffix}" for i in range(len(texts))], [pack(t.encode()) for t in texts])


KINDS = {
    "text": text_folder,
    "text.gz": functools.partial(text_folder, pack=gzip.compress, suffix=".gz"),
    "text.zst": functools.partial(text_folder, pack=zst, suffix=".zst"),
    "jsonl": lambda path, texts: written(path / "x.jsonl", lines(texts)),
    "jsonl.gz": lambda path, texts: written(path / "x.jsonl.gz", gzip.compress(lines(texts))),
    "jsonl.zst": lambda path, texts: written(path / "x.jsonl.zst", zst(lines(texts[:3])) + zst(lines(texts[3:]))),
    "one array": lambda path, texts: written(path / "x.json", array(texts)),
    "one array.gz": lambda path, texts: written(path / "x.json.gz", gzip.compress(array(texts, indent=None))),
    "pattern": lambda path, texts: [
        parquet(folder_of(path / "hub", ["test-0.jsonl"], [lines(["held out"])]) / "train-0.parquet", texts[:3]),
        parquet(path / "hub" / "train-1.parquet", texts[3:]),
    ][0].with_name("train-*"),
    "json.gz": lambda path, texts: written(path / "x.json.gz", gzip.compress(lines(texts))),
    "parquet": lambda path, texts: parquet(path / "x.parquet", texts),
    "arrow file": lambda path, texts: arrow(path / "x.arrow", texts, stream=False),
    "arrow stream": lambda path, texts: arrow(path / "x.arrow", texts, stream=True),
    "datasets": lambda path, texts: saved_dataset(path / "saved", texts),
    "shards": lambda path, texts: folder_of(
        path / "s", ["0.jsonl", "1.jsonl.gz"], [lines(texts[:2]), gzip.compress(lines(texts[2:]))]
    ),
    "parquet shards": lambda path, texts: (
        [
            parquet(folder_of(path / "p", [], []) / "a.parquet", texts[:3]),
            parquet(path / "p" / "b.parquet", texts[3:]),
        ][0].parent
    ),
    "striped tokenize": tokenised,
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_source_gives_the_batches_of_plain_text(tmp_path, kind):
    corpus = load(KINDS[kind](tmp_path, TEXTS))
    wanted = [token for text in TEXTS if text for token in [*text.encode(), 256]]
    assert corpus.tokens.tolist() == wanted
    assert isinstance(corpus.tokens, np.memmap)
    ended = data.Corpus(np.array(wanted), 256, 320, "documents that the end token tells apart")
    for place in (0, 3):
        for found, plain in zip(*(data.read(c, place, range(3), 50, seed=1) for c in (corpus, ended)), strict=True):
            np.testing.assert_array_equal(found, plain)
    assert (corpus.counts.documents, corpus.counts.empty, corpus.counts.bad) == (5, 1, 0)


def test_documents_may_contain_the_end_token(tmp_path):
    path = write_tokenizer(tmp_path / "tokenizer.json", {"a": 0, "b": 1, "</s>": 2, "[UNK]": 3, "x": 4})
    tokenizer = json.loads(path.read_text())
    tokenizer["added_tokens"] = [dict(id=2, content="</s>", special=True, normalized=False)]
    tokenizer["added_tokens"][0] |= dict(single_word=False, lstrip=False, rstrip=False)
    path.write_text(json.dumps(tokenizer))
    source = written(tmp_path / "x.jsonl", lines(["a </s> b", "b </s>", "a"]))
    corpus = load(source, tokenizer=path)
    assert corpus.tokens.tolist() == [0, 2, 1, 2, 1, 2, 0, 2], "no end token is added after an existing one"
    batch = data.rows_in_order(corpus, 0, 1, 7)
    assert batch.segments.tolist() == [[0, 0, 0, 0, 1, 1, 2]]
    assert batch.weights.tolist() == [[1, 1, 1, 0, 1, 0, 1]]


def test_the_tokenizers_special_tokens_are_added_and_its_config_names_the_end(tmp_path):
    import tokenizers

    path = write_tokenizer(tmp_path / "tokenizer.json", {"a": 0, "<s>": 1, "</s>": 2, "[UNK]": 3, "<stop>": 4})
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save(str(path))
    source = written(tmp_path / "x.jsonl", lines(["a a", "a"]))
    assert load(source, tokenizer=path).tokens.tolist() == [1, 0, 0, 2, 1, 0, 2], "</s> is recognised by its name"
    for name, said, end in (
        ("config.json", {"eos_token_id": [3, 4]}, 3),
        ("generation_config.json", {"eos_token_id": 4}, 4),
        ("tokenizer_config.json", {"eos_token": {"content": "<s>"}}, 1),
    ):
        (tmp_path / name).write_text(json.dumps(said))
        assert load(source, tokenizer=path).tokens.tolist() == [1, 0, 0, end, 1, 0, end]
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    message = r"tokenizer_config.json names '<end>' as the end-of-text token, but .* has no such"
    with pytest.raises(UsageError, match=message):
        load(source, tokenizer=path)


def test_large_vocabularies_take_four_bytes(tmp_path):
    path = write_tokenizer(tmp_path / "tokenizer.json", {"a": 70_000, "</s>": 2, "[UNK]": 3})
    corpus = load(written(tmp_path / "x.jsonl", lines(["a a"])), tokenizer=path, vocabulary=80_000)
    assert (corpus.tokens.tolist(), corpus.tokens.dtype) == ([70_000, 70_000, 2], np.dtype("<u4"))


def test_what_was_found_is_counted_and_said(tmp_path):
    content = (
        lines(["good"] * 300) + b'{"text": "cut sh\n' + b'{"text": 7}\n' + b'{"text": "\xff"}\n' + lines(["", "x" * 99])
    )
    corpus = load(written(tmp_path / "x.jsonl", b"\n" + content))
    assert corpus.notes(50) == [
        f"{tmp_path / 'x.jsonl'}: 301 documents, 1,600 tokens; 1 empty document left out; 1 document longer than a "
        f"sequence of 50, split over several rows.",
        f"Warning: 3 of 305 lines of {tmp_path / 'x.jsonl'} are bad and were left out; the first is "
        f"{tmp_path / 'x.jsonl'}, line 301: it is not JSON.",
    ]


def test_a_bad_row_of_a_table_is_left_out(tmp_path):
    table = pa.table({"text": pa.array([b"good"] * 200 + [b"\xff", None] + [b"good"], pa.binary())})
    invalid = pa.Table.from_arrays([table["text"].combine_chunks().view(pa.string())], ["text"])
    pyarrow.parquet.write_table(invalid, tmp_path / "x.parquet")
    counts = load(tmp_path / "x.parquet").counts
    assert (counts.documents, counts.bad, counts.empty, counts.rows) == (201, 1, 1, 203)
    assert counts.example.endswith("row 201: it is not UTF-8")


def test_null_is_an_empty_document(tmp_path):
    path = written(tmp_path / "x.jsonl", b'{"text": "ab"}\n' + b'{"text": null}\n' * 200)
    counts = load(path).counts
    assert (counts.documents, counts.empty, counts.bad) == (1, 200, 0)
    assert "200 empty documents left out" in load(path).notes(50)[0]


def test_an_array_is_read_in_parts(tmp_path, monkeypatch):
    """Records may be longer than the chunks that are read; an element that is not an object is a bad line."""
    monkeypatch.setattr(records, "CHUNK", 7)
    texts = ['a ] , [ " \\ ' * 5, "ü" * 30, "", "x"]
    content = json.dumps([{"text": text} for text in texts] * 60 + [12], ensure_ascii=False).encode()
    corpus = load(written(tmp_path / "x.json", content))
    assert corpus.tokens.tolist() == [token for text in texts if text for token in [*text.encode(), 256]] * 60
    assert (corpus.counts.empty, corpus.counts.bad) == (60, 1)
    assert corpus.counts.example.endswith("line 241: it is not a JSON object")
    with pytest.raises(UsageError, match="is empty"):
        load(written(tmp_path / "y.json", b" [\n] "))


def test_other_json_is_text_and_so_is_every_json_among_text(tmp_path):
    assert load(written(tmp_path / "x.json", b'{"a": [1]}')).tokens.tolist() == [*b'{"a": [1]}', 256]
    folder = folder_of(tmp_path / "program", ["a.py", "b.json"], [b"x = 1", b"[1]"])
    assert load(folder).tokens.tolist() == [*b"x = 1", 256, *b"[1]", 256]


@pytest.mark.parametrize("beside", ["README.md", "LICENSE", ".gitattributes", "dataset_infos.json", ".hidden.parquet"])
def test_what_lies_beside_a_dataset_is_not_read(tmp_path, beside):
    folder = folder_of(tmp_path / "hub", [beside, "x.jsonl"], [b"[not data]", lines(["ab"])])
    assert load(folder).tokens.tolist() == [*b"ab", 256]
    assert load(folder / "*").tokens.tolist() == [*b"ab", 256]


def test_a_readme_is_data_among_text(tmp_path):
    assert load(folder_of(tmp_path / "t", ["README.md", "x.txt"], [b"a", b"b"])).tokens.tolist() == [97, 256, 98, 256]


SPLITS = {
    ("train-00000-of-00001.parquet", "validation-00000-of-00001.parquet"): "'{}/train*' (with the quotes)",
    ("data/dev.jsonl", "data/test.jsonl"): "'{}/data/dev*' (with the quotes)",
    ("en/c4-train.0.json.gz", "en/c4-validation.0.json.gz"): "'{}/en/c4-train*' (with the quotes)",
    ("test/0.jsonl", "train/0.jsonl", "train/1.jsonl"): "{}/train",
    ("train.txt", "valid.txt"): "'{}/train*' (with the quotes)",
}


@pytest.mark.parametrize("names", SPLITS)
def test_a_folder_with_several_splits_is_refused_and_what_it_says_to_give_is_read(tmp_path, names):
    hub = tmp_path / "hub"
    for name in names:
        (hub / name).parent.mkdir(parents=True, exist_ok=True)
        content = lines([name])
        if name.endswith(".parquet"):
            parquet(hub / name, [name])
        else:
            (hub / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else name.encode())
            if name.endswith(".jsonl"):
                (hub / name).write_bytes(content)
    with pytest.raises(UsageError, match="hub holds several splits: ") as caught:
        load(hub)
    advice = SPLITS[names].format(hub)
    assert str(caught.value).endswith(f"Give the files of one of them, like {advice}.")
    corpus = load(advice.removesuffix(" (with the quotes)").strip("'"))
    read = bytes(token for token in corpus.tokens.tolist() if token < 256).decode()
    chosen = [name for name in names if name in read]
    assert chosen
    assert len({"train" in name for name in chosen}) == 1
    assert len(chosen) < len(names)


@pytest.mark.parametrize("names", [("train.py", "test.py"), ("train-a.jsonl", "b.jsonl"), ("latest.jsonl", "c.jsonl")])
def test_other_folders_have_no_splits(tmp_path, names):
    contents = [lines([name]) if name.endswith("l") else name.encode() for name in names]
    assert load(folder_of(tmp_path / "x", names, contents)).counts.documents == 2


@pytest.mark.parametrize("stream", [False, True])
def test_a_string_of_an_arrow_file_that_is_not_utf8_is_a_bad_row(tmp_path, stream):
    column = pa.array([b"good"] * 200 + [b"\xff"], pa.binary()).view(pa.string())
    table = pa.Table.from_arrays([column], ["text"])
    with (pa.ipc.new_stream if stream else pa.ipc.new_file)(tmp_path / "x.arrow", table.schema) as writer:
        writer.write_table(table)
    counts = load(tmp_path / "x.arrow").counts
    assert (counts.documents, counts.bad) == (200, 1)
    assert counts.example.endswith("row 201: it is not UTF-8")


def test_a_tokenizer_that_fails_is_named(tmp_path):
    import tokenizers

    model = tokenizers.models.WordLevel({"</s>": 0, "the": 1}, unk_token="<unk>")  # not in the vocabulary
    tokenizers.Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UsageError, match=r"tokenizer.json cannot tokenise the data: WordLevel error"):
        load(written(tmp_path / "x.txt", b"another"), tokenizer=tmp_path / "tokenizer.json")


def cut(path, part=0.5):
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * part)])
    return path


def long_texts():
    return ["".join(map(chr, np.random.default_rng(i).integers(32, 120, 3000))) for i in range(20)]


def splits(path):
    one = datasets.Dataset.from_dict({"text": ["a"]})
    datasets.DatasetDict(train=one, test=one).save_to_disk(path / "both")
    return path / "both"


def incomplete(path):
    saved_dataset(path / "saved", TEXTS)
    next((path / "saved").glob("*-00001-*")).unlink()
    return path / "saved"


def whole_stream_but_its_end(path):
    return written(path / "x.arrow", arrow(path / "y.arrow", TEXTS, stream=True).read_bytes()[:-8])


def with_offset_beyond_the_end(path, stream):
    content = bytearray(arrow(path / "x.arrow", ["a" * 999, "bcd", "e"], stream).read_bytes())
    place = content.index(np.array([0, 999, 1002], "<i4").tobytes())
    content[place + 4 : place + 8] = np.array([2**30], "<i4").tobytes()
    return written(path / "x.arrow", content)


def two_columns_of_one_name(path):
    twice = pa.Table.from_arrays([pa.array(["a"])] * 2, ["text", "text"])
    pyarrow.parquet.write_table(twice, path / "x.parquet")
    return path / "x.parquet"


BAD = {
    r"hub holds the weights of a model \(model.safetensors\), not data": lambda path: folder_of(
        path / "hub", ["model.safetensors", "pytorch_model.bin"], [b"x", b"x"]
    ),
    r"x.parquet must have one column 'text', but has 2": two_columns_of_one_name,
    r"x.arrow is cut short or damaged \(.*offset": lambda path: with_offset_beyond_the_end(path, stream=False),
    r"x.arrow is cut short or damaged \(offset": lambda path: with_offset_beyond_the_end(path, stream=True),
    r"x.parquet has no column 'text'; its columns are id, body. Choose one with --text-column": lambda path: [
        pyarrow.parquet.write_table(pa.table({"id": [1], "body": ["x"]}), path / "x.parquet"),
        path / "x.parquet",
    ][1],
    r"x.jsonl, line 1, has no column 'text'; its columns are id, body": lambda path: written(
        path / "x.jsonl", lines(["x"], "body")
    ),
    r"x.parquet is cut short or damaged": lambda path: cut(parquet(path / "x.parquet", TEXTS)),
    r"x.jsonl.gz is cut short or damaged": lambda path: cut(
        written(path / "x.jsonl.gz", gzip.compress(lines(long_texts())))
    ),
    r"x.jsonl.zst is cut short or damaged": lambda path: cut(written(path / "x.jsonl.zst", zst(lines(long_texts())))),
    r"x.txt.zst is cut short or damaged": lambda path: cut(written(path / "x.txt.zst", zst(b"text" * 99))),
    r"x.arrow is cut short or damaged \(": lambda path: cut(arrow(path / "x.arrow", TEXTS, stream=False)),
    r"x.arrow is cut short or damaged \(it lacks the end mark": lambda path: whole_stream_but_its_end(path),
    r"by its name .*x.parquet must be parquet, but it is gzip": lambda path: written(
        path / "x.parquet", gzip.compress(b"x")
    ),
    r"by its name .*x.jsonl must be json lines, but it is parquet": lambda path: written(
        path / "x.jsonl", parquet(path / "y.parquet", TEXTS).read_bytes()
    ),
    r"by its name .*x.jsonl.gz must be gzip, but it is something else": lambda path: written(
        path / "x.jsonl.gz", lines("x")
    ),
    r"x.json is cut short or damaged \(its array does not end": lambda path: cut(
        written(path / "x.json", array(long_texts()))
    ),
    r"x.json is cut short or damaged \(it continues after its array\)": lambda path: written(
        path / "x.json", array(["a"]) + b"\n[]"
    ),
    r"x.json is cut short or damaged \(there is no comma": lambda path: written(
        path / "x.json", b'[{"text": "a"} {"text": "b"}]'
    ),
    r"x.json, line 1, has no column 'text'; its columns are a": lambda path: written(path / "x.json", b'[{"a": 1}]'),
    r"x.parquet.gz is parquet compressed with gzip": lambda path: written(path / "x.parquet.gz", gzip.compress(b"x")),
    r"x.parquet is empty and so no valid parquet file": lambda path: written(path / "x.parquet", b""),
    r"x.jsonl is empty": lambda path: written(path / "x.jsonl", b""),
    r"x.jsonl is empty\. give": lambda path: written(path / "x.jsonl", lines(["", ""])),
    r"must hold files of one kind, but it holds parquet \(b.parquet\), text \(notes.md\)": lambda path: (
        [
            written(path / "notes.md", b"hello"),
            parquet(path / "b.parquet", TEXTS),
        ][0].parent
    ),
    r"both holds several splits: train, test. give one of them, like .*both/train": splits,
    r"saved lacks data-00001-of-00002.arrow, which state.json lists": incomplete,
    r"at most 1% of the lines of .*x.jsonl may be bad, but 2 of 102 are; .* line 101: it is not a json": lambda path: (
        written(path / "x.jsonl", lines(["good"] * 100) + b"7\n[8]\n")
    ),
    r"the first 100 are not; the first is .*x.jsonl, line 1: it is not json": lambda path: written(
        path / "x.jsonl", b"no JSON\n" * 1000
    ),
}


@pytest.mark.parametrize("message", BAD)
def test_what_cannot_be_read_gets_one_clear_line(tmp_path, message):
    (tmp_path / "here").mkdir()
    with pytest.raises(UsageError, match=f"(?i){message}") as caught:
        load(BAD[message](tmp_path / "here"), cache=tmp_path / "cache")
    assert "\n" not in str(caught.value)
    assert [path.suffix for path in (tmp_path / "cache").glob("*")] in ([], [".lock"]), "no partial files remain"


def test_options_without_a_use_are_refused(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(50))
    text = written(tmp_path / "x.txt", b"hello")
    with pytest.raises(UsageError, match="--text-column is for JSON lines, Parquet and Arrow, but --data holds tokens"):
        load(tmp_path / "x.npy", text="body")
    with pytest.raises(UsageError, match=r"--loss-column is for JSON lines, .* but .*x.txt is text by its name"):
        load(text, loss="spans")
    with pytest.raises(UsageError, match="--chat-column needs --tokenizer"):
        load(text, chat="messages")
    with pytest.raises(UsageError, match="Leave out --text-column and --loss-column"):
        load(text, chat="messages", text="text")


def test_options_of_training_and_held_out_data_go_together(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(50))
    records, plain = written(tmp_path / "x.jsonl", lines(["ab"], "body")), written(tmp_path / "x.txt", b"hello")
    tokenizer = write_tokenizer(tmp_path / "tokenizer.json", {"ab": 0, "</s>": 1, "hello": 2, "[UNK]": 3})
    options = dict(tokenizer=tokenizer, end_token=1, text_column="body", data_cache=tmp_path / "cache")

    def both(one, other, **more):
        config = TrainConfig(data=(str(one),), validation=(str(other),), **(options | more))
        config.check(config.data)
        config.check(config.validation)
        return config.load(config.data).size, config.load(config.validation).size

    assert both(tmp_path / "x.npy", records) == (50, 2)
    assert both(records, tmp_path / "x.npy") == (2, 50)
    assert both(records, plain, end_token=None) == (2, 2)
    assert both(plain, records, end_token=None) == (2, 2)
    with pytest.raises(UsageError, match="--data and --validation hold tokens already, as"):
        both(tmp_path / "x.npy", tmp_path / "x.npy")
    with pytest.raises(UsageError, match="--end-token is for"):
        both(records, plain)
    with pytest.raises(UsageError, match=r"--text-column is for .* but .*x.txt is text by its name"):
        both(tmp_path / "x.npy", plain)


def test_a_check_finds_what_can_be_found_without_reading(tmp_path):
    def refuse(message, *sources, **options):
        config = TrainConfig(data=tuple(map(str, sources)), **options)
        with pytest.raises(UsageError, match=message):
            config.check(config.data)

    tokens, records = tokenised(tmp_path, TEXTS), tmp_path / "x.jsonl"
    TrainConfig(data=(str(tokens), str(records))).check((str(tokens), str(records)))
    tokenizer = write_tokenizer(tmp_path / "tokenizer.json", {"ab": 0, "</s>": 1, "[UNK]": 2})
    refuse("tokens was tokenised as bytes, without a tokenizer, not with", tokens, own_tokenizer=tokenizer)
    refuse("--chat-column needs --tokenizer", records, chat_column="messages")
    refuse("Chat needs a template", records, chat_column="messages", tokenizer=tokenizer)
    refuse("--end-token is for", records, end_token=3)
    refuse("x.jsonl, line 1, has no column 'body'", records, text_column="body")
    refuse("x.parquet has no column 'body'", parquet(tmp_path / "x.parquet", TEXTS), text_column="body")
    refuse("x.parquet is cut short or damaged", cut(tmp_path / "x.parquet", 0.9))
    refuse("x.arrow is cut short or damaged", cut(arrow(tmp_path / "x.arrow", TEXTS, stream=True), 0.9))
    (tokens / "tokens.bin").write_bytes(b"")
    refuse("tokens is damaged: tokens.bin has 0 bytes", tokens)


def test_the_text_may_be_in_any_column(tmp_path):
    assert load(written(tmp_path / "x.jsonl", lines(["ab"], "body")), text="body").tokens.tolist() == [*b"ab", 256]


def test_without_pyarrow_its_error_says_how_to_get_it(tmp_path, monkeypatch):
    parquet(tmp_path / "x.parquet", TEXTS)
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(UsageError, match=r"needs the package pyarrow: pip install 'striped-attention\[train\]'"):
        load(tmp_path / "x.parquet")
