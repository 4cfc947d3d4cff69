"""The commands: check the options, build an engine and run the prompts through it."""

import contextlib
import dataclasses
import json
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import rich.console

from striped_attention.core.layout import INT32_MAX
from striped_attention.data.tokenizer import write_byte_tokenizer
from striped_attention.errors import UsageError
from striped_attention.generation import conversation, room, saved, text
from striped_attention.generation import weights as files
from striped_attention.generation.config import ExportConfig, GenerateConfig, ImportConfig
from striped_attention.generation.engine import Engine
from striped_attention.generation.loading import load
from striped_attention.generation.programs import Options
from striped_attention.generation.prompts import Chat, Prompt, encode, opening, read_prompts
from striped_attention.generation.run import LOGPROBS, RESULTS, Ends, Run, progress
from striped_attention.generation.settings import Settings, settle
from striped_attention.huggingface.writing import BESIDE
from striped_attention.models.config import ModelConfig
from striped_attention.models.stages import AXES
from striped_attention.options import check_output
from striped_attention.planning.cost import gigabytes
from striped_attention.runtime.compiled import keep_programs
from striped_attention.runtime.mesh import make_mesh
from striped_attention.training import memory
from striped_attention.training.launch import in_cluster
from striped_attention.training.source import NoTokenizer, Source, find

LONGEST = INT32_MAX - 2**20  # tokens; the rest of the int32 positions is left for padding


def generate(config: GenerateConfig) -> None:
    """Run `striped generate`. Everything that can be rejected is rejected before weights are read."""
    begun = time.perf_counter()
    keep_programs()
    source = find(config.model)
    encoder, end_tokens = text.load(source, config.tokenizer, config.chat)
    settings = settle(config, source)
    chat = Chat.of(config, source, encoder) if config.chat else None
    asked = _prompts(config)
    tokens = [encode(prompt, encoder, chat) for prompt in asked]
    if chat is not None and config.interactive:
        conversation.check(chat)
    capacity = _capacity(config, settings, source, tokens)
    _check_prompts(config, settings, source.model, capacity, asked, tokens)
    _check_output(config)
    model, loaded = source.model.at_length(capacity), None
    if config.cache is not None:
        loaded = saved.Saved(config.cache, model, config.dtype)
        for prompt, row in zip(asked, tokens, strict=True):
            loaded.check_prompt(row, prompt.where, encoder)
    kept = None if config.save_cache is None else _kept(config, loaded, encoder, chat, asked, tokens)
    options = _options(config, model, tokens, capacity, 0 if loaded is None else len(loaded.tokens))
    console = rich.console.Console(stderr=True, quiet=jax.process_index() > 0, highlight=False, markup=False)
    for line in _warnings(config, settings, source, asked, tokens):
        console.print(line, soft_wrap=True)
    mesh, batch = _mesh(), options.batch
    with _room(model, options, mesh.size):
        console.print(_describe(model, options, mesh, settings), soft_wrap=True)
        with progress(console, "loading weights", "parameters") as say:
            engine = Engine(model, load(source, mesh, options.dtype, say), mesh, options)
        ends = Ends(end_tokens, settings.stop, encoder)
        run = Run(engine, encoder, ends, settings, console, config.alternatives, begun, loaded)
        if chat is not None and config.interactive:
            conversation.converse(run, chat)
        else:
            with _lines(config, many=config.prompts is not None) as out:
                if kept is not None:
                    run.keep(*kept, tokens[0])
                    run.answer(range(1), asked, tokens, out)
                for first in range(0, len(asked) if kept is None else 0, batch):
                    numbers = range(first, min(first + batch, len(asked)))
                    run.batch(numbers, [asked[i] for i in numbers], [tokens[i] for i in numbers], out)
        console.print(run.speed(), soft_wrap=True)


def _options(
    config: GenerateConfig, model: ModelConfig, tokens: list[list[int]], capacity: int, cached: int
) -> Options:
    """Return engine options for sequences of `capacity` tokens, the first `cached` of which come from a saved cache."""
    devices, batch = jax.device_count(), min(config.batch, len(tokens) or 1)
    capacity = config.capacity or min(room.coarse(capacity), LONGEST)
    longest, dtype = max(map(len, tokens), default=capacity) - cached, jnp.dtype(config.dtype)
    chunk = config.chunk
    if chunk is None:
        budget = memory.available(config.memory)
        chunk = room.prefill_chunk(model, devices, batch, capacity, longest, dtype, budget)
    config, kind = dataclasses.replace(config, chunk=chunk), jax.local_devices()[0].device_kind
    layout, strategy = config.settle(model, devices, batch, capacity, jax.default_backend(), kind)
    how = (layout, batch, capacity, chunk, dtype, strategy, config.kernel)
    return Options(*how, stage_chunk=room.stage_chunk(batch))


