"""Weights of one expert of many on their way to SBUF, at an address that may be known at run time only.

An *expert* here is a pair (number, tile): a compile-time number and None, or 0 and a tile [1, 1] int32 that holds the
number. The intermediate size is taken in chunks of whole blocks of 128, so that the weights of the next chunk arrive
while those of this one are multiplied. Rows of gate and up lie in runs (see `projection.rows`), those of down in
blocks.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.projection.row_groups import item_bytes
from nki_kernels.projection.rows import in_block
from nki_kernels.tiles import PARTITIONS, blocks, cast, ranges

CHUNK_BYTES = 73728
"""Of a partition, for the three weights of a chunk; at least one block of 128 columns is taken."""

PIECE_BYTES = 8192
"""Of a partition, that one DMA brings; a piece makes room for later ones as soon as it was multiplied."""


def chunks(hidden, inner, dtype, loaded):
    """Ranges of the intermediate, of about equal whole blocks; `loaded` is the dtype of the weights in HBM."""
    each = item_bytes(dtype) + (0 if loaded == dtype else item_bytes(loaded))
    block = each * (2 * blocks(hidden) * PARTITIONS + hidden)
    most = max(1, CHUNK_BYTES // block)
    number = blocks(blocks(inner), most)
    size = PARTITIONS * blocks(blocks(inner), number)
    found = []
    for first in range(0, inner, size):
        found.append((first, min(inner, first + size)))
    return found


def load_chunk(weights, biases, expert, columns, dtype):
    """A chunk of an expert's weights: columns of gate and up, and their biases. `load_down` adds the rest.

    biases: see `biases_of` in `experts.products`.
    """
    w_gate, w_up, w_down = weights
    return {
        "columns": (load_columns(w_gate, expert, columns, dtype), load_columns(w_up, expert, columns, dtype)),
        "biases": [
            load_bias(biases["gate"], expert, columns, dtype, biases["plus_one"][0]),
            load_bias(biases["up"], expert, columns, dtype, biases["plus_one"][1]),
        ],
        "ones": biases["ones"],
        "plus_one": biases["plus_one"],
        "width": columns[1] - columns[0],
        "down": None,
        "rows": (w_down, expert, columns),
    }


def load_down(chunk, dtype):
    """Load the chunk's rows of down, when those of the chunk before were multiplied and make room."""
    weight, expert, rows = chunk["rows"]
    chunk["down"] = load_rows(weight, expert, rows, dtype)


def part_of(weight, expert, pattern, offset):
    """A part of what belongs to an expert in an array [E, …] of HBM."""
    number, tile = expert
    size = weight.shape[1] if len(weight.shape) == 2 else weight.shape[1] * weight.shape[2]
    if tile is None:
        return weight.ap(pattern=pattern, offset=number * size + offset)
    return weight.ap(pattern=pattern, offset=offset, scalar_offset=tile, indirect_dim=0)


def load_columns(weight, expert, columns, dtype):
    """Columns of an expert's [H, F] in runs, cast if need be, as pieces (first block, [h in run, block, column]).

    What the last partition lacks stays undefined.
    """
    hidden, inner = weight.shape[1], weight.shape[2]
    first, last = columns
    width, count = last - first, blocks(hidden)
    full = hidden // count
    rest = hidden - full * count
    pitch = count * inner
    found = []
    for start, end in ranges(0, count, blocks_of_a_piece(width, weight.dtype)):
        shape = (in_block(hidden, 0, True), end - start, width)
        raw = nl.ndarray(shape, dtype=weight.dtype, buffer=nl.sbuf)
        pattern = [[pitch, full], [inner, end - start], [1, width]]
        source = part_of(weight, expert, pattern, start * inner + first)
        nisa.dma_copy(dst=raw[0:full, :, :], src=source)
        more = min(end, rest) - start
        if more > 0:
            pattern = [[pitch, 1], [inner, more], [1, width]]
            source = part_of(weight, expert, pattern, full * pitch + start * inner + first)
            nisa.dma_copy(dst=raw[full : full + 1, 0:more, :], src=source)
        result = raw
        if weight.dtype != dtype:
            result = nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf)
            for block in range(start, end):
                used = in_block(hidden, block, True)
                nisa.tensor_copy(dst=result[0:used, block - start, :], src=raw[0:used, block - start, :])
        found.append((start, result))
    return found


def blocks_of_a_piece(width, dtype):
    """Blocks of so many columns that one DMA brings."""
    return max(1, PIECE_BYTES // (width * item_bytes(dtype)))


def load_rows(weight, expert, rows, dtype):
    """Rows of an expert's [F, H] in blocks, cast if need be: for each block a tile [f in block, H]."""
    hidden = weight.shape[2]
    found = []
    for start, end in ranges(rows[0], rows[1]):
        raw = nl.ndarray((end - start, hidden), dtype=weight.dtype, buffer=nl.sbuf)
        pattern = [[hidden, end - start], [1, hidden]]
        nisa.dma_copy(dst=raw, src=part_of(weight, expert, pattern, start * hidden))
        found.append(cast(raw, dtype))
    return found


def load_bias(bias, expert, columns, dtype, plus_one):
    """Columns of an expert's row of biases [E, F], or None: [1, column], or [2, column] with ones below."""
    if bias is None:
        return None
    first, last = columns
    raw = nl.ndarray((2 if plus_one else 1, last - first), dtype=bias.dtype, buffer=nl.sbuf)
    if plus_one:
        nisa.memset(dst=raw, value=1.0, engine=nisa.engine.gpsimd)
    pattern = [[last - first, 1], [1, last - first]]
    nisa.dma_copy(dst=raw[0:1, :], src=part_of(bias, expert, pattern, first))
    return cast(raw, dtype)


def load_numbers(source):
    """Numbers [rows, columns] int32 of HBM in SBUF."""
    tile = nl.ndarray(source.shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=source)
    return tile


def rows_at(table, numbers):
    """The rows of a table [N, columns] of HBM that numbers [rows, 1] in SBUF name."""
    columns = table.shape[1]
    return table.ap(pattern=[[columns, numbers.shape[0]], [1, columns]], vector_offset=numbers)
