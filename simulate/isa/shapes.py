"""Functions on arrays and views that planners share."""

from __future__ import annotations

import numpy as np

from simulate.memory import NkiTensor


def column(values: np.ndarray, ndim: int) -> np.ndarray:
    """Return a (P, 1) array in the shape (P, 1, …) of `ndim` dims, which NumPy repeats along a tile's free dims."""
    return values.reshape(values.shape[0], *(1,) * (ndim - 1))


def flat(values: np.ndarray) -> np.ndarray:
    """Return a tile's array as (partitions, elements per partition), in row-major order of the free dims."""
    return values if values.ndim == 2 else values.reshape(values.shape[0], -1)


def unchanged(values: np.ndarray) -> tuple[np.ndarray]:
    """Return the one operand as the one result: the `compute` of an instruction that moves elements."""
    return (values,)


def count_contiguous_bytes(view: NkiTensor) -> int:
    """Return the bytes of the longest contiguous run of a view that starts at its first element: a piece of a DMA.

    On chip a run ends with its partition.
    """
    piece = 1
    first = 1 if view.buffer.on_chip else 0
    for extent, stride in zip(reversed(view.shape[first:]), reversed(view.strides[first:])):
        if extent != 1 and stride != piece:
            break
        piece *= extent
    return piece * view.dtype.itemsize
