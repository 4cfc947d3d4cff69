"""Programs: what an engine runs on its devices, each compiled when it is first called.

    embed, layer, scores     prefill, a chunk of tokens at a time: the training path, layer by layer
    feed                     one more token of every sequence, through the whole model
    first                    the first new tokens, sampled from the logits that prefill left
    block                    several decoding steps: feed the newest tokens, sample the next ones

A block samples, detects which sequences have ended and continues without the host. In `feed`, activations are small and
replicated; weights and caches stay sharded, and a few thousand values per layer travel between devices (`fused`).
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
from striped_attention.generation.sample import NO_TOKEN, Sampling, choose, logprobs
from striped_attention.inference.attention import decode_attention, prefill_attention_shard
from striped_attention.inference.cache import KVCache
from striped_attention.models.config import ModelConfig, Weights
from striped_attention.models.layers import after, before, logits, lookup, scale_embedding, split_layer
from striped_attention.models.stages import AXES, stage
from striped_attention.runtime.compiler import compiler_options
from striped_attention.strategies.strategy import AUTO, Strategy

P = PartitionSpec
EVERYWHERE = P()
BLOCK = 16  # tokens per block on accelerators, where a program launch costs as much as a token of a small model


@dataclasses.dataclass(frozen=True)
class Options:
    """How a model is run: `batch` sequences of up to `capacity` tokens, prefilled in chunks of `chunk` tokens.

    `block` is the number of tokens per sequence that one program decodes. None means 16, or 1 on CPUs, where launches
    are cheap compared to tokens.
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
    """State on the devices: each layer's keys and values, [batch] cached lengths, and [batch, vocabulary] logits after
    the last cached token."""

    entries: Any
    lengths: Any
    scores: Any

    def of_lengths(self, lengths: Any) -> "State":
        """Return the same state with other sequence lengths."""
        return dataclasses.replace(self, lengths=lengths)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Newest:
    """For every sequence, [batch] each: the newest token, whether it continues, and how many tokens it has left."""

    tokens: Any
    active: Any
    left: Any


class Programs:
    """The programs of one model on one mesh, for one set of options. `compiling` counts seconds spent compiling.

    `weights`, `caches` and `state` are the shapes and shardings of the programs' arguments.
    """

    def __init__(self, config: ModelConfig, mesh: Mesh, options: Options) -> None:
        # Longrope's factors depend on the maximum length: cached keys are already rotated and cannot change later.
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
        """Return the shapes of a layer's cache, with room for two blocks ahead of the host, which it may drop."""
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
        """Shapes and shardings of the state."""
        everywhere = functools.partial(jax.ShapeDtypeStruct, sharding=NamedSharding(self.mesh, EVERYWHERE))
        batch, vocabulary = self.options.batch, self.config.vocabulary
        entries = tuple((cache.key, cache.value) for cache in self.caches)
        return State(entries, everywhere((batch,), jnp.int32), everywhere((batch, vocabulary), jnp.float32))

    def with_entries(self, entries: Any, lengths: Any) -> list[KVCache]:
        """Return caches with these keys, values and lengths."""
        parts = zip(self.caches, entries, strict=True)
        return [dataclasses.replace(cache, key=key, value=value, lengths=lengths) for cache, (key, value) in parts]

    def empty(self) -> State:
        """Return the state of empty sequences."""
        zeros = lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self.state)  # noqa: E731
        return self.run("empty", zeros, (), self._shardings(self.state))

    def clear(self, state: State) -> State:
        """Return the state of empty sequences, in the memory of an old state."""
        zeros = functools.partial(jax.tree.map, jnp.zeros_like)
        return self.run("clear", zeros, (state,), self._shardings(state), donate=(0,))

    def fill(self, entry: Any, row: Any) -> Any:
        """Fill a layer's cache: every sequence gets the keys and values in `row`, [1, kv_heads, capacity, dim] each."""
        write = functools.partial(jax.tree.map, lambda x, new: x.at[:].set(new))
        return self.run(("fill", entry[0].shape), write, (entry, row), self._shardings(entry), donate=(0,))

    def prefill(self, weights: Weights, state: State, tokens: jax.Array, counts: jax.Array) -> State:
        """Append [batch, new] tokens in layout order to the state; `counts` [batch] are real, the rest padding."""
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
        """Append one token to the active sequences of the state."""
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
        """Sample the first new token of each active sequence: a block of one step. `rows` number the sequences."""

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
        """Run one block: the next tokens of sequences that continue and that the host `keep`s [batch]."""
        shardings, name = (self._shardings(state), None, None), ("block", sampling, stop, top)
        block = self.loop(sampling, stop, top)
        return self.run(name, block, (weights, state, newest, rows, keep), shardings, donate=(1,))

    def loop(self, sampling: Sampling, stop: tuple[int, ...], top: int | None) -> Callable[..., Any]:
        """Return the function of a block. Its number of steps is static, so a GPU runs them without the host."""

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
        """Return new lengths, and logits after the last new token, or the old ones for sequences without new tokens."""
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
        """Replicate a product. The product of a weight `split` by outputs is first constrained to be split likewise:
        otherwise XLA may gather the weight."""
        if split != EVERYWHERE:
            x = lax.with_sharding_constraint(x, NamedSharding(self.mesh, P(None, None, AXES.everything)))
        return lax.with_sharding_constraint(x, NamedSharding(self.mesh, EVERYWHERE))

    def _rows(self, embedding: Any, tokens: Any) -> Any:
        """Look up tokens in a sharded embedding. Each row comes from its own device; XLA would gather the embedding."""
        spec = self.specs["embedding"]
        if spec == EVERYWHERE:
            return embedding[tokens]

        def shard(embedding: Any, tokens: Any) -> Any:
            row = tokens - lax.axis_index(AXES.everything) * len(embedding)
            mine = (row >= 0) & (row < len(embedding))
            return lax.psum(jnp.where(mine[:, None], embedding.at[row].get(mode="clip"), 0), AXES.everything)

        return self._shard_map(shard, (spec, EVERYWHERE), EVERYWHERE)(embedding, tokens)

    def run(self, name: Any, function: Callable[..., Any], arguments: Any, shardings: Any, donate: Any = ()) -> Any:
        """Call a function, compiled at the first call under that name. Results without a sharding are replicated."""
        if name not in self._compiled:
            begun = time.perf_counter()
            everywhere = NamedSharding(self.mesh, EVERYWHERE)
            shardings = jax.tree.map(lambda x: everywhere if x is None else x, shardings, is_leaf=lambda x: x is None)
            program = jax.jit(function, donate_argnums=donate, out_shardings=shardings)
            self._compiled[name] = program.lower(*arguments).compile(compiler_options=compiler_options())
            self.compiling += time.perf_counter() - begun
        return self._compiled[name](*arguments)

    def text(self, name: Any) -> str:
        """Return the HLO text of a compiled program that has run."""
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
    """Sample the next tokens of active sequences, NO_TOKEN for others, with log probabilities if `top` is given."""
    tokens = choose(sampling, scores, rows, lengths)
    likely = None if top is None else logprobs(scores, tokens, top)
    left = left - active.astype(jnp.int32)
    ends = functools.reduce(jnp.logical_or, [tokens == token for token in stop], left <= 0)
    return Newest(tokens, active & ~ends, left), (jnp.where(active, tokens, NO_TOKEN), likely)
