"""Norm and rotation of heads with D on the partitions, where element d meets element d ± R/2 of another partition.

`decode.block` calls these functions for queries and keys that come from its projection. A product with a matrix of
-1, 0 and 1 brings each element to the partition of the other: exact, and for all heads and tokens at once.

A tile [D in tile, tile, …] has element d of a head on partition d % 128 of tile d // 128. The first R elements of a
head are rotated.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.decode.tokens import Segment, load_angles
from nki_kernels.dma import SCALAR, transfer
from nki_kernels.norms.norm import compute_inverse_root
from nki_kernels.tiles import BANK, PARTITIONS, filled, ranges


class Rotation(nl.NKIObject):
    """Operands of the rotation of the new tokens' heads in SBUF.

    cosines, sines: [D in tile, tile, token] float32, with 1 and 0 for elements from R on. turn: the matrix of
    `build_quarter_turn`.

    The tables are loaded when the object is made, by the tokens' row numbers `step.angle_rows`.
    """

    def __init__(self, step, sizes):
        depth, half = sizes.depth, step.cos.shape[1]
        angles = load_angles([Segment(0, 0, sizes.tokens, 1)], step)
        # With cosines of 1 and sines of 0 the elements from R on pass the same instructions and stay as they are.
        self.cosines = spread_table(angles[0], depth, 1.0)
        self.sines = spread_table(angles[1], depth, 0.0)
        self.turn = build_quarter_turn(depth, half, sizes.dtype)


def spread_table(angles, depth, beyond):
    """Return rows of angles [token, R/2] as [D in tile, tile, token] float32 in SBUF, for both halves of R.

    Elements from R on are `beyond`.

    Args:
        angles: cosines or sines of the tokens in SBUF.
        depth: D.
    """
    tokens, half = angles.shape
    rows = filled((tokens, depth), beyond)
    twice = angles.reshape((tokens, 1, half)).broadcast(1, 2)
    nisa.tensor_copy(dst=rows[:, 0 : 2 * half].reshape((tokens, 2, half)), src=twice)
    depth_ranges = ranges(0, depth)
    result = nl.ndarray((min(depth, PARTITIONS), len(depth_ranges), tokens), dtype=nl.float32, buffer=nl.sbuf)
    for d in range(len(depth_ranges)):
        start, end = depth_ranges[d]
        bank = nl.ndarray((end - start, tokens), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_transpose(dst=bank, data=rows[:, start:end])
        nisa.tensor_copy(dst=result[0 : end - start, d, :], src=bank)
    return result


def build_quarter_turn(depth, half, dtype):
    """Return the stationary matrix [k in tile, tile, m] in SBUF whose product with heads turns them by a quarter.

    Element m of the product is -head[m + R/2] for m < R/2, head[m - R/2] for R/2 <= m < R, and 0 from R on.

    Args:
        depth: D.
        half: R/2.
    """
    depth_ranges = ranges(0, depth)
    result = filled((min(depth, PARTITIONS), len(depth_ranges), depth), 0.0, dtype)
    for d in range(len(depth_ranges)):
        start, end = depth_ranges[d]
        for first, sign, distance in ((0, -1.0, half), (half, 1.0, 0)):
            signs = filled((end - start, half), sign, dtype)
            nisa.affine_select(
                dst=result[0 : end - start, d, first : first + half],
                pattern=[[-1, half]],
                channel_multiplier=1,
                offset=start - distance,
                on_true_tile=signs,
                on_false_value=0.0,
                cmp_op=nl.equal,
            )
    return result


def normalise_heads(result, heads, norm):
    """Write heads divided by their root mean squares, times the norm's weight, to `result` in SBUF.

    Args:
        result: [D in tile, tile, head, token], as `heads`.
        heads: [D in tile, tile, head, token] in SBUF.
        norm: a `Norm` whose weight [1, D] is in HBM and is loaded here.
    """
    height, number, count, tokens = heads.shape
    weight = norm.weight
    depth = weight.shape[1]
    depth_ranges = ranges(0, depth)
    ones = filled((height, PARTITIONS), 1.0)
    epsilons = filled((PARTITIONS, 1), norm.eps)
    for first, end in ranges(0, count, max(1, BANK // tokens)):
        shape = (PARTITIONS, end - first, tokens)
        squares = nl.ndarray(heads[:, :, first:end, :].shape, dtype=nl.float32, buffer=nl.sbuf)
        sums = nl.ndarray(shape, dtype=nl.float32, buffer=nl.psum)
        for d in range(number):
            used = depth_ranges[d][1] - depth_ranges[d][0]
            tile = heads[0:used, d, first:end, :]
            nisa.tensor_tensor(dst=squares[0:used, d, :, :], data1=tile, data2=tile, op=nl.multiply)
            # D lies on the partitions, so a product with ones adds the squares and repeats the sum on all of them.
            nisa.nc_matmul(
                dst=sums,
                stationary=ones[0:used, :],
                moving=squares[0:used, d, :, :],
                accumulate=d > 0,
            )
        scale = compute_inverse_root(sums, 1.0 / depth, epsilons)
        for d in range(number):
            start, stop = depth_ranges[d]
            column = nl.ndarray((stop - start, 1), dtype=weight.dtype, buffer=nl.sbuf)
            source = weight[:, start:stop].reshape((stop - start, 1))
            transfer(column, source, SCALAR)
            factor = nl.ndarray((stop - start, 1), dtype=nl.float32, buffer=nl.sbuf)
            nisa.tensor_copy(dst=factor, src=column)
            nisa.scalar_tensor_tensor(
                dst=result[0 : stop - start, d, first:end, :],
                data=heads[0 : stop - start, d, first:end, :],
                op0=nl.multiply,
                operand0=factor,
                op1=nl.multiply,
                operand1=scale[0 : stop - start, :, :],
            )


def rotate_heads(results, heads, rotation):
    """Write heads, rotated by their tokens' angles, to tiles [D in tile, tile, token, head] in SBUF.

    Args:
        results: tiles that divide the heads in order: the first tile takes as many heads as its last axis has, and so
            on.
        heads: [D in tile, tile, head, token] in SBUF.
        rotation: `Rotation`.
    """
    _, number, count, tokens = heads.shape
    depth = rotation.turn.shape[2]
    depth_ranges = ranges(0, depth)
    target = list_bounds(results)
    for first, end in ranges(0, count, max(1, BANK // tokens)):
        for d in range(number):
            start, stop = depth_ranges[d]
            used = stop - start
            shape = (used, end - first, tokens)
            turned = nl.ndarray(shape, dtype=nl.float32, buffer=nl.psum)
            for k in range(number):
                below = depth_ranges[k][1] - depth_ranges[k][0]
                nisa.nc_matmul(
                    dst=turned,
                    stationary=rotation.turn[0:below, k, start:stop],
                    moving=heads[0:below, k, first:end, :],
                    accumulate=k > 0,
                )
            tables = []
            for table in (rotation.cosines, rotation.sines):
                tables.append(table[0:used, d, :].reshape((used, 1, tokens)).broadcast(1, end - first))
            with_cos = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
            with_sin = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
            nisa.tensor_tensor(
                dst=with_cos, data1=heads[0:used, d, first:end, :], data2=tables[0], op=nl.multiply
            )
            nisa.tensor_tensor(dst=with_sin, data1=turned, data2=tables[1], op=nl.multiply)
            for tile, begin, last in target:
                left, right = max(first, begin), min(end, last)
                if left < right:
                    nisa.tensor_tensor(
                        dst=tile[0:used, d, :, left - begin : right - begin].permute((0, 2, 1)),
                        data1=with_cos[:, left - first : right - first, :],
                        data2=with_sin[:, left - first : right - first, :],
                        op=nl.add,
                    )


def copy_heads(results, heads, depth):
    """Copy heads [D in tile, tile, head, token] without rotation to tiles [D in tile, tile, token, head], all in SBUF.

    Args:
        results: tiles that divide the heads in order: the first tile takes as many heads as its last axis has, and so
            on.
        depth: D.
    """
    depth_ranges = ranges(0, depth)
    for tile, begin, last in list_bounds(results):
        for d in range(len(depth_ranges)):
            used = depth_ranges[d][1] - depth_ranges[d][0]
            target = tile[0:used, d, :, :].permute((0, 2, 1))
            nisa.tensor_copy(dst=target, src=heads[0:used, d, begin:last, :])


def list_bounds(results):
    """Return (tile, first head, end) for each tile [D in tile, tile, token, head], heads numbered through all tiles."""
    bounds = []
    first = 0
    for tile in results:
        bounds.append((tile, first, first + tile.shape[3]))
        first += tile.shape[3]
    return bounds
