"""Emulation: the TPU kernels in Pallas's interpreter, on a CPU. Unwritten memory reads as NaN; data races raise."""

import contextlib
from collections.abc import Iterator
from typing import Any

from striped_attention.kernels.tpu import kernel


@contextlib.contextmanager
def emulated() -> Iterator[None]:
    """Context manager in which the kernel runs on a CPU. Raises on exit if two memory accesses raced."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call
    from jax.experimental.pallas import tpu

    interpreter: Any = interpret_pallas_call  # this module records the races that it finds
    found: list[Any] = []
    make = interpreter.RaceDetectionState  # called once for every kernel

    def watch(**what: Any) -> Any:
        found.append(make(**what))
        return found[-1]

    interpreter.RaceDetectionState = watch
    kernel.RATES["cpu"] = kernel.RATES["tpu"]
    try:
        with tpu.force_tpu_interpret_mode(tpu.InterpretParams(detect_races=True, uninitialized_memory="nan")):
            yield
    finally:
        interpreter.RaceDetectionState = make
        del kernel.RATES["cpu"]
    if any(state.races_found for state in found):
        raise RuntimeError("A TPU kernel has a data race: it reads memory while it is being written.")
