"""Footprints: the exact bytes of a tensor that an instruction touches, and the values that a write left there."""

from __future__ import annotations

from dataclasses import dataclass, field
from zlib import crc32

import numpy as np

from simulate.isa.plan import Plan
from simulate.memory import NkiTensor
from simulate.memory.layout import Layout
from simulate.run.execute import flat
from simulate.run.indirect import resolve

_FEW_BYTES = 1 << 12


@dataclass(frozen=True, slots=True)
class Footprint:
    """The bytes that one operand touches: a pattern of elements in the storage, or a list of element numbers."""

    tensor: int
    width: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    elements: np.ndarray | None = None
    digest: int | None = field(default=None, compare=False)  # of the bytes that a write left there
    values: np.ndarray | None = field(
        default=None, compare=False
    )  # these bytes, a row per element, in shared HBM

    def in_order(self) -> np.ndarray:
        """The numbers of the elements in the storage, in the order of the pattern; a number times `width` is a byte."""
        if self.elements is not None:
            return self.elements
        numbers = np.array([self.offset], np.int64)
        for extent, stride in zip(self.shape, self.strides):
            numbers = np.add.outer(numbers, np.arange(extent, dtype=np.int64) * stride).reshape(-1)
        return numbers

    def numbers(self) -> np.ndarray:
        """The numbers of the elements in the storage, ascending, each once."""
        return np.unique(self.in_order())

    def bytes(self) -> np.ndarray:
        """The byte offsets in the storage, each once."""
        return np.add.outer(self.numbers() * self.width, np.arange(self.width)).reshape(-1)

    def contents(self) -> tuple[np.ndarray, np.ndarray]:
        """The byte offsets that a write of shared HBM touched, each once, and the bytes that it left there."""
        assert self.values is not None
        numbers, at = np.unique(self.in_order(), return_index=True)
        places = np.add.outer(numbers * self.width, np.arange(self.width)).reshape(-1)
        return places, self.values[at].reshape(-1)

    def same_place(self, other: Footprint) -> bool:
        """Whether both are the same elements, in the same order."""
        if self.elements is None or other.elements is None:
            return self.elements is other.elements and self == other
        comparable = self.tensor == other.tensor and self.width == other.width
        return comparable and np.array_equal(self.elements, other.elements)

    def meets(self, other: Footprint) -> bool:
        """Whether both touch a common byte."""
        if self.tensor != other.tensor:
            return False
        if self.width == other.width:
            return np.intersect1d(self.numbers(), other.numbers(), assume_unique=True).size > 0
        return np.intersect1d(self.bytes(), other.bytes(), assume_unique=True).size > 0


def footprint(tile: NkiTensor, skip_out_of_range: bool) -> Footprint:
    """The footprint of a view; with a run-time index, by the numbers of the selected elements."""
    if tile.dynamic is None:
        return footprint_of(tile.storage.serial, tile.layout)
    return addressed(tile.storage.serial, tile.layout, addresses(tile, skip_out_of_range))


def footprint_of(serial: int, layout: Layout) -> Footprint:
    """The footprint of a view without a run-time index, given its allocation and layout."""
    return Footprint(serial, layout.dtype.storage.itemsize, layout.offset, layout.shape, layout.strides)


def addressed(serial: int, layout: Layout, elements: np.ndarray) -> Footprint:
    """The footprint of a view with a run-time address, given the elements that the address selected."""
    return Footprint(serial, layout.dtype.storage.itemsize, 0, (), (), elements)


def addresses(tile: NkiTensor, skip_out_of_range: bool) -> np.ndarray:
    """The numbers of the elements that a run-time address selects now."""
    where = resolve(tile, skip_out_of_range)
    elements = where.elements if where.inside is None else where.elements[where.inside]
    return elements.reshape(-1)


def folds(layout: Layout) -> bool:
    """Whether two elements of a view may be one element of storage: a stride is within the reach of smaller ones."""
    reach = 0
    for stride, extent in sorted((abs(s), e) for s, e in zip(layout.strides, layout.shape) if e > 1):
        if stride <= reach or not stride:
            return True
        reach += stride * (extent - 1)
    return False


def written(tile: NkiTensor, plan: Plan, keep: bool = False) -> Footprint:
    """The footprint of a write that was just executed, with a digest of its bytes; with `keep`, the bytes as well."""
    made = footprint(tile, plan.skip_out_of_range)
    values = np.ascontiguousarray(tile.array if made.elements is None else flat(tile).array[made.elements])
    kept = np.frombuffer(values.tobytes(), np.uint8).reshape(-1, made.width) if keep else None
    where = made.tensor, made.width, made.offset, made.shape, made.strides, made.elements
    return Footprint(*where, _digest(values), kept)


def _digest(values: np.ndarray) -> int:
    """A digest of values: equal bytes have equal digests, other bytes almost never do.

    The digest of many bytes covers the sums of rows and of columns of words, which change where rows, columns or words
    are exchanged. For 128 x 512 float32 the sums take 16 us, a checksum of all bytes 50 us.
    """
    words = values.reshape(values.shape[0], -1) if values.ndim > 1 else values.reshape(1, -1)
    if values.nbytes < _FEW_BYTES or words.shape[1] * words.itemsize % 8:
        return crc32(values.view(np.uint8).data)
    words = words.view(np.uint64)
    return crc32(np.add.reduce(words, axis=0).data, crc32(np.add.reduce(words, axis=1).data))
