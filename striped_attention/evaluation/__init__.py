"""`striped evaluate`: does a model use its context? Perplexity by position, and needles in haystacks.

config      every option, once: flags, help and defaults
forward     a model on a mesh, without an optimizer
needle      haystacks with a needle and a question, and whether the model answers
command     the loop around them: progress, tables, JSON
"""
