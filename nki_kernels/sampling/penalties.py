"""Logits before the choice of a token: bias, penalties for tokens that occurred, and no logit that is not a number.

`sample` calls this file, by way of sampling/candidates.py. Columns of a row are taken in pieces; a piece is cut into
chunks of neighbouring columns, one on each partition: tiles are [row * chunk, column]. Every parameter of a row is a
tile [row * chunk, 1].
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.sampling.top_k import MISSING

BOUND = 1.0e37
"""Logits are moved into ± this; a masked one, minus infinity, stays far below MASKED under any penalty."""


def load_for_chunks(parameter, chunks):
    """Load a parameter [T, 1] of HBM into SBUF, repeated for all chunks of a row: [T * chunks, 1] float32."""
    rows = parameter.shape[0]
    tile = nl.ndarray((rows * chunks, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=parameter.ap(pattern=[[1, rows], [0, chunks], [1, 1]]))
    return tile


def load_piece(source, first, size, chunks, padding):
    """Load columns of `source` [T, V] @ HBM, from `first` on, into SBUF: [T * chunks, size].

    A row's chunks of `size` neighbouring columns lie on neighbouring partitions. Columns from V on get
    `padding`.
    """
    rows, total = source.shape
    columns = min(total - first, chunks * size)
    tile = nl.ndarray((rows * chunks, size), dtype=source.dtype, buffer=nl.sbuf)
    if columns == chunks * size:
        nisa.dma_copy(dst=tile, src=source[:, first : first + columns])
    else:
        nisa.memset(dst=tile, value=padding)
        for chunk in range(chunks):
            end = min(columns, (chunk + 1) * size)
            if chunk * size < end:
                nisa.dma_copy(
                    dst=tile[chunk : rows * chunks : chunks, 0 : end - chunk * size],
                    src=source[:, first + chunk * size : first + end],
                )
    return tile


def load_parameters(repetition, presence, frequency, chunks):
    """Load the parameters of `penalise`, [T, 1] @ HBM each, repeated for all chunks of a row.

    Returns repetition, 1 / repetition, presence and frequency, [T * chunks, 1] float32 in SBUF each.
    """
    divisor = load_for_chunks(repetition, chunks)
    factor = nl.ndarray(divisor.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.reciprocal(dst=factor, data=divisor)
    return divisor, factor, load_for_chunks(presence, chunks), load_for_chunks(frequency, chunks)


def bound_logits(raw):
    """Return logits as float32, limited to -BOUND … BOUND, and a uint8 mask, 1 where a logit is NaN.

    Both are new tiles in SBUF of raw's shape. The limited value of a NaN is not defined.
    """
    logits = nl.ndarray(raw.shape, dtype=nl.float32, buffer=nl.sbuf)
    missing = nl.ndarray(raw.shape, dtype=nl.uint8, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=missing, data1=raw, data2=raw, op=nl.not_equal)
    nisa.tensor_scalar(dst=logits, data=raw, op0=nl.maximum, operand0=-BOUND, op1=nl.minimum, operand1=BOUND)
    return logits, missing


def load_adjusted(sources, parameters, first, size, chunks):
    """Load a piece of all rows of logits from column `first` on, and apply bias and penalties.

    The result is [row * chunk, size] float32 in SBUF: `chunks` chunks of `size` neighbouring columns for each
    row. NaNs and columns beyond the last become MISSING.

    Args:
        sources: (logits, bias or None, prompt_counts or None, output_counts or None), [rows, columns] @ HBM
            each.
        parameters: the result of `load_parameters`, or None for no penalties.
    """
    logits, bias, prompt_counts, output_counts = sources
    # Padding with NaN needs no mask of its own: the test for logits that are NaN finds it.
    raw = load_piece(logits, first, size, chunks, float("nan"))
    if bias is not None:
        added = nl.ndarray(raw.shape, dtype=nl.float32, buffer=nl.sbuf)
        extra = load_piece(bias, first, size, chunks, 0.0)
        nisa.tensor_tensor(dst=added, data1=raw, data2=extra, op=nl.add)
        raw = added
    adjusted, missing = bound_logits(raw)
    if parameters is not None:
        counts = load_piece(output_counts, first, size, chunks, 0.0)
        seen = nl.ndarray(raw.shape, dtype=nl.uint8, buffer=nl.sbuf)
        if prompt_counts is None:
            nisa.tensor_scalar(dst=seen, data=counts, op0=nl.greater, operand0=0.0)
        else:
            prompt = load_piece(prompt_counts, first, size, chunks, 0.0)
            nisa.scalar_tensor_tensor(
                dst=seen, data=prompt, op0=nl.add, operand0=0.0, op1=nl.logical_or, operand1=counts
            )
        adjusted = penalise(adjusted, seen, counts, parameters)
    # MISSING is written last, so that no penalty moves it.
    nisa.tensor_copy_predicated(dst=adjusted, src=MISSING, predicate=missing)
    return adjusted


def penalise(logits, seen, counts, parameters):
    """Return logits minus penalties, a new float32 tile in SBUF; `logits` is overwritten.

    Logits of seen tokens are divided by the repetition penalty if positive, else multiplied by it. Then each
    token that occurred in the output costs the presence penalty, and its count times the frequency penalty.

    Args:
        seen: uint8, 1 for tokens of the prompt and the output.
        counts: how often a token is in the output.
        parameters: the result of `load_parameters`.
    """
    divisor, factor, presence, frequency = parameters
    lowered = nl.ndarray(logits.shape, dtype=nl.float32, buffer=nl.sbuf)
    raised = nl.ndarray(logits.shape, dtype=nl.float32, buffer=nl.sbuf)
    both = nl.ndarray(logits.shape, dtype=nl.float32, buffer=nl.sbuf)
    # Positive and negative logits are scaled apart and added: one of the two terms is always zero.
    nisa.tensor_scalar(
        dst=lowered, data=logits, op0=nl.maximum, operand0=0.0, op1=nl.multiply, operand1=factor
    )
    nisa.tensor_scalar(
        dst=raised, data=logits, op0=nl.minimum, operand0=0.0, op1=nl.multiply, operand1=divisor
    )
    nisa.tensor_tensor(dst=both, data1=lowered, data2=raised, op=nl.add)
    nisa.tensor_copy_predicated(dst=logits, src=both, predicate=seen)
    penalty = nl.ndarray(logits.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(
        dst=penalty, data=counts, op0=nl.greater, operand0=0.0, op1=nl.multiply, operand1=presence
    )
    fewer = nl.ndarray(logits.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.scalar_tensor_tensor(
        dst=fewer, data=counts, op0=nl.multiply, operand0=frequency, op1=nl.add, operand1=penalty
    )
    result = nl.ndarray(logits.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=result, data1=logits, data2=fewer, op=nl.subtract)
    return result
