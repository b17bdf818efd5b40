"""First pieces of the weights of a gate and up product that are loaded before its rows are known, for decode kernels.

Weights that products take as they are stored need nothing but their loads. Those of 4 bits are loaded as bytes, and
unpacked where the Vector engine would wait.
"""

from __future__ import annotations

import nki.language as nl

from nki_kernels.dma import STATIC
from nki_kernels.nibbles import load_paired_runs, unpack_paired_runs
from nki_kernels.projection.gated_product import (
    GatedUnit,
    count_piece_blocks,
    count_unit_columns,
    provide_piece,
)
from nki_kernels.tiles import PARTITIONS, blocks
from nki_kernels.weights import choose_operand_dtype, is_plain, select_columns


def load_early_pieces(product, rows, dtype, most):
    """Begin to load the first pieces of the first unit into `product.early_pieces`, before the rows are known.

    They are whole pieces of at most `most` elements per partition, of a product of `rows` rows of `dtype`. Nothing is
    loaded of weights that loads convert or unpack: an engine would wait for them in the order of its work.
    """
    for weight in product.weights:
        if not is_plain(weight, choose_operand_dtype(product.weights, dtype)) or weight.nibbles is not None:
            return
    unit = GatedUnit(0, min(product.inner, count_unit_columns(product, rows)), 0, 0, [], None)
    count = count_piece_blocks(product, unit.end_column, dtype)
    pieces = []
    for index in range(most // (len(product.weights) * count * unit.end_column)):
        first, end = index * count, (index + 1) * count
        if end <= blocks(product.hidden):
            pieces.append(
                provide_piece(unit, product, first, end, choose_operand_dtype(product.weights, dtype))
            )
    if len(pieces) > 0:
        product.early_pieces = pieces


def load_early_bytes(product, end_column, count, most):
    """Load the bytes of the first pieces of the first unit; return them as `unpack_early_pieces` takes them.

    They are whole pieces of at most `most` elements per partition, one list for each piece.

    Args:
        product: GatedProduct whose x and weights lie in paired runs.
        end_column: columns of the first unit.
        count: K blocks of a piece.
    """
    pieces = []
    for index in range(most // (len(product.weights) * count * end_column)):
        if (index + 1) * count <= blocks(product.hidden):
            packed = []
            for weight in product.weights:
                columns = select_columns(weight, 0, end_column)
                packed.append(load_paired_runs(columns.elements, index * count, count, STATIC))
            pieces.append(packed)
    return pieces


def unpack_early_pieces(product, pieces, dtype):
    """Convert some of what `load_early_bytes` returned, in order, into `product.early_pieces`. dtype: that of x."""
    if product.early_pieces is None:
        product.early_pieces = []
    for packed in pieces:
        shape = (PARTITIONS, len(packed), 2 * packed[0].shape[1], packed[0].shape[2])
        piece = nl.ndarray(shape, dtype=choose_operand_dtype(product.weights, dtype), buffer=nl.sbuf)
        for side in range(len(packed)):
            unpack_paired_runs(piece[:, side, :, :], packed[side])
        product.early_pieces.append(piece)
