"""The two products of decode attention: queries times keys, and softmax weights times values, with the outputs' stores.

`decode.item_stages` calls them. Keys and values are the stationary operands, 128 positions at once, and the few
queries move: the Tensor engine takes the least time that a matmul has for each chunk.

A *unit* is one kv head of one sequence. A *box* of units is (first sequence, end, first kv head, end). A *chunk* is
128 keys: of S cached positions, partition p of chunk c has position p * (S // 128) + c. What remains of S is a chunk
of its own, and the new keys are the last chunk.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.decode.sizes import count_units, locate_unit
from nki_kernels.dma import SCALAR, transfer
from nki_kernels.tiles import PARTITIONS


class OutputBlock(nl.NKIObject):
    """Accumulators for the queries of a box of units: products in PSUM and sums of weights in SBUF, both float32.

    product: weighted values [D in tile, tile, unit, new token, head]. sums: weights added up over the chunks, one
    number for each partition, [128, unit, new token, head].
    """

    def __init__(self, box, sizes):
        self.box = box
        units, height = count_units(box), min(PARTITIONS, sizes.depth)
        shape = (height, sizes.depth_tiles, units, sizes.new, sizes.share)
        self.product = nl.ndarray(shape, dtype=nl.float32, buffer=nl.psum)
        shape = (PARTITIONS, units, sizes.new, sizes.share)
        self.sums = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)


def score(rows, keys, box, query_box, sizes):
    """Return unscaled scores q . k of a box of units, [128 keys, unit, chunk, query] float32 in PSUM, for some queries.

    The last chunk has the new keys; it is not written if the caches hold them. In that chunk, and in the one for what
    remains of the capacity, only as many partitions are written as there are keys. A unit is one kv head of one
    sequence.

    Args:
        rows: `TokenRows`.
        keys: cached keys [D in tile, tile, unit, S] in SBUF.
        box: (first sequence, end, first kv head, end) of the units.
        query_box: (first new token, end, first query head of a kv head, end) of the queries.
    """
    row, row_end, member, member_end = query_box
    count = (row_end - row) * (member_end - member)
    shape = (PARTITIONS, sizes.units, sizes.chunks, sizes.width)
    result = nl.ndarray(shape, dtype=nl.float32, buffer=nl.psum)[:, 0 : count_units(box), :, 0:count]
    full = sizes.full * PARTITIONS
    for unit in range(count_units(box)):
        sequence, kv_head = locate_unit(box, unit)
        token, head = sequence * sizes.new, kv_head * sizes.share
        for d in range(sizes.depth_tiles):
            height = min(PARTITIONS, sizes.depth - d * PARTITIONS)
            asking = rows.queries[
                0:height, d, token + row : token + row_end, head + member : head + member_end
            ]
            stationary = []
            for chunk in range(sizes.full):
                # The stride puts position p * (S // 128) + chunk on partition p, where the rows of values have it.
                stationary.append(keys[0:height, d, unit, chunk : full : sizes.full])
            if sizes.remaining > 0:
                stationary.append(keys[0:height, d, unit, full : sizes.capacity])
            if not sizes.stored:
                stationary.append(rows.keys[0:height, d, token : token + sizes.new, kv_head])
            for chunk in range(sizes.multiplied):
                nisa.nc_matmul(
                    dst=result[0 : stationary[chunk].shape[1], unit, chunk, :],
                    stationary=stationary[chunk],
                    moving=asking,
                    accumulate=d > 0,
                )
    return result


def add_weighted_values(product, cached, new, weights, chunks, sizes):
    """Add the values of chunks `chunks[0]` … `chunks[1]` - 1, times their weights, to `product`; chunk 0 overwrites it.

    A unit is one kv head of one sequence; a chunk is 128 positions.

    Args:
        product: [D in tile, tile, unit, new token, head] float32 in PSUM.
        cached: cached values [128, unit, chunk, D] in SBUF.
        new: values of the new tokens [new token, unit, D] in SBUF, or None if the caches hold them.
        weights: [128, unit, chunk, query] in SBUF.
        chunks: (first, end).
    """
    for unit in range(weights.shape[1]):
        for d in range(sizes.depth_tiles):
            start, stop = d * PARTITIONS, min(sizes.depth, (d + 1) * PARTITIONS)
            for chunk in range(chunks[0], chunks[1]):
                height = PARTITIONS if chunk < sizes.full else sizes.remaining
                if chunk < sizes.cached:
                    stationary = cached[0:height, unit, chunk, start:stop]
                else:
                    stationary = new[:, unit, start:stop]
                nisa.nc_matmul(
                    dst=product[0 : stop - start, d, unit, :, :],
                    stationary=stationary,
                    moving=weights[0 : stationary.shape[0], unit, chunk, :],
                    accumulate=chunk > 0,
                )


def invert_sums(block, ones):
    """Return 1 / sum of weights of each query of a block, as a column [query, 1] float32 in SBUF.

    Queries are ordered by unit, new token and head. A unit is one kv head of one sequence.

    Args:
        block: an `OutputBlock` with all of its keys.
        ones: [128, 128] float32 of ones in SBUF.
    """
    total = sum_weights(block, ones)
    inverse = nl.ndarray(total.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.reciprocal(dst=inverse, data=total)
    return inverse


def sum_weights(block, ones):
    """Return the sum of weights of each query of a block, as a column [query, 1] float32 in PSUM.

    Adds up `block.sums` over the partitions. Queries are ordered by unit, new token and head. A unit is one kv head
    of one sequence.

    Args:
        ones: [128, 128] float32 of ones in SBUF.
    """
    rows = block.sums.shape[1] * block.sums.shape[2] * block.sums.shape[3]
    total = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.psum)
    # The sums are the stationary operand, so the totals have queries on the partitions, as `store_divided` takes them.
    nisa.nc_matmul(dst=total, stationary=block.sums.reshape((PARTITIONS, rows)), moving=ones[:, 0:1])
    return total


def invert_sums_everywhere(block, ones):
    """Return 1 / sum of weights of each query of a block, the same on all partitions.

    The result is [128, unit, new token, head] float32 in SBUF. A unit is one kv head of one sequence.

    Args:
        ones: [128, 128] float32 of ones in SBUF.
    """
    total = nl.ndarray(block.sums.shape, dtype=nl.float32, buffer=nl.psum)
    # Stationary ones repeat each total on all partitions, because D lies there in outputs that stay in SBUF.
    nisa.nc_matmul(dst=total, stationary=ones, moving=block.sums)
    inverse = nl.ndarray(block.sums.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.reciprocal(dst=inverse, data=total)
    return inverse


def store_divided(block, inverse, o, sizes):
    """Multiply a block's weighted values by `inverse`, and write these outputs to the block's rows of `o` in HBM.

    Args:
        block: an `OutputBlock` with all of its keys.
        inverse: 1 / sum of weights, [query, 1] float32 in SBUF.
        o: [T, Hq * D] in HBM.
    """
    box = block.box
    rows = count_units(box) * sizes.queries
    result = nl.ndarray((rows, sizes.depth), dtype=o.dtype, buffer=nl.sbuf)
    for d in range(sizes.depth_tiles):
        bank, start, stop = transpose_product(block.product, d, rows, sizes)
        nisa.tensor_scalar(dst=result[:, start:stop], data=bank, op0=nl.multiply, operand0=inverse)
    store(result, o, box, sizes)


def write_divided(block, inverse, outputs, sizes):
    """Multiply a block's weighted values by `inverse`, and write these outputs to their places in `outputs` in SBUF.

    A unit is one kv head of one sequence.

    Args:
        block: an `OutputBlock` with all of its keys.
        inverse: 1 / sum of weights, [128, unit, new token, head] float32 in SBUF.
        outputs: [D in tile, tile, token, head] in SBUF, as `create_output_tile` of `decode.block` lays it out;
            `sizes.joined` neighbouring heads share the partitions.
    """
    box = block.box
    shape = (sizes.sequences, sizes.new, sizes.kv_heads, sizes.share // sizes.joined)
    counts = (box[1] - box[0], box[3] - box[2], sizes.new, sizes.share)
    for offset in range(sizes.joined):
        for d in range(sizes.depth_tiles):
            start = offset * sizes.depth
            height = min(PARTITIONS, sizes.depth - d * PARTITIONS)
            target = outputs[start : start + height, d, :, :].reshape((height,) + shape)
            target = target[:, box[0] : box[1], :, box[2] : box[3], :].permute((0, 1, 3, 2, 4))
            products = block.product[0:height, d, :, :, :].reshape((height,) + counts)
            factor = inverse[0:height, :, :, :].reshape((height,) + counts)
            nisa.tensor_tensor(
                dst=target,
                data1=products[:, :, :, :, offset : sizes.share : sizes.joined],
                data2=factor[:, :, :, :, offset : sizes.share : sizes.joined],
                op=nl.multiply,
            )


def transpose_product(product, d, rows, sizes):
    """Return tile `d` of a product with queries on the partitions, float32 in PSUM, and the range of D that it has.

    Three results: the tile [rows, up to 128], the first element of D in it, and the end. SBUF gets a copy in between.
    A unit is one kv head of one sequence.

    Args:
        product: [D in tile, tile, unit, new token, head] float32 in PSUM.
        d: number of the tile of 128 elements of D.
        rows: number of queries, unit * new token * head.
    """
    start, stop = d * PARTITIONS, min(sizes.depth, (d + 1) * PARTITIONS)
    columns = nl.ndarray((stop - start, rows), dtype=nl.float32, buffer=nl.sbuf)
    # A transpose of the Tensor engine reads SBUF only, so the product leaves PSUM first.
    nisa.tensor_copy(dst=columns, src=product[0 : stop - start, d, :, :, :])
    bank = nl.ndarray((rows, stop - start), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_transpose(dst=bank, data=columns)
    return bank, start, stop


def store(result, o, box, sizes):
    """Write outputs of a box, rows (unit, new token, head) of D elements in SBUF, to `o` [T, Hq * D] in HBM.

    With one new token of each sequence one DMA writes all rows, else one for each sequence. A unit is one kv head of
    one sequence.

    Args:
        result: [row, D] in SBUF.
        box: (first sequence, end, first kv head, end) of the units.
    """
    target = o.reshape((sizes.sequences, sizes.new, sizes.kv_heads, sizes.share, sizes.depth))
    if sizes.new == 1:
        target = target[box[0] : box[1], 0, box[2] : box[3]]
        transfer(target, result, SCALAR)
        return
    height = (box[3] - box[2]) * sizes.queries
    for sequence in range(box[0], box[1]):
        first = (sequence - box[0]) * height
        transfer(
            target[sequence, :, box[2] : box[3], :, :].permute((1, 0, 2, 3)),
            result[first : first + height, :],
            SCALAR,
        )
