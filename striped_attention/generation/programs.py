"""Programs: what an engine runs on its devices, each compiled when it is first called.

    embed, layer, scores     prefill, a chunk of tokens at a time: the training path, layer by layer
    feed                     one more token of every sequence, through the whole model
    first                    the first new tokens, sampled from the scores that prefill left
    block                    several times: feed the newest tokens, sample the next ones

A block samples, notices which sequences have ended and goes on by itself, so the host is asked nothing between its
tokens. In `feed` activations lie on every device and are small; weights and caches stay where they are, split over the
devices, and what travels is a few thousand numbers a layer (`fused`).
"""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from striped_attention.core.layout import Layout
from striped_attention.generation.fused import fused_shapes
from striped_attention.generation.sample import NOBODY, Sampling, choose, logprobs
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
BLOCK = 16  # tokens of a block on accelerators, where launching a program costs as much as a small model's token


@dataclasses.dataclass(frozen=True)
class Options:
    """How a model is run: sequences at a time, tokens that each may have, and tokens of a prompt at a time.

    `block` is how many tokens one program decodes; None means 16, and 1 on CPUs, where tokens are slow and launches
    are not.
    """

    layout: Layout
    batch: int
    capacity: int
    chunk: int = 8192
    dtype: Any = jnp.bfloat16
    strategy: str | Strategy = AUTO
    kernel: str = "auto"
    tile: tuple[int, int] | None = None
    stage_chunk: int = 8192
    block: int | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """What is on the devices: each layer's keys and values, [batch] lengths of all caches, and the scores of all tokens
    after the last one that the caches have."""

    entries: Any
    lengths: Any
    scores: Any

    def of_lengths(self, lengths: Any) -> "State":
        """The same with sequences of other lengths."""
        return dataclasses.replace(self, lengths=lengths)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Newest:
    """Of every sequence, [batch] each: the newest token, whether it goes on, and how many more tokens it may have."""

    tokens: Any
    active: Any
    left: Any


