"""Runtime: devices, meshes and compilers.

mesh      device order in which neighbours in a ring are neighbours on the interconnect
sharding  how the arrays of attention are sharded over a mesh
hardware  peak rates, memory and interconnect of devices
compiler  options with which XLA overlaps transfers with attention
compiled  a persistent cache of compiled programs
schedule  which transfers of a compiled program overlap with attention
stop      Ctrl-C during commands
record    hardware, versions and commit, stored with a result
"""
