"""Contestants: this library and what a user could pick today, each behind the same four methods.

    prepare(length)   put the inputs where the contestant wants them, compile, run once
    check()           output and gradients for the cotangent of the check, as much of them as this process holds
    run(kind)         the seconds of one "forward" or "both" (forward and backward), results ready
    peak()            the most memory this process ever held, in bytes

They are made inside a process of a `workers.Team`, which is where jax is started and torch imported. Peers run as
shipped: with the call their documentation shows, nothing repaired.
"""

import os
import time
import types
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from striped_attention.attention import attention
from striped_attention.bench.problem import CPU, Answer, Inputs, make_inputs
from striped_attention.layout import Layout
from striped_attention.mask import causal

DEVICES = 2


class Contestant:
    """What all share. A subclass fills `_functions` in `place` and says in `read` what a result means."""

    def __init__(self, seed: int, rank: int = 0, ranks: int = 1, port: int | None = None) -> None:
        self.rank, self.ranks, self.port, self._seed = rank, ranks, port, seed
        self._functions: dict[str, Callable[[], Any]] = {}
        self.start()

    def prepare(self, length: int) -> None:
        self._functions = {}
        self.place(make_inputs(length, self._seed))
        for function in self._functions.values():
            function()

    def check(self) -> Answer:
        return self.read(self._functions["check"]())

    def run(self, kind: str) -> float:
        function = self._functions[kind]
        begin = time.perf_counter()
        result = function()
        seconds = time.perf_counter() - begin
        del result
        return seconds

    def peak(self) -> int:
        with open("/proc/self/status") as file:  # getrusage would count what the parent held before the spawn
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))

    def start(self) -> None:
        """Start the library; runs before anything else."""
        raise NotImplementedError

    def place(self, inputs: Inputs) -> None:
        """Put the inputs on the devices and set `_functions`, which block until their results are ready.

        These are "forward", "both", and "check": the same as "both" with the cotangent of the check.
        """
        raise NotImplementedError

    def read(self, result: Any) -> Answer:
        """The result of "check" as NumPy arrays with the positions of their tokens."""
        raise NotImplementedError


class JaxContestant(Contestant):
    """A function of global arrays whose sequence lies on 2 devices: virtual ones of one process, or 2 processes."""

    def start(self) -> None:
        if self.ranks > 1:
            jax.config.update("jax_platforms", "cpu")
            if not jax.distributed.is_initialized():  # another contestant of this process may have done it
                jax.distributed.initialize(f"127.0.0.1:{self.port}", num_processes=self.ranks, process_id=self.rank)
        else:
            use_virtual(DEVICES)
        kind = (jax.sharding.AxisType.Auto,)
        self.mesh = jax.make_mesh((DEVICES,), ("sequence",), kind, devices=jax.devices()[:DEVICES])
        self.spec = jax.sharding.PartitionSpec(None, "sequence", None, None)
        self.sharding = jax.sharding.NamedSharding(self.mesh, self.spec)

    def attend(self, q: Any, k: Any, v: Any) -> Any:
        raise NotImplementedError

    def order(self, length: int) -> np.ndarray:
        """order[i] is the position of the token in slot i."""
        return np.arange(length)

    def place(self, inputs: Inputs) -> None:
        self._order = self.order(inputs.q.shape[1])
        ordered = (x[:, self._order] for x in (*inputs, inputs.few))
        q, k, v, dout, few = (jax.make_array_from_callback(x.shape, self.sharding, x.__getitem__) for x in ordered)

        def both(q: Any, k: Any, v: Any, dout: Any) -> Any:
            out, pull = jax.vjp(self.attend, q, k, v)
            return out, *pull(dout)

        forward = jax.jit(self.attend, out_shardings=self.sharding)
        both = jax.jit(both, out_shardings=self.sharding)
        self._functions = {
            "forward": lambda: jax.block_until_ready(forward(q, k, v)),
            "both": lambda: jax.block_until_ready(both(q, k, v, dout)),
            "check": lambda: jax.block_until_ready(both(q, k, v, few)),
        }

    def read(self, result: Any) -> Answer:
        shards = [x.addressable_shards for x in result]
        positions = np.concatenate([self._order[shard.index[1]] for shard in shards[0]])
        return Answer(positions, *(np.concatenate([np.asarray(s.data) for s in x], axis=1) for x in shards))


class Ours(JaxContestant):
    """This library."""

    def __init__(self, layout: Layout, **options: Any) -> None:
        self.layout = layout
        super().__init__(**options)

    def order(self, length: int) -> np.ndarray:
        return self.layout.order(length, DEVICES)

    def attend(self, q: Any, k: Any, v: Any) -> Any:
        return attention(q, k, v, mesh=self.mesh, axis_name="sequence", layout=self.layout, mask=causal())


