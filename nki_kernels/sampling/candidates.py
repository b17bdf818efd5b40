"""The largest adjusted logits of each row, and the sum of the exponentials of all, for log-probabilities.

`sample` calls this file. Adjusted logits are those with bias and penalties, see sampling/penalties.py; a row's largest
ones are its candidates. A row is searched in pieces, and a piece in chunks of columns, one on each partition, see
sampling/top_k.py. The sum is of exp(logit - best), where the best logit is known last: every chunk sums exp(logit - its
maximum), and these sums are scaled in the end.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.sampling.draw import LEAST_EXPONENT, allocate_column
from nki_kernels.sampling.penalties import bound_logits, load_adjusted, load_parameters
from nki_kernels.sampling.top_k import (
    MERGED_CHUNKS,
    MISSING,
    allocate_candidates,
    collect,
    count_row_chunks,
    divide_into_pieces,
    gather_ranks,
    merge,
    merge_candidates,
    search,
)
from nki_kernels.tiles import blocks, filled, load

CHUNK_COLUMNS = 4096
"""Columns of a chunk: with the penalties of 128 rows they still fit into SBUF of every chip."""

LEAST_COLUMNS = 512
"""Columns of a chunk below which more chunks cost more merges than they save."""


def load_candidates(logits, keep):
    """Return the first `keep` of descending logits, and the sum of exp(logit - largest) over all of a row.

    Values are [rows, keep] float32, where NaNs become MISSING; the sum is [rows, 1] float32. Both are in
    SBUF.

    Args:
        logits: [rows, keep or more] @ HBM, each row descending.
    """
    values, missing = bound_logits(load(logits, logits.dtype))
    nisa.tensor_copy_predicated(dst=values, src=MISSING, predicate=missing)
    ones = filled(values.shape, 1.0)
    return values[:, 0:keep], sum_exponentials(values, ones, values[:, 0:1])


def find_candidates(sources, penalties, keep):
    """Find the `keep` largest adjusted logits of each row; adjusted means with bias and penalties.

    Returns their values, descending, and their columns, [rows, keep] float32 each, and the sum of exp(logit -
    largest) over all columns, [rows, 1] float32; all in SBUF.

    Args:
        sources: (logits, bias or None, prompt_counts or None, output_counts or None), [rows, columns] @ HBM
            each.
        penalties: (repetition, presence, frequency), [rows, 1] @ HBM each; read only if there are
            output_counts.
    """
    logits, _, _, output_counts = sources
    rows, total_columns = logits.shape
    chunks = count_row_chunks(rows, blocks(total_columns, LEAST_COLUMNS))
    parameters = None
    if output_counts is not None:
        parameters = load_parameters(penalties[0], penalties[1], penalties[2], chunks)
    cuts = divide_into_pieces(total_columns, chunks, CHUNK_COLUMNS, keep)
    lanes = rows * chunks
    maxima = nl.ndarray((lanes, len(cuts)), dtype=nl.float32, buffer=nl.sbuf)
    sums = nl.ndarray((lanes, len(cuts)), dtype=nl.float32, buffer=nl.sbuf)
    room = keep + MERGED_CHUNKS * keep
    waiting = None
    for i in range(len(cuts)):
        first, size = cuts[i]
        scores = load_adjusted(sources, parameters, first, size, chunks)
        work = nl.ndarray(scores.shape, dtype=nl.float32, buffer=nl.sbuf)
        largest_of_chunks, indices = search(scores, work, keep)
        nisa.tensor_copy(dst=maxima[:, i : i + 1], src=largest_of_chunks[:, 0:1])
        add_exponentials(sums[:, i : i + 1], scores, maxima[:, i : i + 1])
        candidates = allocate_candidates(rows, room)
        # The merge waits for the DMAs of collect, so it comes after the search of the next piece.
        if waiting is not None:
            merge(candidates, waiting, keep)
        waiting = collect(candidates, i > 0, first, largest_of_chunks, indices, size, keep)
    largest = merge_candidates(waiting, keep)
    all_maxima = nl.ndarray((rows, chunks * len(cuts)), dtype=nl.float32, buffer=nl.sbuf)
    all_sums = nl.ndarray((rows, chunks * len(cuts)), dtype=nl.float32, buffer=nl.sbuf)
    # The chunks of a row lie on partitions of their own, and only a DMA brings their results onto one.
    nisa.dma_copy(dst=all_maxima, src=maxima)
    nisa.dma_copy(dst=all_sums, src=sums)
    return largest[0], largest[1], sum_exponentials(all_maxima, all_sums, largest[0][:, 0:1])


def add_exponentials(total, scores, largest):
    """Write the sum of exp(score - largest) of each partition to `total` [P, 1], in float32.

    scores: [P, columns] float32. largest: [P, 1], the maximum of each partition.
    """
    bias = allocate_column(scores.shape[0])
    nisa.tensor_scalar(dst=bias, data=largest, op0=nl.multiply, operand0=-1.0)
    # The terms may be bfloat16: their sum is taken in float32 before they are rounded, and nothing reads them.
    terms = nl.ndarray(scores.shape, dtype=nl.bfloat16, buffer=nl.sbuf)
    nisa.activation(
        dst=terms,
        op=nl.exp,
        data=scores,
        bias=bias,
        reduce_op=nl.add,
        reduce_res=total,
        reduce_cmd=nisa.reduce_cmd.reset_reduce,
    )


def merge_ranks(values, ids, total, replica_group, ranks):
    """Merge the candidates of all ranks: on every rank return as many of the largest as `values` has columns.

    Returns values and ids, [rows, keep] float32 each, and the sum of exp(logit - largest) over all ranks,
    [rows, 1].

    Args:
        values: this rank's candidates, [rows, keep] float32 in SBUF, descending.
        ids: their ids, [rows, keep] float32 in SBUF.
        total: the sum of exp(logit - values[:, 0]) over this rank's logits, [rows, 1] float32.
    """
    rows, keep = values.shape
    names = ("values", "ids", "totals")
    every_value, every_id, totals = gather_ranks((values, ids, total), names, replica_group, ranks)
    maxima = nl.ndarray((rows, ranks), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=maxima, src=every_value[:, 0 : ranks * keep : keep])
    best, best_ids = merge_candidates((every_value, every_id), keep)
    return best, best_ids, sum_exponentials(maxima, totals, best[:, 0:1])


def sum_exponentials(maxima, sums, best):
    """Return the sum of exp(x - best) of each row, [rows, 1] float32 in SBUF, from sums of its n parts.

    Args:
        maxima: the maximum of each part, [rows, n].
        sums: for each part the sum of exp(x - its maximum), [rows, n].
        best: [rows, 1], the largest x of a row.
    """
    exponents = nl.ndarray(maxima.shape, dtype=nl.float32, buffer=nl.sbuf)
    factors = nl.ndarray(maxima.shape, dtype=nl.float32, buffer=nl.sbuf)
    products = nl.ndarray(maxima.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(
        dst=exponents, data=maxima, op0=nl.subtract, operand0=best, op1=nl.maximum, operand1=LEAST_EXPONENT
    )
    nisa.activation(dst=factors, op=nl.exp, data=exponents)
    nisa.tensor_tensor(dst=products, data1=factors, data2=sums, op=nl.multiply)
    total = allocate_column(maxima.shape[0])
    nisa.tensor_reduce(dst=total, op=nl.add, data=products, axis=1)
    return total
