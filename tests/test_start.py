"""Starting from a model: weights are imported and exported bit for bit, and training steps equal those of transformers.

Runs in this process, on all 8 virtual devices. Models have random weights, written by transformers.
"""

import contextlib
import dataclasses
import functools
import json
import math
import pathlib
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from striped_attention import cli, data, huggingface
from striped_attention.errors import UsageError
from striped_attention.generation.weights import import_model
from striped_attention.huggingface.config import config_json
from striped_attention.models.config import ModelConfig
from striped_attention.models.rotary import RopeScaling
from striped_attention.models.stages import AXES
from striped_attention.runtime.mesh import make_mesh
from striped_attention.training import arrays, start, trainer
from striped_attention.training.config import TrainConfig
from striped_attention.training.source import find
from striped_attention.training.step import Program
from striped_attention.training.trainer import train
from tests.families import libraries, their_scores
from tests.test_train_data import write_tokenizer

VOCABULARY, END, LENGTH, BATCH = 61, 7, 48, 4
SHAPE = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    bos_token_id=5,
    eos_token_id=END,
    pad_token_id=None,
)
# The name of each model's class in transformers, and how it differs from SHAPE.
MODELS = {
    "llama": ("Llama", dict()),
    "qwen 3": ("Qwen3", dict(head_dim=16)),
}


@functools.cache
def original(name):
    """A model of transformers with random weights, including biases and norms."""
    torch, transformers = libraries()
    family, options = MODELS[name]
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**SHAPE, **options))
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=random)
            weight.copy_(1 + 0.1 * noise if key.endswith("norm.weight") else 0.1 * noise)
    return model


