"""output_projection: the heads' outputs back to the hidden size, summed over ranks, plus the residual.

    y = residual + sum over ranks of o @ w_o + bias

With a gate, o is multiplied by sigmoid(gate) first, element by element. With a residual_gate, residual + residual_gate
* (sum + bias) is the result.

Dimensions:
    T   tokens; K width of this rank's heads (heads times head size); H hidden size.

Arguments:
    o              [T, K] @ HBM, float32 or bfloat16: this rank's heads
    w_o            [K, H] @ HBM, float32 or bfloat16: this rank's rows; read in o's dtype
    w_o_scales     [1, H] @ HBM, float32, or None. They multiply the columns of w_o, whose dtype is then float8_e4m3,
                   float8_e5m2 or int8, or uint8 for 4 bits
    w_o_zeros, nibble_dtype
                   zero points and operands of a w_o of 4 bits, [packed rows, H], as w_down_zeros in mlp
    w_o_block_scales
                   [ceil(K / 128), ceil(H / 128)] @ HBM, float32, or None: at most 8192 numbers that multiply 128 rows
                   and columns of w_o each, instead of w_o_scales; see `block_scales`
    residual       [T, H] @ HBM, o's dtype, the same on every rank, or None; with N > 1 this rank's rows, [T/N, H]
    replica_group  nki.collectives.ReplicaGroup, or None for one rank
    bias           [1, H] @ HBM, float32 or bfloat16, the same on every rank, or None
    sequence_ranks compile-time int, N: the ranks of the group over which residual and y are cut along the sequence
    gate           [T, K] @ HBM, o's dtype, or None
    quantises_rows compile-time bool: whether rows of o, gated if they are, are rounded to float8_e4m3, each row with a
                   scale of its own, that of this rank's columns, see `quantised_rows`; w_o is then float8_e4m3 with
                   scales, or int8 with scales. Rows become integers beside int8, and sums are exact, see
                   `integer_projection`
    residual_gate  [N, H] @ HBM, float32 or bfloat16, the same on every rank, or None: a row for each of N images, whose
                   T / N rows follow each other; see `residual_gate`
    shares_row_maxima
                   compile-time bool, with quantises_rows: whether scales are those of the columns of all ranks of the
                   replica_group, found by an all-reduce, see `row_maxima`
    returns y      [T, H] @ HBM, o's dtype, the same on every rank; with N > 1 this rank's rows, [T/N, H]

Layout
    K lies on the partitions for the product, rows on the partitions of its result.

Tiling
    w_o stays in SBUF if it takes up to HELD_ELEMENTS per partition: then 128 rows at a time, chunks of 2048 columns.
    Else groups of up to 512 rows, fewer for K above 4096, in chunks of as many columns as their sums fill in four PSUM
    banks, 512 for 512 rows; w_o is read once for each group.
    Up to 64 rows that meet a w_o with scales, without bias and not cut: y is computed in groups of 32 or 64 columns of
    the PE array, see `grouped_product`.
    With quantises_rows w_o stays in SBUF up to HELD_FP8_ELEMENTS, and pairs of K blocks are multiplied at double rate.
    Two cores of a logical core take half of the rows each, up to 128 rows half of the columns of y.
    The rows of the next group are transposed after the first chunk of this one, before it if it is the only one. A
    chunk is the columns of y that accumulate together, see `residual_product`.
    A residual_gate multiplies each rank's sums in float32 as they leave PSUM. One that is the same for all rows
    multiplies the columns of a w_o of up to 512 rows that stays in SBUF, rounded to o's dtype.

Limits:
    K up to 16384, H up to 8192.

Cost
    HBM: w_o once, or once for each group; o, gate, residual, bias and y once. Over ranks: one all-reduce of y's size in
    o's dtype, from SBUF to SBUF in chunks; of rows that are cut a reduce-scatter. Rounding to o's dtype: gated rows,
    over ranks the partial product and the sum, and y. A sum over 2 or 8 ranks adds up to 3 % to T = 2048 (K = 256,
    H = 8192). Predicted on trn2 in bfloat16, of the floor: 92 % for T = 8192 (K = 512, H = 4096), 99 % (K = 128,
    H = 8192); 50 % for T = 1 (K = 128, H = 8192), whose floor is 6 us. On two cores 93 to 98 % of half of the floor in
    a prompt (K = 256, H = 8192), 55 to 69 % in decode. With float8_e4m3 weights, T = 1, 16 and 64 are 1.53, 1.53 and
    1.57 times as fast as with bfloat16 (K = 512, H = 4096), 1.49, 1.52 and 1.24 (K = 256, H = 8192), 1.08, 1.05 and
    0.86 (K = 128, H = 8192). More rows are slower, T = 128 by 5 to 45 %, T = 2048 by 1 to 4 %: scales of H columns are
    copied to all partitions. With quantises_rows T = 2048, 4096 and 8192 are 1.75, 1.85 and 1.91 times as fast as in
    bfloat16 (K = 1024, H = 8192), 1.12 to 1.15 times (K = 512, H = 4096), where HBM takes 6 us a row tile.
    shares_row_maxima over 8 ranks reads o twice from three row tiles on, and adds one all-reduce: 12, 11 and 23 us to
    27, 61 and 140 us for T = 1, 512 and 2048 (K = 512, H = 4096), and 11, 8 and 16 us to 46, 114 and 316 us (K = 1024,
    H = 8192). With a scale for each 128 rows and columns T = 1, 16 and 64 are 1.63, 1.63 and 1.23 times as fast (K =
    512, H = 4096), 1.71, 1.69 and 1.64 times (K = 2048, H = 7168); T = 512 takes 12 and 2 % longer. Bound: HBM and the
    Tensor engine alike; for few rows latency.
    With bias and residual_gate T = 4096 reaches 83 % (K = H = 1152), 86 % (K = H = 1536), 94 % (K = 384, H = 3072);
    T = 2048 of two images 78 % (K = H = 1152). With quantises_rows T = 1024 and 4096 take as long and 4 % longer
    (K = H = 1152), and T = 4096 is 1.40 times as fast (K = H = 1536).
    With weights of 4 bits T = 1 and 16 are 1.25 times as fast as with bfloat16 (K = 512, H = 4096), T = 64 as fast, and
    T = 2048 takes 11 % longer. K = 128 gains nothing. A w_o that stays in SBUF loses its zero points there.
"""

