"""`striped generate`: long prompts in, tokens out; `striped import` and `striped export`: other people's weights.

config         every option, once: flags, help and defaults
settings       options and generation_config.json: how tokens are chosen, when generation ends
weights        a folder in, weights on the mesh out
engine         a model with a cache: prefill and decode
sample         from scores to a token, and log probabilities
text           text to tokens, tokens to text
prompts        from options and files to prompts, plain or in a chat template
stops          stop strings
run            batches through an engine: answers, streaming, lines of JSON, speed
conversation   an interactive one, whose cache is kept
command        from the options to a run
"""
