"""Hardware: what devices can do at best, with sources, and what was measured on them.

FLOP/s are dense bf16, the CPU's float32. A wire is one way, from a device to the next of its ring: `wire` to one of the
same group (a node, a pod), `far_wire` to another one. Where a ring leaves its group that hop is the slowest, and all
wait for it.
"""

import dataclasses

GIGA, TERA = 1e9, 1e12


@dataclasses.dataclass(frozen=True)
class Hardware:
    """A device and its wires. `kinds` are what JAX's `device_kind` may contain, in lower case."""

    name: str
    kinds: tuple[str, ...]
    platform: str
    peak: float  # FLOP/s
    memory: float  # bytes
    bandwidth: float  # of that memory, bytes/s
    wire: float  # bytes/s, one way
    group: int  # devices
    far_wire: float  # bytes/s, one way, a device's share
    source: str


_NDR = "InfiniBand NDR: a port of 400 Gb/s for each GPU (DGX H100, H200 and B200 user guides)"
_ICI = "wire: one ICI link, one way; far: data-centre network, a chip's share"
# fmt: off
_TABLE = (
    #        name    kinds              platform     peak     memory    bandwidth      wire  group   far wire
    Hardware("a100", ("a100",),          "gpu",  312*TERA,   80*GIGA,  2039*GIGA,  300*GIGA,    8, 25*GIGA,
             "A100 80GB SXM data sheet; NVLink 3: 600 GB/s both ways; InfiniBand HDR: a port of 200 Gb/s for each GPU"),
    Hardware("h100", ("h100",),          "gpu",  989*TERA,   80*GIGA,  3350*GIGA,  450*GIGA,    8, 50*GIGA,
             f"H100 SXM data sheet (1979 TFLOP/s with sparsity); NVLink 4: 900 GB/s both ways; {_NDR}"),
    Hardware("h200", ("h200",),          "gpu",  989*TERA,  141*GIGA,  4800*GIGA,  450*GIGA,    8, 50*GIGA,
             f"H200 data sheet (1979 TFLOP/s with sparsity); NVLink 4: 900 GB/s both ways; {_NDR}"),
    Hardware("b200", ("b200",),          "gpu", 2250*TERA,  180*GIGA,  8000*GIGA,  900*GIGA,    8, 50*GIGA,
             f"HGX B200 data sheet (4.5 PFLOP/s with sparsity); NVLink 5: 1800 GB/s both ways; {_NDR}"),
    Hardware("v4",   ("tpu v4",),        "tpu",  275*TERA, 34.4*GIGA,  1200*GIGA,   50*GIGA, 4096, 3.1*GIGA,
             f"cloud.google.com/tpu/docs/v4: 32 GiB, 2400 Gb/s a chip over 6 links; {_ICI}, taken to be v5p's half"),
    Hardware("v5e",  ("tpu v5 lite", "tpu v5e"), "tpu", 197*TERA, 16*GIGA, 819*GIGA, 50*GIGA, 256, 3.1*GIGA,
             f"cloud.google.com/tpu/docs/v5e: ICI 400 GB/s both ways over 4 ports, 6.4 Tb/s for a pod of 256; {_ICI}"),
    Hardware("v5p",  ("tpu v5",),        "tpu",  459*TERA,   95*GIGA,  2765*GIGA,  100*GIGA, 8960, 6.25*GIGA,
             f"cloud.google.com/tpu/docs/v5p: ICI 1200 GB/s both ways over 6 ports, 50 Gb/s a chip; {_ICI}"),
    Hardware("v6e",  ("tpu v6 lite", "tpu v6e"), "tpu", 918*TERA, 32*GIGA, 1638*GIGA, 100*GIGA, 256, 12.5*GIGA,
             f"cloud.google.com/tpu/docs/v6e: ICI 800 GB/s both ways over 4 ports, 100 Gb/s a chip; {_ICI}"),
    Hardware("cpu",  (),                 "cpu", 0.082*TERA,  12*GIGA,    21*GIGA,    1*GIGA,    2,  1*GIGA,
             "one core of the AMD EPYC of benchmarks/results/cpu_balance.json: a product of 2048 × 2048 matrices in "
             "float32 and a copy, measured; its share of the memory; wires assumed"),
)
# fmt: on
HARDWARE = {device.name: device for device in _TABLE}
_H100_PCIE = ("h100 pcie", 756 * TERA)  # its data sheet, 1513 TFLOP/s with sparsity


def peak_flops(kind: str) -> float | None:
    """A device's peak by its `device_kind`; None if it is not known, as for every CPU."""
    if _H100_PCIE[0] in kind.lower():
        return _H100_PCIE[1]
    return next((device.peak for device in _TABLE if any(name in kind.lower() for name in device.kinds)), None)


@dataclasses.dataclass(frozen=True)
class Rate:
    """How fast a pass runs: arithmetic as a part of the peak, and what each step costs besides.

    A block of a ring takes FLOPs / (efficiency · peak) + query_bytes · (slots · heads · dim) / bandwidth + seconds. The
    last two are merges, sums, small blocks' loss and the launch of kernels.
    """

    efficiency: float
    query_bytes: float = 0.0
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class Rates:
    """What a kernel does on a platform: its tile (queries × keys), both passes, and how that is known.

    Heads take as long as those whose dimension is the next multiple of `lanes`.
    """

    tile: tuple[int, int]
    forward: Rate
    backward: Rate
    known: str
    lanes: int = 1


# Fitted to benchmarks/results/gpu_attention_*.json, by least squares of relative errors; a test repeats that.
_CUDNN = Rates(
    tile=(128, 128),
    forward=Rate(efficiency=0.601, query_bytes=16.1, seconds=78.6e-6),
    backward=Rate(efficiency=0.547, query_bytes=71.9, seconds=81.9e-6),
    known="measured on an H200",
    lanes=64,  # seen with the 100 of preset 3b: benchmarks/results/gpu_step_3b_64k.json
)
# Fitted to benchmarks/results/gpu_masks_*.json in the same way, both passes together; parted as forward and backward
# are with 32,768 tokens. Blocks were timed by themselves: merges are not in it.
_XLA_GPU = Rates(
    tile=(1024, 1024),
    forward=Rate(efficiency=0.0855, query_bytes=153.0, seconds=330e-6),
    backward=Rate(efficiency=0.117, query_bytes=159.0, seconds=342e-6),
    known="measured on an H200",
)
_XLA_TPU = dataclasses.replace(_XLA_GPU, known="assumed to be as on an H200, not measured")
# Fitted to benchmarks/results/cpu_balance.json and cpu_balance_8192.json, as above.
_XLA_CPU = Rates((256, 256), Rate(0.611), Rate(0.738), "measured on a core of an AMD EPYC")
# Nothing was measured on a TPU; fused kernels of others reach about as much of a chip's peak.
_PALLAS_TPU = Rates((512, 1024), Rate(0.5), Rate(0.5), "assumed, not measured", lanes=128)
RATES = {
    ("gpu", "cudnn"): _CUDNN,
    ("gpu", "xla"): _XLA_GPU,
    ("tpu", "pallas_tpu"): _PALLAS_TPU,
    ("tpu", "xla"): _XLA_TPU,
    ("cpu", "xla"): _XLA_CPU,
}
# Useful FLOPs of everything but attention, recomputation and all that is not a product taken into account; fitted to
# benchmarks/results/gpu_step_*.json.
MATRIX_EFFICIENCY = 0.439
