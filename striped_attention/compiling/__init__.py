"""Compiling: ahead-of-time compilation of training steps for remote TPU pods and GPU clusters.

config      options of `striped compile`
topology    descriptions of pods and GPU machines for the compiler
command     compile, find the longest sequence length that fits, report
"""
