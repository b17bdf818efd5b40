"""Rows of activations before a product: their transpose with the contraction on the partitions.

A row of H elements is spread over the partitions in blocks or in runs, see `norms.blocks`, and the rows of the weight
that it meets likewise. In runs, a partition's part of a weight is one piece of HBM, which a DMA reads at its full rate.
The order of summation differs, the sum does not.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.norms.blocks import weighted, weighted_by_block
from nki_kernels.tiles import (
    BANK_BYTES,
    PARTITIONS,
    blocks,
    cast,
    in_block,
    load_repeated,
    psum_slots,
    slot_width,
)

SCALAR_SHARE = 2
"""Of so many PSUM banks of 128 transposed rows the Scalar engine weights and shifts one."""


def spread(rows, runs, norm=None):
    """Transpose rows [rows, H] of SBUF on the Tensor engine to [partition, block, row]; see `spread_into`."""
    count, depth = rows.shape
    shape = (in_block(depth, 0, runs), blocks(depth), count)
    result = nl.ndarray(shape, dtype=rows.dtype, buffer=nl.sbuf)
    spread_into(result, rows, runs, norm)
    return result


def spread_into(result, rows, runs, norm=None, shared=False):
    """Transpose rows [rows, H] of SBUF into `result` [partition, block, row].

    norm: BlockNorm whose weight and bias are applied, or None. As many transposes as fit share a PSUM bank, which one
    instruction moves to SBUF. Without a norm the Scalar engine moves one of SCALAR_SHARE if they are `shared`.
    """
    count, depth = rows.shape
    number = blocks(depth)
    per_bank = BANK_BYTES // (4 if rows.dtype == nl.float32 else 2) // slot_width(count, rows.dtype)
    first = banks = 0
    while first < number:
        used = in_block(depth, first, runs)
        end = first + 1
        # A bank is emptied as one tile, so its slots must cover the same partitions.
        while end < min(number, first + per_bank) and in_block(depth, end, runs) == used:
            end += 1
        bank = psum_slots(used, end - first, count, rows.dtype)
        for block in range(first, end):
            piece = (
                rows[:, block:depth:number]
                if runs
                else rows[:, block * PARTITIONS : block * PARTITIONS + used]
            )
            nisa.nc_transpose(dst=bank[:, block - first, :], data=piece)
        target = result[0:used, first:end, :]
        # The Scalar engine takes half of a LayerNorm's banks, because the Vector engine alone would hold up products.
        if norm is not None and norm.bias is not None and count == PARTITIONS and banks % SCALAR_SHARE == 0:
            weighted_by_block(target, bank, norm, first)
        elif shared and banks % SCALAR_SHARE == 0:
            nisa.activation(dst=target, op=nl.copy, data=bank)
        else:
            weighted(target, bank, norm, first)
        banks += 1
        first = end


def repeated_row(row, rows, offset=0.0):
    """Load a row [1, n] of HBM onto each of `rows` partitions, in float32, plus `offset`."""
    tile = load_repeated(row, rows)
    if offset == 0.0:
        return cast(tile, nl.float32)
    result = nl.ndarray(tile.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=result, data=tile, op0=nl.add, operand0=offset)
    return result
