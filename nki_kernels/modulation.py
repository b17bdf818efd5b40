"""modulation: shifts, scales and gates of adaptive norms, one row for each image, from embeddings of time and text.

With w, as in DiT, FLUX and SD3 (adaLN-zero):

    y[n, j * H + h] = sum over ranks of silu(x[n]) @ w[:, j * H + h] + bias[j * H + h] + table[j, h]

Without w, as in PixArt (adaLN-single), where x has the product for all layers and each layer has a table:

    y[n, j * H + h] = x[n, j * H + h] + table[j, h]    or, for x of H columns,    x[n, h] + table[j, h]

Dimensions:
    N   images; H hidden size; J chunks, such as shift, scale and gate of two norms; K this rank's elements of an
        embedding.

Arguments:
    x              [N, K] @ HBM, float32 or bfloat16; without w [N, J * H] or [N, H]
    w              [K, J * H] @ HBM, float32 or bfloat16, or None; read in x's dtype
    bias           [1, J * H] @ HBM, float32 or bfloat16, or None; it comes with w
    table          [J, H] @ HBM, float32 or bfloat16; None with w only
    chunks         compile-time int, J
    replica_group  nki.collectives.ReplicaGroup whose ranks have K of the columns of x and rows of w each, or None
    returns        J arrays [N, H] @ HBM, x's dtype: y[:, j * H : (j + 1) * H], the same on every rank; y alone if
                   J is 1

Layout
    With w, K lies on the partitions, and rows of y on those of the result. Without, rows are pairs (image, chunk).

Tiling
    With w: silu(x) is transposed once. For each chunk, 2048 columns at a time accumulate in half of the PSUM
    banks, while w streams through SBUF, see `projection/residual_product.py`.
    Without: as many whole images as have up to 128 rows (image, chunk).
    Two cores of a logical core take half of the columns of each chunk.

Limits:
    N up to 128, J up to 128, K up to 16384. A row of H elements takes at most 32 KiB.

Cost
    HBM: w, x and y once; the table once, without w once for each image. Over ranks: one all-reduce of y in x's
    dtype, in pieces. Rounding to x's dtype: silu(x), w of another dtype, y; over ranks the partial and the total sum.
    Bound: reading w; in float32 on trn2 the Tensor engine, which takes four passes.
    Predicted on trn2 for one image, K = 3072 and J * H = 18432: 283 us in bfloat16, 759 us in float32, whose share of
    reading w at 358 GB/s is 112 and 83 %. Without w, two images and 6 chunks of 1152: 4 us.
"""

from __future__ import annotations

import nki
import nki.collectives as ncc
import nki.isa as nisa
import nki.language as nl
import numpy as np

from nki_kernels.cores import find_core_range
from nki_kernels.dma import SCALAR, transfer
from nki_kernels.matmul import MAX_CONTRACTION
from nki_kernels.mlp import activation_reference
from nki_kernels.precision import widened, widened_or_zero
from nki_kernels.projection.feed_forward_weights import expect_row
from nki_kernels.projection.residual_product import (
    MovingWeight,
    ResidualProduct,
    compute_chunk,
    count_chunk_columns,
)
from nki_kernels.projection.row_groups import allocate_transposed, transpose_tiles
from nki_kernels.projection.sums import RankSum
from nki_kernels.tiles import (
    BANK,
    MAX_ROW_BYTES,
    PARTITIONS,
    broadcast_row,
    expect_dims,
    expect_hidden,
    ranges,
)
from nki_kernels.weights import WeightMatrix

cores = (1, 2)

SUMS_AHEAD = 2
"""Pieces of up to 2048 columns of y whose sums over the ranks may be under way."""


@nki.jit
def modulation(x, w=None, bias=None, table=None, chunks=6, replica_group=None):
    """Return `chunks` arrays [N, H] @ HBM in x's dtype: the chunks of silu(x) @ w + bias + table, or of x + table.

    Terms that are None are left out. Without w, x [N, H] is added to each row of the table [chunks, H], and x
    [N, chunks * H] chunk by chunk.

    Raises AssertionError if shapes do not fit together, bias or replica_group comes without w, neither w nor table is
    given, or a size is above its limit.
    """
    expect_dims(2, x, "x [N, K]")
    hidden = check_arguments(x, w, bias, table, chunks, replica_group)
    outputs = []
    for _ in range(chunks):
        outputs.append(nl.ndarray((x.shape[0], hidden), dtype=x.dtype, buffer=nl.shared_hbm))
    columns = find_core_range(hidden, BANK, nl.program_id(0))
    if w is None:
        add_table(outputs, x, table, columns)
    else:
        project_embeddings(outputs, x, w, (bias, table), columns, replica_group)
    return tuple(outputs) if chunks > 1 else outputs[0]


def check_arguments(x, w, bias, table, chunks, replica_group):
    """Return H; raise AssertionError if shapes do not fit together or a size is above its limit."""
    images, depth = x.shape
    assert images <= PARTITIONS, f"modulation takes at most {PARTITIONS} images, not {images}"
    assert chunks >= 1 and chunks <= PARTITIONS, f"chunks is 1 to {PARTITIONS}, not {chunks}"
    assert w is not None or table is not None, (
        "modulation needs w, or a table that is added to x; both are None"
    )
    if w is None:
        assert bias is None, "bias is given without w; add it to the table"
        assert replica_group is None, "replica_group is given without w, so that there is nothing to sum"
        expect_dims(2, table, "table [J, H]")
        hidden = table.shape[1]
        assert depth == chunks * hidden or depth == hidden, (
            f"x has {chunks * hidden} columns for {chunks} chunks of {hidden}, or {hidden} for all chunks, not {depth}"
        )
    else:
        expect_dims(2, w, "w [K, J * H]")
        assert w.shape[0] == depth, f"w has {w.shape[0]} rows for x of {depth} columns; give as many"
        assert depth <= MAX_CONTRACTION, f"modulation contracts at most {MAX_CONTRACTION}, not {depth}"
        assert w.shape[1] % chunks == 0, f"{chunks} chunks do not divide the {w.shape[1]} columns of w"
        hidden = w.shape[1] // chunks
    expect_hidden("modulation", x, hidden, MAX_ROW_BYTES)
    expect_row(bias, chunks * hidden, "bias")
    assert table is None or table.shape == (chunks, hidden), (
        f"table is [{chunks}, {hidden}], not {table.shape}"
    )
    return hidden


