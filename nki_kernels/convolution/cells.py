"""Tiles of the PE array: matmuls of few rows, or of few columns, run side by side, each in cells of its own.

A tile of the array takes a part of its 128 rows, the partitions of both operands, and a part of its 128 columns, the
partitions of the result. Tiles of one size lie in *groups* of rows and groups of columns. Those of one group of columns
write the same partitions of PSUM, so their results lie in banks of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.convolution.windows import box_sizes
from nki_kernels.tiles import PARTITIONS

MOST_TILES = 8
"""Matmuls of 512 columns that run side by side: the Tensor engine issues one in 64 cycles."""


def shortest_side():
    """Return the shortest side of a tile of this chip's array, in rows or columns."""
    return 64 if nisa.get_nc_version() == nisa.nc_version.gen2 else 32


def side(size, shortest):
    """Return the shortest side of a tile of the array that so many rows, or columns, fit into; sides double."""
    result = shortest
    while result < size:
        result = result * 2
    return result


def count_groups(size):
    """Return how many tiles of the array of one side run side by side."""
    return PARTITIONS // size


@dataclass
class OutputBox(nl.NKIObject):
    """A box of results for outputs (first, end), which matmuls in one tile of the array sum up.

    The region of `stripe`, in which the box lies, begins at the row of `position`, (row, column) of the tile. `rows`
    is how many of the tile's rows are used at most.
    """

    stripe: tuple
    box: tuple
    outputs: tuple
    position: tuple
    rows: int

    def width(self):
        """Return the number of its outputs."""
        return self.outputs[1] - self.outputs[0]

    def view(self, bank):
        """Return its view of a PSUM tile, [output, image, row, column]."""
        (images, rows, columns), first = box_sizes(self.box), self.position[1]
        return bank[first : first + self.width(), 0:images, 0:rows, 0:columns]


def allocate_sums(output_boxes):
    """Allocate a PSUM tile for the sums of boxes in groups of columns, [output, image, row, column]."""
    end, most = 0, (0, 0, 0)
    for output_box in output_boxes:
        sizes = box_sizes(output_box.box)
        most = (max(most[0], sizes[0]), max(most[1], sizes[1]), max(most[2], sizes[2]))
        end = max(end, output_box.position[1] + output_box.width())
    return nl.ndarray((end,) + most, dtype=nl.float32, buffer=nl.psum)


def split_reads(output_boxes, bank):
    """Return what one instruction reads of a PSUM tile, (view, its first partition, boxes): all if they fill it."""
    filled, result = 0, []
    for output_box in output_boxes:
        view = output_box.view(bank)
        if view.shape[1:] == bank.shape[1:]:
            filled += output_box.width()
        result.append((view, output_box.position[1], [output_box]))
    return [(bank, 0, output_boxes)] if filled == bank.shape[0] else result
