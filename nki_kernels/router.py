"""router: the experts that each token is routed to, with their weights, after the norm before them.

    n = norm(x);   logits = n @ w_router + bias
    softmax   the K largest logits; weights exp(logit - largest), divided by their sum if `renormalise`, which is a
              softmax of the chosen ones alone, else by the sum over all experts
    sigmoid   scores sigmoid(logits); the K largest of scores + choice_bias; weights are the scores, divided by their
              sum + 1e-20 if `renormalise`
    With groups of neighbouring experts only those of the `top_groups` best groups are candidates. A group ranks by its
    largest logit with softmax, else by the sum of its two largest scores + choice_bias.
    Then weights are multiplied by `scale`. Of equal scores the expert or group with the lower number comes first.

Dimensions:
    T   tokens; H hidden size; E experts; K = top_k.

Arguments:
    x             [T, H] @ HBM, float32 or bfloat16
    norm_weight   [1, H] @ HBM, float32 or bfloat16, of an RMSNorm; norm_offset, a compile-time float, is added to it
    w_router      [H, E] @ HBM, float32 or bfloat16
    eps           compile-time float
    top_k         compile-time int
    renormalise   compile-time bool
    scoring       "softmax" or "sigmoid"
    bias          [1, E] @ HBM, float32 or bfloat16, or None: of the logits
    choice_bias   [1, E] @ HBM, float32 or bfloat16, or None: of the choice alone, with sigmoid
    groups, top_groups   compile-time ints: E / groups is 8 or more
    scale         compile-time float
    returns n         [T, H] @ HBM, x's dtype
            weights   [T, K] @ HBM, float32, those of the largest scores first
            ids       [T, K] @ HBM, int32. A row of NaN has ids from 0 to E - 1 as well, with weights that are NaN

Layout
    Tokens lie on the partitions, experts side by side: a search over experts is one along the free dim. For the
    product the rows are transposed.

Tiling
    w_router stays in SBUF. A tile of 128 rows passes four stages: statistics, norm, product of one PSUM bank with the
    transposed rows, choice. In a step the stages work on four different tiles, each one tile behind the stage
    before, so that engines work side by side. If SBUF does not hold so many rows, a tile passes all stages in one step.

Cores
    Two cores of a logical core take half of a prompt's rows each; a decode step is the first one's.

Limits:
    H up to 8192, E up to 512.

Cost
    HBM: x, the norm's weight and w_router once, n and the choices once. The product is taken in float32, unless rows
    and w_router are bfloat16, whose products are exact. Rounding to x's dtype: the normalised rows. Bound: the latency
    of some 30 small instructions in a decode step; in a prompt the Scalar engine, which squares each element once and
    copies its transpose from PSUM, while the Vector engine has the norm and the choice. Predicted on trn2 in bfloat16
    for T = 2048, of the floor, in the slower reading:
        70 % for H = 4096, E = 8, K = 2;
        63 % for H = 2048, E = 128, K = 8;
        65 % for H = 2880, E = 32, K = 4 with a bias.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np

from nki_kernels.cores import divides_columns, find_core_rows
from nki_kernels.dma import STATIC
from nki_kernels.experts.top_experts import (
    LEAST_SEARCHED,
    TINY,
    Selection,
    allocate_scores,
    select_by_sigmoid,
    select_by_softmax,
)
from nki_kernels.norms.norm import Norm
from nki_kernels.norms.row_tiles import allocate_row_scratch, compute_row_statistics, load_norm, normalise
from nki_kernels.precision import widened, widened_or_zero
from nki_kernels.projection.products import add_products
from nki_kernels.projection.row_groups import allocate_transposed, choose_vector_share, item_bytes
from nki_kernels.tiles import BANK, PARTITIONS, broadcast_row, expect_dims, load, ranges, transpose_rows
from nki_kernels.weights import WeightMatrix, load_blocks

cores = (1, 2)

MAX_HIDDEN = 8192

STAGES = 4
"""Stages of a row tile: the statistics of its norm, its norm, the product, and the choice."""

MOST_PIPELINED_BYTES = 131072
"""Most bytes of each partition for the row tiles of all stages at once and w_router, without the norm's operands."""


