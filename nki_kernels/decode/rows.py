"""Contiguous caches of a decode step whose rows are named at run time: which one holds a sequence.

The caches [row, Hk, D, S] and [row, Hk, S, D] are loaded as those of sequences in order are, one sequence a DMA.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.dma import transfer
from nki_kernels.tiles import PARTITIONS


def load_row_numbers(cache_rows):
    """The rows of sequences [B, 1] in HBM as one row of SBUF, [1, B] int32."""
    sequences = cache_rows.shape[0]
    result = nl.ndarray((1, sequences), dtype=nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(dst=result, src=cache_rows.ap(pattern=[[0, 1], [1, sequences]]))
    return result


def load_keys_of_rows(tile, work, box):
    """Bring the cached keys of a group of units to a tile [D in part, part, unit, S]."""
    sizes, heads = work.sizes, box[3] - box[2]
    depth, capacity = work.k_cache.shape[2], work.k_cache.shape[3]
    first_head, first_slot = work.share.kv_heads[0] + box[2], work.share.slots[0]
    for sequence in range(box[0], box[1]):
        unit = (sequence - box[0]) * heads
        for part in range(sizes.parts):
            start, stop = part * PARTITIONS, min(depth, (part + 1) * PARTITIONS)
            source = work.k_cache.ap(
                pattern=[[capacity, stop - start], [depth * capacity, heads], [1, sizes.capacity]],
                offset=(first_head * depth + start) * capacity + first_slot,
                scalar_offset=work.row_numbers[0:1, sequence : sequence + 1],
                indirect_dim=0,
            )
            nisa.dma_copy(dst=tile[0 : stop - start, part, unit : unit + heads, :], src=source)


def load_values_of_rows(cached, work, box, queue):
    """Bring the cached values of a group of units to a tile [128, unit, chunk, D], laid out as `load_values` does."""
    sizes, heads = work.sizes, box[3] - box[2]
    whole = sizes.full * PARTITIONS
    pieces = []
    if sizes.full > 0:
        pieces.append((0, PARTITIONS, sizes.full, 0))
    if sizes.rest > 0:
        pieces.append((whole, sizes.rest, 1, sizes.full))
    for sequence in range(box[0], box[1]):
        unit = (sequence - box[0]) * heads
        for slot, height, count, chunk in pieces:
            target = cached[0:height, unit : unit + heads, chunk : chunk + count, :]
            source = values_of_row(work, sequence, box[2], heads, slot, height, count)
            transfer(target, source, queue)


def values_of_row(work, sequence, head, heads, slot, height, count):
    """Values [partition, head, chunk, D] of a sequence, from a slot and a head of the share on: `count` slots side by
    side for each of `height` partitions.
    """
    capacity, depth = work.v_cache.shape[2], work.v_cache.shape[3]
    first_head, first_slot = work.share.kv_heads[0] + head, work.share.slots[0] + slot
    return work.v_cache.ap(
        pattern=[[count * depth, height], [capacity * depth, heads], [depth, count], [1, depth]],
        offset=(first_head * capacity + first_slot) * depth,
        scalar_offset=work.row_numbers[0:1, sequence : sequence + 1],
        indirect_dim=0,
    )
