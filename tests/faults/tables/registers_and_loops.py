"""Registers and device loops."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import copied_out, ramp
from tests.faults.table import fault


@fault("NKW-LOOP-BODY", ramp(4, 1), answer=lambda x: 3 * x)
def body_returns(x, sick):
    """The body of fori_loop returns its sum, as in other frameworks."""
    total = nl.zeros((4, 1), dtype=nl.float32)
    tile = nl.load(x)

    def body(i):
        nisa.tensor_tensor(dst=total, data1=total, data2=tile, op=nl.add)
        return total if sick else None

    nl.fori_loop(0, 3, body)  # blamed
    return copied_out(total)


@fault("NKW-LOOP-CARRIED", ramp(8, 4), answer=lambda x: x.sum(1, keepdims=True) * [[2, 4, 8, 16]])
def column_counted_in_python(x, sick):
    """The body of a device loop counts the column it fills in Python; on the device every iteration fills the first."""
    rows = x.shape[0]
    tile = nl.load(x)
    totals = nl.zeros((rows, 4), dtype=nl.float32)
    position = {"column": 0}

    def body(i):
        nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=2.0)
        column = totals.ap(pattern=[[4, rows], [1, 1]], scalar_offset=i, indirect_dim=1)
        if sick:
            column = totals[:, position["column"] : position["column"] + 1]
            position["column"] += 1
        nisa.tensor_reduce(dst=column, op=nl.add, data=tile, axis=1)  # blamed

    nl.fori_loop(0, 4, body)
    return copied_out(totals)


@fault("NKW-LOOP-CONDITION", ramp(4, 1), answer=lambda x: x)
def condition(x, sick):
    """A while loop whose body forgets the next register."""
    total = nl.zeros((4, 1), dtype=nl.float32)
    tile = nl.load(x)
    done = nisa.register_alloc(0)

    def body(i):
        nisa.tensor_tensor(dst=total, data1=total, data2=tile, op=nl.add)
        return None if sick else done

    nl.while_loop(nisa.register_alloc(1), body)  # blamed
    return copied_out(total)


@fault("NKW-REGISTER-FROZEN", ramp(4, 1), answer=lambda x: 3 * x)
def counter_written(x, sick):
    """The body of a loop increments its own counter."""
    total = nl.zeros((4, 1), dtype=nl.float32)
    tile = nl.load(x)
    spare = nisa.register_alloc(0)

    def body(i):
        nisa.register_move(i if sick else spare, 0)  # blamed
        nisa.tensor_tensor(dst=total, data1=total, data2=tile, op=nl.add)

    nl.fori_loop(0, 3, body)
    return copied_out(total)


@fault(
    "NKW-REGISTER-TILE",
    ramp(4, 1),
    np.array([[2, 3, 4, 5]], np.int32),
    answer=lambda x, counts: counts[0, 0] * x,
)
def loaded_from_a_row(x, counts, sick):
    """A register is loaded from a tile of four elements."""
    total = nl.zeros((4, 1), dtype=nl.float32)
    tile, numbers = nl.load(x), nl.load(counts)
    count = nisa.register_alloc()
    nisa.register_load(count, numbers if sick else numbers[:, 0:1])  # blamed

    def body(i):
        nisa.tensor_tensor(dst=total, data1=total, data2=tile, op=nl.add)

    nl.fori_loop(0, count, body)
    return copied_out(total)


@fault("NKW-REGISTER-IMMEDIATE", ramp(4, 4), answer=lambda x: x[2:3])
def offset_of_33_bits(x, sick):
    """A byte offset into a large table does not fit into a register."""
    rows = 2**22
    offset = nisa.register_alloc(0)
    nisa.register_move(dst=offset, src=rows * 4 * 1024 if sick else 2)  # blamed
    tile = nl.ndarray((1, 4), dtype=nl.float32)
    nisa.dma_copy(dst=tile, src=x.ap(pattern=[[4, 1], [1, 4]], scalar_offset=offset, indirect_dim=0))
    return copied_out(tile)


@fault("NKW-REGISTER-PYTHON", ramp(4, 4), answer=lambda x: x[2:3])
def python_arithmetic(x, sick):
    """An offset is computed from a register in Python."""
    row = nisa.register_alloc(1)
    chosen = row * 2 if sick else nisa.register_alloc(2)  # blamed
    tile = nl.ndarray((1, 4), dtype=nl.float32)
    nisa.dma_copy(dst=tile, src=x.ap(pattern=[[4, 1], [1, 4]], scalar_offset=chosen))
    return copied_out(tile)


@fault("NKW-LOOP-STEP", ramp(4, 1), answer=lambda x: 2 * x)
def step(x, sick):
    """A loop that counts down."""
    total = nl.zeros((4, 1), dtype=nl.float32)
    tile = nl.load(x)

    def body(i):
        nisa.tensor_tensor(dst=total, data1=total, data2=tile, op=nl.add)

    nl.fori_loop(0, 4, body, -1 if sick else 2)  # blamed
    return copied_out(total)


@fault("NKW-LOOP-TILE", ramp(24, 4).reshape(3, 8, 4), answer=lambda x: x[-1] + 1)
def tile_leaves_the_loop(x, sick):
    """A tile that the body of a device loop made is kept in Python and stored after the loop."""
    blocks, rows, columns = x.shape
    out = nl.ndarray((rows, columns), dtype=x.dtype, buffer=nl.shared_hbm)
    outside = nl.ndarray((rows, columns), dtype=x.dtype)
    last = {"tile": outside}

    def body(i):
        tile = nl.ndarray((rows, columns), dtype=x.dtype) if sick else outside
        block = x.ap(pattern=[[columns, rows], [1, columns]], scalar_offset=i, indirect_dim=0)
        nisa.dma_copy(dst=tile, src=block)
        nisa.tensor_scalar(dst=tile, data=tile, op0=nl.add, operand0=1.0)
        last["tile"] = tile

    nl.fori_loop(0, blocks, body)
    nisa.dma_copy(dst=out, src=last["tile"])  # blamed
    return out


@fault("NKW-REGISTER-UNSET", ramp(4, 1), answer=lambda x: 2 * x)
def unset(x, sick):
    """A loop bound that was never loaded."""
    total = nl.zeros((4, 1), dtype=nl.float32)
    tile = nl.load(x)
    count = nisa.register_alloc() if sick else nisa.register_alloc(2)

    def body(i):
        nisa.tensor_tensor(dst=total, data1=total, data2=tile, op=nl.add)

    nl.fori_loop(0, count, body)  # blamed
    return copied_out(total)
