"""Contestants: this library and the alternatives available today, each behind the same four methods.

    prepare(length)   place the inputs where the contestant needs them, compile, run once
    check()           the part of output and gradients that this process holds, for the cotangent of the check
    run(kind)         seconds of one "forward" or "both" (forward and backward), until results are ready
    peak()            peak memory of this process in bytes

They run in the processes of a `workers.Team`. Peers run as shipped, called as their documentation shows.
"""

import os
import time
import types
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import striped_attention as sa
from striped_attention.core.layout import Layout
from striped_bench.bench.problem import Answer, Inputs, make_inputs
from striped_bench.bench.run import seconds

DEVICES = 2
CONTIGUOUS = sa.contiguous()
Functions = dict[str, Callable[[], Any]]


class Contestant:
    """Base class of all contestants."""

    place: Callable[[Inputs], Functions]  # puts inputs on devices; "check" is "both" with the check's cotangent
    read: Callable[[Any], Answer]  # converts the result of "check" to NumPy arrays with token positions
    functions: Functions

    def prepare(self, length: int) -> None:
        self.functions = {}  # free the arrays of the previous length first
        self.functions = self.place(make_inputs(length))
        for function in self.functions.values():
            jax.block_until_ready(function())

    def check(self) -> Answer:
        return self.read(self.functions["check"]())

    def run(self, kind: str) -> float:
        return seconds(self.functions[kind])

    def peak(self) -> int:
        with open("/proc/self/status") as file:  # getrusage would include the parent's memory before the spawn
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))

    def idle(self) -> float:
        """Number of cores that this process uses while it waits: 0 unless a thread spins."""
        begun = time.process_time()
        time.sleep(1)
        return time.process_time() - begun


class JaxContestant(Contestant):
    """A function of arrays sharded along the sequence over 2 devices: virtual ones of one process, or 2 processes."""

    attend: Callable[..., Any]

    def __init__(self, rank: int, ranks: int, port: int, layout: Layout = CONTIGUOUS, chunk: int = 512) -> None:
        self.layout, self.chunk = layout, chunk
        if ranks == 1:
            use_virtual(DEVICES)
        elif not jax.distributed.is_initialized():  # another contestant in this process may have done so
            jax.config.update("jax_platforms", "cpu")
            jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=ranks, process_id=rank)
        kind = (jax.sharding.AxisType.Auto,)
        self.mesh = jax.make_mesh((DEVICES,), ("sequence",), kind, devices=jax.devices()[:DEVICES])
        self.spec = jax.sharding.PartitionSpec(None, "sequence", None, None)

    def place(self, inputs: Inputs) -> Functions:
        sharding = jax.sharding.NamedSharding(self.mesh, self.spec)
        self.order = self.layout.order(inputs.q.shape[1], DEVICES)
        ordered = (x[:, self.order] for x in (*inputs, inputs.few))
        q, k, v, dout, few = (jax.make_array_from_callback(x.shape, sharding, x.__getitem__) for x in ordered)

        def both(q: Any, k: Any, v: Any, dout: Any) -> Any:
            out, pull = jax.vjp(self.attend, q, k, v)
            return out, *pull(dout)

        forward, both = (jax.jit(function, out_shardings=sharding) for function in (self.attend, both))
        run = {"forward": lambda: forward(q, k, v), "both": lambda: both(q, k, v, dout)}
        return {**run, "check": lambda: both(q, k, v, few)}

    def read(self, result: Any) -> Answer:
        shards = [x.addressable_shards for x in result]
        positions = np.concatenate([self.order[shard.index[1]] for shard in shards[0]])
        return Answer(positions, *(np.concatenate([np.asarray(s.data) for s in x], axis=1) for x in shards))


class Ours(JaxContestant):
    """This library; the layout is an option."""

    def attend(self, q: Any, k: Any, v: Any) -> Any:
        return sa.attention(q, k, v, mesh=self.mesh, axis_name="sequence", layout=self.layout, mask=sa.causal())


class PlainJax(JaxContestant):
    """`jax.nn.dot_product_attention` on a sharded sequence: XLA inserts the communication."""

    def attend(self, q: Any, k: Any, v: Any) -> Any:
        return jax.nn.dot_product_attention(q, k, v, is_causal=True)


