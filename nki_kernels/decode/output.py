"""The output projection of a decode step: from heads in SBUF to hidden states in SBUF, the residual added.

The weights are the stationary operands, so that the product comes as `hidden` has its tiles: element p * C + i of each
row on partition p. Columns i, i + C, i + 2 C … of the weight make block i.
"""

from __future__ import annotations

import nki.collectives as ncc
import nki.isa as nisa
import nki.language as nl

from nki_kernels.projection.rows import in_block
from nki_kernels.tiles import BANK, PARTITIONS, blocks, ranges

AHEAD_SHARE = 6
"""The weight that is loaded while attention works takes at most one of so many parts of SBUF: 34 KiB on gen3."""


class OutputWeights(nl.NKIObject):
    """The rows of w_o [Q, H] by head, or by heads that were joined, [D in part, part, H]; some are loaded at once."""

    def __init__(self, w_o, sizes):
        self.source = w_o
        self.depth = sizes.joined * sizes.depth
        self.dtype = sizes.dtype
        self.tiles = []
        bytes_each = sizes.parts * w_o.shape[1] * (4 if w_o.dtype == nl.float32 else 2)
        most = nl.tile_size.sbuf_fmax_bytes // AHEAD_SHARE // bytes_each
        for _ in range(min(sizes.heads // sizes.joined, max(1, most))):
            load_next_head(self)


def load_next_head(weights):
    """Load the rows of one more head."""
    pieces = ranges(0, weights.depth)
    hidden = weights.source.shape[1]
    shape = (min(weights.depth, PARTITIONS), len(pieces), hidden)
    raw = nl.ndarray(shape, dtype=weights.source.dtype, buffer=nl.sbuf)
    first = len(weights.tiles) * weights.depth
    for part in range(len(pieces)):
        start, end = pieces[part]
        nisa.dma_copy(dst=raw[0 : end - start, part, :], src=weights.source[first + start : first + end, :])
    weights.tiles.append(raw)


def cast_head(weights, head):
    """The rows of a head in the dtype of the product."""
    raw = weights.tiles[head]
    if raw.dtype == weights.dtype:
        return raw
    pieces = ranges(0, weights.depth)
    result = nl.ndarray(raw.shape, dtype=weights.dtype, buffer=nl.sbuf)
    for part in range(len(pieces)):
        used = pieces[part][1] - pieces[part][0]
        nisa.tensor_copy(dst=result[0:used, part, :], src=raw[0:used, part, :])
    return result


def add_output(tile, outputs, weights, replica_group):
    """Hidden states plus the sum over ranks of outputs [D in part, part, token, head] times the weights."""
    hidden = weights.source.shape[1]
    sums = output_sums(tile, hidden)
    pieces = ranges(0, weights.depth)
    heads = outputs.shape[3]
    for head in range(heads):
        if head >= len(weights.tiles):
            load_next_head(weights)
        rows = cast_head(weights, head)
        for part in range(len(pieces)):
            used = pieces[part][1] - pieces[part][0]
            for bank, first in sums:
                for i in range(bank.shape[1]):
                    block = first + i
                    nisa.nc_matmul(
                        dst=bank[0 : in_block(hidden, block, True), i, :],
                        stationary=rows[0:used, part, block : hidden : blocks(hidden)],
                        moving=outputs[0:used, part, :, head],
                        accumulate=head + part > 0,
                    )
    result = nl.ndarray(tile.shape, dtype=tile.dtype, buffer=nl.sbuf)
    added = None
    if replica_group is not None:
        added = summed(sums, tile, replica_group)
    for number in range(len(sums)):
        bank, first = sums[number]
        last = first + bank.shape[1]
        nisa.tensor_tensor(
            dst=result[:, :, first:last],
            data1=bank.permute((0, 2, 1)) if added is None else added[:, :, first:last],
            data2=tile[:, :, first:last],
            op=nl.add,
        )
    return result


def output_sums(tile, hidden):
    """PSUM tiles [partition, block, row] with their first block, as many blocks as a bank holds in each.

    Where the last partition lacks elements they begin with zeros: no product writes there.
    """
    height, rows, count = tile.shape
    sums = []
    for first, last in ranges(0, count, min(BANK // rows, max(1, (count + 1) // 2))):
        bank = nl.ndarray((height, last - first, rows), dtype=nl.float32, buffer=nl.psum)
        if in_block(hidden, count - 1, True) < height:
            nisa.memset(dst=bank, value=0.0)
        sums.append((bank, first))
    return sums


def summed(sums, tile, replica_group):
    """The sums of all ranks, rounded to the dtype of the hidden states before and after: [partition, row, block]."""
    partial = nl.ndarray(tile.shape, dtype=tile.dtype, buffer=nl.sbuf)
    total = nl.ndarray(tile.shape, dtype=tile.dtype, buffer=nl.sbuf)
    for number in range(len(sums)):
        bank, first = sums[number]
        target = partial[:, :, first : first + bank.shape[1]]
        if number % 2 == 1:
            nisa.activation(dst=target, op=nl.copy, data=bank.permute((0, 2, 1)))
        else:
            nisa.tensor_copy(dst=target, src=bank.permute((0, 2, 1)))
    flat = (tile.shape[0], tile.shape[1] * tile.shape[2])
    ncc.all_reduce(
        srcs=[partial.reshape(flat)], dsts=[total.reshape(flat)], replica_group=replica_group, op=nl.add
    )
    return total
