"""Loss by position: the mean loss of held-out tokens, overall and by how many tokens of its document a token can see.

A token's context is its position minus the first position that its document mask lets it see; where a document begins
in the packed sequence does not matter. Contexts are grouped into ranges that double, up to the sequence length:

    0–255    256–511    512–1023    1024–2047    …

If the loss keeps falling from range to range, the model uses its long context; where it levels off or rises, it does
not. Each device sums the losses of its own slots per range, in float32; one all-reduce over the mesh gives the totals.
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
    """The smallest context of every range, for sequences of `length` tokens."""
    starts = [0]
    while max(FIRST, 2 * starts[-1]) < length:
        starts.append(max(FIRST, 2 * starts[-1]))
    return starts


class Sums(NamedTuple):
    """Sums over a batch, per range: weighted losses, loss weights, and the number of tokens with a weight above 0."""

    losses: Any
    weights: Any
    tokens: Any


def loss_sums(program: Program, weights: Any, inputs: Inputs) -> Sums:
    """Return the sums of a batch over the whole mesh, by a forward pass. To be compiled by the caller."""
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
        # Where there is no target, as in padding, the loss is undefined.
        weighted = jnp.where(inputs.weights > 0, losses * inputs.weights, 0)
        return lax.psum(Sums(add(weighted), add(inputs.weights), add(counted)), AXES.everything)

    in_specs, out = (program.specs, specs), Sums(*[PartitionSpec()] * 3)
    return jax.shard_map(shard, mesh=program.mesh, in_specs=in_specs, out_specs=out)(weights, inputs)


def input_specs(inputs: Inputs) -> Inputs:
    """How a batch is sharded over the mesh."""
    tokens = AXES.tokens
    return Inputs(tokens, tokens, tokens, jax.tree.map(lambda _: tokens, inputs.mask), PartitionSpec(AXES.everything))


def perplexity(loss: float) -> float:
    """exp(loss); infinity on overflow."""
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
    """The mean loss of all tokens, and per range, without ranges that have no tokens."""

    loss: float
    tokens: int
    ranges: tuple[Range, ...]

    @classmethod
    def of(cls, sums: Sums, length: int) -> "Losses":
        """Compute the means from sums over all batches, on the host. At least one token must have a weight above 0."""
        losses, weights, tokens = (np.asarray(x) for x in sums)
        assert tokens.any(), "no token counts in the loss"
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
        """Names and values of the scalars for TensorBoard and Weights & Biases."""
        by_position = {f"validation/loss_by_position/{r.first}": r.loss for r in self.ranges}
        return {"validation/loss": self.loss, **by_position}

    def __str__(self) -> str:
        return f"{self.loss:.4f} · " + " · ".join(f"{r.first}–{r.last} {r.loss:.4f}" for r in self.ranges)
