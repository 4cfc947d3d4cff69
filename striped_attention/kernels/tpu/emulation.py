"""Emulation: the TPU kernels in the interpreter of Pallas, on a CPU. Unwritten memory is NaN, and races raise."""

import contextlib
from collections.abc import Iterator
from typing import Any

from striped_attention.kernels.tpu import kernel


@contextlib.contextmanager
def emulated() -> Iterator[None]:
    """A context in which the kernel runs on a CPU. Leaving it raises if two accesses to memory raced."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call
    from jax.experimental.pallas import tpu

    interpreter: Any = interpret_pallas_call  # where it says what it found
    found: list[Any] = []
    make = interpreter.RaceDetectionState  # a new one for every kernel

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
        raise RuntimeError("A TPU kernel reads memory while it is written.")
