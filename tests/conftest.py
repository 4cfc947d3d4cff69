"""Every test runs on 8 virtual CPU devices, with strict dtypes and with shapes and types checked at run time.

With JAX_PLATFORMS=cuda the tests of tests/test_gpu.py run on a GPU instead.
"""

import os

import jax
from jaxtyping import install_import_hook

if os.environ.get("JAX_PLATFORMS", "cpu") == "cpu":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")

install_import_hook("striped_attention", "beartype.beartype")
