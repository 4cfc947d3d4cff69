"""Compiling: training steps for machines that are not here.

config      what `striped compile` may be asked
topology    pods and machines, described for a compiler
command     compile, find the longest length that fits, show
"""
