"""Model families: every model in `tests/families.py` matches its transformers implementation.

This covers logits before and after writing files, greedy text on 1, 2, 4 and 8 devices, evaluation losses and training
steps. A run with a learning rate of 0 must not change a byte of any weight.
"""

import copy
import dataclasses
import functools
import json
import math
import pathlib
import re
import textwrap

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import striped_attention as sa
from striped_attention import data, huggingface
from striped_attention.errors import UsageError
from striped_attention.generation import loading
from striped_attention.generation.engine import Engine
from striped_attention.generation.programs import Options
from striped_attention.models.config import ModelConfig
from striped_attention.models.stages import AXES
from striped_attention.runtime.mesh import make_mesh
from striped_attention.training.source import find
from striped_attention.training.trainer import train
from tests import test_start
from tests.families import (
    END,
    LENGTH,
    MODELS,
    SHAPE,
    TOKENS,
    VOCABULARY,
    largest_difference,
    libraries,
    load,
    original,
    our_scores,
    randomised,
    save,
    stacked,
    their_scores,
)
from tests.test_engine import greedy
from tests.test_start import BATCH, command, export, weights_of
from tests.test_start import config as training

tokens = test_start.tokens  # the fixture
DOCUMENTATION = pathlib.Path(__file__).parents[1] / "docs" / "inference.md"
DEFAULTS = {field.name: field.default for field in dataclasses.fields(ModelConfig)}


@pytest.mark.parametrize("name", MODELS)
def test_scores_are_those_of_transformers(name, tmp_path):
    config, weights = stacked(save(name, tmp_path))
    for field, value in MODELS[name].fields.items():
        assert getattr(config, field) == value, field
    scores, truth = our_scores(config, weights), their_scores(original(name))
    assert truth.std() > 0.5, "logits that are all nearly 0 would agree trivially"
    assert largest_difference(scores, truth) < 1e-4
    for field in MODELS[name].matters:
        others = dict(full_every=None, local_theta=None) if field == "window" else {}
        plain = our_scores(dataclasses.replace(config, **{**others, field: DEFAULTS[field]}), weights)
        assert largest_difference(plain, truth) > 0.05, f"the test must be sensitive to {field}"


@pytest.mark.parametrize("name", MODELS)
def test_what_is_written_is_the_same_model_here_and_there(name, tmp_path):
    source = save(name, tmp_path / "theirs")
    config = huggingface.read_config(source)
    huggingface.write(tmp_path / "ours", config, huggingface.tensors(source, config), "float32", length=1024)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours", "theirs"]
    again, weights = stacked(tmp_path / "ours")
    assert again == config
    jax.tree.map(np.testing.assert_array_equal, weights, stacked(source)[1])
    model = load(tmp_path / "ours")
    assert type(model) is type(original(name))
    assert model.config.eos_token_id is None, "no end-of-sequence token was given"
    assert largest_difference(their_scores(model), their_scores(original(name))) < 1e-6


@functools.cache
def greedy_text_of_transformers(name, lengths, steps):
    """Generate greedily with transformers, without a cache, so that no cache error can affect the reference."""
    found = []
    for row, length in enumerate(lengths):
        tokens = prompts(lengths)[row]
        for _ in range(steps):
            tokens = np.append(tokens, their_scores(original(name), tokens[None])[0, -1].argmax())
        found.append(tokens[length:].tolist())
    return found


def prompts(lengths):
    return [TOKENS[row % 2, row : row + length] for row, length in enumerate(lengths)]


def engine_of(folder, devices, layout, batch, capacity):
    """Return an engine that prefills in chunks of 8 tokens, so that later chunks of a long prompt attend to a cache."""
    source, mesh = find(folder), make_mesh({AXES.batch: 1, AXES.sequence: devices}, jax.devices()[:devices])
    options = Options(layout, batch, capacity, chunk=8, dtype=jnp.dtype("float32"))
    return Engine(source.model, loading.load(source, mesh, options.dtype), mesh, options)


