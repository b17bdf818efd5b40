"""sample: the next token of each row, drawn from its logits, with log-probabilities.

    adjusted  logits + bias, then penalties for tokens that occurred (see Arguments)
    drawn     from the largest K adjusted logits: the first top_k of them, of these the first whose probability ahead
              is below top_p, of these those with at least min_p times the probability of the best
    id        the first in the order of ids whose cumulative sum of weights exp((logit - best) / temperature) is above
              uniform times their sum
    log-probabilities  of the adjusted logits over the whole row, before temperature and choice

Dimensions:
    T   rows, one per sequence, up to 128; V columns, this rank's part of the vocabulary, or given candidates;
    K   candidates rounded up to a multiple of 8; R ranks.

Arguments:
    logits            [T, V] @ HBM, float32 or bfloat16; minus infinity masks a token, NaN is no token
    uniform           [T, 1] @ HBM, float32, in [0, 1)
    temperature       [T, 1] @ HBM, float32; 0 takes the largest, of equal ones the lowest id
    top_k             [T, 1] @ HBM, float32, whole, 1 or more; K or more: all K
    top_p             [T, 1] @ HBM, float32, 0 or more; 0 keeps the best candidate alone; 1 or more: all
    min_p             [T, 1] @ HBM, float32, 0 to 1; 0: all
    candidates        compile-time int: the largest K logits of a row are what is drawn from
    ids               [T, V] @ HBM, int32: the ids of given candidates, best first, as lm_head returns them; else None,
                      and a column's id is its number plus vocab_offset
    bias              [T, V] @ HBM, float32, or None: added; minus infinity masks a token, NaN excludes it: it ranks
                      below every masked one
    prompt_counts     [T, V] @ HBM, float32 or bfloat16, or None: how often each token is in the prompt
    output_counts     [T, V] @ HBM, float32 or bfloat16, or None: how often each token is in the output
    repetition        [T, 1] @ HBM, float32, 1/16 to 16, with output_counts: logits of tokens in the prompt or output
                      are divided by it if positive, else multiplied
    presence          [T, 1] @ HBM, float32, with output_counts: subtracted for tokens in the output
    frequency         [T, 1] @ HBM, float32, with output_counts: subtracted as often as a token is in the output
    vocab_offset      [1, 1] @ HBM, int32, or None: the id of this rank's first column
    replica_group     nki.collectives.ReplicaGroup with the ranks in the order of their columns, or None for one rank
    num_ranks         compile-time int: R, the length of this rank's list
    returns chosen           [T, 1] @ HBM, int32, the same on every rank
            log_probs        [T, 1] @ HBM, float32: of the chosen tokens
            top_ids          [T, K] @ HBM, int32: the candidates of all ranks, best first
            top_log_probs    [T, K] @ HBM, float32; minus infinity for masked ones

Equal draws
    All sums are taken in float32, one term after the other, best first for top_p and lowest id first for the draw,
    as sample_reference takes them. Its exp may differ from a chip's by units in the last place. Each moves a
    cumulative sum by at most K times as much; a uniform number nearer to an edge may draw the neighbour.

Layout
    Logits as in sampling/top_k.py, row and chunk on the partitions; candidates one row per partition.

Tiling
    for each piece of up to 128 / T chunks of up to CHUNK_COLUMNS columns
        load, adjust, search, exp and its sum; merge with the largest so far
    given candidates without penalties and bias are taken as they are
    K/8 rounds bring the candidates into the order of their ids

Cores
    Two cores of a logical core take half of the rows each; one row, and rows over ranks, are the first core's alone.

Limits:
    T up to 128, K up to V and 1024, R times K up to 8192, given candidates up to 4096; ids below 2^24, because
    they are compared in float32. Logits beyond 1e37 count as 1e37, and below -1e30 as masked.

Cost
    HBM: logits and counts once, the results. Vector: K/4 passes over T * V / 128 columns, up to 12 more for bias
    and penalties. Bound: the search; 20 us for 64 given candidates, most of them latency of some 60 small
    instructions.
"""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np

from nki_kernels.cores import find_core_range
from nki_kernels.precision import widened
from nki_kernels.sampling.candidates import find_candidates, load_candidates, merge_ranks
from nki_kernels.sampling.draw import (
    allocate_column,
    compute_candidate_weights,
    draw,
    prepare_parameters,
    select_value,
)
from nki_kernels.sampling.top_k import MAX_GATHERED, MISSING, round_up_to_eight
from nki_kernels.tiles import MASKED, PARTITIONS, cast, expect_dims, load, load_repeated

cores = (1, 2)

MAX_CANDIDATES = 1024
"""Most candidates of a row, which lie in SBUF beside a piece of the logits."""

MAX_GIVEN = 4096
"""Most candidates of a row that are given with their ids."""


