"""Validity: which bytes of an allocation are defined, and how they were written.

A byte is in one of four states: EMPTY (never written), WRITTEN, ACCUMULATED (written by the Tensor engine, so that a
later matmul may add to it), or POISON (computed from undefined bytes). WRITTEN and ACCUMULATED count as defined.

Most allocations are in one state throughout, or become so box by box: then a few boxes record the states. A mask of one
byte for each byte is made if boxes cannot record the states, and dropped when a write covers the allocation.
"""

from __future__ import annotations

import numpy as np

from simulate.memory.extents import Box, contains, join_boxes, meets

EMPTY, WRITTEN, ACCUMULATED, POISON = 0, 1, 3, 4
"""States of a byte; the lowest bit tells whether it is defined."""

# Factors that repeat a state over the bytes of an element, so that a mask is read and written element-wise.
_WORD = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_REPEAT = {1: 0x01, 2: 0x0101, 4: 0x01010101, 8: 0x0101010101010101}


_BOXES_MOST = 32  # a search through more boxes takes longer than a mask


class Validity:
    """State of every byte of one allocation of `nbytes` bytes.

    Views are described in bytes, as `ByteView`: shape, byte strides, byte offset and element size.

    Attributes:
        shape: Dims of the allocation in which boxes count, the last in bytes.
        uniform: Common state of all bytes, None if they differ.
        blame: Error that a read of POISON bytes raises: that of the read that began the POISON. None without POISON.
    """

    __slots__ = ("_boxes", "_mask", "_outside", "blame", "nbytes", "shape", "uniform")

    def __init__(self, nbytes: int, state: int, shape: tuple[int, ...] | None = None) -> None:
        self.nbytes = nbytes
        self.shape = (nbytes,) if shape is None else shape
        self.uniform: int | None = state
        self._boxes: list[tuple[Box, int]] = []  # disjoint; all other bytes are in the state `_outside`
        self._outside = state
        self._mask: np.ndarray | None = None
        self.blame: Exception | None = None  # error of the read that began the POISON

    @property
    def mask(self) -> np.ndarray | None:
        """State of every byte as a flat uint8 array, None if all bytes are in one state."""
        return None if self.uniform is not None else self._get_mask()

    def _get_mask(self) -> np.ndarray:
        mask = self._mask
        if mask is None:
            mask = self._mask = np.full(
                self.nbytes, self._outside if self.uniform is None else self.uniform, np.uint8
            )
            for box, state in self._boxes:
                mask.reshape(self.shape)[tuple(slice(*interval) for interval in box)] = state
            self._boxes.clear()
            self.uniform = None
        return mask

    def _mask_view(
        self, shape: tuple[int, ...], strides: tuple[int, ...], offset: int, itemsize: int
    ) -> np.ndarray:
        return np.ndarray(shape, _WORD[itemsize], self._get_mask(), offset, strides)

    def become(self, state: int) -> None:
        """Set the state of every byte of the allocation to `state`."""
        self.uniform, self._mask = state, None
        self._boxes.clear()

    def mark_box(self, state: int, box: Box) -> bool:
        """Set the state of a box and return True; return False, without a change, if only a mask can record it.

        The caller then calls `mark`.
        """
        if self.uniform is not None:
            if self.uniform == state:
                return True
            self._outside, self.uniform = self.uniform, None
        elif self._mask is not None:
            return False
        boxes = self._boxes
        kept = []
        for marked, known in boxes:
            if not meets(box, marked):
                kept.append((marked, known))
            elif known == state and contains(marked, box):
                return True
            elif not contains(box, marked):
                return False
        if state != self._outside:
            box = _absorb_neighbours(box, state, kept)
            kept.append((box, state))
        if len(kept) > _BOXES_MOST:
            return False
        boxes[:] = kept
        if not kept:
            self.uniform = self._outside
        elif len(kept) == 1 and all(end - first == size for (first, end), size in zip(box, self.shape)):
            self.become(state)
        return True

    def state_within(self, box: Box) -> int | None:
        """Return the common state of all bytes of a box; None if they may differ, which only the mask can tell."""
        if self.uniform is not None:
            return self.uniform
        if self._mask is not None:
            return None
        for marked, state in self._boxes:
            if meets(box, marked):
                return state if contains(marked, box) else None
        return self._outside

    def mark(
        self,
        state: int,
        covers_all: bool,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        offset: int,
        itemsize: int,
    ) -> None:
        """Set the state of the bytes of a view.

        Args:
            state: The state.
            covers_all: Whether the view covers every byte of the allocation.
            shape: Shape of the view.
            strides: Strides in bytes.
            offset: Offset in bytes.
            itemsize: Bytes of an element.
        """
        if covers_all:
            self.become(state)
        elif self.uniform != state:
            self._mask_view(shape, strides, offset, itemsize)[...] = state * _REPEAT[itemsize]

    def mark_poison(
        self,
        defined: np.ndarray,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        offset: int,
        itemsize: int,
    ) -> None:
        """Set the state of the elements of a view that `defined` does not select to POISON; other states do not change.

        Args:
            defined: Bool array of the view's shape.
            shape: Shape of the view.
            strides: Strides in bytes.
            offset: Offset in bytes.
            itemsize: Bytes of an element.
        """
        view = self._mask_view(shape, strides, offset, itemsize)
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
        """Set the state of those elements of a view that the bool array `chosen` selects; other states do not change.

        Args:
            state: The state.
            chosen: Bool array of the view's shape.
            shape: Shape of the view.
            strides: Strides in bytes.
            offset: Offset in bytes.
            itemsize: Bytes of an element.
        """
        if self.uniform != state:
            np.copyto(
                self._mask_view(shape, strides, offset, itemsize), state * _REPEAT[itemsize], where=chosen
            )

    def written(
        self, covers_all: bool, shape: tuple[int, ...], strides: tuple[int, ...], offset: int, itemsize: int
    ) -> bool:
        """Return whether every byte of a view is WRITTEN or ACCUMULATED; arguments are those of `mark`."""
        if self.uniform is not None:
            return bool(self.uniform & WRITTEN)
        ones = _REPEAT[itemsize]
        states = self._mask_view(shape, strides, offset, itemsize)
        common = int(np.bitwise_and.reduce(states, axis=None))
        if common & ones != ones:
            return False
        if covers_all and int(states.max()) == common:
            self.become(common // ones)
        return True

    def states(
        self, shape: tuple[int, ...], strides: tuple[int, ...], offset: int, itemsize: int
    ) -> int | np.ndarray:
        """Return the common state of all elements of a view, or a uint8 array of its shape if they differ.

        An element whose bytes differ is EMPTY if one of them is, else POISON if one is, else WRITTEN.
        """
        if self.uniform is not None:
            return self.uniform
        words = self._mask_view(shape, strides, offset, itemsize)
        states = words // _REPEAT[itemsize]
        mixed = states * _REPEAT[itemsize] != words
        if mixed.any():
            states[mixed] = _combine_states(words[mixed])
        first = int(states.flat[0])
        return first if (states == first).all() else states.astype(np.uint8)


def _absorb_neighbours(box: Box, state: int, boxes: list[tuple[Box, int]]) -> Box:
    """Return a box joined with all boxes of equal state whose union with it is a box; remove those from `boxes`."""
    index = 0
    while index < len(boxes):
        neighbour, known = boxes[index]
        union = join_boxes(box, neighbour) if known == state else None
        if union is None:
            index += 1
        else:
            del boxes[index]
            box, index = union, 0
    return box


def _combine_states(words: np.ndarray) -> np.ndarray:
    """Return one state per element whose bytes differ: EMPTY if a byte is EMPTY, else POISON if one is, else WRITTEN.

    Args:
        words: The states of an element's bytes as one unsigned integer per element.
    """
    byte_states = words[:, None].view(np.uint8)
    carried = (byte_states == POISON).any(axis=1)
    return np.where((byte_states == EMPTY).any(axis=1), EMPTY, np.where(carried, POISON, WRITTEN))
