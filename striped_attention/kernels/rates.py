"""Rates: the measured speed of a kernel, and the time that it implies for a request.

Every kernel has `RATES`, by platform. The planner computes the time of a whole ring from them; `seconds` is a rough
estimate for one block, enough to rank kernels.
"""

import dataclasses

from striped_attention.kernels.contract import Request
from striped_attention.runtime.hardware import Hardware

ANYWHERE = "any"  # key of the rates for all platforms without their own
BACKWARD = 2.5  # FLOPs of attention's backward pass relative to the forward pass


@dataclasses.dataclass(frozen=True)
class Rate:
    """The speed of one pass: arithmetic as a fraction of peak, and the overhead of each step.

    A block of a ring takes FLOPs / (efficiency · peak) + query_bytes · (slots · heads · dim) / bandwidth + seconds. The
    last two terms cover merges, gradient sums, the lower efficiency of small blocks, and kernel launches. In a ring
    with several steps, each takes `merging` seconds more: for kernels that were measured in single steps.
    """

    efficiency: float
    query_bytes: float = 0.0
    seconds: float = 0.0
    merging: float = 0.0


@dataclasses.dataclass(frozen=True)
class Rates:
    """A kernel's rates on a platform: both passes, and where they come from (`known`).

    A head takes as long as one whose dimension is rounded up to a multiple of `lanes`.
    """

    forward: Rate
    backward: Rate
    known: str
    lanes: int = 1

    def widening(self, dim: int) -> float:
        """Return the slowdown from rounding this head dimension up to a multiple of `lanes`."""
        return -(-dim // self.lanes) * self.lanes / dim

    def seconds(self, request: Request, hardware: Hardware) -> float:
        """Estimate the seconds of both passes over one block, half of which is visible."""
        elements = request.batch * request.queries * request.heads * request.dim
        flops = 2 * elements * request.keys * self.widening(request.dim)
        return sum(
            factor * flops / (rate.efficiency * hardware.peak)
            + rate.query_bytes * elements / hardware.bandwidth
            + rate.seconds
            + (rate.merging if request.devices > 1 else 0.0)
            for rate, factor in ((self.forward, 1.0), (self.backward, BACKWARD))
        )
