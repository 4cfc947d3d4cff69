"""`striped generate`, `striped import` and `striped export`, tested through the command line."""

import json
import pathlib
import re
import shutil

import numpy as np
import pytest

from striped_attention import cli
from striped_attention.errors import UsageError
from striped_attention.generation import text
from striped_attention.generation.prompts import read_prompts


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The checkpoint folder of a short `striped train` run."""
    folder = tmp_path_factory.mktemp("run")
    data = folder / "text.txt"
    data.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    command = "train --layers 2 --dim 32 --ffn 64 --heads 2 --kv-heads 1 --batch 8 --mesh data=8 --length 64"
    command += f" --steps 30 --learning-rate 1e-2 --dtype float32 --data {data}"
    assert cli.main([*command.split(), "--checkpoint-dir", str(folder / "run")]) == 0
    return folder / "run"


def generate(capsys, *arguments):
    capsys.readouterr()
    code = cli.main(["generate", *map(str, arguments)])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_striped_generate_streams_what_a_run_has_learned(trained, capsys):
    command = ("--model", trained, "--prompt", "the quick brown", "--max-tokens", 20, "--dtype", "float32")
    code, out, err = generate(capsys, *command)
    assert code == 0
    assert len(out.strip("\n")) > 5
    assert "prefill 15 tokens" in err
    assert "decode 20 tokens" in err
    for strategy in ("ring", "heads=2", "gather"):
        found = generate(capsys, *command, "--layout", "zigzag", "--chunk", 4, "--strategy", strategy)
        assert found[:2] == (0, out)
        assert f"strategy {'gather=8' if strategy == 'gather' else strategy};" in " ".join(found[2].split())


def test_prompts_of_a_file_give_lines_of_json(trained, capsys, tmp_path):
    prompts = ["the quick", "jumps over the", "a", "lazy dog. the"]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    common = ("--model", trained, "--max-tokens", 6, "--dtype", "float32", "--prompts", file)
    code, out, _ = generate(capsys, *common, "--batch", 3)
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [row["prompt"] for row in rows] == prompts
    assert [row["prompt_tokens"] for row in rows] == [len(prompt) for prompt in prompts]
    assert all(len(row["tokens"]) == row["new_tokens"] <= 6 for row in rows)
    assert [row["number"] for row in rows] == [1, 2, 3, 4]
    code, out, _ = generate(capsys, *common, "--batch", 2, "--output", tmp_path / "out.jsonl")
    assert (code, out) == (0, "")
    assert [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()] == rows
    sampled = [
        generate(capsys, *common, "--batch", batch, "--temperature", 1, "--top-p", 0.9, "--seed", 3)[1]
        for batch in (2, 3)
    ]
    assert sampled[0] == sampled[1]  # for any batch size
    assert sampled[0] != out


def test_a_prompt_through_standard_input(trained, capsys, monkeypatch):
    import io

    monkeypatch.setattr("sys.stdin", io.StringIO("the quick brown"))
    code, out, _ = generate(capsys, "--model", trained, "--max-tokens", 5, "--dtype", "float32")
    assert code == 0
    assert out.strip("\n")


def test_one_of_many_processes_asks_for_a_prompt_that_all_have(trained, capsys, monkeypatch):
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    monkeypatch.setattr("striped_attention.training.launch.connect", lambda config: None)
    code, _, err = generate(capsys, "--model", trained)
    assert code == 2
    assert "Standard input cannot be read by several processes. Give --prompt or --prompts." in err


def spaces():
    """Return a tokenizer whose tokens contain spaces, like those of Llama 2 and Mistral."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {"\u2581a": 0, "\u2581b": 1, "c": 2, "<unk>": 3}
    vocabulary |= {f"<0x{byte:02X}>": 4 + i for i, byte in enumerate("é".encode())}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return tokenizer