from __future__ import annotations

import nki
import nki.collectives as ncc
import nki.isa as nisa
import nki.language as nl
import numpy as np

from nki_kernels.cores import find_core_columns, find_core_rows
from nki_kernels.dma import SCALAR, STATIC, transfer
from nki_kernels.image_rows import repeat_image_rows_reference
from nki_kernels.matmul import MAX_CONTRACTION
from nki_kernels.nibbles import count_stored_rows, widen_nibbles_reference
from nki_kernels.precision import widen_blocks_reference, widened, widened_or_zero
from nki_kernels.projection.chunk_starts import plan_chunk_start
from nki_kernels.projection.few_rows import FEW_ROWS
from nki_kernels.projection.grouped_product import load_operands, multiply_in_groups, plan_groups
from nki_kernels.projection.integer_product import quantised_product_reference
from nki_kernels.projection.integer_projection import project_integer_tile
from nki_kernels.projection.quantised_rows import (
    RowPreparation,
    check_row_weight,
    create_row_quantiser,
    quantise_rows_reference,
)
from nki_kernels.projection.residual_gate import check_residual_gate, create_residual_gate
from nki_kernels.projection.residual_product import (
    MovingWeight,
    ResidualProduct,
    compute_chunk,
    count_chunk_columns,
    keeps_scales,
)
from nki_kernels.projection.row_groups import (
    allocate_transposed,
    count_bytes,
    count_rows_per_rank,
    count_tile_rows,
    item_bytes,
    split_by_rank,
    transpose_tiles,
)
from nki_kernels.projection.row_maxima import check_shared_maxima, find_largest_in_rows, share_maxima
from nki_kernels.projection.scaled_rows import scale_rows
from nki_kernels.projection.sequence import check_ranks
from nki_kernels.projection.sums import RankSum
from nki_kernels.tiles import (
    BANK,
    MAX_ROW_BYTES,
    PARTITIONS,
    blocks,
    broadcast_row,
    choose_rows_at_once,
    expect_dims,
    expect_hidden,
    ranges,
)
from nki_kernels.weights import select_columns, wrap_projection_operand

