"""Tiles of the PE array: matmuls of few rows, or of few columns, run side by side, each in cells of its own.

A tile of the array takes a part of its 128 rows, the partitions of both operands, and a part of its 128 columns, the
partitions of the result. Tiles of one size lie in *groups* of rows and groups of columns. Those of one group of columns
write the same partitions of PSUM, so their results lie in banks of their own. A *box* of results is a range of images,
of rows and of columns (convolution/windows.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.convolution.windows import measure_box
from nki_kernels.tiles import PARTITIONS

MOST_TILES = 8
"""Matmuls of 512 columns that run side by side: the Tensor engine issues one in 64 cycles."""


def find_shortest_side():
    """Return the shortest side of a tile of this chip's PE array, in rows or columns: 64 on gen2, else 32."""
    return 64 if nisa.get_nc_version() == nisa.nc_version.gen2 else 32


def find_side(size, shortest):
    """Return the shortest side of a tile of the array that `size` rows or columns fit into.

    Sides are `shortest` times a power of two.
    """
    result = shortest
    while result < size:
        result = result * 2
    return result


def count_groups(size):
    """Return how many tiles of the array with a side of `size` lie side by side on 128 rows or columns."""
    return PARTITIONS // size


@dataclass
class OutputBox(nl.NKIObject):
    """A box of results for outputs (first, end), which matmuls in one tile of the array sum up.

    `position` is the (row, column) of the array where the tile begins: the region of `stripe`, in which the box lies,
    begins on that partition, and the sums begin on the partition of that column. `rows` is how many of the tile's rows
    are used at most. `outputs` count from the first output of the weights in SBUF.
    """

    stripe: tuple
    box: tuple
    outputs: tuple
    position: tuple
    rows: int

    def count_outputs(self):
        """Return the number of outputs of the box."""
        return self.outputs[1] - self.outputs[0]

    def view(self, bank):
        """View the results of the box in a tile of `allocate_boxes`: [output, image, row, column]."""
        (images, rows, columns), first = measure_box(self.box), self.position[1]
        return bank[first : first + self.count_outputs(), 0:images, 0:rows, 0:columns]


def allocate_boxes(output_boxes, dtype, buffer):
    """Allocate a tile [output, image, row, column] for the results of boxes, which lie in groups of columns.

    The outputs of each box begin on the partition of its column of the array; the other dims are those of the largest
    box. `buffer` is `nl.psum` for the sums of matmuls.
    """
    end, most = 0, (0, 0, 0)
    for output_box in output_boxes:
        sizes = measure_box(output_box.box)
        most = (max(most[0], sizes[0]), max(most[1], sizes[1]), max(most[2], sizes[2]))
        end = max(end, output_box.position[1] + output_box.count_outputs())
    return nl.ndarray((end,) + most, dtype=dtype, buffer=buffer)


def split_reads(output_boxes, bank):
    """Return a list of (view, first partition, boxes): the parts of a PSUM tile that one instruction each may read.

    It is one entry for the whole tile `bank` if the boxes fill it; else one entry for each box.
    """
    filled, result = 0, []
    for output_box in output_boxes:
        view = output_box.view(bank)
        if view.shape[1:] == bank.shape[1:]:
            filled += output_box.count_outputs()
        result.append((view, output_box.position[1], [output_box]))
    return [(bank, 0, output_boxes)] if filled == bank.shape[0] else result
