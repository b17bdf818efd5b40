"""Sizes beyond what one instruction takes."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import copied_out, ramp
from tests.faults.table import fault


@fault("NKW-SEARCH-EIGHT", ramp(4, 20), answer=lambda x: -np.sort(-x, axis=1)[:, 0:8])
def eight_maxima(x, sick):
    """max8 writes eight values, not ten."""
    tile = nl.load(x)
    most = nl.ndarray((4, 10 if sick else 8), dtype=nl.float32)
    nisa.max8(dst=most, src=tile)  # blamed
    return copied_out(most)


@fault("NKW-FREE-SIZE", ramp(1, 70000, dtype=np.uint8), answer=lambda x: x + 1)
def elements_per_partition(x, sick):
    """A byte tile fits into SBUF, and has more elements per partition than an instruction can count."""
    tile = nl.load(x)
    size = 70000 if sick else 35000
    result = nl.ndarray((1, 70000), dtype=nl.uint8)
    for start in range(0, 70000, size):
        columns = slice(start, start + size)
        nisa.tensor_scalar(dst=result[:, columns], data=tile[:, columns], op0=nl.add, operand0=1.0)  # blamed
    return copied_out(result)


@fault("NKW-DIM-SIZE", ramp(1, 65536, dtype=np.uint8), answer=lambda x: x + 1)
def elements_of_one_dim(x, sick):
    """A row of 65536 elements in one free dim: an engine counts the elements of a dim with 16 bits."""
    tile = nl.load(x)
    result = nl.ndarray((1, 65536), dtype=nl.uint8)
    dims = (1, 65536) if sick else (1, 2, 32768)
    data, dst = tile.reshape(dims), result.reshape(dims)
    nisa.tensor_scalar(dst=dst, data=data, op0=nl.add, operand0=1.0)  # blamed
    return copied_out(result)


@fault("NKW-SEARCH-SIZE", ramp(4, 6), answer=lambda x: -np.sort(-x, axis=1)[:, 0:2])
def fewer_than_eight(x, sick):
    """The eight largest of six expert scores."""
    scores = nl.zeros((4, 8), dtype=nl.float32)
    nisa.memset(dst=scores, value=-1.0)
    nisa.dma_copy(dst=scores[:, 0:6], src=x)
    best = nl.ndarray((4, 8), dtype=nl.float32)
    nisa.max8(dst=best, src=scores[:, 0:6] if sick else scores)  # blamed
    return copied_out(best[:, 0:2])


@fault("NKW-MATMUL-MOVING", ramp(5, 4), ramp(5, 513), answer=lambda a, b: (a.T @ b)[:, 0:512])
def moving_columns(a, b, sick):
    """513 moving columns."""
    left, right = nl.load(a), nl.load(b)
    columns = 513 if sick else 512
    sums = nl.ndarray((4, columns), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=sums, stationary=left, moving=right[:, 0:columns])  # blamed
    return copied_out(sums)


@fault("NKW-STRIDE", ramp(1, 80000, dtype=np.uint8).reshape(1, 2, 40000), answer=lambda x: x[:, :, :8])
def rows_far_apart(x, sick):
    """Rows of a tile that lie more than 32767 elements apart: a stride is a signed 16-bit number."""
    tile = nl.load(x)
    result = nl.ndarray((1, 2, 8), dtype=nl.uint8)
    if sick:
        nisa.tensor_copy(dst=result, src=tile[:, :, 0:8])  # blamed
    else:
        for row in range(2):
            nisa.tensor_copy(dst=result[:, row], src=tile[:, row, 0:8])
    return copied_out(result)


@fault("NKW-SENDRECV-GPSIMD-BYTES", ramp(8, 300), answer=lambda x: np.concatenate([x[4:], x[:4]]), cores=2)
def sent_by_gpsimd(x, sick):
    """A row of 300 float32 is sent to the other core by GpSimd's DMA, which takes 1 KiB."""
    core = nl.program_id(0)
    mine = nl.load(x[core * 4 : core * 4 + 4])
    other = nl.ndarray((4, 300), dtype=nl.float32)
    carrier = nisa.dma_engine.gpsimd_dma if sick else nisa.dma_engine.dma
    pair = {"send_to_rank": 1 - core, "recv_from_rank": 1 - core, "pipe_id": 0}
    nisa.sendrecv(dst=other, src=mine, dma_engine=carrier, **pair)  # blamed
    out = nl.ndarray((8, 300), dtype=nl.float32, buffer=nl.shared_hbm, name="out")
    nisa.dma_copy(dst=out[core * 4 : core * 4 + 4], src=other)
    return out


@fault("NKW-TILE-SHAPE", ramp(2, 4), answer=lambda x: x.reshape(2, 1, 2, 1, 2))
def six_dims(x, sick):
    """A tile of six dims."""
    shape = (2, 1, 2, 1, 2, 1) if sick else (2, 1, 2, 1, 2)
    tile = nl.ndarray(shape, dtype=nl.float32)  # blamed
    nisa.dma_copy(dst=tile, src=x)
    return copied_out(tile)


@fault("NKW-MATMUL-STATIONARY", ramp(5, 129), ramp(5, 6), answer=lambda a, b: a[:, 0:128].T @ b)
def stationary_columns(a, b, sick):
    """129 stationary columns."""
    left, right = nl.load(a), nl.load(b)
    columns = 129 if sick else 128
    sums = nl.ndarray((128, 6), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=sums, stationary=left[:, 0:columns], moving=right)  # blamed
    return copied_out(sums)


@fault(
    "NKW-BN-STATS-SIZE",
    np.ones((2, 513), np.float32),
    answer=lambda x: np.array([[256, 1], [256, 1]], np.float32),
)
def statistics(x, sick):
    """bn_stats over 513 elements."""
    tile = nl.load(x)
    count = 513 if sick else 512
    stats = nl.ndarray((2, 6), dtype=nl.float32)
    nisa.bn_stats(dst=stats, data=tile[:, 0:count])  # blamed
    return copied_out(stats[:, 0:2])


@fault("NKW-TRANSPOSE-VECTOR", ramp(32, 33), answer=lambda x: x[:, 0:32].T)
def vector_transpose(x, sick):
    """The Vector engine transposes blocks of 32 by 32."""
    columns = 33 if sick else 32
    tile = nl.load(x[:, 0:columns])
    turned = nl.ndarray((columns, 32), dtype=nl.float32)
    nisa.nc_transpose(dst=turned, data=tile, engine=nisa.engine.vector)  # blamed
    return copied_out(turned)
