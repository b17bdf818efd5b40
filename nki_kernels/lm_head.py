"""lm_head: logits of the vocabulary, with the final norm fused in, and the largest of them over all ranks.

    logits = scale * norm(x) @ w_head, then softcap * tanh(logits / softcap) if asked
    norm   RMSNorm with weights norm_offset + norm_weight; LayerNorm with norm_weight and norm_bias if that is given

Dimensions:
    T   rows, one per sequence, up to 128; H hidden size; V this rank's part of the vocabulary;
    K   top_k rounded up to a multiple of 8; R ranks.

Arguments:
    x                [T, H] @ HBM, float32 or bfloat16, the same on every rank
    norm_weight      [1, H] @ HBM, float32 or bfloat16
    w_head           [H, V] @ HBM, float32 or bfloat16, finite: this rank's columns; read in x's dtype
    w_head_scales    [1, V] @ HBM, float32, finite, or None. They multiply the columns of w_head, whose dtype is then
                     float8_e4m3, float8_e5m2 or int8
    eps              compile-time float
    top_k            compile-time int, 1 or more
    vocab_offset     [1, 1] @ HBM, int32: the id of this rank's first column
    replica_group    nki.collectives.ReplicaGroup with the ranks in the order of their columns, or None for one rank
    num_ranks        compile-time int: R, the length of this rank's list; a ReplicaGroup has no documented length
    softcap          compile-time float, or None
    norm_bias        [1, H] @ HBM, or None
    norm_offset      compile-time float
    scale            compile-time float > 0
    returns logits   [T, V] @ HBM, float32: this rank's
            values   [T, K] @ HBM, float32, descending: the largest logits of all ranks
            ids      [T, K] @ HBM, int32: their ids; of equal logits the lower id comes first

    Every column counts as a real id. Ranks may differ in V; all parts together have at least K columns. So a vocabulary
    that does not divide by R needs no padding: some parts are smaller.

Layout
    x as in norms/hidden_spans.py, with H on the partitions. Logits as in projection/spread_product.py: row and
    chunk on the partitions, the columns of a chunk along the free dim.

Tiling
    for each piece of min(MERGED_CHUNKS, 128 // T) chunks of up to 512 columns
        logits of all chunks in one PSUM bank; stored
        search of the chunks, K/8 rounds; merge with the largest so far, K/8 rounds, after the next search
    where loads take longer than searches: the last 640 columns (gen4: 384) in pieces that are searched as rows beside
        the largest so far, K/8 rounds, while the next piece is loaded
    with several ranks: the gathered candidates of all ranks are merged as well

Cores
    Two cores of a logical core take half of the columns each, and exchange what they found; the first core merges it.

Limits:
    T up to 128; H up to 8192 in float32, 16384 in bfloat16; K up to V, on two cores up to half of V, over ranks
    up to V rounded up to a multiple of 8, and up to 1024; R times K up to 8192, which lie in SBUF; ids below 2^24,
    because they are added in float32.

Cost
    HBM: w_head once, logits once, x once, the norm's weight once, the candidates. Vector: K/4 passes over the columns
    of a chunk and over the candidates of a row, for each piece. Bound: reading w_head, at full rate. Predicted on
    trn2 in bfloat16, of the floor: 93 % for V = 16032, H = 4096 and K = 64, 85 % for V = 2004 and H = 8192, where the
    last search takes 12 us. With float8_e4m3 weights, on one core in program order, T = 1, 16 and 64 are 1.36, 1.36 and
    1.09 times as fast (V = 16032, H = 4096), 1.16, 1.10 and 0.96 (V = 2004, H = 8192): the Tensor engine and the search
    are the bound. On two cores 80 % of half of the floor for V = 4008, H = 8192 and K = 64.
"""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np

from nki_kernels.cores import find_core_range
from nki_kernels.norms.norm import Norm
from nki_kernels.precision import widened
from nki_kernels.projection.spread_product import make_padding_operands, spread_rows
from nki_kernels.sampling.top_k import (
    MAX_GATHERED,
    MERGED_CHUNKS,
    MISSING,
    count_row_chunks,
    gather_cores,
    gather_ranks,
    merge_candidates,
    round_up_to_eight,
)
from nki_kernels.sampling.vocabulary import find_largest_logits
from nki_kernels.tiles import (
    MAX_ROW_BYTES,
    PARTITIONS,
    cast,
    expect_dims,
    expect_hidden,
    load_repeated,
)
from nki_kernels.weights import WeightMatrix, check_scales

cores = (1, 2)

MAX_TOP_K = 1024
"""Candidates of a row lie in SBUF beside the weights."""