class RingAttentionJax(JaxContestant):
    """ringattention from PyPI, contiguous, called as its README shows; the chunk size is an option."""

    def attend(self, q: Any, k: Any, v: Any) -> Any:
        import jax.extend.backend
        import jax.lib

        # Version 0.1.2 looks for this function in a module that newer JAX releases removed.
        if not hasattr(jax.lib, "xla_bridge"):
            bridge = types.SimpleNamespace(get_backend=jax.extend.backend.get_backend)
            jax.lib.xla_bridge = bridge  # type: ignore[attr-defined]
        from ringattention import ringattention

        chunk = min(self.chunk, q.shape[1] // DEVICES)
        options = dict(
            **dict(causal_block_size=1, query_chunk_size=chunk, key_chunk_size=chunk, deterministic=True),
            **dict(dropout_rng=None, attn_pdrop=0.0, dtype=q.dtype, precision=None, prevent_cse=False),
            policy=jax.checkpoint_policies.nothing_saveable,
        )

        def shard(q: Any, k: Any, v: Any) -> Any:
            return ringattention(q, k, v, None, None, None, "sequence", True, options)

        specs = (self.spec,) * 3
        return jax.shard_map(shard, mesh=self.mesh, in_specs=specs, out_specs=self.spec, check_vma=False)(q, k, v)


class Sdpa(Contestant):
    """PyTorch's scaled_dot_product_attention (the CPU flash kernel), one thread per core."""

    AXES = (0, 2, 1, 3)  # PyTorch's arrays are [batch, heads, length, dim]

    def __init__(self, rank: int, ranks: int, port: int) -> None:
        import torch

        self.torch, self.rank, self.ranks, self.port = torch, rank, ranks, port
        torch.set_num_threads(DEVICES // ranks)

    def attend(self, q: Any, k: Any, v: Any) -> Any:
        return self.torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    def held(self, length: int) -> np.ndarray:
        """The positions of the tokens that this process holds."""
        return np.arange(length)

    def place(self, inputs: Inputs) -> Functions:
        self.positions = self.held(inputs.q.shape[1])
        arrays = (np.ascontiguousarray(x[:, self.positions].transpose(self.AXES)) for x in (*inputs, inputs.few))
        q, k, v, dout, few = map(self.torch.from_numpy, arrays)
        wanted = [x.detach().requires_grad_() for x in (q, k, v)]

        def both(dout: Any) -> Any:
            out = self.attend(*wanted)
            return out.detach(), *self.torch.autograd.grad(out, wanted, dout)

        forward = self.torch.no_grad()(lambda: self.attend(q, k, v))
        return {"forward": forward, "both": lambda: both(dout), "check": lambda: both(few)}

    def read(self, result: Any) -> Answer:
        return Answer(self.positions, *(x.numpy().transpose(self.AXES) for x in result))


class RingAttentionTorch(Sdpa):
    """ring-attention-pytorch from PyPI, striped: one process with one thread per device, over gloo."""

    AXES = (0, 1, 2, 3)
    BUCKET = 512  # the default of its RingAttention module

    def __init__(self, rank: int, ranks: int, port: int) -> None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        super().__init__(rank, ranks, port)
        import torch.distributed as dist
        from ring_attention_pytorch import ring_flash_attn

        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
        self.ring_flash_attn = ring_flash_attn

    def held(self, length: int) -> np.ndarray:
        """Positions in this library's stripes: bucket j of B holds the tokens j, j + B, j + 2B, …; a process holds
        neighbouring buckets."""
        slots = length // self.ranks
        bucket = min(self.BUCKET, slots)
        order = np.arange(length).reshape(bucket, length // bucket).T.reshape(-1)
        return order[self.rank * slots : (self.rank + 1) * slots]

    def attend(self, q: Any, k: Any, v: Any) -> Any:
        options = dict(causal=True, bucket_size=self.BUCKET, ring_reduce_col=True, striped_ring_attn=True)
        return self.ring_flash_attn(q, k, v, **options)


def use_virtual(devices: int) -> None:
    """Let JAX see this many CPU devices. Must be called before JAX initialises."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