@pytest.mark.parametrize("name", MODELS)
def test_greedy_text_is_that_of_transformers_on_any_devices(name, tmp_path):
    """Greedy text equals that of transformers for prompts longer than the window and for ones that grow beyond it."""
    lengths, steps = (15, 5, 6), 8
    wanted = greedy_text_of_transformers(name, lengths, steps)
    assert len({tuple(text) for text in wanted}) == 3
    folder = save(name, tmp_path)
    for devices, layout in [(1, sa.contiguous()), (2, sa.striped(2)), (4, sa.zigzag()), (8, sa.striped())]:
        engine = engine_of(folder, devices, layout, 3, 24)
        assert greedy(engine, prompts(lengths), steps).tolist() == wanted, (devices, layout)
        rooms = [cache.capacity for cache in engine.caches]
        windows = [engine.config.layer(i).window for i in range(engine.config.layers)]
        assert all((room < 24) == (window is not None) for room, window in zip(rooms, windows, strict=True))


def odd(folder):
    """Write values that arithmetic would change into a model: -0.0 and a subnormal number."""
    path = sorted(folder.glob("*.safetensors"))[0]
    weights = load_file(path)
    first = next(iter(weights.values()))
    first.flat[:2] = (-0.0, 1e-39)
    save_file(weights, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("name", "dtype", "options"),
    [
        ("llama", "bfloat16", dict(max_shard_size="40KB")),
        ("qwen 2, tied", "bfloat16", dict(max_shard_size="40KB")),
        ("qwen 3", "float32", dict()),
        ("mistral", "float16", dict(max_shard_size="40KB")),
        ("gemma 2", "bfloat16", dict(max_shard_size="40KB")),
        ("gemma 3", "float32", dict()),
        ("phi 3, long", "float16", dict(max_shard_size="40KB")),
        ("phi 4 mini, short", "bfloat16", dict()),
        ("olmo 2", "bfloat16", dict()),
    ],
)
def test_a_step_with_learning_rate_0_gives_the_same_bytes_back(name, dtype, options, tokens, tmp_path):
    torch, _ = libraries()
    original(name).to(getattr(torch, dtype)).save_pretrained(tmp_path / "hub", **options)
    original(name).to(torch.float32)
    original.cache_clear()  # because its weights have been rounded
    hub = tmp_path / "hub"
    odd(hub)
    assert (len(list(hub.glob("*.safetensors"))) > 2) == bool(options)
    train(training(tokens, tmp_path / "run", start_from=hub, learning_rate=0.0))
    before, after = weights_of(hub), weights_of(export(tmp_path / "run", tmp_path / "out", dtype))
    assert before.keys() == after.keys()
    for key, weight in before.items():
        assert weight.dtype == after[key].dtype == np.dtype(getattr(ml_dtypes, dtype, dtype))
        assert weight.tobytes() == after[key].tobytes(), key
    there, here = (json.loads((folder / "config.json").read_text()) for folder in (hub, tmp_path / "out"))
    for key in ("architectures", "max_position_embeddings", "eos_token_id", "bos_token_id", "tie_word_embeddings"):
        assert here[key] == there[key], key
    assert huggingface.read_config(tmp_path / "out") == huggingface.read_config(hub)
    np.testing.assert_array_equal(their_scores(load(tmp_path / "out")), their_scores(load(hub)))


STEPS, WARMUP, PEAK, DECAY, CLIP = 20, 4, 3e-3, 0.1, 0.5


def learning_rate(step):
    """Linear warmup, then cosine decay to a tenth of the peak, as with --warmup and --schedule cosine."""
    if step < WARMUP:
        return PEAK / (WARMUP + 1) + step / WARMUP * (PEAK - PEAK / (WARMUP + 1))
    share = (step - WARMUP) / (STEPS - WARMUP)
    return PEAK * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * share)))


def their_masks(config, segments):
    """Return the additive masks for transformers: documents, combined with the window of each kind of layer."""
    torch, _ = libraries()
    same = segments[:, :, None] == segments[:, None]
    masks = {}
    for layer in config.kinds:
        visible = torch.tensor(same & layer.mask.dense(segments.shape[1]))[:, None]
        name = "full_attention" if layer.window is None else "sliding_attention"
        masks[name] = torch.where(visible, 0.0, torch.finfo(torch.float32).min)
    return masks if len(masks) > 1 else masks[name]


def steps_of_transformers(model, config, batches):
    """Train the model in place with a plain PyTorch loop on packed documents; return the losses."""
    torch, _ = libraries()
    kinds = {decayed: [p for p in model.parameters() if (p.ndim > 1) == decayed] for decayed in (True, False)}
    groups = [dict(params=kinds[True], weight_decay=DECAY), dict(params=kinds[False], weight_decay=0.0)]
    optimiser, losses = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95), eps=1e-8), []
    for step, batch in enumerate(batches):
        tokens, targets = (torch.tensor(x, dtype=torch.long) for x in (batch.tokens, batch.targets))
        scores = model(tokens, attention_mask=their_masks(config, batch.segments)).logits
        each = torch.nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction="none")
        counts = torch.tensor(batch.weights).flatten()
        loss = (each * counts).sum() / counts.sum()
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        for group in optimiser.param_groups:
            group["lr"] = learning_rate(step)
        optimiser.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", ["llama", "qwen 3", "gemma 2", "gemma 3", "phi 3, long", "olmo 2"])
