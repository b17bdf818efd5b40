"""Weights of 4 bits whose scales and zero points are those of groups of rows: checks, and loads as plain weights.

A *scale group* is 32, 64 or 128 neighbouring rows of a weight [K, N]. Each group has a scale for every column, and a
zero point if not all of them are 8. A weight stands for (nibble - zero point) * 2^-9 * scale, computed in float32.

Two ways lead to a product. Few rows are multiplied by the nibbles, and the sums of each group by its scales, see
`projection.stacks`: the Vector engine scales rows / group size elements for each weight. For more rows
`load_scaled_nibbles_into` multiplies the weights in SBUF, one element for each weight, and rounds them once to the
dtype of the rows. A DMA repeats the scales on the partitions of their group.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl
import numpy as np

from nki_kernels.dma import STATIC, transfer
from nki_kernels.nibbles import (
    SYMMETRIC_ZERO,
    UNIT,
    NibbleMatrix,
    is_packed,
    load_nibbles_into,
    widen_nibbles_reference,
)
from nki_kernels.precision import widened
from nki_kernels.tiles import PARTITIONS, blocks


def has_scale_groups(elements, scales):
    """Return whether packed elements have scales [groups, N] of several groups of rows, both @ HBM or None."""
    return elements is not None and scales is not None and is_packed(elements) and scales.shape[0] != 1


def describe_nibbles(elements, depth, scales, zeros, nibble_dtype):
    """Return the NibbleMatrix of elements @ HBM with `depth` rows; None for elements that are None or not packed.

    scales, zeros: rows @ HBM, one for each scale group or one for all rows. nibble_dtype: "float8_e4m3" or "bfloat16".
    """
    if elements is None or not is_packed(elements):
        return None
    group_scales = scales if has_scale_groups(elements, scales) else None
    return NibbleMatrix(depth, zeros, nibble_dtype == "float8_e4m3", group_scales)


def check_group_scales(name, elements, depth, scales):
    """Refuse scales of groups that are not float32 or bfloat16 [groups, N], with groups of 32, 64 or 128 rows.

    elements: packed elements @ HBM of a weight with `depth` rows. name: names the weight in the message.
    """
    groups, columns = scales.shape
    group_rows = depth // groups
    assert (
        columns == elements.shape[1]
        and group_rows * groups == depth
        and group_rows in (32, 64, 128)
        and (scales.dtype == nl.float32 or scales.dtype == nl.bfloat16)
    ), (
        f"{name}_scales of groups is float32 or bfloat16 [groups, {elements.shape[1]}] with groups of 32, 64 or 128 of "
        f"{depth} rows, not {scales.dtype} {scales.shape}"
    )


def load_scaled_nibbles_into(tile, elements, nibbles, queue):
    """Load a weight with scales of groups into an SBUF tile [k in block, block, column], multiplied by its scales.

    Args:
        tile: float32 or bfloat16; each number is rounded once to this dtype.
        elements: packed elements @ HBM.
        nibbles: their NibbleMatrix.
        queue: queue of `dma`.
    """
    unscaled = nl.ndarray(tile.shape, dtype=nl.float8_e4m3, buffer=nl.sbuf)
    load_nibbles_into(unscaled, elements, nibbles.depth, queue)
    full = nibbles.depth // PARTITIONS
    spans = [] if full == 0 else [(0, full, PARTITIONS)]
    if nibbles.depth % PARTITIONS > 0:
        spans.append((full, full + 1, nibbles.depth % PARTITIONS))
    for first, end, height in spans:  # K blocks of equal height
        shape = (height, end - first, elements.shape[1])
        scales = repeat_group_rows(nibbles.scales, nibbles, first, shape)
        dst, numbers = tile[0:height, first:end, :], unscaled[0:height, first:end, :]
        if nibbles.zeros is None:
            nisa.scalar_tensor_tensor(
                dst=dst,
                data=numbers,
                op0=nl.subtract,
                operand0=SYMMETRIC_ZERO * UNIT,
                op1=nl.multiply,
                operand1=scales,
            )
            continue
        zeros = repeat_group_rows(nibbles.zeros, nibbles, first, shape).view(nl.float8_e4m3)
        # A difference of nibbles is exact in every dtype of the tile.
        nisa.tensor_tensor(dst=dst, data1=numbers, data2=zeros, op=nl.subtract)
        nisa.tensor_tensor(dst=dst, data1=dst, data2=scales, op=nl.multiply)


def repeat_group_rows(rows, nibbles, first_block, shape):
    """Load a row @ HBM of each scale group onto the partitions of its group, in a new SBUF tile of `shape`.

    Args:
        rows: [groups, N], scales or zero points of a NibbleMatrix.
        nibbles: the NibbleMatrix.
        first_block: first K block of the tile.
        shape: [k in block, block, column].
    """
    height, count = shape[0], shape[1]
    group_rows = nibbles.count_group_rows()
    per_block, first = PARTITIONS // group_rows, first_block * PARTITIONS // group_rows
    groups = blocks(height, group_rows)
    tile = nl.ndarray(shape, dtype=rows.dtype, buffer=nl.sbuf)
    if count == 1:
        repeated = rows[first : first + groups, :].expand_dim(1).broadcast(1, group_rows)
        transfer(tile, repeated, STATIC)
        return tile
    by_block = rows[first : first + count * per_block, :].reshape_dim(0, (count, per_block))
    repeated = by_block.permute((1, 0, 2)).expand_dim(1).broadcast(1, group_rows)
    transfer(tile, repeated, STATIC)
    return tile


def widen_packed_reference(
    elements: np.ndarray, depth: int, scales: np.ndarray | None, zeros: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray | None]:
    """Return a weight [K, N] and the scales that still multiply its columns, or None.

    Packed elements are widened; with scales of groups these are applied, in float32. Other elements are returned as
    they are. depth: K.
    """
    if scales is None or elements.dtype != np.uint8 or len(scales) == 1:
        return widen_nibbles_reference(elements, depth, zeros), scales
    repeats = depth // len(scales)
    all_zeros = None if zeros is None else np.repeat(zeros, repeats, axis=0)
    numbers = widen_nibbles_reference(elements, depth, all_zeros)
    return numbers * np.repeat(widened(scales), repeats, axis=0), None
