"""Sample: from the scores of all tokens to one of them, and how likely it was."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

NOBODY = -1  # instead of the token of a sequence that has ended


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is chosen: the likeliest one at temperature 0, else sampled from those that are left.

    Left are the `top_k` likeliest tokens, of these the fewest whose probabilities add up to `top_p`, and of these
    the ones at least `min_p` times as likely as the likeliest.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Logprobs:
    """Log probabilities of one step: of the `chosen` tokens [batch], and `top`, the n largest, of `ids` [batch, n]."""

    chosen: np.ndarray
    top: np.ndarray
    ids: np.ndarray


@dataclasses.dataclass(frozen=True)
class Step:
    """One token of every sequence: `tokens` [batch], NOBODY where a sequence has ended."""

    tokens: np.ndarray
    logprobs: Logprobs | None = None


def choose(
    sampling: Sampling,
    scores: Float[Array, "batch vocabulary"],
    rows: Int[Array, " batch"],
    positions: Int[Array, " batch"],
) -> Int[Array, " batch"]:
    """The next token of every sequence. A sample depends on the seed, the sequence's number and the position alone."""
    if sampling.temperature == 0:
        return jnp.argmax(scores, axis=-1).astype(jnp.int32)
    scores = scores / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < scores.shape[-1]:
        least = lax.top_k(scores, sampling.top_k)[0][:, -1:]
        scores = jnp.where(scores < least, -jnp.inf, scores)
    if sampling.top_p < 1:
        ordered = jnp.sort(scores, axis=-1, descending=True)
        likely = jax.nn.softmax(ordered, axis=-1)
        before = jnp.cumsum(likely, axis=-1) - likely
        least = jnp.min(jnp.where(before < sampling.top_p, ordered, jnp.inf), axis=-1, keepdims=True)
        scores = jnp.where(scores < least, -jnp.inf, scores)
    if sampling.min_p > 0:
        least = jnp.max(scores, axis=-1, keepdims=True) + math.log(sampling.min_p)
        scores = jnp.where(scores < least, -jnp.inf, scores)
    key = jax.random.key(sampling.seed)
    sample = lambda row, position, scores: jax.random.categorical(  # noqa: E731
        jax.random.fold_in(jax.random.fold_in(key, row), position), scores
    )
    return jax.vmap(sample)(rows, positions, scores).astype(jnp.int32)


def logprobs(
    scores: Float[Array, "batch vocabulary"], tokens: Int[Array, " batch"], top: int
) -> tuple[Float[Array, " batch"], Float[Array, "batch top"], Int[Array, "batch top"]]:
    """Log probabilities of tokens, and the likeliest `top` tokens with theirs, likeliest first.

    They are the model's own, in float32: before temperature, top-k and top-p.
    """
    likely = jax.nn.log_softmax(scores.astype(jnp.float32), axis=-1)
    chosen = jnp.take_along_axis(likely, tokens[:, None], axis=-1)[:, 0]
    values, ids = lax.top_k(likely, top)
    return chosen, values, ids.astype(jnp.int32)
