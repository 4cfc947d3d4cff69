"""Validation: the loss on held-out data, by position, during a run. It never affects the training itself."""

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

EVERY, SEQUENCES = 100, 32  # default steps between validations, and sequences per validation


def check(config: TrainConfig) -> None:
    """Raise if the held-out data cannot be loaded, as far as this can be checked without reading all of it."""
    if config.validation is None:
        return
    with _named():
        check_unweighted("--validation", config.validation)
        config.check(config.validation)


def held_out(program: Program) -> "HeldOut | None":
    """Return the held-out data of a run, if any. Raises UsageError for data that cannot be used."""
    config = program.config
    if config.validation is None:
        return None
    check(config)
    with _named():
        corpus = config.load(config.validation)
        data.whole_rows(corpus, config.sequence_length)
    # Use batches of the size that a step processes at once: with --accumulate, a part of the batch.
    part = dataclasses.replace(config, batch=config.batch // config.accumulate, accumulate=1)
    own = dataclasses.replace(program, config=part, documents=corpus.documents)
    found = HeldOut(own, corpus, config.validation_sequences or SEQUENCES)
    found.check("--validation", "--validation-sequences")
    return found


@contextlib.contextmanager
def _named() -> Iterator[None]:
    """Let errors about data name --validation instead of --data."""
    try:
        yield
    except UsageError as error:
        raise UsageError(str(error).replace("--data", "--validation")) from error


def check_unweighted(flag: str, sources: Named) -> None:
    """Raise if a source has a weight: all held-out sequences count equally."""
    weighted = [source.path for source in parse(sources) if source.weight is not None]
    if weighted:
        raise UsageError(f"{flag} takes no weights, but {weighted[0]} has one. Leave it out: sequences count equally.")


@dataclasses.dataclass(frozen=True, eq=False)
class HeldOut:
    """`count` sequences spread evenly over a corpus, or all if there are fewer, and the program for their losses."""

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
        """Raise if no token in any sequence counts in the loss. Stops reading at the first one that does."""
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
        """Compile now instead of at the first batch."""
        assert self.compiled is not None

    @functools.cached_property
    def compiled(self) -> Any:
        """`compiled(weights, inputs) -> Sums`."""
        program = self.program
        options = compiler_options(deterministic=program.config.deterministic, device=program.mesh.devices.flat[0])
        step = jax.jit(functools.partial(loss_sums, program))
        return step.lower(program.state.weights, program.inputs).compile(compiler_options=options)

    def losses(self, weights: Any, say: Any = None) -> Losses:
        """Return the losses over all sequences. Calls `say(batches_done)` after every batch."""
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
        """Read a held-out sequence by its index, from 0 to `sequences` - 1."""
        place = number * self._rows // self.sequences
        return data.rows_in_order(self.corpus, place, 1, self.program.config.sequence_length)

    def _inputs(self, number: int) -> Inputs:
        """A batch on the mesh. The last batch is filled up with sequences of weight 0."""
        config, rows = self.program.config, self.program.rows
        numbers = np.arange(number * config.batch + rows.start, number * config.batch + rows.stop)
        read = [self._read(number) for number in numbers.tolist()]
        batch = data.Batch(*(np.concatenate(arrays) for arrays in zip(*read, strict=True)))
        counts = (numbers < self.sequences)[:, None]
        return self.program.place(batch._replace(weights=np.where(counts, batch.weights, np.float32(0))))
