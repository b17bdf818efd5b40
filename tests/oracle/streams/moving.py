"""How DMA and register instructions are drawn."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.oracle.draw import ANY, FLOATS, Draw
from tests.oracle.streams.common import PLAIN, Arguments, destination, draws


def _anywhere(d: Draw) -> str:
    return "hbm" if d.chance(0.5) else "sbuf"


@draws
def dma_copy(d: Draw) -> Arguments:
    p, f = d.size()
    choice = d.random.random()
    dtype = d.dtype((*ANY, "bool_"))
    if choice < 0.4:
        src = d.source(p, f, dtype, _anywhere(d))
        same = d.chance(0.6)
        dst = destination(
            d, p, f, (src,), dtype if same else d.dtype(), buffer=_anywhere(d), buffers=("sbuf", "hbm")
        )
        return {"dst": dst, "src": src, **_how(d, dst.dtype == src.dtype)}
    if choice < 0.55:
        return _one_row(d, f, dtype)
    rows = d.upto(6) + (p if choice > 0.7 else 0)
    table = d.lockstep.allocate((rows, f), dtype, "hbm")
    d.lockstep.fill(table, d.contents(table.oracle.format, rows * f))
    skip = d.chance(0.5)
    numbers = d.random.permutation(rows)[:p] if choice > 0.7 else d.random.integers(0, rows, p)
    if skip or d.chance(0.05):
        numbers = np.where(d.random.random(p) < 0.3, rows + d.random.integers(0, 3, p), numbers)
    index = d.column(p, d.pick(("int32", "uint32")), values=numbers.reshape(p, 1), shape=(p, 1))
    other = d.tile(p, f, dtype if d.chance(0.6) else d.dtype(PLAIN), apart_from=(index,))
    gathered = d.lockstep.rows_of(table, index)
    dst, src = (gathered, other) if choice > 0.7 else (other, gathered)
    return {"dst": dst, "src": src, "oob_mode": "skip" if skip else "error"}


def _one_row(d: Draw, f: int, dtype: str) -> Arguments:
    """Draw one row of a table, whose number a register or a (1, 1) tile holds."""
    rows = d.upto(6)
    table = d.lockstep.allocate((rows, f), dtype, "hbm")
    d.lockstep.fill(table, d.contents(table.oracle.format, rows * f))
    skip = d.chance(0.4)
    number = int(d.random.integers(rows)) + (rows if d.chance(0.2 if skip else 0.03) else 0)
    index: Any = d.column(1, "int32", values=np.array([[number]]), shape=(1, 1))
    if d.chance(0.5):
        index = d.lockstep.register(number)
    row = d.lockstep.rows_from(table, index)
    other = d.tile(1, f, dtype if d.chance(0.6) else d.dtype(PLAIN), _anywhere(d), apart_from=(index,))
    dst, src = (row, other) if d.chance(0.5) else (other, row)
    how = _how(d, dst.dtype == src.dtype)
    return {"dst": dst, "src": src, "oob_mode": "skip" if skip else "error", **how}


def _how(d: Draw, same: bool) -> Arguments:
    """Draw the options of a DMA that change no bytes: writer of the descriptors, triggering engine and priority."""
    mode = d.pick(("unknown", "none", "swdge") + (("hwdge",) if d.generation >= 3 and same else ()))
    how: Arguments = {"dge_mode": mode, "engine": d.pick(("unknown", "sync", "scalar"))}
    if mode != "hwdge":
        how["engine"] = "unknown"  # another one is documented with hardware descriptors alone
    return {**how, "priority": d.pick((0, 1, 2, 3))} if d.generation >= 4 and d.chance(0.5) else how


def _gathered_transpose(d: Draw) -> Arguments:
    """Draw rows of a table, named column after column of an index tile, transposed."""
    count, columns = 16 * d.upto(3), d.upto(20)
    dtype, rows = d.pick(("bfloat16", "float16", "uint16")), d.upto(8)
    table = d.lockstep.allocate((rows, columns), dtype, "hbm")
    d.lockstep.fill(table, d.contents(table.oracle.format, rows * columns))
    skip = d.chance(0.5)
    lanes, width = (128, 2) if d.chance(0.3) else (16 * (count // 16 + d.upto(3) - 1), 1)
    numbers = d.random.integers(0, rows, (lanes, width))
    if skip:
        numbers = np.where(d.random.random(numbers.shape) < 0.2, rows, numbers)
    index = d.tile(lanes, width, "uint32", values=numbers, shape=(lanes, width), start=0)
    dst = d.tile(columns, count, dtype, shape=(columns, count), filled=d.chance(0.5), start=0)
    src = d.lockstep.rows_of(table, index, count)
    return {"dst": dst, "src": src, "oob_mode": "skip" if skip else "error"}


def _block_transpose(d: Draw) -> Arguments:
    """Draw consecutive rows of a table, of which a register or a tile names the first, transposed."""
    count, columns, dtype = d.upto(12), d.upto(12), d.dtype()
    rows = count + d.upto(6)
    table = d.lockstep.allocate((rows, columns), dtype, "hbm")
    d.lockstep.fill(table, d.contents(table.oracle.format, rows * columns))
    skip = d.chance(0.4)
    number = int(d.random.integers(rows - count + 1))
    if d.chance(0.3 if skip else 0.03):
        number = rows + int(d.random.integers(3))
    index: Any = d.column(1, "int32", values=np.array([[number]]), shape=(1, 1))
    if d.chance(0.5):
        index = d.lockstep.register(number)
    dst = d.tile(columns, count, dtype, shape=(columns, count), filled=d.chance(0.5), apart_from=(index,))
    src = d.lockstep.rows_from(table, index, count)
    return {"dst": dst, "src": src, "oob_mode": "skip" if skip else "error"}


@draws
def dma_transpose(d: Draw) -> Arguments:
    if d.chance(0.15):
        return _block_transpose(d)
    if d.generation >= 3 and d.chance(0.3):
        return _gathered_transpose(d)
    rank = d.pick((2, 2, 3, 4))
    sizes = tuple(d.upto(12 if rank < 4 else 5) for _ in range(rank))
    if rank == 2 and d.chance(0.3):
        sizes = (16, sizes[1])
    order = {2: (1, 0), 3: (2, 1, 0), 4: (3, 1, 2, 0)}[rank]
    count = int(np.prod(sizes[1:]))
    src = d.tile(sizes[0], count, d.dtype(), _anywhere(d), shape=sizes, dims=5)
    shape = tuple(sizes[axis] for axis in order)
    dst = d.tile(
        shape[0], int(np.prod(shape[1:])), src.dtype, shape=shape, filled=False, apart_from=(src,), dims=5
    )
    by_hardware = d.generation >= 3 and src.oracle.format.bytes == 2 and sizes[0] == 16 and rank == 2
    mode = d.pick(("unknown", "none", "hwdge") if by_hardware else ("unknown", "none"))
    return {"dst": dst, "src": src, "dge_mode": mode} | ({"axes": order} if d.chance(0.5) else {})


@draws
def dma_compute(d: Draw) -> Arguments:
    p, f = d.size()
    if d.chance(0.7):
        sources = [d.source(p, f, d.dtype(), _anywhere(d)) for _ in range(d.upto(4))]
        dst = destination(d, p, f, tuple(sources), buffer=_anywhere(d), buffers=("sbuf", "hbm"))
        return {"dst": dst, "srcs": sources, "reduce_op": "add"}
    dtype = d.dtype(FLOATS)
    rows = p + d.upto(4)
    table = d.lockstep.allocate((rows, f), dtype, "hbm")
    d.lockstep.fill(table, d.contents(table.oracle.format, rows * f))
    skip = d.chance(0.4)
    numbers = d.random.permutation(rows)[:p]
    if skip:
        numbers = np.where(d.random.random(p) < 0.3, rows + 1, numbers)
    index = d.column(p, "int32", values=numbers.reshape(p, 1), shape=(p, 1))
    other = d.tile(p, f, d.dtype(FLOATS), apart_from=(index,))
    indexed = d.lockstep.rows_of(table, index)
    dst = indexed if d.chance(0.5) else other
    sources = [indexed, other] if d.chance(0.5) else [other, indexed]
    return {"dst": dst, "srcs": sources, "reduce_op": "add", "oob_mode": "skip" if skip else "error"}


def _some_register(d: Draw, writable: bool = False) -> Any:
    known = [
        register
        for register in d.lockstep.registers.values()
        if not writable or (register.writable and not register.is_scalar)
    ]
    return d.pick(known) if known else d.lockstep.register(int(d.random.integers(-(2**31), 2**31)))


@draws
def register_move(d: Draw) -> Arguments:
    src = _some_register(d) if d.chance(0.5) else int(d.random.integers(-(2**31), 2**32))
    return {"dst": _some_register(d, writable=True), "src": src}


@draws
def register_load(d: Draw) -> Arguments:
    return {
        "dst": _some_register(d, writable=True),
        "src": d.tile(1, 1, d.dtype(ANY), _anywhere(d), shape=(1, 1)),
    }


@draws
def register_store(d: Draw) -> Arguments:
    return {"dst": d.result(1, 1, d.dtype(ANY), _anywhere(d), shape=(1, 1)), "src": _some_register(d)}
