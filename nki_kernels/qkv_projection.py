"""qkv_projection: queries, keys and values of a layer, with the norm before them and the rotation after them.

    [q | k | v | gate] = norm(x) @ w_qkv + bias
    norm        RMSNorm, LayerNorm where there is a norm_bias, none without a norm_weight
    q, k        then normalised head by head (q_norm, k_norm) and rotated by position (cos, sin), where those are given
    v           then normalised head by head, if asked (v_norm)

Dimensions
    T   tokens; H hidden size; Q and KV widths of queries and of keys (and values): heads times head size D.
    S   positions that the tables hold; R <= D elements of each head that are rotated.

Arguments
    x            [T, H] @ HBM, float32 or bfloat16
    w_qkv        [H, Q + 2 KV + G] @ HBM, float32 or bfloat16; read in x's dtype
    q_size       compile-time int, Q
    kv_size      compile-time int, KV; 0 in a layer that reads the keys and values of another one
    norm_weight  [1, H] @ HBM, float32 or bfloat16, or None
    eps          compile-time float, of all norms
    bias         [1, Q + 2 KV + G] @ HBM, float32 or bfloat16, or None
    positions    [T, 1] @ HBM, int32, 0 <= position < S; with cos and sin
    cos, sin     [S, R/2] @ HBM, float32, or None
    head_dim     compile-time int, D; 2 * (R/2) where it is not given
    q_norm       [1, D] @ HBM, float32 or bfloat16, or None; k_norm alike
    norm_bias    [1, H] @ HBM, float32 or bfloat16, or None
    norm_offset  compile-time float that is added to the weights of norms: 1.0 for Gemma
    replica_group, sequence_ranks
                 nki.collectives.ReplicaGroup and the number of its ranks, N, over which x is cut: x is [T/N, H], this
                 rank's rows, and everything else is of all rows; None and 1 where x is whole
    v_norm       compile-time bool: each head of v is divided by its root mean square
    gate_size    compile-time int, G: width of gates of the heads' outputs, 0 where there are none
    returns q    [T, Q] @ HBM, x's dtype; alone where KV is 0
            k    [T, KV] @ HBM, x's dtype
            v    [T, KV] @ HBM, x's dtype
            gate [T, G] @ HBM, x's dtype; if G is not 0

Layout
    H on the partitions for the product, tokens on the partitions of its result, where a row's 1 / rms, the bias, the
    norms of heads and the rotation are applied. The weight of the norm is multiplied into w_qkv, or into x^T where that
    is smaller, so that no product waits for the norm. LayerNorm comes before the transpose.

Tiling
    T <= 128: x is loaded once and transposed on the Tensor engine, in runs (see `rows`); w_qkv streams past it in parts
        of 1 MiB, up to 2048 columns accumulating in 4 PSUM banks. On trn1 as for more rows, see `normed`.
    T > 128: up to 64 KiB per partition of w_qkv's columns stay in SBUF, multiplied by the norm's weight. For 128 rows,
        the DMA that loads them transposes them, the Scalar and the Vector engine square and add, the Tensor engine
        multiplies. The first row tiles accumulate side by side while w_qkv arrives.
    Cut along the sequence, each rank normalises its rows and gathers those of all, 256 at a time, see `sequence`.
    Two cores of a logical core take half of the rows each, with T <= 128 half of the heads.

Limits
    H up to 8192 in float32, 16384 in bfloat16. D up to 512, and even where heads are rotated.

Cost
    HBM: w_qkv and the outputs once; x once for each group of columns that stays in SBUF, with T <= 128 once. Bound:
    reading w_qkv up to some hundred rows, the Tensor engine beyond. Of the floor in bfloat16 on trn2, for a rank of
    Llama-3.1: 80 to 87 % with T = 1 … 64; 86 to 93 % with T = 2048, rotation included; 94 to 97 % with T = 8192. On two
    cores (H = 8192, Q = 256) 66 to 68 % of half of the floor with T = 1 … 64, 88 to 95 % in a prompt.
    With LayerNorm 65 to 74 % with T = 2048: the Vector engine works on a row tile for as long as its product takes.
"""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np

from nki_kernels.cores import own_columns, own_rows
from nki_kernels.dma import COMPILER, transfer
from nki_kernels.precision import widened
from nki_kernels.projection.heads import finish
from nki_kernels.projection.normalised_rows import load_norm, row_scratch
from nki_kernels.projection.normed import project
from nki_kernels.projection.rows import constant, repeated_row
from nki_kernels.projection.sequence import check_ranks, gathered_rows, places, whole_rows
from nki_kernels.rmsnorm import rmsnorm_reference
from nki_kernels.rope import gather, rope_reference
from nki_kernels.tiles import BANK, PARTITIONS, expect_dims

