"""Hardware: peak rates of devices, with sources.

FLOP/s are dense bf16; the CPU's are float32. Link rates are one way, from a device to the next in its ring:
`interconnect` within a group (a node, a pod), `far_interconnect` to another group. Where a ring leaves its group, that
hop is the slowest, and all devices wait for it. Every message also has a latency that depends on the kind of link: see
`NVLINK` and the others.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

GIGA, TERA, MICRO = 1e9, 1e12, 1e-6


@dataclasses.dataclass(frozen=True)
class Hardware:
    """A device and its links. `kinds` are substrings of JAX's `device_kind`, in lower case."""

    name: str
    kinds: tuple[str, ...]
    platform: str
    peak: float  # FLOP/s
    memory: float  # bytes
    bandwidth: float  # of that memory, bytes/s
    interconnect: float  # bytes/s, one way
    group: int  # devices
    far_interconnect: float  # bytes/s, one way, per device
    latency: float  # seconds per message on `interconnect`, in addition to its bytes
    far_latency: float  # the same on `far_interconnect`
    source: str
    links: int = 1  # links per device that an all-gather can use at once

    def gather_bandwidth(self, devices: int, apart: int = 1) -> float:
        """Return the bytes per second that each of `devices`, spaced `apart` places, receives in an all-gather.

        Within a group, all links are used. Between groups, NCCL's rings are modelled: every shard enters a group once,
        and the devices of the group that gather together share this traffic among their network interfaces.
        """
        near = self.interconnect * self.links
        if devices * apart <= self.group:
            return near
        return min(near, self.far_interconnect * max(1, self.group // apart))

    @property
    def usable(self) -> float:
        """Bytes of memory that JAX uses, unless XLA_PYTHON_CLIENT_MEM_FRACTION changes it."""
        return self.memory * (1.0 if self.platform in ("tpu", "cpu") else 0.75)


_NDR = "InfiniBand NDR: one 400 Gb/s port per GPU (DGX H100, H200 and B200 user guides)"
# Latency of a message by kind of link, in seconds. GPUs: NCCL's own model (src/graph/tuning.cc, ring, protocol Simple)
# uses 8.4 µs per collective, and per step 3.4 µs over NVLink or 14 µs over the network. TPUs: about 1 µs for a hop over
# ICI (jax-ml.github.io/scaling-book/sharding). Data-centre networks and CPUs are assumed.
NVLINK, INFINIBAND = (8.4 + 3.4) * MICRO, (8.4 + 14.0) * MICRO
ICI, DATA_CENTRE, CPU = 1 * MICRO, 20 * MICRO, 20 * MICRO
_GPUS, _TPUS, _CPUS = (NVLINK, INFINIBAND), (ICI, DATA_CENTRE), (CPU, CPU)

_ICI = "interconnect: one ICI link, one way; far: data-centre network, per chip"
# fmt: off
_TABLE = (
    #        name    kinds              platform     peak     memory    bandwidth intercon. group far interc. latencies
    Hardware("a100", ("a100",),          "gpu",  312*TERA,   80*GIGA,  2039*GIGA,  300*GIGA,    8, 25*GIGA, *_GPUS,
             "A100 80GB SXM data sheet; NVLink 3: 600 GB/s both ways; InfiniBand HDR: one 200 Gb/s port per GPU"),
    Hardware("h100", ("h100",),          "gpu",  989*TERA,   80*GIGA,  3350*GIGA,  450*GIGA,    8, 50*GIGA, *_GPUS,
             f"H100 SXM data sheet (1979 TFLOP/s with sparsity); NVLink 4: 900 GB/s both ways; {_NDR}"),
    Hardware("h200", ("h200",),          "gpu",  989*TERA,  141*GIGA,  4800*GIGA,  450*GIGA,    8, 50*GIGA, *_GPUS,
             f"H200 data sheet (1979 TFLOP/s with sparsity); NVLink 4: 900 GB/s both ways; {_NDR}"),
    Hardware("b200", ("b200",),          "gpu", 2250*TERA,  180*GIGA,  8000*GIGA,  900*GIGA,    8, 50*GIGA, *_GPUS,
             f"HGX B200 data sheet (4.5 PFLOP/s with sparsity); NVLink 5: 1800 GB/s both ways; {_NDR}"),
    Hardware("v4",   ("tpu v4",),        "tpu",  275*TERA, 34.4*GIGA,  1200*GIGA,   50*GIGA, 4096, 3.1*GIGA, *_TPUS,
             f"cloud.google.com/tpu/docs/v4: 32 GiB, 2400 Gb/s per chip over 6 links; {_ICI}, assumed half of v5p's",
             links=6),
    Hardware("v5e",  ("tpu v5 lite", "tpu v5e"), "tpu", 197*TERA, 16*GIGA, 819*GIGA, 50*GIGA, 256, 3.1*GIGA, *_TPUS,
             f"cloud.google.com/tpu/docs/v5e: ICI 400 GB/s both ways over 4 ports, 6.4 Tb/s for a pod of 256; {_ICI}",
             links=4),
    Hardware("v5p",  ("tpu v5",),        "tpu",  459*TERA,   95*GIGA,  2765*GIGA,  100*GIGA, 8960, 6.25*GIGA, *_TPUS,
             f"cloud.google.com/tpu/docs/v5p: ICI 1200 GB/s both ways over 6 ports, 50 Gb/s per chip; {_ICI}", links=6),
    Hardware("v6e",  ("tpu v6 lite", "tpu v6e"), "tpu", 918*TERA, 32*GIGA, 1638*GIGA, 100*GIGA, 256, 12.5*GIGA, *_TPUS,
             f"cloud.google.com/tpu/docs/v6e: ICI 800 GB/s both ways over 4 ports, 100 Gb/s per chip; {_ICI}", links=4),
    Hardware("cpu",  (),                 "cpu", 0.082*TERA,  12*GIGA,    21*GIGA,    1*GIGA,    2,  1*GIGA, *_CPUS,
             "one core of the AMD EPYC of benchmarks/results/cpu_balance.json: measured with a float32 product of "
             "2048 × 2048 matrices and a copy; its share of the memory; links and latency assumed"),
)
# fmt: on
HARDWARE = {device.name: device for device in _TABLE}
_H100_PCIE = ("h100 pcie", 756 * TERA)  # its data sheet, 1513 TFLOP/s with sparsity


def peak_flops(kind: str) -> float | None:
    """Return the peak FLOP/s of a device by its `device_kind`; None if unknown, as for every CPU."""
    if _H100_PCIE[0] in kind.lower():
        return _H100_PCIE[1]
    return next((device.peak for device in _TABLE if any(name in kind.lower() for name in device.kinds)), None)


def hardware_of(platform: str, kind: str = "") -> Hardware:
    """Return the entry for a `device_kind`; for an unknown device, that of a common one of its platform."""
    known = (device for device in _TABLE if any(name in kind.lower() for name in device.kinds))
    return next(known, HARDWARE[{"gpu": "h100", "tpu": "v5p"}.get(platform, "cpu")])


def memory_in_use(devices: Sequence[Any]) -> tuple[int, int | None] | None:
    """Return the peak bytes used so far by the fullest of these devices, and the bytes that JAX may use.

    None if the devices do not report this, as CPUs do not.
    """
    told = [stats for device in devices if (stats := device.memory_stats()) and "peak_bytes_in_use" in stats]
    if not told:
        return None
    fullest = max(told, key=lambda stats: stats["peak_bytes_in_use"])
    return fullest["peak_bytes_in_use"], fullest.get("bytes_limit")
