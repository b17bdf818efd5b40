"""qkv_projection: queries, keys and values of a layer, with the norm before them and the rotation after them.

    [q | k | v | gate] = norm(x) @ w_qkv + bias
    norm        RMSNorm; LayerNorm with a norm_bias; none without a norm_weight
    q, k        then normalised head by head if q_norm, k_norm are given, and rotated by position if cos, sin are
    v           then normalised head by head, if v_norm

Dimensions:
    T   tokens; H hidden size; Q and KV widths of queries and of keys (and values): heads times head size D.
    S   positions that the tables hold; R <= D elements of each head that are rotated.

Arguments:
    x            [T, H] @ HBM, float32 or bfloat16
    w_qkv        [H, Q + 2 KV + G] @ HBM, float32 or bfloat16; read in x's dtype
    w_qkv_scales [1, Q + 2 KV + G] @ HBM, float32, or None. They multiply the columns of w_qkv, whose dtype is then
                 float8_e4m3, float8_e5m2 or int8, or uint8 for 4 bits
    w_qkv_zeros, nibble_dtype
                 zero points and operands of a w_qkv of 4 bits, [packed rows, Q + 2 KV + G], as w_up_zeros in mlp
    w_qkv_block_scales
                 [ceil(H / 128), ceil((Q + 2 KV + G) / 128)] @ HBM, float32, or None: at most 8192 numbers that
                 multiply 128 rows and columns of w_qkv each, instead of w_qkv_scales; see `block_scales`
    q_size       compile-time int, Q; 0 for keys and values alone, without gates
    kv_size      compile-time int, KV; 0 in a layer that reads the keys and values of another one
    norm_weight  [1, H] @ HBM, float32 or bfloat16, or None; with norm_bias also [N, H], a row for each of N images,
                 whose T / N rows follow each other
    eps          compile-time float, of all norms
    bias         [1, Q + 2 KV + G] @ HBM, float32 or bfloat16, or None
    positions    [T, 1] @ HBM, int32, 0 <= position < S; with cos and sin
    cos, sin     [S, R/2] @ HBM, float32, or None
    head_dim     compile-time int, D; 2 * (R/2) where it is not given
    q_norm       [1, D] @ HBM, float32 or bfloat16, or None; k_norm alike
    norm_bias    as norm_weight, or None
    norm_offset  compile-time float that is added to the weights of norms: 1.0 for Gemma and adaLN
    replica_group, sequence_ranks
                 nki.collectives.ReplicaGroup and the number of its ranks, N, over which x is cut: x is [T/N, H], this
                 rank's rows, and everything else is of all rows; None and 1 where x is whole
    v_norm       compile-time bool: each head of v is divided by its root mean square
    gate_size    compile-time int, G: width of gates of the heads' outputs, 0 where there are none
    quantises_rows
                 compile-time bool: whether rows are rounded to float8_e4m3, each row with a scale of its own, see
                 `paired_rows`; w_qkv is then float8_e4m3 with scales, or int8 with scales. Rows become integers beside
                 int8, and sums are exact, see `integer_projection`
    returns q    [T, Q] @ HBM, x's dtype; alone where KV is 0
            k    [T, KV] @ HBM, x's dtype
            v    [T, KV] @ HBM, x's dtype
            gate [T, G] @ HBM, x's dtype; if G is not 0. (k, v) where Q is 0

Layout
    H on the partitions for the product, tokens on the partitions of its result, where a row's 1 / rms, the bias, the
    norms of heads and the rotation are applied. The weight of the norm is multiplied into w_qkv, or into x^T where that
    is smaller, so that no product waits for the norm. LayerNorm subtracts the mean and divides before the transpose,
    and applies weight and bias to the transpose, image by image.

Tiling
    T <= 128: x is loaded once and transposed on the Tensor engine, in runs (see `rows`); w_qkv streams past it in parts
        of 1 MiB, up to 2048 columns accumulating in 4 PSUM banks. On trn1 few rows take the way of many, see `normed`.
    T > 128: up to 64 KiB per partition of w_qkv's columns stay in SBUF, multiplied by the norm's weight. For 128 rows,
        the DMA that loads them transposes them, the Scalar and the Vector engine square and add, the Tensor engine
        multiplies. The first row tiles accumulate side by side while w_qkv arrives. Rows of a LayerNorm stay in SBUF
        for the next columns of w_qkv, as many as fit.
    Up to 64 rows that meet a w_qkv with scales, with RMSNorm or none and on one rank: x is loaded in runs, and panels
        of w_qkv share the PE array, see `group_panels`. Heads that are rotated in full, without bias and norms of
        heads, are finished for all panels at once, see `head_groups`. More rows meet weights of 4 bits without their
        zero points.
    With quantises_rows, rows are quantised in row tiles and transposed by DMA, two elements of fp8 at a time; columns
        of w_qkv stay in SBUF, and products run at double rate, see `quantised_heads`. Up to 64 rows are quantised in
        runs instead where H is a multiple of 128, and panels share the PE array as for plain rows.
    Cut along the sequence, each rank normalises its rows and gathers those of all, 256 at a time, see `sequence`.
    Two cores of a logical core take half of the rows each, with T <= 128 half of the heads.

Limits:
    H up to 8192 in float32, 16384 in bfloat16. D up to 512, and even where heads are rotated.

Cost
    HBM: w_qkv and the outputs once; x once for each group of columns that stays in SBUF, with T <= 128 once. Bound:
    reading w_qkv up to some hundred rows, the Tensor engine beyond. Of the floor in bfloat16 on trn2, for a rank of
    Llama-3.1: 80 to 87 % with T = 1 … 64; 86 to 93 % with T = 2048, rotation included; 94 to 97 % with T = 8192. On two
    cores (H = 8192, Q = 256) 66 to 68 % of half of the floor with T = 1 … 64, 88 to 95 % in a prompt.
    With float8_e4m3 weights, on one core of trn2 in program order, T = 1, 16 and 64 take 4.8, 5.6 and 6.5 us more than
    reading the stored bytes at 358 GB/s (H = 4096, Q = 512), 4.4, 5.6 and 7.1 (H = 8192, Q = 256), 4.5, 5.6 and 8.9
    (H = 8192, Q = 128): 1.77, 1.67 and 1.50 times as fast as bfloat16 on average. From 65 rows on they gain nothing.
    With weights of 4 bits T = 1, 16 and 64 are 1.54, 1.25 and 1.29 times as fast as bfloat16 (H = 4096, Q = 512), 1.51,
    1.20 and 1.01 times (H = 8192, Q = 128): latencies count more than bytes. T = 2048 takes up to 4 % longer.
    With quantises_rows, T = 2048, 4096 and 8192 are 1.71, 1.85 and 1.92 times as fast as in bfloat16 (H = 8192,
    Q = 1024), 1.26, 1.33 and 1.37 times (H = 4096, Q = 512): there the Scalar and the Vector engine quantise a row tile
    in 7.3 us, and its product takes 5.2. With LayerNorm and bias T = 1024 is 1.20 times (H = Q = KV = 1152) and
    T = 4096 1.58 times as fast (1536); with rows quantised for each group of columns these were 0.78 and 0.83. T = 1,
    16 and 64 take 16, 18 and 27 us (H = 4096), in bfloat16 26 to 27.
    With a scale for each 128 rows and columns T = 1, 16 and 64 are 1.47, 1.46 and 1.18 times as fast as with bfloat16
    (H = 4096, Q = 512); T = 128 takes 35 % longer, T = 512 1 %.
    With LayerNorm and bias T = 4096 reaches 88 % (H = Q = KV = 1152), 92 % (1536), 84 % (H = 3072, Q = KV = 384); with
    norms of heads 79 % (1536, D = 64), and rotation 82 % (3072, D = 128). T = 2048 of two images: 85 % (1152).
"""

