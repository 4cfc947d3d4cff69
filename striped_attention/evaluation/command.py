"""Command: find the model, evaluate it, print tables and write JSON."""

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import rich.console
import rich.progress

from striped_attention import data
from striped_attention.errors import Diverged, UsageError
from striped_attention.evaluation import table
from striped_attention.evaluation.config import EvaluateConfig
from striped_attention.evaluation.forward import Answering, AnyForward, fitting, make_program, plain_config
from striped_attention.evaluation.needle import Cell, Haystacks
from striped_attention.generation import text
from striped_attention.models.config import Weights
from striped_attention.options import check_output
from striped_attention.runtime.mesh import make_mesh
from striped_attention.runtime.record import metadata, write
from striped_attention.training import arrays, memory, trainer
from striped_attention.training.loss_by_position import perplexity
from striped_attention.training.source import Source, find
from striped_attention.training.validation import HeldOut, check_unweighted


def evaluate(config: EvaluateConfig) -> None:
    """Run `striped evaluate`. All options are validated before weights are read."""
    check_output(config.output)
    run = Run(config, find(config.model))
    document = {**run.describe(), "perplexity": {"by_position": []}, "needle": {"cells": []}}
    with _room(run.config):
        weights = arrays.read_stacked(run.source, run.mesh)
        if run.held_out is not None:
            document["perplexity"] = run.perplexity(run.fitting(run.held_out), weights)
        if run.haystacks is not None:
            document["needle"] = run.needles(run.haystacks, weights)
    if config.output is not None and jax.process_index() == 0:
        write(document, config.output)
        run.notes.print(f"Written to {config.output}; plot it with `striped report {config.output}`.", soft_wrap=True)