def _kept(
    config: GenerateConfig,
    loaded: saved.Saved | None,
    encoder: text.Bytes | text.Tokenizer,
    chat: Chat | None,
    asked: list[Prompt],
    tokens: list[list[int]],
) -> tuple[pathlib.Path, list[int]]:
    """Return the path of --save-cache and the tokens to save: those of the prompt that stay when more text follows."""
    assert config.save_cache is not None
    if len(asked) != 1:
        raise UsageError(f"--save-cache {config.save_cache} is for one prompt; got {len(asked)}. Give the one to save.")
    saved.check_new(config.save_cache)
    stays = opening(asked[0], tokens[0], encoder, chat)
    if loaded is not None and len(stays) < len(loaded.tokens):
        stays = loaded.tokens.tolist()
    if not stays:
        raise UsageError(
            f"{asked[0].where} is too short for --save-cache: all of its tokens may change when more text follows. "
            f"Give a longer prompt."
        )
    return config.save_cache, stays


def _prompts(config: GenerateConfig) -> list[Prompt]:
    if config.prompts is not None:
        return read_prompts(config.prompts, config.chat)
    if config.prompt is not None:
        return [Prompt({"prompt": config.prompt}, "The prompt")]
    if config.interactive and jax.process_count() == 1:
        return []
    raise UsageError("Standard input cannot be read by several processes. Give --prompt or --prompts.")


def with_prompt(config: GenerateConfig) -> GenerateConfig:
    """Return the options with standard input as the prompt if no other prompt is given.

    With --chat on a terminal nothing is read here: the conversation is interactive.
    """
    clustered = config.coordinator is not None or in_cluster(os.environ)
    if config.prompt is not None or config.prompts is not None or clustered:
        return config
    if sys.stdin is None or sys.stdin.isatty():
        if sys.stdin is None or not config.chat:
            raise UsageError("There is no prompt. Give --prompt, --prompts, or text on standard input.")
        if config.local_processes is not None:
            raise UsageError("An interactive conversation runs in one process. Leave out --local-processes.")
        if config.output is not None:
            raise UsageError("An interactive conversation has no output file. Leave out --output, or give --prompt.")
        return config
    try:
        found = sys.stdin.read()
    except UnicodeDecodeError as error:
        raise UsageError(f"Standard input must be UTF-8 text ({error}).") from error
    # `echo` appends a newline: not part of a chat message, but plain text may end with one.
    return dataclasses.replace(config, prompt=found.removesuffix("\n") if config.chat else found)


def _capacity(config: GenerateConfig, settings: Settings, source: Source, tokens: list[list[int]]) -> int:
    """Return the cache capacity in tokens per sequence."""
    if config.capacity is not None:
        capacity = config.capacity
    elif tokens:
        capacity = max(map(len, tokens)) + settings.max_tokens
    else:
        capacity = min(conversation.CAPACITY, _positions(source) or conversation.CAPACITY)
    if capacity > LONGEST:
        raise UsageError(f"Sequences may have up to {LONGEST:,} tokens, because positions are int32; got {capacity:,}.")
    return capacity


def _check_prompts(
    config: GenerateConfig,
    settings: Settings,
    model: ModelConfig,
    capacity: int,
    asked: list[Prompt],
    tokens: list[list[int]],
) -> None:
    """Raise if a prompt exceeds what the model, the cache or an option supports."""
    if (config.alternatives or 0) > model.vocabulary:
        raise UsageError(f"--logprobs {config.alternatives} is more than the vocabulary of {model.vocabulary}.")
    for prompt, row in zip(asked, tokens, strict=True):
        if not row:
            raise UsageError(f"{prompt.where} is empty. A model needs at least one token to generate from.")
        if max(row) >= model.vocabulary:
            raise UsageError(f"{prompt.where} contains token {max(row)}, but the vocabulary has {model.vocabulary}.")
        if len(row) + settings.max_tokens > capacity:
            raise UsageError(
                f"{prompt.where} has {len(row)} tokens; with --max-tokens {settings.max_tokens} it does not fit in "
                f"--capacity {capacity}. Increase --capacity, or shorten the prompt."
            )


def _positions(source: Source) -> int | None:
    """Return the model's maximum sequence length, or None if its folder does not state it."""
    said = "max_position_embeddings" if source.step is None else "length"
    return source.positions if said in source.said else None


