"""lm_head: logits of the vocabulary, with the final RMSNorm fused in, and the largest of them over all ranks.

    logits = rmsnorm(x, norm_weight, eps) @ w_head

Dimensions
    T   rows, one per sequence, up to 128; H hidden size; V this rank's part of the vocabulary;
    K   top_k rounded up to a multiple of 8; R ranks.

Arguments
    x                [T, H] @ HBM, float32 or bfloat16, the same on every rank
    norm_weight      [1, H] @ HBM, float32 or bfloat16
    w_head           [H, V] @ HBM, float32 or bfloat16: this rank's columns; read in x's dtype
    eps              compile-time float
    top_k            compile-time int, 1 or more
    vocab_offset     [1, 1] @ HBM, int32: the id of this rank's first column
    replica_group    nki.collectives.ReplicaGroup with the ranks in the order of their columns, or None for one rank
    num_ranks        compile-time int: R, the length of this rank's list; a ReplicaGroup has no documented length
    returns logits   [T, V] @ HBM, float32: this rank's
            values   [T, K] @ HBM, float32, descending: the largest logits of all ranks
            ids      [T, K] @ HBM, int32: their ids; of equal logits the lower id comes first

    Every column counts as a real id. Ranks may differ in V if each part has at least K columns and needs the same
    number of searches. So a vocabulary that does not divide by R needs no padding: the last part is smaller.

Layout
    As qkv_projection; logits have rows on the partitions, so that the search runs along the free dim.

Tiling
    for up to 16384 columns of V, the most one search covers
        logits for 2048 columns at a time; stored
        K/8 rounds of: eight largest, their places, remove them
    with several searches or ranks: all candidates (gathered), in the order of their ids, are searched in the same way;
    an indirect DMA fetches the ids of the largest

Limits
    T up to 128, H up to 8192, K up to V; K times searches times R up to 1024, which lie in SBUF beside the logits
    of a search; ids below 2^24, because they are added in float32.

Cost
    HBM: w_head once, logits once, x once, T times the norm's weight, the candidates. 3 K/8 - 1 passes of the Vector
    engine over the logits. Bound: reading w_head.
"""

from __future__ import annotations

import nki
import nki.collectives as ncc
import nki.isa as nisa
import nki.language as nl
import numpy as np

from nki_kernels.precision import widened
from nki_kernels.rmsnorm import MAX_HIDDEN, rmsnorm_reference
from nki_kernels.tiles import (
    PARTITIONS,
    blocks,
    cast,
    columns_at_once,
    expect_dims,
    load_repeated,
    load_transposed,
    multiply,
)
from nki_kernels.top_k import MAX_SEARCHED, merge, multiple_of_eight, take_largest

MAX_CANDIDATES = 1024


@nki.jit
def lm_head(x, norm_weight, w_head, eps, top_k, vocab_offset, replica_group=None, num_ranks=1):
    """Logits of this rank's part of the vocabulary, and the largest of all ranks with their ids."""
    expect_dims(2, x, "x [T, H]")
    expect_dims(2, w_head, "w_head [H, V]")
    rows, hidden = x.shape
    columns = w_head.shape[1]
    keep = multiple_of_eight(top_k)
    assert rows <= PARTITIONS, f"lm_head takes at most {PARTITIONS} rows, not {rows}"
    assert hidden <= MAX_HIDDEN, f"lm_head takes a hidden size of at most {MAX_HIDDEN}, not {hidden}"
    assert norm_weight.shape == (1, hidden), f"norm_weight is [1, {hidden}], not {norm_weight.shape}"
    assert w_head.shape[0] == hidden, f"w_head has {w_head.shape[0]} rows for a hidden size of {hidden}"
    assert vocab_offset.shape == (1, 1), f"vocab_offset is [1, 1], not {vocab_offset.shape}"
    assert top_k >= 1, f"top_k is {top_k}; at least 1 is wanted"
    searches = blocks(columns, MAX_SEARCHED)
    width = blocks(columns, searches)
    assert keep <= columns, f"the largest {keep} (top_k {top_k}, a multiple of 8) of {columns} columns"
    assert num_ranks >= 1, f"num_ranks is {num_ranks}; the group's list has at least this rank"
    assert replica_group is not None or num_ranks == 1, f"{num_ranks} ranks, but no replica_group"
    assert searches * num_ranks * keep <= MAX_CANDIDATES, (
        f"the largest {keep} of {searches} searches on {num_ranks} ranks are more than {MAX_CANDIDATES} candidates"
    )
    logits = nl.ndarray((rows, columns), dtype=nl.float32, buffer=nl.shared_hbm)
    values = nl.ndarray((rows, keep), dtype=nl.float32, buffer=nl.shared_hbm)
    ids = nl.ndarray((rows, keep), dtype=nl.int32, buffer=nl.shared_hbm)

    x_blocks = load_transposed(x, 0, rows, load_repeated(norm_weight, rows), eps)
    offset = cast(load_repeated(vocab_offset, rows), nl.float32)
    candidates = nl.ndarray((rows, searches * keep), dtype=nl.float32, buffer=nl.sbuf)
    candidate_ids = nl.ndarray((rows, searches * keep), dtype=nl.int32, buffer=nl.sbuf)
    for search in range(searches):
        start = search * width
        end = min(columns, start + width)
        scores = project_logits(x_blocks, w_head[:, start:end])
        nisa.dma_copy(dst=logits[:, start:end], src=scores)
        places = nl.ndarray((rows, keep), dtype=nl.uint32, buffer=nl.sbuf)
        own = slice(search * keep, (search + 1) * keep)
        take_largest(candidates[:, own], places, scores)
        nisa.tensor_scalar(
            dst=candidate_ids[:, own],
            data=places,
            op0=nl.add,
            operand0=offset,
            op1=nl.add,
            operand1=float(start),
        )
    if replica_group is None and searches == 1:
        nisa.dma_copy(dst=values, src=candidates)
        nisa.dma_copy(dst=ids, src=candidate_ids)
    else:
        if replica_group is not None:
            candidates, candidate_ids = gather_candidates(candidates, candidate_ids, replica_group, num_ranks)
        merge(values, ids, candidates, candidate_ids)
    return logits, values, ids