cores = (1, 2)

HELD_ELEMENTS = 16384
"""Elements per partition of the largest w_o that stays in SBUF: 32 KiB in bfloat16."""

HELD_FP8_ELEMENTS = 65536
"""Elements per partition of the largest fp8 w_o that stays in SBUF beside rows of fp8: 64 KiB."""

MOST_BLOCKS = 8192
"""Most blocks of w_o with a scale each: 32 KiB of each partition."""

STREAM_BYTES = 48 * 1024
"""Bytes of each partition that groups of rows leave to tiles on their way: weights, residuals and results."""

HELD_SUMS_AHEAD = 8
"""Chunks of y whose sums over the ranks may be under way if w_o stays in SBUF: 12 KiB per partition each."""

SUMS_AHEAD = 2
"""Chunks of y whose sums over the ranks may be under way if w_o streams through SBUF."""

MOST_GATED_BLOCKS = 4
"""Most blocks of 128 rows of a w_o whose columns a residual_gate multiplies.

The product of more blocks takes longer than the Vector engine multiplies sums by the gate.
"""
MEASURED_BYTES = 32 * 1024
"""Bytes of each partition that rows take while their largest magnitudes are searched."""

GATED_COLUMNS = 2048
"""Columns of a row tile that are gated at a time."""


@nki.jit
def output_projection(
    o,
    w_o,
    residual=None,
    replica_group=None,
    bias=None,
    sequence_ranks=1,
    gate=None,
    w_o_scales=None,
    w_o_zeros=None,
    w_o_block_scales=None,
    nibble_dtype="float8_e4m3",
    quantises_rows=False,
    residual_gate=None,
    shares_row_maxima=False,
):
    """Return y [T, H] @ HBM in o's dtype: residual + sum over ranks of (o * sigmoid(gate)) @ w_o + bias.

    A residual_gate multiplies all but the residual. Terms and factors that are None are left out. With
    quantises_rows the product takes rows of w_o's dtype, with shares_row_maxima and the same scales on all ranks.
    With sequence_ranks N > 1, residual and y are this rank's T / N rows.

    Raises AssertionError if shapes or dtypes do not fit together, or if the ranks do not divide the
    rows. Also if K is above 16384, or a row of H elements takes more than 32 KiB.
    """
    expect_dims(2, o, "o [T, K]")
    expect_dims(2, w_o, "w_o [K, H]")
    tokens, depth = o.shape
    hidden = w_o.shape[1]
    stored_rows = count_stored_rows(w_o, depth)
    assert w_o.shape[0] == stored_rows, (
        f"w_o has {w_o.shape[0]} rows for o of width {depth}; pass w_o [{stored_rows}, H], these heads' rows"
    )
    matrix = wrap_projection_operand(
        "w_o", w_o, depth, w_o_scales, w_o_zeros, nibble_dtype, w_o_block_scales, MOST_BLOCKS
    )
    if quantises_rows:
        check_row_weight("w_o", w_o, w_o_scales)
    check_shared_maxima(shares_row_maxima, quantises_rows, False, False)
    check_ranks(sequence_ranks, replica_group, tokens)
    owned = tokens // sequence_ranks
    if residual is not None:
        assert residual.shape == (owned, hidden), f"residual is [{owned}, {hidden}], not {residual.shape}"
        assert residual.dtype == o.dtype, f"residual is {residual.dtype}, o is {o.dtype}; convert one"
    assert depth <= MAX_CONTRACTION, f"output_projection contracts at most {MAX_CONTRACTION}, not {depth}"
    expect_hidden("output_projection", o, hidden, MAX_ROW_BYTES)
    if bias is not None:
        assert bias.shape == (1, hidden), f"bias is [1, {hidden}], not {bias.shape}"
    check_residual_gate(residual_gate, tokens, hidden, residual is not None, sequence_ranks)
    assert residual_gate is None or not quantises_rows or w_o.dtype != nl.int8, (
        "residual_gate is given with rows that become integers; leave out quantises_rows or residual_gate"
    )
    first, last = find_core_rows(owned, sequence_ranks)
    if gate is not None:
        assert gate.shape == o.shape, f"gate is {o.shape}, as o is, not {gate.shape}"
        assert gate.dtype == o.dtype, f"gate is {gate.dtype}, o is {o.dtype}; convert one"
        gate = split_by_rank(gate, sequence_ranks)[:, first:last, :]
    y = nl.ndarray((owned, hidden), dtype=o.dtype, buffer=nl.shared_hbm)
    left, right = find_core_columns(tokens, hidden, BANK, w_o_block_scales is not None)
    bias_rows = None
    if bias is not None:
        bias_rows = broadcast_row(bias[:, left:right], min(tokens, PARTITIONS), o.dtype, 0.0)
    project_rows(
        y[first:last, left:right],
        (split_by_rank(o, sequence_ranks)[:, first:last, :], gate),
        select_columns(matrix, left, right),
        None if residual is None else residual[first:last, left:right],
        bias_rows,
        replica_group,
        quantises_rows,
        create_residual_gate(residual_gate, tokens, (first, last), (left, right)),
        replica_group if shares_row_maxima else None,
    )
    return y


