"""Command: the loop around an engine. Prompts in batches, text as it comes, lines of JSON, and how fast it went."""

import contextlib
import dataclasses
import json
import os
import pathlib
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import rich.console
import rich.progress

from striped_attention.core.layout import INT32_MAX
from striped_attention.errors import UsageError
from striped_attention.generation import text, weights
from striped_attention.generation.config import ExportConfig, GenerateConfig, ImportConfig
from striped_attention.generation.engine import NOBODY, Engine, Options
from striped_attention.huggingface.writing import BESIDE
from striped_attention.models.llama import ModelConfig
from striped_attention.models.stages import AXES
from striped_attention.options import check_output
from striped_attention.planning.cost import gigabytes
from striped_attention.runtime.mesh import make_mesh
from striped_attention.training.arrays import read_layers
from striped_attention.training.launch import in_cluster
from striped_attention.training.source import NoTokenizer, Source, find

LONGEST = INT32_MAX - 2**20  # tokens; padding comes on top


def generate(config: GenerateConfig) -> None:
    """`striped generate`. What can be refused is refused before weights are read."""
    source = find(config.model)
    encoder, stop = text.load(source, config.tokenizer)
    prompts = _prompts(config)
    tokens = [_encode(encoder, prompt) for prompt in prompts]
    capacity = _check_prompts(config, source.model, tokens)
    devices, batch = jax.device_count(), min(config.batch, len(prompts))
    kind = jax.local_devices()[0].device_kind
    layout, strategy = config.settle(source.model, devices, batch, capacity, jax.default_backend(), kind)
    _check_output(config)
    options = Options(layout, batch, capacity, config.chunk, jnp.dtype(config.dtype), strategy, config.kernel)
    console = rich.console.Console(stderr=True, quiet=jax.process_index() > 0, highlight=False)
    mesh = _mesh()
    with _room(source.model, options, devices):
        console.print(_describe(source.model, options, mesh), soft_wrap=True)
        engine = Engine(source.model, read_layers(source, mesh, options.dtype), mesh, options)
        run = _Run(config, engine, encoder, stop, console)
        with _lines(config, many=config.prompts is not None) as out:
            for first in range(0, len(prompts), batch):
                numbers = range(first, min(first + batch, len(prompts)))
                run.batch(numbers, [tokens[i] for i in numbers], [prompts[i] for i in numbers], out)
        console.print(run.speed(), soft_wrap=True)


def _encode(encoder: Any, prompt: str) -> list[int]:
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"A prompt is not text that UTF-8 can hold ({error}).") from error
    return encoder.encode(prompt)


def _prompts(config: GenerateConfig) -> list[str]:
    if config.prompts is not None:
        return text.read_prompts(config.prompts)
    if config.prompt is not None:
        return [config.prompt]
    raise UsageError("Of several processes not all have a standard input. Give --prompt or --prompts.")


def with_prompt(config: GenerateConfig) -> GenerateConfig:
    """The options with what comes through standard input, if there is no other prompt."""
    clustered = config.coordinator is not None or in_cluster(os.environ)
    if config.prompt is not None or config.prompts is not None or clustered:
        return config
    if sys.stdin is None or sys.stdin.isatty():
        raise UsageError("There is no prompt. Give --prompt, --prompts, or text through standard input.")
    try:
        return dataclasses.replace(config, prompt=sys.stdin.read())
    except UnicodeDecodeError as error:
        raise UsageError(f"What came through standard input is not UTF-8 text ({error}).") from error


def _check_prompts(config: GenerateConfig, model: ModelConfig, tokens: list[list[int]]) -> int:
    """The capacity that all prompts and their continuations need, or the one that was asked for."""
    longest = max(map(len, tokens))
    capacity = config.capacity or longest + config.max_tokens
    if capacity > LONGEST:
        raise UsageError(f"Texts may have up to {LONGEST:,} tokens, as many as positions can count; got {capacity:,}.")
    for number, prompt in enumerate(tokens, 1):
        which = "The prompt" if len(tokens) == 1 else f"Prompt {number}"
        if not prompt:
            raise UsageError(f"{which} is empty. A model goes on from at least one token.")
        if max(prompt) >= model.vocabulary:
            raise UsageError(f"{which} has the token {max(prompt)}, but the vocabulary is {model.vocabulary}.")
        if config.capacity is not None and len(prompt) + config.max_tokens > config.capacity:
            raise UsageError(
                f"{which} has {len(prompt)} tokens, and with --max-tokens {config.max_tokens} more it does not fit in "
                f"--capacity {config.capacity}. Make that larger, or the prompt shorter."
            )
    return capacity


def _check_output(config: GenerateConfig) -> None:
    check_output(config.output)
    if (
        config.output is not None
        and config.prompts is not None
        and config.output.absolute() == config.prompts.absolute()
    ):
        raise UsageError(f"--output {config.output} is the file of the prompts. Give another one.")


def _mesh() -> jax.sharding.Mesh:
    return make_mesh({AXES.batch: 1, AXES.sequence: jax.device_count()})


def _describe(model: ModelConfig, options: Options, mesh: jax.sharding.Mesh) -> str:
    """A run in a line."""
    kind = mesh.devices.flat[0].device_kind
    return (
        f"{model.parameters:,} parameters on {mesh.size} {kind} device{'s' * (mesh.size > 1)}, {options.layout!r}, "
        f"{options.dtype}, strategy {options.strategy}; a cache for {options.batch} × {options.capacity:,} tokens"
    )