@dataclass
class RouterProduct(nl.NKIObject):
    """Operands in SBUF of the logits and of the choice.

    matrix: w_router [h in block, block, E]. bias, choice_bias: float32 [row, E], the same on every row, or
    None.
    """

    matrix: nl.NkiTensor
    bias: nl.NkiTensor | None
    choice_bias: nl.NkiTensor | None


@dataclass
class RouterOutputs(nl.NKIObject):
    """Results @ HBM: n [T, H], weights [T, K] float32 and ids [T, K] int32."""

    n: nl.NkiTensor
    weights: nl.NkiTensor
    ids: nl.NkiTensor


@nki.jit
def router(
    x,
    norm_weight,
    w_router,
    eps,
    top_k,
    renormalise=True,
    scoring="softmax",
    bias=None,
    choice_bias=None,
    groups=1,
    top_groups=1,
    scale=1.0,
    norm_offset=0.0,
):
    """Return (n, weights, ids) @ HBM: norm(x) [T, H] in x's dtype, and each token's K experts, the best ones first.

    n is the RMSNorm of x; logits are n @ w_router + bias. weights [T, K] are float32, ids [T, K] int32. On
    two cores each routes half of the rows, and the first core alone up to 128 rows.

    Raises AssertionError if shapes do not fit together, H is above 8192, E above 512, or the scoring unknown.
    Also if choice_bias comes without sigmoid scoring, or if top_k experts of top_groups groups are not there.
    """
    expect_dims(2, x, "x [T, H]")
    expect_dims(2, w_router, "w_router [H, E]")
    selection = Selection(w_router.shape[1], top_k, scoring, renormalise, groups, top_groups, scale)
    norm = Norm(norm_weight, None, norm_offset, eps)
    check_arguments(x, norm, w_router, bias, choice_bias, selection)
    tokens, hidden = x.shape
    n = nl.ndarray((tokens, hidden), dtype=x.dtype, buffer=nl.shared_hbm)
    weights = nl.ndarray((tokens, top_k), dtype=nl.float32, buffer=nl.shared_hbm)
    ids = nl.ndarray((tokens, top_k), dtype=nl.int32, buffer=nl.shared_hbm)
    if divides_columns(tokens) and nl.program_id(0) > 0:
        return n, weights, ids
    start, end = find_core_rows(tokens)
    rows = min(end - start, PARTITIONS)
    # The first rows are loaded before the matrix, which the third stage of a tile reads first.
    first_rows = load(x[start : start + rows, :], x.dtype)
    row_norm = load_norm(norm, allocate_row_scratch(rows, hidden, x.dtype), norm_weight.dtype)
    exact = x.dtype == nl.bfloat16 and w_router.dtype == nl.bfloat16
    # Products of two bfloat16 numbers are exact in float32; other pairs are multiplied as float32.
    matrix = load_blocks(WeightMatrix(w_router), nl.bfloat16 if exact else nl.float32, STATIC)
    product = RouterProduct(matrix, repeat_row(bias, rows), repeat_row(choice_bias, rows))
    outputs = RouterOutputs(n, weights, ids)
    route_tiles(x, outputs, first_rows, ranges(start, end), row_norm, product, selection)
    return n, weights, ids


