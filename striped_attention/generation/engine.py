"""Engine: a model with a KV cache. It prefills sequences, any number of tokens at a time, and decodes the next tokens.

    prefill   write tokens of a prompt, or of a further chunk of it, to the cache
    decode    generate the next tokens, sampled on the devices, a block at a time

The devices run ahead of the host: while the host looks at the tokens of one block, they compute the next. If the host
does not want that block, it shortens the sequences again: entries past a sequence's end are masked and overwritten
later.
"""

import collections
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from striped_attention.generation.fused import fingerprint
from striped_attention.generation.programs import EVERYWHERE, Options, Programs, State
from striped_attention.generation.room import coarse
from striped_attention.generation.sample import NO_TOKEN, Logprobs, Sampling, Step
from striped_attention.inference.cache import KVCache
from striped_attention.models.config import ModelConfig, Weights
from striped_attention.models.stages import AXES

Numbers = Sequence[Any] | np.ndarray  # integers


class Engine:
    """A model and a batch of growing sequences. `lengths` [batch] are their lengths in tokens, generated ones included.

    `weights` are fused, as `fuse` and `load` return them.
    """

    def __init__(self, config: ModelConfig, weights: Weights, mesh: Mesh, options: Options) -> None:
        if mesh.shape[AXES.batch] > 1:
            raise ValueError(
                f"An engine needs all devices on the mesh axis {AXES.sequence}; got a mesh {dict(mesh.shape)}."
            )
        self.programs = Programs(config, mesh, options)
        self.config, self.mesh, self.options = self.programs.config, mesh, options
        self.devices = self.programs.devices
        self.weights = weights
        self._state = self.programs.empty()
        self._turn = 0
        self._new_sequences()

    @property
    def compiling(self) -> float:
        """Seconds spent compiling."""
        return self.programs.compiling

    @property
    def scores(self) -> jax.Array:
        """Logits after the last cached token of every sequence: [batch, vocabulary]."""
        return self._state.scores

    @property
    def caches(self) -> list[KVCache]:
        """One cache per layer."""
        return self.programs.with_entries(self._state.entries, self._state.lengths)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Fingerprint of the weights."""
        return fingerprint(self.weights)

    def clear(self) -> None:
        """Start new, empty sequences."""
        self._state = self.programs.clear(self._state)
        self._turn += 1
        self._new_sequences()

    def begin(self, length: int, scores: np.ndarray, rows: Iterable[tuple[jax.Array, jax.Array]]) -> None:
        """Start new sequences that share the same first `length` tokens.

        `scores` [vocabulary] are the logits after the last of them. `rows` are each layer's keys and values, laid out
        as in the cache of one sequence: [1, kv_heads, capacity, head_dim].
        """
        self.clear()
        self.check_room([length] * self.options.batch)
        batch, entries = self.options.batch, self._state.entries
        try:
            filled = tuple(self.programs.fill(*both) for both in zip(entries, rows, strict=True))
        except BaseException:  # some of the old caches are already donated
            self._state = self.programs.empty()
            raise
        lengths = self._place(np.full(batch, length, np.int32))
        self._state = State(filled, lengths, self._place(np.tile(scores, (batch, 1))))
        self.lengths[:] = length

    def _new_sequences(self) -> None:
        self.lengths = np.zeros(self.options.batch, np.int64)
        self._waiting: list[list[int]] = [[] for _ in range(self.options.batch)]  # generated, but not yet in the cache
        self._ahead = False

    def check_room(self, new: Numbers) -> None:
        """Raise unless sequence i has room for new[i] more tokens. Caches of windowed layers may be shorter."""
        for row, (has, more) in enumerate(zip(self.lengths, new, strict=True)):
            if has + more > self.options.capacity:
                raise ValueError(
                    f"Sequence {row} has {has} tokens; {more} more do not fit in the cache of "
                    f"{self.options.capacity} tokens. Nothing was read. Increase the capacity, or shorten the sequence."
                )

    def prefill(self, sequences: Sequence[Numbers] | np.ndarray, say: Callable[[int, int], None] | None = None) -> None:
        """Prefill further tokens of every sequence (possibly none). Call `say(done, total)` after each chunk."""
        self._check_sequences(sequences)
        self._take_back()
        waiting = [np.array([*had, *more], np.int32) for had, more in zip(self._waiting, sequences, strict=True)]
        longest = max(map(len, waiting))
        for first in range(0, longest, self.options.chunk):
            self._prefill_chunk([tokens[first : first + self.options.chunk] for tokens in waiting])
            if say is not None:
                jax.block_until_ready(self.scores)
                say(min(first + self.options.chunk, longest), longest)
        self.lengths += [len(more) for more in sequences]
        self._waiting = [[] for _ in sequences]

    def _check_sequences(self, sequences: Sequence[Numbers] | np.ndarray) -> None:
        if len(sequences) != self.options.batch:
            raise ValueError(
                f"An engine with a batch of {self.options.batch} must read as many sequences; got {len(sequences)}."
            )
        self.check_room([len(tokens) for tokens in sequences])
        for row, tokens in enumerate(sequences):
            if len(tokens) and not 0 <= min(tokens) <= max(tokens) < self.config.vocabulary:
                raise ValueError(
                    f"Tokens must be at least 0 and below the vocabulary of {self.config.vocabulary}; sequence {row} "
                    f"has tokens from {min(tokens)} to {max(tokens)}."
                )

    def _prefill_chunk(self, parts: list[np.ndarray]) -> None:
        layout, longest = self.options.layout, max(map(len, parts))
        width = min(self.options.chunk, coarse(longest))  # one of few sizes, since each one is compiled
        new = layout.padded_length(max(width, self.devices), self.devices)
        tokens = np.zeros((len(parts), new), np.int32)
        for row, part in enumerate(parts):
            tokens[row, : len(part)] = part
        counts = self._place(np.array([len(part) for part in parts], np.int32))
        placed = self._place(layout.permute(tokens, self.devices, 1), AXES.tokens)
        self._state = self.programs.prefill(self.weights, self._state, placed, counts)

    def decode(
        self,
        steps: int,
        sampling: Sampling,
        stop: Sequence[int] = (),
        rows: Sequence[int] | None = None,
        active: np.ndarray | None = None,
        logprobs: int | None = None,
    ) -> Iterator[Step]:
        """Generate: yield one Step, a token per sequence, `steps` times or until each sequence has a token of `stop`.

        The token is NO_TOKEN for a sequence that has ended or is not `active`. `rows` number the sequences: samples
        depend on the number. With `logprobs`, steps have log probabilities of their tokens and of the `logprobs` most
        likely ones.
        """
        batch = self.options.batch
        active = np.ones(batch, bool) if active is None else active
        if (self.lengths[active] == 0).any():
            raise ValueError(
                f"A sequence must have at least one token to decode from; sequence {self.lengths.argmin()} has none."
            )
        self.check_room(steps * active)
        self._take_back()
        if any(self._waiting):
            self.prefill([[]] * batch)
        turn, self._ended = self._turn, ~active
        blocks = self._blocks(steps, sampling, tuple(stop), rows, active, logprobs)
        for tokens, likely in blocks:
            tokens = np.where(self._ended, NO_TOKEN, tokens)
            alive = tokens != NO_TOKEN
            if not alive.any():
                return
            self.lengths += alive
            for row in np.flatnonzero(alive):
                self._waiting[row] = [int(tokens[row])]
            yield Step(tokens, likely)
            if self._turn != turn:
                raise RuntimeError("The sequences were changed during generation. Call write again to continue.")
            self._ended |= ~alive | np.isin(tokens, stop)
            if self._ended.all():
                return

    def end(self, row: int) -> None:
        """Stop generating a sequence, for a reason that only the host knows; call between steps."""
        self._ended[row] = True

    def _blocks(
        self, steps: int, sampling: Sampling, stop: tuple[int, ...], rows: Any, active: np.ndarray, top: int | None
    ) -> Iterator[tuple[np.ndarray, Logprobs | None]]:
        """Yield every step's tokens and log probabilities, with the next block already running."""
        batch, programs = self.options.batch, self.programs
        numbers = self._place(np.arange(batch, dtype=np.int32) if rows is None else np.array(rows, np.int32))
        left = self._place(np.full(batch, steps, np.int32))
        how = (sampling, stop, top)
        newest, out = programs.first(*how, self._state, numbers, self._place(active), left)
        blocks = collections.deque([out])
        asked = 1
        while blocks:
            if asked < steps:
                keep = self._place(~self._ended)
                self._state, newest, out = programs.decode(*how, self.weights, self._state, newest, numbers, keep)
                self._ahead = True
                blocks.append(out)
                asked += programs.block
            tokens, likely = jax.device_get(blocks.popleft())
            for i in range(len(tokens)):
                yield tokens[i], None if likely is None else Logprobs(*(x[i] for x in likely))

    def _take_back(self) -> None:
        """Drop the tokens in the caches that the host has not seen or did not want."""
        self._turn += 1
        if self._ahead:
            cached = self.lengths - [len(tokens) for tokens in self._waiting]
            self._state = self._state.of_lengths(self._place(cached.astype(np.int32)))
            self._ahead = False

    def append(self, tokens: Numbers, active: np.ndarray | None = None) -> None:
        """Append one token to every `active` sequence, for callers that choose tokens themselves."""
        active = np.ones(self.options.batch, bool) if active is None else active
        self.check_room(active)
        self._take_back()
        if any(self._waiting):
            self.prefill([[]] * self.options.batch)
        placed = self._place(np.asarray(tokens, np.int32))
        self._state = self.programs.feed(self.weights, self._state, placed, self._place(active))
        self.lengths += active

    def _place(self, x: np.ndarray, spec: PartitionSpec = EVERYWHERE) -> jax.Array:
        return jax.make_array_from_callback(x.shape, NamedSharding(self.mesh, spec), lambda index: x[index])