@contextlib.contextmanager
def _room(config: EvaluateConfig) -> Iterator[None]:
    """Turn an out-of-memory error of the devices into a UsageError with advice."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        chunk = "" if config.chunk is None else ", or leave out --chunk"
        raise UsageError(
            f"The devices' memory is too small for {config.batch} × {config.sequence_length} tokens at a time. Use "
            f"more devices, or a smaller --batch, --length or --lengths{chunk}."
        ) from error


class Run:
    """A model and its evaluation data: held-out sequences, haystacks, or both. Does not hold the weights."""

    def __init__(self, config: EvaluateConfig, source: Source) -> None:
        length = config.sequence_length or source.length
        self.source = source
        self.mesh = make_mesh(trainer.mesh_sizes(plain_config(config, source.model, length), jax.device_count()))
        self.room = memory.available(config.memory)
        quiet = jax.process_index() > 0
        self.shown = rich.console.Console(quiet=quiet, highlight=False)
        self.notes = rich.console.Console(quiet=quiet, highlight=False, stderr=True)
        self.config = config = dataclasses.replace(config, sequence_length=length)
        if config.tokenizer is not None:
            source.check_tokenizer(config.tokenizer)
        corpus = self._load()
        data.whole_rows(corpus, length)
        given = "" if config.data is not None else "; --data evaluates on other text"
        self.notes.print(f"Evaluates {config.model} on {corpus.source}, {corpus.size:,} tokens{given}.", soft_wrap=True)
        self.held_out, self.haystacks, self.lengths = None, None, config.lengths or ()
        if config.only != "perplexity":
            encoder, _ = text.load(source, config.tokenizer)
            self.haystacks = Haystacks(config, corpus, encoder)
            self.lengths = self.lengths or self.haystacks.lengths(length)
            for haystack in self.lengths:
                self.haystacks.sequence(haystack, 0, 0)  # raises if the haystack is too short
        if config.only != "needle":
            program = make_program(config, source.model, self.mesh, length, corpus.documents, self.room)
            self.held_out = HeldOut(program, corpus, config.sequences)
            self.held_out.check("--data", "--sequences")
        self._warn_of_length()

    def _warn_of_length(self) -> None:
        """Warn if sequences are longer than the model's positions support."""
        flag, longest = "--length", self.config.sequence_length or 0
        if self.haystacks is not None and max(self.lengths) > longest:
            flag, longest = "--lengths", max(self.lengths)
        if longest > self.source.positions:
            self.notes.print(
                f"Warning: {flag} {longest} is longer than the {self.source.positions} positions that the model "
                f"supports.",
                soft_wrap=True,
            )

    def _load(self) -> data.Data:
        config, source = self.config, self.source
        check_unweighted("--data", config.data)
        tokenizer = None if data.all_raw(config.data) else config.tokenizer or source.tokenizer
        columns = data.Columns(config.text_column)
        return data.load(config.data, tokenizer, config.end_token, source.model.vocabulary, columns, config.data_cache)

    def describe(self) -> dict[str, Any]:
        """The configuration, devices and model, for the JSON."""
        device, source = self.mesh.devices.flat[0], self.source
        return {
            **metadata("evaluate", self.config.record(), ("orbax-checkpoint", "tokenizers")),
            "devices": {"kind": device.device_kind, "mesh": dict(self.mesh.shape), "processes": jax.process_count()},
            "model": {"parameters": source.model.parameters, "step": source.step, "length": source.length},
        }

    def fitting(self, forward: AnyForward) -> AnyForward:
        """Return the compiled `forward`, with smaller chunks if it does not fit in the devices' memory."""
        return fitting(forward, self.config, self.room)

    def perplexity(self, held_out: HeldOut, weights: Weights) -> dict[str, Any]:
        """Print the loss by position and return it for the JSON."""
        with self._bar("perplexity", held_out.batches) as advance:
            found = held_out.losses(weights, lambda done: advance(1))
        self._check_finite("loss", found.loss)
        self.shown.print(table.losses(found))
        value = perplexity(found.loss)
        return {
            **found.as_json(),
            "perplexity": value if math.isfinite(value) else None,
            "sequences": held_out.sequences,
            "chunk": held_out.program.config.chunk,
        }

    def needles(self, haystacks: Haystacks, weights: Weights) -> dict[str, Any]:
        """Print the share of needles found by length and depth, and return the results for the JSON."""
        config, cells = self.config, []
        with self._bar("needles", len(self.lengths) * len(config.depths) * config.draws) as advance:
            for length in self.lengths:
                cells += self._of_length(haystacks, weights, length, advance)
        self.shown.print(f"Needles found, by depth and haystack length in tokens ({config.draws} haystacks per cell):")
        self.shown.print(table.needles(cells))
        return {"cells": [dataclasses.asdict(cell) for cell in cells]}

    def _of_length(self, haystacks: Haystacks, weights: Weights, length: int, advance: Any) -> list[Cell]:
        config = self.config
        forward = self.fitting(Answering(make_program(config, self.source.model, self.mesh, length, False, self.room)))
        program, answers = forward.program, forward.compiled
        cases = [(length, depth, draw) for depth in config.depths for draw in range(config.draws)]
        wrong, losses = [], []
        for first in range(0, len(cases), config.batch):
            some = cases[first : first + config.batch]
            found = jax.device_get(answers(weights, program.place(haystacks.batch(some, program.rows))))
            wrong += found.wrong[: len(some)].tolist()
            losses += found.loss[: len(some)].tolist()
            advance(len(some))
        self._check_finite("loss of an answer", float(np.sum(losses)))
        by_depth = zip(*(np.reshape(x, (-1, config.draws)) for x in (wrong, losses)), strict=True)
        return [
            Cell(length, depth, config.draws, int(np.sum(wrong == 0)), float(np.mean(losses)))
            for depth, (wrong, losses) in zip(config.depths, by_depth, strict=True)
        ]

    def _check_finite(self, what: str, value: float) -> None:
        if not math.isfinite(value):
            raise Diverged(
                f"The {what} must be finite, but for {self.config.model} it is {value}. Try --dtype float32; if that "
                f"does not help, the model's weights are broken."
            )

    @contextlib.contextmanager
    def _bar(self, what: str, total: int) -> Iterator[Any]:
        """Show a progress bar. Yields a function that advances it by a number of items."""
        columns = (rich.progress.TextColumn(what), rich.progress.BarColumn(), rich.progress.MofNCompleteColumn())
        options: Any = {"console": self.notes, "transient": True, "disable": not self.notes.is_terminal}
        with rich.progress.Progress(*columns, rich.progress.TimeRemainingColumn(), **options) as bar:
            task = bar.add_task("", total=total)
            yield lambda more: bar.advance(task, more)
