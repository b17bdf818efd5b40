"""The steps by which attention_prefill brings one tile of queries past a span of keys.

    score                scores [row, key] of some keys; the Vector engine moves them to SBUF and keeps their maximum
    exponentiate         exp(scale * (score - maximum)), then transposed by DMA to [key, row]
    score_by_key         scores as [key, row] of the span's first keys, once more and minus the maximum; bounded scores
                         of all keys, once and as they are
    exponentiate_by_key  exp of scores by key, which needs no transpose
    multiply             the product with one block of values and their column of ones
    finish               the product joined to that of the span before, or divided by its sum
    store                the rows of the result written to HBM

A row is one query of one head; a tile has up to 128 rows. A span has those of a tile's keys whose scores lie in SBUF at
one time. The steps of many spans overlap: see `prefill.order`, which issues them. exp of a score is the weight of its
key in the softmax. The *shift* of a row is minus the maximum of its scores, which `score_by_key` adds to them.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.dma import COMPILER, transfer
from nki_kernels.prefill.spans import find_mask
from nki_kernels.tiles import BANK, PARTITIONS, blocks, ranges

SHIFT_TERMS = 3
"""Numbers whose sum is the shift of a row."""

SHIFT_ROWS = 64
"""Rows of the array that a matmul takes which adds the shift: two lie side by side; 64 is the least on every chip."""


def view_queries(prompts, span, tile):
    """View one tile of D of a span's queries as [D in tile, head, query] @ SBUF, an operand of a matmul.

    `tile` is the index of the tile of D.
    """
    first = span.first_head
    return span.queries.tile[0 : prompts.heights[tile], first : first + span.heads, tile, :]


def score(launch, span, start, end):
    """Compute masked scores of keys start … end - 1 for the rows of a `Span`; write `span.scores` [row, key] @ SBUF.

    The scores are float32, not yet multiplied by `exp_scale`: exp does that. A soft cap, less its factor, slopes and
    biases are applied here. The call with the span's last keys also writes `span.maximum`, `span.bias` and
    `span.shift`.
    """
    step = launch.prompts.step
    bank = nl.ndarray((span.rows, end - start), dtype=nl.float32, buffer=nl.psum)
    first = start
    while first < end:
        # A matmul writes one PSUM bank, 512 float32 columns, while this tile of scores has two banks.
        last = min(end, first + BANK)
        # A short last block takes a matmul of its own: the moving operand is whole blocks, or the used keys of one.
        if last % PARTITIONS > 0 and last - first > PARTITIONS:
            last = last // PARTITIONS * PARTITIONS
        multiply_keys(launch.prompts, span, bank[:, first - start : last - start], first, last)
        first = last
    scores = span.scores[:, start - span.start : end - span.start]
    if step.softcap is None:
        add_masks(launch, span, bank, start, end)
        if launch.slopes is not None:
            launch.slopes.add_biases(span, scores, bank, start, end)
            bank = scores
        elif launch.biases is not None:
            launch.biases.add_biases(span, launch.masks.ones, bank, start, end)
    else:
        # tanh would make a masked score an ordinary one, so masks follow it.
        nisa.activation(dst=scores, op=nl.tanh, data=bank, scale=step.scale / step.softcap)
        add_masks(launch, span, scores, start, end)
        bank = scores
    # A product with one makes the eviction from PSUM and the maximum a single pass of the Vector engine.
    nisa.tensor_scalar_reduce(
        dst=scores,
        data=bank,
        op0=nl.multiply,
        operand0=1.0,
        reduce_op=nl.maximum,
        # The Vector accumulators keep the maximum between tiles of scores, so the last tile alone writes it.
        reduce_res=span.maximum if end == span.end else None,
        reduce_cmd=nisa.reduce_cmd.reset_reduce if start == span.start else nisa.reduce_cmd.reduce,
    )
    if end == span.end:
        choose_shift(launch, span)


def add_masks(launch, span, scores, start, end):
    """Add masks in place to `scores` [row, key] of keys start … end - 1 and the rows of a `Span`, in PSUM or SBUF.

    Blocks of 128 keys that every query sees have no mask and stay as they are.
    """
    for first in range(start, end, PARTITIONS):
        last = min(end, first + PARTITIONS)
        mask = find_mask(launch, span.queries, span.head, first, last)
        if mask is not None:
            repeat = launch.masks.make_identity(span.queries.count, span.heads)
            masked = scores[:, first - start : last - start]
            if scores.buffer == nl.psum:
                # The Tensor engine adds masks in PSUM, so the Vector engine still passes over the scores only once.
                nisa.nc_matmul(dst=masked, stationary=repeat, moving=mask, accumulate=True)
            else:
                rows = nl.ndarray((span.rows, last - first), dtype=nl.float32, buffer=nl.psum)
                nisa.nc_matmul(dst=rows, stationary=repeat, moving=mask, accumulate=False)
                nisa.tensor_tensor(dst=masked, data1=masked, data2=rows, op=nl.add)


def multiply_keys(prompts, span, result, first, last):
    """Write the product of a `Span`'s queries with keys first … last - 1 to `result` [row, key] float32 @ PSUM.

    The keys are whole blocks of 128, or keys of the last, short block alone. Tiles of D are added up.
    """
    block = first // PARTITIONS
    count = blocks(last - first)
    for tile in range(prompts.depth_tiles):
        height = prompts.heights[tile]
        moving = span.head.keys[0:height, block : block + count, tile, :]
        if last % PARTITIONS > 0:
            moving = span.head.keys[0:height, block, tile, 0 : last - first]
        nisa.nc_matmul(
            dst=result, stationary=view_queries(prompts, span, tile), moving=moving, accumulate=tile > 0
        )


def choose_shift(launch, span):
    """Write what exp subtracts from the scores of each row of a span, [row, 1] float32 @ SBUF.

    `span.maximum` becomes the larger of itself and the maximum of the span before, if there is one. `span.bias` becomes
    -`exp_scale` times that. If `span.shift` is not None, it becomes the negative maximum, as `split_shift` writes it.
    """
    maximum = span.maximum
    if span.before is not None:
        combine_on_gpsimd(maximum, maximum, span.before.maximum, nl.maximum)
    combine_on_gpsimd(span.bias, maximum, launch.minus_scale[0 : span.rows, :], nl.multiply)
    if span.shift is not None:
        split_shift(span.shift, maximum, launch.minus_one[0 : span.rows, :])


def split_shift(shift, maximum, minus_one):
    """Write minus the maxima [row, 1] float32 to `shift` as SHIFT_TERMS rows of numbers, which a matmul sums up.

    Three bfloat16 numbers hold the bits of a float32 one, so a row's keys all have the same shift. `shift` is [128,
    row] @ SBUF in the keys' dtype; the terms go to its rows from 0 and again from SHIFT_ROWS on. `minus_one` is a
    column of -1.
    """
    terms = nl.ndarray((maximum.shape[0], SHIFT_TERMS), dtype=shift.dtype, buffer=nl.sbuf)
    remaining = maximum
    for i in range(SHIFT_TERMS):
        combine_on_gpsimd(terms[:, i : i + 1], remaining, minus_one, nl.multiply)
        if i + 1 < SHIFT_TERMS:
            less = nl.ndarray(maximum.shape, dtype=nl.float32, buffer=nl.sbuf)
            combine_on_gpsimd(less, remaining, terms[:, i : i + 1], nl.add)
            remaining = less
    # The terms lie in each half of the array's rows, where `score_by_key` takes them for one PSUM bank or another.
    for row in range(0, PARTITIONS, SHIFT_ROWS):
        nisa.dma_transpose(dst=shift[row : row + SHIFT_TERMS, :], src=terms)


def combine_on_gpsimd(result, first, second, op):
    """Write op(first, second), element by element, to `result` on GpSimd, which is idle; all tiles are in SBUF."""
    nisa.tensor_tensor(dst=result, data1=first, data2=second, op=op, engine=nisa.engine.gpsimd)


def exponentiate(launch, chunk):
    """Compute exp of the scores of a `Chunk` of keys; transpose it to `chunk.weights` [key, block, row] @ SBUF.

    The scores are those that `score` wrote, less the maximum of their row. The agenda calls it.
    """
    span, count = chunk.span, chunk.end - chunk.start
    weights = nl.ndarray((span.rows, count), dtype=chunk.weights.dtype, buffer=nl.sbuf)
    nisa.activation(
        dst=weights,
        op=nl.exp,
        data=span.scores[:, chunk.start - span.start : chunk.end - span.start],
        bias=span.bias,
        scale=launch.exp_scale,
    )
    # DMA transposes the weights, because results of the Tensor engine would have to be evicted from PSUM as well.
    full = count // PARTITIONS
    if full > 0:
        source = weights[:, 0 : full * PARTITIONS].reshape_dim(1, (full, PARTITIONS))
        nisa.dma_transpose(dst=chunk.weights[:, 0:full, :], src=source)
    if full * PARTITIONS < count:
        used = count - full * PARTITIONS
        nisa.dma_transpose(dst=chunk.weights[0:used, full, :], src=weights[:, full * PARTITIONS :])


def score_by_key(launch, chunk):
    """Write scores of a `Chunk` of keys to `chunk.scores` [key, block, row] float32 @ PSUM, less their row's maximum.

    Bounded scores are written as they are. Every query sees every key of the chunk. The agenda calls it.
    """
    prompts, span = launch.prompts, chunk.span
    count = chunk.scores.shape[1]
    if span.shift is not None:
        write_shift(launch, chunk)
    for i in range(count):
        for tile in range(prompts.depth_tiles):
            nisa.nc_matmul(
                dst=chunk.scores[:, i, 0 : span.rows],
                stationary=span.head.keys[0 : prompts.heights[tile], chunk.start // PARTITIONS + i, tile, :],
                moving=view_queries(prompts, span, tile),
                accumulate=tile > 0 or span.shift is not None,
            )


def write_shift(launch, chunk):
    """Write the shift of each row of a `Chunk` to `chunk.scores` of each of its keys; the span has 128 rows."""
    span, count = chunk.span, chunk.scores.shape[1]
    per_bank = BANK // PARTITIONS
    # Queries lie along the free dimension here and a bias is per partition, so a matmul brings the shift to PSUM.
    for first, last in ranges(0, count, per_bank):
        # Neighbouring banks take different halves of the array, so their matmuls of three rows run side by side.
        row = first // per_bank % (PARTITIONS // SHIFT_ROWS) * SHIFT_ROWS
        shift = span.shift[row : row + SHIFT_TERMS, :].reshape((SHIFT_TERMS, 1, PARTITIONS))
        nisa.nc_matmul(
            dst=chunk.scores[:, first:last, :],
            stationary=launch.masks.ones[row : row + SHIFT_TERMS, :],
            moving=shift.broadcast(1, last - first),
            accumulate=False,
            tile_position=(row, 0),
            tile_size=(SHIFT_ROWS, PARTITIONS),
        )


def exponentiate_by_key(launch, chunk):
    """Write exp of `chunk.scores` in PSUM, which `score_by_key` wrote, to `chunk.weights` [key, block, row] @ SBUF.

    The agenda calls it.
    """
    scores = chunk.scores[:, :, 0 : chunk.span.rows]
    nisa.activation(dst=chunk.weights, op=nl.exp, data=scores, scale=launch.exp_scale)


def multiply(launch, chunk):
    """Add the product of a `Chunk`'s weights and values to `span.product` [row, Dv + 1] float32 @ PSUM.

    The last column sums up the weights. The first block of keys at `span.split`, which the agenda issues first,
    overwrites the product instead. The agenda calls it.
    """
    span = chunk.span
    for i in range(chunk.weights.shape[1]):
        start = chunk.start + i * PARTITIONS
        used = min(PARTITIONS, chunk.end - start)
        # 512 values and the column of their weights' sum fill more than one PSUM bank, which is all a matmul writes.
        for first, last in ranges(0, launch.prompts.value_depth + 1, BANK):
            nisa.nc_matmul(
                dst=span.product[:, first:last],
                stationary=chunk.weights[0:used, i, :],
                moving=span.head.values[0:used, start // PARTITIONS, first:last],
                # The agenda has the keys behind the split first, so their first block starts the sum.
                accumulate=start != (span.split if span.split < span.end else span.start),
            )


def finish(launch, span):
    """Write the sums over all keys so far, [row, Dv + 1] float32, to `span.sums` @ SBUF, once the product is complete.

    They are the product of the `Span` plus the sums of the span before, rescaled to the new maximum; a first span
    without a sink copies its product. The last span of its rows then writes `span.result`: the sums divided by the sum
    of weights. A span whose `sums` is None has all keys of its rows, and its product in PSUM is divided. The agenda
    calls it.
    """
    if span.sums is None:
        # For few keys the Scalar engine and GpSimd have more to do than the Vector engine.
        divide(launch.prompts, span, span.product, launch.tuning.divider)
        return
    if span.before is None:
        # GpSimd, which divides, cannot read PSUM, so the Scalar engine evicts the product.
        nisa.activation(dst=span.sums, op=nl.copy, data=span.product)
    else:
        correction = nl.ndarray((span.rows, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.activation(
            dst=correction, op=nl.exp, data=span.before.maximum, bias=span.bias, scale=launch.exp_scale
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
        divide(launch.prompts, span, span.sums, nisa.engine.gpsimd)


def divide(prompts, span, sums, engine):
    """Divide sums [row, Dv] by the sum of weights in their last column; write `span.result` [row, Dv] @ SBUF.

    In a cache with scales the quotient is multiplied by the scale of its head's values. `engine` multiplies: the Vector
    or the Scalar engine, which reads `sums` in PSUM, or GpSimd, which reads them in SBUF.
    """
    result, depth, head = span.result, prompts.value_depth, span.queries.kv_head
    inverse = nl.ndarray((span.rows, 1), dtype=nl.float32, buffer=nl.sbuf)
    weights, values = sums[:, depth : depth + 1], sums[:, 0:depth]
    if engine != nisa.engine.gpsimd:
        nisa.reciprocal(dst=inverse, data=weights)
    else:
        # GpSimd inverts by a power, because only the Vector engine has the reciprocal instruction.
        nisa.tensor_scalar(dst=inverse, data=weights, op0=nl.power, operand0=-1.0)
    if prompts.scales is not None:
        combine_on_gpsimd(
            inverse, inverse, prompts.scales.values[0 : span.rows, head : head + 1], nl.multiply
        )
    if engine == nisa.engine.vector:
        nisa.tensor_scalar(dst=result, data=values, op0=nl.multiply, operand0=inverse)
    elif engine == nisa.engine.scalar:
        nisa.activation(dst=result, op=nl.copy, data=values, scale=inverse)
    else:
        combine_on_gpsimd(result, values, inverse.broadcast(1, depth), nl.multiply)


def store(launch, span):
    """Write `span.result` [(head, query), Dv] to o of its stream @ HBM, at the rows and columns of queries and heads.

    The agenda calls it.
    """
    queries, depth = span.queries, launch.prompts.value_depth
    first = queries.find_row()
    head = launch.prompts.share.index_query_head(queries.kv_head, span.first_head)
    columns = queries.stream.o[first : first + queries.count, head * depth : (head + span.heads) * depth]
    rows = columns.reshape_dim(1, (span.heads, depth)).permute((1, 0, 2))
    transfer(rows, span.result, COMPILER)
