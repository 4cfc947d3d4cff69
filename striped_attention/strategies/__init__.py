"""Strategies: how queries meet the keys of other devices.

strategy     the sizes of groups of devices: heads × gather × ring
problem      the block of any group's queries with any group's keys
hops         the rings, and how many places back the needed keys lie
exchange     communication: all-to-all, all-gather, reduce-scatter, hops
head_groups  the heads of a block, split into groups
pipeline     transfers of keys that overlap with attention to other keys
forward      the steps of the forward pass
backward     the steps of the backward pass
ring         attention over a mesh axis, and its derivative

work         tiles per device and step
messages     bytes that a strategy sends and keeps in memory
workload     the attention of one layer, and how it is computed
timeline     the time of every step
choice       the fastest strategy
"""
