"""The kernel `hopper`: NVIDIA Hopper GPUs, by Pallas for Mosaic GPU. Not yet among the kernels that `choose` knows.

kernel     blocks, as the contract has them
forward    the Pallas kernel for out and lse
backward   the Pallas kernels for dq, and for dk and dv
parts      what they share
walk       the tiles that a thread block visits, and in which order
emulation  the kernels in Pallas's interpreter, for tests on a CPU

It lowers for GPUs and gives the right numbers in the interpreter. It has not run on a GPU, so nothing is known of its
speed, and heads are at most 128 wide.
"""
