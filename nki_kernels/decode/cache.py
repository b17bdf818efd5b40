"""The caches of a decode step: keys and values of a group of units into SBUF, and those of the new tokens back."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.decode.sizes import units_in
from nki_kernels.dma import SCALAR, STATIC, transfer
from nki_kernels.tiles import PARTITIONS


def buffers(sizes, groups):
    """Allocate the buffers of groups.

    Returns: tiles of keys [D in part, part, unit, S]; pairs of values [position, unit, chunk, D] and new values [new
    token, unit, D]; and the tile whose slices the new values are, or None.
    """
    keys, values = [], []
    for _ in range(sizes.transposed_buffers if sizes.paged else sizes.key_buffers):
        shape = (min(sizes.depth, PARTITIONS), sizes.parts, sizes.units, sizes.capacity)
        keys.append(nl.ndarray(shape, dtype=sizes.dtype, buffer=nl.sbuf))
    used = min(sizes.value_buffers, len(groups))
    all_new = None
    if not sizes.stored:
        all_new = nl.ndarray((sizes.new, used * sizes.units, sizes.depth), dtype=sizes.dtype, buffer=nl.sbuf)
    for number in range(sizes.value_buffers):
        cached = nl.ndarray(row_shape(sizes), dtype=sizes.dtype, buffer=nl.sbuf)
        if number < len(groups):
            clear_unfilled(cached, units_in(groups[number][0]), sizes)
        new = None
        if not sizes.stored and number < used:
            new = all_new[:, number * sizes.units : (number + 1) * sizes.units, :]
        values.append((cached, new))
    return keys, values, all_new


def clear_unfilled(cached, units, sizes):
    """Zero what the first values of a tile, of so many units, leave: which bytes are defined may not depend on data."""
    if sizes.paged:
        if units < sizes.units:
            nisa.memset(dst=cached, value=0.0)
        return
    if units < sizes.units:
        nisa.memset(dst=cached[:, units : sizes.units, :, :], value=0.0)
    if sizes.rest > 0:
        nisa.memset(dst=cached[:, 0:units, sizes.full, :], value=0.0)


def row_shape(sizes):
    """The shape of a tile with positions on the partitions: by unit, or as in the pages by sequence and kv head."""
    if sizes.paged:
        heads = sizes.units if sizes.kv_heads > 1 else 1
        return (PARTITIONS, sizes.units // heads, sizes.cached, heads, sizes.depth)
    return (PARTITIONS, sizes.units, sizes.cached, sizes.depth)


def load_keys(tile, k_cache, box, sizes):
    """Bring the cached keys of a group of units; a dtype other than the tile's is cast on the way."""
    units, source = units_in(box), k_cache[box[0] : box[1], box[2] : box[3]]
    for part in range(sizes.parts):
        start, stop = part * PARTITIONS, min(sizes.depth, (part + 1) * PARTITIONS)
        rows = source[:, :, start:stop, :].permute((2, 0, 1, 3))
        transfer(tile[0 : stop - start, part, 0:units, :], rows, STATIC)


def load_values(cached, v_cache, box, sizes, queue):
    """Bring the cached values of a group of units.

    Partition p of the first S // 128 chunks holds as many consecutive positions, which lie side by side in HBM.
    """
    units, source = units_in(box), v_cache[box[0] : box[1], box[2] : box[3]]
    whole = sizes.full * PARTITIONS
    if sizes.full > 0:
        rows = source[:, :, 0:whole, :].reshape_dim(2, (PARTITIONS, sizes.full)).permute((2, 0, 1, 3, 4))
        transfer(cached[:, 0:units, 0 : sizes.full, :], rows, queue)
    if sizes.rest > 0:
        rows = source[:, :, whole : sizes.capacity, :].permute((2, 0, 1, 3))
        transfer(cached[0 : sizes.rest, 0:units, sizes.full, :], rows, queue)


def load_new_values(new, v, box, sizes):
    """Bring the values of the new tokens of a group of units, from HBM or from rows in SBUF: [new token, unit, D]."""
    if v.buffer != nl.sbuf:
        rows = v.reshape((sizes.sequences, sizes.new, sizes.kv_heads, sizes.depth))
        rows = rows[box[0] : box[1], :, box[2] : box[3], :].permute((1, 0, 2, 3))
        transfer(new[:, 0 : units_in(box), :], rows, SCALAR)
        return
    left, right = box[2] * sizes.depth, box[3] * sizes.depth
    together = box[1] - box[0] if sizes.new == 1 else 1
    heads = box[3] - box[2]
    for sequence in range(box[0], box[1], together):
        first, unit = sequence * sizes.new, (sequence - box[0]) * heads
        target = new[:, unit : unit + together * heads, :]
        rows = v[first : first + together * sizes.new, left:right]
        transfer(target, rows, SCALAR)


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


def new_value_rows(v, heights, sizes):
    """The new tokens' values as rows (token, kv head): tiles [height, D]."""
    source = v.reshape((sizes.tokens, sizes.kv_heads, sizes.depth))
    result = []
    first = 0
    for height in heights:
        tile = nl.ndarray((height, sizes.depth), dtype=v.dtype, buffer=nl.sbuf)
        last = first + height // sizes.kv_heads
        transfer(tile, source[first:last], SCALAR)
        result.append(tile)
        first = last
    return result


def scatter(cache, row, step, tiles, columns, sizes, divided):
    """Write rows (token, kv head) to a cache as rows of `row` elements: from where a column says, `step` apart.

    All rows of a tile take one DMA: a second one with run-time addresses would wait for the first. divided: another
    core or rank writes some rows, whose place here lies behind the cache; the DMA skips these.
    """
    sequences, kv_heads, first, second = cache.shape
    flat = cache.reshape((sequences * kv_heads * first * second // row, row))
    for i in range(len(tiles)):
        pattern = [[row, columns[i].shape[0]], [step, sizes.depth]]
        target = flat.ap(pattern=pattern, vector_offset=columns[i])
        if divided:
            nisa.dma_copy(dst=target, src=tiles[i], oob_mode=nisa.oob_mode.skip)
        else:
            nisa.dma_copy(dst=target, src=tiles[i])
