"""The caches of a decode step: keys and values of a group of units into SBUF, and those of the new tokens back."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.decode.sizes import first_unit, units_in
from nki_kernels.tiles import PARTITIONS


def buffers(sizes, groups):
    """Tiles for the keys, [D in part, part, unit, S], and the values, [position, unit, chunk, D], of groups.

    Tiles of values that no group fills begin with zeros: which bytes are defined may not depend on the positions.
    """
    fills = sizes.rest == 0
    for box, _ in groups:
        fills = fills and units_in(box) == sizes.units
    keys, values = [], []
    for _ in range(sizes.transposed_buffers if sizes.paged else sizes.key_buffers):
        shape = (min(sizes.depth, PARTITIONS), sizes.parts, sizes.units, sizes.capacity)
        keys.append(nl.ndarray(shape, dtype=sizes.dtype, buffer=nl.sbuf))
    for _ in range(sizes.value_buffers):
        cached = nl.ndarray(row_shape(sizes), dtype=sizes.dtype, buffer=nl.sbuf)
        if not fills:
            nisa.memset(dst=cached, value=0.0)
        new = nl.ndarray((sizes.new, sizes.units, sizes.depth), dtype=sizes.dtype, buffer=nl.sbuf)
        values.append((cached, new))
    return keys, values


def row_shape(sizes):
    """The shape of a tile with positions on the partitions: by unit, or as in the pages by sequence and kv head."""
    if sizes.paged:
        heads = sizes.units if sizes.kv_heads > 1 else 1
        return (PARTITIONS, sizes.units // heads, sizes.cached, heads, sizes.depth)
    return (PARTITIONS, sizes.units, sizes.cached, sizes.depth)


def load_keys(tile, k_cache, box, sizes):
    """Bring the cached keys of a group of units; a dtype other than the tile's is cast on the way."""
    units, at = units_in(box), first_unit(box, sizes)
    source = k_cache.reshape((sizes.sequences * sizes.kv_heads, sizes.depth, sizes.capacity))
    for part in range(sizes.parts):
        start, stop = part * PARTITIONS, min(sizes.depth, (part + 1) * PARTITIONS)
        nisa.dma_copy(
            dst=tile[0 : stop - start, part, 0:units, :],
            src=source[at : at + units, start:stop, :].permute((1, 0, 2)),
        )


def load_values(cached, v_cache, box, sizes, engine):
    """Bring the cached values of a group of units.

    Partition p of the first S // 128 chunks holds as many consecutive positions, which lie side by side in HBM.
    """
    units, at = units_in(box), first_unit(box, sizes)
    source = v_cache.reshape((sizes.sequences * sizes.kv_heads, sizes.capacity, sizes.depth))[at : at + units]
    whole = sizes.full * PARTITIONS
    if sizes.full > 0:
        rows = source[:, 0:whole, :].reshape_dim(1, (PARTITIONS, sizes.full)).permute((1, 0, 2, 3))
        nisa.dma_copy(dst=cached[:, 0:units, 0 : sizes.full, :], src=rows, engine=engine)
    if sizes.rest > 0:
        rows = source[:, whole : sizes.capacity, :].permute((1, 0, 2))
        nisa.dma_copy(dst=cached[0 : sizes.rest, 0:units, sizes.full, :], src=rows, engine=engine)


def load_new_values(new, v, box, sizes):
    """Bring the values of the new tokens of a group of units, from HBM or from rows in SBUF: [new token, unit, D]."""
    if v.buffer != nl.sbuf:
        rows = v.reshape((sizes.sequences, sizes.new, sizes.kv_heads, sizes.depth))
        rows = rows[box[0] : box[1], :, box[2] : box[3], :].permute((1, 0, 2, 3))
        nisa.dma_copy(dst=new[:, 0 : units_in(box), :], src=rows, engine=nisa.engine.scalar)
        return
    left, right = box[2] * sizes.depth, box[3] * sizes.depth
    together = box[1] - box[0] if sizes.new == 1 else 1
    heads = box[3] - box[2]
    for sequence in range(box[0], box[1], together):
        first, unit = sequence * sizes.new, (sequence - box[0]) * heads
        target = new[:, unit : unit + together * heads, :]
        rows = v[first : first + together * sizes.new, left:right]
        nisa.dma_copy(dst=target, src=rows, engine=nisa.engine.scalar)