def test_text_comes_as_the_whole_of_it_reads():
    """Streamed text equals the decoded whole: leading spaces, multi-token characters and an incomplete last one."""
    tokenizer = spaces()
    for prompt, written in [([0], [1, 2, 4, 5, 1]), ([0, 1], [2, 1, 4]), ([2], [4, 5, 4, 5, 0]), ([0], [5, 4])]:
        stream = text.TokenStream(tokenizer, list(prompt))
        pieces = [stream.add(token) for token in written]
        whole = tokenizer.decode([*prompt, *written])
        assert tokenizer.decode(prompt) + "".join(pieces) + stream.finish() == whole
    stream = text.Bytes().stream([])
    assert [stream.add(byte) for byte in "aé".encode()[:2]] == ["a", ""]
    assert stream.finish() == "\N{REPLACEMENT CHARACTER}"


def test_bytes_that_are_no_character_do_not_stop_the_text():
    """Invalid bytes after a complete character or at the end of a prompt neither raise nor repeat any text."""
    tokenizer, broken = spaces(), "\N{REPLACEMENT CHARACTER}"
    stream = text.TokenStream(tokenizer, [0])
    assert [stream.add(token) for token in (4, 5, 4, 1, 2)] == ["", "é", "", f"{broken} b", "c"]
    assert stream.finish() == ""
    stream = text.TokenStream(tokenizer, [0, 1, 4])
    assert [stream.add(token) for token in (2, 1)] == ["c", " b"]


def test_a_stream_hides_no_other_error():
    class Broken:
        def decode(self, tokens):
            return ""

    with pytest.raises(TypeError):
        text.TokenStream(Broken(), [0]).add(1)


def test_lines_of_prompts(tmp_path):
    plain, lines = tmp_path / "prompts.txt", tmp_path / "prompts.jsonl"
    plain.write_bytes("\ufeffone\r\n\n  \ntwo\u2028still two\n".encode())
    assert [prompt.said for prompt in read_prompts(plain)] == [{"prompt": "one"}, {"prompt": "two\u2028still two"}]
    lines.write_text('{"prompt": "one", "messages": "of its own"}\n', encoding="utf-8")
    assert read_prompts(lines)[0].said == {"prompt": "one", "messages": "of its own"}
    lines.write_text('{"prompt": "one\u2028"}\n\n{"prompt": 2}\n', encoding="utf-8")
    with pytest.raises(UsageError, match=r'Line 3 of .*prompts.jsonl must be like {"prompt": "Once upon"}; got'):
        read_prompts(lines)


def test_import_and_export_give_the_weights_back(trained, capsys, tmp_path):
    """Exporting a run, importing the result and exporting it again gives the same text and the same files."""
    common = ("--prompt", "the quick brown", "--max-tokens", 12, "--dtype", "float32")
    out = generate(capsys, "--model", trained, *common)[1]
    folders = [tmp_path / name for name in ("hub", "ours", "again")]
    assert cli.main(["export", "--model", str(trained), "--output", str(folders[0]), "--dtype", "float32"]) == 0
    assert cli.main(["import", "--model", str(folders[0]), "--output", str(folders[1])]) == 0
    assert cli.main(["export", "--model", str(folders[1]), "--output", str(folders[2]), "--dtype", "float32"]) == 0
    names = sorted(path.name for path in folders[0].iterdir())
    assert names == sorted(path.name for path in folders[2].iterdir())
    for name in names:
        assert (folders[0] / name).read_bytes() == (folders[2] / name).read_bytes()
    for folder in folders[:2]:
        assert generate(capsys, "--model", folder, *common)[:2] == (0, out)


def test_a_run_on_bytes_exports_a_tokenizer_of_bytes(trained, tmp_path):
    """With it, transformers reads the folder as striped generate reads the run."""
    import transformers

    assert cli.main(["export", "--model", str(trained), "--output", str(tmp_path / "hub")]) == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hub")
    words = "plain, é ü 中 \U0001f600\n\t  tabs\x00 \x7f\xa0\xad"
    assert tokenizer(words)["input_ids"] == list(words.encode())
    assert tokenizer.decode(list(words.encode())) == words
    assert tokenizer.eos_token_id == len(tokenizer) - 1 == 256
    assert json.loads((tmp_path / "hub" / "config.json").read_text())["eos_token_id"] == 256


