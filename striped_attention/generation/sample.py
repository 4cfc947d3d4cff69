"""Sample: from the scores of all tokens to one of them."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How a token is drawn: the likeliest one at temperature 0, else at random from those that are left.

    Left are the `top_k` likeliest tokens, and of these the fewest whose probabilities add up to `top_p`.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0


def choose(
    sampling: Sampling,
    scores: Float[Array, "batch vocabulary"],
    rows: Int[Array, " batch"],
    positions: Int[Array, " batch"],
) -> Int[Array, " batch"]:
    """A token for every text. What is drawn depends on the seed, the text's number and the position alone."""
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
    key = jax.random.key(sampling.seed)
    draw = lambda row, position, scores: jax.random.categorical(  # noqa: E731
        jax.random.fold_in(jax.random.fold_in(key, row), position), scores
    )
    return jax.vmap(draw)(rows, positions, scores).astype(jnp.int32)
