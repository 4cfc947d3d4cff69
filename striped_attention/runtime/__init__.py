"""Runtime: devices, meshes and compilers.

mesh      devices in an order in which neighbours in a ring are neighbours on the interconnect
sharding  how arrays lie on a mesh
hardware  peak rates, memory and interconnect of devices
compiler  options with which XLA overlaps transfers with attention
schedule  which transfers of a compiled program do
record    hardware, versions and commit, to be kept with a result
"""