def save(name, folder, dtype="float32", **options):
    """Save a model to a folder, with the other files that models on the hub have."""
    torch, _ = libraries()
    model = original(name).to(getattr(torch, dtype))
    model.save_pretrained(folder, **options)
    model.to(torch.float32)
    return folder


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    """Random tokens in documents of about a dozen."""
    path = tmp_path_factory.mktemp("data") / "tokens.npy"
    found = np.random.default_rng(0).integers(8, VOCABULARY, 4000).astype(np.uint16)
    found[np.random.default_rng(1).integers(0, 4000, 300)] = END
    np.save(path, found)
    return path


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A Hugging Face folder with a tokenizer and its files."""
    folder = save("qwen 3", tmp_path_factory.mktemp("hub") / "model")
    write_tokenizer(folder / "tokenizer.json", {"the": 0, "</s>": 7, "[UNK]": 2})
    (folder / "tokenizer_config.json").write_text('{"a": 1}')
    (folder / "special_tokens_map.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 8], "temperature": 0.6}')
    return folder


def config(tokens, folder=None, **options):
    given = dict(dtype="float32", sequence_length=LENGTH, batch=BATCH, mesh="data=4,sequence=2", strategy="ring")
    given |= dict(data=(str(tokens),), end_token=END, checkpoint_dir=folder, steps=1, schedule="constant", warmup=0)
    return TrainConfig(**{**given, **options})


@pytest.fixture(autouse=True, scope="module")
def _compile_once():
    """Runs of this module differ mostly in what they start from: compile each program once."""
    programs = {}

    def same(config, mesh, documents):
        program = Program(config, mesh, documents=documents)
        no_matter = dict(checkpoint_dir=None, resume=False, start_from=None, rope_scaling=None, own_tokenizer=None)
        no_matter |= dict(data=None, data_cache=None, end_token=None, tokenizer=None)
        no_matter |= dict(steps=9) if config.schedule == "constant" else {}
        first = programs.setdefault((dataclasses.replace(config, **no_matter), documents), program)
        if first is not program:
            vars(program).update(compiled=first.compiled)
        return program

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "Program", same)
        yield


def command(*arguments):
    assert cli.main([*map(str, arguments)]) == 0


def export(run, folder, dtype="float32"):
    command("export", "--model", run, "--output", folder, "--dtype", dtype)
    return folder


def weights_of(folder):
    """Return the weights of all files in a folder, by name."""
    return {name: x for path in sorted(folder.glob("*.safetensors")) for name, x in load_file(path).items()}


def test_every_device_is_given_its_part_of_the_files_alone(tmp_path, monkeypatch):
    """No array ever holds the whole model, or all layers of a sharded weight."""
    folder = save("llama", tmp_path / "hub")
    source, mesh, read = find(folder), make_mesh({AXES.batch: 2, AXES.sequence: 4}), []
    whole = huggingface.Files.part

    def part(files, name, layer, index):
        found = whole(files, name, layer, index)
        read.append((name, found.size))
        return found

    monkeypatch.setattr(huggingface.Files, "part", part)
    weights = arrays.read_stacked(source, mesh)
    assert sum(size for _, size in read) == source.model.parameters, "every value is read once"
    assert max(size for name, size in read if not name.endswith("norm")) <= VOCABULARY * 32 / 8
    expected = {(name, layer): array for name, layer, array in huggingface.tensors(folder, source.model)}
    for name, stacked in weights["layers"].items():
        np.testing.assert_array_equal(stacked, [expected[name, layer] for layer in range(source.model.layers)])
    for name in ("embedding", "norm", "unembedding"):
        np.testing.assert_array_equal(weights[name], expected[name, None])


def test_two_processes_read_what_their_devices_hold(hub, tokens, tmp_path):
    options = f"--data {tokens} --length 48 --steps 1 --learning-rate 0 --checkpoint-dir {tmp_path / 'run'}"
    command("train", *options.split(), "--start-from", hub, "--local-processes", 2, "--cpu-devices", 1)
    assert json.loads((tmp_path / "run" / "run.json").read_text())[0]["processes"] == 2
    before, after = weights_of(hub), weights_of(export(tmp_path / "run", tmp_path / "out"))
    assert {key: x.tobytes() for key, x in before.items()} == {key: x.tobytes() for key, x in after.items()}


def test_every_kind_of_folder_gives_the_same_start(hub, tokens, tmp_path):
    """A Hugging Face model, the output of `striped import`, and a run that left the weights unchanged."""
    imported = tmp_path / "imported"
    import_model(find(hub), imported, make_mesh({AXES.batch: 1, AXES.sequence: 8}))
    train(config(tokens, tmp_path / "run", start_from=imported, learning_rate=0.0))
    shutil.rmtree(imported)
    train(config(tokens, tmp_path / "again", start_from=tmp_path / "run", learning_rate=0.0))
    before, after = weights_of(hub), weights_of(export(tmp_path / "again", tmp_path / "out"))
    assert {key: x.tobytes() for key, x in before.items()} == {key: x.tobytes() for key, x in after.items()}
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"):
        assert (tmp_path / "out" / name).read_bytes() == (hub / name).read_bytes(), name
    name = "generation_config.json"
    assert (tmp_path / "out" / name).read_bytes() == (hub / name).read_bytes()
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    assert [said[f"{name}_token_id"] for name in ("bos", "eos", "pad")] == [5, END, None]
    assert find(tmp_path / "again").stop == [7, 8], "generation_config.json takes precedence"
    assert said["max_position_embeddings"] == 64, "the model's own limit, longer than the training sequences"


def test_the_models_own_tokenizer_makes_tokens_of_text(hub, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("the cat and the other " * 200)
    train(config(text, tmp_path / "run", end_token=None, start_from=hub, learning_rate=0.0, validation=(str(text),)))
    assert f"Starts from {hub}: rope theta 10,000, no rope scaling" in capsys.readouterr().out
    (run,) = json.loads((tmp_path / "run" / "run.json").read_text())
    assert run["options"]["start_from"] == str(hub)
    assert run["options"]["tokenizer"] is None
    assert "shape" not in run["options"]
    found = [
        (tmp_path / "run" / path.name).read_bytes() for path in hub.glob("[!m]*.json") if path.name != "config.json"
    ]
    assert len(found) == 4
    other = write_tokenizer(tmp_path / "other.json", {"the": 0, "</s>": 7, "[UNK]": 2})
    begin = start.look(config(text, end_token=None, start_from=hub, tokenizer=other))
    assert begin.config.tokenizer_for(text) == other, "with the same vocabulary"
    assert begin.files.keys() == {"generation_config.json"}, "the given tokenizer replaces the model's own"


def test_resume_needs_the_folder_that_it_started_from_no_more(hub, tokens, tmp_path):
    source = pathlib.Path(shutil.copytree(hub, tmp_path / "source"))
    options = dict(learning_rate=1e-3, checkpoint_every=2)
    whole = train(config(tokens, tmp_path / "whole", start_from=source, steps=4, **options))
    half = pathlib.Path(shutil.copytree(tmp_path / "whole", tmp_path / "half"))
    none = pathlib.Path(shutil.copytree(tmp_path / "whole", tmp_path / "none"))
    shutil.rmtree(half / "4")
    for step in ("2", "4"):
        shutil.rmtree(none / step)
    again = train(config(tokens, none, steps=2, resume=True, **options))
    shutil.rmtree(source)
    with one_line(f"--start-from {source} is not a folder"):
        train(config(tokens, tmp_path / "new", start_from=source, **options))
    one = train(config(tokens, half, steps=4, start_from=source, resume=True, **options))
    two = train(config(tokens, none, steps=4, resume=True, **options))
    assert int(again.step) == 2, "a run that was interrupted before its first checkpoint starts from the folder again"
    for state in (one, two):
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), jax.device_get(whole))
    asked = config(tokens, half, start_from=source.parent / "none" / ".." / source.name, resume=True)
    assert start.look(asked).config.start_from == source, "the same path, written differently"
    runs = json.loads((half / "run.json").read_text())
    assert [run["options"]["start_from"] for run in runs] == [str(source)] * 2
    for options, message in (
        (dict(start_from=hub), f"was started with --start-from {source}; got {hub}. Leave --start-from out"),
        (dict(rope_theta=2e4), "was started without --rope-theta; got 20000.0"),
        (dict(layers=3), "--layers is for models from scratch"),
    ):
        with one_line(message):
            train(config(tokens, half, steps=6, resume=True, **options))


@contextlib.contextmanager
def one_line(message):
    with pytest.raises(UsageError) as caught:
        yield
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


YARN, LLAMA3 = RopeScaling("yarn", 4.0, 64, 1.0, 32.0), RopeScaling("llama3", 4.0, 64, 1.0, 4.0)


@pytest.mark.parametrize(
    ("before", "options", "theta", "rope_scaling", "positions"),
    [
        (None, dict(), 1e4, None, 64),
        (None, dict(rope_theta=5e5), 5e5, None, 64),
        (None, dict(rope_scaling="linear:4"), 1e4, RopeScaling("linear", 4.0, 64), 256),
        (None, dict(rope_scaling="yarn:4", rope_theta=5e5), 5e5, YARN, 256),
        (None, dict(rope_scaling="yarn:factor=4,original=64"), 1e4, YARN, 256),
        (
            None,
            dict(rope_scaling="yarn:2,original=1k,beta_fast=16,attention_factor=1.5"),
            1e4,
            RopeScaling("yarn", 2.0, 1024, 1.0, 16.0, 1.5),
            2048,
        ),
        (None, dict(rope_scaling="llama3:4"), 1e4, LLAMA3, 256),
        (None, dict(rope_scaling="llama3:4,high=8,low=2"), 1e4, RopeScaling("llama3", 4.0, 64, 2.0, 8.0), 256),
        (RopeScaling("yarn", 2.0, 32, 1.0, 32.0), dict(), 1e4, RopeScaling("yarn", 2.0, 32, 1.0, 32.0), 64),
        (RopeScaling("yarn", 4.0, 64, 1.0, 32.0), dict(), 1e4, YARN, 256),  # max_position_embeddings of the file is 64
        (
            RopeScaling("llama3", 2.0, 16),
            dict(rope_scaling="yarn:8"),
            1e4,
            RopeScaling("yarn", 8.0, 16, 1.0, 32.0),
            128,
        ),
        (RopeScaling("llama3", 2.0, 16), dict(rope_scaling="none"), 1e4, None, 16),
        (RopeScaling("linear", 2.0), dict(rope_scaling="linear:8"), 1e4, RopeScaling("linear", 8.0), 256),
        (RopeScaling("linear", 2.0), dict(rope_scaling="none"), 1e4, None, 64),
    ],
)
def test_rope_options_change_the_model(before, options, theta, rope_scaling, positions, tokens, tmp_path):
    folder = rewritten(tmp_path / "hub", rope_scaling=before)
    begin = start.look(config(tokens, start_from=folder, dry_run=True, **options))
    model = begin.config.model
    assert (model.rope_theta, model.rope_scaling, begin.positions) == (theta, rope_scaling, positions)
    assert dataclasses.replace(model, rope_scaling=before, rope_theta=1e4) == huggingface.read_config(folder)


def rewritten(folder, length=64, **changes):
    """Make a folder with the config.json of a model with these changes, and no weights."""
    folder.mkdir()
    model = ModelConfig(**{**dict(layers=2, dim=32, ffn=48, heads=4, kv_heads=2, vocabulary=61), **changes})
    said = config_json(model, "bfloat16", length, {}) | {"max_position_embeddings": length}
    (folder / "config.json").write_text(json.dumps(said))
    return folder


@pytest.mark.parametrize(
    ("scaling", "theirs", "length"),
    [
        ("linear:4", dict(rope_type="linear", factor=4.0), 256),
        ("yarn:4", dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64), 256),
        (
            "llama3:2",
            dict(
                rope_type="llama3",
                factor=2.0,
                original_max_position_embeddings=64,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
            ),
            160,
        ),
    ],
)
def test_a_scaled_model_is_exported_as_transformers_would_scale_it(scaling, theirs, length, hub, tokens, tmp_path):
    """Its length is the larger of the training length and the scaled positions; for yarn always the latter."""
    _, transformers = libraries()
    asked = config(tokens, tmp_path / "run", start_from=hub, rope_scaling=scaling, learning_rate=0.0)
    if scaling == "llama3:2":
        asked = dataclasses.replace(asked, sequence_length=160)
    folder = exported(asked, tmp_path / "out")
    assert json.loads((folder / "config.json").read_text())["max_position_embeddings"] == length
    scaled = transformers.AutoConfig.from_pretrained(hub)
    scaled.rope_parameters = dict(rope_theta=10_000.0, **theirs)
    scaled.max_position_embeddings = length
    expected, plain = (
        their_scores(transformers.AutoModelForCausalLM.from_pretrained(hub, config=c).eval())
        for c in (scaled, transformers.AutoConfig.from_pretrained(hub))
    )
    found = their_scores(transformers.AutoModelForCausalLM.from_pretrained(folder).eval())
    assert np.abs(found - expected).max() < 1e-6
    assert np.abs(found - plain).max() > 1e-3, "scaling changes the scores"


def exported(asked, folder):
    """Export what a run with unchanged weights would, without running it."""
    begin = start.look(asked)
    source = begin.source
    place = trainer._start(begin.config, data.load(asked.data, None, END, VOCABULARY), begin)
    run = dataclasses.replace(source, step=1, said=place.as_json())
    huggingface.write(
        folder,
        begin.config.model,
        huggingface.tensors(source.folder, source.model),
        "float32",
        length=run.length,
        ids=run.ids,
    )
    return folder


@pytest.mark.parametrize(
    ("options", "length", "warned"),
    [
        (dict(), 64, False),
        (dict(), 65, True),
        (dict(rope_scaling="yarn:2"), 128, False),
        (dict(rope_scaling="yarn:2"), 129, True),
        (dict(rope_theta=5e5), 129, False),
        (dict(rope_theta=5e3), 129, True),
    ],
)
def test_sequences_longer_than_the_positions_are_warned_of(options, length, warned, tokens, tmp_path):
    folder = rewritten(tmp_path / "hub")
    begin = start.look(config(tokens, start_from=folder, dry_run=True, sequence_length=length, **options))
    assert any("Warning: --length" in line for line in begin.lines) == warned


def test_a_run_that_goes_on_is_not_said_to_be_from_scratch(tokens, tmp_path):
    scratch = config(tokens, rope_theta=2e4)
    (line,) = start.look(scratch).lines
    assert line.startswith("From scratch: rope theta 20,000")
    (tmp_path / "run" / "1").mkdir(parents=True)
    options = dict(start_from=str(tmp_path / "hub"), rope_theta=2e4, rope_scaling=None)
    run = dict(options=options, model=dataclasses.asdict(scratch.model))
    (tmp_path / "run" / "run.json").write_text(json.dumps([run]))
    assert start.look(config(tokens, tmp_path / "run", resume=True)).lines == []


def test_the_rotary_positions_of_gemma_and_phi_are_said(tokens, tmp_path):
    """--rope-theta changes the global one of Gemma 3's two thetas; the length selects one of Phi's two factor lists."""
    gemma = dict(norms="around", centered_norms=True, activation="gelu_tanh", scaled_embedding=True, head_norms=True)
    gemma |= dict(window=9, full_every=2, rope_theta=1e6, local_theta=1e4)
    folder = rewritten(tmp_path / "gemma", **gemma)
    begin = start.look(config(tokens, start_from=folder, dry_run=True, rope_theta=2e6, rope_scaling="linear:2"))
    assert "rope theta 2,000,000 (10,000 in layers with a window), rope scaling linear × 2" in begin.lines[0]
    assert begin.config.model.layer(0).rope_theta == 1e4
    assert begin.config.model.layer(0).rope_scaling is None
    assert begin.config.model.layer(1).rope_theta == 2e6
    assert begin.config.model.layer(1).rope_scaling == RopeScaling("linear", 2.0, 64)
    factors = dict(short=(1.0, 2.0, 3.0, 4.0), long=(5.0, 6.0, 7.0, 8.0))
    folder = rewritten(
        tmp_path / "phi", length=640, fused=True, rope_scaling=RopeScaling("longrope", 10.0, 64, **factors)
    )
    for length, which in ((64, "short"), (65, "long")):
        begin = start.look(config(tokens, start_from=folder, dry_run=True, sequence_length=length))
        assert begin.lines[0].endswith(f"rope scaling longrope × 10 of 64 positions, {which} factors")
        assert begin.config.model.at_length(length).rope_scaling.short == factors[which]
    with one_line("--rope-scaling yarn:4: Phi model files support only their own scaling"):
        start.look(config(tokens, start_from=folder, dry_run=True, rope_scaling="yarn:4"))


def test_models_from_scratch_take_rope_options_too(tokens):
    scratch = config(tokens, rope_theta=2e4, rope_scaling="yarn:8,original=8k")
    assert scratch.model.rope_theta == 2e4
    assert scratch.model.rope_scaling == RopeScaling("yarn", 8.0, 8192, 1.0, 32.0)
    assert start.look(scratch).positions == 65_536
    with one_line("Add it, like llama3:8,original=8192."):
        config(tokens, rope_scaling="llama3:8").model  # noqa: B018


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(rope_scaling="ntk:4"), "--rope-scaling is written like linear:4, yarn:8, llama3:8,original=8192 or none"),
        (dict(rope_scaling="yarn"), "is written like"),
        (dict(rope_scaling="yarn:"), "is written like"),
        (dict(rope_scaling="yarn:x"), "factor must be a number above 0; got 'x'"),
        (dict(rope_scaling="yarn:0.5"), "the factor must be at least 1; got 0.5"),
        (dict(rope_scaling="yarn:nan"), "factor must be a number above 0; got 'nan'"),
        (dict(rope_scaling="yarn:original=8192"), "must include a factor, like yarn:4"),
        (
            dict(rope_scaling="yarn:4,low=1"),
            "yarn takes factor, original, beta_slow, beta_fast, attention_factor, each",
        ),
        (dict(rope_scaling="yarn:4,factor=4"), "each once; got 'factor=4'"),
        (dict(rope_scaling="linear:4,original=x"), "original must be a length like 8192 or 8k; got 'x'"),
        (dict(rope_scaling="llama3:4,low=4"), "low must be less than high; got 4 and 4"),
        (dict(rope_scaling="yarn:4,beta_fast=1"), "beta_slow must be less than beta_fast; got 1 and 1"),
        (dict(rope_theta=1.0), "--rope-theta must be a number above 1; got 1.0"),
        (dict(rope_theta=math.nan), "--rope-theta must be a number above 1; got nan"),
        (dict(start_from=pathlib.Path("x"), preset="1b"), "--preset is for models from scratch; with --start-from"),
        (dict(start_from=pathlib.Path("x"), kv_heads=2), "--kv-heads is for models from scratch"),
    ],
)
def test_options_that_make_no_sense_are_one_line(options, message, tokens):
    with one_line(message):
        config(tokens, **options)


def lacking(folder):
    path = folder / "model.safetensors"
    save_file({name: x for name, x in load_file(path).items() if "k_norm" not in name}, path)


def said(**changes):
    def change(folder):
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def large_tokenizer(folder):
    write_tokenizer(folder / "tokenizer.json", {"the": 0, "</s>": 1, "[UNK]": 2, "far": 100})


def emptied(folder):
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "notes.txt").write_text("of something else")


def other(folder):
    emptied(folder)
    (folder / "7").mkdir()


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (shutil.rmtree, dict(), "hub is not a folder"),
        (emptied, dict(), "hub holds neither a checkpoint"),
        (other, dict(), "The checkpoint in"),
        (said(architectures=["GPT2LMHeadModel"], model_type="gpt2"), dict(), "has the architecture"),
        (said(quantization_config=dict(quant_method="gptq")), dict(), "has quantized weights (gptq)"),
        (said(hidden_size=16), dict(), "of shape [61, 32], but the model of config.json needs shape [61, 16]"),
        (said(num_hidden_layers=3, layer_types=None), dict(), "lacks the weight model.layers.2."),
        (lacking, dict(), "lacks the weight model.layers.0.self_attn.k_norm.weight"),
        (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), dict(), "weights as a pickle"),
        (lambda f: (f / "tokenizer.json").unlink(), dict(text=True), "no tokenizer.json, so text cannot be tokenised"),
        (large_tokenizer, dict(), "needs a vocabulary of 101, but that of the model in"),
        (
            None,
            dict(tokenizer={"the": 0, "[UNK]": 2, "far": 100}),
            "needs a vocabulary of 101, but that of the model in",
        ),
        (None, dict(tokenizer={"the": 1, "</s>": 7, "[UNK]": 2}), "has another vocabulary than"),
        (None, dict(strategy="heads", mesh="sequence=8"), "--strategy heads: "),
        (said(rope_scaling=dict(type="linear", factor=2.0)), dict(rope_scaling="yarn:4"), "Add it, like yarn:4,orig"),
        (said(max_position_embeddings=None), dict(), "must give the model's sequence length as max_position"),
    ],
)
def test_what_cannot_be_started_from_is_one_line_and_leaves_nothing(change, options, message, hub, tokens, tmp_path):
    folder, options = pathlib.Path(shutil.copytree(hub, tmp_path / "hub")), dict(options)
    if change is not None:
        change(folder)
    if options.pop("text", False):
        (tmp_path / "text.txt").write_text("the cat " * 500)
        options |= dict(data=(str(tmp_path / "text.txt"),), end_token=None)
    if "tokenizer" in options:
        options["tokenizer"] = write_tokenizer(tmp_path / "tokenizer.json", options["tokenizer"])
    before = sorted(tmp_path.rglob("*"))
    with one_line(message):
        train(config(tokens, tmp_path / "run", **{"start_from": folder, **options}))
    assert sorted(tmp_path.rglob("*")) == before


def test_a_dry_run_reads_the_configuration_alone(tmp_path, capsys):
    folder = rewritten(tmp_path / "hub", layers=32, dim=4096, ffn=14336, heads=32, kv_heads=8, vocabulary=128_256)
    (folder / "tokenizer.json").write_text("not looked at")
    command(*f"train --start-from {folder} --rope-scaling llama3:8 --rope-theta 500000 --dry-run".split())
    out = capsys.readouterr().out
    assert f"Starts from {folder}: rope theta 500,000, rope scaling llama3 × 8 of 64 positions" in out
    assert "8,030,261,248 parameters" in out
    assert "Warning: --length 2048 is longer than the 512 positions" not in out, "--rope-theta was raised"