from __future__ import annotations

import nki
import nki.language as nl
import numpy as np

from nki_kernels.cores import find_core_columns, find_core_rows
from nki_kernels.image_rows import repeat_image_rows_reference
from nki_kernels.nibbles import count_stored_rows, widen_nibbles_reference
from nki_kernels.norms.norm import Norm, check_one_image
from nki_kernels.norms.row_tiles import allocate_row_scratch, load_norm
from nki_kernels.precision import widen_blocks_reference, widened
from nki_kernels.projection.group_panels import project_in_groups
from nki_kernels.projection.heads import AngleTables, HeadNorm, Heads
from nki_kernels.projection.integer_product import quantised_product_reference
from nki_kernels.projection.integer_projection import project_integers
from nki_kernels.projection.normed import project, takes_groups
from nki_kernels.projection.paired_rows import paired_rows_reference
from nki_kernels.projection.quantised_heads import project_quantised
from nki_kernels.projection.quantised_rows import check_row_weight
from nki_kernels.projection.rows import load_repeated_row
from nki_kernels.projection.sequence import check_ranks, plan_gathered_rows, use_whole_rows
from nki_kernels.rmsnorm import rmsnorm_reference
from nki_kernels.rope import rope_reference
from nki_kernels.tiles import BANK, PARTITIONS, expect_dims, filled
from nki_kernels.weights import wrap_projection_operand

