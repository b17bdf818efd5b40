"""The steps by which attention_prefill brings one tile of queries past a span of keys.

    scores     scores [row, key] of a part of the span; the Vector engine moves them to SBUF and keeps their maximum
    exponents  exp(scale * (score - maximum)), then transposed by DMA to [key, row]
    recompute  scores once more, as [key, row] minus the maximum, of the span's first keys; their exp needs no transpose
    multiply   the product with one block of values and their column of ones
    finish     the product joined to that of the span before, or divided by its sum and stored

A row is one query of one head; a tile has up to 128 rows. A span is the part of a tile's keys whose scores lie in SBUF
at one time. The steps of many spans overlap: see attention_prefill.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.dma import COMPILER, transfer
from nki_kernels.prefill.cores import query_head
from nki_kernels.prefill.masks import identity
from nki_kernels.prefill.plan import mask_of_keys
from nki_kernels.prefill.slopes import add_slopes
from nki_kernels.tiles import BANK, PARTITIONS, aligned_tile, blocks, ranges

SHIFT_PARTS = 3
"""Numbers whose sum is the shift of a row."""

SHIFT_ROWS = 64
"""Rows of the array that a matmul takes which adds the shift: two lie side by side; 64 is the least on every chip."""


def queries_of(case, span, part):
    """The span's queries [part of D, row], as a stationary tile."""
    return span.queries.tile[0 : case.heights[part], span.first_head : span.first_head + span.heads, part, :]


