"""Weights of 4 bits in HBM: two elements in a byte, and their way to SBUF as operands of the Tensor engine.

An element is a nibble n = 0 … 15. A byte with n in its low bits is the number n * 2^-9 in float8_e4m3, subnormal up
to n = 7. So two instructions of the Vector engine make fp8 operands of a tile of bytes: one keeps the low nibbles, one
shifts and keeps the high nibbles. Both work on words of 32 bits, eight elements at a time. A weight stands for
(nibble - zero point) * 2^-9 * scale. Where a column has one scale, products multiply the nibbles, and add the zero
points' term as one more block of the contraction, see `projection.zero_points`. Scales of groups of rows are those of
`scale_groups`.

A weight [K, N] is stored as bytes [packed rows, N]. A run of 256 rows is stored as 128 packed rows: byte p has row p
in its low nibble, and row p + 128 in its high one. So both tiles that a loaded tile becomes are K blocks, [k in block,
block, column]. Of the remaining rows each block of up to 128 is stored apart: its high nibbles have the rows from 64
on (more than 64 rows), or those from 32 on (more than 32 rows). A block of up to 32 rows has low nibbles alone. An odd
K is stored with one more row, which is not used.

Decode kernels keep hidden states in runs, see `decode.hidden`. Where `has_paired_runs` allows it, packed rows lie in
runs as well, in *paired runs*: partition p has packed rows p * C … p * C + C - 1 for C = K / 256. Block 2 c of a loaded
tile has the rows of low nibbles of packed rows p * C + c, and block 2 c + 1 those of high nibbles. As C divides 128, a
partition has C neighbouring rows of low nibbles, and the C rows that lie 128 behind them. Hidden states and rows of
norms and scales lie accordingly: C neighbouring elements, and then the C elements 128 behind them.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl
import numpy as np

from nki_kernels.dma import transfer
from nki_kernels.tiles import PARTITIONS, blocks, ranges

RUN_ROWS = 2 * PARTITIONS
"""Rows of a whole run, which 128 packed rows hold."""

NIBBLES = 0x0F0F0F0F
"""The low nibbles of the bytes of a word."""

UNIT = 2.0**-9
"""What the nibble 1 stands for in float8_e4m3."""

SYMMETRIC_ZERO = 8
"""The zero point of every column where none is stored."""


@dataclass
class NibbleMatrix(nl.NKIObject):
    """What a weight of 4 bits [K, N] has besides its packed elements and scales.

    depth: K. zeros: [1, N] uint8 @ HBM, the zero point of each column; None if all are 8. as_fp8: whether products
    with rows of 16 bits take nibbles in float8_e4m3; else in the rows' dtype. scales: [groups, N] @ HBM if equal groups
    of rows have scales; zeros then have this shape too. None if columns have scales.
    """

    depth: int
    zeros: nl.NkiTensor | None
    as_fp8: bool
    scales: nl.NkiTensor | None = None

    def count_group_rows(self):
        """Return the rows of the weight that share a scale of each column, for scales of groups."""
        return self.depth // self.scales.shape[0]

    def find_packed_rows(self, rows):
        """Return the packed rows (first, end) of rows (first, end). Raises AssertionError if these divide a run."""
        return count_packed_rows(self.depth, rows[0]), count_packed_rows(self.depth, rows[1])

    def submatrix(self, rows, columns):
        """Return the NibbleMatrix of rows (first, end) and columns (first, end) of the weight."""
        first, end = 0, 1
        if self.scales is not None:
            first, end = rows[0] // self.count_group_rows(), blocks(rows[1], self.count_group_rows())
        zeros = None if self.zeros is None else self.zeros[first:end, columns[0] : columns[1]]
        scales = None if self.scales is None else self.scales[first:end, columns[0] : columns[1]]
        return NibbleMatrix(rows[1] - rows[0], zeros, self.as_fp8, scales)


def is_packed(elements):
    """Return whether elements @ HBM are nibbles, two in a byte: they are uint8 then."""
    return elements.dtype == nl.uint8


def check_nibbles(elements, scales, zeros, nibble_dtype):
    """Refuse packed elements without scales, zero points that do not fit, and other dtypes of operands.

    Args:
        elements: array of a weight @ HBM, or None.
        scales: its scales, or None.
        zeros: its zero points, or None.
        nibble_dtype: "float8_e4m3" or "bfloat16".
    """
    assert nibble_dtype in ("float8_e4m3", "bfloat16"), (
        f"nibble_dtype is float8_e4m3 or bfloat16, not {nibble_dtype}"
    )
    if elements is None:
        assert zeros is None, "zero points are given without their weight; leave them out"
    elif is_packed(elements):
        assert scales is not None, "weights of 4 bits have scales; give those of all packed weights"
        rows, columns = scales.shape[0], elements.shape[1]
        assert zeros is None or (zeros.shape == (rows, columns) and zeros.dtype == nl.uint8), (
            f"zero points are uint8 [{rows}, {columns}], one for each column of their weight and row of scales, "
            f"not {zeros.dtype} {zeros.shape}"
        )
    else:
        assert zeros is None, "zero points are those of uint8 elements, two in a byte; leave them out"


def count_low_rows(rows):
    """Return how many rows of a block of `rows` rows, at most 128, are in low nibbles, see the module's docstring."""
    if rows > PARTITIONS // 2:
        return PARTITIONS // 2
    return min(rows, PARTITIONS // 4)


def count_packed_rows(depth, end):
    """Return the packed rows of rows 0 … end - 1 of a weight with `depth` rows.

    Raises AssertionError if `end` divides a run, or a block behind the whole runs.
    """
    if end == depth:
        end += depth % 2
    depth += depth % 2
    runs = depth // RUN_ROWS
    if end <= runs * RUN_ROWS:
        assert end % RUN_ROWS == 0, f"rows of packed nibbles are cut at multiples of {RUN_ROWS}, not at {end}"
        return end // 2
    packed = runs * PARTITIONS
    for first, last in ranges(runs * RUN_ROWS, depth):
        if end > first:
            assert end >= last, f"rows of packed nibbles are cut at row {first} or {last}, not at {end}"
            packed += count_low_rows(last - first)
    return packed


def count_stored_rows(elements, depth):
    """Return the rows that an array @ HBM of a weight's elements has to have for a weight of `depth` rows."""
    return count_packed_rows(depth, depth) if is_packed(elements) else depth


def has_paired_runs(depth):
    """Return whether `depth` rows can lie in paired runs: they are whole runs of 256 rows, whose number divides 128."""
    return depth % RUN_ROWS == 0 and PARTITIONS % (depth // RUN_ROWS) == 0


def view_paired_runs(rows, half):
    """View the elements of rows [row, H] that meet low nibbles (half 0) or high ones (half 1) in paired runs.

    The view is [row, run, position, C] for C = H / 256. The elements along the last axis belong to partition
    run * (128 / C) + position. rows: in HBM, or an SBUF tile.
    """
    count = rows.shape[1] // RUN_ROWS
    return rows.reshape_dim(1, (count, 2, PARTITIONS // count, count))[:, :, half, :, :]


def choose_packed_blocks(count):
    """Return the K blocks of a loaded piece, at most `count` if that is 2 or more: an even number, as runs have two."""
    return max(2, count - count % 2)


def load_nibbles_into(tile, elements, depth, queue):
    """Load packed elements of a weight [K, N] @ HBM into an SBUF tile [k in block, block, column], on a queue of `dma`.

    Nibble n becomes n * 2^-9 in the tile's dtype, exactly. Row k lies on partition k % height, in block k // height,
    for a tile of `height` partitions, which is 128 unless the weight is one block. depth: K.
    """
    unpack_into(tile, load_packed(elements, depth, queue), depth)


def load_packed(elements, depth, queue):
    """Load packed elements of a weight of `depth` rows @ HBM as they are; return a list of new uint8 tiles in SBUF.

    The first has all whole runs, if there are any, [packed row, run, column]. Each block behind them has one, [packed
    row, column]. queue: a queue of `dma`.
    """
    stored = depth + depth % 2
    runs, columns = stored // RUN_ROWS, elements.shape[1]
    tiles = []
    if runs > 0:
        tiles.append(nl.ndarray((PARTITIONS, runs, columns), dtype=nl.uint8, buffer=nl.sbuf))
        rows = elements[0 : runs * PARTITIONS, :].reshape_dim(0, (runs, PARTITIONS)).permute((1, 0, 2))
        transfer(tiles[0], rows, queue)
    first_packed = runs * PARTITIONS
    for first, end in ranges(runs * RUN_ROWS, stored):
        low = count_low_rows(end - first)
        raw = nl.ndarray((low, columns), dtype=nl.uint8, buffer=nl.sbuf)
        transfer(raw, elements[first_packed : first_packed + low, :], queue)
        tiles.append(raw)
        first_packed += low
    return tiles


def unpack_into(tile, packed, depth):
    """Write what `load_packed` returned to an SBUF tile [k in block, block, column], as `load_nibbles_into` does."""
    stored = depth + depth % 2
    runs = stored // RUN_ROWS
    if runs > 0:
        split_nibbles(tile[:, 0 : 2 * runs : 2, :], packed[0], False)
        split_nibbles(tile[:, 1 : 2 * runs : 2, :], packed[0], True)
    index = min(runs, 1)
    for first, end in ranges(runs * RUN_ROWS, stored):
        raw, last = packed[index], min(end, depth)
        low, block = raw.shape[0], tile[:, first // PARTITIONS, :]
        rows = min(low, last - first)
        split_nibbles(block[0:rows, :], raw[0:rows, :], False)
        if last - first > low:
            split_nibbles(block[low : last - first, :], raw[0 : last - first - low, :], True)
        index += 1


def load_paired_runs_into(tile, elements, first_block, queue):
    """Load blocks `first_block` … of packed elements @ HBM in paired runs into an SBUF tile [partition, block, column].

    All blocks of the tile are filled; `first_block` and their number are even. queue: a queue of `dma`. Nibble n
    becomes n * 2^-9 in the tile's dtype, exactly.
    """
    unpack_paired_runs(tile, load_paired_runs(elements, first_block, tile.shape[1], queue))


def load_paired_runs(elements, first_block, count, queue):
    """Load the bytes of `count` blocks in paired runs; return a new SBUF tile [partition, packed row, column] uint8.

    The other arguments are those of `load_paired_runs_into`.
    """
    first, end = first_block // 2, (first_block + count) // 2
    raw = nl.ndarray((PARTITIONS, end - first, elements.shape[1]), dtype=nl.uint8, buffer=nl.sbuf)
    rows = elements.reshape_dim(0, (PARTITIONS, elements.shape[0] // PARTITIONS))
    transfer(raw, rows[:, first:end, :], queue)
    return raw


def unpack_paired_runs(tile, raw):
    """Write what `load_paired_runs` returned to an SBUF tile [partition, block, column], low nibbles in even blocks."""
    split_nibbles(tile[:, 0 : tile.shape[1] : 2, :], raw, False)
    split_nibbles(tile[:, 1 : tile.shape[1] : 2, :], raw, True)


def split_nibbles(dst, raw, high):
    """Write the high or the low nibbles of bytes to `dst`, as n * 2^-9 in its dtype; both are SBUF tiles of one shape.

    raw: uint8. Rows of a multiple of four columns are split in words of 32 bits, others byte by byte.
    """
    nibbles = dst
    if dst.dtype != nl.float8_e4m3:
        nibbles = nl.ndarray(raw.shape, dtype=nl.uint8, buffer=nl.sbuf)
    words = nl.uint32 if raw.shape[len(raw.shape) - 1] % 4 == 0 else nl.uint8
    mask = NIBBLES if words == nl.uint32 else 0x0F
    source, target = raw.view(words), nibbles.view(words)
    if high:
        nisa.tensor_scalar(
            dst=target, data=source, op0=nl.right_shift, operand0=4, op1=nl.bitwise_and, operand1=mask
        )
    else:
        nisa.tensor_scalar(dst=target, data=source, op0=nl.bitwise_and, operand0=mask)
    if dst.dtype != nl.float8_e4m3 and high:
        # Two engines convert: the Scalar engine the high nibbles, the Vector engine the low ones.
        nisa.activation(dst=dst, op=nl.copy, data=nibbles, scale=UNIT)
    elif dst.dtype != nl.float8_e4m3:
        nisa.tensor_scalar(dst=dst, data=nibbles, op0=nl.multiply, operand0=UNIT)


def widen_nibbles_reference(elements: np.ndarray, depth: int, zeros: np.ndarray | None = None) -> np.ndarray:
    """Return (nibble - zero point) * 2^-9 of packed elements, float32 [K, N]; elements of other dtypes as they are.

    depth: K. zeros: uint8 [1, N]; None if all zero points are 8.
    """
    if elements.dtype != np.uint8:
        return elements
    stored = depth + depth % 2
    numbers = np.empty((stored, elements.shape[1]), np.float32)
    packed = 0
    run_rows = stored - stored % RUN_ROWS
    for start, last in ranges(0, run_rows, RUN_ROWS) + ranges(run_rows, stored):
        low = PARTITIONS if last - start == RUN_ROWS else count_low_rows(last - start)
        rows = elements[packed : packed + low]
        numbers[start : start + low] = rows & 15
        numbers[start + low : last] = rows[: last - start - low] >> 4
        packed += low
    return (numbers[:depth] - (8.0 if zeros is None else zeros.astype(np.float32))) * np.float32(UNIT)
