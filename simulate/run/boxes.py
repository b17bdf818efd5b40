"""Boxes that the events of streams read and write, and which of them overlap.

A box is a range of rows times a range of bytes in a tensor: rows are partitions on chip, and all dims but the last in
HBM. It encloses what an access pattern touches. A cell is the index of a distinct box. Serial numbers of tensors
belong to a rank, so cores of different ranks share no tensor; the cores of a rank share shared HBM only.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from simulate.run.stream import READ, Stream

_PAIRS_AT_ONCE = 1 << 18
"""Number of pairs of boxes that are compared together, which takes some tens of MB."""
Near = tuple[tuple[int, bool], ...]
"""Cells that overlap a cell, each with whether the cell covers it."""


class Boxes:
    """Distinct boxes of all streams, numbered as cells, and which cells overlap.

    `cells[stream]` and `access_kinds[stream]` have one entry for each operand of the stream's events, in order;
    `ends[stream]` has the end of each event's operands. A cell is -1 for operands in tensors that no event writes,
    since they order nothing. An access kind is READ, WRITE or ACCUMULATE. `near[cell]` has the other cells that
    overlap a cell, each with whether `cell` covers it.
    """

    def __init__(self, streams: tuple[Stream, ...], apart: bool = False) -> None:
        """Find the distinct boxes of streams and their overlaps.

        Args:
            streams: The streams.
            apart: Whether every core has tensors of its own, so that boxes of different cores never overlap;
                otherwise cores of one rank share the tensor with one serial number.
        """
        tables = [np.frombuffer(stream.rows, np.int64).reshape(-1, 5) for stream in streams]
        self.access_kinds = [(table[:, 0] & 3).tolist() for table in tables]
        self.ends = [
            (np.frombuffer(stream.row_ends, np.uint64) // 5).astype(np.int64).tolist() for stream in streams
        ]
        operand_table = np.concatenate(tables) if tables else np.zeros((0, 5), np.int64)
        owners = list(range(len(streams))) if apart else [stream.rank for stream in streams]
        self._keys = [sorted(set(owners)).index(owner) for owner in owners]
        serial = operand_table[:, 0] >> 2
        self._serials = int(serial.max(initial=0)) + 1
        tensor = np.repeat(self._keys, [len(table) for table in tables]).astype(np.int64)
        tensor = tensor * self._serials + serial
        tensors = len(set(owners)) * self._serials
        is_written = np.zeros(tensors, bool)
        is_written[tensor[(operand_table[:, 0] & 3) != READ]] = True
        written = is_written[tensor]
        cells = np.full(len(operand_table), -1)
        keys = np.column_stack([tensor, operand_table[:, 1:]])[written]
        boxes, cells[written] = _unique_rows(keys)
        bounds = np.cumsum([0, *map(len, tables)])
        self._cells = [cells[a:b] for a, b in pairwise(bounds.tolist())]
        self.cells = [stream_cells.tolist() for stream_cells in self._cells]
        self.near = find_overlaps(boxes)
        self._bounds = np.searchsorted(boxes[:, 0], np.arange(tensors + 1)).tolist()

    def accesses(self) -> tuple[list[int], list[int]]:
        """Return the cells that the events of all streams access, and where the cells of each event begin.

        Returns:
            For each operand with a cell, stream by stream, cell * 2 + 1 if it is written (or accumulated) and cell *
            2 if it is read; and the start of each event's entries in that list, followed by the list's length.
        """
        cells = np.concatenate([np.zeros(0, np.int64), *self._cells])
        access_kinds = np.concatenate(
            [np.zeros(0, np.int64), *(np.array(column, np.int64) for column in self.access_kinds)]
        )
        kept = cells >= 0
        before = np.append(0, np.cumsum(kept))
        bounds = np.cumsum([0, *map(len, self._cells)]).tolist()
        starts = [0]
        for ends, base in zip(self.ends, bounds):
            starts += before[np.array(ends, np.int64) + base].tolist()
        return (cells * 2 + (access_kinds != READ))[kept].tolist(), starts

    def cells_in(self, stream: int, serial: int) -> range:
        """Return the cells in one tensor.

        Args:
            stream: The index of a stream that uses the tensor.
            serial: The serial number of the tensor.
        """
        key = self._keys[stream] * self._serials + serial
        return range(self._bounds[key], self._bounds[key + 1])


def _unique_rows(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the sorted distinct rows and, for every row, its index among them.

    The same as `np.unique(rows, axis=0, return_inverse=True)`, and faster.
    """
    if not len(rows):
        return rows, np.zeros(0, np.int64)
    order = np.lexsort(rows.T[::-1])
    ordered = rows[order]
    first = np.ones(len(rows), bool)
    first[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    numbers = np.empty(len(rows), np.int64)
    numbers[order] = np.cumsum(first) - 1
    return ordered[first], numbers


def find_overlaps(boxes: np.ndarray, at_once: int = _PAIRS_AT_ONCE) -> list[Near]:
    """Return, for every box, the other boxes that it overlaps, each with whether it covers them.

    A box is compared with the boxes of its tensor that begin within it, along the side with more distinct starts in
    the tensor. A single sort key orders boxes by tensor and then along that side, so that all tensors are searched
    together.

    Args:
        boxes: int64 [boxes, 5]: tensor, first row, end row, first byte, end byte; sorted by tensor. Ends are
            exclusive.
        at_once: The number of pairs that are compared together.

    Returns:
        A tuple of (index of the overlapped box, whether this box covers it) for each box.
    """
    near: list[Near] = [()] * len(boxes)
    if not len(boxes):
        return near
    tensor = np.cumsum(np.diff(boxes[:, 0], prepend=boxes[0, 0]) != 0)
    span = int(boxes[:, 1:].max()) + 2
    base = tensor * span
    by_rows = (_count_distinct(base + boxes[:, 1], span) >= _count_distinct(base + boxes[:, 3], span))[tensor]
    low = base + np.where(by_rows, boxes[:, 1], boxes[:, 3])
    high = base + np.where(by_rows, boxes[:, 2], boxes[:, 4])
    names = np.argsort(low, kind="stable")
    until = np.searchsorted(low[names], high[names], side="left")
    first_row, end_row, first_byte, end_byte = boxes[names, 1:].T.copy()
    for ours, theirs in _yield_pairs(np.arange(1, len(boxes) + 1), until, at_once):
        meets = (first_row[theirs] < end_row[ours]) & (end_row[theirs] > first_row[ours])
        meets &= (first_byte[theirs] < end_byte[ours]) & (end_byte[theirs] > first_byte[ours])
        owners = np.concatenate([ours[meets], theirs[meets]])
        overlapped = np.concatenate([theirs[meets], ours[meets]])
        order = np.lexsort((overlapped, owners))
        owners, overlapped = owners[order], overlapped[order]
        covers = (first_row[owners] <= first_row[overlapped]) & (end_row[owners] >= end_row[overlapped])
        covers &= (first_byte[owners] <= first_byte[overlapped]) & (end_byte[owners] >= end_byte[overlapped])
        # The garbage collector does not track tuples of numbers, unlike lists.
        pairs = list(zip(names[overlapped].tolist(), covers.tolist()))
        cuts = np.flatnonzero(np.diff(owners, prepend=-1)).tolist()
        for owner, first, end in zip(names[owners[cuts]].tolist(), cuts, [*cuts[1:], len(pairs)]):
            near[owner] += tuple(pairs[first:end])
    return near


def _count_distinct(keys: np.ndarray, span: int) -> np.ndarray:
    """Return how many distinct keys each tensor has.

    Args:
        keys: tensor * span + coordinate, for each box.
        span: A number larger than every coordinate.
    """
    return np.bincount(np.unique(keys) // span)


def _yield_pairs(
    begin: np.ndarray, until: np.ndarray, at_once: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield all pairs (i, j) with begin[i] <= j < until[i] as two arrays, in order, about `at_once` pairs at a time."""
    counts = np.maximum(until - begin, 0)
    before = np.cumsum(counts) - counts
    cuts = np.searchsorted(before, np.arange(0, int(counts.sum()), at_once), side="left").tolist()
    for first, end in pairwise(dict.fromkeys([*cuts, len(counts)])):
        some = counts[first:end]
        owners = np.repeat(np.arange(first, end), some)
        skipped = np.repeat(begin[first:end] - (before[first:end] - before[first]), some)
        yield owners, np.arange(len(owners)) + skipped
