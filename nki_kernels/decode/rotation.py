"""Norm and rotation of heads with D on the partitions, where element d meets element d ± R/2 of another partition.

A product with a matrix of -1, 0 and 1 brings it there: exact, and for all heads and tokens at once.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.decode.tokens import load_angles
from nki_kernels.dma import SCALAR, transfer
from nki_kernels.projection.rows import constant, inverse_root
from nki_kernels.tiles import BANK, PARTITIONS, ranges


class Rotation(nl.NKIObject):
    """Tables [D in part, part, token] of the new tokens' angles, and the matrix that turns heads a quarter."""

    def __init__(self, angle_rows, tables, sizes):
        depth, half = sizes.depth, tables[0].shape[1]
        angles = load_angles([(0, 0, sizes.tokens, 0)], (1,), angle_rows, tables)
        self.cosines = spread_table(angles[0], depth, 1.0)
        self.sines = spread_table(angles[1], depth, 0.0)
        self.turn = quarter_turn(depth, half, sizes.dtype)


def spread_table(angles, depth, rest):
    """Rows [token, R/2] as [D in part, part, token], twice; elements from R on are `rest`."""
    tokens, half = angles.shape
    rows = nl.ndarray((tokens, depth), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=rows, value=rest)
    twice = angles.reshape((tokens, 1, half)).broadcast(1, 2)
    nisa.tensor_copy(dst=rows[:, 0 : 2 * half].reshape((tokens, 2, half)), src=twice)
    pieces = ranges(0, depth)
    result = nl.ndarray((min(depth, PARTITIONS), len(pieces), tokens), dtype=nl.float32, buffer=nl.sbuf)
    for part in range(len(pieces)):
        start, end = pieces[part]
        bank = nl.ndarray((end - start, tokens), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_transpose(dst=bank, data=rows[:, start:end])
        nisa.tensor_copy(dst=result[0 : end - start, part, :], src=bank)
    return result


def quarter_turn(depth, half, dtype):
    """The matrix [k in part, part, m] by which element m becomes -k[m + R/2], k[m - R/2] or, from R on, 0."""
    pieces = ranges(0, depth)
    result = nl.ndarray((min(depth, PARTITIONS), len(pieces), depth), dtype=dtype, buffer=nl.sbuf)
    nisa.memset(dst=result, value=0.0)
    for part in range(len(pieces)):
        start, end = pieces[part]
        for first, sign, distance in ((0, -1.0, half), (half, 1.0, 0)):
            signs = nl.ndarray((end - start, half), dtype=dtype, buffer=nl.sbuf)
            nisa.memset(dst=signs, value=sign)
            nisa.affine_select(
                dst=result[0 : end - start, part, first : first + half],
                pattern=[[-1, half]],
                channel_multiplier=1,
                offset=start - distance,
                on_true_tile=signs,
                on_false_value=0.0,
                cmp_op=nl.equal,
            )
    return result


def normed_heads(result, heads, weight, eps):
    """Heads [D in part, part, head, token], each divided by its root mean square and multiplied by weight [1, D]."""
    height, number, count, tokens = heads.shape
    depth = weight.shape[1]
    pieces = ranges(0, depth)
    ones = nl.ndarray((height, PARTITIONS), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=ones, value=1.0)
    eps_column = constant(PARTITIONS, eps)
    for first, end in ranges(0, count, max(1, BANK // tokens)):
        shape = (PARTITIONS, end - first, tokens)
        squares = nl.ndarray(heads[:, :, first:end, :].shape, dtype=nl.float32, buffer=nl.sbuf)
        sums = nl.ndarray(shape, dtype=nl.float32, buffer=nl.psum)
        for part in range(number):
            used = pieces[part][1] - pieces[part][0]
            each = heads[0:used, part, first:end, :]
            nisa.tensor_tensor(dst=squares[0:used, part, :, :], data1=each, data2=each, op=nl.multiply)
            nisa.nc_matmul(
                dst=sums,
                stationary=ones[0:used, :],
                moving=squares[0:used, part, :, :],
                accumulate=part > 0,
            )
        scale = inverse_root(sums, 1.0 / depth, eps_column)
        for part in range(number):
            start, stop = pieces[part]
            column = nl.ndarray((stop - start, 1), dtype=weight.dtype, buffer=nl.sbuf)
            source = weight[:, start:stop].reshape((stop - start, 1))
            transfer(column, source, SCALAR)
            factor = nl.ndarray((stop - start, 1), dtype=nl.float32, buffer=nl.sbuf)
            nisa.tensor_copy(dst=factor, src=column)
            nisa.scalar_tensor_tensor(
                dst=result[0 : stop - start, part, first:end, :],
                data=heads[0 : stop - start, part, first:end, :],
                op0=nl.multiply,
                operand0=factor,
                op1=nl.multiply,
                operand1=scale[0 : stop - start, :, :],
            )


def rotated_heads(results, heads, rotation):
    """Turn heads [D in part, part, head, token] by the angles of their tokens, into [D in part, part, token, head].

    results: a tile for the first so many heads, one for the heads behind those, and so on.
    """
    _, number, count, tokens = heads.shape
    depth = rotation.turn.shape[2]
    pieces = ranges(0, depth)
    target = placed(results)
    for first, end in ranges(0, count, max(1, BANK // tokens)):
        for part in range(number):
            start, stop = pieces[part]
            used = stop - start
            shape = (used, end - first, tokens)
            turned = nl.ndarray(shape, dtype=nl.float32, buffer=nl.psum)
            for other in range(number):
                below = pieces[other][1] - pieces[other][0]
                nisa.nc_matmul(
                    dst=turned,
                    stationary=rotation.turn[0:below, other, start:stop],
                    moving=heads[0:below, other, first:end, :],
                    accumulate=other > 0,
                )
            tables = []
            for table in (rotation.cosines, rotation.sines):
                tables.append(table[0:used, part, :].reshape((used, 1, tokens)).broadcast(1, end - first))
            with_cos = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
            with_sin = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
            own = heads[0:used, part, first:end, :]
            nisa.tensor_tensor(dst=with_cos, data1=own, data2=tables[0], op=nl.multiply)
            nisa.tensor_tensor(dst=with_sin, data1=turned, data2=tables[1], op=nl.multiply)
            for tile, begin, last in target:
                left, right = max(first, begin), min(end, last)
                if left < right:
                    nisa.tensor_tensor(
                        dst=tile[0:used, part, :, left - begin : right - begin].permute((0, 2, 1)),
                        data1=with_cos[:, left - first : right - first, :],
                        data2=with_sin[:, left - first : right - first, :],
                        op=nl.add,
                    )


def copied_heads(results, heads, depth):
    """Heads [D in part, part, head, token] as `rotated_heads` places them, not turned."""
    pieces = ranges(0, depth)
    for tile, begin, last in placed(results):
        for part in range(len(pieces)):
            used = pieces[part][1] - pieces[part][0]
            target = tile[0:used, part, :, :].permute((0, 2, 1))
            nisa.tensor_copy(dst=target, src=heads[0:used, part, begin:last, :])


def placed(results):
    """Each tile [D in part, part, token, head] with its first head and its last one of all."""
    found = []
    first = 0
    for tile in results:
        found.append((tile, first, first + tile.shape[3]))
        first += tile.shape[3]
    return found