def route_tiles(x, outputs, first_rows, tiles, norm, product, selection):
    """Write n, weights and ids for tiles of rows in a software pipeline: each step works on up to four tiles.

    step   Scalar engine          Vector engine     Tensor engine                 DMA queues
    m      statistics of tile m   norm of m - 1,    transposes and product of     load m + 1,
                                  select for m - 3  m - 2                         store n of m - 1 and choices of m - 3

    If SBUF does not hold the rows of four tiles, all stages of a tile pass in one step.

    Args:
        x: [T, H] @ HBM.
        outputs: RouterOutputs.
        first_rows: rows of the first tile in SBUF, [row, H].
        tiles: ranges (first, end) of rows.
        norm: RowNorm.
        product: RouterProduct.
        selection: how experts are selected from logits.
    """
    lag = 1 if has_room(x, product.matrix) else 0
    # Of many tiles the Scalar engine copies all transposes.
    share = 0 if len(tiles) > 1 else choose_vector_share()
    following = first_rows
    rows, statistics, sums = [], [], []
    for step in range(len(tiles) + (STAGES - 1) * lag):
        if step < len(tiles):
            rows.append(following)
            if step + 1 < len(tiles):
                first, end = tiles[step + 1]
                following = load(x[first:end, :], x.dtype)
            statistics.append(compute_row_statistics(rows[step], norm))
        m = step - lag  # m: tile of the present stage
        if m >= 0 and m < len(tiles):
            first, end = tiles[m]
            normalise(rows[m], rows[m], statistics[m], norm)
            nisa.dma_copy(dst=outputs.n[first:end, :], src=rows[m])
        m = step - 2 * lag
        if m >= 0 and m < len(tiles):
            sums.append(multiply_tile(rows[m], product.matrix, share))
        m = step - 3 * lag
        if m >= 0:
            first, end = tiles[m]
            logits = add_bias(sums[m], product.bias)
            if selection.scoring == "softmax":
                selected = select_by_softmax(logits, selection)
            else:
                selected = select_by_sigmoid(logits, product.choice_bias, selection)
            nisa.dma_copy(dst=outputs.ids[first:end, :], src=selected.ids)
            nisa.dma_copy(dst=outputs.weights[first:end, :], src=selected.weights)


def check_arguments(x, norm, w_router, bias, choice_bias, selection):
    """Raise AssertionError if shapes do not fit together, if H or E is too large, or if the selection is impossible.

    It is impossible if top_k or top_groups is below 1 or above what there is, or if the scoring is unknown.
    So it is if groups do not divide the experts or have fewer than a search takes. choice_bias is refused
    without sigmoid scoring.
    """
    hidden, experts = x.shape[1], selection.experts
    top_k, scoring = selection.top_k, selection.scoring
    groups, top_groups = selection.groups, selection.top_groups
    assert hidden <= MAX_HIDDEN, f"router takes a hidden size of at most {MAX_HIDDEN}, not {hidden}"
    assert experts <= BANK, f"router takes at most {BANK} experts, not {experts}"
    assert w_router.shape[0] == hidden, f"w_router has {w_router.shape[0]} rows for a hidden size of {hidden}"
    norm.check(hidden)
    assert top_k >= 1 and top_k <= experts, f"top_k is 1 to {experts}, the number of experts, not {top_k}"
    assert scoring in ("softmax", "sigmoid"), f"scoring is softmax or sigmoid, not {scoring}"
    assert scoring == "sigmoid" or choice_bias is None, (
        f"choice_bias comes with sigmoid scoring alone, not with {scoring}"
    )
    for row in (bias, choice_bias):
        if row is not None:
            assert row.shape == (1, experts), (
                f"a bias of {experts} experts is [1, {experts}], not {row.shape}"
            )
    assert groups >= 1 and experts % groups == 0, (
        f"{experts} experts in {groups} groups; groups has to divide experts"
    )
    assert top_groups >= 1 and top_groups <= groups, f"top_groups is 1 to {groups}, not {top_groups}"
    size = experts // groups
    assert groups == 1 or size >= LEAST_SEARCHED, (
        f"router takes groups of at least {LEAST_SEARCHED} experts, not of {size}"
    )
    assert top_k <= top_groups * size, (
        f"{top_groups} groups of {size} experts do not hold {top_k}; raise top_groups or lower top_k"
    )


def repeat_row(row, rows):
    """Return a new float32 SBUF tile [rows, E] with a row [1, E] @ HBM on every partition; None for None."""
    return None if row is None else broadcast_row(row, rows, nl.float32, 0.0)


def has_room(x, matrix):
    """Return whether SBUF holds the row tiles of all stages at once beside w_router.

    These are the tile that arrives, three more, and the transposes of two. x: [T, H] @ HBM. matrix: w_router
    in SBUF, [h in block, block, E].
    """
    hidden = x.shape[1]
    row = hidden * item_bytes(x.dtype)
    transposes = row if x.dtype == matrix.dtype else row + hidden * item_bytes(matrix.dtype)
    resident = matrix.shape[1] * matrix.shape[2] * item_bytes(matrix.dtype)
    return 4 * row + 2 * transposes + resident <= MOST_PIPELINED_BYTES


