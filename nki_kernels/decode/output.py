"""The output projection of a decode step: from heads in SBUF to hidden states in SBUF, the residual added.

`decode.block` calls it. The weights are the stationary operands, so that the product has the layout of
`decode.hidden`: with C = ceil(H / 128), element p * C + i of each row on partition p. Columns i, i + C, i + 2 C … of
the weight make block i. Scales of the weight's columns, if any, lie like one row of hidden states.
"""

from __future__ import annotations

import nki.collectives as ncc
import nki.isa as nisa
import nki.language as nl

from nki_kernels.dma import STATIC
from nki_kernels.nibbles import RUN_ROWS, load_packed, unpack_into, view_paired_runs
from nki_kernels.norms.blocks import load_column
from nki_kernels.projection.row_groups import item_bytes
from nki_kernels.projection.zero_points import fill_minus_ones, load_zero_points, negate_sums
from nki_kernels.tiles import BANK, PARTITIONS, blocks, count_block_partitions, ranges
from nki_kernels.weights import choose_operand_dtype

PIECES_DURING_PRODUCT, PIECES_DURING_SUM = 2, 8
"""Most pieces of weights of 4 bits that are unpacked while w_o is multiplied, and while ranks are summed."""

AHEAD_SHARE = 6
"""The weight that is loaded while attention works takes at most 1 / AHEAD_SHARE of SBUF: 34 KiB on gen3."""


class OutputWeights(nl.NKIObject):
    """The rows of w_o [Q, H] in SBUF, one tile [D in tile, tile, H] for each head, loaded in order of the heads.

    If `sizes.joined` neighbouring heads share the partitions of attention's outputs, a tile has the rows of all of
    them. `tiles` has the tiles that are loaded so far, in the dtype of the weight's elements. `scales`: [partition, C]
    float32 in SBUF, those of the columns in the layout of a row of hidden states; None without scales. They are loaded
    when the object is made.

    Of a weight of 4 bits a tile has the rows of a run, [k in block, block, H], which are two heads of 128 elements.
    `packed` has the bytes of loaded tiles that are not unpacked yet. `zero_points`: as `load_zero_points` returns them.

    Args:
        w_o: `WeightMatrix` [Q, H].
        paired: whether hidden states lie in paired runs.
    """

    def __init__(self, w_o, sizes, paired):
        self.source, self.dtype = w_o.elements, choose_operand_dtype([w_o], sizes.dtype)
        self.scales = None if w_o.scales is None else load_column(w_o.scales, 0.0, True, paired)
        self.weight, self.paired, self.packed = w_o, paired, []
        self.zero_points = None if w_o.nibbles is None else load_zero_points([w_o], self.dtype)
        self.heads = sizes.heads // sizes.joined
        self.depth = sizes.joined * sizes.depth
        self.tiles = []

    def load_first_heads(self):
        """Begin to load the first heads that fit into 1 / AHEAD_SHARE of SBUF, at least one, while attention works.

        Do nothing if that is done.
        """
        if len(self.tiles) + len(self.packed) > 0:
            return
        depth_ranges, hidden = ranges(0, self.depth), self.source.shape[1]
        head_bytes = len(depth_ranges) * hidden * item_bytes(self.source.dtype)
        most = nl.tile_size.sbuf_fmax_bytes // AHEAD_SHARE // head_bytes
        for _ in range(min(self.heads, max(1, most))):
            self.load_next_head()

    def load_next_head(self):
        """Load the rows of the next head, or of the next `sizes.joined` heads, and append their tile to `tiles`.

        Of a weight of 4 bits load the next run, if there is one, and append it to `packed`.
        """
        if self.weight.nibbles is not None:
            self.load_next_run()
            return
        depth_ranges = ranges(0, self.depth)
        shape = (min(self.depth, PARTITIONS), len(depth_ranges), self.source.shape[1])
        raw = nl.ndarray(shape, dtype=self.source.dtype, buffer=nl.sbuf)
        first = len(self.tiles) * self.depth
        for d in range(len(depth_ranges)):
            start, end = depth_ranges[d]
            nisa.dma_copy(dst=raw[0 : end - start, d, :], src=self.source[first + start : first + end, :])
        self.tiles.append(raw)

    def load_next_run(self):
        """Load the bytes of the next run of a weight of 4 bits, if there is one, and append them to `packed`."""
        rows = self.weight.count_rows()
        first = (len(self.tiles) + len(self.packed)) * RUN_ROWS
        if first < rows:
            run = self.weight.submatrix((first, min(rows, first + RUN_ROWS)), (0, self.source.shape[1]))
            self.packed.append(load_packed(run.elements, run.count_rows(), STATIC))

    def unpack(self):
        """Convert the runs of `packed` to new tiles of `tiles`, on the Vector engine."""
        for packed in self.packed:
            depth = min(RUN_ROWS, self.weight.count_rows() - len(self.tiles) * RUN_ROWS)
            shape = (min(depth, PARTITIONS), blocks(depth), self.source.shape[1])
            tile = nl.ndarray(shape, dtype=self.dtype, buffer=nl.sbuf)
            unpack_into(tile, packed, depth)
            self.tiles.append(tile)
        self.packed = []

    def provide_head_rows(self, head):
        """Return the weight rows of one head in SBUF, [D in tile, tile, H], in the dtype in which products take them.

        If the head is the next one to be loaded, it is loaded first. Heads must be asked for in order.

        Args:
            head: index in `tiles`, which counts sets of `sizes.joined` heads.
        """
        if self.weight.nibbles is not None:
            heads_per_run = RUN_ROWS // PARTITIONS
            run = head // heads_per_run
            if run >= len(self.tiles):
                if len(self.packed) == 0:
                    self.load_next_run()
                self.unpack()
            return self.tiles[run][:, head % heads_per_run : head % heads_per_run + 1, :]
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


