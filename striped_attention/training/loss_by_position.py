"""Loss by position: the mean loss of held-out tokens, overall and by how much of its own document a token can see.

A token's context is its position minus the first position that its document mask lets it see; where a document begins
in the packed sequence does not matter. Contexts fall into ranges that double, up to the sequence length:

    0–255    256–511    512–1023    1024–2047    …

If the loss keeps falling from range to range, the model uses its long context; where it levels off, or rises, it does
not. Every device adds up the losses of its own slots in float32, range by range; one sum over the mesh gives the total.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from striped_attention.models.llama import token_losses
from striped_attention.models.stages import AXES
from striped_attention.training.step import Inputs, Program

FIRST = 256  # tokens of the first range


def range_starts(length: int) -> list[int]:
    """The least context of every range, for sequences of `length` tokens."""
    starts = [0]
    while max(FIRST, 2 * starts[-1]) < length:
        starts.append(max(FIRST, 2 * starts[-1]))
    return starts


class Sums(NamedTuple):
    """Of a batch, by range: losses times loss weights, loss weights, and how many tokens have one above 0."""

    losses: Any
    weights: Any
    tokens: Any


def loss_sums(program: Program, weights: Any, inputs: Inputs) -> Sums:
    """The sums of a batch over the whole mesh; to be compiled. Forward only."""
    starts = np.array(range_starts(program.config.sequence_length), np.int32)
    specs = input_specs(inputs)

    def shard(weights: Any, inputs: Inputs) -> Sums:
        losses = token_losses(
            *(program.model, program.compute, weights, program.specs),
            *(inputs.tokens, inputs.targets, inputs.mask, program.attend),
        )
        context = jnp.broadcast_to(program.compute.positions(), inputs.tokens.shape)
        if inputs.mask.lo is not None:
            context = context - inputs.mask.lo
        ends = np.append(starts[1:], np.iinfo(np.int32).max)[:, None, None]
        inside = (starts[:, None, None] <= context) & (context < ends)
        add = lambda x: jnp.sum(jnp.where(inside, x, 0), axis=(1, 2), dtype=x.dtype)  # noqa: E731
        counted = (inputs.weights > 0).astype(jnp.int32)
        # Where there is no target, as in padding, a loss may be anything.
        weighted = jnp.where(inputs.weights > 0, losses * inputs.weights, 0)
        return lax.psum(Sums(add(weighted), add(inputs.weights), add(counted)), AXES.everything)

    in_specs, out = (program.specs, specs), Sums(*[PartitionSpec()] * 3)
    return jax.shard_map(shard, mesh=program.mesh, in_specs=in_specs, out_specs=out)(weights, inputs)


def input_specs(inputs: Inputs) -> Inputs:
    """How a batch lies on the mesh."""
    tokens = AXES.tokens
    return Inputs(tokens, tokens, tokens, jax.tree.map(lambda _: tokens, inputs.mask), PartitionSpec(AXES.everything))


def perplexity(loss: float) -> float:
    """e to the loss; infinite where a float cannot hold it."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


@dataclasses.dataclass(frozen=True)
class Range:
    """Tokens with a context of `first` to `last` tokens, and their mean loss."""

    first: int
    last: int
    tokens: int
    loss: float


@dataclasses.dataclass(frozen=True)
class Losses:
    """The mean loss of all tokens, and of those in every range that has any."""

    loss: float
    tokens: int
    ranges: tuple[Range, ...]

    @classmethod
    def of(cls, sums: Sums, length: int) -> "Losses":
        """From sums over all batches, on the host. At least one token must have a loss weight."""
        losses, weights, tokens = (np.asarray(x) for x in sums)
        assert tokens.any(), "no token counts"
        starts = range_starts(length)
        ends = [*starts[1:], length]
        ranges = tuple(
            Range(starts[i], ends[i] - 1, int(tokens[i]), float(losses[i] / weights[i]))
            for i in np.flatnonzero(tokens > 0)
        )
        return cls(float(losses.sum() / weights.sum()), int(tokens.sum()), ranges)

    def as_json(self) -> dict[str, Any]:
        by_position = [{"from": r.first, "to": r.last, "tokens": r.tokens, "loss": r.loss} for r in self.ranges]
        return {"loss": self.loss, "tokens": self.tokens, "by_position": by_position}

    def tags(self) -> dict[str, float]:
        """Names and values for TensorBoard and the like."""
        by_position = {f"validation/loss_by_position/{r.first}": r.loss for r in self.ranges}
        return {"validation/loss": self.loss, **by_position}

    def __str__(self) -> str:
        return f"{self.loss:.4f} · " + " · ".join(f"{r.first}–{r.last} {r.loss:.4f}" for r in self.ranges)
