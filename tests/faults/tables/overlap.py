"""Tiles that overwrite bytes of a tile that is still in use, and stale data."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from tests.faults.data import copied_out, ramp
from tests.faults.table import fault


@fault("NKW-UNREAD", ramp(8, 12), answer=lambda x: x.reshape(8, 3, 4).sum(axis=1))
def block_loaded_over(x, sick):
    """Two buffers do not rotate: every block is loaded over the previous one, which nothing has read."""
    buffers = [nl.ndarray((8, 4), dtype=nl.float32, name=f"buffer{i}") for i in range(2)]
    total = nl.zeros((8, 4), dtype=nl.float32)
    nisa.dma_copy(dst=buffers[0], src=x[:, 0:4])
    for i in range(3):
        following = buffers[1] if sick else buffers[(i + 1) % 2]
        if i < 2:
            nisa.dma_copy(dst=following, src=x[:, i * 4 + 4 : i * 4 + 8])  # blamed
        used = buffers[0] if sick else buffers[i % 2]
        nisa.tensor_tensor(dst=total, data1=total, data2=used, op=nl.add)
    return copied_out(total)


@fault("NKW-STALE", ramp(4, 13), answer=lambda x: x.sum(axis=1, keepdims=True))
def columns_of_the_block_before(x, sick):
    """The last block of a row sum is shorter, and the reduction takes the columns that the block before left."""
    tile = nl.ndarray((4, 8), dtype=nl.float32, name="tile")
    total = nl.zeros((4, 1), dtype=nl.float32)
    for block in range(2):
        columns = min(8, 13 - block * 8)
        nisa.dma_copy(dst=tile[:, 0:columns], src=x[:, block * 8 : block * 8 + columns])
        block_sum = nl.ndarray((4, 1), dtype=nl.float32)
        used = 8 if sick else columns
        nisa.tensor_reduce(dst=block_sum, op=nl.add, data=tile[:, 0:used], axis=1)  # blamed
        nisa.tensor_tensor(dst=total, data1=total, data2=block_sum, op=nl.add)
    return copied_out(total)


@fault("NKW-MEM-CLOBBER", ramp(2, 8, 4), answer=lambda x: x)
def copied_out_late(x, sick):
    """A result is stored after its bytes were taken for the next block."""
    out = nl.ndarray((2, 8, 4), dtype=nl.float32, buffer=nl.shared_hbm, name="out")
    one = nl.ndarray((8, 4), dtype=nl.float32, name="one", address=(0, 0))
    two = nl.ndarray((8, 4), dtype=nl.float32, name="two", address=(0, 0))
    nisa.dma_copy(dst=one, src=x[0])
    if not sick:
        nisa.dma_copy(dst=out[0], src=one)
    nisa.dma_copy(dst=two, src=x[1])
    if sick:
        nisa.dma_copy(dst=out[0], src=one)  # blamed
    nisa.dma_copy(dst=out[1], src=two)
    return out


@fault("NKW-UNREAD", ramp(3, 4, 8), answer=lambda x: x)
def every_block_to_one_place(x, sick):
    """The destination of a loop's results lacks the loop's variable, and each result replaces the one before."""
    out = nl.ndarray((3, 4, 8), dtype=nl.float32, buffer=nl.shared_hbm, name="out")
    kept = nl.ndarray((4, 3, 8), dtype=nl.float32, name="kept")
    nisa.memset(dst=kept, value=0.0)
    for block in range(3):
        slot = 0 if sick else block
        nisa.dma_copy(dst=kept[:, slot], src=x[block])  # blamed
    for block in range(3):
        nisa.dma_copy(dst=out[block], src=kept[:, block])
    return out


@fault("NKW-MEM-CLOBBER", ramp(8, 6), answer=lambda x: np.repeat(x.max(axis=1, keepdims=True), 8, axis=1))
def memset_of_the_neighbour(x, sick):
    """Clearing a tile that is too long for its place clears the statistics beside it."""
    tile = nl.load(x)
    maxima = nl.ndarray((8, 1), dtype=nl.float32, name="maxima", address=(0, 4096))
    nisa.tensor_reduce(dst=maxima, op=nl.maximum, data=tile, axis=1)
    scratch = nl.ndarray((8, 9 if sick else 8), dtype=nl.float32, name="scratch", address=(0, 4096 - 32))
    nisa.memset(dst=scratch, value=0.0)
    result = nl.ndarray((8, 8), dtype=nl.float32)
    nisa.tensor_scalar(dst=result, data=scratch[:, 0:8], op0=nl.add, operand0=maxima)  # blamed
    return copied_out(result)


@fault("NKW-MEM-CLOBBER", ramp(8, 16), ramp(8, 16) + 2, answer=lambda x, y: x - y)
def off_by_one_element(x, y, sick):
    """The second tile begins on the last element of the first."""
    a = nl.ndarray((8, 16), dtype=nl.float32, name="a", address=(0, 0))
    b = nl.ndarray((8, 16), dtype=nl.float32, name="b", address=(0, 60 if sick else 64))
    nisa.dma_copy(dst=a, src=x)
    nisa.dma_copy(dst=b, src=y)
    total = nl.ndarray((8, 16), dtype=nl.float32)
    nisa.tensor_tensor(dst=total, data1=a, data2=b, op=nl.subtract)  # blamed
    return copied_out(total)


@fault("NKW-MEM-CLOBBER", ramp(8, 16), ramp(8, 16) + 1, answer=lambda x, y: x + y)
def partly(x, y, sick):
    """The second tile begins in the middle of the first."""
    a = nl.ndarray((8, 16), dtype=nl.float32, name="a", address=(0, 0))
    b = nl.ndarray((8, 16), dtype=nl.float32, name="b", address=(0, 32 if sick else 64))
    nisa.dma_copy(dst=a, src=x)
    nisa.dma_copy(dst=b, src=y)
    total = nl.ndarray((8, 16), dtype=nl.float32)
    nisa.tensor_tensor(dst=total, data1=a, data2=b, op=nl.add)  # blamed
    return copied_out(total)


@fault("NKW-MEM-CLOBBER", ramp(5, 4), ramp(5, 8), answer=lambda a, b: 2 * (a.T @ b))
def psum_bank_reused(a, b, sick):
    """Two accumulators were given one bank, and the first is read last."""
    left, right = nl.load(a), nl.load(b)
    address = (0, 0 if sick else 2048)
    first = nl.ndarray((4, 8), dtype=nl.float32, buffer=nl.psum, name="first", address=(0, 0))
    second = nl.ndarray((4, 8), dtype=nl.float32, buffer=nl.psum, name="second", address=address)
    nisa.nc_matmul(dst=first, stationary=left, moving=right)
    nisa.nc_matmul(dst=second, stationary=left, moving=right)
    copied = nl.ndarray((4, 8), dtype=nl.float32)
    nisa.tensor_copy(dst=copied, src=second)
    total = nl.ndarray((4, 8), dtype=nl.float32)
    nisa.tensor_tensor(dst=total, data1=copied, data2=first, op=nl.add)  # blamed
    return copied_out(total)


@fault("NKW-MEM-CLOBBER", ramp(8, 12), answer=lambda x: x.reshape(8, 3, 4).sum(axis=1))
def rotation_too_short(x, sick):
    """Two buffers rotate over three loads that are all in flight."""
    slots = 2 if sick else 3
    tiles = []
    for i in range(3):
        tile = nl.ndarray((8, 4), dtype=nl.float32, name=f"tile{i}", address=(0, i % slots * 16))
        nisa.dma_copy(dst=tile, src=x[:, i * 4 : i * 4 + 4])
        tiles.append(tile)
    total = nl.zeros((8, 4), dtype=nl.float32)
    for tile in tiles:
        nisa.tensor_tensor(dst=total, data1=total, data2=tile, op=nl.add)  # blamed
    return copied_out(total)


@fault("NKW-STALE", ramp(7, 4), ramp(7, 6), answer=lambda a, b: a.T @ b)
def rows_of_the_block_before(a, b, sick):
    """The last block of a contraction is shorter, and the matmul multiplies the rows that the block before left."""
    left = nl.ndarray((4, 4), dtype=nl.float32, name="left")
    right = nl.ndarray((4, 6), dtype=nl.float32, name="right")
    sums = nl.ndarray((4, 6), dtype=nl.float32, buffer=nl.psum, name="sums")
    for k in range(2):
        rows = min(4, 7 - k * 4)
        for tile, source in ((left, a), (right, b)):
            nisa.dma_copy(dst=tile[0:rows], src=source[k * 4 : k * 4 + rows])
        used = 4 if sick else rows
        nisa.nc_matmul(dst=sums, stationary=left[0:used], moving=right[0:used])  # blamed
    return copied_out(sums)


@fault(
    "NKW-MEM-CLOBBER",
    ramp(64, 4),
    ramp(32, 4),
    answer=lambda x, y: np.concatenate([np.concatenate([x.sum(axis=1, keepdims=True), x[:, 1:]], axis=1), y]),
)
def some_partitions(x, y, sick):
    """The tiles share bytes in partitions 32 to 63 only."""
    low = nl.ndarray((64, 4), dtype=nl.float32, name="low", address=(0, 0))
    high = nl.ndarray((32, 4), dtype=nl.float32, name="high", address=(32 if sick else 64, 0))
    nisa.dma_copy(dst=low, src=x)
    nisa.dma_copy(dst=high, src=y)
    sums = nl.ndarray((64, 1), dtype=nl.float32)
    nisa.tensor_reduce(dst=sums, op=nl.add, data=low, axis=1)  # blamed
    out = nl.ndarray((96, 4), dtype=nl.float32, buffer=nl.shared_hbm, name="out")
    nisa.dma_copy(dst=out[0:64, 0:1], src=sums)
    nisa.dma_copy(dst=out[0:64, 1:4], src=x[:, 1:4])
    nisa.dma_copy(dst=out[64:96], src=high)
    return out


@fault("NKW-MEM-CLOBBER", ramp(2, 8, 4), ramp(8, 4), answer=lambda x, w: x * w)
def weights_under_activations(x, w, sick):
    """Weights that stay for the whole loop share bytes with the tile that is loaded in it."""
    weights = nl.ndarray((8, 4), dtype=nl.float32, name="weights", address=(0, 1024))
    nisa.dma_copy(dst=weights, src=w)
    out = nl.ndarray((2, 8, 4), dtype=nl.float32, buffer=nl.shared_hbm, name="out")
    for i in range(2):
        address = (0, 1024 if sick and i else 2048)
        tile = nl.ndarray((8, 4), dtype=nl.float32, name=f"tile{i}", address=address)
        nisa.dma_copy(dst=tile, src=x[i])
        product = nl.ndarray((8, 4), dtype=nl.float32)
        nisa.tensor_tensor(dst=product, data1=tile, data2=weights, op=nl.multiply)  # blamed
        nisa.dma_copy(dst=out[i], src=product)
    return out


@fault(
    "NKW-MEM-CLOBBER",
    ramp(2, 5, 4),
    ramp(2, 5, 6),
    answer=lambda a, b: (a[0].T @ b[0] + a[1].T @ b[1], a[0].T @ b[0]),
)
def sum_clobbered_between_its_parts(a, b, sick):
    """Another tile is written over an open sum; the second part is added to what is left there."""
    sums = nl.ndarray((4, 6), dtype=nl.float32, buffer=nl.psum, name="sums", address=(0, 0))
    address = (0, 0 if sick else 2048)
    other = nl.ndarray((4, 6), dtype=nl.float32, buffer=nl.psum, name="other", address=address)
    spare = nl.ndarray((4, 6), dtype=nl.float32)
    for k in range(2):
        left, right = nl.load(a[k]), nl.load(b[k])
        nisa.nc_matmul(dst=sums, stationary=left, moving=right, accumulate=k > 0)  # blamed
        if k == 0:
            nisa.nc_matmul(dst=other, stationary=left, moving=right, accumulate=False)
            nisa.tensor_copy(dst=spare, src=other)
    return copied_out(sums), copied_out(spare)


@fault("NKW-STALE", ramp(12, 4), ramp(8, 6), answer=lambda a, b: a[:8].T @ b + a[8:].T @ b[:4])
def old_rows_times_a_full_tile(a, b, sick):
    """The last block fills 4 of 8 rows; the full tile that it multiplies has no zeros for the other rows."""
    tile = nl.ndarray((8, 4), dtype=nl.float32, name="tile")
    weights = nl.load(b)
    sums = nl.ndarray((4, 6), dtype=nl.float32, buffer=nl.psum, name="sums")
    for block, rows in enumerate((8, 4)):
        nisa.dma_copy(dst=tile[0:rows], src=a[block * 8 : block * 8 + rows])
        left = tile[0 : 8 if sick else rows]
        right = weights[0 : 8 if sick else rows]
        nisa.nc_matmul(dst=sums, stationary=left, moving=right, accumulate=block > 0)  # blamed
    return copied_out(sums)


@fault("NKW-UNREAD", ramp(2, 8, 4), answer=lambda x: x[0] + x[1])
def second_load_over_the_first(x, sick):
    """Two lines load into one tile, and nothing reads the first block."""
    first = nl.ndarray((8, 4), dtype=nl.float32, name="first")
    second = first if sick else nl.ndarray((8, 4), dtype=nl.float32, name="second")
    total = nl.ndarray((8, 4), dtype=nl.float32)
    nisa.dma_copy(dst=first, src=x[0])
    nisa.dma_copy(dst=second, src=x[1])  # blamed
    nisa.tensor_tensor(dst=total, data1=first, data2=second, op=nl.add)
    return copied_out(total)


@fault("NKW-PSUM-UNREAD", ramp(2, 5, 4), ramp(5, 6), answer=lambda a, b: a[0].T @ b + a[1].T @ b)
def second_product_over_the_first(a, b, sick):
    """Two lines write products into one PSUM tile, and nothing reads the first one."""
    sums = nl.ndarray((4, 6), dtype=nl.float32, buffer=nl.psum, name="sums")
    right = nl.load(b)
    nisa.nc_matmul(dst=sums, stationary=nl.load(a[0]), moving=right, accumulate=False)
    nisa.nc_matmul(dst=sums, stationary=nl.load(a[1]), moving=right, accumulate=not sick)  # blamed
    return copied_out(sums)