def score(case, span, start, end):
    """Scores of keys start … end of a span, masked, into its tile; behind the last ones the span's maximum is known."""
    bank = nl.ndarray((span.rows, end - start), dtype=nl.float32, buffer=nl.psum)
    first = start
    while first < end:
        last = min(end, first + BANK)
        if last % PARTITIONS > 0 and last - first > PARTITIONS:
            last = last // PARTITIONS * PARTITIONS
        multiply_keys(case, span, bank[:, first - start : last - start], first, last)
        first = last
    if start == span.start:
        span.scores = nl.ndarray((span.rows, span.end - span.start), dtype=nl.float32, buffer=nl.sbuf)
        span.maximum = nl.ndarray((span.rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    scores = span.scores[:, start - span.start : end - span.start]
    if case.softcap is None:
        add_masks(case, span, bank, start, end)
        if case.slopes is not None:
            add_slopes(case, span, scores, bank, start, end)
            bank = scores
    else:
        nisa.activation(dst=scores, op=nl.tanh, data=bank, scale=case.scale / case.softcap)
        add_masks_behind(case, span, scores, start, end)
        bank = scores
    nisa.tensor_scalar_reduce(
        dst=scores,
        data=bank,
        op0=nl.multiply,
        operand0=1.0,
        reduce_op=nl.maximum,
        reduce_res=span.maximum if end == span.end else None,
        reduce_cmd=nisa.reduce_cmd.reset_reduce if start == span.start else nisa.reduce_cmd.reduce,
    )
    if end == span.end:
        choose_shift(case, span)


def add_masks(case, span, scores, start, end):
    """Add to scores in PSUM the masks of the blocks of keys that not all queries see, repeated for each head."""
    for first in range(start, end, PARTITIONS):
        last = min(end, first + PARTITIONS)
        mask = mask_of_keys(case, span.queries, first, last)
        if mask is not None:
            repeat = identity(case.masks, span.queries.count, span.heads)
            nisa.nc_matmul(
                dst=scores[:, first - start : last - start], stationary=repeat, moving=mask, accumulate=True
            )


def add_masks_behind(case, span, scores, start, end):
    """Add the masks to scores in SBUF: behind tanh, which would make a masked score an ordinary one."""
    for first in range(start, end, PARTITIONS):
        last = min(end, first + PARTITIONS)
        mask = mask_of_keys(case, span.queries, first, last)
        if mask is not None:
            repeat = identity(case.masks, span.queries.count, span.heads)
            rows = nl.ndarray((span.rows, last - first), dtype=nl.float32, buffer=nl.psum)
            nisa.nc_matmul(dst=rows, stationary=repeat, moving=mask, accumulate=False)
            masked = scores[:, first - start : last - start]
            nisa.tensor_tensor(dst=masked, data1=masked, data2=rows, op=nl.add)


def multiply_keys(case, span, result, first, last):
    """result [row, key] = queries . keys first … last, whole blocks or a part of one."""
    block = first // PARTITIONS
    count = blocks(last - first)
    for part in range(case.parts):
        height = case.heights[part]
        moving = span.head.keys[0:height, block : block + count, part, :]
        if last % PARTITIONS > 0:
            moving = span.head.keys[0:height, block, part, 0 : last - first]
        nisa.nc_matmul(
            dst=result, stationary=queries_of(case, span, part), moving=moving, accumulate=part > 0
        )


def choose_shift(case, span):
    """What is subtracted from the scores of each row: their maximum, also over the spans before."""
    maximum = span.maximum
    if span.before is not None:
        on_gpsimd(maximum, maximum, span.before.maximum, nl.maximum)
    span.bias = nl.ndarray((span.rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    on_gpsimd(span.bias, maximum, case.minus_scale[0 : span.rows, :], nl.multiply)
    if span.recomputed > 0:
        split_shift(case, span)


def split_shift(case, span):
    """The negative maxima as rows of SHIFT_PARTS numbers of the keys' dtype, which a matmul adds up.

    Three bfloat16 numbers hold the bits of a float32 one, so a row's keys all have the same shift.
    """
    minus_one = case.minus_one[0 : span.rows, :]
    parts = nl.ndarray((span.rows, SHIFT_PARTS), dtype=case.dtype, buffer=nl.sbuf)
    rest = span.maximum
    for i in range(SHIFT_PARTS):
        on_gpsimd(parts[:, i : i + 1], rest, minus_one, nl.multiply)
        if i + 1 < SHIFT_PARTS:
            less = nl.ndarray((span.rows, 1), dtype=nl.float32, buffer=nl.sbuf)
            on_gpsimd(less, rest, parts[:, i : i + 1], nl.add)
            rest = less
    span.shift = nl.ndarray((PARTITIONS, span.rows), dtype=case.dtype, buffer=nl.sbuf)
    for row in range(0, PARTITIONS, SHIFT_ROWS):
        nisa.dma_transpose(dst=span.shift[row : row + SHIFT_PARTS, :], src=parts)


def on_gpsimd(result, one, other, op):
    """An operator on tiles in SBUF on GpSimd, which has nothing else to do."""
    nisa.tensor_tensor(dst=result, data1=one, data2=other, op=op, engine=nisa.engine.gpsimd)


def exponents(case, span, start, end):
    """exp of the scores of keys start … end in SBUF, and their transposes, block by block in span.weights."""
    weights = nl.ndarray((span.rows, end - start), dtype=case.dtype, buffer=nl.sbuf)
    nisa.activation(
        dst=weights,
        op=nl.exp,
        data=span.scores[:, start - span.start : end - span.start],
        bias=span.bias,
        scale=case.exp_scale,
    )
    count = blocks(end - start)
    by_key = aligned_tile((PARTITIONS, count, span.rows), case.dtype)
    full = (end - start) // PARTITIONS
    if full > 0:
        source = weights[:, 0 : full * PARTITIONS].reshape_dim(1, (full, PARTITIONS))
        nisa.dma_transpose(dst=by_key[:, 0:full, :], src=source)
    if full < count:
        used = end - start - full * PARTITIONS
        nisa.dma_transpose(dst=by_key[0:used, full, :], src=weights[:, full * PARTITIONS :])
    keep_weights(span, by_key, start)


def keep_weights(span, by_key, start):
    """Note the blocks of a tile of weights [key, block, row] under their numbers."""
    for i in range(by_key.shape[1]):
        span.weights[f"{start // PARTITIONS + i}"] = by_key[:, i, :]


def recompute(case, span, start, end):
    """Scores of keys start … end less the shift, as [key, block, row] in PSUM; the span has 128 rows."""
    count = (end - start) // PARTITIONS
    per_bank = BANK // PARTITIONS
    result = nl.ndarray((PARTITIONS, count, PARTITIONS), dtype=nl.float32, buffer=nl.psum)
    for first in range(0, count, per_bank):
        last = min(count, first + per_bank)
        at = first // per_bank % (PARTITIONS // SHIFT_ROWS) * SHIFT_ROWS
        nisa.nc_matmul(
            dst=result[:, first:last, :],
            stationary=case.masks.ones[at : at + SHIFT_PARTS, :],
            moving=span.shift[at : at + SHIFT_PARTS, :]
            .reshape((SHIFT_PARTS, 1, PARTITIONS))
            .broadcast(1, last - first),
            accumulate=False,
            tile_position=(at, 0),
            tile_size=(SHIFT_ROWS, PARTITIONS),
        )
    for i in range(count):
        for part in range(case.parts):
            nisa.nc_matmul(
                dst=result[:, i, :],
                stationary=span.head.keys[0 : case.heights[part], start // PARTITIONS + i, part, :],
                moving=queries_of(case, span, part),
                accumulate=True,
            )
    span.scores_by_key[f"{start}"] = result


def exponents_by_key(case, span, start, end):
    """exp of recomputed scores, straight from PSUM."""
    by_key = nl.ndarray(
        (PARTITIONS, (end - start) // PARTITIONS, PARTITIONS), dtype=case.dtype, buffer=nl.sbuf
    )
    nisa.activation(dst=by_key, op=nl.exp, data=span.scores_by_key[f"{start}"], scale=case.exp_scale)
    keep_weights(span, by_key, start)


def multiply(case, span, start, end):
    """Add the product of the weights and values of one block of keys; the first block of a span starts the sum."""
    if span.product is None:
        span.product = nl.ndarray((span.rows, case.value_depth + 1), dtype=nl.float32, buffer=nl.psum)
    block = start // PARTITIONS
    used = end - start
    for first, last in ranges(0, case.value_depth + 1, BANK):
        nisa.nc_matmul(
            dst=span.product[:, first:last],
            stationary=span.weights[f"{block}"][0:used, :],
            moving=span.head.values[0:used, block, first:last],
            accumulate=span.multiplied,
        )
    span.multiplied = True


def finish(case, span, start, end):
    """Join the product to that of the span before; the last span of a tile divides by the sum and stores the rows."""
    if span.last and span.before is None and span.end - span.start <= case.tuning.few:
        # For few keys the Scalar engine and GpSimd have more to do than the Vector engine.
        divide(case, span, span.product, nisa.engine.vector)
        return
    span.sums = nl.ndarray((span.rows, case.value_depth + 1), dtype=nl.float32, buffer=nl.sbuf)
    if span.before is None:
        nisa.activation(dst=span.sums, op=nl.copy, data=span.product)
    else:
        correction = nl.ndarray((span.rows, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.activation(
            dst=correction, op=nl.exp, data=span.before.maximum, bias=span.bias, scale=case.exp_scale
        )
        nisa.scalar_tensor_tensor(
            dst=span.sums,
            data=span.before.sums,
            op0=nl.multiply,
            operand0=correction,
            op1=nl.add,
            operand1=span.product,
        )
    if span.last:
        divide(case, span, span.sums, nisa.engine.gpsimd)


def divide(case, span, sums, engine):
    """The rows of a tile: sums of values, divided by sums of weights; the Vector engine takes them from PSUM."""
    inverse = nl.ndarray((span.rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    span.result = nl.ndarray((span.rows, case.value_depth), dtype=case.dtype, buffer=nl.sbuf)
    weights = sums[:, case.value_depth : case.value_depth + 1]
    values = sums[:, 0 : case.value_depth]
    if engine == nisa.engine.vector:
        nisa.reciprocal(dst=inverse, data=weights)
        scale_outputs(case, span, inverse)
        nisa.tensor_scalar(dst=span.result, data=values, op0=nl.multiply, operand0=inverse)
    else:
        nisa.tensor_scalar(dst=inverse, data=weights, op0=nl.power, operand0=-1.0)
        scale_outputs(case, span, inverse)
        on_gpsimd(span.result, values, inverse.broadcast(1, case.value_depth), nl.multiply)


def scale_outputs(case, span, factors):
    """Multiply factors of outputs [row, 1] by the scale of their values, where a cache has scales."""
    if case.scales is not None:
        head = span.queries.head
        on_gpsimd(factors, factors, case.scales.values[0 : span.rows, head : head + 1], nl.multiply)


def store(case, span, start, end):
    """Write the rows of a tile: [head, query] on the partitions, one head beside the other in o."""
    queries = span.queries
    first = queries.sequence * case.queries + queries.first
    head = query_head(case, queries, span.first_head)
    columns = case.o[
        first : first + queries.count, head * case.value_depth : (head + span.heads) * case.value_depth
    ]
    rows = columns.reshape_dim(1, (span.heads, case.value_depth)).permute((1, 0, 2))
    transfer(rows, span.result, COMPILER)