cores = (1, 2)

MAX_ROW_BYTES = 32768
"""Most bytes of a row of x: some transposed rows and columns of w_qkv have to fit in SBUF."""

MOST_BLOCKS = 8192
"""Most blocks of w_qkv with a scale each: 32 KiB of each partition."""

GATHERED_ROWS = 256
"""Rows of all ranks that are gathered at once: the fewer, the sooner the first products start."""

LEAST_OWN_ROWS = 16
"""Fewest rows of each rank that are gathered at once: results are stored in runs of so many rows."""


@nki.jit
def qkv_projection(
    x,
    w_qkv,
    q_size,
    kv_size=0,
    norm_weight=None,
    eps=0.0,
    bias=None,
    positions=None,
    cos=None,
    sin=None,
    head_dim=None,
    q_norm=None,
    k_norm=None,
    norm_bias=None,
    norm_offset=0.0,
    replica_group=None,
    sequence_ranks=1,
    v_norm=False,
    gate_size=0,
    w_qkv_scales=None,
    w_qkv_zeros=None,
    w_qkv_block_scales=None,
    nibble_dtype="float8_e4m3",
    quantises_rows=False,
):
    """Return (q, k, v), (q, k, v, gate) if gate_size is not 0, or q alone if kv_size is 0, all @ HBM in x's dtype.

    With a q_size of 0 (k, v) is returned. They are the column ranges of norm(x) @ w_qkv + bias: [T, q_size],
    [T, kv_size] twice, and [T, gate_size]. Heads of q and k are normalised with q_norm and k_norm, those of v with
    v_norm; then q and k are rotated by cos and sin at the tokens' positions. With quantises_rows the product takes rows
    of w_qkv's dtype. Each result has all T rows, also if x has only this rank's T / sequence_ranks.

    Raises AssertionError if shapes do not fit together, if H is above its limit, or if an argument comes
    without another one that it needs.
    """
    expect_dims(2, x, "x [T, H]")
    owned, hidden = x.shape
    tokens = sequence_ranks * owned
    check_ranks(sequence_ranks, replica_group, tokens)
    width = q_size + 2 * kv_size + gate_size
    most = MAX_ROW_BYTES // (4 if x.dtype == nl.float32 else 2)
    assert hidden <= most, f"qkv_projection takes a hidden size of at most {most}, not {hidden}"
    norm = Norm(norm_weight, norm_bias, norm_offset, eps)
    norm.check(hidden, tokens)
    check_one_image(norm, sequence_ranks, quantises_rows and w_qkv.dtype == nl.int8)
    assert bias is None or bias.shape == (1, width), f"bias is [1, {width}], not {bias.shape}"
    stored_rows = count_stored_rows(w_qkv, hidden)
    assert w_qkv.shape == (stored_rows, width), (
        f"w_qkv is [{stored_rows}, {q_size} + 2 * {kv_size} + {gate_size}], not {w_qkv.shape}"
    )
    matrix = wrap_projection_operand(
        "w_qkv", w_qkv, hidden, w_qkv_scales, w_qkv_zeros, nibble_dtype, w_qkv_block_scales, MOST_BLOCKS
    )
    if quantises_rows:
        check_row_weight("w_qkv", w_qkv, w_qkv_scales)
    assert kv_size > 0 or gate_size == 0, (
        f"gate_size is {gate_size}, and kv_size is 0; a layer without keys and values takes no gates"
    )
    assert q_size > 0 or (kv_size > 0 and gate_size == 0 and q_norm is None), (
        f"q_size is 0, kv_size {kv_size} and gate_size {gate_size}; keys and values alone take a kv_size, no gates and "
        "no q_norm"
    )
    angles = AngleTables(positions, cos, sin)
    head = find_head_size(q_size, kv_size, tokens, angles, head_dim, q_norm, k_norm, v_norm)
    outputs = []
    for size in (q_size, kv_size, kv_size, gate_size):
        if size > 0:
            outputs.append(nl.ndarray((tokens, size), dtype=x.dtype, buffer=nl.shared_hbm))
    rows, rotated, turned = min(tokens, PARTITIONS), q_size + kv_size, q_size + 2 * kv_size
    norms = []
    for start, end, weight in ((0, q_size, q_norm), (q_size, rotated, k_norm)):
        if weight is not None:
            norms.append(HeadNorm(start, end, load_repeated_row(weight, rows, norm_offset)))
    if v_norm:
        norms.append(HeadNorm(rotated, turned, None))
    else:
        turned = rotated
    if head == 0:
        turned, rotated = 0, 0
    biases = load_repeated_row(bias, rows) if bias is not None else None
    epsilons = filled((rows, 1), eps)
    first, last = find_core_rows(owned, sequence_ranks)
    # A core takes whole heads, because the norm and the rotation of a head need all of its columns.
    columns = find_core_columns(tokens, width, head if head > 0 else PARTITIONS)
    source = use_whole_rows(x[first:last, :])
    if sequence_ranks > 1:
        row_norm = None
        if norm_weight is not None:
            # Rows are normalised before they are gathered, so that no rank normalises the rows of others.
            row_norm = load_norm(
                norm, allocate_row_scratch(min(last - first, PARTITIONS), hidden, x.dtype), x.dtype
            )
        piece = max(LEAST_OWN_ROWS, GATHERED_ROWS // sequence_ranks)
        source = plan_gathered_rows(x[first:last, :], row_norm, sequence_ranks, replica_group, piece)
        norm = Norm(None, None, 0.0, eps)  # rows of other ranks arrive normalised
    heads = Heads(
        outputs, source, first, owned, head, turned, rotated, norms, epsilons, biases, angles, w_qkv_scales
    )
    if quantises_rows and w_qkv.dtype == nl.int8:
        project_integers(source, norm, matrix, columns, heads)
    elif quantises_rows and takes_groups(source, norm, matrix) and hidden % PARTITIONS == 0:
        project_in_groups(source.all_rows, norm, matrix, columns, heads, True)
    elif quantises_rows:
        project_quantised(source, norm, matrix, columns, heads)
    else:
        project(source, norm, matrix, columns, heads)
    if kv_size == 0:
        return outputs[0]
    if q_size == 0:
        return outputs[0], outputs[1]
    if gate_size > 0:
        return outputs[0], outputs[1], outputs[2], outputs[3]
    return outputs[0], outputs[1], outputs[2]


def find_head_size(q_size, kv_size, tokens, angles, head_dim, q_norm, k_norm, v_norm):
    """Return D if q, k or v is normalised head by head or rotated, else 0.

    D is head_dim, or 2 * (R/2) if only `cos` [S, R/2] of `angles` is given. Raises AssertionError if sizes,
    tables or weights do not fit together.
    """
    positions, cos, sin = angles.positions, angles.cos, angles.sin
    assert kv_size > 0 or (k_norm is None and not v_norm), (
        "k_norm or v_norm is given, and kv_size is 0; leave them out without keys and values"
    )
    if cos is None and q_norm is None and k_norm is None and not v_norm:
        return 0
    head = head_dim
    if cos is not None:
        expect_dims(2, cos, "cos [S, R/2]")
        assert sin is not None and cos.shape == sin.shape, (
            f"cos is {cos.shape}, sin is {sin if sin is None else sin.shape}"
        )
        assert positions is not None and positions.shape == (tokens, 1), (
            f"positions are [{tokens}, 1], not {positions if positions is None else positions.shape}"
        )
        head = 2 * cos.shape[1] if head is None else head
        assert 2 * cos.shape[1] <= head, (
            f"tables of width {cos.shape[1]} turn {2 * cos.shape[1]} elements of a head of {head}, which has fewer"
        )
    assert head is not None, "q_norm, k_norm and v_norm need head_dim, as no cos gives it"
    assert head <= BANK, f"qkv_projection takes heads of at most {BANK}, not {head}"
    assert q_size % head == 0 and kv_size % head == 0, (
        f"q_size {q_size} and kv_size {kv_size} are no heads of {head}; both have to be multiples of it"
    )
    for name, weight in (("q_norm", q_norm), ("k_norm", k_norm)):
        if weight is not None:
            assert weight.shape == (1, head), f"{name} is [1, {head}], not {weight.shape}"
    return head


def qkv_projection_reference(
    x: np.ndarray,
    w_qkv: np.ndarray,
    q_size: int,
    kv_size: int = 0,
    norm_weight: np.ndarray | None = None,
    eps: float = 0.0,
    bias: np.ndarray | None = None,
    positions: np.ndarray | None = None,
    cos: np.ndarray | None = None,
    sin: np.ndarray | None = None,
    head_dim: int | None = None,
    q_norm: np.ndarray | None = None,
    k_norm: np.ndarray | None = None,
    norm_bias: np.ndarray | None = None,
    norm_offset: float = 0.0,
    replica_group: object = None,
    sequence_ranks: int = 1,
    v_norm: bool = False,
    gate_size: int = 0,
    w_qkv_scales: np.ndarray | None = None,
    w_qkv_zeros: np.ndarray | None = None,
    w_qkv_block_scales: np.ndarray | None = None,
    nibble_dtype: str = "float8_e4m3",
    quantises_rows: bool = False,
) -> np.ndarray | tuple[np.ndarray, ...]:
    """Return (q, k, v), (q, k, v, gate) if gate_size is not 0, or q alone if kv_size is 0, computed in float32.

    With a q_size of 0 (k, v) is returned. They are rounded once, to x's dtype. nibble_dtype, replica_group and
    sequence_ranks are ignored: for several ranks pass the rows of all, [T, H]. With quantises_rows, rows are rounded to
    fp8 as `paired_rows_reference` does, or to x's dtype and then to integers as `quantised_product_reference` does.
    """
    wide = widened(x)
    as_integers = quantises_rows and w_qkv.dtype == np.int8
    if quantises_rows and not as_integers:
        wide = paired_rows_reference(
            x,
            None if norm_weight is None else repeat_image_rows_reference(norm_weight, len(x)),
            None if norm_bias is None else repeat_image_rows_reference(norm_bias, len(x)),
            norm_offset,
            eps,
            w_qkv.dtype,
        )
        norm_weight = norm_bias = None
    if norm_weight is not None and norm_bias is not None:
        wide = wide - wide.mean(axis=1, keepdims=True)
    if norm_weight is not None:
        weight = repeat_image_rows_reference(norm_weight, len(x))
        wide = rmsnorm_reference(wide, weight + wide.dtype.type(norm_offset), eps)
    if norm_bias is not None:
        wide = wide + repeat_image_rows_reference(norm_bias, len(x))
    if as_integers:
        product = quantised_product_reference(wide.astype(x.dtype), w_qkv, w_qkv_scales)
    else:
        stored = widen_blocks_reference(
            widen_nibbles_reference(w_qkv, x.shape[1], w_qkv_zeros), w_qkv_block_scales
        )
        product = wide @ widened(stored, w_qkv_scales)
    if bias is not None:
        product = product + widened(bias)
    ends = np.cumsum([q_size, kv_size, kv_size])
    q, k, v, gate = np.split(product, ends, axis=1)
    turned: list[np.ndarray] = []
    for columns, weight in ((q, q_norm), (k, k_norm)):
        if not columns.size:
            continue
        if weight is not None:
            heads = columns.reshape(-1, weight.shape[1])
            weight = widened(weight) + heads.dtype.type(norm_offset)
            columns = rmsnorm_reference(heads, weight, eps).reshape(columns.shape)
        if positions is not None and cos is not None and sin is not None:
            head = head_dim or 2 * cos.shape[1]
            heads = columns.reshape(len(x), -1, head).copy()
            rotated = heads[..., : 2 * cos.shape[1]]
            flat = rotated.reshape(len(x), -1)
            rotated[:] = rope_reference(flat, positions, cos, sin, heads.shape[1]).reshape(rotated.shape)
            columns = heads.reshape(columns.shape)
        turned.append(columns.astype(x.dtype))
    if v_norm:
        head = head_dim if cos is None else head_dim or 2 * cos.shape[1]
        v = rmsnorm_reference(v.reshape(-1, head), np.ones((1, head), v.dtype), eps).reshape(v.shape)
    gates = (gate.astype(x.dtype),) if gate_size else ()
    return (*turned, v.astype(x.dtype), *gates) if kv_size else turned[0]
