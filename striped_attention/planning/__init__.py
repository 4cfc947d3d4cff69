"""Planning: what a run would cost, before any device is used.

work      tiles per device and step
cost      FLOPs, memory and bytes on the interconnect, from shapes
timeline  steps of a ring in time
plan      layouts compared
"""
