"""The boxes that the events of streams read and write, and which of them overlap.

Boxes enclose what an access pattern touches. Serial numbers of tensors belong to a rank, so its cores meet only in
shared HBM.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from simulate.run.stream import READ, Stream


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
        tensor = rank_keys * (int(serial.max(initial=0)) + 1) + serial
        written = np.isin(tensor, np.unique(tensor[(whole[:, 0] & 3) != READ]))
        cells = np.full(len(whole), -1)
        keys = np.column_stack([tensor, whole[:, 1:]])[written]
        boxes, cells[written] = _distinct(keys)
        bounds = np.cumsum([0, *map(len, tables)])
        self.cells = [cells[a:b].tolist() for a, b in pairwise(bounds.tolist())]
        self.near = _neighbours(boxes)


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
    """For every box (tensor, rows, bytes) the others that it overlaps, and whether it covers them."""
    near: list[list[tuple[int, bool]]] = [[] for _ in boxes]
    if not len(boxes):
        return near
    bounds = np.flatnonzero(np.diff(boxes[:, 0], prepend=-1)).tolist() + [len(boxes)]
    for start, end in pairwise(bounds):
        if end - start > 1:
            _overlaps(boxes[start:end, 1:], start, near)
    return near


def _overlaps(boxes: np.ndarray, start: int, near: list[list[tuple[int, bool]]]) -> None:
    """Compare the boxes of one tensor, each with those that can reach it along its more divided side."""
    low, high = (0, 1) if len(np.unique(boxes[:, 0])) >= len(np.unique(boxes[:, 2])) else (2, 3)
    order = np.argsort(boxes[:, low], kind="stable")
    boxes = boxes[order]
    widest = int((boxes[:, high] - boxes[:, low]).max())
    begin = np.searchsorted(boxes[:, low], boxes[:, low] - widest, side="right").tolist()
    until = np.searchsorted(boxes[:, low], boxes[:, high], side="left").tolist()
    names = (order + start).tolist()
    for i, (first_row, end_row, first_byte, end_byte) in enumerate(boxes.tolist()):
        there = boxes[begin[i] : until[i]]
        meets = (
            (there[:, 0] < end_row)
            & (there[:, 1] > first_row)
            & (there[:, 2] < end_byte)
            & (there[:, 3] > first_byte)
        )
        for j in np.flatnonzero(meets).tolist():
            if begin[i] + j == i:
                continue
            row_low, row_high, byte_low, byte_high = there[j].tolist()
            covers = (
                first_row <= row_low
                and end_row >= row_high
                and first_byte <= byte_low
                and end_byte >= byte_high
            )
            near[names[i]].append((names[begin[i] + j], covers))
