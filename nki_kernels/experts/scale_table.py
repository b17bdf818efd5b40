"""Scales and biases of the experts of a decode step in SBUF, for the passes of `experts_decode` with weights of 8 bits.

An expert's weights of 8 bits may arrive in 3 us, so that loads and transposes of its scales for each pass would take
longer than the weights. Here passes are taken in *windows* of up to 32. The rows of numbers of a window's experts are
loaded together, [pass, column], in *pieces* of up to 16 blocks of 128 columns. A transpose of each block brings the
columns to the partitions. The pieces of the next window are loaded and transposed one by one, one for each pass.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.dma import SCALAR, transfer
from nki_kernels.experts.column_lines import ColumnLines
from nki_kernels.experts.weight_chunks import list_gate_factors
from nki_kernels.tiles import BANK, PARTITIONS, blocks, load, ranges

WINDOW = 32
"""Most passes of a window: 16 blocks of so many passes fill a PSUM bank."""

PIECE_BLOCKS = BANK // WINDOW
"""Most blocks of 128 columns in a piece."""


@dataclass
class TablePiece(nl.NKIObject):
    """Columns first … end - 1 of an array [E, N] or [E, 1, N] @ HBM, which fill the table from `block` on."""

    array: nl.NkiTensor
    first: int
    end: int
    block: int


@dataclass
class ScaleTable(nl.NKIObject):
    """The numbers of the columns of each pass's expert.

    count: number of passes. choices: index of the expert of each pass @ HBM, [pass, 1] int32; None if pass i takes
    expert i. experts: number of experts. gate_arrays: number of arrays with F = `inner` columns. hidden: H, columns of
    the last array, the scales of down. pieces: list of TablePiece. columns: float32 [column in block, block, pass] of
    the present window; `following` the same of the next one. lines: rows of the piece that is not transposed yet, or
    None. done: number of pieces of the next window that were loaded.
    """

    count: int
    choices: nl.NkiTensor | None
    experts: int
    gate_arrays: int
    inner: int
    hidden: int
    pieces: list
    columns: nl.NkiTensor | None = None
    following: nl.NkiTensor | None = None
    lines: nl.NkiTensor | None = None
    indices: nl.NkiTensor | None = None
    done: int = 0

    def advance(self, index):
        """Make the numbers of pass number `index` available; is called for each pass in order after `begin_window(0)`.

        A part of the next window's numbers is loaded and transposed.
        """
        if index % WINDOW == 0:
            while self.done < len(self.pieces) or self.lines is not None:
                self.take_piece(index)
            self.columns = self.following
            if index + WINDOW < self.count:
                self.begin_window(index + WINDOW)
        elif index // WINDOW * WINDOW + WINDOW < self.count:
            self.take_piece(index // WINDOW * WINDOW + WINDOW)

    def begin_window(self, first):
        """Allocate the numbers of the window whose first pass is `first`, and load the indices of its experts."""
        passes = min(WINDOW, self.count - first)
        last = self.pieces[len(self.pieces) - 1]
        total = last.block + blocks(last.end - last.first)
        self.following = nl.ndarray((PARTITIONS, total, passes), dtype=nl.float32, buffer=nl.sbuf)
        self.done = 0
        if self.choices is not None:
            self.indices = load(self.choices[first : first + passes, :], nl.int32)
            # An expert of another rank has the number of experts as its index: its weight is 0.
            nisa.tensor_scalar(
                dst=self.indices, data=self.indices, op0=nl.minimum, operand0=float(self.experts - 1)
            )

    def take_piece(self, first):
        """Transpose the piece that was loaded last and load the next one, of the window that begins at pass `first`."""
        if self.lines is not None:
            transpose_lines(self.following, self.lines, self.pieces[self.done - 1].block)
            self.lines = None
        if self.done < len(self.pieces):
            self.lines = self.load_lines(self.pieces[self.done], first)
            self.done += 1

    def load_lines(self, piece, first):
        """Load the columns of a TablePiece for the window that begins at pass `first`: [pass, column] in SBUF."""
        passes, width = self.following.shape[2], piece.end - piece.first
        flat = piece.array.reshape((self.experts, piece.array.shape[len(piece.array.shape) - 1]))
        if self.choices is None:
            lines = nl.ndarray((passes, width), dtype=flat.dtype, buffer=nl.sbuf)
            transfer(lines, flat[first : first + passes, piece.first : piece.end], SCALAR)
            return lines
        pattern = [[flat.shape[1], passes], [1, width]]
        return load(flat.ap(pattern=pattern, offset=piece.first, vector_offset=self.indices), flat.dtype)

    def select_gate(self, index, chunk):
        """Return the `ColumnLines` of gate and up of pass number `index` for a chunk's columns (first, end) of F.

        None if they have neither scales nor block scales.
        """
        if self.gate_arrays == 0:
            return None
        first, end = chunk[0] // PARTITIONS, blocks(chunk[1])
        count = blocks(self.inner)
        columns = self.columns[:, 0 : self.gate_arrays * count, index % WINDOW]
        columns = columns.reshape_dim(1, (self.gate_arrays, count))
        return ColumnLines([], end - first, columns[:, :, first:end])

    def select_down(self, index):
        """Return the scales of down of pass number `index`, float32 [h in block, block] in SBUF."""
        first = self.gate_arrays * blocks(self.inner)
        return self.columns[:, first : first + blocks(self.hidden), index % WINDOW]


def create_scale_table(weights, count, choices):
    """Return the ScaleTable of `count` passes; nothing is loaded yet.

    Args:
        weights: `ExpertWeights` with scales of down.
        choices: index of the expert of each pass @ HBM, [pass, 1] int32; None if pass i takes expert i.
    """
    arrays = list_gate_factors(weights)
    gate_arrays = len(arrays)
    experts, inner, hidden = weights.w_down.elements.shape
    pieces, block = [], 0
    arrays.append(weights.w_down.scales)
    for array in arrays:
        columns = array.shape[len(array.shape) - 1]
        for first, end in ranges(0, columns, PIECE_BLOCKS * PARTITIONS):
            pieces.append(TablePiece(array, first, end, block + first // PARTITIONS))
        block += blocks(columns)
    return ScaleTable(count, choices, experts, gate_arrays, inner, hidden, pieces)


def transpose_lines(columns, lines, block):
    """Transpose rows of a piece [pass, column] @ SBUF into `columns` [column in block, block, pass] from `block` on."""
    passes, width = lines.shape
    full = width // PARTITIONS
    bank = nl.ndarray((PARTITIONS, blocks(width), passes), dtype=lines.dtype, buffer=nl.psum)
    for first, end in ranges(0, width):
        nisa.nc_transpose(dst=bank[0 : end - first, first // PARTITIONS, :], data=lines[:, first:end])
    # Not the Scalar engine, which would load its table of functions again.
    if full > 0:
        nisa.tensor_copy(dst=columns[:, block : block + full, :], src=bank[:, 0:full, :])
    if full * PARTITIONS < width:
        height = width - full * PARTITIONS
        nisa.tensor_copy(dst=columns[0:height, block + full, :], src=bank[0:height, full, :])
