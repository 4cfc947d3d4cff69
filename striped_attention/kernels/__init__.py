"""Kernels: attention over one block, the queries of one device and the keys of one device.

contract  what every kernel keeps to
tiles     which tiles of a block run
xla       plain JAX: every mask, every option, any platform
cudnn/    NVIDIA GPUs, by cuDNN's fused attention
tpu/      TPUs, by Pallas
decode    a few queries against a cache
"""