@nki.jit
def sample(
    logits,
    uniform,
    temperature,
    top_k,
    top_p,
    min_p,
    candidates=64,
    ids=None,
    bias=None,
    prompt_counts=None,
    output_counts=None,
    repetition=None,
    presence=None,
    frequency=None,
    vocab_offset=None,
    replica_group=None,
    num_ranks=1,
):
    """Return (chosen, log_probs, top_ids, top_log_probs) @ HBM: the token drawn for each row, and its candidates.

    chosen and log_probs are [T, 1]; the candidates are [T, K], best first, K being `candidates` rounded up to
    a multiple of 8. Ids are int32, log-probabilities float32. Tokens are drawn with the random numbers
    `uniform`, so that equal arguments give equal tokens.

    Raises AssertionError if there are more than 128 rows or fewer columns than candidates, or if shapes do
    not fit together. Also if penalties and counts come without each other.
    """
    check_arguments(logits, uniform, candidates, ids, replica_group, num_ranks)
    check_penalties(logits, output_counts, prompt_counts, (repetition, presence, frequency))
    rows = logits.shape[0]
    keep = round_up_to_eight(candidates)
    chosen_ids = nl.ndarray((rows, 1), dtype=nl.int32, buffer=nl.shared_hbm)
    log_probs = nl.ndarray((rows, 1), dtype=nl.float32, buffer=nl.shared_hbm)
    top_ids = nl.ndarray((rows, keep), dtype=nl.int32, buffer=nl.shared_hbm)
    top_log_probs = nl.ndarray((rows, keep), dtype=nl.float32, buffer=nl.shared_hbm)

    results = (chosen_ids, log_probs, top_ids, top_log_probs)
    sources = (logits, bias, prompt_counts, output_counts)
    penalties = (repetition, presence, frequency)
    # A rank calls a collective once, so over ranks one core takes all rows.
    divides = nl.num_programs() > 1 and rows > 1 and replica_group is None
    first, end = find_core_range(rows, 1, nl.program_id(0)) if divides else (0, rows)
    if divides or nl.program_id(0) == 0:
        limits = load_limits(select_rows((uniform, temperature, top_k, top_p, min_p), first, end))
        values, found_ids, total = find_largest_adjusted(
            select_rows(sources, first, end),
            select_rows(penalties, first, end),
            None if ids is None else ids[first:end, :],
            vocab_offset,
            keep,
        )
        if replica_group is not None:
            values, found_ids, total = merge_ranks(values, found_ids, total, replica_group, num_ranks)
        draw_rows(select_rows(results, first, end), values, found_ids, total, limits)
    return chosen_ids, log_probs, top_ids, top_log_probs


def select_rows(tensors, first, end):
    """Return views of rows first … end - 1 of each tensor of a list, with None for None."""
    row_views = []
    for tensor in tensors:
        row_views.append(None if tensor is None else tensor[first:end, :])
    return row_views


def load_limits(limits):
    """Load the per-row arguments of a draw into SBUF: return (uniform, parameters, min_p).

    parameters are (1 / temperature, top_k, top_p) as `prepare_parameters` adjusts them. limits: (uniform,
    temperature, top_k, top_p, min_p), each [T, 1] @ HBM. All results are float32 [T, 1].
    """
    uniform, temperature, top_k, top_p, min_p = limits
    parameters = prepare_parameters(
        load(temperature, nl.float32), load(top_k, nl.float32), load(top_p, nl.float32)
    )
    least_share = load(min_p, nl.float32)
    return load(uniform, nl.float32), parameters, least_share


def find_largest_adjusted(sources, penalties, ids, vocab_offset, keep):
    """Return (values, ids, total) of each row in SBUF: its `keep` largest adjusted logits, their ids, and a sum.

    values and ids are float32 [T, keep], best first. total [T, 1] is the sum of exp(logit - best) over the
    whole row. Given candidates without bias and counts are taken as they are: the first `keep` of them.

    Args:
        sources: (logits, bias, prompt_counts, output_counts), [T, V] @ HBM, or None but for logits.
        penalties: (repetition, presence, frequency), [T, 1] @ HBM or None.
        ids: ids of given candidates, [T, V] @ HBM, or None.
        vocab_offset: [1, 1] @ HBM, the id of column 0, or None for 0.
        keep: a multiple of 8.
    """
    logits, bias, _, output_counts = sources
    if ids is not None and bias is None and output_counts is None:
        values, total = load_candidates(logits, keep)
        return values, load(ids[:, 0:keep], nl.float32), total
    values, columns, total = find_candidates(sources, penalties, keep)
    return values, find_ids(columns, ids, vocab_offset), total


