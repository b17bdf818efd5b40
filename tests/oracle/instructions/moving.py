"""DMA between and within HBM and SBUF, and the registers of the instruction streams."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.oracle.formats import Kind
from tests.oracle.machine import Core, Operand, OutOfRange
from tests.oracle.operators import total


def _placed(core: Core, operand: Operand, skip: bool) -> tuple[Operand, np.ndarray]:
    """Return an operand with its run-time row numbers or offsets put in, and which of its elements lie inside."""
    if operand.offsets is not None:
        placed, inside = core.listed(operand, operand.offsets, 16)
        if not inside.all() and not skip:
            raise OutOfRange
        return placed, inside
    if operand.rows is None:
        return operand, np.ones(operand.shape, np.bool_)
    rows = operand.rows
    if isinstance(rows.index, str):
        numbers = np.array([core.registers[rows.index]], np.int64)
    else:
        numbers = rows.index.format.decode(core.bits(rows.index)).reshape(-1).astype(np.int64)
    inside = (numbers >= 0) & (numbers < rows.extent)
    if not inside.all() and not skip:
        raise OutOfRange
    shape = (-1, *(1,) * (operand.addresses.ndim - 1))
    moved = operand.addresses + (np.where(inside, numbers, 0) * rows.bytes_per_row).reshape(shape)
    return (
        Operand(operand.memory, operand.format, moved),
        np.broadcast_to(inside.reshape(shape), moved.shape),
    )


def dma_copy(
    core: Core,
    dst: Operand,
    src: Operand,
    priority: int | None = None,
    oob_mode: str = "error",
    dge_mode: str = "unknown",
    engine: str = "unknown",
) -> None:
    """Compute dst = src in row-major order of both; elements at row numbers out of range are left alone with skip."""
    skip = oob_mode == "skip"
    source, readable = _placed(core, src, skip)
    target, writable = _placed(core, dst, skip)
    if not src.is_dynamic:
        core.bits(src)  # elements for rows that are skipped are read all the same
    chosen = readable.reshape(-1) & writable.reshape(-1)
    source = Operand(source.memory, source.format, source.addresses.reshape(-1)[chosen])
    target = Operand(target.memory, target.format, target.addresses.reshape(-1)[chosen])
    if target.format is source.format:
        core.write_bits(target, core.bits(source))
    else:
        core.write(target, core.values(source))


def dma_transpose(
    core: Core,
    dst: Operand,
    src: Operand,
    axes: tuple[int, ...] | None = None,
    dge_mode: str = "unknown",
    oob_mode: str = "error",
) -> None:
    """Compute dst = src with dim i from source dim axes[i]."""
    order = axes or {2: (1, 0), 3: (2, 1, 0), 4: (3, 1, 2, 0)}[len(src.shape)]
    source, readable = _placed(core, src, oob_mode == "skip")
    # dst seen with its dims in the order of src; rows that are skipped leave their elements alone.
    target = np.transpose(dst.addresses, np.argsort(order))[readable]
    source = Operand(source.memory, source.format, source.addresses[readable])
    core.write_bits(Operand(dst.memory, dst.format, target), core.bits(source))


def dma_compute(
    core: Core, dst: Operand, srcs: list[Operand], reduce_op: str, scales: Any = None, oob_mode: str = "error"
) -> None:
    """Compute dst = the float32 sum of srcs."""
    skip = oob_mode == "skip"
    placed = [_placed(core, source, skip) for source in srcs]
    target, writable = _placed(core, dst, skip)
    chosen = writable.reshape(-1).copy()
    for source in srcs:
        if source.rows is None:
            core.bits(source)
    for _, readable in placed:
        chosen &= readable.reshape(-1)
    columns = [
        core.values(Operand(o.memory, o.format, o.addresses.reshape(-1)[chosen])).reshape(-1, 1)
        for o, _ in placed
    ]
    target = Operand(target.memory, target.format, target.addresses.reshape(-1)[chosen])
    values, slack = total(np.concatenate(columns, axis=1))
    core.write(target, values, slack)


# -- registers -----------------------------------------------------------------------------------------------------


def register_move(core: Core, dst: str, src: str | int) -> None:
    """Compute dst = src, a register or 32 bits."""
    value = core.registers[src] if isinstance(src, str) else src
    core.registers[dst] = (value + 2**31) % 2**32 - 2**31


def register_load(core: Core, dst: str, src: Operand) -> None:
    """Compute dst = the one element of src: the value of an integer, the bits of a float."""
    word, half = int(core.bits(src).reshape(-1)[0]), 2 ** (src.format.bits - 1)
    if src.format.number_kind is Kind.signed:
        word = (word + half) % (2 * half) - half
    core.registers[dst] = (word + 2**31) % 2**32 - 2**31


def register_store(core: Core, dst: Operand, src: str) -> None:
    """Set the one element of dst to the low bits of src."""
    core.write_bits(dst, np.full(dst.shape, core.registers[src] % 2**dst.format.bits, np.int64))


# -- run-time scalars ----------------------------------------------------------------------------------------------

_ARITHMETIC = {"add": lambda x, y: x + y, "sub": lambda x, y: x - y, "mul": lambda x, y: x * y}


def scalar_load(core: Core, dst: str, src: Operand) -> None:
    """Make a new scalar with the one element of src."""
    register_load(core, dst, src)


def scalar_store(core: Core, dst: Operand, value: str) -> None:
    """Set the one element of dst to a scalar."""
    register_store(core, dst, value)


def scalar_arithmetic(core: Core, dst: str, operator: str, left: str | int, right: str | int) -> None:
    """Make a new scalar: two scalars or whole numbers joined, wrapping to 32 bits."""
    sides = [core.registers[side] if isinstance(side, str) else side for side in (left, right)]
    core.registers[dst] = (_ARITHMETIC[operator](*sides) + 2**31) % 2**32 - 2**31
