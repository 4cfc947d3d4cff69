"""Models: LLaMA and its relatives on sequences that are spread over devices.

llama   shapes, weights, and the forward pass
rotary  rotary position embeddings
stages  weights sharded over all devices, gathered stage by stage
"""