def write_byte_tokenizer(path):
    """Write a tokenizer.json whose token ids are ASCII codes; return its path."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {chr(i): i for i in range(128)} | {"<unk>": 128, "</s>": 256}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(path))
    return path


def test_two_processes_write_what_one_writes(trained, monkeypatch, tmp_path):
    """Two processes write the same text as one, although only their launcher can read standard input."""
    import io

    command = ["generate", "--model", str(trained), "--max-tokens", "8", "--dtype", "float32", "--output"]
    assert cli.main([*command, str(tmp_path / "one"), "--prompt", "the quick brown"]) == 0
    monkeypatch.setattr("sys.stdin", io.StringIO("the quick brown"))
    assert cli.main([*command, str(tmp_path / "two"), "--local-processes", "2", "--cpu-devices", "1"]) == 0
    assert (tmp_path / "one").read_text() == (tmp_path / "two").read_text() != ""


def with_tokenizer(folder, outside, how):
    """Make a run refer to the tokenizer file `outside`, which lies outside its folder."""
    record = folder / "run.json"
    if how == "run.json":
        runs = json.loads(record.read_text())
        runs[-1]["options"]["tokenizer"] = str(outside)
        record.write_text(json.dumps(runs))
    elif how == "dots":
        (folder / "tokenizer.json").symlink_to(f"../{outside.name}")
    elif how == "link":
        (folder / "tokenizer.json").symlink_to(outside)
    else:
        (folder / "inside").mkdir()
        own = folder / ("inside/tokenizer.json" if how == "beside a link" else "tokenizer.json")
        shutil.copy(outside, own)
        if how == "beside a link":
            (folder / "tokenizer.json").symlink_to("inside/tokenizer.json")
        (folder / "tokenizer_config.json").symlink_to(outside)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("run.json", "must lie in its folder, and .* has no tokenizer.json.*names .*secret.*--tokenizer"),
        ("dots", "must lie in its folder, but .*tokenizer.json is a link to .*secret.*--tokenizer"),
        ("link", "must lie in its folder, but .*tokenizer.json is a link to .*secret.*--tokenizer"),
        ("beside", "must lie in its folder, but .*tokenizer_config.json is a link to .*secret"),
        ("beside a link", "must lie in its folder, but .*tokenizer_config.json is a link to .*secret"),
    ],
)
def test_no_file_of_this_machine_is_published_because_a_run_says_so(trained, capsys, tmp_path, how, message):
    folder = pathlib.Path(shutil.copytree(trained, tmp_path / "copy"))
    secret = write_byte_tokenizer(tmp_path / "secret.json")
    with_tokenizer(folder, secret, how)
    export = ["export", "--model", str(folder), "--output", str(tmp_path / "hub")]
    capsys.readouterr()
    assert cli.main(export) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(f"striped: The (tokenizer|files) of a run {message}", line)
    assert not (tmp_path / "hub").exists()
    if not how.startswith("beside"):  # `beside` affects only the export
        assert generate(capsys, "--model", folder, "--prompt", "a") == (2, "", line + "\n")
    else:
        assert cli.main([*export, "--tokenizer", str(folder / "tokenizer.json")]) == 2, "a link lies beside it"
    assert cli.main([*export, "--tokenizer", str(secret)]) == 0, "--tokenizer may name any file"
    assert (tmp_path / "hub" / "tokenizer.json").read_text() == secret.read_text()


def test_a_runs_own_tokenizer_is_used_and_exported(trained, capsys, tmp_path):
    """A run's folder may hold a tokenizer, as after `striped train --tokenizer`, or a link to one in the folder."""
    folder = pathlib.Path(shutil.copytree(trained, tmp_path / "copy"))
    write_byte_tokenizer(folder / "mine.json")
    (folder / "tokenizer.json").symlink_to("mine.json")
    (folder / "tokenizer_config.json").write_text("{}")
    assert cli.main(["export", "--model", str(folder), "--output", str(tmp_path / "hub")]) == 0
    assert (tmp_path / "hub" / "tokenizer.json").read_text() == (folder / "mine.json").read_text()
    assert (tmp_path / "hub" / "tokenizer_config.json").read_text() == "{}"
    command = ("--prompt", "the quick brown", "--max-tokens", 5, "--dtype", "float32")
    assert generate(capsys, "--model", folder, *command)[:2] == generate(capsys, "--model", trained, *command)[:2]