def draw_rows(results, values, found_ids, total, limits):
    """Draw one of the candidates of each row, and store its id, its log-probability, and all candidates to HBM.

    Args:
        results: (chosen, log_probs, top_ids, top_log_probs) @ HBM, all written.
        values, found_ids: the candidates' logits and ids, float32 [T, K] in SBUF, best first.
        total: [T, 1], the sum of exp(logit - best) over the whole row.
        limits: the result of `load_limits`.
    """
    chosen_ids, log_probs, top_ids, top_log_probs = results
    numbers, parameters, least_share = limits
    weights = compute_candidate_weights(values, parameters, least_share)
    chosen = draw(weights, found_ids, numbers)
    nisa.dma_copy(dst=chosen_ids, src=cast(chosen, nl.int32))
    nisa.dma_copy(dst=top_ids, src=cast(found_ids, nl.int32))
    log_sum = allocate_column(values.shape[0])
    nisa.activation(dst=log_sum, op=nl.log, data=total)
    best = values[:, 0:1]
    nisa.dma_copy(dst=top_log_probs, src=log_probabilities(values, best, log_sum))
    nisa.dma_copy(
        dst=log_probs, src=log_probabilities(select_value(chosen, found_ids, values), best, log_sum)
    )


def check_arguments(logits, uniform, candidates, ids, replica_group, num_ranks):
    """Raise AssertionError if rows, candidates, given candidates or ranks are too many, or if a shape does not fit."""
    expect_dims(2, logits, "logits [T, V]")
    rows, columns = logits.shape
    keep = round_up_to_eight(candidates)
    assert rows <= PARTITIONS, f"sample takes at most {PARTITIONS} rows, not {rows}"
    assert uniform.shape == (rows, 1), f"uniform is [{rows}, 1], not {uniform.shape}"
    assert candidates >= 1, f"candidates is {candidates}; at least 1 is wanted"
    assert keep <= columns, (
        f"the largest {keep} ({candidates} candidates, a multiple of 8) of {columns} columns; lower candidates"
    )
    assert keep <= MAX_CANDIDATES, f"sample draws from at most {MAX_CANDIDATES} candidates, not {keep}"
    if ids is not None:
        assert ids.shape == (rows, columns), f"ids is [{rows}, {columns}], not {ids.shape}"
        assert columns <= MAX_GIVEN, f"sample takes at most {MAX_GIVEN} given candidates, not {columns}"
    assert replica_group is not None or num_ranks == 1, (
        f"{num_ranks} ranks, but no replica_group; pass their group"
    )
    assert num_ranks * keep <= MAX_GATHERED, (
        f"{keep} candidates of {num_ranks} ranks are more than {MAX_GATHERED}; lower candidates"
    )


def check_penalties(logits, output_counts, prompt_counts, penalties):
    """Raise AssertionError if output_counts has another shape than the logits or comes without all three penalties.

    Also if a penalty or prompt_counts comes without output_counts. penalties: (repetition, presence,
    frequency).
    """
    rows, columns = logits.shape
    if output_counts is None:
        penalty_count = 0 if prompt_counts is None else 1
        for penalty in penalties:
            penalty_count = penalty_count if penalty is None else penalty_count + 1
        assert penalty_count == 0, "penalties and prompt_counts need output_counts; pass it too"
    else:
        shape = (rows, columns)
        assert output_counts.shape == shape, (
            f"output_counts is [{rows}, {columns}], not {output_counts.shape}"
        )
        for penalty in penalties:
            assert penalty is not None, (
                "output_counts needs repetition, presence and frequency; 1, 0 and 0 change nothing"
            )


def find_ids(columns, ids, vocab_offset):
    """Return the ids of columns [T, K], in float32 in SBUF: those in `ids`, or the columns' numbers plus the offset.

    Args:
        columns: float32 SBUF tile, returned itself if both `ids` and `vocab_offset` are None.
        ids: [T, V] @ HBM, from which each row's columns are gathered, or None.
        vocab_offset: [1, 1] @ HBM, the id of column 0, or None for 0.
    """
    rows, keep = columns.shape
    if ids is None and vocab_offset is None:
        return columns
    result = nl.ndarray((rows, keep), dtype=nl.float32, buffer=nl.sbuf)
    if ids is None:
        offset = cast(load_repeated(vocab_offset, rows), nl.float32)
        nisa.tensor_scalar(dst=result, data=columns, op0=nl.add, operand0=offset)
    else:
        indices = nl.ndarray((rows, keep), dtype=nl.uint32, buffer=nl.sbuf)
        nisa.tensor_copy(dst=indices, src=columns)
        nisa.nc_n_gather(dst=result, data=load(ids, nl.float32), indices=indices)
    return result


