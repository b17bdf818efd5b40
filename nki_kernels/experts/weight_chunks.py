"""Chunks of an expert's weights, loaded from an address that may be known at run time only.

The intermediate size is cut into chunks of whole blocks of 128, so that the weights of the next chunk arrive while
those of the present chunk are multiplied. Columns of gate and up are loaded in runs (see `norms.blocks`), rows of
down in blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.experts.arguments import ExpertWeights
from nki_kernels.projection.row_groups import item_bytes
from nki_kernels.tiles import PARTITIONS, blocks, cast, filled, ranges
from nki_kernels.weights import ExpertIndex, expert_view, load_expert_rows, load_expert_runs

CHUNK_BYTES = 73728
"""Bytes per partition of the three weights of a chunk; at least one block of 128 columns is taken."""

PIECE_BYTES = 8192
"""Bytes per partition that one DMA brings; a piece makes room for later pieces as soon as it was multiplied."""


@dataclass
class ExpertLayer(nl.NKIObject):
    """What all chunks of a launch share.

    chunks: columns (first, end) of the intermediate in each chunk. ones: [2, row] in SBUF, which multiply biases and
    the 1 of up + 1 for each row; None if nothing is added. dtype: of the products' operands.
    """

    weights: ExpertWeights
    activation: str
    chunks: list
    ones: nl.NkiTensor | None
    dtype: object


@dataclass
class ColumnPiece(nl.NKIObject):
    """Blocks of columns in runs, from `first_block` on: tile [h in run, block, column]."""

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

    down: for each block of the columns a tile [f in block, H], empty before `load_down`.
    """

    expert: ExpertIndex
    first: int
    end: int
    gate: ChunkColumns
    up: ChunkColumns
    down: list


def expert_layer(weights, activation, rows, dtype):
    """Return the record that all chunks share, for products with up to `rows` rows of a dtype."""
    ones = None
    if weights.b_gate is not None or activation == "swigluoai":
        # Ones are the moving operand for `rows` rows, and the stationary one of a block of 128 columns.
        ones = filled((2, max(rows, PARTITIONS)), 1.0, dtype)
    return ExpertLayer(weights, activation, chunk_ranges(weights.w_gate.elements, dtype), ones, dtype)


def chunk_ranges(w_gate, dtype):
    """Return ranges of the intermediate, of about equally many blocks, whose weights fit; w_gate: [E, H, F] @ HBM."""
    _, hidden, inner = w_gate.shape
    # Weights that are cast lie in SBUF in both dtypes.
    element_bytes = item_bytes(dtype) + (0 if w_gate.dtype == dtype else item_bytes(w_gate.dtype))
    block_bytes = element_bytes * (2 * blocks(hidden) * PARTITIONS + hidden)
    most = max(1, CHUNK_BYTES // block_bytes)
    count = blocks(blocks(inner), most)
    return ranges(0, inner, PARTITIONS * blocks(blocks(inner), count))


def load_chunk(layer, expert, chunk):
    """Load chunk number `chunk` of an expert's weights without its rows of down, which `load_down` loads."""
    weights = layer.weights
    first, end = layer.chunks[chunk]
    clamped = layer.activation == "swigluoai"
    gate_pieces = load_columns(weights.w_gate, expert, first, end, layer.dtype)
    up_pieces = load_columns(weights.w_up, expert, first, end, layer.dtype)
    b_gate, b_up = None, None
    if weights.b_gate is not None:
        b_gate = load_bias(weights.b_gate, expert, first, end, layer.dtype, 1)
        b_up = load_bias(weights.b_up, expert, first, end, layer.dtype, 2 if clamped else 1)
    gate = ChunkColumns(gate_pieces, b_gate, None if b_gate is None else layer.ones)
    up = ChunkColumns(up_pieces, b_up, layer.ones)
    return WeightChunk(expert, first, end, gate, up, [])


def load_down(layer, chunk):
    """Load the chunk's rows of down, once the rows of the chunk before were multiplied and make room."""
    for start, end in ranges(chunk.first, chunk.end):
        chunk.down.append(load_expert_rows(layer.weights.w_down, chunk.expert, start, end, layer.dtype))


def load_columns(stack, expert, first, end, dtype):
    """Load columns first … end of an expert's weight [H, F] as a list of ColumnPiece."""
    pieces = []
    for start, stop in ranges(0, blocks(stack.elements.shape[1]), piece_blocks(end - first, stack)):
        pieces.append(ColumnPiece(start, load_expert_runs(stack, expert, (start, stop), (first, end), dtype)))
    return pieces


def piece_blocks(columns, stack):
    """Return the blocks of so many columns that one DMA brings."""
    return max(1, PIECE_BYTES // (columns * item_bytes(stack.elements.dtype)))


def load_bias(bias, expert, first, end, dtype, rows):
    """Load columns first … end of an expert's row of biases [E, F]: [rows, column], with ones below it."""
    raw = nl.ndarray((rows, end - first), dtype=bias.dtype, buffer=nl.sbuf)
    if rows > 1:
        # The tile is filled whole, as no instruction starts at partition 1; the DMA overwrites the first row.
        nisa.memset(dst=raw, value=1.0, engine=nisa.engine.gpsimd)
    pattern = [[end - first, 1], [1, end - first]]
    nisa.dma_copy(dst=raw[0:1, :], src=expert_view(bias, expert, pattern, first))
    return cast(raw, dtype)
