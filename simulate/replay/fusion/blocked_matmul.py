"""Blocked matmuls: large matrices of narrow floats are widened block by block into scratch that fits the host's caches.

A float32 copy of a model's weights would take twice the bytes of the weights, and every matmul would write and read
those bytes. A block is widened and multiplied at once; the next block reuses its bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from simulate.numerics import DType
from simulate.replay.fusion.opcodes import NumpyCall, widen

LARGE = 1 << 20
"""Number of elements above which a matrix is widened in blocks."""

_BLOCK = 1 << 21
"""Elements of a block for matmuls of many rows. 128 rows by 2048 by 8192 took two threads 24 ms with blocks of 8 MiB
and 28 ms with 4 MiB; a float32 matrix took 18 ms. One thread took 40 and 42 ms."""

_FEW_ROWS = 16
"""Rows below which a matmul is memory-bound; blocks then fit the second-level cache and have long contiguous rows."""

_SMALL_BLOCK = 1 << 18
_RUN = 2048  # elements of a row of a small block
_DEPTH = 4096  # above it, partial sums are added: a block then has at least 256 columns


@dataclass(frozen=True, slots=True)
class BlockedMatmul:
    """Opcode of a matmul of a float32 matrix and a matrix of dtype `source`; its second result is scratch."""

    source: DType | np.dtype[Any]

    def list_calls(self, writes: Sequence[Any], reads: Sequence[Any]) -> list[NumpyCall]:
        """Return one (function, arguments), not called yet, that writes `reads[0] @ reads[1]` to `writes[0]`.

        `writes[1]` is scratch, in which the right matrix is widened block by block.
        """
        return [(multiply, [self.source, *reads, *writes])]


def choose_block_shape(rows: int, depth: int, columns: int) -> tuple[int, int]:
    """Return the rows and columns of the blocks in which a [depth, columns] matrix is widened.

    Args:
        rows: The rows of the left matrix, which it is multiplied with.
        depth: The rows of the matrix.
        columns: The columns of the matrix.
    """
    if rows < _FEW_ROWS:
        width = min(columns, _RUN)
        return min(depth, _SMALL_BLOCK // width), width
    height = min(depth, _DEPTH)
    return height, min(columns, _BLOCK // height)


def count_scratch_elements(rows: int, depth: int, columns: int) -> int:
    """Return how many float32 elements of scratch `multiply` needs for a [rows, depth] by [depth, columns] product.

    These are a block, and partial sums if the depth is split.
    """
    height, width = choose_block_shape(rows, depth, columns)
    return height * width + (rows * width if height < depth else 0)


def multiply(
    source: DType | np.dtype[Any], left: np.ndarray, right: np.ndarray, out: np.ndarray, scratch: np.ndarray
) -> None:
    """Write left @ right to `out`, widening `right` block by block.

    Args:
        source: The dtype of `right`; float32 must represent its values exactly.
        left: float32 [rows, depth].
        right: [depth, columns], elements of dtype `source`, row- or column-major.
        out: float32 [rows, columns].
        scratch: float32 [at least `count_scratch_elements`].
    """
    (rows, depth), columns = left.shape, right.shape[1]
    height, width = choose_block_shape(rows, depth, columns)
    turned = abs(right.strides[0]) < abs(right.strides[1])
    for start in range(0, columns, width):
        stop = min(columns, start + width)
        result = out[:, start:stop]
        partial_sum = scratch[height * width : height * width + rows * (stop - start)].reshape(
            -1, stop - start
        )
        for first in range(0, depth, height):
            last = min(depth, first + height)
            block = scratch[: (last - first) * (stop - start)]
            wide = block.reshape(stop - start, -1).T if turned else block.reshape(-1, stop - start)
            widen(source, wide, right[first:last, start:stop])
            if first == 0:
                np.matmul(left[:, :last], wide, out=result)
            else:
                np.matmul(left[:, first:last], wide, out=partial_sum)
                np.add(result, partial_sum, out=result)
