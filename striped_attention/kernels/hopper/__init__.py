"""The kernel `hopper`: NVIDIA Hopper GPUs (H100, H200), by Pallas for Mosaic GPU.

kernel     attention over blocks, as `contract.py` defines it
forward    the Pallas kernel for out and lse
backward   the Pallas kernels for dq, and for dk and dv
one_pass   the Pallas kernel for all gradients at once
parts      building blocks shared by these kernels
walk       the tiles that a thread block visits, and their order
emulation  the kernels in Pallas's interpreter, for tests on a CPU
"""

from striped_attention.kernels.hopper.emulation import emulated
from striped_attention.kernels.hopper.kernel import AUTOMATIC as AUTOMATIC
from striped_attention.kernels.hopper.kernel import DIFFERENTIABLE as DIFFERENTIABLE
from striped_attention.kernels.hopper.kernel import FULL_OUT as FULL_OUT
from striped_attention.kernels.hopper.kernel import RATES as RATES
from striped_attention.kernels.hopper.kernel import SUMS_LAST as SUMS_LAST
from striped_attention.kernels.hopper.kernel import attend as attend
from striped_attention.kernels.hopper.kernel import attend_grad as attend_grad
from striped_attention.kernels.hopper.kernel import attend_whole as attend_whole
from striped_attention.kernels.hopper.kernel import default_tile as default_tile
from striped_attention.kernels.hopper.kernel import unsupported as unsupported

EMULATIONS = {"interpreted": emulated}
