"""Which bytes of an allocation have been written, and by whom.

A byte is EMPTY, WRITTEN, ACCUMULATED (written by the Tensor engine, so that a later matmul may add to it), or CARRIED
(computed from bytes that were never written, and no more defined than they). Most allocations are in one state
throughout: then no mask exists at all. A mask of one byte per byte appears with the first partial write, and goes
again when a write covers everything.
"""

from __future__ import annotations

import numpy as np

EMPTY, WRITTEN, ACCUMULATED, CARRIED = 0, 1, 3, 4
"""The lowest bit tells whether a byte is defined."""

# A state repeated over the bytes of one element, so that a mask is read and written element-wise.
_WORD = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_REPEAT = {1: 0x01, 2: 0x0101, 4: 0x01010101, 8: 0x0101010101010101}


class Validity:
    """The state of every byte of one allocation of `nbytes` bytes."""

    __slots__ = ("blame", "mask", "nbytes", "uniform")

    def __init__(self, nbytes: int, state: int) -> None:
        self.nbytes = nbytes
        self.uniform: int | None = state
        self.mask: np.ndarray | None = None
        self.blame: Exception | None = None  # for bytes that are CARRIED: the read that was at fault

    def _view(
        self, shape: tuple[int, ...], strides: tuple[int, ...], offset: int, itemsize: int
    ) -> np.ndarray:
        if self.mask is None:
            self.mask = np.full(self.nbytes, self.uniform, np.uint8)
            self.uniform = None
        return np.ndarray(shape, _WORD[itemsize], self.mask, offset, strides)

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
            self.uniform, self.mask = state, None
        elif self.uniform != state:
            self._view(shape, strides, offset, itemsize)[...] = state * _REPEAT[itemsize]

    def mark_carried(
        self,
        defined: np.ndarray,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        offset: int,
        itemsize: int,
    ) -> None:
        """Mark as CARRIED those elements of a view that `defined`, of the view's shape, leaves out."""
        view = self._view(shape, strides, offset, itemsize)
        np.copyto(view, CARRIED * _REPEAT[itemsize], where=~defined)

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
            self.uniform, self.mask = common // ones, None
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


def _least(words: np.ndarray) -> np.ndarray:
    """The state of elements whose bytes were written in different ways: EMPTY or CARRIED where a byte is."""
    parts = words[:, None].view(np.uint8)
    carried = (parts == CARRIED).any(axis=1)
    return np.where((parts == EMPTY).any(axis=1), EMPTY, np.where(carried, CARRIED, WRITTEN))
