"""Which elements of a result are defined where an operand is partly unwritten, instruction by instruction.

The documentation leaves a read of unwritten memory undefined. This module tests the simulator's decision: copies,
element-wise instructions, transposes, matmuls, gathers and reductions within a partition may read a partly written
tile, if dst is on chip and no operand has a run-time address. Results of unwritten elements are POISON, which counts as
unwritten. All other instructions refuse unwritten elements, and every instruction refuses an operand that is unwritten
as a whole; a reduction refuses operands that leave none of its results defined.

Accumulator registers are empty until an instruction resets them, and hold POISON where they summed unwritten elements.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.oracle.machine import EMPTY, POISON, WRITTEN, Accumulators, Core, Operand, Unwritten

Call = Mapping[str, Any]
Defined = list[tuple[Operand, np.ndarray]]
"""A result and which of its elements are defined, in its shape."""

_ON_CHIP = ("sbuf", "psum")
_RESULTS = ("dst", "reduce_res", "dst_idx")
_ACCUMULATING = {
    "activation": ("scalar", "idle"),
    "activation_reduce": ("scalar", "reset_reduce"),
    "activate2": ("scalar", "idle"),
    "exponential": ("vector", "idle"),
    "range_select": ("vector", "reset_reduce"),
    "select_reduce": ("vector", "idle"),
    "tensor_scalar_cumulative": ("vector", "reset_reduce"),
    "tensor_scalar_reduce": ("vector", "reset_reduce"),
}
"""The instructions that use accumulator registers: whose, and the command they have by default."""


@dataclass(frozen=True)
class Use:
    """What a call does to the accumulator registers of its first `rows` partitions."""

    registers: Accumulators
    command: str
    rows: int
    reads: bool

    def states(self) -> np.ndarray:
        """Return the states of the registers that the call reads, one per partition; all written if it reads none."""
        return self.registers.states[: self.rows] if self.reads else np.full(self.rows, WRITTEN)

    def mark(self, undefined: Defined | None) -> None:
        """Record what the call has set; `undefined` are its results where it read unwritten elements."""
        if self.command == "idle":
            return
        states = self.registers.states[: self.rows]
        states[:] = WRITTEN
        if undefined and self.command != "reset":
            (_, read_defined), *_ = undefined
            states[~read_defined.reshape(self.rows, -1).all(axis=1)] = POISON


def use_of(name: str, core: Core, call: Call) -> Use | None:
    """Return how a call uses accumulator registers; raises Unwritten if it reads some that nothing has set."""
    if name not in _ACCUMULATING:
        return None
    engine, default = _ACCUMULATING[name]
    command, result = str(call.get("reduce_cmd", default)), call.get("reduce_res")
    if engine == "scalar" and command == "idle" and result is None:
        return None
    reads = command == "reduce" or (command == "idle" and result is not None)
    use = Use(getattr(core, engine), command, call["dst"].shape[0], reads)
    if (use.states() == EMPTY).any():
        raise Unwritten(f"{engine} accumulators")
    return use


def poisoned(name: str, core: Core, call: Call, use: Use | None = None) -> Defined | None:
    """Return the results of a call that may read unwritten elements and does; None if it reads none, or is refused.

    Raises Unwritten if registers alone make it refused.
    """
    rule = _RULES.get(name)
    if use is not None:
        return _within_partitions_of(call, use)
    if rule is None:
        return None
    generation = core.generation
    reads = _read(call)
    at_run_time = any(operand.is_dynamic for operand in (call["dst"], *reads))
    if at_run_time or call["dst"].memory.buffer not in _ON_CHIP:
        return None
    if name == "nonzero_with_count":
        reads = [_served(call["src"])]
    if name == "quantize_mx":
        reads = [call["src"]]
    if name == "nc_matmul_mx":
        reads = [call["stationary"], call["moving"]]
        for side in ("stationary", "moving"):
            reads += _scale_rows(call[side], call[f"{side}_scale"])
    unwritten = [read for read in reads if not defined(read).all()]
    if not unwritten or not all(_partly(read) for read in unwritten):
        return None
    return rule(generation, call)


def _read(call: Call) -> list[Operand]:
    """Return the operands that a call reads; activate2 reads none that its operators have no use for."""
    idle = [key for key, op in (("imm0", "op0"), ("imm1", "op1")) if call.get(op) == "bypass"]
    idle += ["relu_param"] if call.get("op") != "prelu" else []
    return [
        value
        for key, value in call.items()
        if isinstance(value, Operand) and key not in _RESULTS and key not in idle
    ]


def defined(operand: Operand) -> np.ndarray:
    """Return which elements hold written values, or values computed from written ones alone."""
    return (operand.memory.state[operand.every_byte()] & WRITTEN).all(axis=-1)


def _partly(operand: Operand) -> bool:
    """Return whether some element of the operand was written, even with poison."""
    return bool((operand.memory.state[operand.every_byte()] != EMPTY).all(axis=-1).any())


def _within_partitions_of(call: Call, use: Use) -> Defined | None:
    reads = _read(call)
    writes = [value for key, value in call.items() if isinstance(value, Operand) and key in _RESULTS]
    sound = use.states() != POISON
    unwritten = [read for read in reads if not defined(read).all()]
    if not unwritten and sound.all():
        return None
    at_run_time = any(operand.is_dynamic for operand in (*reads, *writes))
    off_chip = any(write.memory.buffer not in _ON_CHIP for write in writes)
    rows = _whole_partitions(reads) & sound
    if at_run_time or off_chip or not rows.any() or not all(_partly(read) for read in unwritten):
        if not unwritten:
            raise Unwritten("accumulators")
        return None
    return [(write, _spread(rows, write)) for write in writes]


def _whole_partitions(reads: list[Operand]) -> np.ndarray:
    return np.logical_and.reduce([defined(read.flat()).all(axis=1) for read in reads])


def _spread(rows: np.ndarray, over: Operand) -> np.ndarray:
    return np.broadcast_to(rows.reshape(-1, *(1,) * (over.addresses.ndim - 1)), over.shape)


def _within_partitions(generation: int, call: Call) -> Defined | None:
    reads = _read(call)
    rows = _whole_partitions(reads)
    writes = [value for key, value in call.items() if isinstance(value, Operand) and key in _RESULTS]
    return [(write, _spread(rows, write)) for write in writes] if rows.any() else None


def _reduced(generation: int, call: Call) -> Defined | None:
    dst, axis = call["dst"], call["axis"]
    data = defined(call["data"])
    all_defined = data.all(axis=axis if isinstance(axis, tuple) else (axis,))
    return [(dst, all_defined.reshape(dst.shape))] if all_defined.any() else None


def _served(operand: Operand) -> Operand:
    """Return the first of every 16 partitions."""
    return Operand(operand.memory, operand.format, operand.addresses[::16])


def _elementwise(generation: int, call: Call) -> Defined:
    dst = call["dst"]
    result = np.ones(dst.addresses.size, np.bool_)
    for key, value in call.items():
        if isinstance(value, Operand) and key != "dst":
            seen = defined(value).reshape(-1)
            result &= seen if seen.size == result.size else np.repeat(seen, result.size // seen.size)
    return [(dst, result.reshape(dst.shape))]


def _shuffled(generation: int, call: Call) -> Defined:
    dst, mask, rows = call["dst"], call["shuffle_mask"], defined(call["src"].flat())
    result = np.ones(dst.flat().shape, np.bool_)
    for row in range(dst.shape[0]):
        if mask[row % 32] != 255:
            result[row] = rows[row // 32 * 32 + mask[row % 32]]
    return [(dst, result.reshape(dst.shape))]


def _transposed(generation: int, call: Call) -> Defined:
    dst, data = call["dst"], defined(call["data"].flat())
    by_matmul = call["engine"] == "tensor" or (call["engine"] == "unknown" and dst.memory.buffer == "psum")
    if by_matmul and generation == 2:  # every element of a row of the result sums a column of the data
        data = np.repeat(data.all(axis=0, keepdims=True), data.shape[0], axis=0)
    return [(dst, data.T.reshape(dst.shape))]


def _multiplied(generation: int, call: Call) -> Defined:
    dst, stationary, moving = call["dst"], call["stationary"].flat(), call["moving"].flat()
    if call.get("is_transpose") and generation > 2:
        return [(dst, defined(stationary).T.reshape(dst.shape))]
    columns = [defined(side).all(axis=0) for side in (stationary, moving)]
    if call.get("perf_mode") == "double_row":
        columns = [side.reshape(2, -1).all(axis=0) for side in columns]
    return [(dst, (columns[0][:, None] & columns[1][None, :]).reshape(dst.shape))]


def _scale_rows(data: Operand, scale: Operand) -> list[Operand]:
    """Return the scales of an MX operand: four rows of every quadrant of partitions."""
    addresses = scale.flat().addresses[:, : int(np.prod(data.shape[1:]))]
    quadrants = range(0, data.shape[0], 32)
    return [Operand(scale.memory, scale.format, addresses[first : first + 4]) for first in quadrants]


def _multiplied_mx(generation: int, call: Call) -> Defined:
    columns = []
    for side in ("stationary", "moving"):
        data = call[side].flat()
        operands = [data, *_scale_rows(data, call[f"{side}_scale"])]
        columns.append(np.array([defined(operand).all(axis=0) for operand in operands]).all(axis=0))
    dst = call["dst"]
    return [(dst, (columns[0][:, None] & columns[1][None, :]).reshape(dst.shape))]


def _quantized(generation: int, call: Call) -> Defined:
    """Return the defined results: eight partitions of four elements share a scale, undefined as soon as one is."""
    dst, rows = call["dst"], defined(call["src"].flat())
    groups = np.zeros((rows.shape[0] // 8, rows.shape[1] // 4), np.bool_)
    for group in range(groups.shape[0]):
        for f in range(groups.shape[1]):
            groups[group, f] = rows[8 * group : 8 * group + 8, 4 * f : 4 * f + 4].all()
    scales = _scale_rows(dst, call["dst_scale"])
    results: Defined = [(dst, np.repeat(groups, 8, axis=0).reshape(dst.shape))]
    return results + [(scale, groups[4 * q : 4 * q + 4]) for q, scale in enumerate(scales)]


def _gathered(generation: int, call: Call) -> Defined | None:
    if not defined(call["index"]).all():
        return None
    rows = defined(call["src_buffer"].flat()).all(axis=1)
    dst = call["dst"]
    return [(dst, np.broadcast_to(rows.reshape(-1, *(1,) * (dst.addresses.ndim - 1)), dst.shape))]


def _counted(generation: int, call: Call) -> Defined:
    to, rows = _served(call["dst"].flat()), defined(_served(call["src"].flat())).all(axis=1)
    return [(to, np.broadcast_to(rows[:, None], to.shape))]


_RULES: dict[str, Callable[[int, Call], Defined | None]] = {
    **dict.fromkeys(
        "tensor_copy tensor_tensor tensor_scalar scalar_tensor_tensor reciprocal activation dma_copy".split(),
        _elementwise,
    ),
    **dict.fromkeys(
        "activate2 bn_aggr bn_stats max8 nc_find_index8 nc_match_replace8 tensor_tensor_scan".split(),
        _within_partitions,
    ),
    "tensor_reduce": _reduced,
    "nc_stream_shuffle": _shuffled,
    "nc_transpose": _transposed,
    "nc_matmul": _multiplied,
    "nc_matmul_mx": _multiplied_mx,
    "quantize_mx": _quantized,
    "local_gather": _gathered,
    "nonzero_with_count": _counted,
}
