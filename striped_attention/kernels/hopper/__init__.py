"""The kernel `hopper`: NVIDIA Hopper GPUs (H100, H200), by Pallas for Mosaic GPU.

kernel     blocks, as the contract has them
forward    the Pallas kernel for out and lse
backward   the Pallas kernels for dq, and for dk and dv
parts      what they share
walk       the tiles that a thread block visits, and in which order
emulation  the kernels in Pallas's interpreter, for tests on a CPU

It compiles for these GPUs and gives the right numbers in the interpreter, but has not run on one: nothing is known of
its speed, and `kernel="auto"` does not take it. Ask for it by name.
"""

from striped_attention.kernels.hopper.emulation import emulated
from striped_attention.kernels.hopper.kernel import AUTOMATIC as AUTOMATIC
from striped_attention.kernels.hopper.kernel import DIFFERENTIABLE as DIFFERENTIABLE
from striped_attention.kernels.hopper.kernel import FULL_OUT as FULL_OUT
from striped_attention.kernels.hopper.kernel import RATES as RATES
from striped_attention.kernels.hopper.kernel import SUMS_LAST as SUMS_LAST
from striped_attention.kernels.hopper.kernel import attend as attend
from striped_attention.kernels.hopper.kernel import attend_grad as attend_grad
from striped_attention.kernels.hopper.kernel import default_tile as default_tile
from striped_attention.kernels.hopper.kernel import unsupported as unsupported

EMULATIONS = {"interpreted": emulated}
