"""Rates: how fast a kernel was measured to be, and what that makes of a request.

Every kernel has `RATES`, by platform. The planner works out a whole ring from them; `seconds` is a rough figure for
one block, enough to tell which of two kernels is faster.
"""

import dataclasses

from striped_attention.kernels.contract import Request
from striped_attention.runtime.hardware import Hardware

ANYWHERE = "any"  # the platform of rates for all platforms without their own
BACKWARD = 2.5  # the FLOPs of attention's backward pass, in forward passes


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
    """What a kernel does on a platform: both passes, and how that is known.

    Heads take as long as those whose dimension is the next multiple of `lanes`.
    """

    forward: Rate
    backward: Rate
    known: str
    lanes: int = 1

    def widening(self, dim: int) -> float:
        """How much longer heads of this dimension take because of `lanes`."""
        return -(-dim // self.lanes) * self.lanes / dim

    def seconds(self, request: Request, hardware: Hardware) -> float:
        """Both passes over one block of which half is visible."""
        elements = request.batch * request.queries * request.heads * request.dim
        flops = 2 * elements * request.keys * self.widening(request.dim)
        return sum(
            factor * flops / (rate.efficiency * hardware.peak)
            + rate.query_bytes * elements / hardware.bandwidth
            + rate.seconds
            for rate, factor in ((self.forward, 1.0), (self.backward, BACKWARD))
        )
