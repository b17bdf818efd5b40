"""Footprints: the exact bytes of a tensor that an operand touches, with a digest of the bytes that a write stored.

Detectors compare footprints to find overlaps, repeated writes and lost results. A storage is the memory of a
tensor; an element id is the index of an element in it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from zlib import crc32

import numpy as np

from simulate.isa.plan import Plan
from simulate.memory import NkiTensor
from simulate.memory.layout import Layout
from simulate.run.execute import view_flat
from simulate.run.indirect import resolve

_FEW_BYTES = 1 << 12


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of one tensor that an operand touches: a strided pattern of elements, or a list of element ids.

    `offset` and `strides` count elements of `width` bytes in the storage. `elements` are the ids that a
    run-time address selected, in operand order; if they are given, `offset`, `shape` and `strides` have no
    meaning. Equality ignores `digest` and `values`.
    """

    tensor: int
    width: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    elements: np.ndarray | None = None
    digest: int | None = field(default=None, compare=False)
    """Digest of the bytes that a write stored, None for a read."""
    values: np.ndarray | None = field(default=None, compare=False)
    """Stored bytes of a write to shared HBM, uint8 [elements, width]."""

    def ordered_ids(self) -> np.ndarray:
        """Return the element ids in the storage, int64, in operand order."""
        if self.elements is not None:
            return self.elements
        numbers = np.array([self.offset], np.int64)
        for extent, stride in zip(self.shape, self.strides):
            numbers = np.add.outer(numbers, np.arange(extent, dtype=np.int64) * stride).reshape(-1)
        return numbers

    def unique_ids(self) -> np.ndarray:
        """Return the distinct element ids in the storage, int64, ascending."""
        return np.unique(self.ordered_ids())

    def bytes(self) -> np.ndarray:
        """Return the distinct byte offsets in the storage, int64, ascending."""
        return np.add.outer(self.unique_ids() * self.width, np.arange(self.width)).reshape(-1)

    def contents(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the distinct byte offsets that a write touched, and the uint8 values that it stored there, both 1-D.

        An element that is written more than once counts with its first value. Only writes to shared HBM keep
        `values`; for any other footprint an assertion fails.
        """
        assert self.values is not None
        element_ids, first_uses = np.unique(self.ordered_ids(), return_index=True)
        offsets = np.add.outer(element_ids * self.width, np.arange(self.width)).reshape(-1)
        return offsets, self.values[first_uses].reshape(-1)

    def is_same_view(self, other: Footprint) -> bool:
        """Return whether both footprints are the same elements in the same order."""
        if self.elements is None or other.elements is None:
            return self.elements is other.elements and self == other
        comparable = self.tensor == other.tensor and self.width == other.width
        return comparable and np.array_equal(self.elements, other.elements)

    def meets(self, other: Footprint) -> bool:
        """Return whether both footprints touch a common byte."""
        if self.tensor != other.tensor:
            return False
        if self.width == other.width:
            return np.intersect1d(self.unique_ids(), other.unique_ids(), assume_unique=True).size > 0
        return np.intersect1d(self.bytes(), other.bytes(), assume_unique=True).size > 0


def resolve_footprint(tile: NkiTensor, skip_out_of_range: bool) -> Footprint:
    """Return the footprint of a view; a run-time index is resolved to the elements that it selects now.

    Args:
        tile: The view.
        skip_out_of_range: Whether the instruction skips indices that are out of range.
    """
    if tile.dynamic is None:
        return static_footprint(tile.storage.serial, tile.layout)
    return indexed_footprint(tile.storage.serial, tile.layout, resolve_element_ids(tile, skip_out_of_range))


def static_footprint(serial: int, layout: Layout) -> Footprint:
    """Return the footprint of a view without a run-time index.

    Args:
        serial: The serial number of its tensor.
        layout: The layout of the view.
    """
    return Footprint(serial, layout.dtype.storage.itemsize, layout.offset, layout.shape, layout.strides)


def indexed_footprint(serial: int, layout: Layout, elements: np.ndarray) -> Footprint:
    """Return the footprint of a view with a run-time address.

    Args:
        serial: The serial number of its tensor.
        layout: The layout of the view.
        elements: The ids of the selected elements, in operand order.
    """
    return Footprint(serial, layout.dtype.storage.itemsize, 0, (), (), elements)


def resolve_element_ids(tile: NkiTensor, skip_out_of_range: bool) -> np.ndarray:
    """Return the ids of the elements that a run-time address selects now, 1-D in operand order.

    With `skip_out_of_range`, ids outside of the tensor are left out.
    """
    selection = resolve(tile, skip_out_of_range)
    elements = selection.elements if selection.inside is None else selection.elements[selection.inside]
    return elements.reshape(-1)


def may_fold(layout: Layout) -> bool:
    """Return whether two elements of a view may be the same element of storage: a stride is 0 or strides overlap."""
    reach = 0
    for stride, extent in sorted((abs(s), e) for s, e in zip(layout.strides, layout.shape) if e > 1):
        if stride <= reach or not stride:
            return True
        reach += stride * (extent - 1)
    return False


def written_footprint(tile: NkiTensor, plan: Plan, keep: bool = False) -> Footprint:
    """Return the footprint of a write that was just executed, with a digest of the bytes that are now in the view.

    Args:
        tile: The written view.
        plan: The plan of the instruction.
        keep: Whether the footprint keeps a copy of the bytes in `values`.
    """
    target = resolve_footprint(tile, plan.skip_out_of_range)
    values = np.ascontiguousarray(
        tile.array if target.elements is None else view_flat(tile).array[target.elements]
    )
    kept = np.frombuffer(values.tobytes(), np.uint8).reshape(-1, target.width) if keep else None
    fields = target.tensor, target.width, target.offset, target.shape, target.strides, target.elements
    return Footprint(*fields, _digest(values), kept)


def _digest(values: np.ndarray) -> int:
    """Return a CRC-32 of an array: equal bytes have equal digests, different bytes almost never.

    The digest of a large array covers the sums of rows and of columns of 64-bit words. These sums change where rows,
    columns or words are exchanged. For 128 x 512 float32 the sums take 16 us, a checksum of all bytes 50 us.
    """
    words = values.reshape(values.shape[0], -1) if values.ndim > 1 else values.reshape(1, -1)
    if values.nbytes < _FEW_BYTES or words.shape[1] * words.itemsize % 8:
        return crc32(values.view(np.uint8).data)
    words = words.view(np.uint64)
    return crc32(np.add.reduce(words, axis=0).data, crc32(np.add.reduce(words, axis=1).data))