class Programs:
    """The programs of one model on one mesh, for one set of options. `compiling` adds up seconds.

    `weights`, `caches` and `state` are the shapes and shardings of what the programs take.
    """

    def __init__(self, config: ModelConfig, mesh: Mesh, options: Options) -> None:
        # Longrope's factors follow from the longest that a sequence may become: keys stay as they are once rotated.
        self.config, self.mesh, self.options = config.at_length(options.capacity), mesh, options
        self.layers = [self.config.layer(i) for i in range(config.layers)]
        self.devices = mesh.shape[AXES.sequence]
        self.weights = fused_shapes(config, mesh, options.dtype)
        self.specs = jax.tree.map(lambda x: x.sharding.spec, self.weights)
        on_cpu = mesh.devices.flat[0].platform == "cpu"
        self.block = options.block or (1 if on_cpu else BLOCK)
        self.caches = [self._cache(layer) for layer in self.layers]
        self.compiling = 0.0
        self._compiled: dict[Any, Any] = {}

    def _cache(self, layer: ModelConfig) -> KVCache:
        """The shapes of a layer's cache. Blocks run ahead of the host by two, and it may take their tokens back."""
        options = self.options
        return KVCache.shapes(
            *(options.batch, options.capacity, layer.kv_heads, layer.head_dim),
            layout=options.layout,
            mesh=self.mesh,
            axis_name=AXES.sequence,
            window=layer.window,
            new=2 * self.block + 1,
            dtype=options.dtype,
        )

    @property
    def state(self) -> State:
        """The shapes and shardings of the state."""
        everywhere = functools.partial(jax.ShapeDtypeStruct, sharding=NamedSharding(self.mesh, EVERYWHERE))
        batch, vocabulary = self.options.batch, self.config.vocabulary
        entries = tuple((cache.key, cache.value) for cache in self.caches)
        return State(entries, everywhere((batch,), jnp.int32), everywhere((batch, vocabulary), jnp.float32))

    def with_entries(self, entries: Any, lengths: Any) -> list[KVCache]:
        """Caches of their parts."""
        parts = zip(self.caches, entries, strict=True)
        return [dataclasses.replace(cache, key=key, value=value, lengths=lengths) for cache, (key, value) in parts]

    def empty(self) -> State:
        """A state of sequences without a token."""
        zeros = lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self.state)  # noqa: E731
        return self.run("empty", zeros, (), self._shardings(self.state))

    def clear(self, state: State) -> State:
        """The same in the memory of an old state."""
        zeros = functools.partial(jax.tree.map, jnp.zeros_like)
        return self.run("clear", zeros, (state,), self._shardings(state), donate=(0,))

    def fill(self, entry: Any, row: Any) -> Any:
        """A layer's keys and values, of every sequence those of one, [1, kv_heads, capacity, dim] each."""
        write = functools.partial(jax.tree.map, lambda x, new: x.at[:].set(new))
        return self.run(("fill", entry[0].shape), write, (entry, row), self._shardings(entry), donate=(0,))

    def prefill(self, weights: Weights, state: State, tokens: jax.Array, counts: jax.Array) -> State:
        """The state with more tokens of every sequence, [batch, new] in layout order, of which `counts` are real."""
        new, last = tokens.shape[1], {name: weights[name] for name in self.config.last}
        split, everywhere = NamedSharding(self.mesh, AXES.tokens), NamedSharding(self.mesh, EVERYWHERE)
        x = self.run(("embed", new), self._embed, (weights["embedding"], tokens), split)
        entries = []
        parts = zip(self.layers, self.caches, weights["layers"], state.entries, strict=True)
        for config, cache, layer, entry in parts:
            run = functools.partial(self._prefill_layer, config, cache)
            shardings = (split, self._shardings(entry))
            arguments = (layer, x, entry, state.lengths, counts)
            x, entry = self.run(("layer", new, config), run, arguments, shardings, donate=(1, 2))
            entries.append(entry)
        arguments, shardings = (last, x, counts, state.lengths, state.scores), (everywhere, everywhere)
        lengths, scores = self.run(("scores", new), self._prefill_scores, arguments, shardings, donate=(4,))
        return State(tuple(entries), lengths, scores)

    def feed(self, weights: Weights, state: State, tokens: jax.Array, active: jax.Array) -> State:
        """The state with one more token of the sequences that are active."""
        return self.run("token", self._feed, (weights, state, tokens, active), self._shardings(state), donate=(1,))

    def first(
        self,
        sampling: Sampling,
        stop: tuple[int, ...],
        top: int | None,
        state: State,
        rows: jax.Array,
        active: jax.Array,
        left: jax.Array,
    ) -> tuple[Newest, Any]:
        """A block of one: the first new tokens of the active sequences, from the scores. `rows` number sequences."""

        def sample(scores: Any, lengths: Any, rows: Any, active: Any, left: Any) -> Any:
            newest, out = _sample(sampling, stop, top, scores, lengths, rows, active, left)
            return newest, jax.tree.map(lambda x: x[None], out)

        return self.run(("first", sampling, stop, top), sample, (state.scores, state.lengths, rows, active, left), None)

    def decode(
        self,
        sampling: Sampling,
        stop: tuple[int, ...],
        top: int | None,
        weights: Weights,
        state: State,
        newest: Newest,
        rows: jax.Array,
        keep: jax.Array,
    ) -> tuple[State, Newest, Any]:
        """A block: the next tokens of those sequences that go on, as far as the host does `keep` [batch] them."""
        shardings, name = (self._shardings(state), None, None), ("block", sampling, stop, top)
        block = self.loop(sampling, stop, top)
        return self.run(name, block, (weights, state, newest, rows, keep), shardings, donate=(1,))

    def loop(self, sampling: Sampling, stop: tuple[int, ...], top: int | None) -> Callable[..., Any]:
        """What a block computes. Its steps are counted beforehand, so a GPU goes through them without the host."""

        def block(weights: Weights, state: State, newest: Newest, rows: Any, keep: Any) -> Any:
            def step(carry: Any, _: None) -> Any:
                state, newest = carry
                state = self._feed(weights, state, newest.tokens, newest.active)
                going = (newest.active, newest.left)
                newest, out = _sample(sampling, stop, top, state.scores, state.lengths, rows, *going)
                return (state, newest), out

            newest = dataclasses.replace(newest, active=newest.active & keep)
            (state, newest), out = lax.scan(step, (state, newest), length=self.block)
            return state, newest, out

        return block

    def _embed(self, embedding: Any, tokens: Any) -> Any:
        spec, dtype = self.specs["embedding"], self.options.dtype

        def shard(embedding: Any, tokens: Any) -> Any:
            look = functools.partial(lookup, self.config)
            return stage(look, embedding, spec, (), tokens, chunk=tokens.shape[1], dtype=dtype)

        return self._shard_map(shard, (spec, AXES.tokens), AXES.tokens)(embedding, tokens)

    def _prefill_layer(
        self, config: ModelConfig, cache: KVCache, weights: Weights, x: Any, entry: Any, lengths: Any, counts: Any
    ) -> Any:
        options, specs = self.options, self.specs["layers"][0]
        run = functools.partial(stage, chunk=options.stage_chunk, dtype=options.dtype)

        def shard(weights: Weights, x: Any, entry: Any, lengths: Any, counts: Any) -> Any:
            first, second = split_layer(weights)
            first_specs, second_specs = split_layer(specs)
            slots = options.layout.positions(lax.axis_index(AXES.sequence), x.shape[1] * self.devices, self.devices)
            q, k, v = run(functools.partial(before, config), first, first_specs, x, lengths[:, None] + slots)
            attended, new = prefill_attention_shard(
                *(q, k, v, dataclasses.replace(cache, key=entry[0], value=entry[1], lengths=lengths)),
                counts=counts,
                scale=config.attention_scale,
                softcap=config.softcap,
                strategy=options.strategy,
                kernel=options.kernel,
                tile=options.tile,
            )
            x = run(functools.partial(after, config), second, second_specs, (x, attended), ())
            return x, (new.key, new.value)

        entries, each = (cache.specs.key, cache.specs.value), P(AXES.batch)
        in_specs, out_specs = (specs, AXES.tokens, entries, each, each), (AXES.tokens, entries)
        return self._shard_map(shard, in_specs, out_specs)(weights, x, entry, lengths, counts)

    def _prefill_scores(self, weights: Weights, x: Any, counts: Any, lengths: Any, scores: Any) -> Any:
        """The new lengths, and the scores after the last new token; of a sequence that has none the old ones."""
        new, layout = x.shape[1], self.options.layout

        def shard(x: Any, counts: Any) -> Any:
            slots = layout.positions(lax.axis_index(AXES.sequence), new, self.devices)
            mine = (slots == counts[:, None] - 1)[..., None]
            return lax.psum(jnp.sum(jnp.where(mine, x, 0), axis=1, keepdims=True), AXES.sequence)

        x = self._shard_map(shard, (AXES.tokens, P(AXES.batch)), P(AXES.batch))(x, counts)
        return lengths + counts, jnp.where(counts[:, None] > 0, logits(self.config, weights, x)[:, 0], scores)

    def _feed(self, weights: Weights, state: State, tokens: Any, active: Any) -> State:
        whole = self._whole
        positions, counts = state.lengths[:, None], active.astype(jnp.int32)
        x = scale_embedding(self.config, self._rows(weights["embedding"], tokens)[:, None].astype(self.options.dtype))
        caches, entries = self.with_entries(state.entries, state.lengths), []
        for config, layer, cache in zip(self.layers, weights["layers"], caches, strict=True):
            first, second = split_layer(layer)
            q, k, v = before(
                config, first, x, positions, functools.partial(whole, split=self.specs["layers"][0]["qkv"])
            )
            cache = cache.append(k, v, counts)
            attended = decode_attention(q, cache, scale=config.attention_scale, softcap=config.softcap)
            x = after(config, second, (x, attended), (), whole)
            entries.append((cache.key, cache.value))
        scores = logits(self.config, {name: weights[name] for name in self.config.last}, x)
        scores = whole(scores, split=self.specs["embedding" if self.config.tied else "unembedding"])[:, 0]
        scores = jnp.where(active[:, None], scores, state.scores)
        return State(tuple(entries), state.lengths + counts, scores)

    def _whole(self, x: Any, split: PartitionSpec = EVERYWHERE) -> Any:
        """A product on all devices. Of a weight that is `split` by outputs the product is, too, until it is gathered:
        left alone, XLA may gather the weight."""
        if split != EVERYWHERE:
            x = lax.with_sharding_constraint(x, NamedSharding(self.mesh, P(None, None, AXES.everything)))
        return lax.with_sharding_constraint(x, NamedSharding(self.mesh, EVERYWHERE))

    def _rows(self, embedding: Any, tokens: Any) -> Any:
        """The embedding's rows of some tokens. Each comes from the device that has it; XLA would gather them all."""
        spec = self.specs["embedding"]
        if spec == EVERYWHERE:
            return embedding[tokens]

        def shard(embedding: Any, tokens: Any) -> Any:
            row = tokens - lax.axis_index(AXES.everything) * len(embedding)
            mine = (row >= 0) & (row < len(embedding))
            return lax.psum(jnp.where(mine[:, None], embedding.at[row].get(mode="clip"), 0), AXES.everything)

        return self._shard_map(shard, (spec, EVERYWHERE), EVERYWHERE)(embedding, tokens)

    def run(self, name: Any, function: Callable[..., Any], arguments: Any, shardings: Any, donate: Any = ()) -> Any:
        """Call a function, compiled at the first call of that name. Without `shardings` results lie everywhere."""
        if name not in self._compiled:
            begun = time.perf_counter()
            everywhere = NamedSharding(self.mesh, EVERYWHERE)
            shardings = jax.tree.map(lambda x: everywhere if x is None else x, shardings, is_leaf=lambda x: x is None)
            program = jax.jit(function, donate_argnums=donate, out_shardings=shardings)
            self._compiled[name] = program.lower(*arguments).compile(compiler_options=compiler_options())
            self.compiling += time.perf_counter() - begun
        return self._compiled[name](*arguments)

    def text(self, name: Any) -> str:
        """The text of a compiled program that has run."""
        return self._compiled[name].as_text()

    def _shardings(self, arrays: Any) -> Any:
        return jax.tree.map(lambda x: x.sharding, arrays)

    def _shard_map(self, shard: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        return jax.shard_map(shard, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def _sample(
    sampling: Sampling,
    stop: tuple[int, ...],
    top: int | None,
    scores: Any,
    lengths: Any,
    rows: Any,
    active: Any,
    left: Any,
) -> tuple[Newest, Any]:
    """The next tokens of the active sequences, NOBODY of others, with log probabilities if `top` is given."""
    tokens = choose(sampling, scores, rows, lengths)
    likely = None if top is None else logprobs(scores, tokens, top)
    left = left - active.astype(jnp.int32)
    ends = functools.reduce(jnp.logical_or, [tokens == token for token in stop], left <= 0)
    return Newest(tokens, active & ~ends, left), (jnp.where(active, tokens, NOBODY), likely)
