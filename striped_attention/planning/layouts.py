"""Layouts: which layout is the fastest for a mask, by the cost model.

    sa.best_layout(262_144, 8, mask=sa.causal())

The answer depends on the mask, the sequence length, the devices, and the kernel and strategy that run there.
"""

import logging
from typing import Any

import jax
import jax.numpy as jnp

from striped_attention.core.annotations import checks_itself
from striped_attention.core.layout import BASELINE, Layout, check_whole
from striped_attention.core.mask import Mask, causal
from striped_attention.kernels.choice import check_name, fastest, layouts_for, refusal
from striped_attention.kernels.contract import Request, make_request
from striped_attention.runtime.hardware import HARDWARE, Hardware, hardware_of
from striped_attention.strategies.choice import TileCount, assess, fastest_that_fits
from striped_attention.strategies.strategy import AUTO, Strategy, candidates, check_strategy, exchanged, resolve
from striped_attention.strategies.workload import Workload, adapted


@checks_itself
def best_layout(
    length: int,
    devices: int,
    *,
    mask: Mask | None = None,
    heads: int = 32,
    kv_heads: int = 8,
    dim: int = 128,
    dtype: Any = jnp.bfloat16,
    strategy: str | Strategy = AUTO,
    kernel: str = AUTO,
    hardware: str | Hardware | None = None,
) -> Layout:
    """Return the layout with the fastest attention, forward and backward, by the planner's cost model.

    Compares contiguous, zigzag, and stripes of about a tile or one token, in this order where they are as fast. Their
    estimated times are logged at level INFO.

    Args:
      length: tokens of the sequence.
      devices: devices of the mesh axis that shards it.
      mask: causal by default. A mask with documents must be made for this length; if documents differ from step to
        step, pass a typical batch.
      heads, kv_heads, dim, dtype: of the queries and keys.
      strategy, kernel: as `attention` takes them.
      hardware: a name in `striped_attention.runtime.hardware.HARDWARE`; by default the devices of this machine.
    """
    length, devices = check_whole("length", length), check_whole("devices", devices)
    if length < devices:
        raise ValueError(
            f"length must be at least the {devices} devices that share the sequence; got {length}. The order is "
            f"best_layout(length, devices)."
        )
    heads, kv_heads, dim = check_whole("heads", heads), check_whole("kv_heads", kv_heads), check_whole("dim", dim)
    if heads % kv_heads:
        raise ValueError(f"heads must be a multiple of kv_heads; got {heads} and {kv_heads}.")
    mask = causal() if mask is None else mask
    if not isinstance(mask, Mask):
        raise ValueError(f"mask must be a mask, like sa.causal() or sa.documents(segment_ids); got {mask!r}.")
    mask.check_length(length)
    if mask.placed is not None:
        raise ValueError(
            "best_layout permutes the mask for every layout itself. Pass it as it was before mask.permute."
        )
    check_name(kernel)
    check_strategy(strategy, devices)
    machine, kind = _machine(hardware)

    def request(layout: Layout) -> Request:
        slots = layout.padded_length(length, devices) // devices
        query, key = (jax.ShapeDtypeStruct((1, slots, n, dim), jnp.dtype(dtype)) for n in (heads, kv_heads))
        return make_request(
            query,
            key,
            mask=mask,
            layout=layout,
            devices=devices,
            length=length,
            platform=machine.platform,
            device_kind=kind,
            here=hardware is None,
        )

    tried: dict[tuple[Strategy, Layout], tuple[float, int]] = {}  # seconds and bytes
    count, slots = TileCount(mask, length), -(-length // devices)
    for asked in candidates(devices, heads, machine.group) if strategy == AUTO else [resolve(strategy, devices, heads)]:
        plain = request(BASELINE)
        of = exchanged(adapted(asked, plain), plain)
        for layout in layouts_for(kernel, of, slots, devices // of.devices):
            plain = request(layout)
            workload = Workload(plain, mask, machine, adapted(asked, plain), kernel)
            if kernel != AUTO and strategy == AUTO and refusal(kernel, workload.request) is not None:
                continue
            cost = assess(workload, count).attention_seconds, workload.messages.memory
            tried.setdefault((workload.strategy, layout), cost)
    if not tried:
        fastest(kernel, request(BASELINE))  # raises with the reason
    seconds, memory = (lambda key: tried[key][0]), (lambda key: tried[key][1])
    taken, best = fastest_that_fits(list(tried), seconds, memory, machine.usable)
    each = ", ".join(f"{layout!r} {cost[0]:.3g} s" for (chosen, layout), cost in tried.items() if chosen == taken)
    logging.getLogger("striped_attention").info(
        *("best_layout selects %r with strategy %s, planned for one layer's attention on %d × %s: %s", best, taken),
        *(devices, machine.name, each),
    )
    return best


def _machine(hardware: str | Hardware | None) -> tuple[Hardware, str]:
    """Return the hardware to plan for, and the kind of its devices."""
    if hardware is None:
        device = jax.devices()[0]
        return hardware_of(device.platform, device.device_kind), device.device_kind
    if isinstance(hardware, str):
        if hardware not in HARDWARE:
            raise ValueError(f"hardware must be one of {', '.join(HARDWARE)}, or a Hardware; got {hardware!r}.")
        hardware = HARDWARE[hardware]
    return hardware, next(iter(hardware.kinds), "")
