"""Core: the algebra. No devices, no kernels.

layout   which device holds which token
mask     which keys a query may attend to
bias     what is added to a score because of distance
partial  attention over some of the keys, and how two such results are merged
oracle   dense attention, which everything else is compared with
"""
