"""Topology: describe remote machines to the compiler.

The compilers come as Python packages and run on any Linux machine: libtpu for TPUs, JAX's CUDA plugin for GPUs. The
compiled programs cannot be run here, but show what the compiler knows: memory, and the schedule of computation and
transfers.
"""

import importlib.util
import os
import re
from typing import Any

import jax
from jax.experimental import topologies

from striped_attention.errors import UsageError
from striped_attention.runtime.hardware import HARDWARE

# Keeps libtpu from looking for a TPU and its cloud environment.
_ALONE = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v4-32",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_LOG_DIR": "disabled",
}
# A v4 pod as used in practice: two cores as one device (megacore), four chips per host, no wrap-around links.
_V4 = {"chip_config_name": "megacore", "chips_per_host_bounds": (2, 2, 1), "num_slices": 1, "wrap": (False,) * 3}
TPUS = {"v4": _V4, "v5e": {}, "v5p": {}, "v6e": {}, "tpu7x": {}}
GPUS = ("h100", "h200")
_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")


def describe(name: str) -> list[Any]:
    """Return the devices of a topology: v4:2x2x4 is a pod of 16 TPUs, h200:1x1x8 a machine of 8 GPUs, and cuda:1x1x8
    a machine of 8 GPUs of the local type.
    """
    kind, _, shape = name.partition(":")
    sizes = 2 if kind in (*GPUS, "cuda") else 1  # minimum number of sizes after the first
    if kind not in (*TPUS, *GPUS, "cuda") or not re.fullmatch(rf"[1-9]\d{{0,3}}(x[1-9]\d{{0,3}}){{{sizes},2}}", shape):
        raise UsageError(
            f"--topology must be one of {', '.join(TPUS)} with the shape of the pod, like v4:2x2x4 or v5e:4x4, or one "
            f"of {', '.join(GPUS)} and cuda with slices, machines and GPUs of each, like h200:1x1x8; got {name!r}."
        )
    try:
        return list((_tpus(kind, name) if kind in TPUS else _gpus(kind, shape)).devices)
    except (jax.errors.JaxRuntimeError, RuntimeError, ValueError, NotImplementedError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UsageError(f"--topology {name} cannot be compiled for on this machine: {first}") from error


def _tpus(kind: str, name: str) -> Any:
    if importlib.util.find_spec("libtpu") is None:
        raise UsageError("Compiling for TPUs needs the package libtpu: pip install 'striped-attention[tpu]'")
    for variable, value in _ALONE.items():
        os.environ.setdefault(variable, value)
    jax.config.update("jax_platforms", "cpu")  # for the few computations that do run
    return topologies.get_topology_desc(platform="tpu", topology_name=name, **TPUS[kind])


def _gpus(kind: str, shape: str) -> Any:
    if kind == "cuda":
        return topologies.get_topology_desc(platform="cuda", topology=shape)
    if not any(importlib.util.find_spec(name) for name in _PLUGINS):
        raise UsageError("Compiling for GPUs needs JAX's CUDA plugin: pip install 'jax[cuda13]'")
    return topologies.get_topology_desc(platform="cuda", topology=shape, target_config=_target(kind))


def _target(kind: str) -> str:
    """Describe a Hopper GPU to the compiler, as a text protocol buffer. Sizes are from NVIDIA's tuning guide."""
    device = HARDWARE[kind]
    return f"""
        platform_name: "CUDA"
        device_description_str: "NVIDIA {kind.upper()}"
        dnn_version_info {{ major: 9 minor: 8 }}
        gpu_device_info {{
            cuda_compute_capability {{ major: 9 minor: 0 }}
            core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
            threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
            registers_per_core_limit: 65536 registers_per_block_limit: 65536
            shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
            block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
            memory_bandwidth: {device.bandwidth:.0f} device_memory_size: {device.memory:.0f} l2_cache_size: 52428800
        }}"""