class PlainJax(JaxContestant):
    """`jax.nn.dot_product_attention` on a sharded sequence: XLA inserts what communication it needs."""

    def attend(self, q: Any, k: Any, v: Any) -> Any:
        return jax.nn.dot_product_attention(q, k, v, is_causal=True)


class RingAttentionJax(JaxContestant):
    """PyPI's ringattention, contiguous, called as its README shows."""

    def __init__(self, chunk: int, **options: Any) -> None:
        self.chunk = chunk
        super().__init__(**options)

    def start(self) -> None:
        super().start()
        import jax.extend.backend
        import jax.lib

        # 0.1.2 looks for this function in a module that newer releases of JAX no longer have.
        if not hasattr(jax.lib, "xla_bridge"):
            jax.lib.xla_bridge = types.SimpleNamespace(  # type: ignore[attr-defined]
                get_backend=jax.extend.backend.get_backend
            )
        from ringattention import ringattention

        self.ringattention = ringattention

    def attend(self, q: Any, k: Any, v: Any) -> Any:
        chunk = min(self.chunk, q.shape[1] // DEVICES)
        options = dict(
            causal_block_size=1,
            query_chunk_size=chunk,
            key_chunk_size=chunk,
            deterministic=True,
            dropout_rng=None,
            attn_pdrop=0.0,
            dtype=q.dtype,
            policy=jax.checkpoint_policies.nothing_saveable,
            precision=None,
            prevent_cse=False,
        )

        def shard(q: Any, k: Any, v: Any) -> Any:
            return self.ringattention(q, k, v, None, None, None, "sequence", True, options)

        specs = (self.spec,) * 3
        return jax.shard_map(shard, mesh=self.mesh, in_specs=specs, out_specs=self.spec, check_vma=False)(q, k, v)


class TorchContestant(Contestant):
    """A function of this process's tensors; `threads` are all cores unless several processes share them."""

    def start(self) -> None:
        import torch

        torch.set_num_threads(DEVICES // self.ranks)

    def attend(self, q: Any, k: Any, v: Any) -> Any:
        raise NotImplementedError

    def positions(self, length: int) -> np.ndarray:
        """The positions of the tokens that this process holds."""
        return np.arange(length)

    def tensor(self, x: np.ndarray) -> Any:
        import torch

        return torch.from_numpy(np.ascontiguousarray(x))

    def place(self, inputs: Inputs) -> None:
        import torch

        self._positions = self.positions(inputs.q.shape[1])
        q, k, v, dout, few = (self.tensor(x[:, self._positions]) for x in (*inputs, inputs.few))
        wanted = [x.detach().requires_grad_() for x in (q, k, v)]

        def forward() -> Any:
            with torch.no_grad():
                return self.attend(q, k, v)

        def both(dout: Any) -> Any:
            out = self.attend(*wanted)
            return out.detach(), *torch.autograd.grad(out, wanted, dout)

        self._functions = {"forward": forward, "both": lambda: both(dout), "check": lambda: both(few)}

    def read(self, result: Any) -> Answer:
        return Answer(self._positions, *(x.numpy() for x in result))


class Sdpa(TorchContestant):
    """torch's scaled_dot_product_attention, the CPU flash kernel, in its own order [batch, heads, length, dim]."""

    def attend(self, q: Any, k: Any, v: Any) -> Any:
        import torch

        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    def tensor(self, x: np.ndarray) -> Any:
        return super().tensor(x.transpose(0, 2, 1, 3))

    def read(self, result: Any) -> Answer:
        return Answer(self._positions, *(x.transpose(1, 2).numpy() for x in result))


class RingAttentionTorch(TorchContestant):
    """PyPI's ring-attention-pytorch, striped, one process a device over gloo, one thread each."""

    BUCKET = 512  # the default of its RingAttention module

    def start(self) -> None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        super().start()
        import torch.distributed as dist

        dist.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{self.port}", rank=self.rank, world_size=self.ranks
        )
        from ring_attention_pytorch import ring_flash_attn

        self.ring_flash_attn = ring_flash_attn

    def positions(self, length: int) -> np.ndarray:
        """Its stripes: bucket j of B holds the tokens j, j + B, j + 2B, …, and a process holds neighbouring buckets."""
        slots = length // self.ranks
        bucket = min(self.BUCKET, slots)
        order = np.arange(length).reshape(bucket, length // bucket).T.reshape(-1)
        return order[self.rank * slots : (self.rank + 1) * slots]

    def attend(self, q: Any, k: Any, v: Any) -> Any:
        return self.ring_flash_attn(
            q, k, v, causal=True, bucket_size=self.BUCKET, ring_reduce_col=True, striped_ring_attn=True
        )


def use_virtual(devices: int) -> None:
    """Let JAX see this many CPUs. To be called before it looks."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)


def score_bytes(length: int) -> int:
    """What plain attention needs, which writes float32 scores out: 6 arrays of them (seen: 5.7 at 4096, backward)."""
    return 6 * CPU.heads * length * length * 4
