"""Strategies: how queries and keys of different devices meet.

strategy     sizes of groups of devices: heads × gather × ring
problem      the block of any group's queries with any group's keys
hops         the rings, and from how many places back keys are needed
exchange     what moves: all-to-all, all-gather, reduce-scatter, hops
head_groups  the heads of a block in parts
pipeline     keys that are on their way while others are attended to
forward      the steps of the forward pass
backward     the steps of the backward pass
ring         attention over a mesh axis, and its derivative

work         tiles of every device and step
messages     bytes that a strategy sends and holds
workload     the attention of a layer, and how it is to be done
timeline     its steps in time
choice       which strategy is the fastest
"""
