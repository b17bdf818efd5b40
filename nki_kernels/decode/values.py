"""Values of decode attention in SBUF: loads of the new tokens' values, and zeros for cached values that no token sees.

`decode.attend`, `decode.group_loads` and `decode.pipeline` call these functions. A *unit* is one kv head of one
sequence; a *chunk* is 128 keys.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.cache.scales import count_bytes, load_scale_column, round_to_cache
from nki_kernels.decode.sizes import count_units
from nki_kernels.dma import SCALAR, transfer
from nki_kernels.tiles import PARTITIONS


def load_rounded_values(v, sizes, scales):
    """Return the values of up to 128 new tokens [T, Hk * D] in SBUF, rounded to the cache.

    All are rounded before the pipeline, in whose order the Vector engine would wait for the loads of later groups.

    Args:
        v: [T, Hk * D] in HBM.
        scales: `CacheScales`.
    """
    tile = nl.ndarray((sizes.tokens, sizes.kv_heads * sizes.depth), dtype=v.dtype, buffer=nl.sbuf)
    transfer(tile, v, SCALAR)
    inverses = scales.inverse_values[0 : sizes.tokens, :].expand_dim(2).broadcast(2, sizes.depth)
    round_to_cache(tile.reshape((sizes.tokens, sizes.kv_heads, sizes.depth)), inverses, scales.dtype)
    return tile


def load_new_values(new, v, box, sizes, scales):
    """Copy the new tokens' values of a box of units to `new` [new token, unit, D] in SBUF.

    Values from HBM are rounded to the cache if it has `scales`. Values in SBUF have been rounded by the caller. A
    unit is one kv head of one sequence.

    Args:
        v: [T, Hk * D], in HBM or SBUF.
        box: (first sequence, end, first kv head, end) of the units.
        scales: `CacheScales`, or None.
    """
    if v.buffer != nl.sbuf:
        rows = v.reshape((sizes.sequences, sizes.new, sizes.kv_heads, sizes.depth))
        rows = rows[box[0] : box[1], :, box[2] : box[3], :].permute((1, 0, 2, 3))
        target = new[:, 0 : count_units(box), :]
        transfer(target, rows, SCALAR)
        if scales is not None:
            target = target.reshape_dim(1, (box[1] - box[0], box[3] - box[2]))
            inverses = scales.inverse_values[0 : sizes.new, box[2] : box[3]].expand_dim(1).expand_dim(3)
            inverses = inverses.broadcast(1, box[1] - box[0]).broadcast(3, sizes.depth)
            round_to_cache(target, inverses, scales.dtype)
        return
    columns = v[:, box[2] * sizes.depth : box[3] * sizes.depth]
    together = box[1] - box[0] if sizes.new == 1 else 1
    heads = box[3] - box[2]
    for sequence in range(box[0], box[1], together):
        first, unit = sequence * sizes.new, (sequence - box[0]) * heads
        target = new[:, unit : unit + together * heads, :]
        transfer(target, columns[first : first + together * sizes.new], SCALAR)


def clear_values(tile, valid, first, last, sizes):
    """Write 0 over the elements of chunks `first` … `last` - 1 of `tile` whose keys are not valid, whatever they hold.

    The weights of these keys are 0, but the cache may hold NaN there, and 0 times NaN is NaN. A unit is one kv head
    of one sequence; a chunk is 128 positions.

    Args:
        tile: values, or keys as rows, [128, unit, chunk, D] in SBUF.
        valid: 1 for each valid key, [128, unit, chunk] uint8.
    """
    # Elements that share a 32-bit word count as one, which reduces what the Vector engine passes over.
    row_bytes = tile.shape[3] * count_bytes(tile.dtype)
    words = tile
    if row_bytes % 4 == 0:
        words = tile.view(nl.float32)
    elif row_bytes % 2 == 0:
        words = tile.view(nl.bfloat16)
    for start, stop, height in (
        (first, min(last, sizes.full), PARTITIONS),
        (max(first, sizes.full), last, sizes.remaining),
    ):
        if stop > start:
            units = valid.shape[1]
            seen = valid[0:height, :, start:stop].expand_dim(3).broadcast(3, words.shape[3])
            nisa.tensor_copy_predicated(
                dst=words[0:height, 0:units, start:stop, :], src=0.0, predicate=seen, reverse_pred=True
            )


def load_value_rows(v, heights, sizes, scales):
    """Return the new tokens' values as rows (token, kv head) of D elements: a list of SBUF tiles [height, D].

    They are rounded to the cache if it has `scales`.

    Args:
        v: [T, Hk * D] in HBM.
        heights: number of rows of each tile, in order; whole tokens each.
        scales: `CacheScales`, or None.
    """
    source = v.reshape((sizes.tokens, sizes.kv_heads, sizes.depth))
    result = []
    first = 0
    for height in heights:
        tile = nl.ndarray((height, sizes.depth), dtype=v.dtype, buffer=nl.sbuf)
        last = first + height // sizes.kv_heads
        transfer(tile, source[first:last], SCALAR)
        if scales is not None:
            column = load_scale_column(scales.inverse_values, last - first, 1)
            round_to_cache(tile, column, scales.dtype)
        result.append(tile)
        first = last
    return result
