"""Planning: what a run would cost, before any device is used.

setting  what a plan was asked for
cost     FLOPs, memory and bytes on the interconnect, from shapes
plan     layouts and strategies compared
work     tiles per device and step, as `striped_attention.strategies.work` counts them
"""
