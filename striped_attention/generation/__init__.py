"""The commands `striped generate`, `striped import` and `striped export`: long-context generation and model conversion.

config         command-line options: flags, help and defaults
settings       sampling parameters and stopping criteria, from options and generation_config.json
fused          weights in the layout that decoding reads fastest
loading        weights from a folder, fused and sharded over the mesh
room           sizes of caches and prefill chunks
programs       the compiled programs of an engine
engine         a model with a KV cache: prefill and decode
saved          the KV cache of a prompt as a file
sample         sampling from logits, and log probabilities
text           text to tokens, tokens to text
prompts        prompts from options and files, plain or in a chat template
stops          stop strings
run            batches through an engine: answers, streaming, lines of JSON, speed
conversation   interactive chat that keeps its cache between turns
weights        import from and export to Hugging Face
command        the commands themselves
"""
