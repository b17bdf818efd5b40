"""matmul: c = a @ b, for matrices of any size.

Dimensions
    M   rows of a and c; N columns of b and c; K the contraction.

Arguments
    a             [M, K] @ HBM, float32 or bfloat16; [K, M] with a_transposed
    b             [K, N] @ HBM, float32 or bfloat16; read in a's dtype
    a_transposed  compile-time bool: a is given with the contraction first, which saves its transposes
    tuning        values of PARAMETERS by name; None takes those of the table (see `tuning`)
    returns c     [M, N] @ HBM, a's dtype

Layout
    The Tensor engine contracts over partitions, so both operands lie with K on the partitions, in blocks of 128: b
    comes that way from HBM, a is transposed by the DMA that loads it. c has rows on the partitions, as it lies in HBM.

Tiling
    for R rows of a, which stay in SBUF as [128, K/128, rows]: all within `resident_bytes`, 2048 for K = 2048
        for 512 columns of b, which are loaded in parts of some blocks and stay in SBUF for these rows
            for 128 rows, which accumulate in one PSUM bank
                for K: one nc_matmul for each block, 128 rows and 512 columns
    The first columns meet the first rows while both arrive: `lead_tiles` row tiles accumulate side by side, block by
    block, so that a loaded block gives more work than its load takes. Up to 512 rows always do, with up to 2048 columns
    of b in 4 PSUM banks, and the parts of b need not stay.

Cores
    Two cores of a logical core take half of the columns each, of which there are at least two; half of the rows where
    more than 128 rows meet columns that fill no two banks.

Limits
    K up to 16384: 128 rows [128, K/128, 128] and columns of b must fit into SBUF.

Cost
    HBM: a once, b ceil(M / R) times, c once. Tensor engine: M/128 * K/128 * N/512 matmuls of 512 columns, four
    passes each in float32. Bound: HBM up to some hundred rows (bfloat16), the Tensor engine beyond. Of the floor in
    bfloat16 on trn2: 95 % at 2048^3, 98 % at 4096^3; what is missing are the first load, the slow start of the Tensor
    engine, the last result. On two cores 92 and 98 % of half of the floor. On trn1 82 and 84 %: a matmul of 512
    columns takes 608 cycles there.
"""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np

from nki_kernels.cores import part
from nki_kernels.precision import widened
from nki_kernels.projection.products import (
    add_products,
    block_tile,
    empty_sums,
    load_part,
    parts,
    read_out,
    transpose_part,
)
from nki_kernels.tiles import (
    ACCUMULATOR_BANKS,
    BANK,
    PARTITIONS,
    blocks,
    columns_at_once,
    expect_dims,
    load,
    ranges,
    transpose_into,
)
from nki_kernels.tuning import bucket, parameters_of

MAX_CONTRACTION = 16384

PARAMETERS = (
    ("resident_bytes", 65536, (32768, 65536, 98304, 131072)),  # per partition, of rows of a that stay in SBUF
    (
        "moving_bytes",
        32768,
        (8192, 16384, 32768, 65536),
    ),  # per partition, of columns of b in SBUF
    ("lead_tiles", 6, (1, 2, 3, 4, 5, 6, 7, 8)),  # row tiles, a PSUM bank each, that share the first operands
    ("lead_elements", 1024, (512, 1024, 2048, 4096)),  # of b per partition in one DMA then: few start early
    ("part_elements", 4096, (1024, 2048, 4096, 8192)),  # in one DMA later
    ("group_tiles", 2, (1, 2, 4, 8)),  # row tiles of a that are loaded together later
    ("eviction", "both", ("vector", "scalar", "both")),  # engines that read PSUM out
    ("transposes", "dma", ("dma", "tensor")),  # what transposes a
)


def matmul_bucket(a, b, a_transposed=False, tuning=None):
    """The launches that share an entry of the table."""
    rows = a.shape[1] if a_transposed else a.shape[0]
    return bucket(a.dtype, (rows, b.shape[0], b.shape[1]), "aT" if a_transposed else "")


@nki.jit
def matmul(a, b, a_transposed=False, tuning=None):
    """c = a @ b, for matrices of any size."""
    expect_dims(2, a, "a [M, K]")
    expect_dims(2, b, "b [K, N]")
    depth = a.shape[0] if a_transposed else a.shape[1]
    total_rows = a.shape[1] if a_transposed else a.shape[0]
    total_columns = b.shape[1]
    assert b.shape[0] == depth, f"matmul contracts {depth} columns of a with {b.shape[0]} rows of b"
    assert depth <= MAX_CONTRACTION, f"matmul contracts at most {MAX_CONTRACTION}, not {depth}"
    c = nl.ndarray((total_rows, total_columns), dtype=a.dtype, buffer=nl.shared_hbm)
    by_columns = total_columns >= 2 * BANK or total_rows <= PARTITIONS
    first, end = part(total_columns if by_columns else total_rows, PARTITIONS, nl.program_id(0))
    if by_columns:
        multiply(c[:, first:end], a, b[:, first:end], a_transposed, tuning)
    else:
        rows = a[:, first:end] if a_transposed else a[first:end, :]
        multiply(c[first:end, :], rows, b, a_transposed, tuning)
    return c


