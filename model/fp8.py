"""Weights of eight bits, float8_e4m3fn, with scales: of blocks of rows and columns, of rows, or one of the tensor.

Element [i, j] of a tensor [out, in] stands for element * scale[i // rows, j // columns]; the blocks at the ends are
short where the tensor is no multiple of them. The product is taken in float32 and rounded once. A cut of a tensor reads
and widens its own elements alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast, runtime_checkable

import ml_dtypes
import numpy as np

ELEMENT = np.dtype(ml_dtypes.float8_e4m3fn)
"""The dtype of quantised weights in a checkpoint."""
SCALES = ("_scale_inv", "_scale")
"""Suffixes of the names of scales: the first in the method `fp8`, the second in compressed-tensors. Both multiply."""
OF_ACTIVATIONS = (".input_scale", ".activation_scale")
"""Suffixes of the scales of activations, which are not used: activations are not quantised here."""

_VALUES = np.arange(256, dtype=np.uint8).view(ELEMENT).astype(np.float32)
_ROWS_AT_ONCE = 128
"""Rows widened in one go: 128 rows of 18,432 columns take 9 MB in float32."""


@dataclass(frozen=True)
class Block:
    """The rows and columns that share a scale; None stands for all of a tensor."""

    rows: int | None
    columns: int | None

    def sizes(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """The rows and columns of a block in a tensor [out, in]."""
        return self.rows or shape[0], self.columns or shape[1]

    def scales(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """The shape of the scales of a tensor [out, in]."""
        rows, columns = self.sizes(shape)
        return -(-shape[0] // rows), -(-shape[1] // columns)


@dataclass(frozen=True)
class Scaled:
    """A tensor [out, in]: `elements` of eight bits in blocks of `sizes`, with `scales`; it is widened to `dtype`.

    It has of an array what cuts use. Slices of it are narrow too, and begin at `start` of the scales' tensor.
    """

    elements: np.ndarray
    scales: np.ndarray
    sizes: tuple[int, int]
    dtype: np.dtype
    start: tuple[int, int] = (0, 0)

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in]."""
        rows, columns = self.elements.shape
        return rows, columns

    @property
    def ndim(self) -> int:
        """Two axes."""
        return 2

    @property
    def size(self) -> int:
        """Elements."""
        return self.elements.size

    @property
    def T(self) -> Scaled:
        """[in, out]."""
        turned = replace(self, sizes=self.sizes[::-1], start=self.start[::-1])
        return replace(turned, elements=self.elements.T, scales=self.scales.T)

    def __len__(self) -> int:
        return len(self.elements)

    def __getitem__(self, key: slice | tuple[slice, slice]) -> Scaled:
        both = key if isinstance(key, tuple) else (key, slice(None))
        firsts = (own.indices(size)[0] for own, size in zip(both, self.shape, strict=True))
        row, column = (before + first for before, first in zip(self.start, firsts))
        return replace(self, elements=self.elements[both], start=(row, column))

    def astype(self, dtype: Any, copy: bool = False) -> Scaled:
        """The same, widened to another dtype without rounding to this one before."""
        return replace(self, dtype=np.dtype(dtype))

    def reshape(self, *shape: int) -> np.ndarray:
        """The elements, widened, in another shape."""
        return self.array().reshape(*shape)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        whole = self.array()
        return whole if dtype is None else whole.astype(dtype, copy=False)

    def array(self) -> np.ndarray:
        """The elements, widened."""
        (count, width), (first, left), (rows, columns) = self.shape, self.start, self.sizes
        result = np.empty((count, width), self.dtype)
        across = np.arange(left, left + width) // columns
        codes = self.elements.view(np.uint8)
        wide = np.empty((min(count, _ROWS_AT_ONCE), width), np.float32)
        begin = 0
        while begin < count:  # rows of one block, some at a time
            place = (first + begin) // rows
            end = min(count, begin + _ROWS_AT_ONCE, (place + 1) * rows - first)
            some = _values(codes[begin:end], wide[: end - begin])
            some *= self.scales[place, across].astype(np.float32)
            with np.errstate(over="ignore"):  # what a narrower dtype does not hold is infinite there
                result[begin:end] = some
            begin = end
        return result


def _values(codes: np.ndarray, into: np.ndarray) -> np.ndarray:
    """The values of codes. `clip` changes none of them and lets numpy write in place: 3 times as fast as an index."""
    return np.take(_VALUES, codes, out=into, mode="clip")


@runtime_checkable
class Sliced(Protocol):
    """Weights that give a tensor of eight bits before it is widened."""

    def sliced(self, name: str) -> np.ndarray | Scaled:
        """The tensor as an array, or as what is widened from."""


def sliced(weights: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    """A tensor of which a cut widens only what it takes, where the weights have such."""
    return cast(np.ndarray, weights.sliced(name)) if isinstance(weights, Sliced) else weights[name]
