"""Cores that access the same bytes of shared memory without an order."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import ramp
from tests.faults.table import fault


@fault("NKW-RACE", ramp(8, 4), answer=lambda x: x, cores=2)
def barrier_before_the_write(x, sick):
    """The barrier comes before the write that it should follow."""
    core = nl.program_id(0)
    scratch = nl.ndarray((8, 4), dtype=nl.float32, buffer=nl.shared_hbm, name="scratch")
    out = nl.ndarray((8, 4), dtype=nl.float32, buffer=nl.shared_hbm, name="out")
    if sick:
        nisa.core_barrier(data=scratch, cores=(0, 1))
    if core == 1:
        nisa.dma_copy(dst=scratch, src=nl.load(x))
    if not sick:
        nisa.core_barrier(data=scratch, cores=(0, 1))
    mine = nl.load(scratch[core * 4 : core * 4 + 4])  # blamed
    nisa.dma_copy(dst=out[core * 4 : core * 4 + 4], src=mine)
    return out


@fault("NKW-RACE", ramp(2, 4), answer=lambda x: x, cores=2)
def both_add_to_a_row(x, sick):
    """Both cores add their part of a sum to one row in HBM, and one addition is lost."""
    core = nl.program_id(0)
    rows = nl.ndarray((2, 4), dtype=nl.float32, buffer=nl.shared_hbm, name="rows")
    if core == 0:
        nisa.dma_copy(dst=rows, src=nl.zeros((2, 4), dtype=nl.float32))
    nisa.core_barrier(data=rows, cores=(0, 1))
    mine = nl.load(x[core : core + 1])
    row = rows[0:1] if sick else rows[core : core + 1]
    nisa.dma_compute(dst=row, srcs=[row, mine], reduce_op=nl.add)  # blamed
    return rows


@fault(
    "NKW-RACE",
    ramp(8, 4),
    ramp(8, 16, dtype=np.uint8),
    answer=lambda x, flags: np.concatenate([x, flags.view(np.float32)], axis=1),
    cores=2,
)
def bytes_of_a_view(x, flags, sick):
    """One core writes float32 columns, the other bytes of the same rows; the byte columns are counted in floats."""
    core = nl.program_id(0)
    packed = nl.ndarray((8, 8), dtype=nl.float32, buffer=nl.shared_hbm, name="packed")
    if core == 0:
        nisa.dma_copy(dst=packed[:, 0:4], src=nl.load(x))
    else:
        first = 4 if sick else 16
        nisa.dma_copy(dst=packed.view(nl.uint8)[:, first : first + 16], src=nl.load(flags))  # blamed
        if sick:
            nisa.dma_copy(dst=packed[:, 4:8], src=nl.load(x))
    return packed


@fault("NKW-RACE", np.array([[3, 5]], np.int32), answer=lambda counts: counts, cores=2)
def counter_in_hbm(counts, sick):
    """Both cores store the number of tokens they found in one element."""
    core = nl.program_id(0)
    token_counts = nl.ndarray((1, 2), dtype=nl.int32, buffer=nl.shared_hbm, name="token_counts")
    count = nisa.register_alloc()
    nisa.register_load(dst=count, src=counts[0:1, core : core + 1])
    column = 0 if sick else core
    nisa.register_store(dst=token_counts[0:1, column : column + 1], src=count)  # blamed
    if sick and core == 0:
        nisa.register_store(dst=token_counts[0:1, 1:2], src=count)
    return token_counts


@fault("NKW-RACE", ramp(8, 4), answer=lambda x: np.concatenate([x[0:4] + x[4:8], x[4:8] + x[3:7]]), cores=2)
def halo_row(x, sick):
    """A stencil in place: each core reads the row of its neighbour that the neighbour is about to overwrite."""
    core = nl.program_id(0)
    grid = nl.ndarray((8, 4), dtype=nl.float32, buffer=nl.shared_hbm, name="grid")
    fresh = nl.ndarray((8, 4), dtype=nl.float32, buffer=nl.shared_hbm, name="fresh")
    nisa.dma_copy(dst=grid[core * 4 : core * 4 + 4], src=nl.load(x[core * 4 : core * 4 + 4]))
    nisa.core_barrier(data=grid, cores=(0, 1))
    total = nl.load(grid[core * 4 : core * 4 + 4])
    neighbour_rows = nl.load(grid[4 - core : 8 - core])  # blamed
    nisa.tensor_tensor(dst=total, data1=total, data2=neighbour_rows, op=nl.add)
    result = grid if sick else fresh
    nisa.dma_copy(dst=result[core * 4 : core * 4 + 4], src=total)
    return result


@fault("NKW-RACE", ramp(8, 4), answer=lambda x: (x + x, np.concatenate([x[:4], 2 * x[4:]])), cores=2)
def input_updated_in_place(x, sick):
    """Core 1 updates rows of an input that core 0 still reads."""
    core = nl.program_id(0)
    out = nl.ndarray((8, 4), dtype=nl.float32, buffer=nl.shared_hbm, name="out")
    rows = nl.ds(core * 4, 4)
    mine = nl.load(x[rows])
    seen = nl.load(x[4:8] if sick and core == 0 else x[rows])  # blamed
    nisa.tensor_tensor(dst=mine, data1=mine, data2=seen, op=nl.add)
    if core == 1:
        nisa.dma_copy(dst=x[rows], src=mine)
    nisa.dma_copy(dst=out[rows], src=mine)
    return out, x


@fault("NKW-RACE", ramp(8, 4), answer=lambda x: x, cores=2)
def no_barrier(x, sick):
    """Core 0 reads bytes that core 1 writes later in the simulator, and at any time on the chip."""
    core = nl.program_id(0)
    scratch = nl.ndarray((8, 4), dtype=nl.float32, buffer=nl.shared_hbm, name="scratch")
    out = nl.ndarray((8, 4), dtype=nl.float32, buffer=nl.shared_hbm, name="out")
    if core == 0:
        nisa.dma_copy(dst=scratch, src=nl.load(x))
    if not sick:
        nisa.core_barrier(data=scratch, cores=(0, 1))
    mine = nl.load(scratch[core * 4 : core * 4 + 4])  # blamed
    nisa.dma_copy(dst=out[core * 4 : core * 4 + 4], src=mine)
    return out


@fault("NKW-RACE", ramp(2, 4, 4), answer=lambda x: x, cores=2)
def one_barrier_short(x, sick):
    """Scratch space is filled again for a second round without waiting for the readers of the first."""
    core = nl.program_id(0)
    scratch = nl.ndarray((4, 4), dtype=nl.float32, buffer=nl.shared_hbm, name="scratch")
    out = nl.ndarray((2, 4, 4), dtype=nl.float32, buffer=nl.shared_hbm, name="out")
    for turn in range(2):
        if core == 0:
            nisa.dma_copy(dst=scratch, src=nl.load(x[turn]))
        nisa.core_barrier(data=scratch, cores=(0, 1))
        if core == 1:
            nisa.dma_copy(dst=out[turn], src=nl.load(scratch))  # blamed
        if not sick:
            nisa.core_barrier(data=scratch, cores=(0, 1))
    return out


@fault("NKW-UNWRITTEN", ramp(8, 4), answer=lambda x: np.concatenate([x[4:], x[:4]]), cores=2)
def read_before_it_is_there(x, sick):
    """Core 0 reads the half that core 1 has yet to write."""
    core = nl.program_id(0)
    scratch = nl.ndarray((8, 4), dtype=nl.float32, buffer=nl.shared_hbm, name="scratch")
    out = nl.ndarray((8, 4), dtype=nl.float32, buffer=nl.shared_hbm, name="out")
    nisa.dma_copy(dst=scratch[core * 4 : core * 4 + 4], src=nl.load(x[core * 4 : core * 4 + 4]))
    if not sick:
        nisa.core_barrier(data=scratch, cores=(0, 1))
    theirs = nl.load(scratch[4 - core * 4 : 8 - core * 4])  # blamed
    nisa.dma_copy(dst=out[core * 4 : core * 4 + 4], src=theirs)
    return out


@fault("NKW-RACE", ramp(8, 4), answer=lambda x: x + (np.arange(8)[:, None] >= 4), cores=2)
def rows_overlap(x, sick):
    """The cores write five rows each of eight."""
    core = nl.program_id(0)
    out = nl.ndarray((8, 4), dtype=nl.float32, buffer=nl.shared_hbm, name="out")
    rows = nl.ds(core * 3, 5) if sick else nl.ds(core * 4, 4)
    mine = nl.load(x[rows])
    if core == 1:
        nisa.tensor_scalar(dst=mine, data=mine, op0=nl.add, operand0=1.0)
    nisa.dma_copy(dst=out[rows], src=mine)  # blamed
    return out


@fault("NKW-RACE", ramp(8, 4), answer=lambda x: x, cores=2)
def same_values_twice(x, sick):
    """Both cores compute everything; the launch on two cores gains nothing."""
    core = nl.program_id(0)
    out = nl.ndarray((8, 4), dtype=nl.float32, buffer=nl.shared_hbm, name="out")
    rows = nl.ds(0, 8) if sick else nl.ds(core * 4, 4)
    nisa.dma_copy(dst=out[rows], src=nl.load(x[rows]))  # blamed
    return out


_SHARED_ROW = [[[0], [1], [2]], [[2], [4], [5]]]
_OWN_ROWS = [[[0], [1], [2]], [[3], [4], [5]]]


@fault(
    "NKW-RACE",
    ramp(2, 3, 4),
    np.array([_SHARED_ROW, _OWN_ROWS], np.int32),
    answer=lambda x, ids: np.concatenate([x.reshape(6, 4), np.zeros((2, 4), np.float32)]),
    cores=2,
)
def scattered_by_both(x, ids, sick):
    """Both cores scatter tokens to rows of one table, and one row number occurs on both."""
    core = nl.program_id(0)
    table = nl.ndarray((8, 4), dtype=nl.float32, buffer=nl.shared_hbm, name="table")
    if core == 0:
        nisa.dma_copy(dst=table, src=nl.zeros((8, 4), dtype=nl.float32))
    nisa.core_barrier(data=table, cores=(0, 1))
    numbers = nl.load(ids[0 if sick else 1, core])
    rows = table.ap(pattern=[[4, 3], [1, 4]], vector_offset=numbers, indirect_dim=0)
    nisa.dma_copy(dst=rows, src=nl.load(x[core]))  # blamed
    return table


@fault("NKW-RACE", ramp(4, 8), answer=lambda x: x + (np.arange(8) % 2).astype(np.float32), cores=2)
def strided_columns(x, sick):
    """Even columns for one core, odd ones for the other, but both begin at column 0."""
    core = nl.program_id(0)
    out = nl.ndarray((4, 8), dtype=nl.float32, buffer=nl.shared_hbm, name="out")
    if sick and core == 0:
        nisa.dma_copy(dst=out[:, 1:8:2], src=nl.load(x[:, 1:8:2]))
    columns = slice(0 if sick else core, 8, 2)
    mine = nl.load(x[:, columns])
    nisa.tensor_scalar(dst=mine, data=mine, op0=nl.add, operand0=float(core))
    nisa.dma_copy(dst=out[:, columns], src=mine)  # blamed
    return out


@fault("NKW-RACE-BARRIER", ramp(8, 4), answer=lambda x: x, cores=2)
def wrong_tensor(x, sick):
    """The barrier names the output, and the cores exchange through scratch space."""
    core = nl.program_id(0)
    scratch = nl.ndarray((8, 4), dtype=nl.float32, buffer=nl.shared_hbm, name="scratch")
    out = nl.ndarray((8, 4), dtype=nl.float32, buffer=nl.shared_hbm, name="out")
    if core == 0:
        nisa.dma_copy(dst=scratch, src=nl.load(x))
    nisa.core_barrier(data=out if sick else scratch, cores=(0, 1))
    mine = nl.load(scratch[core * 4 : core * 4 + 4])  # blamed
    nisa.dma_copy(dst=out[core * 4 : core * 4 + 4], src=mine)
    return out
