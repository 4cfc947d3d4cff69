"""Schedule: which transfers of a compiled program overlap with attention.

This module reads the text of a program that XLA has scheduled (`compiled.as_text()`), which lists the instructions of a
computation in issue order. A transfer is hidden if attention runs between its start and its end. Which branch of a
conditional a device takes is unknown, so a conditional counts as attention if any of its branches runs attention.

An asynchronous transfer appears as `all-gather-start` and `all-gather-done`. A transfer that another core of a TPU
executes is a computation that contains an `all-gather`, called by `call-start` or `async-start`.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

ATTENTION = re.compile(r'custom_call_target="(__cudnn\$fmha|tpu_custom_call|mosaic_gpu)')
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%([\w.\-]+) = (.*?) ([\w\-]+)\((.*)$")
_CALLED = re.compile(
    r"(?:body|calls|to_apply|true_computation|false_computation)=%([\w.\-]+)|branch_computations=\{([^}]*)\}"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_SOURCE = re.compile(r'op_name="([^"]*)"')
_CALLS = ("call-start", "async-start")  # start a computation on another core
_SIZES = {"bf16": 2, "f16": 2, "f32": 4, "f64": 8, "s32": 4, "u32": 4, "u8": 1, "pred": 1}


@dataclasses.dataclass(frozen=True)
class Transfer:
    """A message to other devices: its place in the program, bytes of its result, and whether attention overlaps it."""

    name: str
    computation: str
    dtype: str
    bytes: int
    hidden: bool
    kind: str = "collective-permute"
    source: str = ""  # the JAX operation that it comes from, with its scopes, if XLA reports it


class _Instruction(NamedTuple):
    name: str
    shape: str
    operation: str
    rest: str


def transfers(program: str, kind: str = "collective-permute") -> list[Transfer]:
    """Return every transfer of a kind in a scheduled program, in order. One in a loop's body counts once."""
    if "is_scheduled=true" not in program.split("\n", 1)[0]:
        raise ValueError("The program has not been scheduled: pass the text of a compiled program, compiled.as_text().")
    computations = dict(_computations(program))
    busy = {name for name in computations if _attends(name, computations, {})}
    every = [instruction for instructions in computations.values() for instruction in instructions]
    elsewhere = {name for instruction in every if instruction.operation in _CALLS for name in _called(instruction)}
    found = []
    for computation, instructions in computations.items():
        if computation in elsewhere:
            continue
        for i, instruction in enumerate(instructions):
            if not _sends(instruction, kind, computations):
                continue
            meanwhile, shape = [], instruction.shape
            if instruction.operation.endswith("-start"):
                ends = (j for j, other in enumerate(instructions) if _ends(other, instruction))
                end = next(ends, len(instructions))
                meanwhile = instructions[i + 1 : end]
                shape = instructions[end].shape if end < len(instructions) else shape
            hidden = any(_works(other, busy) for other in meanwhile)
            dtype, size = _size(shape)
            source = _SOURCE.search(instruction.rest)
            where = (instruction.name, computation, dtype, size, hidden, kind)
            found.append(Transfer(*where, source[1] if source else ""))
    return found


def traffic(program: str, devices: int) -> dict[str, int]:
    """Return the bytes that a device sends in a compiled program, by kind of operation; collectives run as rings.

    An operation over groups of devices counts for one group. One in a loop counts once per iteration, if XLA knows the
    number of iterations, otherwise once.
    """
    sent: dict[str, int] = {}
    computations = dict(_computations(program))
    times = _times(computations)
    for name, instructions in computations.items():
        for instruction in instructions:
            operation = instruction.operation.removesuffix("-start")
            if operation not in _SHARES:
                continue
            sizes = [_size(shape)[1] for shape in re.findall(r"\w+\[[\d,]*\]", instruction.shape)]
            # The shape of a -start operation lists its inputs before its outputs.
            size = sum(sizes) if operation == instruction.operation else sizes[-1]
            share = _SHARES[operation](_group(instruction, devices))
            sent[operation] = sent.get(operation, 0) + times.get(name, 1) * int(share * size)
    return sent