def test_twenty_steps_are_those_of_transformers(name, tokens, tmp_path):
    hub = tmp_path / "hub"
    randomised(copy.deepcopy(original(name)), 0.1).save_pretrained(hub)
    options = dict(steps=STEPS, learning_rate=PEAK, schedule="cosine", warmup=WARMUP, weight_decay=DECAY, clip=CLIP)
    asked = training(tokens, tmp_path / "run", start_from=hub, **options)
    train(asked)
    ours = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    corpus = data.load(tokens, None, END, VOCABULARY)
    batches = [data.read(corpus, step * BATCH, range(BATCH), LENGTH, asked.seed) for step in range(STEPS)]
    model = load(hub)
    theirs = steps_of_transformers(model, huggingface.read_config(hub), batches)
    assert any(line["gradient_norm"] > CLIP for line in ours), "the test must cover clipping"
    assert theirs[-1] < theirs[0] - 0.1, "the steps must reduce the loss"
    np.testing.assert_allclose([line["loss"] for line in ours], theirs, atol=1e-4, rtol=0)
    weights = weights_of(export(tmp_path / "run", tmp_path / "out"))
    moved = weights_of(hub)
    for key, weight in model.state_dict().items():
        if key in weights:  # the shared matrix of a tied model has two names
            np.testing.assert_allclose(weights[key], weight.numpy(), atol=1e-4, rtol=0, err_msg=key)
            assert np.abs(weights[key] - moved[key]).max() > 1e-3, key


@pytest.mark.parametrize(
    "name", ["gemma 2", "gemma 3", "gemma 3, windows alone", "phi 3", "phi 4 mini, short", "olmo 2"]
)
def test_evaluation_gives_the_loss_of_transformers(name, tmp_path):
    torch, _ = libraries()
    hub = save(name, tmp_path / "hub")
    held_out = np.random.default_rng(2).integers(0, VOCABULARY, 4 * LENGTH + 1).astype(np.uint16)
    np.save(tmp_path / "held_out.npy", held_out)
    options = f"--length {LENGTH} --batch 2 --mesh data=2,sequence=4 --dtype float32 --only perplexity"
    options += f" --data {tmp_path / 'held_out.npy'} --output {tmp_path / 'out.json'}"
    command("evaluate", "--model", hub, *options.split())
    rows = torch.tensor(held_out[:-1].reshape(4, LENGTH).astype(np.int64))
    targets = torch.tensor(held_out[1:].reshape(4, LENGTH).astype(np.int64))
    scores = torch.tensor(their_scores(original(name), rows.numpy()))
    wanted = torch.nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten()).item()
    assert json.loads((tmp_path / "out.json").read_text())["perplexity"]["loss"] == pytest.approx(wanted, abs=1e-4)


def test_the_language_part_of_a_gemma_for_images_is_saved_as_the_documentation_says(tmp_path):
    _, transformers = libraries()
    vision = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=28)
    language = {key: value for key, value in SHAPE.items() if key != "pad_token_id"}
    config = transformers.Gemma3Config(
        text_config=dict(**language, head_dim=16), vision_config=dict(**vision, patch_size=14), mm_tokens_per_image=4
    )
    whole = randomised(transformers.Gemma3ForConditionalGeneration(config), 0.25)
    whole.save_pretrained(tmp_path / "whole")
    with pytest.raises(UsageError, match="is that of a Gemma 3 for text and images"):
        huggingface.read_config(tmp_path / "whole")
    (lines,) = re.findall(r"(  from transformers import Gemma3.*?)  ```", DOCUMENTATION.read_text(), re.DOTALL)
    lines = lines.replace("gemma-3-4b-it-text", str(tmp_path / "text")).replace(
        "gemma-3-4b-it", str(tmp_path / "whole")
    )
    exec(textwrap.dedent(lines), {})
    config, weights = stacked(tmp_path / "text")
    assert largest_difference(our_scores(config, weights), their_scores(whole)) < 1e-4
