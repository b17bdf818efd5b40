"""mlp: the feed-forward block of a layer, with its norm, its residual and the sum over ranks.

    n = norm(x);   y = x + sum over ranks of (activation(n @ w_gate + b_gate) * (n @ w_up + b_up)) @ w_down + b_down

Without w_gate the block is plain: activation(n @ w_up + b_up) @ w_down. The norm is RMSNorm, or LayerNorm if norm_bias
is given; without norm_weight there is none. norm_offset is added to norm_weight (1.0 for Gemma). Without `residual`, x
is not added. A row_gate multiplies each row of the sum over ranks by one number, sigmoid(n @ row_gate).

Dimensions:
    T   tokens; H hidden size; F this rank's part of the intermediate size.

Arguments:
    x                [T, H] @ HBM, float32 or bfloat16, the same on every rank; with N > 1 this rank's rows, [T/N, H]
    w_up             [H, F] @ HBM, float32 or bfloat16: this rank's columns; read in x's dtype
    w_down           [F, H] @ HBM, float32 or bfloat16: this rank's rows; read in x's dtype. [F, O] with another number
                     of outputs if residual is False and rows are not quantised
    w_gate           [H, F] @ HBM, float32 or bfloat16, as w_up; or None
    norm_weight      [1, H] @ HBM, float32 or bfloat16, or None; norm_bias the same
    eps, norm_offset compile-time floats
    replica_group    nki.collectives.ReplicaGroup, or None for one rank
    activation       "silu", "gelu" (by the error function), "gelu_tanh", "gelu_sigmoid" or "relu"
    b_gate, b_up     [1, F] @ HBM, float32 or bfloat16: this rank's columns, or None
    b_down           [1, H] @ HBM, float32 or bfloat16, the same on every rank, or None
    residual         compile-time bool: whether x is added
    sequence_ranks   compile-time int, N: the ranks of the group over which x and y are cut along the sequence; 1: none
    residual_gate    [N, H] @ HBM, float32 or bfloat16, the same on every rank, or None: a row for each of N images,
                     whose T / N rows follow each other, that multiplies all but x; see `residual_gate`
    row_gate         [H, 1] @ HBM, float32 or bfloat16, the same on every rank; read in x's dtype; or None
    w_gate_scales, w_up_scales
                     [1, F] @ HBM, float32: this rank's columns, or None
    w_down_scales    [1, H] @ HBM, float32, the same on every rank, or None. Scales multiply the columns of their
                     weight, whose dtype is then float8_e4m3, float8_e5m2, int8, or uint8 for 4 bits. Weights of 4 bits
                     may have scales [groups, columns], float32 or bfloat16, of groups of 32, 64 or 128 rows. Scales in
                     an MX format are uint8 [scale row, columns], and elements uint32 (MXFP8) or uint16 (MXFP4)
                     [packed row, columns] in tile order, see `mx_operands`; on trn3
    w_gate_zeros, w_up_zeros, w_down_zeros
                     uint8 @ HBM, the shapes of the scales: zero points of weights of 4 bits; None: all are 8. Such
                     weights are [packed rows, columns] uint8, nibbles of 2^-9 each, see `nibbles`. w_gate and w_up are
                     both packed, or neither
    w_gate_block_scales, w_up_block_scales
                     [ceil(H / 128), ceil(F / 128)] @ HBM, float32: this rank's columns, or None
    w_down_block_scales
                     [ceil(F / 128), ceil(H / 128)] @ HBM, float32: this rank's rows, or None. Block scales multiply 128
                     rows and columns of their weight of 8 bits, instead of scales; see `block_scales`
    nibble_dtype     "float8_e4m3" or "bfloat16": in which dtype products with bfloat16 rows take nibbles
    w_gate_input_scale, w_up_input_scale, w_down_input_scale
                     [1, 1] float32 @ HBM: static scales of the rows that the weights multiply, of all weights or None.
                     n takes the larger one of gate and up, see `static_rows`
    quantises_rows   compile-time bool: whether n and the intermediate are rounded to float8_e4m3, each row with a scale
                     of its own, see `quantised_rows`; all weights are then float8_e4m3 with scales, or int8 with
                     scales. Rows become integers beside int8, and sums are exact, see `integer_feed_forward`. Rows
                     become MXFP8 beside weights in an MX format, which take no others, see `mx_feed_forward`
    shares_row_maxima
                     compile-time bool, with quantises_rows: whether scales of the intermediate are those of the columns
                     of all ranks of the replica_group, found by an all-reduce, instead of this rank's columns; not
                     beside input scales or weights in an MX format
    returns y        [T, H] @ HBM, or [T, O], x's dtype, the same on every rank; with N > 1 this rank's rows, [T/N, H]

Layout
    The norm has rows on the partitions; the weight and the bias of a LayerNorm are applied to transposed rows, image by
    image, unless rows are cut or get scales of their own. The gate and up product has H on the partitions; its weights
    are stationary and the rows move. Its result has F on the partitions, as the down product needs it, and never goes
    to HBM.

Tiling
    row tile     up to 128 rows
    row group    up to 4 row tiles, fewer if they, their transposes and the intermediate outgrow SBUF
    unit         columns of the intermediate whose gate and up sums fill 4 PSUM banks: 256 for 512 rows
    chunk        columns of y whose sums fill the other 4 PSUM banks: 512 for 512 rows
    `run_row_groups` has the loop nest. If x is cut along the sequence, each rank normalises its rows and all-gathers
    those of all ranks, group by group; a reduce-scatter replaces the all-reduce, see `sequence`.
    Each of two cores computes half of the rows. Up to 128 rows, each computes half of F, sends its intermediate to the
    other, and computes half of the columns of y.
    Weights of 8 bits arrive in half the time, so the start and the end of few rows count twice as much. Up to 64 rows,
    with RMSNorm or none and no row_gate, lie in runs and are normalised after the gate and up product, see `few_rows`.
    On one rank without b_down, y is computed in groups of 32 or 64 columns of the PE array, see `grouped_product`.
    A last block of 64 columns of F shares the PE array: gate and up are one stationary tile, and the down product
    multiplies two row tiles at once.

Limits:
    H up to 8192, in bfloat16 without biases, offset of the norm and block scales up to 16384; F up to 16384. A row_gate
    comes without b_down. H of quantised rows of several images is at most 4096. A weight has at most 4096 block scales.
    In an MX format H and F are multiples of 32, and in MXFP8 H is at most 8192.

Cost
    HBM: the three weights once for each row group, the norm's weight and the biases once, x twice (once up to 128
    rows), y once. Over ranks: one all-reduce of y's size in x's dtype, from SBUF to SBUF in chunks. If x is cut: one
    all-gather of rows, which are written to HBM and read, and one reduce-scatter. Values are rounded to x's dtype after
    the norm, after the gate, before and after the sum over ranks, and in y.
    Predicted on trn2 in bfloat16, of the floor: 95 % for T = 8192 (H = 4096, F = 1792), 85 % (H = 8192, F = 448);
    95 % for T = 1 and 91 % in decode. On two cores 86 to 92 % of half of the floor (H = 8192, F = 896). Bound: the
    Tensor engine from some hundred rows on, below it reading the weights. A sum over 2 ranks adds 4 % to T = 2048
    (H = 8192, F = 896), over 8 ranks 23 %; with rows that are cut 4 and 6 %.
    A residual_gate multiplies each rank's sums as they leave PSUM, before they are rounded and added up. A plain block
    with LayerNorm, biases, gelu_tanh and residual_gate reaches 93 % with T = 4096 (H = 1152, F = 4608), 95 % (H = 1536,
    F = 6144), 91 % (H = 3072, F = 1536), and 91 % with T = 2048 of two images (H = 1152, F = 4608).
    With quantises_rows T = 2048, 4096 and 8192 are 1.74, 1.83 and 1.88 times as fast as in bfloat16 (H = 4096,
    F = 1792), 1.94, 1.92 and 1.94 times (H = 8192, F = 3584), 1.30, 1.31 and 1.29 times (H = 8192, F = 896). The plain
    block above is 1.22 times as fast with T = 1024 (H = 1152, F = 4608), 1.31 with T = 4096, 1.53 with T = 4096
    (H = 1536, F = 6144). With maxima taken when the intermediate is complete, and one instruction that divides it,
    these were 0.91, 0.98 and 1.19; with GpSimd's maxima of magnitudes from the Scalar engine 1.11, 1.24 and 1.52.
    shares_row_maxima over 8 ranks adds 8, 11 and 32 us to 82, 268 and 736 us for T = 1, 512 and 2048 (H = 4096,
    F = 1792), and 7, 17 and 103 us to 267, 704 and 2686 us (H = 8192, F = 3584): an all-reduce for each row group.
    With float8_e4m3 weights, on one core in program order, T = 1, 16 and 64 are 1.89, 1.86 and 1.83 times as fast as
    with bfloat16 (H = 4096, F = 1792); 1.90, 1.85 and 1.81 (H = 8192, F = 896); 1.99, 1.91 and 1.85 (H = 8192,
    F = 448). The time to read the stored bytes at 358 GB/s is 84 to 103 % of theirs. From 128 rows on the Tensor engine
    is the bound, and weights of 8 bits gain nothing.
    With a scale for each 128 rows and columns T = 1, 16 and 64 are 1.82, 1.80 and 1.66 times as fast as with bfloat16
    (H = 4096, F = 1792), 1.81, 1.79 and 1.75 times (H = 7168, F = 2048), 1.59, 1.56 and 1.22 times (H = 7168, F = 256);
    T = 512 takes 4, 3 and 19 % longer, T = 2048 4 % (H = 4096, F = 1792). Copies of up to 64 rows are multiplied by the
    scales, beyond that the weights.
    With weights of 4 bits and a scale for each column (H = 4096, F = 1792), T = 1, 16 and 64 are 2.31, 2.17 and 1.66
    times as fast as with bfloat16; if bit operations on words of 32 bits take one element a cycle instead of two, a
    guess of the record, 1.67 times at T = 1 and 1.64 at 16. Rows lie in paired runs there, see `nibbles`. Up to 64 rows
    x is stationary in groups of columns of the PE array for gate and up too, see `grouped_gate`. T = 128 takes as
    long as in bfloat16, T = 2048 11 % longer. nibble_dtype "bfloat16", for chips whose Tensor engine takes subnormal
    fp8 operands for 0, takes as long as bfloat16 at T = 1.
    With scales of groups of 128 rows T = 1, 4, 8, 16 and 64 are 2.40, 2.35, 2.03, 1.53 and 0.68 times as fast as with
    bfloat16: the Vector engine scales T / 128 sums for each weight, see `stacks`, and a DMA repeats float32 scales for
    each row. More rows, in groups of 64 more than 32 and of 32 more than 16, meet weights that were multiplied by their
    scales in SBUF, see `scale_groups`: T = 128 is 0.46 and T = 512 is 0.94 times as fast,
    with stored zero points 0.29 and 0.60 times.
    On trn3 T = 1, 16, 64 and 2048 take 45, 45, 46 and 404 us with weights in MXFP8 and 27, 28, 29 and 407 us in MXFP4,
    beside 83, 84, 85 and 1217 us in bfloat16 (H = 4096, F = 1792). Up to 64 rows the time to read the stored bytes is
    83 and 70 % of theirs. T = 2048 reaches 71 % of the peak of MX products.
"""