MAX_ROW_BYTES = 32768
"""Of x: some transposed rows and columns of w_qkv have to fit into SBUF."""

GATHERED_ROWS = 256
"""Rows of all ranks that are gathered at once: the fewer, the sooner the first products start."""

LEAST_OWN_ROWS = 16
"""The fewest own rows that are gathered at once: results are stored in runs of so many rows."""


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
):
    """Queries, keys, values and gates of the normalised rows; queries alone where kv_size is 0."""
    expect_dims(2, x, "x [T, H]")
    owned, hidden = x.shape
    tokens = sequence_ranks * owned
    check_ranks(sequence_ranks, replica_group, tokens)
    turned = q_size + 2 * kv_size if v_norm else q_size + kv_size
    width = q_size + 2 * kv_size + gate_size
    most = MAX_ROW_BYTES // (4 if x.dtype == nl.float32 else 2)
    assert hidden <= most, f"qkv_projection takes a hidden size of at most {most}, not {hidden}"
    for name, row, columns in (
        ("norm_weight", norm_weight, hidden),
        ("norm_bias", norm_bias, hidden),
        ("bias", bias, width),
    ):
        if row is not None:
            assert row.shape == (1, columns), f"{name} is [1, {columns}], not {row.shape}"
    assert norm_bias is None or norm_weight is not None, "norm_bias is given without norm_weight"
    assert w_qkv.shape == (hidden, width), (
        f"w_qkv is [{hidden}, {q_size} + 2 * {kv_size} + {gate_size}], not {w_qkv.shape}"
    )
    assert kv_size > 0 or gate_size == 0, "gate_size is given, and kv_size is 0"
    head = head_size(q_size, kv_size, tokens, positions, cos, sin, head_dim, q_norm, k_norm, v_norm)
    outputs = []
    for size in (q_size, kv_size, kv_size, gate_size):
        if size > 0:
            outputs.append(nl.ndarray((tokens, size), dtype=x.dtype, buffer=nl.shared_hbm))
    rows = min(tokens, PARTITIONS)
    norms = []
    for start, end, weight in ((0, q_size, q_norm), (q_size, q_size + kv_size, k_norm)):
        if weight is not None:
            norms.append((start, end, repeated_row(weight, rows, norm_offset)))
    if v_norm:
        norms.append((q_size + kv_size, turned, None))
    biases = repeated_row(bias, rows) if bias is not None else None
    eps_column = constant(rows, eps)
    first, last = own_rows(owned, sequence_ranks)
    columns = own_columns(tokens, width, head if head > 0 else PARTITIONS)
    source = whole_rows(x[first:last, :])
    norm = (norm_weight, norm_bias, norm_offset, eps_column)
    if sequence_ranks > 1:
        source = normalised_rows(x[first:last, :], norm, eps, sequence_ranks, replica_group)
        norm = (None, None, 0.0, eps_column)
    context = (
        outputs,
        (source, owned, first),
        (turned, q_size + kv_size) if head > 0 else (0, 0),
        head,
        norms,
        biases,
        (positions, cos, sin),
        eps_column,
    )
    project(source, norm, w_qkv, columns, head, deliver_heads, context)
    if kv_size == 0:
        return outputs[0]
    if gate_size > 0:
        return outputs[0], outputs[1], outputs[2], outputs[3]
    return outputs[0], outputs[1], outputs[2]


def normalised_rows(x, norm, eps, ranks, replica_group):
    """The rows of all ranks, of which this one has and normalises x."""
    norm_weight, norm_bias, offset, _ = norm
    rows, hidden = x.shape
    height = min(rows, PARTITIONS)
    loaded = None
    if norm_weight is not None:
        scratch = row_scratch(height, hidden, x.dtype)
        loaded = load_norm(norm_weight, norm_bias, offset, eps, scratch, x.dtype)
    piece = max(LEAST_OWN_ROWS, GATHERED_ROWS // ranks)
    return gathered_rows(x, loaded, ranks, replica_group, piece)


def head_size(q_size, kv_size, tokens, positions, cos, sin, head_dim, q_norm, k_norm, v_norm):
    """D where heads are normalised or rotated, else 0; arguments that do not fit are refused."""
    assert kv_size > 0 or (k_norm is None and not v_norm), "k_norm or v_norm is given, and kv_size is 0"
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
            f"tables of width {cos.shape[1]} turn {2 * cos.shape[1]} elements of a head of {head}"
        )
    assert head is not None, "q_norm, k_norm and v_norm need head_dim"
    assert head <= BANK, f"qkv_projection takes heads of at most {BANK}, not {head}"
    assert q_size % head == 0 and kv_size % head == 0, (
        f"q_size {q_size} and kv_size {kv_size} are no heads of {head}"
    )
    for name, weight in (("q_norm", q_norm), ("k_norm", k_norm)):
        if weight is not None:
            assert weight.shape == (1, head), f"{name} is [1, {head}], not {weight.shape}"
    return head


