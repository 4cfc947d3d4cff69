"""Hugging Face: models as the hub keeps them, read and written. A model is a folder:

    config.json                     its shape
    model.safetensors               its weights; large models have several such files, and beside them
    model.safetensors.index.json    a list that says which weight lies where
    tokenizer.json                  how text becomes tokens, if it is there

Reading checks all files before it gives the first weight, or the first part of one. Writing happens in a folder beside,
which takes its name when all of it is there. Both ways one weight of one layer is in memory at a time. Pickles
(pytorch_model.bin) can run any code when they are opened, so they never are.

families    the families of models, and what each has besides LLaMA
config      config.json as a `ModelConfig`, and back
rope        its rotary positions
said        what a config.json says, name by name
weight      names and shapes there and here
reading     the weights of a folder
writing     a folder from weights
"""

from striped_attention.huggingface.config import read_config as read_config
from striped_attention.huggingface.reading import Files as Files
from striped_attention.huggingface.reading import tensors as tensors
from striped_attention.huggingface.writing import write as write