from __future__ import annotations

import nki
import nki.language as nl
import numpy as np

from nki_kernels.image_rows import repeat_image_rows_reference
from nki_kernels.norms.blocks import load_norm_blocks
from nki_kernels.norms.norm import Norm, check_one_image
from nki_kernels.norms.row_tiles import RowNorm, allocate_row_scratch, load_norm
from nki_kernels.precision import erf_reference, widen_blocks_reference, widened, widened_or_zero
from nki_kernels.projection.feed_forward import (
    STREAM_BYTES,
    FeedForward,
    assign_core_share,
    build_gated_product,
    count_tiles_per_group,
    cut_down_weight,
    load_row_gate,
)
from nki_kernels.projection.feed_forward_pipeline import run_row_groups
from nki_kernels.projection.feed_forward_weights import check_arguments, check_row_gate, wrap_mlp_weights
from nki_kernels.projection.few_rows import can_take_runs, takes_runs
from nki_kernels.projection.gated_product import needs_tail_in_both_halves
from nki_kernels.projection.grouped_gate import (
    plan_gate_groups,
)
from nki_kernels.projection.grouped_product import plan_groups
from nki_kernels.projection.integer_feed_forward import run_integer_feed_forward
from nki_kernels.projection.integer_product import integer_rows_reference, quantised_product_reference
from nki_kernels.projection.mx_feed_forward import run_mx_feed_forward
from nki_kernels.projection.mx_operands import round_to_mx_reference, stores_mx, widen_mx_reference
from nki_kernels.projection.quantised_rows import (
    create_row_quantiser,
    quantise_rows_reference,
)
from nki_kernels.projection.residual_gate import (
    CHUNK_ELEMENTS,
    check_residual_gate,
    count_gate_bytes,
    create_residual_gate,
)
from nki_kernels.projection.residual_product import (
    MovingWeight,
    ResidualProduct,
    keeps_scales,
)
from nki_kernels.projection.row_groups import (
    count_bytes,
    count_norm_bytes,
    count_rows_per_rank,
    divide_into_groups,
    item_bytes,
)
from nki_kernels.projection.row_maxima import check_shared_maxima
from nki_kernels.projection.scaled_rows import scale_rows
from nki_kernels.projection.sequence import check_ranks, plan_gathered_rows, use_whole_rows
from nki_kernels.projection.stacks import can_stack, count_columns_of_rows
from nki_kernels.projection.static_rows import (
    check_input_scales,
    load_static_quantiser,
    static_rows_reference,
)
from nki_kernels.projection.sums import RankSum
from nki_kernels.scale_groups import widen_packed_reference
from nki_kernels.tiles import PARTITIONS, broadcast_row, expect_dims, filled
from nki_kernels.weights import has_block_scales, is_e4m3

