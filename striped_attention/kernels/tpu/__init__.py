"""The kernel `pallas_tpu`: TPUs, by Pallas.

kernel     attention over blocks, as `contract.py` defines it
pallas     the two Pallas kernels, forward and backward
tile_list  the visible tiles of a block, as a grid
emulation  the kernels in Pallas's interpreter, for tests on a CPU
"""

from striped_attention.kernels.tpu.emulation import emulated
from striped_attention.kernels.tpu.kernel import AUTOMATIC as AUTOMATIC
from striped_attention.kernels.tpu.kernel import DIFFERENTIABLE as DIFFERENTIABLE
from striped_attention.kernels.tpu.kernel import FULL_OUT as FULL_OUT
from striped_attention.kernels.tpu.kernel import RATES as RATES
from striped_attention.kernels.tpu.kernel import SUMS_LAST as SUMS_LAST
from striped_attention.kernels.tpu.kernel import attend as attend
from striped_attention.kernels.tpu.kernel import attend_grad as attend_grad
from striped_attention.kernels.tpu.kernel import attend_whole as attend_whole
from striped_attention.kernels.tpu.kernel import default_tile as default_tile
from striped_attention.kernels.tpu.kernel import unsupported as unsupported

EMULATIONS = {"in Pallas's interpreter": emulated}
