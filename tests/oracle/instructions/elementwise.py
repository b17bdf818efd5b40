"""Copies, fills and the element-wise instructions of the Vector and GpSimd engines."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.oracle import operators
from tests.oracle.formats import FLOAT32_MAX, TINY, UNIT, Kind, single
from tests.oracle.machine import Core, Operand


def memset(core: Core, dst: Operand, value: float, engine: str = "unknown") -> None:
    """Compute dst = value everywhere."""
    if dst.format.number_kind is Kind.packed:
        core.write_bits(dst, np.zeros(dst.shape, np.int64))
    elif dst.format.is_integer:
        low, high = dst.format.limits
        assert isinstance(value, int) and low <= value <= high
        core.write_bits(dst, np.full(dst.shape, value % 2**dst.format.bits, np.int64))
    else:
        core.write(dst, np.full(dst.shape, single(value)))


def tensor_copy(core: Core, dst: Operand, src: Operand, engine: str = "unknown") -> None:
    """Compute dst = src in streaming order: the bits for equal dtypes, else through float32."""
    if dst.format is src.format:
        core.write_bits(dst, core.bits(src))
    else:
        core.write(dst, core.matrix(src))


def tensor_tensor(
    core: Core, dst: Operand, data1: Operand, data2: Operand, op: str, engine: str = "unknown"
) -> None:
    """Compute dst = op(data1, data2); exact for 32-bit integers in SBUF unless the Vector engine is forced."""
    tiles = (dst, data1, data2)
    if op in operators.BITVEC:
        first, second = core.bits(data1.flat()), core.bits(data2.flat())
        core.write_bits(dst, operators.bitvec(op, first, second, data1.format))
        return
    words = all(tile.format.name in ("int32", "uint32") for tile in tiles)
    in_sbuf = all(tile.memory.buffer == "sbuf" for tile in tiles)
    if words and in_sbuf and op in operators.INTEGER and engine != "vector":
        first, second = core.bits(data1.flat()), core.bits(data2.flat())
        core.write_bits(dst, operators.exact_integers(op, first, second))
        return
    x, y = core.matrix(data1), core.matrix(data2)
    if op == "power":
        core.write(dst, *_power(x, y))
        return
    core.write(dst, operators.ARITHMETIC[op](x, y), operators.slack_of(op, x.shape))


def _power(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return _nearly(np.power(x, y))


def _nearly(exact: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return float32 to 4 units: powers and roots are no basic IEEE operations, so their last places are open."""
    values = single(exact)
    slack = np.where(np.isfinite(values), 8 * UNIT * np.abs(values) + TINY, 0.0)
    # What an exact result just outside the range becomes depends on those last places.
    near = np.isinf(values) & np.isfinite(exact) & (np.abs(exact) < 2 * FLOAT32_MAX)
    return values, np.where(near, np.inf, slack)


def _stage(core: Core, op: str, x: np.ndarray, operand: Any, reverse: bool) -> np.ndarray:
    if op in operators.UNARY:
        return operators.UNARY[op](x)
    y = np.broadcast_to(core.column(operand), x.shape)
    return operators.ARITHMETIC[op](y, x) if reverse else operators.ARITHMETIC[op](x, y)


def tensor_scalar(
    core: Core,
    dst: Operand,
    data: Operand,
    op0: str,
    operand0: Any,
    reverse0: bool = False,
    op1: str | None = None,
    operand1: Any = None,
    reverse1: bool = False,
    engine: str = "unknown",
) -> None:
    """Compute dst = op1(op0(data, operand0), operand1)."""
    stages = [(op0, operand0, reverse0)] + ([(op1, operand1, reverse1)] if op1 else [])
    if op0 in operators.BITVEC or op0 == "invert":
        bits = core.bits(data.flat()).astype(np.int64)
        for op, operand, reverse in stages:
            bits = _bit_stage(core, str(op), bits, operand, reverse, data)
        core.write_bits(dst, bits)
        return
    x = core.matrix(data)
    if op0 in ("rsqrt", "power"):
        if op0 == "rsqrt":
            core.write(dst, *_nearly(1 / np.sqrt(x)))
        else:
            core.write(dst, *_power(x, np.broadcast_to(core.column(operand0), x.shape)))
        return
    slack: np.ndarray | None = None
    for op, operand, reverse in stages:
        x = _stage(core, str(op), x, operand, reverse)
        if op in operators.ZERO_SIGN_OPEN:
            slack = np.zeros(x.shape)
    core.write(dst, x, slack)


def _bit_stage(
    core: Core, op: str, bits: np.ndarray, operand: Any, reverse: bool, data: Operand
) -> np.ndarray:
    if op == "invert":
        return ~bits & (2**data.format.bits - 1)
    if isinstance(operand, Operand):
        other = np.broadcast_to(core.bits(operand.flat()).astype(np.int64), bits.shape)
    else:
        other = np.full(bits.shape, operand, np.int64)
    first, second = (other, bits) if reverse else (bits, other)
    return operators.bitvec(op, first, second, data.format)


def scalar_tensor_tensor(
    core: Core,
    dst: Operand,
    data: Operand,
    op0: str,
    operand0: Any,
    op1: str,
    operand1: Operand,
    reverse0: bool = False,
    reverse1: bool = False,
) -> None:
    """Compute dst = op1(op0(data, operand0), operand1), operand1 a tile."""
    x = _stage(core, op0, core.matrix(data), operand0, reverse0)
    y = core.matrix(operand1)
    result = operators.ARITHMETIC[op1](y, x) if reverse1 else operators.ARITHMETIC[op1](x, y)
    open_zero = {op0, op1} & operators.ZERO_SIGN_OPEN
    core.write(dst, result, np.zeros(result.shape) if open_zero else None)


def reciprocal(core: Core, dst: Operand, data: Operand) -> None:
    """Compute dst = 1 / data."""
    with np.errstate(divide="ignore"):
        core.write(dst, operators.UNARY["reciprocal"](core.matrix(data)))


def tensor_copy_predicated(
    core: Core, dst: Operand, src: Any, predicate: Operand, reverse_pred: bool = False
) -> None:
    """Compute dst = src where the predicate is not zero (reversed: where it is)."""
    chosen = (core.bits(predicate.flat()) != 0) != reverse_pred
    dst = dst.flat()
    if isinstance(src, Operand):
        core.write_bits(dst, core.bits(src.flat()), chosen)
    else:
        core.write(dst, np.full(chosen.shape, single(src)), chosen=chosen)


def nc_stream_shuffle(core: Core, dst: Operand, src: Operand, shuffle_mask: list[int]) -> None:
    """Set row 32 q + i of dst to row 32 q + mask[i] of src; 255 leaves the row alone."""
    rows, to = core.bits(src.flat()), dst.flat()
    for row in range(to.shape[0]):
        quadrant, lane = divmod(row, 32)
        if shuffle_mask[lane] == 255:
            continue
        source = 32 * quadrant + shuffle_mask[lane]
        one = Operand(to.memory, to.format, to.addresses[row : row + 1])
        core.write_bits(one, rows[source : source + 1])