def add_output(tile, outputs, weights, replica_group, following):
    """Return a new SBUF tile of hidden states: `tile` plus the sum over ranks of `outputs` times the weights.

    Args:
        tile: the residual, [partition, row, C] in SBUF as `decode.hidden` lays it out.
        outputs: attention's outputs, [D in tile, tile, token, head] in SBUF.
        weights: `OutputWeights`; heads that are not loaded yet are loaded here.
        replica_group: ranks whose products are summed, or None.
        following: `FeedForwardOperands` of the block that follows, or None. With ranks, its first weights begin to be
            loaded before the sum over ranks, which would hold up their queue.
    """
    hidden = weights.source.shape[1]
    sums = allocate_output_sums(tile, hidden)
    negated_sums = None
    if weights.zero_points is not None:
        rows = outputs[:, 0, :, :].permute((0, 2, 1))
        negated_sums = negate_sums(rows, weights.weight.count_rows(), fill_minus_ones(rows.dtype))
    depth_ranges = ranges(0, weights.depth)
    heads = outputs.shape[3]
    # Heads are the outer loop, so the products of one run while the weights of later ones are loaded.
    for head in range(heads):
        rows = weights.provide_head_rows(head)
        for d in range(len(depth_ranges)):
            used = depth_ranges[d][1] - depth_ranges[d][0]
            add_output_block(
                sums, rows[0:used, d, :], outputs[0:used, d, :, head], head + d > 0, weights.paired
            )
    if negated_sums is not None:
        add_output_block(sums, weights.zero_points[:, 0, :], negated_sums, True, weights.paired)
    if following is not None and weights.paired:
        following.load_early_weights()
        if replica_group is None:
            following.unpack_early_weights(PIECES_DURING_PRODUCT)
    result = nl.ndarray(tile.shape, dtype=tile.dtype, buffer=nl.sbuf)
    added = None
    if replica_group is not None:
        if following is not None:
            following.load_early_weights()
        added = sum_over_ranks(sums, tile, weights.scales, replica_group)
        if following is not None:
            following.unpack_early_weights(PIECES_DURING_SUM)
            if weights.paired:
                following.load_down_scales()
    for index in range(len(sums)):
        bank, first = sums[index]
        last = first + bank.shape[1]
        source = bank.permute((0, 2, 1))
        if added is not None:
            source = added[:, :, first:last]
        elif weights.scales is not None:
            source = nl.ndarray(source.shape, dtype=nl.float32, buffer=nl.sbuf)
            multiply_by_columns(source, bank, weights.scales[:, first:last])
        nisa.tensor_tensor(
            dst=result[:, :, first:last],
            data1=source,
            data2=tile[:, :, first:last],
            op=nl.add,
        )
    return result


