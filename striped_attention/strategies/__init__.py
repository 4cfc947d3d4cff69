"""Strategies: how queries and keys of different devices meet.

ring  keys and values travel from device to device
hops  from how many places back they are needed
"""