def project_rows(y, source, w_o, residual, bias, replica_group, quantises_rows, residual_gate, maxima_group):
    """Write y = residual, if any, + sum over ranks of o @ w_o + bias, if any, for this core's rows and columns.

    Everything is a view @ HBM, but for bias.

    Args:
        y: [row, H], this rank's rows.
        source: (o, gate) [rank, row, K], the rows of every rank. o is multiplied by sigmoid(gate), unless
            gate is None.
        w_o: WeightMatrix [K, H].
        residual: as y, or None.
        bias: [row, H] in SBUF, the same on every row, or None.
        replica_group: the ranks of the sum, or None for one rank.
        quantises_rows: whether rows are rounded to fp8 with a scale for each.
        residual_gate: ResidualGate, or None.
        maxima_group: the ranks that share row maxima, or None.
    """
    o = source[0]
    ranks, tokens, depth = o.shape
    hidden = w_o.elements.shape[1]
    if w_o.block_scales is not None and ranks == 1 and tokens <= FEW_ROWS and residual_gate is None:
        scale_rows([w_o], o.dtype)
    is_scaled = w_o.scales_rows or (w_o.scales is not None and not quantises_rows)
    if is_scaled and ranks == 1 and bias is None and residual_gate is None:
        layout = plan_groups(tokens, hidden, PARTITIONS if w_o.scales_rows else 1)
        if layout is not None:
            project_few_rows(y, source, w_o, residual, replica_group, layout)
            return
    if quantises_rows and w_o.elements.dtype == nl.int8:
        rank_sum = RankSum(replica_group, ranks, SUMS_AHEAD, [])
        product = ResidualProduct(y, residual, MovingWeight([w_o]), bias, rank_sum, None, [], w_o.scales)
        tile_ranges = ranges(0, tokens, count_rows_per_rank(ranks))
        loaded, maxima = [], None
        if maxima_group is not None:
            loaded = [load_group(source, tile_ranges[0][0], tile_ranges[0][1])]
            maxima = share_row_maxima(source, tile_ranges, loaded, maxima_group)
        for index in range(len(tile_ranges)):
            first, end = tile_ranges[index]
            tiles = loaded[index] if index < len(loaded) else load_group(source, first, end)
            project_integer_tile(product, tiles[0], first, None if maxima is None else maxima[index])
        rank_sum.finish()
        return
    is_resident = blocks(depth) * hidden <= (HELD_FP8_ELEMENTS if quantises_rows else HELD_ELEMENTS)
    # A weight in SBUF costs nothing for a further group; one that streams is read again, so its groups are large.
    step = count_rows_per_rank(ranks) * (1 if is_resident else choose_rows_at_once(depth) // PARTITIONS)
    groups = blocks(tokens, step)
    tile_rows = min(ranks * tokens, count_tile_rows(ranks))
    scale_bytes = count_bytes(w_o.block_scales)
    if w_o.scales is not None and keeps_scales(w_o.scales, tile_rows):
        scale_bytes = count_bytes(w_o.scales)
    ahead = count_groups_ahead(depth, step * ranks, o.dtype, is_resident, scale_bytes)
    loaded = []
    for group in range(min(ahead, groups)):
        loaded.append(load_group(source, group * step, min(tokens, (group + 1) * step)))
    quantiser, row_scales, row_dtype = None, None, o.dtype
    if quantises_rows:
        quantiser = create_row_quantiser(tile_rows, depth, o.dtype, w_o.elements.dtype, False)
        row_scales, row_dtype = quantiser.columns, w_o.elements.dtype
    if maxima_group is not None:
        quantiser.shared_maxima = share_row_maxima(source, ranges(0, tokens, step), loaded, maxima_group)
    preparation = None
    if quantiser is not None and is_resident:
        # Row tiles are measured one group before they are divided, so that the division waits for no other engine.
        tiles = []
        for group_tiles in loaded:
            tiles.extend(group_tiles)
        preparation = RowPreparation(quantiser, tiles, tiles, None, False, [], [])
    next_transposed = None
    if ahead > 0:
        quantise_group(loaded[0], quantiser, preparation, 0)
        next_transposed = transpose_group(loaded[0], row_dtype)
    rank_sum = RankSum(replica_group, ranks, HELD_SUMS_AHEAD if is_resident else SUMS_AHEAD, [])
    weight = MovingWeight([w_o], [] if is_resident else None)
    is_plain = w_o.scales is None and w_o.nibbles is None and w_o.block_scales is None
    if residual_gate is not None and is_resident and is_plain and gates_weight(residual_gate, depth, groups):
        weight.gate = residual_gate.rows
        if bias is not None:
            bias = residual_gate.select(0, tile_rows, (0, hidden), None, bias).bias
        residual_gate = None
    product = ResidualProduct(
        y, residual, weight, bias, rank_sum, None, row_scales, w_o.scales, gate=residual_gate
    )
    # Scales that are used once are loaded chunk by chunk, so that no weight waits for those of other chunks.
    if groups > 1:
        product.load_scales(tile_rows)
    for group in range(groups):
        first = group * step
        current = next_transposed
        product.negated_sums = None
        next_load = first + ahead * step
        if ahead == 0:
            tiles = load_group(source, first, min(tokens, first + step))
            quantise_group(tiles, quantiser, None, group)
            current = transpose_group(tiles, row_dtype)
        elif group + ahead < groups:
            loaded.append(load_group(source, next_load, min(tokens, next_load + step)))
            if preparation is not None:
                preparation.tiles.extend(loaded[group + ahead])
        chunk_columns, starts = count_chunk_columns(current.shape[2], ranks), []
        for column in range(0, hidden, chunk_columns):
            starts.append(plan_chunk_start(product, [current], column))
        starts.append(None)
        has_next = ahead > 0 and group + 1 < groups
        # The next rows are transposed where their copies out of PSUM run beside a chunk.
        is_alone = has_next and hidden <= chunk_columns and quantiser is None
        if is_alone:
            next_transposed = transpose_group(loaded[group + 1], row_dtype)
        for column in range(0, hidden, chunk_columns):
            if column == 0 and has_next:
                quantise_group(loaded[group + 1], quantiser, preparation, group + 1)
            index = column // chunk_columns
            compute_chunk(product, [current], first, column, starts[index], starts[index + 1])
            if column == 0 and has_next and not is_alone:
                next_transposed = transpose_group(loaded[group + 1], row_dtype)
    rank_sum.finish()


def gates_weight(residual_gate, depth, groups):
    """Return whether a ResidualGate multiplies a w_o [depth, H] that stays in SBUF, instead of sums.

    It has one row then, w_o has few blocks of 128 rows, and more groups of rows than blocks meet it.
    """
    return residual_gate.rows.shape[0] == 1 and blocks(depth) <= min(MOST_GATED_BLOCKS, groups - 1)


def project_few_rows(y, source, w_o, residual, replica_group, layout):
    """Write y as `project_rows` does, without bias, for rows that are not cut and a weight with scales.

    layout: GroupLayout of y's columns; the other arguments are those of `project_rows`.
    """
    tokens, depth = source[0].shape[1], source[0].shape[2]
    rank_sum = RankSum(replica_group, 1, HELD_SUMS_AHEAD, [])
    product = ResidualProduct(y, residual, MovingWeight([w_o]), None, rank_sum, scales=w_o.scales)
    tiles = load_group(source, 0, tokens)
    # Copies of the rows have the zeros themselves.
    width = tokens if w_o.scales_rows else layout.width
    transposed = allocate_transposed(depth, width, y.dtype)
    if tokens < width:
        nisa.memset(dst=transposed[:, :, tokens:width], value=0.0, engine=nisa.engine.gpsimd)
    transpose_tiles(transposed, tiles, 0)
    operands = load_operands(product, layout, None, STATIC)
    multiply_in_groups(product, operands, [transposed], layout)
    rank_sum.finish()


def count_groups_ahead(depth, rows, dtype, is_resident, scale_bytes):
    """Return how many groups of rows are loaded ahead of the group that is multiplied: 0, 1 or 2.

    Two if w_o is resident in SBUF; else one if SBUF holds three groups beside what streams, and 0 if not.
    depth: K. rows: rows of a group, those of all ranks. scale_bytes: bytes of each partition that scales take.
    """
    if is_resident:
        return 2
    group_bytes = blocks(depth) * rows * item_bytes(dtype)
    return 1 if 3 * group_bytes + STREAM_BYTES + scale_bytes <= nl.tile_size.sbuf_fmax_bytes else 0


def load_group(source, first, last):
    """Load rows first … last - 1 of every rank from HBM into new SBUF row tiles, and gate them; return the tiles.

    A row tile [rank * row, K] has up to 128 // N rows of each of N ranks, those of rank 0 first. source: (o,
    gate) [rank, row, K] @ HBM; o is multiplied by sigmoid(gate), unless gate is None.
    """
    o, gate = source
    ranks, _, depth = o.shape
    tiles = []
    for row, end in ranges(first, last, count_rows_per_rank(ranks)):
        tile = nl.ndarray((ranks * (end - row), depth), dtype=o.dtype, buffer=nl.sbuf)
        # The Scalar engine's queue passes the bulk loads of w_o, which would delay the rows.
        transfer(tile, o[:, row:end, :], SCALAR)
        if gate is not None:
            apply_gate(tile, gate[:, row:end, :])
        tiles.append(tile)
    return tiles


def share_row_maxima(source, groups, loaded, replica_group):
    """Return the largest magnitudes of all rows over the ranks of a group: a column [row, 1] in SBUF for each row tile.

    Groups that are not loaded yet are loaded here, and again when they are multiplied. So one all-reduce suffices.

    Args:
        source: (o, gate), as `load_group` takes it.
        groups: ranges (first, end) of rows, those of each group.
        loaded: for each of the first groups its SBUF row tiles, in order.
        replica_group: the ranks.
    """
    row_tiles, columns = list(loaded), []
    group_bytes = (
        item_bytes(source[0].dtype)
        * source[0].shape[2]
        * blocks(groups[0][1], PARTITIONS // source[0].shape[0])
    )
    ahead = max(1, MEASURED_BYTES // group_bytes)
    for index in range(len(groups)):
        # Loads of later groups are issued first, because the Scalar engine, which issues them, waits for this group.
        for first, end in groups[len(row_tiles) : index + ahead]:
            row_tiles.append(load_group(source, first, end))
        for tile in row_tiles[index]:
            columns.append(find_largest_in_rows(tile))
    return share_maxima(columns, replica_group)


def apply_gate(tile, gate):
    """Multiply an SBUF row tile in place by sigmoid(gate), where gate is [rank, row, K] @ HBM with the same rows."""
    for left, right in ranges(0, tile.shape[1], GATED_COLUMNS):
        gates = nl.ndarray((tile.shape[0], right - left), dtype=tile.dtype, buffer=nl.sbuf)
        transfer(gates, gate[:, :, left:right], SCALAR)
        factors = nl.ndarray(gates.shape, dtype=nl.float32, buffer=nl.sbuf)
        nisa.activation(dst=factors, op=nl.sigmoid, data=gates)
        nisa.tensor_tensor(dst=tile[:, left:right], data1=tile[:, left:right], data2=factors, op=nl.multiply)


def quantise_group(tiles, quantiser, preparation, group):
    """Divide the rows of SBUF row tiles [row, K] by their scales, in place; do nothing without a RowQuantiser.

    The scales are appended to `quantiser.columns`, one column for each row tile.

    Args:
        tiles: the row tiles of a group.
        quantiser: RowQuantiser, or None.
        preparation: RowPreparation of all row tiles that are loaded, where each group has one, or None. The row tile
            after this group is measured then, if there is one.
        group: number of the group.
    """
    if preparation is not None:
        preparation.advance_until(min(group + 4, preparation.count_steps()))
    elif quantiser is not None:
        preparation = RowPreparation(quantiser, tiles, tiles, None, False, [], [])
        preparation.advance_until(preparation.count_steps())


def transpose_group(tiles, dtype):
    """Return the transpose of SBUF row tiles [row, K]: a new SBUF tile [k in block, block, row] with all their rows.

    dtype: that of its elements.
    """
    rows = (len(tiles) - 1) * tiles[0].shape[0] + tiles[len(tiles) - 1].shape[0]
    result = allocate_transposed(tiles[0].shape[1], rows, dtype)
    # Rows that are quantised keep the Vector engine busy, so the Scalar engine alone copies their transposes.
    transpose_tiles(result, tiles, 0, vector_share=None if dtype == tiles[0].dtype else 0)
    return result


def output_projection_reference(
    o: np.ndarray,
    w_o: np.ndarray,
    residual: np.ndarray | None = None,
    replica_group: ncc.ReplicaGroup | None = None,
    bias: np.ndarray | None = None,
    sequence_ranks: int = 1,
    gate: np.ndarray | None = None,
    w_o_scales: np.ndarray | None = None,
    w_o_zeros: np.ndarray | None = None,
    w_o_block_scales: np.ndarray | None = None,
    nibble_dtype: str = "float8_e4m3",
    quantises_rows: bool = False,
    residual_gate: np.ndarray | None = None,
    shares_row_maxima: bool = False,
) -> np.ndarray:
    """Return residual + o @ w_o + bias in o's dtype, computed in float32 and rounded once; missing terms are 0.

    With a gate, o * sigmoid(gate) takes the place of o, rounded to o's dtype as the kernel rounds it. A residual_gate
    multiplies all but the residual.

    nibble_dtype and sequence_ranks are ignored. For several ranks pass o [T, K] and w_o [K, H] with the heads of all
    ranks, and the residual of all T rows. The sum over ranks is then part of the product, and the result has all T
    rows. With quantises_rows each row has a scale for each rank of the replica_group, whose columns are K / ranks
    consecutive ones, or with shares_row_maxima one scale; replica_group is ignored otherwise.
    """
    if gate is not None:
        o = (widened(o) / (1 + np.exp(-widened(gate)))).astype(o.dtype)
    rows, ranks = widened(o), 1
    if quantises_rows and replica_group is not None and not shares_row_maxima:
        ranks = len(replica_group.groups[0])
    if quantises_rows and w_o.dtype == np.int8:
        shares = zip(np.split(o, ranks, axis=1), np.split(w_o, ranks))
        product = sum(quantised_product_reference(heads, weight, w_o_scales) for heads, weight in shares)
    else:
        if quantises_rows:
            by_rank = rows.reshape(len(rows), ranks, -1)
            codes, scales = quantise_rows_reference(by_rank, w_o.dtype, o.dtype, o.dtype)
            rows = (codes * scales).reshape(rows.shape)
        wide = widen_blocks_reference(widen_nibbles_reference(w_o, o.shape[1], w_o_zeros), w_o_block_scales)
        product = rows @ widened(wide, w_o_scales)
    added = product + widened_or_zero(bias)
    if residual_gate is not None:
        added = added * repeat_image_rows_reference(residual_gate, len(o))
    return (widened_or_zero(residual) + added).astype(o.dtype)
