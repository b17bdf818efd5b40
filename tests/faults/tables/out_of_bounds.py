"""Indices, slices and access patterns that leave the tensor."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import copied_out, ramp
from tests.faults.table import fault


@fault("NKW-BOUNDS", ramp(8), answer=lambda x: np.lib.stride_tricks.sliding_window_view(x, 5))
def access_pattern(x, sick):
    """An access pattern reaches one element past the tensor."""
    tile = nl.ndarray((4, 5), dtype=nl.float32)
    windows = x.ap(pattern=[[1, 4], [1, 5]], offset=1 if sick else 0)
    nisa.dma_copy(dst=tile, src=windows)  # blamed
    return copied_out(tile)


@fault("NKW-INDEX", ramp(4, 8), answer=lambda x: x[:, 4:8])
def ds_beyond_the_row(x, sick):
    """nl.ds takes a size, and gets an end."""
    tile = nl.load(x)
    columns = tile[:, nl.ds(4, 8 if sick else 4)]  # blamed
    return copied_out(columns)


@fault("NKW-OOB", ramp(6, 4), answer=lambda x: x[:, 3:4])
def dynamic_column(x, sick):
    """A register selects a column beyond the last."""
    column = nisa.register_alloc(4 if sick else 3)
    tile = nl.ndarray((6, 1), dtype=nl.float32)
    chosen = x.ap(pattern=[[4, 6], [1, 1]], scalar_offset=column, indirect_dim=1)
    nisa.dma_copy(dst=tile, src=chosen)  # blamed
    return copied_out(tile)


@fault(
    "NKW-OOB",
    ramp(6, 4),
    np.array([[5], [6], [1]], np.int32),
    answer=lambda table, ids: table[np.minimum(ids[:, 0], 5)],
)
def gathered_row(table, ids, sick):
    """A row number names a row that the table does not have."""
    index = nl.load(ids)
    if not sick:
        nisa.tensor_scalar(dst=index, data=index, op0=nl.minimum, operand0=5)
    rows = nl.ndarray((3, 4), dtype=nl.float32)
    nisa.dma_copy(dst=rows, src=table.vector_select(0, index))  # blamed
    return copied_out(rows)


@fault(
    "NKW-N-GATHER-INDEX",
    ramp(4, 8),
    np.tile(np.array([[9, 15]], np.uint32), (4, 1)),
    answer=lambda shard, ids: shard[:, [1, 7]],
)
def global_index(shard, ids, sick):
    """Indices into the whole vocabulary are used within one shard of it."""
    values, indices = nl.load(shard), nl.load(ids)
    if not sick:
        nisa.tensor_scalar(dst=indices, data=indices, op0=nl.subtract, operand0=8.0)
    chosen = nl.ndarray((4, 2), dtype=nl.float32)
    nisa.nc_n_gather(dst=chosen, data=values, indices=indices)  # blamed
    return copied_out(chosen)


@fault("NKW-INDEX", ramp(3, 4, 5), answer=lambda x: x[2])
def index_of_a_head(x, sick):
    """The head number counts from one."""
    heads = x.shape[0]
    tile = nl.load(x[heads if sick else heads - 1])  # blamed
    return copied_out(tile)


@fault(
    "NKW-OOB",
    ramp(6, 4),
    np.array([[5], [-1], [1]], np.int32),
    answer=lambda table, ids: np.where(ids >= 0, table[ids[:, 0]], 0),
)
def negative_row(table, ids, sick):
    """A padding id of -1 is gathered like any other."""
    index = nl.load(ids)
    rows = nl.zeros((3, 4), dtype=nl.float32)
    mode = nisa.oob_mode.error if sick else nisa.oob_mode.skip
    nisa.dma_copy(dst=rows, src=table.vector_select(0, index), oob_mode=mode)  # blamed
    return copied_out(rows)


@fault("NKW-BOUNDS", ramp(8, 4), answer=lambda x: x[2:6])
def offset_in_bytes(x, sick):
    """The offset of an access pattern is given in bytes; it counts elements."""
    tile = nl.ndarray((4, 4), dtype=nl.float32)
    row = 2 * 4
    nisa.dma_copy(dst=tile, src=x.ap(pattern=[[4, 4], [1, 4]], offset=row * 4 if sick else row))  # blamed
    return copied_out(tile)


@fault(
    "NKW-OOB", ramp(3, 4), np.array([[4, 3]], np.int32), answer=lambda x, blocks: x.sum(axis=0, keepdims=True)
)
def one_iteration_too_many(x, blocks, sick):
    """The trip count of a device loop comes from the host and counts the padding block."""
    count = nisa.register_alloc()
    nisa.register_load(dst=count, src=blocks[0:1, 0:1] if sick else blocks[0:1, 1:2])
    total = nl.zeros((1, 4), dtype=nl.float32)

    def body(i):
        tile = nl.ndarray((1, 4), dtype=nl.float32)
        block = x.ap(pattern=[[4, 1], [1, 4]], scalar_offset=i, indirect_dim=0)
        nisa.dma_copy(dst=tile, src=block)  # blamed
        nisa.tensor_tensor(dst=total, data1=total, data2=tile, op=nl.add)

    nl.fori_loop(0, count, body)
    return copied_out(total)


def _answer_of_scatter_beyond_the_table(x, indices):
    cache = np.zeros((4, 3), np.float32)
    cache[indices[:, 0]] = x
    return cache


@fault("NKW-OOB", ramp(2, 3) + 1, np.array([[3], [1]], np.int32), answer=_answer_of_scatter_beyond_the_table)
def scatter_beyond_the_table(x, indices, sick):
    """New rows are scattered to a cache that is full."""
    cache = nl.ndarray((4, 3), dtype=nl.float32, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=cache, src=nl.zeros((4, 3), dtype=nl.float32))
    index = nl.load(indices)
    if sick:
        nisa.tensor_scalar(dst=index, data=index, op0=nl.add, operand0=2)
    nisa.dma_copy(dst=cache.vector_select(0, index), src=nl.load(x))  # blamed
    return cache


@fault("NKW-INDEX", ramp(10, 3), answer=lambda x: x)
def slice_past_the_end(x, sick):
    """The last tile of a loop that ignores the ragged rest."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    for start in range(0, 10, 4):
        end = start + 4 if sick else min(start + 4, 10)
        tile = nl.load(x[start:end])  # blamed
        nisa.dma_copy(dst=out[start:end], src=tile)
    return out


@fault("NKW-INDEX", ramp(4, 5), answer=lambda x: x[:, 0:2])
def too_many_indices(x, sick):
    """A tensor of two dims is indexed with three."""
    tile = nl.load(x)
    columns = tile[:, 0:2, 0] if sick else tile[:, 0:2]  # blamed
    return copied_out(columns)