def log_probabilities(values, best, log_sum):
    """Return values - best - log_sum as a new float32 SBUF tile [T, n]; minus infinity for masked values.

    values: [T, n], masked if at most MASKED. best, log_sum: [T, 1].
    """
    result = nl.ndarray(values.shape, dtype=nl.float32, buffer=nl.sbuf)
    masked = nl.ndarray(values.shape, dtype=nl.uint8, buffer=nl.sbuf)
    nisa.tensor_scalar(
        dst=result, data=values, op0=nl.subtract, operand0=best, op1=nl.subtract, operand1=log_sum
    )
    nisa.tensor_scalar(dst=masked, data=values, op0=nl.less_equal, operand0=MASKED)
    nisa.tensor_copy_predicated(dst=result, src=float("-inf"), predicate=masked)
    return result


def sample_reference(
    logits: np.ndarray,
    uniform: np.ndarray,
    temperature: np.ndarray,
    top_k: np.ndarray,
    top_p: np.ndarray,
    min_p: np.ndarray,
    candidates: int = 64,
    ids: np.ndarray | None = None,
    bias: np.ndarray | None = None,
    prompt_counts: np.ndarray | None = None,
    output_counts: np.ndarray | None = None,
    repetition: np.ndarray | None = None,
    presence: np.ndarray | None = None,
    frequency: np.ndarray | None = None,
    vocab_offset: np.ndarray | None = None,
    replica_group: object = None,
    num_ranks: int = 1,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return (chosen, log_probs, top_ids, top_log_probs) as the kernel does, drawn row by row with sums in its order.

    chosen and log_probs are [T, 1]; the candidates are [T, K], best first, K being `candidates` rounded up to
    a multiple of 8. replica_group and num_ranks are ignored: for several ranks pass the whole logits and the
    offset 0 or None.
    """
    wide = widened(logits) if bias is None else widened(logits) + bias
    number = wide.dtype.type
    missing = np.isnan(wide)
    wide = np.clip(wide, number(-1e37), number(1e37))
    if output_counts is not None:
        counts = widened(output_counts)
        seen = counts + (0 if prompt_counts is None else widened(prompt_counts)) > 0
        factor = np.where(wide > 0, 1 / repetition, repetition)
        wide = np.where(seen, wide * factor, wide) - (counts * frequency + (counts > 0) * presence)
    wide = np.where(missing, number(MISSING), wide)
    keep = -(-candidates // 8) * 8
    order = np.argsort(-wide, axis=1, kind="stable")[:, :keep]
    values = np.take_along_axis(wide, order, axis=1)
    first = 0 if vocab_offset is None else vocab_offset[0, 0]
    top_ids = order + first if ids is None else np.take_along_axis(ids, order, axis=1)
    log_sum = np.log(np.exp(wide - values[:, :1]).sum(axis=1, keepdims=True))
    top_log_probs = np.where(values > MASKED, values - values[:, :1] - log_sum, -np.inf).astype(wide.dtype)
    chosen = np.empty((len(wide), 1), np.int64)
    for row in range(len(wide)):
        limits = temperature[row, 0], top_k[row, 0], top_p[row, 0], min_p[row, 0]
        chosen[row] = draw_reference(values[row], top_ids[row], uniform[row, 0], *limits)
    log_probs = np.take_along_axis(top_log_probs, np.argmax(top_ids == chosen, axis=1)[:, None], axis=1)
    return chosen.astype(np.int32), log_probs, top_ids.astype(np.int32), top_log_probs


def draw_reference(
    values: np.ndarray,
    ids: np.ndarray,
    uniform: np.floating,
    temperature: np.floating,
    top_k: np.floating,
    top_p: np.floating,
    min_p: np.floating,
) -> int:
    """Return the id of one candidate of a row, drawn by temperature, top_k, top_p, min_p and the number `uniform`.

    values, ids: [K], the candidates in descending order of their logits. Sums are taken one term after the
    other as the kernel does. With temperature 0 the first candidate is returned.
    """
    if temperature == 0:
        return int(ids[0])
    inverse = 1 / np.maximum(temperature, values.dtype.type(1e-6))
    with np.errstate(over="ignore"):  # a quotient of minus infinity is a weight of 0
        exponents = (values - values[0]) * inverse
    weights = np.exp(np.maximum(exponents, values.dtype.type(-200)))
    weights *= (values > MASKED) & (np.arange(len(values)) < top_k)
    weights[0] = 1
    sums = np.cumsum(weights)
    ahead = np.concatenate([sums[:1] * 0 - 1, sums[:-1]])  # the best candidate is kept whatever top_p is
    weights *= ahead < sums[-1] * (top_p + (top_p >= 1))
    weights *= weights >= min_p
    by_id = np.argsort(ids)
    bounds = np.cumsum(weights[by_id])
    drawn = np.minimum(uniform, values.dtype.type(1 - 2**-24)) * bounds[-1]
    return int(ids[by_id[np.searchsorted(bounds, drawn, side="right")]])
