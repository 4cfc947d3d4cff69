"""Strategies: how queries and keys of different devices meet.

strategy     sizes of groups of devices: heads × gather × ring
problem      the block of any group's queries with any group's keys
exchange     what moves: all-to-all, all-gather, hops
head_groups  the heads of a block in parts
ring         when it moves, and the derivative of it all
hops         from how many places back keys are needed
work         tiles of every device and step
messages     bytes that a strategy sends and holds
workload     the attention of a layer, and how it is to be done
timeline     its steps in time
choice       which strategy is the fastest
"""
