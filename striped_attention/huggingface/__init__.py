"""Hugging Face: read and write models in the hub's format. A model is a folder:

    config.json                     the shape of the model
    model.safetensors               the weights; large models have several such files and an index
    model.safetensors.index.json    the file of each weight
    tokenizer.json                  the tokenizer (optional)

Reading checks all files before it returns the first weight or slice. Writing uses a temporary folder, which is renamed
once it is complete. Both hold one weight of one layer in memory at a time. Pickles (pytorch_model.bin) can run
arbitrary code when they are opened, so they are never opened.

families    the model families and how each differs from LLaMA
config      config.json to a `ModelConfig` and back
rope        the rope settings of config.json
said        checked access to the values of config.json
weight      names and shapes of weights, in files and in this library
reading     read the weights of a folder
writing     write a folder
stream      write a safetensors file one tensor at a time
"""

from striped_attention.huggingface.config import read_config as read_config
from striped_attention.huggingface.reading import Files as Files
from striped_attention.huggingface.reading import tensors as tensors
from striped_attention.huggingface.writing import write as write
