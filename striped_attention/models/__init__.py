"""Models: LLaMA and related families on sequences sharded over devices.

config  the shape of a model, and presets
layers  the position-wise parts of a layer
llama   the whole model: initial weights, loss, layers in a scan
rotary  rotary position embeddings
stages  weights sharded over all devices, gathered stage by stage
"""
