"""Chunks of an expert's weights, loaded from an address that may be known at run time only.

The intermediate size F is cut into *chunks* of whole blocks of 128 columns, so that the weights of the next chunk
arrive while those of the present chunk are multiplied. Columns of gate and up are loaded in runs: partition p has rows
p * C … p * C + C - 1 of the weight, C = ceil(H / 128), one in each block of H. Rows of down are loaded in blocks of
128.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.experts.arguments import ExpertWeights
from nki_kernels.experts.column_lines import ColumnLines, load_lines
from nki_kernels.projection.row_groups import item_bytes
from nki_kernels.tiles import PARTITIONS, blocks, cast, filled, ranges
from nki_kernels.weights import (
    ExpertIndex,
    choose_operand_dtype,
    load_expert_rows,
    load_expert_runs,
    view_expert,
)

CHUNK_BYTES = 73728
"""Bytes per partition of the three weights of a chunk; at least one block of 128 columns is taken."""

PIECE_BYTES = 8192
"""Bytes per partition that one DMA brings; a piece makes room for later pieces as soon as it was multiplied."""


@dataclass
class ExpertLayer(nl.NKIObject):
    """What all chunks of a launch share.

    chunks: columns (first, end) of the intermediate in each chunk. ones: [2, row] in SBUF, which multiply biases and
    the 1 of up + 1 for each row; None if nothing is added before the sums leave PSUM. dtype: of rows and intermediate.
    gate_dtype, down_dtype: in which the products take gate and up, and down, see `choose_operand_dtype`.
    """

    weights: ExpertWeights
    activation: str
    chunks: list
    ones: nl.NkiTensor | None
    dtype: object
    gate_dtype: object
    down_dtype: object


@dataclass
class ColumnPiece(nl.NKIObject):
    """Blocks of H of some columns in runs, from `first_block` on: tile [h in run, block of H, column] @ SBUF."""

    first_block: int
    tile: nl.NkiTensor


@dataclass
class ChunkColumns(nl.NKIObject):
    """Columns of gate or of up in SBUF: a list of ColumnPiece, and what their sums begin with.

    bias: [1, column], or [2, column] with ones below if 1 is added too; None if 1 alone is added, or nothing. ones: the
    layer's; None if nothing is added.
    """

    pieces: list
    bias: nl.NkiTensor | None
    ones: nl.NkiTensor | None


@dataclass
class WeightChunk(nl.NKIObject):
    """A chunk of an expert's weights in SBUF, for columns first … end of the intermediate.

    down: for each block of the columns a tile [f in block, H], empty before `load_down`. factors: scales and biases of
    gate and up as `ColumnLines`, if the weights have scales; then gate and up themselves have no bias. Else None.
    """

    expert: ExpertIndex
    first: int
    end: int
    gate: ChunkColumns
    up: ChunkColumns
    down: list
    factors: ColumnLines | None


def create_layer(weights, activation, rows, dtype):
    """Return the record that all chunks share, for products with up to `rows` rows of a dtype.

    weights: `ExpertWeights`. Its `ones` are filled here, if biases or the clamped gate need them.
    """
    ones = None
    if not has_gate_scales(weights) and (weights.b_gate is not None or activation == "swigluoai"):
        # Ones are the moving operand for `rows` rows, and the stationary one of a block of 128 columns.
        ones = filled((2, max(rows, PARTITIONS)), 1.0, dtype)
    gate_dtype = choose_operand_dtype([weights.w_gate, weights.w_up], dtype)
    down_dtype = choose_operand_dtype([weights.w_down], dtype)
    chunks = split_into_chunks(weights.w_gate.elements, gate_dtype)
    return ExpertLayer(weights, activation, chunks, ones, dtype, gate_dtype, down_dtype)


def split_into_chunks(w_gate, dtype):
    """Return ranges (first, end) of the intermediate, each of as many blocks of 128 or one less, whose weights fit.

    The three weights of a range take at most CHUNK_BYTES of a partition, or are of one block. w_gate: [E, H, F] @ HBM,
    its dtype may differ from `dtype`, that of the products.
    """
    _, hidden, inner = w_gate.shape
    # Weights that are cast lie in SBUF in both dtypes.
    element_bytes = item_bytes(dtype) + (0 if w_gate.dtype == dtype else item_bytes(w_gate.dtype))
    block_bytes = element_bytes * (2 * blocks(hidden) * PARTITIONS + hidden)
    most = max(1, CHUNK_BYTES // block_bytes)
    count = blocks(blocks(inner), most)
    return ranges(0, inner, PARTITIONS * blocks(blocks(inner), count))


def list_gate_factors(weights):
    """Return the arrays @ HBM with numbers of the sums of gate and up: their scales, and then their biases.

    Those that are None are left out; without any scales the list is empty. weights: `ExpertWeights`.
    """
    arrays = []
    if has_gate_scales(weights):
        for array in (weights.w_gate.scales, weights.w_up.scales, weights.b_gate, weights.b_up):
            if array is not None:
                arrays.append(array)
    return arrays


def has_gate_scales(weights):
    """Return whether gate or up has scales; their biases are then added after the sums have left PSUM.

    weights: `ExpertWeights`.
    """
    return weights.w_gate.scales is not None or weights.w_up.scales is not None


def load_chunk(layer, expert, chunk, factors=None):
    """Load the gate and up columns and biases of chunk number `chunk` of an expert into SBUF; return the `WeightChunk`.

    Its rows of down are not loaded: `load_down` appends them.

    Args:
        expert: `ExpertIndex`.
        factors: `ColumnLines` of the chunk that are in SBUF already; None to load them if the weights have scales.
    """
    weights = layer.weights
    first, end = layer.chunks[chunk]
    clamped = layer.activation == "swigluoai"
    if factors is None and has_gate_scales(weights):
        factors = load_lines(list_gate_factors(weights), expert, first, end)
    gate_pieces = load_columns(weights.w_gate, expert, first, end, layer.gate_dtype)
    up_pieces = load_columns(weights.w_up, expert, first, end, layer.gate_dtype)
    b_gate, b_up = None, None
    if weights.b_gate is not None and factors is None:
        b_gate = load_bias(weights.b_gate, expert, first, end, layer.dtype, 1)
        b_up = load_bias(weights.b_up, expert, first, end, layer.dtype, 2 if clamped else 1)
    gate = ChunkColumns(gate_pieces, b_gate, None if b_gate is None else layer.ones)
    up = ChunkColumns(up_pieces, b_up, layer.ones)
    return WeightChunk(expert, first, end, gate, up, [], factors)


def load_down(layer, chunk):
    """Load the rows of down of a `WeightChunk` into SBUF, and append them to `chunk.down`, [f in block, H] each.

    It is called once the rows of the chunk before were multiplied and make room.
    """
    for start, end in ranges(chunk.first, chunk.end):
        chunk.down.append(load_expert_rows(layer.weights.w_down, chunk.expert, start, end, layer.down_dtype))


def load_columns(stack, expert, first, end, dtype):
    """Load columns first … end - 1 of an expert's weight [H, F] into SBUF in `dtype`, as a list of `ColumnPiece`.

    stack: `WeightMatrix` with the weights of all experts, [E, H, F] @ HBM.
    """
    pieces = []
    for start, stop in ranges(0, blocks(stack.elements.shape[1]), count_piece_blocks(end - first, stack)):
        pieces.append(ColumnPiece(start, load_expert_runs(stack, expert, (start, stop), (first, end), dtype)))
    return pieces


def count_piece_blocks(columns, stack):
    """Return how many blocks of H of `columns` columns one DMA brings: as fit into PIECE_BYTES, at least one."""
    return max(1, PIECE_BYTES // (columns * item_bytes(stack.elements.dtype)))


def load_bias(bias, expert, first, end, dtype, rows):
    """Load columns first … end - 1 of an expert's bias, a row of [E, F] @ HBM: [rows, column] of a dtype @ SBUF.

    rows: 1, or 2 for a second row of ones.
    """
    raw = nl.ndarray((rows, end - first), dtype=bias.dtype, buffer=nl.sbuf)
    if rows > 1:
        # The tile is filled whole, as no instruction starts at partition 1; the DMA overwrites the first row.
        nisa.memset(dst=raw, value=1.0, engine=nisa.engine.gpsimd)
    pattern = [[end - first, 1], [1, end - first]]
    nisa.dma_copy(dst=raw[0:1, :], src=view_expert(bias, expert, pattern, first))
    return cast(raw, dtype)