cores = (1, 2)

MOST_QUANTISED_COLUMNS = 4096
"""Largest H of quantised rows of several images: SBUF holds the norms of three of them beside the rows."""

SUMS_IN_FLIGHT = 2
"""Chunks of y whose sums over the ranks may be under way before the first of them is stored, beside groups of rows."""

FEW_ROWS_SUMS_IN_FLIGHT = 8
"""Chunks of y whose sums may be under way for up to 128 rows: a collective takes longer than a chunk."""


@nki.jit
def mlp(
    x,
    w_up,
    w_down,
    w_gate=None,
    norm_weight=None,
    eps=0.0,
    replica_group=None,
    activation="silu",
    b_gate=None,
    b_up=None,
    b_down=None,
    norm_bias=None,
    norm_offset=0.0,
    residual=True,
    sequence_ranks=1,
    row_gate=None,
    w_gate_scales=None,
    w_up_scales=None,
    w_down_scales=None,
    w_gate_zeros=None,
    w_up_zeros=None,
    w_down_zeros=None,
    w_gate_block_scales=None,
    w_up_block_scales=None,
    w_down_block_scales=None,
    nibble_dtype="float8_e4m3",
    w_gate_input_scale=None,
    w_up_input_scale=None,
    w_down_input_scale=None,
    quantises_rows=False,
    residual_gate=None,
    shares_row_maxima=False,
):
    """Return y [T, H] @ HBM in x's dtype: x + sum over ranks of (activation(n @ w_gate) * (n @ w_up)) @ w_down.

    n is norm(x): LayerNorm with a norm_bias, RMSNorm without one, x itself without a norm_weight. Without
    w_gate, the sum is of activation(n @ w_up) @ w_down. Biases that are given are added to their products. A
    row_gate multiplies each row of the sum by sigmoid(n @ row_gate). x is added only if `residual`. With
    sequence_ranks N > 1, x and y are this rank's T / N rows. With quantises_rows both products take rows of the
    weights' dtype, fp8, int8 or MXFP8, with a scale for each row, or with the input scales. With shares_row_maxima
    ranks have the same scales of the intermediate. A residual_gate multiplies all but x.

    Raises AssertionError if shapes do not fit together, H or F is above its limit, or the activation is
    unknown. Also if b_gate comes without w_gate, row_gate with b_down, if the ranks do not divide the rows,
    if one of w_gate and w_up is packed, or if ranks share row maxima that are not computed.
    """
    expect_dims(2, x, "x [T, H]")
    expect_dims(2, w_up, "w_up [H, F]")
    weights = wrap_mlp_weights(
        (x.shape[1], w_up.shape[1]),
        (w_gate, w_up, w_down),
        (w_gate_scales, w_up_scales, w_down_scales),
        (w_gate_zeros, w_up_zeros, w_down_zeros),
        (w_gate_block_scales, w_up_block_scales, w_down_block_scales),
        (b_gate, b_up, b_down),
        nibble_dtype,
        quantises_rows,
    )
    norm = Norm(norm_weight, norm_bias, norm_offset, eps)
    outputs = x.shape[1] if residual or quantises_rows else w_down.shape[1]
    check_arguments(x, weights, norm, outputs)
    check_row_gate(x, row_gate, b_down)
    input_scales = [w_gate_input_scale, w_up_input_scale, w_down_input_scale]
    check_input_scales([w_gate, w_up, w_down], input_scales, quantises_rows)
    is_mx = quantises_rows and not is_e4m3(w_up.dtype) and w_up.dtype != nl.int8
    check_shared_maxima(shares_row_maxima, quantises_rows, w_up_input_scale is not None, is_mx)
    maxima_group = replica_group if shares_row_maxima else None
    static = None
    if w_up_input_scale is not None:
        static = load_static_quantiser(input_scales, w_up.dtype)
    ranks = sequence_ranks
    tokens, hidden, inner = ranks * x.shape[0], x.shape[1], w_up.shape[1]
    check_ranks(ranks, replica_group, tokens)
    check_residual_gate(residual_gate, tokens, hidden, residual, ranks)
    check_one_image(norm, ranks, quantises_rows and not is_e4m3(w_up.dtype))
    assert norm.count_images() == 1 or not quantises_rows or hidden <= MOST_QUANTISED_COLUMNS, (
        f"norm_weight has a row for each of {norm.count_images()} images, beside rows of {hidden} elements that are "
        f"quantised; at most {MOST_QUANTISED_COLUMNS}: pass the images one by one, or leave quantises_rows out"
    )
    y = nl.ndarray((x.shape[0], outputs), dtype=x.dtype, buffer=nl.shared_hbm)
    if quantises_rows and not is_e4m3(w_up.dtype):
        assert residual_gate is None, (
            "residual_gate is given with rows that become integers or MXFP8; leave out quantises_rows or residual_gate"
        )
        rank_sum = RankSum(replica_group, ranks, SUMS_IN_FLIGHT, [])
        function = activation_function(activation)
        if w_up.dtype == nl.int8:
            run_integer_feed_forward(
                y, x, weights, norm, function, row_gate, residual, rank_sum, static, maxima_group
            )
        else:
            run_mx_feed_forward(y, x, weights, norm, function, row_gate, residual, rank_sum)
        return y
    core = assign_core_share(tokens, outputs, weights, ranks)
    first_row, end_row = core.rows
    first_column, end_column = core.columns
    x = x[first_row:end_row, :]
    tile_rows = min(x.shape[0], PARTITIONS)

    # Operands that are loaded once.
    function = activation_function(activation)
    # Weights of 8 bits arrive in half the time, which the norm of few rows on few partitions would exceed.
    few_bytes = (
        weights.w_up.nibbles is not None or w_down_scales is not None or w_down_block_scales is not None
    )
    few_rows = (
        few_bytes
        and not quantises_rows
        and residual_gate is None
        and takes_runs(x, norm, ranks, row_gate is not None)
    )
    if few_rows:
        scale_rows(weights.list_gated(), x.dtype)
        scale_rows([weights.w_down], x.dtype)
    in_runs = few_rows and can_take_runs(weights.w_up) and not has_block_scales(weights.list_gated())
    gated = build_gated_product(weights, core.inner_columns, function, in_runs)
    down_matrices, layout = cut_down_weight(weights, core), None
    if few_rows:
        gated.layout = plan_gate_groups(gated.weights, x.shape[0], gated.biases)
        scales_rows = weights.w_down.scales_rows
        scales_sums = w_down_scales is not None and (replica_group is None or weights.w_down.scales is None)
        if b_down is None and (scales_sums or (scales_rows and replica_group is None)):
            columns_of_rows = count_columns_of_rows(x.shape[0], down_matrices[0])
            unit = PARTITIONS if scales_rows else 1
            layout = plan_groups(columns_of_rows, end_column - first_column, unit)
        few_rows = can_stack(gated, down_matrices, layout, x.dtype)
    if not few_rows:
        gated.in_runs, gated.layout, layout = False, None, None
    row_norm, block_norm, bias = None, None, None
    resident_bytes = 0
    for weight in weights.list_matrices():
        resident_bytes += count_bytes(weight.block_scales)
    if norm_bias is not None and ranks == 1 and not quantises_rows:
        block_norm = load_norm_blocks(norm, filled((tile_rows, 1), eps), False, tokens)
        row_norm = RowNorm(None, None, block_norm.eps, None)
        resident_bytes += count_bytes(block_norm.weight) + count_bytes(block_norm.bias)
    elif norm_weight is not None and not few_rows:
        row_norm = load_norm(norm, allocate_row_scratch(tile_rows, hidden, x.dtype), x.dtype, tokens)
        resident_bytes += count_norm_bytes(row_norm)
    scales = None
    if weights.w_down.scales is not None:
        scales = w_down_scales[:, first_column:end_column]
        if keeps_scales(scales, tile_rows):
            resident_bytes += count_bytes(scales)
    if b_down is not None:
        bias = broadcast_row(b_down[:, first_column:end_column], tile_rows, x.dtype, 0.0)
        resident_bytes += count_bytes(bias)
    gate = create_residual_gate(residual_gate, tokens, core.rows, core.columns)
    if gate is not None:
        # The gates take what partial sums, sums over ranks and residuals leave of the bytes for tiles on their way.
        sums = 1 if replica_group is None else SUMS_IN_FLIGHT + 1
        free_bytes = STREAM_BYTES - 2 * sums * CHUNK_ELEMENTS * item_bytes(x.dtype)
        gate_bytes = count_gate_bytes(gate, bias, w_down_scales, sums)
        resident_bytes += max(0, gate_bytes - free_bytes)

    # Row groups. Rows of other ranks arrive normalised.
    group_tiles = count_tiles_per_group(hidden, inner, x.dtype, resident_bytes, ranks)
    group_rows = max(1, group_tiles) * count_rows_per_rank(ranks)
    groups = divide_into_groups(x.shape[0], group_rows)
    rows = use_whole_rows(x)
    if ranks > 1:
        rows = plan_gathered_rows(x, row_norm, ranks, replica_group, group_rows)
        row_norm = None

    # The down product, its sum over ranks, and the residual.
    tail_twice = (
        not quantises_rows and ranks * x.shape[0] > PARTITIONS and needs_tail_in_both_halves(gated.weights)
    )
    down_weight = MovingWeight(down_matrices, tail_in_both_halves=tail_twice)
    in_flight = SUMS_IN_FLIGHT if tokens > PARTITIONS else FEW_ROWS_SUMS_IN_FLIGHT
    if gate is not None and group_tiles <= 0 and tokens > PARTITIONS:
        in_flight = 1
    rank_sum = RankSum(replica_group, ranks, in_flight, [])
    y_share = y[first_row:end_row, first_column:end_column]
    x_share = x[:, first_column:end_column] if residual else None
    gate_column, row_scales = None, None
    if row_gate is not None:
        gate_column, row_scales = load_row_gate(row_gate, x.dtype, quantises_rows), []
    elif quantises_rows:
        row_scales = []
    down = ResidualProduct(y_share, x_share, down_weight, bias, rank_sum, None, row_scales, scales)
    down.gate = gate
    run_norm = norm if few_rows and norm_weight is not None else None
    ffn = FeedForward(
        rows, row_norm, gated, down, core, gate_column, ranks, x.dtype, few_rows, run_norm, layout
    )
    ffn.block_norm = block_norm
    if static is not None:
        ffn.quantiser, ffn.static = static, static
    elif quantises_rows:
        ffn.maxima_group = maxima_group
        gated.gate_factors_only = w_gate is not None and b_up is None
        ffn.quantiser = create_row_quantiser(min(PARTITIONS, tokens), hidden, x.dtype, w_up.dtype)
    if group_tiles > 0:
        run_row_groups(ffn, groups)
    else:
        # SBUF holds one intermediate only, so the products of two groups cannot overlap.
        for group in groups:
            run_row_groups(ffn, [group])
    rank_sum.finish()
    return y


