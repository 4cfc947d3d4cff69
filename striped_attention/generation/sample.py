"""Sample: choose tokens from logits, and compute their log probabilities."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

NO_TOKEN = -1  # in place of a token, for a sequence that has ended


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Sampling parameters. Temperature 0 takes the most likely token; otherwise the next token is sampled.

    Three filters apply in order: keep the `top_k` most likely tokens, of these the smallest set whose probabilities add
    up to `top_p`, and of these the ones at least `min_p` times as likely as the most likely one.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Logprobs:
    """Log probabilities of one step: of the `chosen` tokens [batch], and `top`, the n highest, of `ids` [batch, n]."""

    chosen: np.ndarray
    top: np.ndarray
    ids: np.ndarray


@dataclasses.dataclass(frozen=True)
class Step:
    """One decoding step: `tokens` [batch], NO_TOKEN for sequences that have ended."""

    tokens: np.ndarray
    logprobs: Logprobs | None = None


def choose(
    sampling: Sampling,
    scores: Float[Array, "batch vocabulary"],
    rows: Int[Array, " batch"],
    positions: Int[Array, " batch"],
) -> Int[Array, " batch"]:
    """Choose the next token of every sequence. A sample depends only on the seed, the row's number and the position."""
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
    """Return log probabilities of `tokens`, and those and the ids of the `top` most likely tokens, most likely first.

    They are the model's own, in float32, before temperature, top-k, top-p and min-p.
    """
    likely = jax.nn.log_softmax(scores.astype(jnp.float32), axis=-1)
    chosen = jnp.take_along_axis(likely, tokens[:, None], axis=-1)[:, 0]
    values, ids = lax.top_k(likely, top)
    return chosen, values, ids.astype(jnp.int32)
