"""`striped generate`: long prompts in, tokens out; `striped import` and `striped export`: other people's weights.

config      every option, once: flags, help and defaults
weights     a folder in, weights on the mesh out
engine      a model with a cache: it reads texts, and writes on
sample      from scores to a token
text        prompts to tokens, tokens to text
command     the loop around it: prompts, streaming, JSONL, speed
"""
