"""Addresses in caches at which the keys and values of new tokens are written, computed at run time, and their stores.

`cache.contiguous` and `cache.pages` call these functions. A row is the key or the value of one new token and kv head;
rows are ordered (token, kv head). A *slot* is the place of a position in a cache.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.dma import SCALAR, transfer
from nki_kernels.tiles import cast, filled


def compute_slots(positions, ranks):
    """Return the slots of positions, `positions` // `ranks`: a new int32 SBUF tile, or `positions` itself for one rank.

    Args:
        positions: int32 in SBUF.
        ranks: number of ranks that divide positions, a power of two.
    """
    if ranks == 1:
        return positions
    result = nl.ndarray(positions.shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=result, data=positions, op0=nl.right_shift, operand0=ranks.bit_length() - 1)
    return result


def is_written_elsewhere(positions, launch):
    """Return 1 where another core or rank writes the position, else 0: [1, T, Hk] uint8 in SBUF.

    With ranks that divide positions, position p is written by rank p % N. With two cores, a core writes the positions
    among its own slots.

    Args:
        positions: [1, T, Hk] int32 in SBUF.
        launch: a `DecodeLaunch` that is `divided`.
    """
    result = nl.ndarray(positions.shape, dtype=nl.uint8, buffer=nl.sbuf)
    if launch.ranks is not None:
        ranks_of_positions = nl.ndarray(positions.shape, dtype=nl.int32, buffer=nl.sbuf)
        # The number of ranks is a power of two, so a mask gives the remainder exactly.
        nisa.tensor_scalar(
            dst=ranks_of_positions, data=positions, op0=nl.bitwise_and, operand0=launch.ranks.count - 1
        )
        nisa.tensor_scalar(
            dst=result, data=ranks_of_positions, op0=nl.not_equal, operand0=launch.ranks.index[0:1, :]
        )
        return result
    first, end = launch.share.slots
    if first == 0:
        nisa.tensor_scalar(dst=result, data=positions, op0=nl.greater_equal, operand0=float(end))
    else:
        nisa.tensor_scalar(dst=result, data=positions, op0=nl.less, operand0=float(first))
    return result


def replace_by_end(rows, mask, count):
    """Write `count` over the addresses in `rows` where `mask` is 1, in SBUF.

    `count` is the first address beyond a cache of `count` rows, which a DMA skips. So rows of other cores or ranks
    are not written.
    """
    behind = filled(rows.shape, count, nl.int32)
    nisa.tensor_copy_predicated(dst=rows, src=behind, predicate=mask)


def repeat_for_heads(column, sizes, queue):
    """Load one number of each new token and repeat it for each kv head: [1, T, Hk] int32 in SBUF.

    Args:
        column: [T, 1] int32 in HBM, such as positions or slots.
        queue: a queue of `nki_kernels.dma`.
    """
    numbers = nl.ndarray((1, sizes.tokens, sizes.kv_heads), dtype=nl.int32, buffer=nl.sbuf)
    source = column.reshape((1, sizes.tokens, 1)).broadcast(2, sizes.kv_heads)
    transfer(numbers, source, queue)
    return numbers


def compute_row_starts(slots, first_row, kv_heads, head_rows, sizes):
    """Return the addresses of the new tokens' rows in a contiguous cache: [1, T, Hk] int32 in SBUF.

    An address counts rows of the flat cache: elements for keys [B, Hk, D, S], rows of D elements for values [B, Hk,
    S, D]. GpSimd adds integers exactly, beyond 2 ** 24 as well. A share is one core's part of a launch.

    Args:
        slots: slot of each new token, [1, T, Hk] int32 in SBUF.
        first_row: address of slot 0 of the share's first sequence and kv head.
        kv_heads: kv heads of a sequence in the cache.
        head_rows: rows of one kv head of a sequence.
    """
    starts = nl.ndarray(slots.shape, dtype=nl.int32, buffer=nl.sbuf)
    pattern = [[kv_heads * head_rows, sizes.sequences], [0, sizes.new], [head_rows, sizes.kv_heads]]
    nisa.iota(dst=starts, pattern=pattern, offset=first_row)
    result = nl.ndarray(slots.shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=result, data1=slots, data2=starts, op=nl.add)
    return result


def compute_page_rows(slots, first_head, kv_heads, sizes):
    """Return the addresses of the new tokens' rows in pages, slot * `kv_heads` + kv head: [1, T, Hk] int32 in SBUF.

    An address counts rows of D elements. If `kv_heads` is 1, `slots` itself is returned. A share is one core's part
    of a launch.

    Args:
        slots: slot of each new token, page * block + offset, [1, T, Hk] int32 in SBUF.
        first_head: number of the share's first kv head in the cache.
        kv_heads: kv heads of a position in the cache.
    """
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
    """Return numbers of one partition as columns: a list of SBUF tiles [height, 1] int32, one for each of `heights`.

    Args:
        numbers: [1, T, Hk] int32 in SBUF; T * Hk is the sum of `heights`.
    """
    flat = numbers.reshape((1, sizes.tokens * sizes.kv_heads))
    result = []
    first = 0
    for height in heights:
        column = nl.ndarray((height, 1), dtype=nl.int32, buffer=nl.sbuf)
        transfer(column, flat[:, first : first + height], SCALAR)
        result.append(column)
        first += height
    return result


def scatter(cache, width, stride, tiles, addresses, sizes, divided):
    """Write rows of new tokens from SBUF to a cache in HBM, each at its run-time address, one DMA for each tile.

    All rows of a tile take one DMA, because a second one with run-time addresses would wait for the first.

    Args:
        cache: four-dimensional, seen as rows of `width` elements.
        width: elements of the rows that addresses count.
        stride: distance in elements between neighbouring elements of a row of D.
        tiles: SBUF tiles [height, D], one row for each token and kv head.
        addresses: for each tile a column [height, 1] int32 in SBUF.
        divided: whether rows whose address is beyond the cache are skipped, because another core or rank writes them.
    """
    sequences, kv_heads, first, second = cache.shape
    flat = cache.reshape((sequences * kv_heads * first * second // width, width))
    for i in range(len(tiles)):
        pattern = [[width, addresses[i].shape[0]], [stride, sizes.depth]]
        target = flat.ap(pattern=pattern, vector_offset=addresses[i])
        rows = cast(tiles[i], cache.dtype)
        if divided:
            nisa.dma_copy(dst=target, src=rows, oob_mode=nisa.oob_mode.skip)
        else:
            nisa.dma_copy(dst=target, src=rows)