def multiply(c, a, b, a_transposed, tuning):
    """Store a @ b to c."""
    depth = b.shape[0]
    total_rows, total_columns = c.shape
    chosen = parameters_of("matmul", PARAMETERS, matmul_bucket(a, b, a_transposed), tuning)
    resident = fitting(chosen["resident_bytes"], depth, a.dtype, PARTITIONS)
    for first in range(0, total_rows, resident):
        end = min(total_rows, first + resident)
        few = blocks(end - first) <= ACCUMULATOR_BANKS
        groups = [(first, end)] if few else row_groups(first, end, chosen)
        width = (
            columns_at_once(end - first)
            if few
            else min(BANK, fitting(chosen["moving_bytes"], depth, a.dtype, 1))
        )
        rows_of_a = []
        for start, last in groups:
            rows_of_a.append(block_tile(depth, blocks(depth), last - start, a.dtype))
        for column in range(0, total_columns, width):
            moving = b[:, column : min(total_columns, column + width)]
            begins = first == 0 and column == 0
            most = chosen["lead_elements"] if begins else chosen["part_elements"]
            pieces = parts(blocks(depth), moving.shape[1], 1, most)
            loaded = []
            for number in range(len(groups)):
                start, last = groups[number]
                side = None
                if column == 0:
                    side = a[:, start:last] if a_transposed else a[start:last, :]
                together = few or (begins and number == 0)
                multiply_group(
                    c[start:last, column : column + moving.shape[1]],
                    rows_of_a[number],
                    side,
                    a_transposed,
                    loaded,
                    moving,
                    pieces,
                    together,
                    chosen,
                )


def multiply_group(result, stationary, side, a_transposed, loaded, moving, pieces, together, chosen):
    """Store stationary.T @ moving; `side`, if given, is what is loaded into stationary; `loaded` are moving's parts.

    Parts are loaded by the first group that needs them. Row tiles accumulate together or one after the other.
    """
    depth, columns = moving.shape
    panels = ranges(0, columns, BANK)
    rows = result.shape[0]
    for row in range(0, rows, rows if together else PARTITIONS):
        tiles = ranges(row, rows if together else min(rows, row + PARTITIONS))
        sums = empty_sums(tiles, panels)
        for number in range(len(pieces)):
            start, end = pieces[number]
            if side is not None and row == 0:
                if a_transposed:
                    load_part(stationary[:, start:end, :], side, start)
                elif chosen["transposes"] == "dma":
                    transpose_part(stationary[:, start:end, :], side, start)
                else:
                    turn_part(stationary[:, start:end, :], side, start)
            if number == len(loaded):
                loaded.append(block_tile(depth, end - start, columns, stationary.dtype))
                load_part(loaded[number], moving, start)
            add_products(sums, stationary, tiles, loaded[number], panels, start, depth)
        for tile in range(len(tiles)):
            first, last = tiles[tile]
            by_scalar = chosen["eviction"] == "scalar" or (chosen["eviction"] == "both" and tile % 2 == 1)
            store(result[first:last, :], sums[tile], by_scalar)


def turn_part(result, x, start):
    """Blocks of the transpose of x [rows, K] of HBM, from block `start` on, into all blocks of `result`, by matmuls."""
    end = min(x.shape[1], (start + result.shape[1]) * PARTITIONS)
    for first, last in ranges(0, x.shape[0]):
        transpose_into(result, 0, first, load(x[first:last, start * PARTITIONS : end], x.dtype))


def store(target, sums, by_scalar):
    """Store the PSUM tiles of a row tile, which lie side by side in their target."""
    result = nl.ndarray(target.shape, dtype=target.dtype, buffer=nl.sbuf)
    at = 0
    for each in sums:
        read_out(result[:, at : at + each.shape[1]], each, by_scalar)
        at += each.shape[1]
    nisa.dma_copy(dst=target, src=result)


def fitting(limit, depth, dtype, step):
    """Columns of a block tile of `depth` rows within `limit` bytes per partition, a multiple of `step`."""
    each = blocks(depth) * (4 if dtype == nl.float32 else 2)
    return max(step, limit // each // step * step)


def row_groups(first, end, chosen):
    """Ranges of rows that are loaded together, the first one of `lead_tiles` row tiles."""
    lead = min(end, first + chosen["lead_tiles"] * PARTITIONS)
    return [(first, lead)] + ranges(lead, end, chosen["group_tiles"] * PARTITIONS)


def matmul_reference(
    a: np.ndarray, b: np.ndarray, a_transposed: bool = False, tuning: dict | None = None
) -> np.ndarray:
    """numpy's product in float32."""
    left = widened(a).T if a_transposed else widened(a)
    return (left @ widened(b)).astype(a.dtype)
