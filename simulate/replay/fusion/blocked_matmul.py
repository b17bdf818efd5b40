"""Blocked matmuls: a large matrix of narrow floats is widened block by block into scratch that fits the host's caches.

Widened whole, the weights of a model would take memory a second time at twice the bytes, and every matmul would write
and read those bytes. A block is widened and multiplied at once; the next block reuses its bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from simulate.numerics import DType
from simulate.replay.fusion.opcodes import NumpyCall, widen

LARGE = 1 << 20
"""A matrix of more elements is widened in blocks."""

_BLOCK = 1 << 21
"""Elements of a block that many rows multiply. 128 rows by 2048 by 8192 took two threads 24 ms with blocks of 8 MiB and
28 ms with 4 MiB; a float32 matrix took 18 ms. One thread took 40 and 42 ms."""

_FEW_ROWS = 16
"""With fewer rows a matmul is memory-bound: a block fits the second-level cache and has long contiguous rows."""

_SMALL_BLOCK = 1 << 18
_RUN = 2048  # elements of a row of a small block
_DEPTH = 4096  # above it, partial sums are added: a block then has at least 256 columns


@dataclass(frozen=True, slots=True)
class BlockedMatmul:
    """A matmul of a float32 matrix and one of `source` elements; the second result is the scratch."""

    source: DType | np.dtype[Any]

    def calls(self, writes: Sequence[Any], reads: Sequence[Any]) -> list[NumpyCall]:
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
    """float32 elements that `multiply` needs: a block, and a part of the result where partial sums are added."""
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