@contextlib.contextmanager
def _room(model: ModelConfig, options: Options, devices: int) -> Iterator[None]:
    """Say what to do when the devices' memory is too small."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        width = jnp.dtype(options.dtype).itemsize
        kept = options.capacity if model.window is None else min(options.capacity, model.window)
        cache = 2 * model.layers * options.batch * kept * model.kv_heads * model.head_dim * width // devices
        raise UsageError(
            f"The devices' memory is too small: on each of {devices} weights take about "
            f"{gigabytes(model.parameters * width // devices)} and the cache {gigabytes(cache)}. Use more devices, a "
            f"smaller --batch, --capacity or --chunk."
        ) from error


@contextlib.contextmanager
def _lines(config: GenerateConfig, many: bool) -> Iterator[Any]:
    """Where lines of JSON go, each when its text is done; None if the text is shown instead."""
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


class _Run:
    """Batch after batch, with the clock running."""

    def __init__(self, config: GenerateConfig, engine: Engine, encoder: Any, stop: list[int], console: Any) -> None:
        self.config, self.engine, self.encoder, self.stop, self.console = config, engine, encoder, stop, console
        self.read_tokens = self.read_seconds = self.written = self.write_steps = self.write_seconds = 0.0

    def batch(self, numbers: range, prompts: list[list[int]], said: list[str], out: Any) -> None:
        """Read some prompts and write on from all of them."""
        engine, missing = self.engine, self.engine.options.batch - len(prompts)
        engine.clear()
        with self._clock() as clock:
            self._read([*prompts, *[prompts[0][:1]] * missing])
        self.read_tokens += sum(map(len, prompts))
        self.read_seconds += clock["seconds"]
        new: list[list[int]] = [[] for _ in prompts]
        streams = [self.encoder.stream(prompt) for prompt in prompts]
        pieces: list[list[str]] = [[] for _ in prompts]
        rows = [*numbers, *[0] * missing]
        active = np.arange(engine.options.batch) < len(prompts)
        with self._clock() as clock:
            for step in engine.write(self.config.max_tokens, self.config.sampling, self.stop, rows, active):
                tokens = step.tokens
                self.write_steps += 1
                for row in range(len(prompts)):
                    if tokens[row] != NOBODY:
                        new[row].append(int(tokens[row]))
                        if tokens[row] not in self.stop:
                            pieces[row].append(streams[row].add(int(tokens[row])))
                if out is None:
                    print(pieces[0][-1] if tokens[0] not in self.stop else "", end="", flush=True)
        for row, stream in enumerate(streams):
            pieces[row].append(stream.finish())
        if out is None:
            print(pieces[0][-1], flush=True)
        self.written += sum(map(len, new))
        self.write_seconds += clock["seconds"]
        if out is None:
            return
        for row, number in enumerate(numbers):
            ended = "end" if new[row][-1] in self.stop else "length"
            words = {"prompt": said[row], "text": "".join(pieces[row]), "tokens": new[row], "finish": ended}
            out({"number": number + 1, **words, "prompt_tokens": len(prompts[row]), "new_tokens": len(new[row])})

    def _read(self, prompts: list[list[int]]) -> None:
        columns = (rich.progress.TextColumn("reading"), rich.progress.BarColumn(), rich.progress.MofNCompleteColumn())
        with rich.progress.Progress(*columns, console=self.console, transient=True) as bar:
            task = bar.add_task("", total=max(map(len, prompts)))
            self.engine.read(prompts, lambda done, _: bar.update(task, completed=done))

    @contextlib.contextmanager
    def _clock(self) -> Iterator[dict[str, float]]:
        """Seconds until everything is done, compiling left out."""
        clock: dict[str, float] = {}
        begun, compiled = time.perf_counter(), self.engine.compiling
        yield clock
        jax.block_until_ready(self.engine.scores)
        clock["seconds"] = time.perf_counter() - begun - (self.engine.compiling - compiled)

    def speed(self) -> str:
        """How fast it went, in a line."""
        return (
            f"prefill {self.read_tokens:,.0f} tokens, {self.read_tokens / self.read_seconds:,.0f} tokens/s; decode "
            f"{self.written:,.0f} tokens, {self.written / self.write_seconds:,.1f} tokens/s, "
            f"{1e3 * self.write_seconds / self.write_steps:,.1f} ms a step (compiling: {self.engine.compiling:.0f} s)"
        )


def import_model(config: ImportConfig) -> None:
    """`striped import`."""
    source = find(config.model)
    weights.import_model(source, config.output, _mesh())
    print(f"{source.model.parameters:,} parameters: {config.output}", file=sys.stderr)


def export_model(config: ExportConfig) -> None:
    """`striped export`."""
    source = find(config.model)
    tokenizer = config.tokenizer or _own_tokenizer(source)
    if tokenizer is not None and not tokenizer.is_file():
        raise UsageError(f"--tokenizer {tokenizer} is not a file. Give a Hugging Face tokenizer.json.")
    if tokenizer is not None and tokenizer.parent.resolve().is_relative_to(source.folder.resolve()):
        for name in BESIDE:  # copied with it, so these must lie in the folder as well
            source.file(tokenizer.parent.resolve() / name)
    weights.export_model(source, config.output, config.dtype, tokenizer, _mesh())
    print(f"{source.model.parameters:,} parameters, {config.dtype}: {config.output}", file=sys.stderr)


def _own_tokenizer(source: Source) -> pathlib.Path | None:
    """The tokenizer in the folder of a model, if there is one."""
    try:
        return source.tokenizer
    except NoTokenizer:  # an export can do without
        return None