def project_logits(x, weight):
    """x [h in block, block, row] @ weight [H, n] in SBUF, [rows, n] float32."""
    rows = x.shape[2]
    columns = weight.shape[1]
    scores = nl.ndarray((rows, columns), dtype=nl.float32, buffer=nl.sbuf)
    step = columns_at_once(rows)
    for first in range(0, columns, step):
        last = min(columns, first + step)
        sums = multiply(x, weight[:, first:last])
        nisa.tensor_copy(dst=scores[:, first:last], src=sums[0])
    return scores


def gather_candidates(values, ids, replica_group, ranks):
    """Candidates [rows, n] of all ranks beside each other, [rows, ranks * n], in the order of the group's list.

    all_gather puts the ranks' rows below each other; loading them puts a row's candidates into one partition.
    """
    rows, count = values.shape
    own_values = nl.ndarray((rows, count), dtype=nl.float32, buffer=nl.private_hbm, name="own_values")
    own_ids = nl.ndarray((rows, count), dtype=nl.int32, buffer=nl.private_hbm, name="own_ids")
    nisa.dma_copy(dst=own_values, src=values)
    nisa.dma_copy(dst=own_ids, src=ids)
    all_values = nl.ndarray((ranks * rows, count), dtype=nl.float32, buffer=nl.private_hbm, name="all_values")
    all_ids = nl.ndarray((ranks * rows, count), dtype=nl.int32, buffer=nl.private_hbm, name="all_ids")
    ncc.all_gather(
        srcs=[own_values, own_ids], dsts=[all_values, all_ids], replica_group=replica_group, collective_dim=0
    )
    gathered_values = nl.ndarray((rows, ranks * count), dtype=nl.float32, buffer=nl.sbuf)
    gathered_ids = nl.ndarray((rows, ranks * count), dtype=nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(dst=gathered_values, src=by_row(all_values, ranks))
    nisa.dma_copy(dst=gathered_ids, src=by_row(all_ids, ranks))
    return gathered_values, gathered_ids


def by_row(gathered, ranks):
    """[ranks * rows, n] seen as [rows, ranks, n]."""
    rows = gathered.shape[0] // ranks
    return gathered.reshape_dim(0, (ranks, rows)).permute((1, 0, 2))


def lm_head_reference(
    x: np.ndarray,
    norm_weight: np.ndarray,
    w_head: np.ndarray,
    eps: float,
    top_k: int,
    vocab_offset: np.ndarray,
    replica_group: object = None,
    num_ranks: int = 1,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Product in float32 and a stable sort. For several ranks pass the whole w_head and the offset 0."""
    logits = rmsnorm_reference(widened(x), norm_weight, eps) @ widened(w_head)
    places = np.argsort(-logits, axis=1, kind="stable")[:, : -(-top_k // 8) * 8]
    values = np.take_along_axis(logits, places, axis=1)
    return logits, values, (places + vocab_offset[0, 0]).astype(np.int32)
