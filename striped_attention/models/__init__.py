"""Models: LLaMA and related families on sequences sharded over devices.

llama   shapes, weights and the forward pass
rotary  rotary position embeddings
stages  weights sharded over all devices, gathered stage by stage
"""