def deliver_heads(context, row, left, right, sums, panels, scale):
    """Columns left … right of [q | k | v] of a row tile: out of PSUM, finished, and stored from row `row` on."""
    outputs, (source, owned, offset), (turned, rotated), head, norms, biases, turn, eps = context
    rows = sums[0].shape[0]
    where = places(source, owned, offset, row, rows)
    result = nl.ndarray((rows, right - left), dtype=outputs[0].dtype, buffer=nl.sbuf)
    here = []
    for start, end, weight in norms:
        if max(start, left) < min(end, right):
            own = weight[0:rows, :] if weight is not None else None
            here.append((max(start, left) - left, min(end, right) - left, own))
    bias = biases[0:rows, left:right] if biases is not None else None
    tables = None
    if turn[1] is not None and left < rotated:
        row_numbers = nl.ndarray((rows, 1), dtype=nl.int32, buffer=nl.sbuf)
        for start, place, count in where:
            nisa.dma_copy(dst=row_numbers[start : start + count, :], src=turn[0][place : place + count, :])
        tables = (gather(turn[1], row_numbers), gather(turn[2], row_numbers))
    ends = max(0, min(turned, right) - left), max(0, min(rotated, right) - left)
    finish(result, sums, panels, scale, bias, ends[0], ends[1], here, tables, head, eps)
    column = 0
    for number in range(len(outputs)):
        for start, place, count in where:
            part = result[start : start + count, :]
            store_columns(outputs[number], column, place, part, left)
        column += outputs[number].shape[1]


def store_columns(output, output_column, row, tile, tile_column):
    """Store the columns that a tile shares with an output, both placed in one wide matrix by their first column."""
    rows, columns = tile.shape
    start = max(output_column, tile_column)
    end = min(output_column + output.shape[1], tile_column + columns)
    if start < end:
        transfer(
            output[row : row + rows, start - output_column : end - output_column],
            tile[:, start - tile_column : end - tile_column],
            COMPILER,
        )


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
) -> np.ndarray | tuple[np.ndarray, ...]:
    """Norm, product, split, norm of heads and rotation in float32. For several ranks pass the rows of all."""
    wide = widened(x)
    if norm_weight is not None and norm_bias is not None:
        wide = wide - wide.mean(axis=1, keepdims=True)
    if norm_weight is not None:
        wide = rmsnorm_reference(wide, widened(norm_weight) + wide.dtype.type(norm_offset), eps)
    if norm_bias is not None:
        wide = wide + widened(norm_bias)
    product = wide @ widened(w_qkv)
    if bias is not None:
        product = product + widened(bias)
    ends = np.cumsum([q_size, kv_size, kv_size])
    q, k, v, gate = np.split(product, ends, axis=1)
    turned: list[np.ndarray] = []
    for each, weight in ((q, q_norm), (k, k_norm)):
        if not each.size:
            return turned[0]
        if weight is not None:
            heads = each.reshape(-1, weight.shape[1])
            weight = widened(weight) + heads.dtype.type(norm_offset)
            each = rmsnorm_reference(heads, weight, eps).reshape(each.shape)
        if positions is not None and cos is not None and sin is not None:
            head = head_dim or 2 * cos.shape[1]
            heads = each.reshape(len(x), -1, head).copy()
            part = heads[..., : 2 * cos.shape[1]]
            flat = part.reshape(len(x), -1)
            part[:] = rope_reference(flat, positions, cos, sin, heads.shape[1]).reshape(part.shape)
            each = heads.reshape(each.shape)
        turned.append(each.astype(x.dtype))
    if v_norm:
        head = head_dim if cos is None else head_dim or 2 * cos.shape[1]
        v = rmsnorm_reference(v.reshape(-1, head), np.ones((1, head), v.dtype), eps).reshape(v.shape)
    gates = (gate.astype(x.dtype),) if gate_size else ()
    return turned[0], turned[1], v.astype(x.dtype), *gates
