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
from nki_kernels.experts.block_scales import load_block_scales, load_expert_blocks
from nki_kernels.experts.column_lines import ColumnLines, load_down_lines, load_lines
from nki_kernels.projection.row_groups import item_bytes
from nki_kernels.tiles import BANK, PARTITIONS, blocks, cast, filled, ranges
from nki_kernels.weights import (
    ExpertIndex,
    WeightMatrix,
    choose_operand_dtype,
    is_plain,
    load_expert_rows,
    load_expert_runs,
    view_expert,
)

CHUNK_BYTES = 73728
"""Bytes per partition of the three weights of a chunk; at least one block of 128 columns is taken."""

STREAM_BYTES = 57344
"""Bytes per partition of the rows of down of a chunk whose gate and up stream through SBUF."""

PIECE_BYTES = 8192
"""Bytes per partition that one DMA brings; a piece makes room for later pieces as soon as it was multiplied."""


@dataclass
class ExpertLayer(nl.NKIObject):
    """What all chunks of a launch share.

    chunks: columns (first, end) of the intermediate in each chunk. ones: [2, row] in SBUF, which multiply biases and
    the 1 of up + 1 for each row; None if nothing is added before the sums leave PSUM. dtype: of rows and intermediate.
    gate_dtype, down_dtype: in which the products take gate and up, and down, see `choose_operand_dtype`.
    in_runs: whether gate and up are loaded in runs, else in blocks: row k on partition k % 128, in block k // 128.
    widens: whether block scales multiply the elements as they are loaded. streams: whether pieces of gate and up are
    loaded when they are multiplied, so that a chunk needs SBUF for down alone. block_scales: those of gate, up and down
    of the expert whose first chunk was loaded last, see `load_block_scales`.
    """

    weights: ExpertWeights
    activation: str
    chunks: list
    ones: nl.NkiTensor | None
    dtype: object
    gate_dtype: object
    down_dtype: object
    in_runs: bool
    widens: bool
    streams: bool
    block_scales: list


@dataclass
class ColumnPiece(nl.NKIObject):
    """Blocks first_block … end_block - 1 of H of some columns: tile [h in run or block, block of H, column] @ SBUF.

    tile: None if the piece is loaded when it is multiplied.
    """

    first_block: int
    end_block: int
    tile: nl.NkiTensor | None


@dataclass
class ChunkColumns(nl.NKIObject):
    """Columns first … end - 1 of gate or of up of an expert: a list of ColumnPiece, and what their sums begin with.

    bias: [1, column], or [2, column] with ones below if 1 is added too; None if 1 alone is added, or nothing. ones: the
    layer's; None if nothing is added. block_scales: float32 [128, block of H, block of columns] @ SBUF that multiply
    the sums; None to multiply nothing.
    """

    stack: WeightMatrix
    expert: ExpertIndex
    first: int
    end: int
    pieces: list
    bias: nl.NkiTensor | None
    ones: nl.NkiTensor | None
    block_scales: nl.NkiTensor | None


@dataclass
class WeightChunk(nl.NKIObject):
    """A chunk of an expert's weights in SBUF, for columns first … end of the intermediate.

    down: for each block of the columns a tile [f in block, H], empty before `load_down`. factors: scales and biases of
    gate and up as `ColumnLines`, if the weights have scales; then gate and up themselves have no bias. Else None.
    down_scales: block scales of down, float32 [128, block of the columns, block of H] @ SBUF, or None. down_lines:
    scales of the columns of down, see `load_down_lines`, in the last chunk of an expert in a prompt; else empty.
    """

    expert: ExpertIndex
    first: int
    end: int
    gate: ChunkColumns
    up: ChunkColumns
    down: list
    factors: ColumnLines | None
    down_scales: nl.NkiTensor | None
    down_lines: list


def create_layer(weights, activation, rows, dtype, block_rows):
    """Return the record that all chunks share, for products with up to `rows` rows of a dtype.

    block_rows: rows of a product with weights that have scales; None if block scales multiply elements as they are
    loaded. weights: `ExpertWeights`. Its `ones` are filled here, if biases or the clamped gate need them.
    """
    ones = None
    if not has_gate_scales(weights) and (weights.b_gate is not None or activation == "swigluoai"):
        # Ones are the moving operand for `rows` rows, and the stationary one of a block of 128 columns.
        ones = filled((2, max(rows, PARTITIONS)), 1.0, dtype)
    in_runs = weights.w_gate.block_scales is None and weights.w_up.block_scales is None
    widens = block_rows is None
    gate_dtype = (
        dtype if widens and not in_runs else choose_operand_dtype([weights.w_gate, weights.w_up], dtype)
    )
    widens_down = widens and weights.w_down.block_scales is not None
    down_dtype = dtype if widens_down else choose_operand_dtype([weights.w_down], dtype)
    # Longer rows of gate and up take fewer descriptors.
    streams = block_rows is not None and has_gate_scales(weights)
    if streams:
        chunks = split_into_streams(weights.w_down, down_dtype, block_rows)
    else:
        chunks = split_into_chunks(weights.w_gate.elements, gate_dtype)
    return ExpertLayer(
        weights, activation, chunks, ones, dtype, gate_dtype, down_dtype, in_runs, widens, streams, []
    )


