"""Products with a large matrix of narrow floats, which is widened block by block into a scratch the caches hold.

Widened whole, the weights of a model would lie in memory a second time at twice the bytes, and every product would
write and read those. A block is widened, multiplied at once, and its place is taken by the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from simulate.numerics import DType
from simulate.replay.fusion.opcodes import Step, widen

LARGE = 1 << 20
"""A matrix of more elements is widened in blocks."""

_BLOCK = 1 << 21
"""Elements of a block that meets many rows. 128 rows by 2048 by 8192 took two threads 24 ms with blocks of 8 MiB and 28
with 4 MiB, where a matrix that was wide already took 18; one thread took 40 and 42."""

_FEW_ROWS = 16
"""Below, a product waits for memory: a block lies in the second-level cache, and its rows are read in long runs."""

_SMALL_BLOCK = 1 << 18
_RUN = 2048  # elements of a row of a small block
_DEPTH = 4096  # above it, sums are taken in parts: a block then keeps at least 256 columns


@dataclass(frozen=True, slots=True)
class BlockedProduct:
    """A product of a float32 matrix and one of `source` elements; the second result is the scratch."""

    source: DType | np.dtype[Any]

    def steps(self, writes: Sequence[Any], reads: Sequence[Any]) -> list[Step]:
        """One call."""
        return [(multiply, [self.source, *reads, *writes])]


def block_shape(rows: int, depth: int, columns: int) -> tuple[int, int]:
    """Rows and columns of the blocks of a [depth, columns] matrix that multiplies `rows` rows."""
    if rows < _FEW_ROWS:
        width = min(columns, _RUN)
        return min(depth, _SMALL_BLOCK // width), width
    height = min(depth, _DEPTH)
    return height, min(columns, _BLOCK // height)


def scratch_elements(rows: int, depth: int, columns: int) -> int:
    """float32 elements that `multiply` needs: a block, and a part of the result where sums are taken in parts."""
    height, width = block_shape(rows, depth, columns)
    return height * width + (rows * width if height < depth else 0)


def multiply(
    source: DType | np.dtype[Any], left: np.ndarray, right: np.ndarray, out: np.ndarray, scratch: np.ndarray
) -> None:
    """out = left @ right, for `left` in float32 and `right` of `source` elements, which float32 represents."""
    (rows, depth), columns = left.shape, right.shape[1]
    height, width = block_shape(rows, depth, columns)
    turned = abs(right.strides[0]) < abs(right.strides[1])
    for start in range(0, columns, width):
        stop = min(columns, start + width)
        result = out[:, start:stop]
        part = scratch[height * width : height * width + rows * (stop - start)].reshape(-1, stop - start)
        for first in range(0, depth, height):
            last = min(depth, first + height)
            block = scratch[: (last - first) * (stop - start)]
            wide = block.reshape(stop - start, -1).T if turned else block.reshape(-1, stop - start)
            widen(source, wide, right[first:last, start:stop])
            if first == 0:
                np.matmul(left[:, :last], wide, out=result)
            else:
                np.matmul(left[:, first:last], wide, out=part)
                np.add(result, part, out=result)
