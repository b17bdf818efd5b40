"""The output projection of a decode step: from heads in SBUF to hidden states in SBUF, the residual added.

The weights are the stationary operands, so that the product comes as `hidden` has its tiles: element p * C + i of each
row on partition p. Columns i, i + C, i + 2 C … of the weight make block i.
"""

from __future__ import annotations

import nki.collectives as ncc
import nki.isa as nisa
import nki.language as nl

from nki_kernels.tiles import BANK, PARTITIONS, blocks, in_block, ranges

AHEAD_SHARE = 6
"""The weight that is loaded while attention works takes at most 1 / AHEAD_SHARE of SBUF: 34 KiB on gen3."""


class OutputWeights(nl.NKIObject):
    """The rows of w_o [Q, H] by head, or by heads that were joined, [D in tile, tile, H], one after the other.

    tiles: those of the loaded heads, in the dtype of the weight.
    """

    def __init__(self, w_o, sizes):
        self.source, self.dtype = w_o, sizes.dtype
        self.heads = sizes.heads // sizes.joined
        self.depth = sizes.joined * sizes.depth
        self.tiles = []

    def load_first_heads(self):
        """Load as many heads as have room while attention works."""
        depth_ranges, hidden = ranges(0, self.depth), self.source.shape[1]
        head_bytes = len(depth_ranges) * hidden * (4 if self.source.dtype == nl.float32 else 2)
        most = nl.tile_size.sbuf_fmax_bytes // AHEAD_SHARE // head_bytes
        for _ in range(min(self.heads, max(1, most))):
            self.load_next_head()

    def load_next_head(self):
        """Load the rows of one more head."""
        depth_ranges = ranges(0, self.depth)
        shape = (min(self.depth, PARTITIONS), len(depth_ranges), self.source.shape[1])
        raw = nl.ndarray(shape, dtype=self.source.dtype, buffer=nl.sbuf)
        first = len(self.tiles) * self.depth
        for d in range(len(depth_ranges)):
            start, end = depth_ranges[d]
            nisa.dma_copy(dst=raw[0 : end - start, d, :], src=self.source[first + start : first + end, :])
        self.tiles.append(raw)

    def provide_head_rows(self, head):
        """Return the rows of a head in the dtype of the product; they are loaded first if they are not yet."""
        if head >= len(self.tiles):
            self.load_next_head()
        raw = self.tiles[head]
        if raw.dtype == self.dtype:
            return raw
        depth_ranges = ranges(0, self.depth)
        result = nl.ndarray(raw.shape, dtype=self.dtype, buffer=nl.sbuf)
        for d in range(len(depth_ranges)):
            used = depth_ranges[d][1] - depth_ranges[d][0]
            nisa.tensor_copy(dst=result[0:used, d, :], src=raw[0:used, d, :])
        return result


def add_output(tile, outputs, weights, replica_group):
    """Return hidden states plus the sum over ranks of outputs [D in tile, tile, token, head] times the weights."""
    hidden = weights.source.shape[1]
    sums = allocate_output_sums(tile, hidden)
    depth_ranges = ranges(0, weights.depth)
    heads = outputs.shape[3]
    # Heads are the outer loop, so the products of one run while the weights of later ones are loaded.
    for head in range(heads):
        rows = weights.provide_head_rows(head)
        for d in range(len(depth_ranges)):
            used = depth_ranges[d][1] - depth_ranges[d][0]
            for bank, first in sums:
                for i in range(bank.shape[1]):
                    block = first + i
                    nisa.nc_matmul(
                        dst=bank[0 : in_block(hidden, block, True), i, :],
                        stationary=rows[0:used, d, block : hidden : blocks(hidden)],
                        moving=outputs[0:used, d, :, head],
                        accumulate=head + d > 0,
                    )
    result = nl.ndarray(tile.shape, dtype=tile.dtype, buffer=nl.sbuf)
    added = None
    if replica_group is not None:
        added = sum_over_ranks(sums, tile, replica_group)
    for index in range(len(sums)):
        bank, first = sums[index]
        last = first + bank.shape[1]
        nisa.tensor_tensor(
            dst=result[:, :, first:last],
            data1=bank.permute((0, 2, 1)) if added is None else added[:, :, first:last],
            data2=tile[:, :, first:last],
            op=nl.add,
        )
    return result


def allocate_output_sums(tile, hidden):
    """Return PSUM tiles [partition, block, row] with their first block, as many blocks as a bank holds in each.

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


def sum_over_ranks(sums, tile, replica_group):
    """Return the sums of all ranks [partition, row, block], rounded before and after to the hidden states' dtype."""
    partial = nl.ndarray(tile.shape, dtype=tile.dtype, buffer=nl.sbuf)
    total = nl.ndarray(tile.shape, dtype=tile.dtype, buffer=nl.sbuf)
    for index in range(len(sums)):
        bank, first = sums[index]
        target = partial[:, :, first : first + bank.shape[1]]
        # The Scalar and the Vector engine read alternate tiles, so that both evict at the same time.
        if index % 2 == 1:
            nisa.activation(dst=target, op=nl.copy, data=bank.permute((0, 2, 1)))
        else:
            nisa.tensor_copy(dst=target, src=bank.permute((0, 2, 1)))
    flat = (tile.shape[0], tile.shape[1] * tile.shape[2])
    ncc.all_reduce(
        srcs=[partial.reshape(flat)], dsts=[total.reshape(flat)], replica_group=replica_group, op=nl.add
    )
    return total
