"""Reads of bytes that nothing has written."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import copied_out, ramp
from tests.faults.table import fault


@fault(
    "NKW-UNWRITTEN",
    np.tile(np.array([[0, 1, 0, 1]], np.int32), (17, 1)),
    answer=lambda x: np.array([[1, 3, -1, -1, 2]], np.int32),
)
def between_the_counts(x, sick):
    """nonzero_with_count fills one partition of sixteen; the copy takes all of them."""
    flags = nl.load(x)
    indices = nl.ndarray((17, 5), dtype=nl.int32)
    nisa.nonzero_with_count(dst=indices, src=flags, padding_val=-1)
    last = 17 if sick else 1
    kept = nl.ndarray((last, 5), dtype=nl.int32)
    nisa.tensor_copy(dst=kept, src=indices[0:last])  # blamed
    return copied_out(kept)


@fault(
    "NKW-UNWRITTEN",
    ramp(8, 4),
    ramp(4, 1) + 1,
    answer=lambda x, factors: x * np.concatenate([factors, factors]),
    cores=2,
)
def constants_on_core_0(x, factors, sick):
    """Core 0 loads the constants for both cores, but each core has an SBUF of its own."""
    core = nl.program_id(0)
    scale = nl.ndarray((4, 1), dtype=nl.float32, name="scale")
    if core == 0 or not sick:
        nisa.dma_copy(dst=scale, src=factors)
    out = nl.ndarray((8, 4), dtype=nl.float32, buffer=nl.shared_hbm, name="out")
    tile = nl.load(x[core * 4 : core * 4 + 4])
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=scale)  # blamed
    nisa.dma_copy(dst=out[core * 4 : core * 4 + 4], src=tile)
    return out


@fault(
    "NKW-UNWRITTEN",
    ramp(10, 8),
    np.array([[3], [9], [0], [3]], np.int32),
    answer=lambda table, ids: table[ids[:, 0]],
)
def gather_index(table, ids, sick):
    """The row numbers of a gather are read before they were loaded."""
    index = nl.ndarray((4, 1), dtype=nl.int32)
    if not sick:
        nisa.dma_copy(dst=index, src=ids)
    rows = nl.ndarray((4, 8), dtype=nl.float32)
    nisa.dma_copy(dst=rows, src=table.vector_select(0, index))  # blamed
    return copied_out(rows)


def _answer_of_halo(x):
    wide = np.pad(x, ((0, 0), (1, 1)))
    return wide[:, 0:8] + wide[:, 1:9] + wide[:, 2:10]


@fault("NKW-UNWRITTEN", ramp(4, 8), answer=_answer_of_halo)
def halo(x, sick):
    """The frame around an image is read by the convolution and never filled."""
    padded = nl.ndarray((4, 10), dtype=nl.float32)
    if not sick:
        nisa.memset(dst=padded, value=0.0)
    nisa.dma_copy(dst=padded[:, 1:9], src=x)
    total = nl.zeros((4, 8), dtype=nl.float32)
    for tap in range(3):
        nisa.tensor_tensor(dst=total, data1=total, data2=padded[:, tap : tap + 8], op=nl.add)  # blamed
    return copied_out(total)


@fault("NKW-UNWRITTEN", ramp(4, 4, dtype=np.int32), answer=lambda x: x)
def integer_tile(x, sick):
    """An integer counter is incremented before it was set; no NaN can show the fault in integers."""
    counter = nl.ndarray(x.shape, dtype=nl.int32)
    if not sick:
        nisa.memset(dst=counter, value=0)
    step = nl.load(x)
    nisa.tensor_tensor(dst=counter, data1=counter, data2=step, op=nl.add)  # blamed
    return copied_out(counter)


@fault("NKW-UNWRITTEN", ramp(8, 16), answer=lambda x: x + x)
def last_column(x, sick):
    """The DMA brings one column less than the instruction reads."""
    tile = nl.ndarray(x.shape, dtype=x.dtype)
    columns = x.shape[1] - 1 if sick else x.shape[1]
    nisa.dma_copy(dst=tile[:, 0:columns], src=x[:, 0:columns])
    doubled = nl.ndarray(x.shape, dtype=x.dtype)
    nisa.tensor_tensor(dst=doubled, data1=tile, data2=tile, op=nl.add)  # blamed
    return copied_out(doubled)


@fault("NKW-UNWRITTEN", ramp(100, 8), answer=lambda x: x.sum(axis=1, keepdims=True))
def last_row(x, sick):
    """A ragged tile of 100 rows is reduced, and stored, as if it had 128."""
    tile = nl.ndarray((128, x.shape[1]), dtype=x.dtype)
    nisa.dma_copy(dst=tile[0:100], src=x)
    rows = 128 if sick else 100
    sums = nl.ndarray((128, 1), dtype=nl.float32)
    nisa.tensor_reduce(dst=sums[0:rows], op=nl.add, data=tile[0:rows], axis=1)  # blamed
    return copied_out(sums[0:rows])


@fault("NKW-UNWRITTEN", np.full((4, 10), 5, np.float32), answer=lambda x: np.full((4, 1), 5, np.float32))
def last_statistics(x, sick):
    """The statistics of the short last chunk are missing, and bn_aggr reads those of all chunks."""
    tile = nl.load(x)
    statistics = nl.ndarray((4, 3, 6), dtype=nl.float32)
    for chunk in range(10 // 4 if sick else 3):
        data = tile[:, chunk * 4 : min(chunk * 4 + 4, 10)]
        nisa.bn_stats(dst=statistics[:, chunk], data=data)
    joined = nl.ndarray((4, 2), dtype=nl.float32)
    nisa.bn_aggr(dst=joined, data=statistics.reshape((4, 18)))  # blamed
    return copied_out(joined[:, 0:1])


@fault("NKW-UNWRITTEN", ramp(5, 4), ramp(5, 8), answer=lambda a, b: a.T @ b)
def partial_psum(a, b, sick):
    """Two matmuls fill the halves of a PSUM tile; one of them is skipped."""
    left, right = nl.load(a), nl.load(b)
    sums = nl.ndarray((4, 8), dtype=nl.float32, buffer=nl.psum)
    for half in range(1 if sick else 2):
        columns = nl.ds(half * 4, 4)
        nisa.nc_matmul(dst=sums[:, columns], stationary=left, moving=right[:, columns])
    result = nl.ndarray((4, 8), dtype=nl.float32)
    nisa.tensor_copy(dst=result, src=sums)  # blamed
    return copied_out(result)


@fault("NKW-UNWRITTEN", ramp(4, 6), (ramp(4, 6) % 2).astype(np.uint8), answer=lambda x, mask: 2 * x * mask)
def predicate(x, mask, sick):
    """A predicated copy keeps elements of dst, which were never written."""
    source, predicate = nl.load(x), nl.load(mask)
    result = nl.ndarray(x.shape, dtype=x.dtype)
    if not sick:
        nisa.memset(dst=result, value=0.0)
    nisa.tensor_copy_predicated(dst=result, src=source, predicate=predicate)
    doubled = nl.ndarray(x.shape, dtype=x.dtype)
    nisa.tensor_tensor(dst=doubled, data1=result, data2=result, op=nl.add)  # blamed
    return copied_out(doubled)


@fault("NKW-UNWRITTEN", ramp(5, 4), ramp(5, 6), answer=lambda a, b: a.T @ b)
def psum_never_started(a, b, sick):
    """A PSUM tile is copied out although no matmul ran for it."""
    left, right = nl.load(a), nl.load(b)
    sums = nl.ndarray((4, 6), dtype=nl.float32, buffer=nl.psum)
    blocks = 0 if sick else 1
    for _ in range(blocks):
        nisa.nc_matmul(dst=sums, stationary=left, moving=right)
    result = nl.ndarray((4, 6), dtype=nl.float32)
    nisa.tensor_copy(dst=result, src=sums)  # blamed
    return copied_out(result)


@fault("NKW-UNWRITTEN", ramp(8, 8), answer=lambda x: x.max(axis=1, keepdims=True))
def running_maximum(x, sick):
    """The running maximum of an online softmax is compared before it was set to minus infinity."""
    highest = nl.ndarray((8, 1), dtype=nl.float32)
    if not sick:
        nisa.memset(dst=highest, value=-3.0e38)
    for block in range(2):
        scores = nl.load(x[:, block * 4 : block * 4 + 4])
        peak = nl.ndarray((8, 1), dtype=nl.float32)
        nisa.tensor_reduce(dst=peak, op=nl.maximum, data=scores, axis=1)
        nisa.tensor_tensor(dst=highest, data1=highest, data2=peak, op=nl.maximum)  # blamed
    return copied_out(highest)


@fault("NKW-UNWRITTEN", ramp(8, 4), ramp(8, 1), answer=lambda x, scale: x * scale)
def scale_vector(x, scale, sick):
    """The (P, 1) factors of a scaling were allocated and never loaded."""
    tile = nl.load(x)
    factors = nl.ndarray((8, 1), dtype=nl.float32)
    if not sick:
        nisa.dma_copy(dst=factors, src=scale)
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=factors)  # blamed
    return copied_out(tile)


@fault("NKW-UNWRITTEN", ramp(8, 4), answer=lambda x: x)
def scratch_in_hbm(x, sick):
    """Scratch space in HBM is read back before the half that holds the second block was stored."""
    scratch = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.private_hbm)
    tile = nl.load(x)
    stored = 4 if sick else 8
    nisa.dma_copy(dst=scratch[0:stored], src=tile[0:stored])
    back = nl.ndarray(x.shape, dtype=x.dtype)
    nisa.dma_copy(dst=back, src=scratch)  # blamed
    return copied_out(back)


@fault(
    "NKW-UNWRITTEN",
    ramp(8, 6),
    np.array([[3], [0], [99], [7]], np.int32),
    answer=lambda table, ids: 2 * np.concatenate([table[[3, 0]], np.zeros((1, 6), np.float32), table[[7]]]),
)
def skipped_rows(table, ids, sick):
    """A gather that skips padding ids leaves their rows as they were, and they were never set."""
    rows = nl.load(ids)
    gathered = nl.ndarray((4, 6), dtype=nl.float32)
    if not sick:
        nisa.memset(dst=gathered, value=0.0)
    chosen = table.ap(pattern=[[6, 4], [1, 6]], vector_offset=rows, indirect_dim=0)
    nisa.dma_copy(dst=gathered, src=chosen, oob_mode=nisa.oob_mode.skip)
    doubled = nl.ndarray((4, 6), dtype=nl.float32)
    nisa.tensor_tensor(dst=doubled, data1=gathered, data2=gathered, op=nl.add)  # blamed
    return copied_out(doubled)


@fault("NKW-UNWRITTEN", ramp(8, 16), answer=lambda x: x)
def strided_view(x, sick):
    """Even columns are written, and all columns are read through a reshaped view."""
    tile = nl.ndarray((8, 16), dtype=nl.float32)
    nisa.memset(dst=tile[:, 0:16:2], value=0.0)
    if not sick:
        nisa.memset(dst=tile[:, 1:16:2], value=0.0)
    total = nl.ndarray((8, 16), dtype=nl.float32)
    pairs = tile.reshape((8, 8, 2))
    nisa.tensor_tensor(dst=total, data1=nl.load(x), data2=pairs, op=nl.add)  # blamed
    return copied_out(total)


@fault("NKW-UNWRITTEN", ramp(8, 16), answer=lambda x: x.reshape(8, 4, 4).sum(axis=1))
def wrong_buffer_of_two(x, sick):
    """Double buffering computes on the buffer that is loaded next."""
    buffers = [nl.ndarray((8, 4), dtype=nl.float32), nl.ndarray((8, 4), dtype=nl.float32)]
    total = nl.zeros((8, 4), dtype=nl.float32)
    for i in range(4):
        nisa.dma_copy(dst=buffers[i % 2], src=x[:, i * 4 : i * 4 + 4])
        used = buffers[(i + 1) % 2] if sick else buffers[i % 2]
        nisa.tensor_tensor(dst=total, data1=total, data2=used, op=nl.add)  # blamed
    return copied_out(total)
