"""The largest logits of a range of the vocabulary, searched while the weights of the next columns are loaded.

A *piece* of the columns is spread over the partitions in chunks, see `spread_product`: its search is short, but it is
followed by a DMA and a merge. The last pieces, the *tail*, are searched as rows, beside the largest so far. So little
is left to do when the last column has come.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.projection.spread_product import load_chunk_scales, project_piece, project_rows
from nki_kernels.sampling.top_k import (
    MERGED_CHUNKS,
    allocate_candidates,
    collect,
    divide_into_pieces,
    merge,
    search,
)
from nki_kernels.tiles import BANK
from nki_kernels.weights import select_columns

CHUNK_COLUMNS = BANK
"""Columns of a chunk: what one matmul makes."""

TAIL_COLUMNS = (256, 384)
"""Columns of the tail's pieces, the last one first: one is searched about while the next one is loaded.

gen4 has the second one only: HBM is so fast there that rows of 512 bytes take longer than the search they hide.
"""

TAIL_HIDDEN = 96
"""Hidden size for each value wanted, from which on a column is searched in less time than it is loaded."""

LEAST_SPREAD = 512
"""Columns before the tail that are worth the search in chunks; more than the values wanted where there is a tail."""


def find_largest_logits(logits, operands, w_head, finish, first, end, keep):
    """Store the logits of columns first … end - 1 to `logits` [T, V] @ HBM, and find the `keep` largest.

    Returns their values, descending, and their columns, [T, keep] float32 each in SBUF.

    Args:
        operands: (result of `spread_rows`, result of `make_padding_operands`, chunks for which the rows are
            spread).
        w_head: WeightMatrix [H, V].
        finish: (scale, softcap or None), applied to each product.
    """
    tail = plan_tail(w_head.elements.shape[0], end - first, keep)
    spread_end = end
    for size in tail:
        spread_end -= size
    delays = len(tail) > 0
    waiting = search_pieces(logits, operands, w_head, finish, first, spread_end, keep, delays)
    rows = logits.shape[0]
    spread, _, chunks = operands
    work = None
    first = spread_end
    for size in tail:
        matrix = select_columns(w_head, first, first + size)
        sums = project_rows(spread, rows, chunks, matrix)
        candidates = allocate_candidates(rows, keep + size)
        nisa.iota(dst=candidates[1][:, keep : keep + size], pattern=[[1, size]], offset=first)
        merge(candidates, waiting, keep, work)
        scores = candidates[0][:, keep : keep + size]
        copy_logits(scores, sums, finish, load_chunk_scales(matrix.scales, rows, 1, size))
        nisa.dma_copy(dst=logits[:, first : first + size], src=scores)
        # The logits are on their way to HBM while they are searched.
        work = nl.ndarray(candidates[0].shape, dtype=nl.float32, buffer=nl.sbuf)
        waiting = candidates
        first += size
    largest = allocate_candidates(rows, keep)
    merge(largest, waiting, keep, work)
    return largest


def search_pieces(logits, operands, w_head, finish, first, end, keep, delays):
    """Store the logits of columns first … end - 1, searched piece by piece; return the candidates of the last merge.

    A piece is a range of columns, of which each row has several chunks of neighbouring columns. The result,
    (values, columns) of [T, candidates] in SBUF, is not merged yet: the caller has to. The merge of a piece
    waits for a DMA: so it comes after the search of the next piece, or before the search of the last one if
    not `delays`.

    Args:
        operands, finish: as of `find_largest_logits`.
        delays: whether a tail of columns follows, which is searched as rows.
    """
    rows = logits.shape[0]
    spread, padding, chunks = operands
    cuts = divide_into_pieces(end - first, chunks, CHUNK_COLUMNS, keep)
    waiting = None
    for i in range(len(cuts)):
        start, size = cuts[i]
        start += first
        at_once = i == len(cuts) - 1 and not delays
        weights = select_columns(w_head, start, min(end, start + chunks * size))
        sums = project_piece(spread, padding, rows, chunks, weights, size)
        candidates = allocate_candidates(rows, keep + MERGED_CHUNKS * keep)
        if waiting is not None and at_once:
            merge(candidates, waiting, keep)
        column_scales = load_chunk_scales(weights.scales, rows, chunks, size)
        piece_logits = logits[:, start : start + weights.elements.shape[1]]
        scores = finish_logits(piece_logits, sums, chunks, finish, column_scales)
        work = nl.ndarray(sums.shape, dtype=nl.float32, buffer=nl.sbuf)
        largest, indices = search(scores, work, keep)
        collected = collect(candidates, waiting is not None, start, largest, indices, size, keep)
        if waiting is not None and not at_once:
            merge(candidates, waiting, keep)
        waiting = collected
    return waiting


def finish_logits(logits, sums, chunks, finish, column_scales):
    """Scale and cap the products of a piece, and store them to `logits` [T, n] @ HBM; return what is searched.

    A piece is a range of n columns, of which each row has `chunks` chunks of neighbouring columns. Returned
    are `sums`, in PSUM, if they are the logits already, else the scores in SBUF: so the search need
    not wait for the store. Both are [row * chunk, column]. A cap lifts padding to minus the cap, where equal
    logits come first: their columns are lower.

    Args:
        sums: products [row * chunk, column] in PSUM; columns from n on are padding.
        finish: (scale, softcap or None).
        column_scales: what `load_chunk_scales` returned.
    """
    scores = nl.ndarray(sums.shape, dtype=nl.float32, buffer=nl.sbuf)
    copy_logits(scores, sums, finish, column_scales)
    lanes, size = sums.shape
    columns = logits.shape[1]
    if columns == chunks * size:
        nisa.dma_copy(dst=logits, src=scores)
    else:
        for chunk in range(chunks):
            end = min(columns, (chunk + 1) * size)
            if chunk * size < end:
                source = scores[chunk:lanes:chunks, 0 : end - chunk * size]
                nisa.dma_copy(dst=logits[:, chunk * size : end], src=source)
    is_finished = finish[1] is None and finish[0] == 1.0 and column_scales is None
    return sums if is_finished else scores


def copy_logits(scores, sums, finish, column_scales):
    """Copy products `sums` from PSUM to `scores` in SBUF, scaled, and capped if the softcap is not None.

    finish: (scale, softcap or None). column_scales: float32 tile in SBUF that multiplies the sums, or None.
    """
    scale, softcap = finish
    if column_scales is not None:
        nisa.scalar_tensor_tensor(
            dst=scores, data=sums, op0=nl.multiply, operand0=scale, op1=nl.multiply, operand1=column_scales
        )
        if softcap is not None:
            nisa.activation(dst=scores, op=nl.tanh, data=scores, scale=1.0 / softcap)
            nisa.activation(dst=scores, op=nl.copy, data=scores, scale=softcap)
    elif softcap is None:
        nisa.activation(dst=scores, op=nl.copy, data=sums, scale=scale)
    else:
        bounded = nl.ndarray(sums.shape, dtype=nl.float32, buffer=nl.sbuf)
        nisa.activation(dst=bounded, op=nl.tanh, data=sums, scale=scale / softcap)
        nisa.activation(dst=scores, op=nl.copy, data=bounded, scale=softcap)


def plan_tail(hidden, columns, keep):
    """Return the widths of the last pieces of columns, which are searched as rows, without chunks, in column order.

    The list is empty where a search takes longer than a load, or no LEAST_SPREAD columns would be left before
    the tail.

    Args:
        hidden: H, rows of the weight.
        columns: number of all columns.
    """
    sizes = []
    if hidden < TAIL_HIDDEN * keep:
        return sizes
    tail_sizes = TAIL_COLUMNS[1:] if nisa.get_nc_version() == nisa.nc_version.gen4 else TAIL_COLUMNS
    spread_columns = columns
    for size in tail_sizes:
        if spread_columns - size >= LEAST_SPREAD:
            sizes = [size] + sizes
            spread_columns -= size
    return sizes
