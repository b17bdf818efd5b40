"""The two products of decode attention: scores of a group of units, and its weights times the values.

Keys and values are the stationary operands, 128 positions at once, and the few queries move: the Tensor engine takes
the least time that a matmul has for each chunk.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.decode.sizes import count_units, locate_unit
from nki_kernels.dma import SCALAR, transfer
from nki_kernels.tiles import PARTITIONS


class OutputBlock(nl.NKIObject):
    """What a block of units adds up: products [D in tile, tile, unit, new token, head] @ PSUM, and sums of weights."""

    def __init__(self, box, sizes):
        self.box = box
        units, height = count_units(box), min(PARTITIONS, sizes.depth)
        shape = (height, sizes.depth_tiles, units, sizes.new, sizes.share)
        self.product = nl.ndarray(shape, dtype=nl.float32, buffer=nl.psum)
        shape = (PARTITIONS, units, sizes.new, sizes.share)
        self.sums = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)


def score(rows, keys, box, query_box, sizes):
    """Return scores of a group of units [128 positions, unit, chunk, query] @ PSUM, for some of its queries.

    rows: see `TokenRows`. keys: [D in tile, tile, unit, S]. The last chunk is that of the new keys, not written where
    the caches hold them. Of it, and of a chunk for what remains of the capacity, the first partitions are written only.
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
    """Add values of chunks first … last of a group of units, weighted, for some of its queries.

    product: [D in tile, tile, unit, new token, head]. cached: values [128, unit, chunk, D]. new: values [new token,
    unit, D] or None. weights: [128, unit, chunk, query].
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
    """Return 1 / the sum of each query of a block over the partitions: a column [query, 1]."""
    total = sum_weights(block, ones)
    inverse = nl.ndarray(total.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.reciprocal(dst=inverse, data=total)
    return inverse


def sum_weights(block, ones):
    """Return the sum of each query of a block over the partitions: [query, 1] @ PSUM."""
    rows = block.sums.shape[1] * block.sums.shape[2] * block.sums.shape[3]
    total = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.psum)
    # The sums are the stationary operand, so the totals come with queries on the partitions, as `finish` has them.
    nisa.nc_matmul(dst=total, stationary=block.sums.reshape((PARTITIONS, rows)), moving=ones[:, 0:1])
    return total


def invert_sums_everywhere(block, ones):
    """Return 1 / the sum of each query of a block, on all partitions: [128, unit, new token, head]."""
    total = nl.ndarray(block.sums.shape, dtype=nl.float32, buffer=nl.psum)
    # Stationary ones repeat each total on all partitions, because D lies there in outputs that stay in SBUF.
    nisa.nc_matmul(dst=total, stationary=ones, moving=block.sums)
    inverse = nl.ndarray(block.sums.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.reciprocal(dst=inverse, data=total)
    return inverse


def store_divided(block, inverse, o, sizes):
    """Divide a block by its sums, and store it with queries on the partitions."""
    box = block.box
    rows = count_units(box) * sizes.queries
    result = nl.ndarray((rows, sizes.depth), dtype=o.dtype, buffer=nl.sbuf)
    for d in range(sizes.depth_tiles):
        bank, start, stop = transpose_product(block.product, d, rows, sizes)
        nisa.tensor_scalar(dst=result[:, start:stop], data=bank, op0=nl.multiply, operand0=inverse)
    store(result, o, box, sizes)


def write_divided(block, inverse, outputs, sizes):
    """Divide a block by its sums into outputs [D in tile, tile, token, head] in SBUF.

    `sizes.joined` neighbouring heads lie beside each other on the partitions.
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
    """Return tile d of a product with queries on the partitions @ PSUM, and its first and last element of D."""
    start, stop = d * PARTITIONS, min(sizes.depth, (d + 1) * PARTITIONS)
    columns = nl.ndarray((stop - start, rows), dtype=nl.float32, buffer=nl.sbuf)
    # A transpose of the Tensor engine reads SBUF only, so the product leaves PSUM first.
    nisa.tensor_copy(dst=columns, src=product[0 : stop - start, d, :, :, :])
    bank = nl.ndarray((rows, stop - start), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_transpose(dst=bank, data=columns)
    return bank, start, stop


def store(result, o, box, sizes):
    """Write rows (unit, new token, head) of a block to o; with one new token they lie there in this order."""
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