def clear_values(tile, valid, first, last, sizes):
    """Zero the values of keys in chunks first … last that are not valid [128, units, chunks], whatever they hold.

    Their weights are zero, but zero times what was never written may be anything.
    """
    words = tile.view(nl.float32)
    for start, stop, height in (
        (first, min(last, sizes.full), PARTITIONS),
        (max(first, sizes.full), last, sizes.rest),
    ):
        if stop > start:
            units = valid.shape[1]
            chosen = valid[0:height, :, start:stop].expand_dim(3).broadcast(3, words.shape[3])
            nisa.tensor_copy_predicated(
                dst=words[0:height, 0:units, start:stop, :], src=0.0, predicate=chosen, reverse_pred=True
            )


def places(positions, step, heights, sizes):
    """Where the rows (token, kv head) of the new tokens begin in a cache whose kv heads lie `step` rows apart.

    GpSimd adds integers exactly, beyond 2 ** 24 as well.
    """
    shape = (1, sizes.sequences, sizes.new, sizes.kv_heads)
    numbers = nl.ndarray(shape, dtype=nl.int32, buffer=nl.sbuf)
    pattern = [[1, 1], [sizes.new, sizes.sequences], [1, sizes.new], [0, sizes.kv_heads]]
    nisa.dma_copy(dst=numbers, src=positions.ap(pattern=pattern), engine=nisa.engine.gpsimd)
    starts = nl.ndarray(shape, dtype=nl.int32, buffer=nl.sbuf)
    pattern = [[sizes.kv_heads * step, sizes.sequences], [0, sizes.new], [step, sizes.kv_heads]]
    nisa.iota(dst=starts, pattern=pattern)
    nisa.tensor_tensor(dst=numbers, data1=numbers, data2=starts, op=nl.add)
    return as_columns(numbers, heights, sizes)


def places_in_pages(slots, heights, sizes):
    """Where the rows (token, kv head) of the new tokens are in a paged cache, counted in its rows."""
    shape = (1, sizes.tokens, sizes.kv_heads)
    numbers = nl.ndarray(shape, dtype=nl.int32, buffer=nl.sbuf)
    pattern = [[1, 1], [1, sizes.tokens], [0, sizes.kv_heads]]
    nisa.dma_copy(dst=numbers, src=slots.ap(pattern=pattern), engine=nisa.engine.sync)
    if sizes.kv_heads > 1:
        heads = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
        nisa.iota(dst=heads, pattern=[[0, sizes.tokens], [1, sizes.kv_heads]])
        nisa.scalar_tensor_tensor(
            dst=numbers,
            data=numbers,
            op0=nl.multiply,
            operand0=float(sizes.kv_heads),
            op1=nl.add,
            operand1=heads,
        )
    return as_columns(numbers, heights, sizes)


def as_columns(numbers, heights, sizes):
    """Numbers on one partition as int32 columns of as many partitions as `heights` says."""
    flat = numbers.reshape((1, sizes.tokens * sizes.kv_heads))
    result = []
    first = 0
    for height in heights:
        column = nl.ndarray((height, 1), dtype=nl.int32, buffer=nl.sbuf)
        nisa.dma_copy(dst=column, src=flat[:, first : first + height], engine=nisa.engine.gpsimd)
        result.append(column)
        first += height
    return result


def new_value_rows(v, heights, sizes):
    """The new tokens' values as rows (token, kv head): tiles [height, D]."""
    source = v.reshape((sizes.tokens * sizes.kv_heads, sizes.depth))
    result = []
    first = 0
    for height in heights:
        tile = nl.ndarray((height, sizes.depth), dtype=v.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=tile, src=source[first : first + height, :], engine=nisa.engine.gpsimd)
        result.append(tile)
        first += height
    return result


def scatter(cache, row, step, tiles, columns, sizes):
    """Write rows (token, kv head) to a cache as rows of `row` elements: from where a column says, `step` apart.

    All rows of a tile take one DMA: a second one with run-time addresses would wait for the first.
    """
    sequences, kv_heads, first, second = cache.shape
    flat = cache.reshape((sequences * kv_heads * first * second // row, row))
    for i in range(len(tiles)):
        pattern = [[row, columns[i].shape[0]], [step, sizes.depth]]
        nisa.dma_copy(dst=flat.ap(pattern=pattern, vector_offset=columns[i]), src=tiles[i])
