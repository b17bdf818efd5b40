"""The boxes that the events of streams read and write, and which of them overlap.

Boxes enclose what an access pattern touches. Serial numbers of tensors belong to a rank, so its cores meet only in
shared HBM.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from simulate.run.stream import READ, Stream

_PAIRS_AT_ONCE = 1 << 18  # boxes that are compared together: some tens of MB
Near = tuple[tuple[int, bool], ...]
"""The other cells that overlap a cell, and whether it covers them."""


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
        self._keys = [sorted(set(owners)).index(owner) for owner in owners]
        serial = whole[:, 0] >> 2
        self._serials = int(serial.max(initial=0)) + 1
        tensor = np.repeat(self._keys, [len(table) for table in tables]).astype(np.int64)
        tensor = tensor * self._serials + serial
        tensors = len(set(owners)) * self._serials
        is_written = np.zeros(tensors, bool)
        is_written[tensor[(whole[:, 0] & 3) != READ]] = True
        written = is_written[tensor]
        cells = np.full(len(whole), -1)
        keys = np.column_stack([tensor, whole[:, 1:]])[written]
        boxes, cells[written] = _distinct(keys)
        bounds = np.cumsum([0, *map(len, tables)])
        self._cells = [cells[a:b] for a, b in pairwise(bounds.tolist())]
        self.cells = [own.tolist() for own in self._cells]
        self.near = neighbours(boxes)
        self._bounds = np.searchsorted(boxes[:, 0], np.arange(tensors + 1)).tolist()

    def accesses(self) -> tuple[list[int], list[int]]:
        """The operands in cells, of all streams: cell * 2 + whether it is written; and where those of each event begin.

        The last entry of the second list is where those of the last event end.
        """
        cells = np.concatenate([np.zeros(0, np.int64), *self._cells])
        kinds = np.concatenate([np.zeros(0, np.int64), *(np.array(own, np.int64) for own in self.kinds)])
        kept = cells >= 0
        before = np.append(0, np.cumsum(kept))
        bounds = np.cumsum([0, *map(len, self._cells)]).tolist()
        starts = [0]
        for ends, base in zip(self.ends, bounds):
            starts += before[np.array(ends, np.int64) + base].tolist()
        return (cells * 2 + (kinds != READ))[kept].tolist(), starts

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


def neighbours(boxes: np.ndarray, at_once: int = _PAIRS_AT_ONCE) -> list[Near]:
    """For every box (tensor, rows, bytes) the others that it overlaps, and whether it covers them.

    A box is compared with those of its tensor that begin within it along the side that divides the tensor more. One
    number orders boxes by tensor and then along that side, so that all tensors are searched at once. Some `at_once`
    pairs are compared together.
    """
    near: list[Near] = [()] * len(boxes)
    if not len(boxes):
        return near
    tensor = np.cumsum(np.diff(boxes[:, 0], prepend=boxes[0, 0]) != 0)
    span = int(boxes[:, 1:].max()) + 2
    base = tensor * span
    by_rows = (_starts(base + boxes[:, 1], span) >= _starts(base + boxes[:, 3], span))[tensor]
    low = base + np.where(by_rows, boxes[:, 1], boxes[:, 3])
    high = base + np.where(by_rows, boxes[:, 2], boxes[:, 4])
    names = np.argsort(low, kind="stable")
    until = np.searchsorted(low[names], high[names], side="left")
    first_row, end_row, first_byte, end_byte = boxes[names, 1:].T.copy()
    for ours, theirs in _pairs(np.arange(1, len(boxes) + 1), until, at_once):
        meets = (first_row[theirs] < end_row[ours]) & (end_row[theirs] > first_row[ours])
        meets &= (first_byte[theirs] < end_byte[ours]) & (end_byte[theirs] > first_byte[ours])
        owners = np.concatenate([ours[meets], theirs[meets]])
        others = np.concatenate([theirs[meets], ours[meets]])
        order = np.lexsort((others, owners))
        owners, others = owners[order], others[order]
        covers = (first_row[owners] <= first_row[others]) & (end_row[owners] >= end_row[others])
        covers &= (first_byte[owners] <= first_byte[others]) & (end_byte[owners] >= end_byte[others])
        # Tuples of numbers, unlike lists, do not burden the garbage collector.
        pairs = list(zip(names[others].tolist(), covers.tolist()))
        cuts = np.flatnonzero(np.diff(owners, prepend=-1)).tolist()
        for owner, first, end in zip(names[owners[cuts]].tolist(), cuts, [*cuts[1:], len(pairs)]):
            near[owner] += tuple(pairs[first:end])
    return near


def _starts(keys: np.ndarray, span: int) -> np.ndarray:
    """How many distinct keys each tensor has, where keys are the tensor's number times `span` and a coordinate."""
    return np.bincount(np.unique(keys) // span)


def _pairs(begin: np.ndarray, until: np.ndarray, at_once: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """All pairs (i, j) with begin[i] <= j < until[i], in order, some `at_once` at a time."""
    counts = np.maximum(until - begin, 0)
    before = np.cumsum(counts) - counts
    cuts = np.searchsorted(before, np.arange(0, int(counts.sum()), at_once), side="left").tolist()
    for first, end in pairwise(dict.fromkeys([*cuts, len(counts)])):
        some = counts[first:end]
        owners = np.repeat(np.arange(first, end), some)
        skipped = np.repeat(begin[first:end] - (before[first:end] - before[first]), some)
        yield owners, np.arange(len(owners)) + skipped
