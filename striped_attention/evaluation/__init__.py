"""`striped evaluate`: measure whether a model uses its context, by perplexity by position and needle in a haystack.

config      all options in one place: flags, help and defaults
forward     forward passes of a model on a mesh, without an optimiser
needle      haystacks with a hidden needle and a question
table       results as terminal tables
command     the command itself: progress, tables, JSON
"""