def add_output_block(sums, weights, outputs, accumulate, paired):
    """Add the product of one block of the contraction to the accumulators of hidden states; write unless `accumulate`.

    Args:
        sums: pairs of `allocate_output_sums`.
        weights: [partition, H] in SBUF.
        outputs: [partition, token] in SBUF.
        paired: whether hidden states lie in paired runs.
    """
    hidden = weights.shape[1]
    count = blocks(hidden)
    for bank, first in sums:
        for i in range(bank.shape[1]):
            block = first + i
            columns = weights[:, block:hidden:count]
            if paired:
                half = 2 * block // count
                columns = view_paired_runs(weights, half)[:, :, :, block - half * count // 2]
            nisa.nc_matmul(
                dst=bank[0 : count_block_partitions(hidden, block, True), i, :],
                stationary=columns,
                moving=outputs,
                accumulate=accumulate,
            )


def multiply_by_columns(dst, bank, scales):
    """Write accumulated sums times the scales of their columns to `dst` [partition, row, block] in SBUF.

    Args:
        bank: [partition, block, row] float32 in PSUM.
        scales: [partition, block] float32 in SBUF.
    """
    factors = scales.expand_dim(1).broadcast(1, bank.shape[2])
    nisa.tensor_tensor(dst=dst, data1=bank.permute((0, 2, 1)), data2=factors, op=nl.multiply)


def allocate_output_sums(tile, hidden):
    """Return accumulators for hidden states as pairs (PSUM tile [partition, block, row] float32, its first block).

    Blocks are those of `decode.hidden`: block i has element i of each partition. There are at least two tiles if
    there are two blocks. Where the last partition lacks elements, the tiles are zeroed, because no product writes
    there.

    Args:
        tile: a tile of hidden states [partition, row, C], for its shape.
        hidden: H.
    """
    height, rows, count = tile.shape
    sums = []
    for first, last in ranges(0, count, min(BANK // rows, max(1, (count + 1) // 2))):
        bank = nl.ndarray((height, last - first, rows), dtype=nl.float32, buffer=nl.psum)
        if count_block_partitions(hidden, count - 1, True) < height:
            nisa.memset(dst=bank, value=0.0)
        sums.append((bank, first))
    return sums


def sum_over_ranks(sums, tile, scales, replica_group):
    """Return the accumulated products summed over all ranks: a new SBUF tile [partition, row, block].

    They are multiplied by the scales of their columns, and rounded to the dtype of the hidden states before the
    all-reduce and after it.

    Args:
        sums: pairs of `allocate_output_sums`.
        tile: a tile of hidden states, for its shape and dtype.
        scales: [partition, C] float32 in SBUF, or None to multiply nothing.
    """
    partial = nl.ndarray(tile.shape, dtype=tile.dtype, buffer=nl.sbuf)
    total = nl.ndarray(tile.shape, dtype=tile.dtype, buffer=nl.sbuf)
    for index in range(len(sums)):
        bank, first = sums[index]
        target = partial[:, :, first : first + bank.shape[1]]
        # The Scalar and the Vector engine read alternate tiles, so that both evict at the same time.
        if scales is not None:
            multiply_by_columns(target, bank, scales[:, first : first + bank.shape[1]])
        elif index % 2 == 1:
            nisa.activation(dst=target, op=nl.copy, data=bank.permute((0, 2, 1)))
        else:
            nisa.tensor_copy(dst=target, src=bank.permute((0, 2, 1)))
    flat = (tile.shape[0], tile.shape[1] * tile.shape[2])
    ncc.all_reduce(
        srcs=[partial.reshape(flat)], dsts=[total.reshape(flat)], replica_group=replica_group, op=nl.add
    )
    return total
