"""Few rows that meet weights of 8 bits: from HBM to an operand of the first product, for `mlp` and `qkv_projection`.

Such weights arrive in half the time of others, so the time before the first product counts. Rows in row tiles would
leave most partitions idle: the norm of one row of 8192 elements takes 20 us on one partition. Here rows lie in runs:
with C = ceil(H / 128) partition p holds elements p * C … of every row, [partition, C, row]. They are multiplied by the
norm's weight alone, and the sums by 1 / rms of their rows (`RowFactors`), so that products wait for one pass over x.
Rows that meet weights of 4 bits lie in paired runs where H allows it, see `nibbles`, else in blocks, [h in block,
block, row].
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.decode.hidden import can_hold_hidden, load_hidden
from nki_kernels.dma import SCALAR, STATIC, transfer
from nki_kernels.nibbles import has_paired_runs, view_paired_runs
from nki_kernels.norms.blocks import load_column
from nki_kernels.norms.runs import RowFactors, sum_squares, write_weighted
from nki_kernels.projection.grouped_gate import compute_group_factors, load_group_scales
from nki_kernels.tiles import (
    BANK_BYTES,
    PARTITIONS,
    allocate_psum_slots,
    blocks,
    count_block_partitions,
    count_slot_columns,
    ranges,
)

FEW_ROWS = 64
"""Most rows that are taken in runs."""

RUN_LOADS = 16
"""Most rows that are loaded in runs: C elements of a row lie together, so more rows take too many descriptors."""


def takes_runs(x, norm, ranks, has_row_gate):
    """Return whether rows x [T, H] @ HBM are multiplied in runs: few rows on one rank, RMSNorm or none, no row gate.

    norm: Norm. ranks: over how many ranks the rows are cut.
    """
    few = x.shape[0] <= FEW_ROWS and can_hold_hidden(x.shape[0], x.shape[1], x.dtype)
    return few and norm.bias is None and ranks == 1 and not has_row_gate


def can_take_runs(weight):
    """Return whether rows that meet a WeightMatrix can lie in runs, which are paired for a weight of 4 bits.

    Rows that meet scales of groups or of blocks lie in blocks, see `stacks` and `scaled_rows`.
    """
    if weight.nibbles is None:
        return weight.block_scales is None
    return weight.adds_zero_points() and has_paired_runs(weight.nibbles.depth)


@dataclass
class RequestedRows(nl.NKIObject):
    """Rows in SBUF that `spread_few_rows` brings into runs.

    tile: rows as they are, [row, H], if they are to be transposed, else in runs, [partition, row, C]. weight: the
    norm's weight in runs, [partition, C], or None. runs: not written yet, [partition, C, column], but for zeros behind
    the T rows. is_transposed: whether the rows are to be transposed. in_runs: whether
    `runs` and `weight` lie in runs; else in blocks. paired: whether the runs are paired. rows, hidden: T and H.
    """

    tile: nl.NkiTensor
    weight: nl.NkiTensor | None
    runs: nl.NkiTensor
    is_transposed: bool
    in_runs: bool
    paired: bool
    rows: int
    hidden: int


def is_transposed_on_chip(x, in_runs=True):
    """Return whether few rows x [T, H] @ HBM are loaded row by row and transposed, as they are without `in_runs`."""
    return not in_runs or (x.shape[0] > RUN_LOADS and x.shape[1] % PARTITIONS == 0)


def request_few_rows(x, norm, columns, in_runs=True, unpacks=False):
    """Issue the loads of rows x [T, H] @ HBM and of the norm's weight, if any; return RequestedRows.

    norm: Norm, RMSNorm; None for none. columns: columns of the result, at least T. in_runs: whether the result
    lies in runs; else in blocks, [h in block, block, column]. unpacks: whether the Vector engine unpacks weights
    meanwhile; it then writes the zeros, because GpSimd and its fast modes exclude each other. Runs are paired then.
    """
    rows, hidden = x.shape
    transposes = is_transposed_on_chip(x, in_runs)
    paired = in_runs and unpacks
    tile = load_row_tile(x) if transposes else load_hidden(x, paired)
    shape = (count_block_partitions(hidden, 0, in_runs), blocks(hidden), columns)
    runs = nl.ndarray(shape, dtype=x.dtype, buffer=nl.sbuf)
    if columns > rows:
        engine = nisa.engine.vector if unpacks else nisa.engine.gpsimd
        nisa.memset(dst=runs[:, :, rows:columns], value=0.0, engine=engine)
    weight = None if norm is None else load_column(norm.weight, norm.offset, in_runs, paired)
    return RequestedRows(tile, weight, runs, transposes, in_runs, paired, rows, hidden)


def load_few_rows(x, norm, gated, columns):
    """Load rows x [T, H] @ HBM; return them in runs or blocks, and as they are, [row, H] in SBUF, or None.

    Rows in runs are [partition, C, column] in SBUF, with zeros behind the T rows; `gated.in_runs` tells whether they
    lie in blocks. Rows are there as they are if they were loaded so and transposed. With a norm, rows in runs or blocks
    are multiplied by its weight, and `gated.row_factors` or `gated.group_factors` is set. Also loads the scales of the
    GatedProduct `gated`.

    Args:
        norm: Norm, RMSNorm; None for none.
        columns: columns of the result, at least T.
    """
    requested = request_few_rows(x, norm, columns, gated.in_runs, gated.weights[0].nibbles is not None)
    # Scales follow the norm's weight in the queue, and come before the Scalar engine waits for the rows.
    if gated.layout is None:
        gated.load_scales()
    else:
        load_group_scales(gated)
    runs = spread_few_rows(requested)
    if norm is not None and gated.layout is not None and requested.is_transposed:
        gated.group_factors = compute_group_factors(requested.tile, gated, norm.eps)
    elif norm is not None:
        gated.set_factors(RowFactors(sum_few_squares(requested, columns), requested.hidden, norm.eps))
    return runs, requested.tile if requested.is_transposed else None


def spread_few_rows(requested):
    """Write RequestedRows, times the norm's weight if any, to `requested.runs`; return it, [partition, C, column]."""
    runs = requested.runs[:, :, 0 : requested.rows]
    if requested.is_transposed:
        transpose_weighted(runs, requested)
    else:
        write_weighted(runs, requested.tile.permute((0, 2, 1)), requested.weight, requested.paired)
    return requested.runs


