"""Calls of instructions as data: their arguments, and the elements of memory that their operands touch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from simulate.memory import NkiTensor

Tile = tuple[Any, ...]
"""An allocation by its line and its number there."""


@dataclass(frozen=True, slots=True)
class View:
    """The elements of an allocation that an operand touches.

    starts: first index in each dim of the allocation. steps: for each dim of the operand with more than one element,
    the dim of the allocation that it goes along, its step and its size. So a larger tile around the same elements
    gives the same view. If a dim of the operand does not go along one dim of the allocation, `starts` is the
    allocation's shape and dtype and the operand's offset, and each step is (-1, stride, size).
    """

    allocation: tuple[Any, ...]
    starts: tuple[Any, ...]
    steps: tuple[tuple[int, int, int], ...]
    dtype: str
    in_hbm: bool
    is_dynamic: bool

    @classmethod
    def from_tile(cls, tile: NkiTensor, allocation: tuple[Any, ...]) -> View:
        """Return the view of one operand, a tile in the allocation with this name."""
        form = tile.storage.form
        description = (str(tile.dtype), not tile.buffer.on_chip, tile.dynamic is not None)
        along = (
            _along(tile, form.shape) if str(form.dtype) == description[0] and 0 not in form.shape else None
        )
        if along is not None:
            return cls(allocation, *along, *description)
        raw = tuple((-1, stride, size) for stride, size in zip(tile.strides, tile.shape))
        return cls(allocation, (form.shape, str(form.dtype), tile.offset), raw, *description)

    def overlaps(self, other: View) -> bool:
        """Return whether two views may share an element: no dim of the allocation separates them."""
        if self.is_dynamic or other.is_dynamic or not (self._goes_along and other._goes_along):
            return True
        return all(a[0] <= b[1] and b[0] <= a[1] for a, b in zip(self._ranges(), other._ranges()))

    @property
    def _goes_along(self) -> bool:
        """Whether each dim of the operand goes along one dim of the allocation."""
        return all(isinstance(start, int) for start in self.starts)

    def _ranges(self) -> Iterator[tuple[int, int]]:
        """Yield the first and the last index that the view touches in each dim of the allocation."""
        for dim, start in enumerate(self.starts):
            yield start, start + sum(step * (size - 1) for axis, step, size in self.steps if axis == dim)


def _along(
    tile: NkiTensor, shape: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[tuple[int, int, int], ...]] | None:
    """Return `starts` and `steps` of a view whose dims each go along one dim of its allocation, or None."""
    natural = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    offset, starts = tile.offset, []
    for stride in natural:
        starts.append(offset // stride)
        offset %= stride
    ends, steps = list(starts), []
    for stride, size in zip(tile.strides, tile.shape):
        if size == 1:
            continue
        axis = next((dim for dim, step in enumerate(natural) if 0 < step <= stride), None)
        if axis is None or stride % natural[axis]:
            return None
        steps.append((axis, stride // natural[axis], size))
        ends[axis] += stride // natural[axis] * (size - 1)
    if any(end >= size for end, size in zip(ends, shape)):
        return None
    return tuple(starts), tuple(steps)


@dataclass(frozen=True, slots=True)
class Call:
    """One instruction: its name, its arguments, and the allocations that it reads and writes.

    accumulates: whether its result depends on what its output contained. loads and stores: views of the operands that
    it reads and writes. is_ordered: whether it uses state of the core, or synchronises with other cores or ranks.
    """

    name: str
    arguments: tuple[Any, ...]
    reads: tuple[Tile, ...]
    writes: tuple[Tile, ...]
    accumulates: bool
    loads: tuple[View, ...] = ()
    stores: tuple[View, ...] = ()
    is_ordered: bool = False

    @property
    def again(self) -> bool:
        """Whether executing the instruction a second time right away changes nothing."""
        return not self.accumulates and not set(self.reads) & set(self.writes)