def without(folder, name):
    (folder / name).unlink()


def broken_json(folder):
    (folder / "run.json").write_text("[")


def damaged(folder):
    """Corrupt bytes in every data file of a checkpoint, because Orbax may store any weight in any file."""
    files = list(folder.rglob("ocdbt.process_*/d/*"))
    assert files
    for path in files:
        content = np.fromfile(path, np.uint8)
        content[::1000] ^= 255
        content.tofile(path)


@pytest.mark.parametrize(
    ("options", "change", "message"),
    [
        (("--prompt", "x" * 50, "--capacity", 40), None, "The prompt has 50 tokens; with --max-tokens 256 it"),
        (("--prompt", ""), None, "The prompt is empty. A model needs at least one token to generate from."),
        (("--prompt", "a", "--prompts", "b"), None, "--prompt and --prompts exclude each other"),
        (("--prompts", "nowhere.txt"), None, "--prompts nowhere.txt cannot be read"),
        (("--prompt", "a", "--temperature", -1), None, "--temperature must be at least 0; got -1"),
        (("--prompt", "a", "--temperature", "nan"), None, "--temperature must be at least 0; got nan"),
        (("--prompt", "a", "--top-p", 0), None, "--top-p must be above 0 and at most 1; got 0"),
        (("--prompt", "a", "--top-k", 5), None, "--top-k, --top-p and --min-p are for sampling"),
        (("--prompt", "a", "--max-tokens", 0), None, "--max-tokens must be at least 1; got 0"),
        (("--prompt", "a", "--kernel", "magic"), None, "--kernel must be one of"),
        (("--prompt", "a", "--kernel", "cudnn"), None, "--kernel cudnn cannot do this: It"),
        (("--prompt", "a", "--strategy", "heads"), None, "--strategy heads: A strategy must divide a device's query"),
        (("--prompt", "a", "--stripe", 4, "--layout", "zigzag"), None, "--stripe is for --layout striped"),
        (("--prompt", "a", "--output", "no/where.jsonl"), None, "there is no folder"),
        (("--prompt", "a", "--output", "copy"), None, "--output copy is a folder. Give a file."),
        (("--prompts", "copy/run.json", "--output", "copy/run.json"), None, "is the file of --prompts"),
        (("--prompt", "a", "--max-tokens", 3_000_000_000), None, "tokens, because positions are int32; got 3,000"),
        (("--prompt", "\udcff"), None, "The prompt cannot be encoded as UTF-8"),
        (("--prompt", "a", "--tokenizer", "nowhere.json"), None, "--tokenizer nowhere.json is not a file"),
        (("--prompt", "a"), broken_json, "is damaged"),
        (("--prompt", "a"), damaged, "damaged"),
        (("--prompt", "a"), lambda folder: without(folder, "run.json"), "has no tokenizer.json. Give one with"),
        (("--prompt", "a"), lambda folder: [shutil.rmtree(p) for p in folder.glob("[0-9]*")], "holds neither"),
        (("--prompt", "a"), shutil.rmtree, "is not a folder"),
    ],
    ids=lambda value: None if callable(value) else str(value)[:40],
)
def test_what_cannot_be_done_is_one_line(trained, capsys, tmp_path, monkeypatch, options, change, message):
    monkeypatch.chdir(tmp_path)
    folder = pathlib.Path(shutil.copytree(trained, tmp_path / "copy"))
    if change is not None:
        change(folder)
    before_ = sorted(tmp_path.rglob("*"))
    code, out, err = generate(capsys, "--model", folder, *options)
    assert (code, out) == (2, "")
    assert message in err.splitlines()[-1]
    assert err.splitlines()[-1].startswith("striped: ")
    assert sorted(tmp_path.rglob("*")) == before_


