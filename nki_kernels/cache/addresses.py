"""Where keys and values of new tokens are written: addresses of rows (token, kv head), computed at run time."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.dma import SCALAR, transfer
from nki_kernels.tiles import filled


def compute_slots(numbers, ranks):
    """Return the slots of positions that `ranks`, a power of two, divide."""
    if ranks == 1:
        return numbers
    result = nl.ndarray(numbers.shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=result, data=numbers, op0=nl.right_shift, operand0=ranks.bit_length() - 1)
    return result


def is_written_elsewhere(numbers, work):
    """Return 1 where another core or rank writes a position: [1, T, Hk] uint8."""
    result = nl.ndarray(numbers.shape, dtype=nl.uint8, buffer=nl.sbuf)
    if work.ranks is not None:
        ranks_of_positions = nl.ndarray(numbers.shape, dtype=nl.int32, buffer=nl.sbuf)
        # The number of ranks is a power of two, so a mask gives the remainder exactly.
        nisa.tensor_scalar(
            dst=ranks_of_positions, data=numbers, op0=nl.bitwise_and, operand0=work.ranks.count - 1
        )
        nisa.tensor_scalar(
            dst=result, data=ranks_of_positions, op0=nl.not_equal, operand0=work.ranks.index[0:1, :]
        )
        return result
    first, end = work.share.slots
    if first == 0:
        nisa.tensor_scalar(dst=result, data=numbers, op0=nl.greater_equal, operand0=float(end))
    else:
        nisa.tensor_scalar(dst=result, data=numbers, op0=nl.less, operand0=float(first))
    return result


def replace_by_end(rows, predicate, count):
    """Replace addresses of rows that another core or rank writes by the first one behind a cache of `count` rows."""
    behind = filled(rows.shape, count, nl.int32)
    nisa.tensor_copy_predicated(dst=rows, src=behind, predicate=predicate)


def repeat_for_heads(column, sizes, queue):
    """Load a number of each new token, [T, 1] int32 in HBM, for each of its kv heads: [1, T, Hk]."""
    numbers = nl.ndarray((1, sizes.tokens, sizes.kv_heads), dtype=nl.int32, buffer=nl.sbuf)
    source = column.reshape((1, sizes.tokens, 1)).broadcast(2, sizes.kv_heads)
    transfer(numbers, source, queue)
    return numbers


def compute_row_starts(slots, first_row, kv_heads, step, sizes):
    """Return where rows (token, kv head) of new tokens begin in a cache of `kv_heads` that lie `step` rows apart.

    The first sequence and kv head begin at `first_row`. GpSimd adds integers exactly, beyond 2 ** 24 as well.
    """
    starts = nl.ndarray(slots.shape, dtype=nl.int32, buffer=nl.sbuf)
    pattern = [[kv_heads * step, sizes.sequences], [0, sizes.new], [step, sizes.kv_heads]]
    nisa.iota(dst=starts, pattern=pattern, offset=first_row)
    result = nl.ndarray(slots.shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=result, data1=slots, data2=starts, op=nl.add)
    return result


def compute_page_rows(slots, first_head, kv_heads, sizes):
    """Return which rows (token, kv head) of pages of `kv_heads` the new tokens are written to."""
    if kv_heads == 1:
        return slots
    heads = nl.ndarray(slots.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=heads, pattern=[[0, sizes.tokens], [1, sizes.kv_heads]], offset=first_head)
    result = nl.ndarray(slots.shape, dtype=nl.int32, buffer=nl.sbuf)
    # The product is exact in float32, because a paged cache has at most 2^24 rows.
    nisa.scalar_tensor_tensor(
        dst=result,
        data=slots,
        op0=nl.multiply,
        operand0=float(kv_heads),
        op1=nl.add,
        operand1=heads,
    )
    return result


def split_into_columns(numbers, heights, sizes):
    """Return numbers on one partition as int32 columns of as many partitions as `heights` says."""
    flat = numbers.reshape((1, sizes.tokens * sizes.kv_heads))
    result = []
    first = 0
    for height in heights:
        column = nl.ndarray((height, 1), dtype=nl.int32, buffer=nl.sbuf)
        transfer(column, flat[:, first : first + height], SCALAR)
        result.append(column)
        first += height
    return result


def scatter(cache, row, step, tiles, addresses, sizes, divided):
    """Write rows (token, kv head) to a cache of rows of `row` elements; elements of a row go `step` such rows apart.

    addresses: a column for each tile, which counts rows of `row` elements. All rows of a tile take one DMA: a second
    one with run-time addresses would wait for the first. divided: another core or rank writes some rows, whose address
    is behind the cache; the DMA skips these.
    """
    sequences, kv_heads, first, second = cache.shape
    flat = cache.reshape((sequences * kv_heads * first * second // row, row))
    for i in range(len(tiles)):
        pattern = [[row, addresses[i].shape[0]], [step, sizes.depth]]
        target = flat.ap(pattern=pattern, vector_offset=addresses[i])
        if divided:
            nisa.dma_copy(dst=target, src=tiles[i], oob_mode=nisa.oob_mode.skip)
        else:
            nisa.dma_copy(dst=target, src=tiles[i])
