"""The kernel `cudnn`: NVIDIA GPUs, by cuDNN's fused attention.

kernel     attention over blocks, as `contract.py` defines it
pieces     a block as one of the masks that cuDNN supports
binding    JAX's private entry points to cuDNN
emulation  cuDNN's attention in plain JAX, for tests on a CPU
"""

from striped_attention.kernels.cudnn.emulation import emulated
from striped_attention.kernels.cudnn.kernel import AUTOMATIC as AUTOMATIC
from striped_attention.kernels.cudnn.kernel import DIFFERENTIABLE as DIFFERENTIABLE
from striped_attention.kernels.cudnn.kernel import FULL_OUT as FULL_OUT
from striped_attention.kernels.cudnn.kernel import RATES as RATES
from striped_attention.kernels.cudnn.kernel import SUMS_LAST as SUMS_LAST
from striped_attention.kernels.cudnn.kernel import attend as attend
from striped_attention.kernels.cudnn.kernel import attend_grad as attend_grad
from striped_attention.kernels.cudnn.kernel import attend_whole as attend_whole
from striped_attention.kernels.cudnn.kernel import default_tile as default_tile
from striped_attention.kernels.cudnn.kernel import unsupported as unsupported

EMULATIONS = {"in plain JAX": emulated}