def multiply_tile(tile, matrix, share):
    """Return tile @ matrix as a new PSUM tile [row, E] float32.

    Args:
        tile: SBUF row tile [row, H].
        matrix: w_router in SBUF, [h in block, block, E], in whose dtype the product is taken.
        share: of how many PSUM banks of transposes the Vector engine copies one; 0: none.
    """
    rows, hidden = tile.shape
    experts = matrix.shape[2]
    transposed = allocate_transposed(hidden, rows, tile.dtype)
    transpose_rows(transposed, 0, tile, share)
    sums = nl.ndarray((rows, experts), dtype=nl.float32, buffer=nl.psum)
    add_products(
        [[sums]],
        cast_blocks(transposed, hidden, matrix.dtype),
        [(0, rows)],
        matrix,
        [(0, experts)],
        0,
        hidden,
    )
    return sums


def add_bias(sums, bias):
    """Return sums + bias as a new float32 SBUF tile [row, max(E, 8)].

    A search takes eight columns or more, so missing ones are padded with a value below every score. sums:
    PSUM tile [row, E]. bias: float32 SBUF tile of as many rows or more, [row, E], or None to add nothing.
    """
    rows, experts = sums.shape
    result = allocate_scores(rows, experts)
    if bias is None:
        nisa.tensor_copy(dst=result[:, 0:experts], src=sums)
    else:
        nisa.tensor_tensor(dst=result[:, 0:experts], data1=sums, data2=bias[0:rows, :], op=nl.add)
    return result


def cast_blocks(tile, depth, dtype):
    """Return an SBUF tile [k in block, block, column] in `dtype`: the tile itself if it has the dtype, else a new one.

    depth: rows k of the matrix that the blocks hold. In a short last block the partitions without a row are
    not read or written.
    """
    if tile.dtype == dtype:
        return tile
    result = nl.ndarray(tile.shape, dtype=dtype, buffer=nl.sbuf)
    full = depth // tile.shape[0]
    nisa.tensor_copy(dst=result[:, 0:full, :], src=tile[:, 0:full, :])
    short = depth - full * tile.shape[0]
    if short > 0:
        nisa.tensor_copy(dst=result[0:short, full, :], src=tile[0:short, full, :])
    return result


def router_reference(
    x: np.ndarray,
    norm_weight: np.ndarray,
    w_router: np.ndarray,
    eps: float,
    top_k: int,
    renormalise: bool = True,
    scoring: str = "softmax",
    bias: np.ndarray | None = None,
    choice_bias: np.ndarray | None = None,
    groups: int = 1,
    top_groups: int = 1,
    scale: float = 1.0,
    norm_offset: float = 0.0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (n, weights, ids) as the kernel does, computed in float32: n [T, H] in x's dtype, weights and ids [T, K].

    Logits come from the rounded n. Experts are sorted stably in descending order, so that equal scores keep
    the lower id first. ids are int32.
    """
    wide = widened(x)
    n = wide / np.sqrt((wide * wide).mean(axis=-1, keepdims=True) + eps)
    n = n * (widened(norm_weight) + wide.dtype.type(norm_offset))
    n = n.astype(x.dtype)
    logits = widened(n) @ widened(w_router) + widened_or_zero(bias)
    if scoring == "softmax":
        scores = np.exp(logits - logits.max(axis=1, keepdims=True))
        choice = logits
    else:
        scores = 1 / (1 + np.exp(-logits))
        choice = scores + widened_or_zero(choice_bias)
    if top_groups < groups:
        by_group = choice.reshape(len(x), groups, -1)
        best = np.sort(by_group, axis=2)[:, :, -1 if scoring == "softmax" else -2 :].sum(axis=2)
        taken = np.argsort(-best, axis=1, kind="stable")[:, :top_groups]
        mask = np.zeros(best.shape, bool)
        np.put_along_axis(mask, taken, True, axis=1)
        choice = np.where(mask[:, :, None], by_group, -np.inf).reshape(choice.shape)
    ids = np.argsort(-choice, axis=1, kind="stable")[:, :top_k]
    weights = np.take_along_axis(scores, ids, axis=1)
    total = (scores if scoring == "softmax" and not renormalise else weights).sum(axis=1, keepdims=True)
    if scoring == "sigmoid":
        total = total + TINY if renormalise else np.ones_like(total)
    return n, (weights / total * scale).astype(wide.dtype), ids.astype(np.int32)