@nki.jit
def lm_head(
    x,
    norm_weight,
    w_head,
    eps,
    top_k,
    vocab_offset,
    replica_group=None,
    num_ranks=1,
    softcap=None,
    norm_bias=None,
    norm_offset=0.0,
    scale=1.0,
    w_head_scales=None,
):
    """Compute this rank's logits, and find the largest of all ranks with their ids.

    Returns logits [T, V], values [T, K] descending, both float32, and ids [T, K] int32, in shared HBM; K
    is top_k rounded up to a multiple of 8. The module docstring describes the arguments and limits;
    AssertionError if the arguments violate them.
    """
    norm = Norm(norm_weight, norm_bias, norm_offset, eps)
    check_arguments(x, norm, w_head, top_k, vocab_offset, replica_group, num_ranks, scale)
    check_scales("w_head", w_head, w_head_scales)
    rows = x.shape[0]
    columns = w_head.shape[1]
    keep = round_up_to_eight(top_k)
    logits = nl.ndarray((rows, columns), dtype=nl.float32, buffer=nl.shared_hbm)
    values = nl.ndarray((rows, keep), dtype=nl.float32, buffer=nl.shared_hbm)
    ids = nl.ndarray((rows, keep), dtype=nl.int32, buffer=nl.shared_hbm)

    first, end = find_core_range(columns, 1, nl.program_id(0))
    chunks = count_row_chunks(rows, MERGED_CHUNKS)
    spread = spread_rows(x, norm, chunks)
    operands = (spread, make_padding_operands(rows, chunks), chunks)
    offset = cast(load_repeated(vocab_offset, rows), nl.float32)
    matrix = WeightMatrix(w_head, w_head_scales)
    best, best_columns = find_largest_logits(logits, operands, matrix, (scale, softcap), first, end, keep)
    if columns < keep:  # A cap has lifted padding to a value that a logit of another rank may have.
        nisa.memset(dst=best[:, columns:keep], value=MISSING)
    alone = replica_group is None and nl.num_programs() == 1
    best_ids = add_offset(best_columns, offset, nl.int32 if alone else nl.float32)
    if nl.num_programs() > 1:
        best, best_ids = merge_candidates(gather_cores((best, best_ids)), keep)
    if nl.program_id(0) == 0:
        if replica_group is not None:
            everyone = gather_ranks((best, best_ids), ("values", "ids"), replica_group, num_ranks)
            best, best_ids = merge_candidates(everyone, keep)
        nisa.dma_copy(dst=values, src=best)
        nisa.dma_copy(dst=ids, src=cast(best_ids, nl.int32))
    return logits, values, ids


def check_arguments(x, norm, w_head, top_k, vocab_offset, replica_group, num_ranks, scale):
    """Raise AssertionError if shapes, scale, top_k or ranks do not fit together or exceed lm_head's limits."""
    expect_dims(2, x, "x [T, H]")
    expect_dims(2, w_head, "w_head [H, V]")
    rows, hidden = x.shape
    columns = w_head.shape[1]
    keep = round_up_to_eight(top_k)
    assert rows <= PARTITIONS, f"lm_head takes at most {PARTITIONS} rows, not {rows}"
    expect_hidden("lm_head", x, hidden, MAX_ROW_BYTES)
    norm.check(hidden)
    assert w_head.shape[0] == hidden, (
        f"w_head has {w_head.shape[0]} rows for a hidden size of {hidden}: give [H, V]"
    )
    assert vocab_offset.shape == (1, 1), f"vocab_offset has to be [1, 1], not {vocab_offset.shape}"
    assert scale > 0, (
        f"scale is {scale}; it has to be positive, so that the largest products are the largest logits"
    )
    assert top_k >= 1, f"top_k is {top_k}; give at least 1"
    most = columns if replica_group is None else round_up_to_eight(columns)
    assert keep <= most, (
        f"w_head has no more than {columns} columns: the largest {keep} (top_k {top_k}, rounded up to a multiple "
        "of 8) are too many; lower top_k"
    )
    cores = nl.num_programs()
    assert cores == 1 or 2 * keep <= columns, (
        f"each core has half of {columns} columns: the largest {keep} (top_k {top_k}, rounded up to a multiple of "
        "8) are too many; lower top_k, or launch on one core"
    )
    assert keep <= MAX_TOP_K, f"lm_head finds at most the largest {MAX_TOP_K}, not {keep}: lower top_k"
    assert num_ranks >= 1, f"num_ranks is {num_ranks}; it counts this rank too: give at least 1"
    assert replica_group is not None or num_ranks == 1, (
        f"num_ranks is {num_ranks} without a replica_group: give the group, or num_ranks 1"
    )
    assert num_ranks * keep <= MAX_GATHERED, (
        f"the largest {keep} of {num_ranks} ranks are more than {MAX_GATHERED} candidates: lower top_k"
    )


def add_offset(columns, offset, dtype):
    """Return `columns` [T, n] plus the vocabulary offset [T, 1], float32 both: the token ids, in `dtype`, in SBUF."""
    ids = nl.ndarray(columns.shape, dtype=dtype, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=ids, data=columns, op0=nl.add, operand0=offset)
    return ids


def lm_head_reference(
    x: np.ndarray,
    norm_weight: np.ndarray,
    w_head: np.ndarray,
    eps: float,
    top_k: int,
    vocab_offset: np.ndarray,
    replica_group: object = None,
    num_ranks: int = 1,
    softcap: float | None = None,
    norm_bias: np.ndarray | None = None,
    norm_offset: float = 0.0,
    scale: float = 1.0,
    w_head_scales: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compute logits, values and ids with NumPy: a float32 product and a stable sort.

    For several ranks pass the whole w_head and an offset of 0; `replica_group` and `num_ranks` are not read.
    """
    wide = widened(x)
    if norm_bias is not None:
        wide = wide - np.mean(wide, axis=1, keepdims=True)
    root = np.sqrt(np.mean(wide * wide, axis=1, keepdims=True) + wide.dtype.type(eps))
    normalised = wide / root * (widened(norm_weight) + wide.dtype.type(norm_offset))
    if norm_bias is not None:
        normalised = normalised + widened(norm_bias)
    logits = widened(normalised.astype(x.dtype)) @ widened(w_head, w_head_scales) * wide.dtype.type(scale)
    if softcap is not None:
        logits = logits.dtype.type(softcap) * np.tanh(logits / logits.dtype.type(softcap))
    order = np.argsort(-logits, axis=1, kind="stable")[:, : -(-top_k // 8) * 8]
    values = np.take_along_axis(logits, order, axis=1)
    return logits, values, (order + vocab_offset[0, 0]).astype(np.int32)
