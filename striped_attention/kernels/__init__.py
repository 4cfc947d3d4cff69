"""Kernels: attention over one block, the queries of one device against the keys of one device.

contract  the interface that every kernel implements
choice    the registry of kernels, and which one runs
rates     measured speed of a kernel
tiles     which tiles of a block run
xla       plain JAX: every mask, every option, any platform
cudnn/    NVIDIA GPUs, by cuDNN's fused attention
hopper/   NVIDIA Hopper GPUs, by Pallas for Mosaic GPU
tpu/      TPUs, by Pallas
decode    a few queries against a cache
"""
