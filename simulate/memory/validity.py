"""Which bytes of an allocation are defined, and how they were written.

A byte is EMPTY, WRITTEN, ACCUMULATED (written by the Tensor engine, so that a later matmul may add to it), or POISON
(computed from undefined bytes). Most allocations are in one state throughout, or become so part by part: then a few
boxes record which part is in which state. A mask of one byte per byte is made where boxes cannot record the states, and
dropped when a write covers the allocation.
"""

from __future__ import annotations

import numpy as np

from simulate.memory.extents import Box, contains, joined, meets

EMPTY, WRITTEN, ACCUMULATED, POISON = 0, 1, 3, 4
"""The lowest bit tells whether a byte is defined."""

# A state repeated over the bytes of one element, so that a mask is read and written element-wise.
_WORD = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_REPEAT = {1: 0x01, 2: 0x0101, 4: 0x01010101, 8: 0x0101010101010101}


_BOXES_MOST = 32  # looking through more of them takes longer than a mask


class Validity:
    """The state of every byte of one allocation of `nbytes` bytes.

    `shape` are the dims that boxes count in, the last one in bytes. `uniform` is the state of all bytes, if they are in
    one.
    """

    __slots__ = ("_boxes", "_mask", "_rest", "blame", "nbytes", "shape", "uniform")

    def __init__(self, nbytes: int, state: int, shape: tuple[int, ...] | None = None) -> None:
        self.nbytes = nbytes
        self.shape = (nbytes,) if shape is None else shape
        self.uniform: int | None = state
        self._boxes: list[tuple[Box, int]] = []  # disjoint; what lies in none of them is in the state `_rest`
        self._rest = state
        self._mask: np.ndarray | None = None
        self.blame: Exception | None = None  # for bytes that are POISON: the read that was at fault

    @property
    def mask(self) -> np.ndarray | None:
        """The state of every byte; None where all are in one."""
        return None if self.uniform is not None else self._masked()

    def _masked(self) -> np.ndarray:
        mask = self._mask
        if mask is None:
            mask = self._mask = np.full(
                self.nbytes, self._rest if self.uniform is None else self.uniform, np.uint8
            )
            for box, state in self._boxes:
                mask.reshape(self.shape)[tuple(slice(*interval) for interval in box)] = state
            self._boxes.clear()
            self.uniform = None
        return mask

    def _view(
        self, shape: tuple[int, ...], strides: tuple[int, ...], offset: int, itemsize: int
    ) -> np.ndarray:
        return np.ndarray(shape, _WORD[itemsize], self._masked(), offset, strides)

    def become(self, state: int) -> None:
        """Put every byte into `state`."""
        self.uniform, self._mask = state, None
        self._boxes.clear()

    def mark_box(self, state: int, box: Box) -> bool:
        """Put a box into `state`; False, without a change, where only a mask can record it."""
        if self.uniform is not None:
            if self.uniform == state:
                return True
            self._rest, self.uniform = self.uniform, None
        elif self._mask is not None:
            return False
        boxes = self._boxes
        kept = []
        for other, known in boxes:
            if not meets(box, other):
                kept.append((other, known))
            elif known == state and contains(other, box):
                return True
            elif not contains(box, other):
                return False
        if state != self._rest:
            box = _grown(box, state, kept)
            kept.append((box, state))
        if len(kept) > _BOXES_MOST:
            return False
        boxes[:] = kept
        if not kept:
            self.uniform = self._rest
        elif len(kept) == 1 and all(end - first == size for (first, end), size in zip(box, self.shape)):
            self.become(state)
        return True

    def state_within(self, box: Box) -> int | None:
        """The one state of all bytes of a box, where it is known without a mask."""
        if self.uniform is not None:
            return self.uniform
        if self._mask is not None:
            return None
        for other, state in self._boxes:
            if meets(box, other):
                return state if contains(other, box) else None
        return self._rest

    def mark(
        self,
        state: int,
        whole: bool,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        offset: int,
        itemsize: int,
    ) -> None:
        """Put a view (byte strides, byte offset) into `state`; `whole` tells that the view covers every byte."""
        if whole:
            self.become(state)
        elif self.uniform != state:
            self._view(shape, strides, offset, itemsize)[...] = state * _REPEAT[itemsize]

    def mark_poison(
        self,
        defined: np.ndarray,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        offset: int,
        itemsize: int,
    ) -> None:
        """Mark as POISON those elements of a view that `defined`, of the view's shape, leaves out."""
        view = self._view(shape, strides, offset, itemsize)
        np.copyto(view, POISON * _REPEAT[itemsize], where=~defined)

    def mark_where(
        self,
        state: int,
        chosen: np.ndarray,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        offset: int,
        itemsize: int,
    ) -> None:
        """Put those elements of a view into `state` that `chosen`, of the view's shape, selects."""
        if self.uniform != state:
            np.copyto(self._view(shape, strides, offset, itemsize), state * _REPEAT[itemsize], where=chosen)

    def written(
        self, whole: bool, shape: tuple[int, ...], strides: tuple[int, ...], offset: int, itemsize: int
    ) -> bool:
        """Whether every byte of a view has been written, and is defined."""
        if self.uniform is not None:
            return bool(self.uniform & WRITTEN)
        ones = _REPEAT[itemsize]
        states = self._view(shape, strides, offset, itemsize)
        common = int(np.bitwise_and.reduce(states, axis=None))
        if common & ones != ones:
            return False
        if whole and int(states.max()) == common:
            self.become(common // ones)
        return True

    def states(
        self, shape: tuple[int, ...], strides: tuple[int, ...], offset: int, itemsize: int
    ) -> int | np.ndarray:
        """The one state of all elements of a view, or an array with the state of each one."""
        if self.uniform is not None:
            return self.uniform
        words = self._view(shape, strides, offset, itemsize)
        states = words // _REPEAT[itemsize]
        mixed = states * _REPEAT[itemsize] != words
        if mixed.any():
            states[mixed] = _least(words[mixed])
        first = int(states.flat[0])
        return first if (states == first).all() else states.astype(np.uint8)


def _grown(box: Box, state: int, boxes: list[tuple[Box, int]]) -> Box:
    """A box joined with the boxes of equal state that touch it, which are removed from the list."""
    at = 0
    while at < len(boxes):
        other, known = boxes[at]
        whole = joined(box, other) if known == state else None
        if whole is None:
            at += 1
        else:
            del boxes[at]
            box, at = whole, 0
    return box


def _least(words: np.ndarray) -> np.ndarray:
    """The state of elements whose bytes were written in different ways: EMPTY or POISON where a byte is."""
    parts = words[:, None].view(np.uint8)
    carried = (parts == POISON).any(axis=1)
    return np.where((parts == EMPTY).any(axis=1), EMPTY, np.where(carried, POISON, WRITTEN))
