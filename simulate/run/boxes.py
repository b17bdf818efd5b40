"""The boxes that the events of streams read and write, and which of them overlap.

Boxes enclose what an access pattern touches. Serial numbers of tensors belong to a rank, so its cores meet only in
shared HBM.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from simulate.run.stream import READ, Stream

_AT_ONCE = 1 << 18  # pairs of boxes that are compared together: some tens of MB
_ALONE: list[tuple[int, bool]] = []  # what overlaps a box that nothing overlaps; one for all, never filled


class Boxes:
    """The distinct boxes ("cells") of all streams, and which of them overlap.

    `cells[stream]` and `kinds[stream]` have one entry per operand, `ends[stream]` the end of each event's
    operands. Operands in tensors that no event writes get cell -1: they order nothing. `near[cell]` lists the
    other cells that overlap it, and whether it covers them. With `apart`, a tensor is another one for each core, so
    that boxes of different cores never overlap.
    """

    def __init__(self, streams: tuple[Stream, ...], apart: bool = False) -> None:
        tables = [np.frombuffer(stream.rows, np.int64).reshape(-1, 5) for stream in streams]
        self.kinds = [(table[:, 0] & 3).tolist() for table in tables]
        self.ends = [
            (np.frombuffer(stream.row_ends, np.uint64) // 5).astype(np.int64).tolist() for stream in streams
        ]
        whole = np.concatenate(tables) if tables else np.zeros((0, 5), np.int64)
        owners = list(range(len(streams))) if apart else [stream.rank for stream in streams]
        ranks = np.repeat(owners, [len(table) for table in tables])
        rank_keys = np.unique(ranks, return_inverse=True)[1].reshape(-1)
        serial = whole[:, 0] >> 2
        self._serials = int(serial.max(initial=0)) + 1
        self._keys = np.unique(owners, return_inverse=True)[1].reshape(-1).tolist()
        tensor = rank_keys * self._serials + serial
        written = np.isin(tensor, np.unique(tensor[(whole[:, 0] & 3) != READ]))
        cells = np.full(len(whole), -1)
        keys = np.column_stack([tensor, whole[:, 1:]])[written]
        boxes, cells[written] = _distinct(keys)
        bounds = np.cumsum([0, *map(len, tables)])
        self.cells = [cells[a:b].tolist() for a, b in pairwise(bounds.tolist())]
        self.near = _neighbours(boxes)
        tensors = np.arange(len(set(owners)) * self._serials + 1)
        self._bounds = np.searchsorted(boxes[:, 0], tensors).tolist()

    def of(self, stream: int, serial: int) -> range:
        """The cells in one tensor of a stream."""
        key = self._keys[stream] * self._serials + serial
        return range(self._bounds[key], self._bounds[key + 1])


def _distinct(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distinct rows in lexicographic order, and for every row the number of its like."""
    if not len(rows):
        return rows, np.zeros(0, np.int64)
    order = np.lexsort(rows.T[::-1])
    ordered = rows[order]
    first = np.ones(len(rows), bool)
    first[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    numbers = np.empty(len(rows), np.int64)
    numbers[order] = np.cumsum(first) - 1
    return ordered[first], numbers


def _neighbours(boxes: np.ndarray) -> list[list[tuple[int, bool]]]:
    """For every box (tensor, rows, bytes) the others that it overlaps, and whether it covers them.

    A box is compared with those of its tensor that can reach it along the side that divides the tensor more. One
    number orders boxes by tensor and then along that side, so that all tensors are searched at once.
    """
    near = [_ALONE] * len(boxes)
    if not len(boxes):
        return near
    tensor = np.cumsum(np.diff(boxes[:, 0], prepend=boxes[0, 0]) != 0)
    span = int(boxes[:, 1:].max()) + 2
    base = tensor * span
    by_rows = (_starts(base + boxes[:, 1], span) >= _starts(base + boxes[:, 3], span))[tensor]
    low = np.where(by_rows, boxes[:, 1], boxes[:, 3])
    high = np.where(by_rows, boxes[:, 2], boxes[:, 4])
    widest = np.zeros(int(tensor[-1]) + 1, np.int64)
    np.maximum.at(widest, tensor, high - low)
    names = np.argsort(base + low, kind="stable")
    keys = (base + low)[names]
    begin = np.searchsorted(keys, (base + np.maximum(low - widest[tensor], -1))[names], side="right")
    until = np.searchsorted(keys, (base + high)[names], side="left")
    sides = boxes[names, 1:]
    found: dict[int, list[tuple[int, bool]]] = {}
    for owners, others in _pairs(begin, until):
        ours, theirs = sides[owners], sides[others]
        meets = (theirs[:, 0::2] < ours[:, 1::2]).all(1) & (theirs[:, 1::2] > ours[:, 0::2]).all(1)
        meets &= owners != others
        owners, others, ours, theirs = owners[meets], others[meets], ours[meets], theirs[meets]
        covers = (ours[:, 0::2] <= theirs[:, 0::2]).all(1) & (ours[:, 1::2] >= theirs[:, 1::2]).all(1)
        for owner, other, covered in zip(names[owners].tolist(), names[others].tolist(), covers.tolist()):
            found.setdefault(owner, []).append((other, covered))
    for owner, met in found.items():
        near[owner] = met
    return near


def _starts(keys: np.ndarray, span: int) -> np.ndarray:
    """How many distinct keys each tensor has, where keys are the tensor's number times `span` and a coordinate."""
    return np.bincount(np.unique(keys) // span)


def _pairs(begin: np.ndarray, until: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """All pairs (i, j) with begin[i] <= j < until[i], in order, some `_AT_ONCE` at a time."""
    counts = np.maximum(until - begin, 0)
    before = np.cumsum(counts) - counts
    cuts = np.searchsorted(before, np.arange(0, int(counts.sum()), _AT_ONCE), side="left").tolist()
    for first, end in pairwise(dict.fromkeys([*cuts, len(counts)])):
        some = counts[first:end]
        owners = np.repeat(np.arange(first, end), some)
        skipped = np.repeat(begin[first:end] - (before[first:end] - before[first]), some)
        yield owners, np.arange(len(owners)) + skipped