def test_a_tokenizer_of_another_model_is_refused(trained, capsys, tmp_path):
    from tokenizers import Tokenizer, models

    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 4000}, unk_token="a"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    code, _, err = generate(capsys, "--model", trained, "--prompt", "a", "--tokenizer", tmp_path / "tokenizer.json")
    assert code == 2
    assert "needs a vocabulary of 4001, but that of the model in" in err
    assert "they do not belong together" in err


def test_folders_that_import_and_export_refuse(trained, capsys, tmp_path):
    full = tmp_path / "full"
    full.mkdir()
    (full / "mine.txt").write_text("mine")
    for command, options, message in [
        ("export", ("--model", trained, "--output", full), "already exists and is not empty"),
        ("import", ("--model", trained, "--output", tmp_path / "new"), "is already a checkpoint"),
        ("import", ("--model", full, "--output", tmp_path / "new"), "holds neither a checkpoint"),
    ]:
        assert cli.main([command, *map(str, options)]) == 2
        assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["full"]
    assert [path.name for path in full.iterdir()] == ["mine.txt"]


@pytest.fixture(scope="module")
def hub(trained, tmp_path_factory):
    """The run exported as a Hugging Face model."""
    folder = tmp_path_factory.mktemp("hub") / "model"
    command = ["export", "--model", str(trained), "--output", str(folder), "--dtype", "float32"]
    assert cli.main([*command, "--tokenizer", str(write_byte_tokenizer(folder.parent / "tokenizer.json"))]) == 0
    return folder


def say(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def cut(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def pickled(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: without(folder, "model.safetensors"), "model.safetensors"),
        (pickled, "pytorch_model.bin"),
        (cut, "model.safetensors"),
        (lambda folder: say(folder, architectures=["GPT2LMHeadModel"], model_type="gpt2"), "GPT2LMHeadModel"),
        (lambda folder: say(folder, intermediate_size=392), "392"),
        (lambda folder: say(folder, num_hidden_layers=3), "model.layers.2."),
        (lambda folder: say(folder, hidden_act="gelu"), "gelu"),
    ],
    ids=["no weights", "pickle", "cut short", "architecture", "shape", "missing layer", "activation"],
)
@pytest.mark.parametrize("command", ["generate", "import"])
def test_a_bad_folder_is_one_line_and_leaves_nothing(hub, capsys, tmp_path, command, change, message):
    folder = pathlib.Path(shutil.copytree(hub, tmp_path / "copy"))
    change(folder)
    before_ = sorted(tmp_path.rglob("*"))
    options = ["--prompt", "a"] if command == "generate" else ["--output", str(tmp_path / "new")]
    capsys.readouterr()
    assert cli.main([command, "--model", str(folder), *options]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert message in said.err.splitlines()[-1]
    assert said.err.splitlines()[-1].startswith("striped: ")
    assert sorted(tmp_path.rglob("*")) == before_


def test_a_hub_model_without_a_tokenizer_asks_for_one(hub, capsys, tmp_path):
    folder = pathlib.Path(shutil.copytree(hub, tmp_path / "copy"))
    (folder / "tokenizer.json").unlink()
    code, _, err = generate(capsys, "--model", folder, "--prompt", "a")
    assert code == 2
    assert "has no tokenizer.json. Give one with --tokenizer." in err
