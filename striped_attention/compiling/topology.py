"""Topology: machines that are not here, described well enough to compile for them.

The TPU's compiler comes as a Python package, libtpu, and runs on any Linux machine; that of GPUs needs one GPU. What is
compiled cannot be run, but tells all that a compiler knows: memory, and the order of work and transfers.
"""

import importlib.util
import os
import re
from typing import Any

import jax
from jax.experimental import topologies

from striped_attention.errors import UsageError

# libtpu looks for a TPU and its cloud unless it is told that there is none.
_ALONE = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v4-32",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_LOG_DIR": "disabled",
}
# A v4 is asked for as it is used: two cores as one device, four chips a host, and no wires from end to end.
_V4 = {"chip_config_name": "megacore", "chips_per_host_bounds": (2, 2, 1), "num_slices": 1, "wrap": (False,) * 3}
TPUS = {"v4": _V4, "v5e": {}, "v5p": {}, "v6e": {}, "tpu7x": {}}


def describe(name: str) -> list[Any]:
    """The devices of a topology such as v4:2x2x4, a pod of 16 TPUs, or cuda:1x1x8, a machine of 8 GPUs."""
    kind, _, shape = name.partition(":")
    if (kind not in TPUS and kind != "cuda") or not re.fullmatch(r"[1-9]\d{0,3}(x[1-9]\d{0,3}){1,2}", shape):
        raise UsageError(
            f"--topology must be one of {', '.join(TPUS)} with its chips, like v4:2x2x4 or v5e:4x4, or cuda with "
            f"slices, machines and GPUs of each, like cuda:1x1x8; got {name!r}."
        )
    try:
        return list((_gpus(shape) if kind == "cuda" else _tpus(kind, name)).devices)
    except (jax.errors.JaxRuntimeError, RuntimeError, ValueError, NotImplementedError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UsageError(f"--topology {name} cannot be compiled for here: {first}") from error


def _tpus(kind: str, name: str) -> Any:
    if importlib.util.find_spec("libtpu") is None:
        raise UsageError("Compiling for TPUs needs the package libtpu: pip install 'striped-attention[tpu]'")
    for variable, value in _ALONE.items():
        os.environ.setdefault(variable, value)
    jax.config.update("jax_platforms", "cpu")  # where the little that runs shall run
    return topologies.get_topology_desc(platform="tpu", topology_name=name, **TPUS[kind])


def _gpus(shape: str) -> Any:
    return topologies.get_topology_desc(platform="cuda", topology=shape)
