"""Validation: the loss on held-out data, by position, while a run goes on. It changes nothing of the run."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from striped_attention import data
from striped_attention.data.sources import Named, parse
from striped_attention.errors import UsageError
from striped_attention.runtime.compiler import compiler_options
from striped_attention.training.config import TrainConfig
from striped_attention.training.loss_by_position import Losses, Sums, loss_sums
from striped_attention.training.step import Inputs, Program

EVERY, SEQUENCES = 100, 32  # steps between validations, and sequences of each, if nobody says otherwise


def check(config: TrainConfig) -> None:
    """Raise for held-out data that cannot be loaded, as far as that can be seen without reading it."""
    if config.validation is None:
        return
    with _named():
        check_unweighted("--validation", config.validation)
        config.check(config.validation)


def held_out(program: Program) -> "HeldOut | None":
    """What a run validates on, if anything. Raises UsageError for data that cannot be."""
    config = program.config
    if config.validation is None:
        return None
    check(config)
    with _named():
        corpus = config.load(config.validation)
        data.whole_rows(corpus, config.sequence_length)
    # As much at a time as a step works on, which may be a part of a batch.
    part = dataclasses.replace(config, batch=config.batch // config.accumulate, accumulate=1)
    own = dataclasses.replace(program, config=part, documents=corpus.documents)
    found = HeldOut(own, corpus, config.validation_sequences or SEQUENCES)
    found.check("--validation", "--validation-sequences")
    return found


@contextlib.contextmanager
def _named() -> Iterator[None]:
    """What is wrong with data is told of --validation."""
    try:
        yield
    except UsageError as error:
        raise UsageError(str(error).replace("--data", "--validation")) from error


def check_unweighted(flag: str, sources: Named) -> None:
    """Raise if one of several sources has a weight: held-out sequences all count alike."""
    weighted = [source.path for source in parse(sources) if source.weight is not None]
    if weighted:
        raise UsageError(f"{flag} takes no weights, but {weighted[0]} has one. Leave it out: sequences count alike.")


@dataclasses.dataclass(frozen=True, eq=False)
class HeldOut:
    """`count` sequences, spread evenly over a corpus (or all of it), and the program that takes their losses."""

    program: Program
    corpus: data.Data
    count: int

    @property
    def sequences(self) -> int:
        return min(self.count, self._rows)

    @functools.cached_property
    def _rows(self) -> int:
        return data.whole_rows(self.corpus, self.program.config.sequence_length)

    def check(self, data_flag: str, count_flag: str) -> None:
        """Raise if no token of all sequences counts in the loss. Reads no more of them than it must."""
        if not any(self._read(number).weights.any() for number in range(self.sequences)):
            more = f", or more of it with {count_flag}" if self.sequences < self._rows else ""
            raise UsageError(
                f"{data_flag} needs tokens that count in the loss, but none does in {self.sequences:,} "
                f"sequence{'s' * (self.sequences > 1)} of {self.corpus.source}. Give other data{more}."
            )

    @property
    def batches(self) -> int:
        return -(-self.sequences // self.program.config.batch)

    def compile(self) -> None:
        """Now, rather than at the first batch."""
        assert self.compiled is not None

    @functools.cached_property
    def compiled(self) -> Any:
        """`compiled(weights, inputs) -> Sums`."""
        program = self.program
        options = compiler_options(deterministic=program.config.deterministic, device=program.mesh.devices.flat[0])
        step = jax.jit(functools.partial(loss_sums, program))
        return step.lower(program.state.weights, program.inputs).compile(compiler_options=options)

    def losses(self, weights: Any, say: Any = None) -> Losses:
        """Over all sequences. `say(done)` is told after every batch."""
        totals = None
        for number in range(self.batches):
            sums = jax.device_get(self.compiled(weights, self._inputs(number)))
            wide = Sums(*(x.astype(np.int64 if x.dtype.kind == "i" else np.float64) for x in sums))
            totals = wide if totals is None else Sums(*(a + b for a, b in zip(totals, wide, strict=True)))
            if say is not None:
                say(number + 1)
        assert totals is not None
        return Losses.of(totals, self.program.config.sequence_length)

    def _read(self, number: int) -> data.Batch:
        """A sequence, by its number among those that are validated on."""
        place = number * self._rows // self.sequences
        return data.rows_in_order(self.corpus, place, 1, self.program.config.sequence_length)

    def _inputs(self, number: int) -> Inputs:
        """A batch on the mesh. What is missing in the last one is filled with sequences that do not count."""
        config, rows = self.program.config, self.program.rows
        numbers = np.arange(number * config.batch + rows.start, number * config.batch + rows.stop)
        read = [self._read(number) for number in numbers.tolist()]
        batch = data.Batch(*(np.concatenate(arrays) for arrays in zip(*read, strict=True)))
        counts = (numbers < self.sequences)[:, None]
        return self.program.place(batch._replace(weights=np.where(counts, batch.weights, np.float32(0))))
