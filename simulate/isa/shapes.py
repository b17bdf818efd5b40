"""Array shaping that planners share."""

from __future__ import annotations

import numpy as np

from simulate.memory import NkiTensor


def column(values: np.ndarray, ndim: int) -> np.ndarray:
    """Return a (P, 1) operand shaped so that numpy repeats it along the free dims of an `ndim`-dimensional tile."""
    return values.reshape(values.shape[0], *(1,) * (ndim - 1))


def flat(values: np.ndarray) -> np.ndarray:
    """Return a tile as (partitions, elements per partition), in streaming order."""
    return values if values.ndim == 2 else values.reshape(values.shape[0], -1)


def unchanged(values: np.ndarray) -> tuple[np.ndarray]:
    """Return operands as they are: the `compute` of an instruction that moves elements."""
    return (values,)


def contiguous_bytes(view: NkiTensor) -> int:
    """Return the contiguous bytes of a view, a piece; on chip a piece ends with its partition."""
    piece = 1
    first = 1 if view.buffer.on_chip else 0
    for extent, stride in zip(reversed(view.shape[first:]), reversed(view.strides[first:])):
        if extent != 1 and stride != piece:
            break
        piece *= extent
    return piece * view.dtype.itemsize