def split_into_streams(w_down, dtype, rows):
    """Return ranges (first, end) of the intermediate for chunks whose gate and up stream through SBUF.

    The rows of down of a range take at most STREAM_BYTES of a partition, and its sums for `rows` rows one PSUM bank for
    each of gate and up; or the range is one block. w_down: `WeightMatrix` [E, F, H]. dtype: of the products.
    """
    _, inner, hidden = w_down.elements.shape
    plain = is_plain(w_down, dtype)
    element_bytes = item_bytes(dtype) + (0 if plain else item_bytes(w_down.elements.dtype))
    most = max(1, min(BANK // rows, STREAM_BYTES // (element_bytes * hidden)))
    count = blocks(blocks(inner), most)
    return ranges(0, inner, PARTITIONS * blocks(blocks(inner), count))


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

    Those that are None are left out; without scales or block scales the list is empty. weights: `ExpertWeights`.
    """
    arrays = []
    if has_gate_scales(weights):
        for array in (weights.w_gate.scales, weights.w_up.scales, weights.b_gate, weights.b_up):
            if array is not None:
                arrays.append(array)
    return arrays


def has_gate_scales(weights):
    """Return whether gate or up has scales or block scales; their biases are then added after the sums left PSUM.

    weights: `ExpertWeights`.
    """
    gate, up = weights.w_gate, weights.w_up
    has_scales = gate.scales is not None or up.scales is not None
    return has_scales or gate.block_scales is not None or up.block_scales is not None


def load_chunk(layer, expert, chunk, loads_factors=True):
    """Load the gate and up columns and biases of chunk number `chunk` of an expert into SBUF; return the `WeightChunk`.

    Its rows of down are not loaded: `load_down` appends them.

    Args:
        expert: `ExpertIndex`.
        loads_factors: whether scales and biases for `chunk.factors` are loaded, if the weights have scales.
    """
    weights = layer.weights
    first, end = layer.chunks[chunk]
    clamped = layer.activation == "swigluoai"
    factors = None
    if loads_factors and len(list_gate_factors(weights)) > 0:
        factors = load_lines(list_gate_factors(weights), expert, first, end)
    if chunk == 0:
        layer.block_scales = []
        for stack in (weights.w_gate, weights.w_up, weights.w_down):
            layer.block_scales.append(load_block_scales(stack, expert))
    column_blocks = slice(first // PARTITIONS, blocks(end))
    sums_scales = [None, None]  # of gate and up
    for side in range(2):
        if layer.block_scales[side] is not None and not layer.widens:
            sums_scales[side] = layer.block_scales[side][:, :, column_blocks]
    down_scales = None
    if layer.block_scales[2] is not None:
        down_scales = layer.block_scales[2][:, column_blocks, :]
    gate_pieces = load_columns(layer, weights.w_gate, expert, first, end, layer.block_scales[0], 0)
    up_pieces = load_columns(layer, weights.w_up, expert, first, end, layer.block_scales[1], 1)
    b_gate, b_up = None, None
    if weights.b_gate is not None and not has_gate_scales(weights):
        b_gate = load_bias(weights.b_gate, expert, first, end, layer.dtype, 1)
        b_up = load_bias(weights.b_up, expert, first, end, layer.dtype, 2 if clamped else 1)
    ones = None if b_gate is None else layer.ones
    gate = ChunkColumns(weights.w_gate, expert, first, end, gate_pieces, b_gate, ones, sums_scales[0])
    up = ChunkColumns(weights.w_up, expert, first, end, up_pieces, b_up, layer.ones, sums_scales[1])
    return WeightChunk(expert, first, end, gate, up, [], factors, down_scales, [])


def load_down(layer, chunk):
    """Load the rows of down of a `WeightChunk` into SBUF, and append them to `chunk.down`, [f in block, H] each.

    It is called once the rows of the chunk before were multiplied and make room.
    """
    stack = layer.weights.w_down
    _, inner, hidden = stack.elements.shape
    if stack.scales is not None and layer.widens and chunk.end == inner:
        chunk.down_lines = load_down_lines(stack.scales, chunk.expert)
    for start, end in ranges(chunk.first, chunk.end):
        if chunk.down_scales is None or not layer.widens:
            chunk.down.append(load_expert_rows(stack, chunk.expert, start, end, layer.down_dtype))
        else:
            block = start // PARTITIONS
            scales = layer.block_scales[2]
            rows = load_expert_blocks(
                stack, chunk.expert, (block, block + 1), (0, hidden), layer.down_dtype, scales, block
            )
            chunk.down.append(rows[0 : end - start, 0, :])


def load_columns(layer, stack, expert, first, end, scales, index):
    """Return columns first … end - 1 of an expert's weight [H, F] as a list of `ColumnPiece`, loaded if not streamed.

    stack: `WeightMatrix` with the weights of all experts, [E, H, F] @ HBM. scales: block scales of the expert in SBUF,
    which multiply the elements if `layer` widens; or None. index: that of the first piece, see `load_expert_blocks`.
    """
    pieces = []
    for start, stop in ranges(0, blocks(stack.elements.shape[1]), count_piece_blocks(end - first, stack)):
        tile = None
        if not layer.streams:
            tile = load_piece(layer, stack, expert, (start, stop), (first, end), scales, index + len(pieces))
        pieces.append(ColumnPiece(start, stop, tile))
    return pieces


def load_piece(layer, stack, expert, block_range, columns, scales, index):
    """Load blocks (first, end) of H of columns (first, end) of an expert's weight into a new SBUF tile.

    index: see `load_expert_blocks`. The other arguments are those of `load_columns`.
    """
    if layer.in_runs:
        return load_expert_runs(stack, expert, block_range, columns, layer.gate_dtype)
    factors = scales if layer.widens else None
    return load_expert_blocks(stack, expert, block_range, columns, layer.gate_dtype, factors, index)


def take_tile(layer, columns, piece):
    """Return the tile of a `ColumnPiece` of some `ChunkColumns`; load it if it is streamed."""
    if piece.tile is not None:
        return piece.tile
    block_range = (piece.first_block, piece.end_block)
    return load_piece(
        layer, columns.stack, columns.expert, block_range, (columns.first, columns.end), None, 0
    )


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