def project_embeddings(outputs, x, w, added, columns, replica_group):
    """Write columns (first, end) of the chunks of silu(x) @ w, summed over the ranks, plus the rows in `added`.

    Args:
        outputs: for each chunk a tensor [N, H] @ HBM.
        x: [N, K] @ HBM.
        w: [K, chunks * H] @ HBM.
        added: bias [1, chunks * H] and table [chunks, H] @ HBM, each of which may be None.
        columns: range of the columns of each chunk that are written.
        replica_group: the ranks, or None.
    """
    first, end = columns
    images, hidden = outputs[0].shape
    rows = load_activated(x)
    rank_sum = RankSum(replica_group, 1, SUMS_AHEAD, [])
    for chunk in range(len(outputs)):
        start = chunk * hidden
        bias, table = added
        bias_row = None if bias is None else bias[:, start + first : start + end]
        table_row = None if table is None else table[chunk : chunk + 1, first:end]
        product = ResidualProduct(
            outputs[chunk][:, first:end],
            None,
            MovingWeight([WeightMatrix(w[:, start + first : start + end])]),
            add_rows(bias_row, table_row, images),
            rank_sum,
        )
        for column in range(0, end - first, count_chunk_columns(images)):
            compute_chunk(product, [rows], 0, column)
    rank_sum.finish()


def load_activated(x):
    """Return silu(x), x [N, K] @ HBM, transposed in a new SBUF tile [k in block, block, image] in x's dtype."""
    images, depth = x.shape
    tile = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.sbuf)
    # The Scalar engine's queue passes the loads of w, which would delay the rows.
    transfer(tile, x, SCALAR)
    nisa.activation(dst=tile, op=nl.silu, data=tile)
    transposed = allocate_transposed(depth, images, x.dtype)
    transpose_tiles(transposed, [tile], 0)
    return transposed


def add_rows(bias, table, rows):
    """Return bias + table on each of `rows` partitions of a new float32 SBUF tile [row, column].

    Both are [1, column] @ HBM. One may be None; None is returned if both are.
    """
    total = None
    for row in (bias, table):
        if row is not None:
            repeated = broadcast_row(row, rows, nl.float32, 0.0)
            if total is None:
                total = repeated
            else:
                nisa.tensor_tensor(dst=total, data1=total, data2=repeated, op=nl.add)
    return total


def add_table(outputs, x, table, columns):
    """Write columns (first, end) of x + table to `outputs`, for each chunk a tensor [N, H] @ HBM.

    x: [N, chunks * H] @ HBM, or [N, H] if it is the same for all chunks. table: [chunks, H] @ HBM.
    """
    first, end = columns
    chunks, hidden = table.shape
    images, width = x.shape[0], end - first
    chunk_step = 0 if x.shape[1] == hidden else hidden
    for start, last in ranges(0, images, PARTITIONS // chunks):
        count = last - start
        rows = nl.ndarray((count * chunks, width), dtype=x.dtype, buffer=nl.sbuf)
        source = x.ap(
            pattern=[[x.shape[1], count], [chunk_step, chunks], [1, width]], offset=start * x.shape[1] + first
        )
        nisa.dma_copy(dst=rows, src=source)
        addend = nl.ndarray((count * chunks, width), dtype=table.dtype, buffer=nl.sbuf)
        repeated = table.ap(pattern=[[0, count], [hidden, chunks], [1, width]], offset=first)
        nisa.dma_copy(dst=addend, src=repeated)
        nisa.tensor_tensor(dst=rows, data1=rows, data2=addend, op=nl.add)
        for chunk in range(chunks):
            nisa.dma_copy(
                dst=outputs[chunk][start:last, first:end], src=rows[chunk : count * chunks : chunks, :]
            )


def modulation_reference(
    x: np.ndarray,
    w: np.ndarray | None = None,
    bias: np.ndarray | None = None,
    table: np.ndarray | None = None,
    chunks: int = 6,
    replica_group: ncc.ReplicaGroup | None = None,
) -> tuple[np.ndarray, ...] | np.ndarray:
    """Return the chunks of silu(x) @ w + bias + table, or of x + table, in x's dtype, computed in float32.

    silu(x) is rounded to x's dtype, as the kernel rounds it. replica_group is ignored: for several ranks pass x and w
    of all ranks.
    """
    rows = widened(x)
    if w is not None:
        active = activation_reference(rows, "silu").astype(x.dtype)
        rows = widened(active) @ widened(w.astype(x.dtype)) + widened_or_zero(bias)
    elif table is not None and x.shape[1] == table.shape[1]:
        rows = np.tile(rows, (1, chunks))
    sums = rows.reshape(len(x), chunks, -1) + widened_or_zero(table)
    outputs = tuple(sums[:, chunk].astype(x.dtype) for chunk in range(chunks))
    return outputs if chunks > 1 else outputs[0]
