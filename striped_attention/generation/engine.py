"""Engine: a model with a cache. It reads texts, any number of tokens at a time, and writes on, token by token.

    read      the training path, chunk by chunk and layer by layer: tokens dealt to the devices, weights gathered for a
              stage, the same strategies; every layer's keys and values go into its cache
    write     one program a token: activations are small and lie everywhere, weights stay where they are, split over
              the devices, and so does the cache; what travels is a few numbers a layer

Weights lie as in training, an equal part of every matrix on every device, but each layer's by themselves.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from striped_attention.core.layout import Layout
from striped_attention.generation.sample import Logprobs, Sampling, Step, choose, logprobs
from striped_attention.inference.attention import decode_attention, prefill_attention_shard
from striped_attention.inference.cache import KVCache
from striped_attention.models.llama import (
    ModelConfig,
    Weights,
    after,
    before,
    logits,
    lookup,
    scale_embedding,
    split_layer,
)
from striped_attention.models.stages import AXES, stage
from striped_attention.runtime.compiler import compiler_options
from striped_attention.strategies.strategy import AUTO, Strategy

P = PartitionSpec
EVERYWHERE = P()
Numbers = Sequence[Any] | np.ndarray  # whole ones
NOBODY = -1  # instead of the token of a text that has ended


@dataclasses.dataclass(frozen=True)
class Options:
    """How a model is run. `capacity` is the tokens that a text may have, `chunk` how many are read at a time."""

    layout: Layout
    batch: int
    capacity: int
    chunk: int = 8192
    dtype: Any = jnp.bfloat16
    strategy: str | Strategy = AUTO
    kernel: str = "auto"
    tile: tuple[int, int] | None = None
    stage_chunk: int = 1024


class Engine:
    """`batch` texts that grow. `lengths` [batch] counts the tokens of each, those that were written included."""

    def __init__(self, config: ModelConfig, weights: Weights, mesh: Mesh, options: Options) -> None:
        # Longrope's factors follow from the longest that a text may become: its keys stay as they are once rotated.
        self.config, self.weights, self.mesh, self.options = config.at_length(options.capacity), weights, mesh, options
        self.layers = [self.config.layer(i) for i in range(config.layers)]
        self.devices = mesh.shape[AXES.sequence]
        if mesh.shape[AXES.batch] > 1:
            raise ValueError(
                f"An engine has all its devices on the axis {AXES.sequence}; got a mesh {dict(mesh.shape)}."
            )
        self.compiling = 0.0
        self._turn = 0
        self.lengths = np.zeros(options.batch, np.int64)
        self._waiting: list[list[int]] = [[] for _ in range(options.batch)]  # written, but in no cache yet
        self._programs: dict[Any, Any] = {}
        self.caches = tuple(
            KVCache.empty(*self.cache_sizes, **self.cache_options, window=layer.window) for layer in self.layers
        )
        self.scores = self._place(np.zeros((options.batch, config.vocabulary), np.float32))

    @property
    def cache_sizes(self) -> tuple[int, int, int, int]:
        return (self.options.batch, self.options.capacity, self.config.kv_heads, self.config.head_dim)

    @property
    def cache_options(self) -> dict[str, Any]:
        return dict(
            layout=self.options.layout,
            mesh=self.mesh,
            axis_name=AXES.sequence,
            dtype=self.options.dtype,
        )

    @property
    def specs(self) -> Weights:
        """How the weights lie on the mesh, each layer's by themselves."""
        return layer_specs(self.config, self.mesh)

    def check_room(self, new: Numbers) -> None:
        """Raise unless every text has room for so many more tokens. Texts may be longer than a window's cache."""
        for row, (has, more) in enumerate(zip(self.lengths, new, strict=True)):
            if has + more > self.options.capacity:
                raise ValueError(
                    f"Text {row} has {has} tokens, and {more} more do not fit in the cache's {self.options.capacity}. "
                    f"Nothing was read. Make the cache larger, or the text shorter."
                )

    def read(self, texts: Sequence[Numbers] | np.ndarray, say: Callable[[int, int], None] | None = None) -> None:
        """Go on with further tokens of every text, of some perhaps none. `say(done, all)` is told after every chunk."""
        self._check_texts(texts)
        self._turn += 1
        waiting = [np.array([*had, *text], np.int32) for had, text in zip(self._waiting, texts, strict=True)]
        longest = max(len(text) for text in waiting)
        for first in range(0, longest, self.options.chunk):
            parts = [text[first : first + self.options.chunk] for text in waiting]
            self._read_chunk(parts)
            if say is not None:
                jax.block_until_ready(self.scores)
                say(min(first + self.options.chunk, longest), longest)
        self.lengths += [len(text) for text in texts]
        self._waiting = [[] for _ in texts]

    def _check_texts(self, texts: Sequence[Numbers] | np.ndarray) -> None:
        if len(texts) != self.options.batch:
            raise ValueError(f"An engine of {self.options.batch} texts reads as many at a time; got {len(texts)}.")
        self.check_room([len(text) for text in texts])
        for row, text in enumerate(texts):
            if len(text) and not 0 <= min(text) <= max(text) < self.config.vocabulary:
                raise ValueError(
                    f"Tokens must be at least 0 and below the vocabulary of {self.config.vocabulary}; text {row} has "
                    f"{min(text)} to {max(text)}."
                )

    def _read_chunk(self, parts: list[np.ndarray]) -> None:
        layout, longest = self.options.layout, max(map(len, parts))
        # As few shapes as possible, for each is compiled: whole chunks, or the next power of two.
        width = min(self.options.chunk, 1 << (longest - 1).bit_length())
        new = layout.padded_length(max(width, self.devices), self.devices)
        tokens = np.zeros((len(parts), new), np.int32)
        for row, part in enumerate(parts):
            tokens[row, : len(part)] = part
        counts = self._place(np.array([len(part) for part in parts], np.int32))
        placed = self._place(layout.permute(tokens, self.devices, 1), AXES.tokens)
        dealt, everywhere = self._sharding(AXES.tokens), self._sharding(EVERYWHERE)
        x = self._run(("embed", new), self._embed, (self.weights["embedding"], placed), dealt)
        caches = []
        for config, weights, cache in zip(self.layers, self.weights["layers"], self.caches, strict=True):
            arguments, shardings = (weights, x, cache, counts), (dealt, _shardings(cache))
            read = functools.partial(self._read_layer, config)
            x, cache = self._run(("layer", new, config), read, arguments, shardings, donate=(1, 2))
            caches.append(cache)
        self.caches = tuple(caches)
        last = {name: self.weights[name] for name in self.config.last}
        self.scores = self._run(
            ("scores", new), self._read_scores, (last, x, counts, self.scores), everywhere, donate=(3,)
        )

    def clear(self) -> None:
        """Begin new texts. What was in the caches is gone."""
        self._turn += 1
        zeros = functools.partial(jax.tree.map, jnp.zeros_like)
        self.caches = self._run("clear", zeros, (self.caches,), _shardings(self.caches), donate=(0,))
        self.lengths = np.zeros(self.options.batch, np.int64)
        self._waiting = [[] for _ in range(self.options.batch)]

    def write(
        self,
        steps: int,
        sampling: Sampling,
        stop: Sequence[int] = (),
        rows: Sequence[int] | None = None,
        active: np.ndarray | None = None,
        logprobs: int | None = None,
    ) -> Iterator[Step]:
        """Decode: yields a Step with a token of every text, `steps` times, or until every text has had one of `stop`.

        A text that has ended, or is not `active`, gives NOBODY. `rows` are the texts' numbers: what is drawn depends on
        them. With `logprobs` every step has the log probabilities of its tokens and of so many of the likeliest.
        """
        batch = self.options.batch
        active = np.ones(batch, bool) if active is None else active
        if (self.lengths[active] == 0).any():
            raise ValueError(
                f"A text goes on from at least one token; text {self.lengths.argmin()} has none. Read one."
            )
        self.check_room(steps * active)
        if any(self._waiting):
            self.read([[]] * batch)
        self._turn += 1
        turn = self._turn
        numbers = self._place(np.arange(batch, dtype=np.int32) if rows is None else np.array(rows, np.int32))
        draw, everywhere = functools.partial(_choose, sampling, logprobs), self._sharding(EVERYWHERE)
        for i in range(steps):
            arguments: Any = (self.scores, numbers, self._place(self.lengths.astype(np.int32)))
            drawn, likely = self._run(("choose", sampling, logprobs), draw, arguments, everywhere)
            tokens = np.asarray(drawn)
            self.lengths += active
            for row in np.flatnonzero(active):
                self._waiting[row] = [int(tokens[row])]
            yield Step(np.where(active, tokens, NOBODY), None if likely is None else Logprobs(*map(np.asarray, likely)))
            if self._turn != turn:
                raise RuntimeError("The texts went on elsewhere while they were being written. Write on from there.")
            active = active & ~np.isin(tokens, stop)
            if i + 1 == steps or not active.any():
                return
            self._feed(drawn, active)
            for row in np.flatnonzero(active):
                self._waiting[row] = []

    def append(self, tokens: Numbers, active: np.ndarray | None = None) -> None:
        """One more token of every text (that is `active`), as `write` would add it; for who draws tokens elsewhere."""
        active = np.ones(self.options.batch, bool) if active is None else active
        self.check_room(active)
        if any(self._waiting):
            self.read([[]] * self.options.batch)
        self._turn += 1
        self._feed(self._place(np.asarray(tokens, np.int32)), active)
        self.lengths += active

    def _feed(self, tokens: jax.Array, active: np.ndarray) -> None:
        arguments = (self.weights, self.caches, tokens, self._place(active), self.scores)
        shardings = (_shardings(self.caches), self._sharding(EVERYWHERE))
        self.caches, self.scores = self._run("token", self._write_token, arguments, shardings, donate=(1, 4))

    def program(self, name: Any) -> str:
        """The text of a compiled program that has run."""
        return self._programs[name].as_text()

    def _embed(self, embedding: Any, tokens: Any) -> Any:
        spec = self.specs["embedding"]
        options = self.options

        def shard(embedding: Any, tokens: Any) -> Any:
            look = functools.partial(lookup, self.config)
            return stage(look, embedding, spec, (), tokens, chunk=tokens.shape[1], dtype=options.dtype)

        return self._shard_map(shard, (spec, AXES.tokens), AXES.tokens)(embedding, tokens)

    def _read_layer(self, config: ModelConfig, weights: Weights, x: Any, cache: KVCache, counts: Any) -> Any:
        options, specs = self.options, self.specs["layers"][0]
        run = functools.partial(stage, chunk=options.stage_chunk, dtype=options.dtype)

        def shard(weights: Weights, x: Any, cache: KVCache, counts: Any) -> Any:
            first, second = split_layer(weights)
            first_specs, second_specs = split_layer(specs)
            slots = options.layout.positions(lax.axis_index(AXES.sequence), x.shape[1] * self.devices, self.devices)
            positions = cache.lengths[:, None] + slots
            q, k, v = run(functools.partial(before, config), first, first_specs, x, positions)
            attended, cache = prefill_attention_shard(
                *(q, k, v, cache),
                counts=counts,
                scale=config.attention_scale,
                softcap=config.softcap,
                strategy=options.strategy,
                kernel=options.kernel,
                tile=options.tile,
            )
            return run(functools.partial(after, config), second, second_specs, (x, attended), ()), cache

        in_specs = (specs, AXES.tokens, cache.specs, P(AXES.batch))
        return self._shard_map(shard, in_specs, (AXES.tokens, cache.specs))(weights, x, cache, counts)

    def _read_scores(self, weights: Weights, x: Any, counts: Any, scores: Any) -> Any:
        """The scores after the last new token of every text; of a text that has none the old ones."""
        new, layout = x.shape[1], self.options.layout

        def shard(x: Any, counts: Any) -> Any:
            slots = layout.positions(lax.axis_index(AXES.sequence), new, self.devices)
            mine = (slots == counts[:, None] - 1)[..., None]
            return lax.psum(jnp.sum(jnp.where(mine, x, 0), axis=1, keepdims=True), AXES.sequence)

        x = self._shard_map(shard, (AXES.tokens, P(AXES.batch)), P(AXES.batch))(x, counts)
        return jnp.where(counts[:, None] > 0, logits(self.config, weights, x)[:, 0], scores)

    def _write_token(self, weights: Weights, caches: Any, tokens: Any, active: Any, scores: Any) -> Any:
        """One more token of the texts that are active, in every cache, and the scores after it."""
        positions, counts = caches[0].lengths[:, None], active.astype(jnp.int32)
        x = scale_embedding(self.config, weights["embedding"][tokens][:, None].astype(self.options.dtype))
        written = []
        for config, layer, cache in zip(self.layers, weights["layers"], caches, strict=True):
            first, second = split_layer(layer)
            q, k, v = before(config, first, x, positions)
            cache = cache.append(k, v, counts)
            attended = decode_attention(q, cache, scale=config.attention_scale, softcap=config.softcap)
            x = after(config, second, (x, attended), ())
            written.append(cache)
        new = logits(self.config, {name: weights[name] for name in self.config.last}, x)[:, 0]
        return tuple(written), jnp.where(active[:, None], new, scores)

    def _run(self, name: Any, function: Callable[..., Any], arguments: Any, shardings: Any, donate: Any = ()) -> Any:
        """Call a function, compiled at the first call of that name; how long that takes is kept apart."""
        if name not in self._programs:
            begun = time.perf_counter()
            program = jax.jit(function, donate_argnums=donate, out_shardings=shardings)
            self._programs[name] = program.lower(*arguments).compile(compiler_options=compiler_options())
            self.compiling += time.perf_counter() - begun
        return self._programs[name](*arguments)

    def _shard_map(self, shard: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        return jax.shard_map(shard, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    def _sharding(self, spec: PartitionSpec) -> NamedSharding:
        return NamedSharding(self.mesh, spec)

    def _place(self, x: np.ndarray, spec: PartitionSpec = EVERYWHERE) -> jax.Array:
        return jax.make_array_from_callback(x.shape, self._sharding(spec), lambda index: x[index])


def _choose(sampling: Sampling, top: int | None, scores: Any, rows: Any, positions: Any) -> Any:
    """The next tokens and, if `top` is given, their log probabilities."""
    tokens = choose(sampling, scores, rows, positions)
    return tokens, None if top is None else logprobs(scores, tokens, top)


def _shardings(arrays: Any) -> Any:
    return jax.tree.map(lambda x: x.sharding, arrays)


def layer_specs(config: ModelConfig, mesh: Mesh) -> Weights:
    """How the weights lie on the mesh, each layer's by themselves."""
    return config.layer_specs(mesh.size)
