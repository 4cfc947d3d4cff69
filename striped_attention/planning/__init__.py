"""Planning: estimate the cost of a run before any device is used.

setting  the inputs of a plan
budget   rematerialisation and chunk sizes that fit into memory
cost     FLOPs, memory and bytes on the interconnect, from shapes
layouts  the fastest layout for a mask
plan     comparison of layouts and strategies
work     tiles per device and step, from `striped_attention.strategies.work`
"""
