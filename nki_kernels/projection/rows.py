"""Transposes of rows of activations, which bring the contraction of a product to the partitions.

Rows [row, H] become [partition, block, row], with C = ceil(H / 128) blocks. In *blocks* element h of a row
lies on partition h % 128, in block h // 128. In *runs* it lies on partition h // C, in block h % C. The rows
of the weight that meet them lie likewise. In runs a partition's part of a weight is one contiguous piece of
HBM, which a DMA reads at its full rate. The terms of a sum are the same in both layouts, their order differs.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.norms.blocks import SCALAR_SHARE, find_single_images, weight_block_by_block, weight_blocks
from nki_kernels.tiles import (
    BANK_BYTES,
    PARTITIONS,
    allocate_psum_slots,
    blocks,
    cast,
    count_block_partitions,
    count_slot_columns,
    load_repeated,
)


def spread(rows, runs, norm=None, first_row=0):
    """Return the transpose of an SBUF tile [rows, H] as a new SBUF tile [partition, block, row] of the same dtype.

    The Tensor engine transposes. runs: with True element h of a row goes to partition h // C, block h % C,
    where C = ceil(H / 128); with False to partition h % 128, block h // 128. norm: BlockNorm whose weight and
    bias are applied to the transpose, or None. first_row: index of the first row among the rows of all images.
    """
    count, depth = rows.shape
    shape = (count_block_partitions(depth, 0, runs), blocks(depth), count)
    result = nl.ndarray(shape, dtype=rows.dtype, buffer=nl.sbuf)
    spread_into(result, rows, runs, norm, first_row)
    return result


def spread_into(result, rows, runs, norm=None, first_row=0, shared=False):
    """Write the transpose of an SBUF tile [rows, H] to `result` in SBUF, [partition, block, row].

    The Tensor engine transposes into PSUM; one instruction copies all transposes that fit in a bank to SBUF.
    The Vector engine copies, or for 128 rows with a LayerNorm also the Scalar engine, see SCALAR_SHARE.

    Args:
        result: not written on partitions of its blocks that no element falls on.
        rows: the tile to transpose.
        runs: with True element h of a row goes to partition h // C, block h % C, where C = ceil(H / 128);
            with False to partition h % 128, block h // 128.
        norm: BlockNorm whose weight and bias are applied on the way, or None.
        first_row: index of the first row among the rows of all images, which the norm tells apart.
        shared: without a norm, whether the Scalar engine copies its share of the banks; else the Vector
            engine copies all.
    """
    count, depth = rows.shape
    number = blocks(depth)
    per_bank = BANK_BYTES // (4 if rows.dtype == nl.float32 else 2) // count_slot_columns(count, rows.dtype)
    single_images = find_single_images(norm, first_row, count)
    first = banks = 0
    while first < number:
        used = count_block_partitions(depth, first, runs)
        end = first + 1
        # A bank is emptied as one tile, so its slots must cover the same partitions.
        while end < min(number, first + per_bank) and count_block_partitions(depth, end, runs) == used:
            end += 1
        bank = allocate_psum_slots(used, end - first, count, rows.dtype)
        for block in range(first, end):
            piece = (
                rows[:, block:depth:number]
                if runs
                else rows[:, block * PARTITIONS : block * PARTITIONS + used]
            )
            nisa.nc_transpose(dst=bank[:, block - first, :], data=piece)
        target = result[0:used, first:end, :]
        # Scalar takes its share of a LayerNorm's banks, because the Vector engine alone would hold up products.
        if single_images is not None and banks % norm.scalar_share == 0:
            weight_block_by_block(target, bank, norm, first, single_images)
        elif shared and banks % SCALAR_SHARE == 0:
            nisa.activation(dst=target, op=nl.copy, data=bank)
        else:
            weight_blocks(target, bank, norm, first, first_row)
        banks += 1
        first = end


def load_repeated_row(row, rows, offset=0.0):
    """Return a new float32 SBUF tile [rows, n] with a row [1, n] of HBM plus the number `offset` on every partition."""
    tile = load_repeated(row, rows)
    if offset == 0.0:
        return cast(tile, nl.float32)
    result = nl.ndarray(tile.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=result, data=tile, op0=nl.add, operand0=offset)
    return result
