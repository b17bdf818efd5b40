"""matmul: c = a @ b, for matrices of any size.

Dimensions:
    M   rows of a and c; N columns of b and c; K the contraction.

Arguments:
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

Limits:
    K up to 16384: 128 rows [128, K/128, 128] and columns of b must fit into SBUF.

Cost
    HBM: a once, b ceil(M / R) times, c once. Tensor engine: M/128 * K/128 * N/512 matmuls of 512 columns, four
    passes each in float32. Bound: HBM up to some hundred rows (bfloat16), the Tensor engine beyond. Of the floor in
    bfloat16 on trn2: 95 % at 2048^3, 98 % at 4096^3; what is missing are the first load, the slow start of the Tensor
    engine, the last result. On two cores 92 and 98 % of half of the floor. On trn1 82 and 84 %: a matmul of 512
    columns takes 608 cycles there.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np

from nki_kernels.cores import find_core_range
from nki_kernels.precision import widened
from nki_kernels.projection.products import (
    add_products,
    allocate_blocks,
    allocate_sums,
    load_block_range,
    plan_growing_ranges,
    transpose_block_range,
)
from nki_kernels.tiles import (
    ACCUMULATOR_BANKS,
    BANK,
    PARTITIONS,
    blocks,
    copy_bank,
    count_columns_at_once,
    expect_dims,
    load,
    ranges,
    transpose_into,
)
from nki_kernels.tuning import choose_parameters, name_bucket
from nki_kernels.weights import WeightMatrix

cores = (1, 2)

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


@dataclass
class Tuning(nl.NKIObject):
    """Values of PARAMETERS in one launch."""

    resident_bytes: int
    moving_bytes: int
    lead_tiles: int
    lead_elements: int
    part_elements: int
    group_tiles: int
    eviction: str
    transposes: str


@dataclass
class Product(nl.NKIObject):
    """Operands and result of this core @ HBM, and the parameters of the loop nest.

    c: [M, N], written. a: [M, K], or [K, M] if a_transposed. b: [K, N]. tuning: values of the parameters.
    """

    c: nl.NkiTensor
    a: nl.NkiTensor
    b: nl.NkiTensor
    a_transposed: bool
    tuning: Tuning


@dataclass
class RowGroup(nl.NKIObject):
    """Rows first_row … end_row - 1 of a, which are loaded together.

    stationary: SBUF tile [k in block, block, row], filled block by block when the first columns of b meet the
    rows.
    """

    first_row: int
    end_row: int
    stationary: nl.NkiTensor


@dataclass
class ColumnPanel(nl.NKIObject):
    """Columns first … end - 1 of b, loaded in pieces by the first group of rows that meets them.

    pieces: blocks (first, end) of the contraction in each piece. tiles: SBUF tiles [k in block, block,
    column] of the pieces that are loaded so far.
    """

    first: int
    end: int
    pieces: list
    tiles: list


def matmul_bucket(a, b, a_transposed=False, tuning=None):
    """Return the name of the launches that share an entry of `tuned.TUNED`, such as "bfloat16 2048x4096x1024 aT".

    It has a's dtype, M, K and N rounded up to powers of two, and "aT" if a is transposed. tuning: ignored.
    """
    rows = a.shape[1] if a_transposed else a.shape[0]
    return name_bucket(a.dtype, (rows, b.shape[0], b.shape[1]), "aT" if a_transposed else "")


@nki.jit
def matmul(a, b, a_transposed=False, tuning=None):
    """Return c = a @ b [M, N] @ HBM in a's dtype; with a_transposed, c = a^T @ b for a [K, M].

    tuning: dict of values of PARAMETERS by name, which change the time only; None takes those of `tuned.py`.
    Raises AssertionError if shapes do not fit together, if K is above MAX_CONTRACTION, or if a parameter or
    its value is unknown.
    """
    expect_dims(2, a, "a [M, K]")
    expect_dims(2, b, "b [K, N]")
    depth = a.shape[0] if a_transposed else a.shape[1]
    total_rows = a.shape[1] if a_transposed else a.shape[0]
    total_columns = b.shape[1]
    assert b.shape[0] == depth, (
        f"matmul contracts {depth} columns of a with {b.shape[0]} rows of b, which have to be as many"
    )
    assert depth <= MAX_CONTRACTION, f"matmul contracts at most {MAX_CONTRACTION}, not {depth}"
    c = nl.ndarray((total_rows, total_columns), dtype=a.dtype, buffer=nl.shared_hbm)
    # Half of fewer columns would make moving operands narrower than a PSUM bank, so rows are divided then.
    by_columns = total_columns >= 2 * BANK or total_rows <= PARTITIONS
    first, end = find_core_range(total_columns if by_columns else total_rows, PARTITIONS, nl.program_id(0))
    if by_columns:
        columns = b[:, first:end]
        multiply(
            Product(
                c[:, first:end], a, columns, a_transposed, choose_tuning(a, columns, a_transposed, tuning)
            )
        )
    else:
        rows = a[:, first:end] if a_transposed else a[first:end, :]
        multiply(
            Product(c[first:end, :], rows, b, a_transposed, choose_tuning(rows, b, a_transposed, tuning))
        )
    return c


def choose_tuning(a, b, a_transposed, tuning):
    """Return the Tuning for this core's operands: the values of PARAMETERS in one launch.

    tuning: dict of values by name, or None for those of `tuned.py`; missing ones have their default.
    """
    values = choose_parameters("matmul", PARAMETERS, matmul_bucket(a, b, a_transposed), tuning)
    return Tuning(values[0], values[1], values[2], values[3], values[4], values[5], values[6], values[7])


def multiply(product):
    """Write a @ b of a Product to its c in HBM. Operands are loaded in pieces, right before the matmuls that read them.

    While the first rows of a meet the first columns of b, several row tiles of 128 rows accumulate side by
    side. Later a row tile takes all pieces of the contraction before the next row tile begins.
    """
    depth = product.b.shape[0]
    total_rows, total_columns = product.c.shape
    resident = count_fitting_columns(product.tuning.resident_bytes, depth, product.a.dtype, PARTITIONS)
    for first_row in range(0, total_rows, resident):  # rows of a that stay in SBUF
        end_row = min(total_rows, first_row + resident)
        # Up to four row tiles accumulate in half of the PSUM banks, so all rows use a piece of b at once.
        few = blocks(end_row - first_row) <= ACCUMULATOR_BANKS
        groups = allocate_row_groups(product, first_row, end_row, few)
        width = choose_panel_width(product, end_row - first_row, few)
        for first in range(0, total_columns, width):
            begins = first_row == 0 and first == 0
            panel = plan_panel(product, first, min(total_columns, first + width), begins)
            banks = ranges(0, panel.end - panel.first, BANK)
            for g in range(len(groups)):  # g: group of rows
                group = groups[g]
                rows = group.end_row - group.first_row
                # While the first panel arrives, several row tiles share a block, which outlasts the load of the next.
                height = rows if few or (begins and g == 0) else PARTITIONS
                for row in range(0, rows, height):
                    tiles = ranges(row, min(rows, row + height))
                    sums = allocate_sums(tiles, banks)
                    for k in range(len(panel.pieces)):  # k: piece of the contraction
                        # The rows come with the first panel only, because they stay in SBUF for all further panels.
                        if first == 0 and row == 0:
                            load_rows(product, group, panel.pieces[k])
                        if k == len(panel.tiles):
                            load_columns(product, panel, k)
                        block = panel.pieces[k][0]
                        add_products(sums, group.stationary, tiles, panel.tiles[k], banks, block, depth)
                    for m in range(len(tiles)):  # m: row tile
                        store_sums(product, group.first_row + tiles[m][0], panel.first, sums[m], m)


def allocate_row_groups(product, first_row, end_row, few):
    """Return the RowGroups of rows first_row … end_row - 1 of a, with SBUF allocated and nothing loaded.

    few: whether the rows fill at most half of the PSUM banks; they are then one group. Else the first group
    has `lead_tiles` row tiles of 128 rows, each later one `group_tiles`.
    """
    tuning, depth = product.tuning, product.b.shape[0]
    bounds = [(first_row, end_row)]
    if not few:
        lead = min(end_row, first_row + tuning.lead_tiles * PARTITIONS)
        bounds = [(first_row, lead)] + ranges(lead, end_row, tuning.group_tiles * PARTITIONS)
    groups = []
    for first, end in bounds:
        stationary = allocate_blocks(depth, blocks(depth), end - first, product.a.dtype)
        groups.append(RowGroup(first, end, stationary))
    return groups


def choose_panel_width(product, rows, few):
    """Return how many columns of b are in SBUF at a time, for `rows` rows of a that stay there.

    few: whether the rows fill at most half of the PSUM banks. The columns then fill these banks; else they
    are at most one bank wide and fit in `moving_bytes`.
    """
    if few:
        return count_columns_at_once(rows)
    # A panel takes one PSUM bank for each row tile, so that up to eight row tiles can accumulate side by side.
    return min(
        BANK, count_fitting_columns(product.tuning.moving_bytes, product.b.shape[0], product.a.dtype, 1)
    )


def plan_panel(product, first, end, begins):
    """Return the ColumnPanel of columns first … end - 1 of b: its contraction is cut into pieces, none loaded yet.

    begins: whether it is the first panel of the launch, whose pieces are smaller.
    """
    tuning = product.tuning
    # Small DMAs let the Tensor engine start early; later DMAs are hidden behind products and move at the full rate.
    most = tuning.lead_elements if begins else tuning.part_elements
    return ColumnPanel(first, end, plan_growing_ranges(blocks(product.b.shape[0]), end - first, 1, most), [])


def load_rows(product, group, piece):
    """Load blocks (first, end) of the contraction for a RowGroup's rows of a from HBM to `group.stationary` in SBUF.

    piece: (first, end). Unless a comes transposed, the DMA or the Tensor engine transposes the rows, as the
    parameter `transposes` says.
    """
    first, end = piece
    target = group.stationary[:, first:end, :]
    if product.a_transposed:
        load_block_range(target, WeightMatrix(product.a[:, group.first_row : group.end_row]), first)
    elif product.tuning.transposes == "dma":
        # The DMA engines transpose on the way in, so that the Tensor engine is left to the products.
        transpose_block_range(target, product.a[group.first_row : group.end_row, :], first)
    else:
        transpose_by_matmuls(target, product.a[group.first_row : group.end_row, :], first)


def load_columns(product, panel, k):
    """Load blocks panel.pieces[k] of the contraction from b, for a panel's columns, into a new SBUF tile in a's dtype.

    The tile [k in block, block, column] is appended to `panel.tiles`.
    """
    first, end = panel.pieces[k]
    columns = product.b[:, panel.first : panel.end]
    tile = allocate_blocks(columns.shape[0], end - first, columns.shape[1], product.a.dtype)
    load_block_range(tile, WeightMatrix(columns), first)
    panel.tiles.append(tile)


def transpose_by_matmuls(result, x, first_block):
    """Load blocks of x [row, K] @ HBM, and transpose them by matmuls into an SBUF tile [k in block, block, row].

    first_block: the block of x that goes to block 0 of `result`.
    """
    end = min(x.shape[1], (first_block + result.shape[1]) * PARTITIONS)
    for first, last in ranges(0, x.shape[0]):
        transpose_into(result, 0, first, load(x[first:last, first_block * PARTITIONS : end], x.dtype))


def store_sums(product, first_row, first_column, sums, m):
    """Copy the sums of a row tile from PSUM to SBUF, in c's dtype, and store them to c in HBM.

    Args:
        product: Product with c.
        first_row, first_column: the corner of the sums in c.
        sums: PSUM tiles [row, column] of neighbouring columns.
        m: index of the row tile among those that accumulate side by side; it decides which engine copies.
    """
    vector_share = {"scalar": 0, "vector": 1, "both": 2}[product.tuning.eviction]
    columns = 0
    for bank in sums:
        columns += bank.shape[1]
    rows = sums[0].shape[0]
    result = nl.ndarray((rows, columns), dtype=product.c.dtype, buffer=nl.sbuf)
    first = 0
    for bank in sums:
        end = first + bank.shape[1]
        # Row tiles that accumulated side by side end together, so two engines can read them out in turn.
        copy_bank(result[:, first:end], bank, m, vector_share)
        first = end
    target = product.c[first_row : first_row + rows, first_column : first_column + columns]
    nisa.dma_copy(dst=target, src=result)


def count_fitting_columns(limit, depth, dtype, step):
    """Return how many columns of `depth` rows take at most `limit` bytes per partition in K blocks.

    The result is a multiple of `step`, and at least `step`, even if that takes more.
    """
    column_bytes = blocks(depth) * (4 if dtype == nl.float32 else 2)
    return max(step, limit // column_bytes // step * step)


def matmul_reference(
    a: np.ndarray, b: np.ndarray, a_transposed: bool = False, tuning: dict | None = None
) -> np.ndarray:
    """Return a @ b in a's dtype, or a^T @ b if a_transposed, computed in float32 and rounded once. tuning: ignored."""
    left = widened(a).T if a_transposed else widened(a)
    return (left @ widened(b)).astype(a.dtype)