def activation_function(name):
    """Return the function of the Scalar engine (an nl function) for the name of an activation.

    Names are "silu", "gelu" (by erf), "gelu_tanh", "gelu_sigmoid" (x * sigmoid(1.702 x)) and "relu".

    Raises AssertionError for other names.
    """
    assert name in ("silu", "gelu", "gelu_tanh", "gelu_sigmoid", "relu"), (
        f"activation is silu, gelu, gelu_tanh, gelu_sigmoid or relu, not {name}"
    )
    if name == "silu":
        return nl.silu
    if name == "relu":
        return nl.relu
    if name == "gelu_sigmoid":
        return nl.gelu_apprx_sigmoid
    return nl.gelu if name == "gelu" else nl.gelu_apprx_tanh


def mlp_reference(
    x: np.ndarray,
    w_up: np.ndarray,
    w_down: np.ndarray,
    w_gate: np.ndarray | None = None,
    norm_weight: np.ndarray | None = None,
    eps: float = 0.0,
    replica_group: object = None,
    activation: str = "silu",
    b_gate: np.ndarray | None = None,
    b_up: np.ndarray | None = None,
    b_down: np.ndarray | None = None,
    norm_bias: np.ndarray | None = None,
    norm_offset: float = 0.0,
    residual: bool = True,
    sequence_ranks: int = 1,
    row_gate: np.ndarray | None = None,
    w_gate_scales: np.ndarray | None = None,
    w_up_scales: np.ndarray | None = None,
    w_down_scales: np.ndarray | None = None,
    w_gate_zeros: np.ndarray | None = None,
    w_up_zeros: np.ndarray | None = None,
    w_down_zeros: np.ndarray | None = None,
    w_gate_block_scales: np.ndarray | None = None,
    w_up_block_scales: np.ndarray | None = None,
    w_down_block_scales: np.ndarray | None = None,
    nibble_dtype: str = "float8_e4m3",
    w_gate_input_scale: np.ndarray | None = None,
    w_up_input_scale: np.ndarray | None = None,
    w_down_input_scale: np.ndarray | None = None,
    quantises_rows: bool = False,
    residual_gate: np.ndarray | None = None,
    shares_row_maxima: bool = False,
) -> np.ndarray:
    """Return the kernel's y in x's dtype, computed in float32 and rounded once.

    y = x + (activation(n @ w_gate + b_gate) * (n @ w_up + b_up)) @ w_down + b_down, where n is norm(x).
    Everything that is None is left out, and x too unless `residual`. With a row_gate all but x is multiplied
    by sigmoid(n @ row_gate), with a residual_gate by the row of its image.

    replica_group, sequence_ranks and shares_row_maxima are ignored. For several ranks pass x with all T rows, and
    weights and biases with the columns of all ranks: the sum over ranks is then part of the product. The result has
    all T rows. With quantises_rows, n and the intermediate are rounded to x's dtype, and then to fp8 with a scale for
    each row; the kernel takes scales of the intermediate from each rank's columns, unless ranks share row maxima.
    With a gate and without b_up, the intermediate is rounded without the scale of n's row. With input scales all rows
    have the same, see `static_rows`. With int8 weights rows become integers instead, and products are those of
    `integer_product`. With weights in an MX format n and the intermediate are rounded to bfloat16 and then to MXFP8.
    """
    normalised = widened(x)
    if norm_bias is not None:
        normalised = normalised - normalised.mean(axis=-1, keepdims=True)
    if norm_weight is not None:
        normalised = normalised / np.sqrt((normalised * normalised).mean(axis=-1, keepdims=True) + eps)
        normalised = normalised * (repeat_image_rows_reference(norm_weight, len(x)) + norm_offset)
    if norm_bias is not None:
        normalised = normalised + repeat_image_rows_reference(norm_bias, len(x))
    deferred = None
    as_integers, as_mx = quantises_rows and w_up.dtype == np.int8, stores_mx(w_up)
    gate_rows = None
    hidden, width = x.shape[1], w_up.shape[1]
    row_scale = w_up_input_scale
    if w_gate_input_scale is not None:
        row_scale = np.maximum(w_gate_input_scale, w_up_input_scale)
    if as_integers:
        normalised = normalised.astype(x.dtype)
    elif as_mx:
        gate_rows = normalised.astype(nl.bfloat16).astype(normalised.dtype)
        normalised = round_to_mx_reference(normalised)
        if w_gate is not None:
            w_gate, w_gate_scales = widen_mx_reference(w_gate, w_gate_scales, hidden), None
        w_up, w_up_scales = widen_mx_reference(w_up, w_up_scales, hidden), None
        w_down, w_down_scales = widen_mx_reference(w_down, w_down_scales, width), None
    elif quantises_rows and row_scale is not None:
        normalised = static_rows_reference(normalised, row_scale, w_up.dtype, x.dtype, x.dtype)
    elif quantises_rows:
        codes, row_scales = quantise_rows_reference(normalised, w_up.dtype, x.dtype, x.dtype)
        normalised = codes * row_scales
        deferred = row_scales if w_gate is not None and b_up is None else np.ones_like(row_scales)
    up, w_up_scales = widen_packed_reference(w_up, hidden, w_up_scales, w_up_zeros)
    up = widen_blocks_reference(up, w_up_block_scales)
    inner = product_reference(normalised, up, w_up_scales, as_integers, row_scale) + widened_or_zero(b_up)
    if w_gate is None:
        inner = activation_reference(inner, activation)
    else:
        w_gate, w_gate_scales = widen_packed_reference(w_gate, hidden, w_gate_scales, w_gate_zeros)
        w_gate = widen_blocks_reference(w_gate, w_gate_block_scales)
        gate = product_reference(normalised, w_gate, w_gate_scales, as_integers, row_scale)
        gate = gate + widened_or_zero(b_gate)
        inner = activation_reference(gate, activation) * inner
    w_down, w_down_scales = widen_packed_reference(w_down, width, w_down_scales, w_down_zeros)
    w_down = widen_blocks_reference(w_down, w_down_block_scales)
    if as_integers:
        inner = inner.astype(x.dtype)
    elif as_mx:
        inner = round_to_mx_reference(inner)
    elif deferred is not None:
        codes, inner_scales = quantise_rows_reference(inner / deferred, w_up.dtype, x.dtype)
        inner = codes * (inner_scales * deferred)
    elif quantises_rows:
        inner = static_rows_reference(inner, w_down_input_scale, w_up.dtype, x.dtype)
    y = product_reference(inner, w_down, w_down_scales, as_integers, w_down_input_scale)
    y = y + widened_or_zero(b_down)
    if row_gate is not None:
        if as_integers:
            numbers, row_scales = integer_rows_reference(normalised, row_scale)
            normalised = numbers * row_scales
        gate_rows = normalised if gate_rows is None else gate_rows
        y = y / (1 + np.exp(-(gate_rows @ widened(row_gate))))
    if residual_gate is not None:
        y = y * repeat_image_rows_reference(residual_gate, len(x))
    return (widened_or_zero(x if residual else None) + y).astype(x.dtype)


def product_reference(
    rows: np.ndarray,
    weight: np.ndarray,
    scales: np.ndarray | None,
    as_integers: bool,
    input_scale: np.ndarray | None,
) -> np.ndarray:
    """Return rows [T, K] times the columns of a weight [K, N] and their scales, of integers as W8A8 defines it.

    input_scale: static scale of rows that become integers, or None.
    """
    if as_integers:
        return quantised_product_reference(rows, weight, scales, input_scale)
    return rows @ widened(weight, scales)


def activation_reference(values: np.ndarray, name: str) -> np.ndarray:
    """Return the activation of each element for a name of `activation_function`."""
    if name == "silu":
        return values / (1 + np.exp(-values))
    if name == "gelu_sigmoid":
        return values / (1 + np.exp(-1.702 * values))
    if name == "gelu":
        return values / 2 * (1 + erf_reference(values / np.sqrt(2.0).astype(values.dtype)))
    if name == "gelu_tanh":
        cubic = values + 0.044715 * values * values * values
        return values / 2 * (1 + np.tanh(np.sqrt(2 / np.pi).astype(values.dtype) * cubic))
    return np.maximum(values, 0)