def sum_few_squares(requested, columns):
    """Return the sums of squares of RequestedRows for `RowFactors`, float32 [partition, column] in SBUF.

    columns: at least T; those behind the rows are zeros.
    """
    rows = requested.rows
    height = rows if requested.is_transposed else requested.tile.shape[0]
    sums = nl.ndarray((height, columns), dtype=nl.float32, buffer=nl.sbuf)
    if columns > rows:
        nisa.memset(dst=sums[:, rows:columns], value=0.0, engine=nisa.engine.gpsimd)
    if requested.is_transposed:
        sum_row_squares(requested.tile, sums[:, 0:rows])
    else:
        sum_squares(requested.tile, sums[:, 0:rows])
    return sums


def load_row_tile(x):
    """Load rows x [T, H] @ HBM as a new SBUF tile [row, H], one row on each partition."""
    tile = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.sbuf)
    transfer(tile, x, STATIC)
    return tile


def transpose_weighted(dst, requested):
    """Transpose RequestedRows on the Tensor engine into runs, dst [partition, C, row], times their weight, if any.

    As many transposes as fit share a PSUM bank, which one instruction reads. In runs H is a multiple of 128. Other rows
    become blocks, [h in block, block, row], the last of which may be short.
    """
    tile, weight = requested.tile, requested.weight
    rows, hidden = tile.shape
    count = hidden // PARTITIONS
    if count * PARTITIONS < hidden:
        short = hidden - count * PARTITIONS
        bank = nl.ndarray((short, 1, rows), dtype=tile.dtype, buffer=nl.psum)
        nisa.nc_transpose(dst=bank[:, 0, :], data=tile[:, count * PARTITIONS : hidden])
        last = None if weight is None else weight[0:short, count : count + 1]
        write_weighted(dst[0:short, count : count + 1, :], bank, last)
    itemsize = 4 if tile.dtype == nl.float32 else 2
    per_bank = BANK_BYTES // itemsize // count_slot_columns(rows, tile.dtype)
    halves = 2 if requested.paired else 1  # of paired runs, which alternate in dst
    for half in range(halves):
        target, offset = dst[:, half:count:halves, :], half * count // halves
        for first, end in ranges(0, count // halves, per_bank):
            bank = allocate_psum_slots(PARTITIONS, end - first, rows, tile.dtype)
            for k in range(first, end):
                # Element k of each run: every C-th element of a row, from k on.
                columns = tile[:, k:hidden:count]
                if requested.paired:
                    columns = view_paired_runs(tile, half)[:, :, :, k]
                elif not requested.in_runs:
                    columns = tile[:, k * PARTITIONS : (k + 1) * PARTITIONS]
                nisa.nc_transpose(dst=bank[:, k - first, :], data=columns)
            factor = None if weight is None else weight[:, offset + first : offset + end]
            write_weighted(target[:, first:end, :], bank, factor)


def sum_row_squares(tile, sums):
    """Write the sum of squares of each row of an SBUF tile [row, H] to `sums`, float32 [row, row], on its diagonal.

    The other elements become zeros, so that the sum over partitions has the row's sum in its column.
    """
    rows, hidden = tile.shape
    squares = nl.ndarray((rows, hidden), dtype=nl.bfloat16, buffer=nl.sbuf)
    column = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation_reduce(dst=squares, op=nl.square, data=tile, reduce_op=nl.add, reduce_res=column)
    nisa.affine_select(
        dst=sums,
        pattern=[[-1, rows]],
        channel_multiplier=1,
        on_true_tile=column.broadcast(1, rows),
        on_false_value=0.0,
        cmp_op=nl.equal,
    )


def keep_residual_rows(down, rows):
    """Keep the residual of a ResidualProduct in SBUF as its residual tile, if it has a residual.

    rows: its rows [row, N] in SBUF if they are there; None to load them. Scalar triggers the load: the residual is not
    needed before the end, the weights at once.
    """
    if down.residual is not None:
        if rows is None:
            rows = nl.ndarray(down.residual.shape, dtype=down.y.dtype, buffer=nl.sbuf)
            transfer(rows, down.residual, SCALAR)
        down.keep_residual(rows.reshape((rows.shape[0], 1, rows.shape[1])))