def _times(computations: dict[str, list[_Instruction]]) -> dict[str, int]:
    """Return how often the computations of loops run, including nested loops; others are left out."""
    found: dict[str, int] = {}

    def visit(name: str, times: int) -> None:
        for instruction in computations.get(name, []):
            runs = _TRIPS.search(instruction.rest) if instruction.operation == "while" else None
            inside = times * (int(runs[1]) if runs else 1)
            for called in _called(instruction):
                if inside > 1:
                    found[called] = inside
                visit(called, inside)

    called = {name for instructions in computations.values() for one in instructions for name in _called(one)}
    for name in computations.keys() - called:
        visit(name, 1)
    return found


def _group(instruction: _Instruction, devices: int) -> int:
    """Return how many devices take part in an operation together."""
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", instruction.rest)
    counted = re.search(r"replica_groups=\[\d+,(\d+)\]", instruction.rest)
    return len(listed[1].split(",")) if listed else int(counted[1]) if counted else devices


# Bytes that each of n devices sends, as a fraction of the size of an operation's result.
_SHARES: dict[str, Callable[[int], float]] = {
    "all-gather": lambda n: (n - 1) / n,
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "reduce-scatter": lambda n: n - 1,
    "all-to-all": lambda n: (n - 1) / n,
    "collective-permute": lambda n: 1 if n > 1 else 0,
}


def _sends(instruction: _Instruction, kind: str, computations: dict[str, list[_Instruction]]) -> bool:
    """Return whether an instruction is a transfer of a kind, or starts one on another core."""
    if instruction.operation not in _CALLS:
        return instruction.operation in (kind, f"{kind}-start")
    return any(other.operation == kind for name in _called(instruction) for other in computations.get(name, []))


def _ends(other: _Instruction, start: _Instruction) -> bool:
    return other.operation == start.operation.replace("-start", "-done") and f"%{start.name})" in other.rest


def _computations(program: str) -> Iterator[tuple[str, list[_Instruction]]]:
    name, instructions = None, []
    for line in program.splitlines():
        if line.startswith("}") and name is not None:
            yield name, instructions
            name, instructions = None, []
        elif found := _COMPUTATION.match(line):
            name = found[1]
        elif found := _INSTRUCTION.match(line):
            instructions.append(_Instruction(*found.groups()))


def _attends(name: str, computations: dict[str, list[_Instruction]], known: dict[str, bool]) -> bool:
    """Return whether a computation runs attention, directly or in a computation that it calls."""
    if name not in known:
        known[name] = False
        known[name] = any(
            ATTENTION.search(instruction.rest)
            or any(_attends(called, computations, known) for called in _called(instruction))
            for instruction in computations.get(name, [])
        )
    return known[name]


def _works(instruction: _Instruction, busy: set[str]) -> bool:
    return bool(ATTENTION.search(instruction.rest)) or any(called in busy for called in _called(instruction))


def _called(instruction: _Instruction) -> list[str]:
    found = _CALLED.findall(instruction.rest)
    return [name for one, many in found for name in ([one] if one else re.findall(r"%([\w.\-]+)", many))]


def _size(shape: str) -> tuple[str, int]:
    """Return the dtype and bytes of the first array of a shape."""
    found = re.search(r"(\w+)\[([\d,]*)\]", shape)
    if found is None:
        raise ValueError(f"{shape!r} is not the shape of an array.")
    dtype, dimensions = found[1], [int(n) for n in found[2].split(",") if n]
    if dtype not in _SIZES:
        raise ValueError(f"Unknown dtype {dtype!r}: add its size in bytes to _SIZES.")
    size = _SIZES[dtype]
    for n in dimensions:
        size *= n
    return dtype, size