def _warnings(
    config: GenerateConfig, settings: Settings, source: Source, asked: list[Prompt], tokens: list[list[int]]
) -> list[str]:
    """Return warnings for the user, one sentence each."""
    lines, positions = [settings.warning] if settings.warning else [], _positions(source)
    longest, where = max(((len(row), prompt.where) for row, prompt in zip(tokens, asked, strict=True)), default=(0, ""))
    if positions is not None and longest > positions:
        lines.append(
            f"Warning: {where} has {longest:,} tokens, more than the model's maximum of {positions:,}: expect poor "
            f"text, or use a model for longer sequences."
        )
    elif positions is not None and longest + settings.max_tokens > positions:
        lines.append(
            f"Warning: {where} has {longest:,} tokens; with --max-tokens {settings.max_tokens:,}, the sequence may "
            f"exceed the model's maximum of {positions:,}: expect poor text from there on."
        )
    stored = source.said.get("torch_dtype", source.said.get("dtype"))
    if stored == "float32" and config.dtype == "bfloat16":
        lines.append("The model's weights are float32; this computes in bfloat16, unless you give --dtype float32.")
    results = RESULTS if config.alternatives is None else RESULTS + LOGPROBS
    taken = sorted({name for prompt in asked for name in prompt.said if name in results})
    if taken:
        lines.append(
            f"Warning: --prompts has fields that the output also has ({', '.join(taken)}): the output's values replace "
            f"them. Rename the fields to keep both."
        )
    return lines


def _check_output(config: GenerateConfig) -> None:
    check_output(config.output)
    if (
        config.output is not None
        and config.prompts is not None
        and config.output.absolute() == config.prompts.absolute()
    ):
        raise UsageError(f"--output {config.output} is the file of --prompts. Choose another file.")


def _mesh() -> jax.sharding.Mesh:
    return make_mesh({AXES.batch: 1, AXES.sequence: jax.device_count()})


def _describe(model: ModelConfig, options: Options, mesh: jax.sharding.Mesh, settings: Settings) -> str:
    """Describe a run in one line."""
    kind = mesh.devices.flat[0].device_kind
    return (
        f"{model.parameters:,} parameters on {mesh.size} {kind} device{'s' * (mesh.size > 1)}, {options.layout!r}, "
        f"{options.dtype}, strategy {options.strategy}; a cache for {options.batch} × {options.capacity:,} tokens"
        + (f"; {settings.note}" if settings.note else "")
    )


@contextlib.contextmanager
def _room(model: ModelConfig, options: Options, devices: int) -> Iterator[None]:
    """Turn an out-of-memory error into advice."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        weights = room.weight_bytes(model, devices, options.dtype)
        cache = room.cache_bytes(model, devices, options.batch, options.capacity, options.dtype)
        raise UsageError(
            f"The devices' memory is too small: with {devices} devices, weights take about {gigabytes(weights)} per "
            f"device and the cache {gigabytes(cache)}. Use more devices, or a smaller --batch, --capacity or --chunk."
        ) from error


@contextlib.contextmanager
def _lines(config: GenerateConfig, many: bool) -> Iterator[Any]:
    """Yield a function that writes one line of JSON, or None if the text is printed instead."""
    if jax.process_index() > 0:
        yield lambda row: None
    elif config.output is None:
        yield (lambda row: print(json.dumps(row, ensure_ascii=False), flush=True)) if many else None
    else:
        try:
            with config.output.open("w", encoding="utf-8") as file:

                def line(row: Any) -> None:
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")
                    file.flush()

                yield line
        except OSError as error:
            raise UsageError(f"--output {config.output} cannot be written: {error.strerror or error}.") from error


def import_model(config: ImportConfig) -> None:
    """Run `striped import`."""
    source = find(config.model)
    files.import_model(source, config.output, _mesh())
    print(f"{source.model.parameters:,} parameters: {config.output}", file=sys.stderr)


def export_model(config: ExportConfig) -> None:
    """Run `striped export`."""
    source = find(config.model)
    with tempfile.TemporaryDirectory() as temporary:
        tokenizer = config.tokenizer or _own_tokenizer(source, pathlib.Path(temporary))
        if tokenizer is not None and not tokenizer.is_file():
            raise UsageError(f"--tokenizer {tokenizer} is not a file. Give a Hugging Face tokenizer.json.")
        if tokenizer is not None and tokenizer.parent.resolve().is_relative_to(source.folder.resolve()):
            for name in BESIDE:  # copied along with it, so they must lie in the folder too
                source.file(tokenizer.parent.resolve() / name)
        files.export_model(source, config.output, config.dtype, tokenizer, _mesh())
    print(f"{source.model.parameters:,} parameters, {config.dtype}: {config.output}", file=sys.stderr)


def _own_tokenizer(source: Source, temporary: pathlib.Path) -> pathlib.Path | None:
    """Return the tokenizer in a model's folder, or a new one if its tokens are bytes; None if neither is known."""
    try:
        return source.tokenizer or write_byte_tokenizer(temporary)
    except NoTokenizer:  # an export does not need one
        return None
