"""Core: the mathematics of sequence-parallel attention. No devices, no kernels.

layout   which device holds which token
mask     which keys a query may attend to
bias     a term added to the scores that depends on distance
partial  attention over some of the keys, and how such results are merged
oracle   dense attention, the reference implementation
"""
