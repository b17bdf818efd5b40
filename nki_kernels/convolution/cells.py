"""Tiles of the PE array: matmuls of few rows, or of few columns, run side by side, each in cells of its own.

A tile of the array takes a part of its 128 rows, the partitions of both operands, and a part of its 128 columns, the
partitions of the result. Tiles of one size lie in *groups* of rows and groups of columns. Those of one group of columns
write the same partitions of PSUM, so their results lie in banks of their own.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.convolution.windows import sizes_of
from nki_kernels.tiles import PARTITIONS

MOST_TILES = 8
"""Matmuls of 512 columns that run side by side: the Tensor engine issues one in 64 cycles."""


def shortest_side():
    """Of a tile of this chip's array, in rows or columns."""
    return 64 if nisa.get_nc_version() == nisa.nc_version.gen2 else 32


def side(size, shortest):
    """The shortest side of a tile of the array that so many rows, or columns, fit into; sides double."""
    result = shortest
    while result < size:
        result = result * 2
    return result


def groups_of(size):
    """How many tiles of the array of one side lie beside one another."""
    return PARTITIONS // size


class Part(nl.NKIObject):
    """A box of results for a range of outputs, which matmuls in one tile of the array sum up.

    The region of `stripe`, in which the box lies, begins at the row of `position`, (row, column) of the tile. `rows`
    is how many of the tile's rows are used at most.
    """

    def __init__(self, stripe, box, outputs, position, rows):
        self.stripe, self.box, self.outputs = stripe, box, outputs
        self.position, self.rows = position, rows
        self.width = outputs[1] - outputs[0]
        self.sums = None


def place_sums(parts):
    """A PSUM tile for the sums of parts in groups of columns, [output, image, row, column]; each part has its view."""
    end, most = 0, (0, 0, 0)
    for part in parts:
        sizes = sizes_of(part.box)
        most = (max(most[0], sizes[0]), max(most[1], sizes[1]), max(most[2], sizes[2]))
        end = max(end, part.position[1] + part.width)
    bank = nl.ndarray((end,) + most, dtype=nl.float32, buffer=nl.psum)
    for part in parts:
        images, rows, columns = sizes_of(part.box)
        at = part.position[1]
        part.sums = bank[at : at + part.width, 0:images, 0:rows, 0:columns]
    return bank


def read_together(parts, bank):
    """What one instruction reads of a PSUM tile: [(view, its first partition, parts)]; all of it if parts fill it."""
    filled = 0
    for part in parts:
        if part.sums.shape[1:] == bank.shape[1:]:
            filled += part.width
    if filled == bank.shape[0]:
        return [(bank, 0, parts)]
    result = []
    for part in parts:
        result.append((part.sums, part.position[1], [part]))
    return result
