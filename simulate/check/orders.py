"""Executes a launch again in other orders that its dependences allow, and compares the outputs byte for byte.

The engines of a core run in parallel. The compiler orders instructions that touch the same bytes of one tensor or the
same state of an engine. The cores of a rank wait for each other only where the kernel says so. Every order that keeps
these dependences is legal on the chip, and a correct kernel computes the same bytes in all of them. Orders are drawn
from fixed seeds; the first order always takes, of the steps that may come next, the one issued last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nkw.errors import NkwError
from simulate.check.findings import Finding, Severity, barrier_between, found, kind, touch
from simulate.check.precedence import draw, predecessors
from simulate.check.reorder import EventOfCore, ReorderedLaunch
from simulate.memory import NkiTensor, Storage
from simulate.run.stream import READ, Access, Stream

ORDER = kind(
    "NKW-ORDER",
    Severity.error,
    "The outputs are the same bytes in every order of the instructions that their dependences allow.",
)


def vary(launch: ReorderedLaunch, count: int) -> list[Finding]:
    """Execute a launch that has ended in `count` legal orders; one finding per pair of lines that nothing orders."""
    before = predecessors(launch)
    expected = launch.run(range(len(launch)))
    findings: dict[tuple[object, ...], Finding] = {}
    for number in range(count):
        order = draw(before, number)
        try:
            seen = launch.run(order)
        except NkwError as error:
            text = f"is refused: {error.message}"
        else:
            if seen == expected:
                continue
            text = f"changes {difference(launch, seen, expected)}"
        pair = _unordered(launch, order)
        finding = _finding(launch, f"legal order {number + 1} of {count} {text}", pair)
        lines = tuple((each.part.core, _line(launch, each), each.writes) for each in pair or ())
        findings.setdefault(lines, finding)
    return list(findings.values())


def difference(launch: ReorderedLaunch, seen: list[bytes], expected: list[bytes]) -> str:
    """The number of differing bytes in the first result that differs, and the place of the first one."""
    at = next(at for at, pair in enumerate(zip(seen, expected)) if pair[0] != pair[1])
    stream, storage = launch.results[at]
    record = stream.tensors[storage.serial]
    one, other = (np.frombuffer(data, np.uint8) for data in (seen[at], expected[at]))
    places = np.flatnonzero(one != other)
    row, byte = divmod(int(places[0]), record.row_bytes)
    return (
        f"{len(places)} bytes of {record.name} {record.shape} {record.dtype} of rank {stream.rank}, "
        f"the first in row {row} at byte {byte}"
    )


@dataclass(frozen=True)
class _Use:
    """One access of one core in a step, and the range of host addresses that contains it."""

    step: int
    part: EventOfCore
    tile: NkiTensor
    writes: bool
    first: int
    end: int

    def bytes(self) -> np.ndarray:
        """The host addresses that are touched, each once; with a run-time index, those of the whole tensor."""
        if self.tile.dynamic is not None:
            return np.arange(self.first, self.end)
        width = self.tile.dtype.storage.itemsize
        found = np.array([_address(self.tile.storage) + self.tile.offset * width])
        for extent, stride in zip(self.tile.shape, self.tile.strides):
            found = np.add.outer(found, np.arange(extent) * stride * width).reshape(-1)
        return np.unique(np.add.outer(found, np.arange(width)))


def _unordered(launch: ReorderedLaunch, order: Sequence[int]) -> tuple[_Use, _Use] | None:
    """The first pair of conflicting accesses that the order swapped, the one that was issued earlier first."""
    uses = _uses(launch)
    steps = np.array([use.step for use in uses])
    writes = np.array([use.writes for use in uses])
    first = np.array([use.first for use in uses])
    end = np.array([use.end for use in uses])
    place = np.empty(len(order), np.int64)
    place[list(order)] = np.arange(len(order))
    now = place[steps]
    for at in np.argsort(now, kind="stable").tolist():
        overtaken = (steps < steps[at]) & (now > now[at]) & (first < end[at]) & (first[at] < end)
        overtaken &= writes | writes[at]
        for other in np.flatnonzero(overtaken).tolist():
            if np.intersect1d(uses[at].bytes(), uses[other].bytes(), assume_unique=True).size:
                return uses[other], uses[at]
    return None


def _uses(launch: ReorderedLaunch) -> list[_Use]:
    found_uses = []
    for step, parts in enumerate(launch.steps):
        for part in parts:
            reads, written = launch.tensors(part)
            for tile, writes in [(tile, False) for tile in reads] + [(tile, True) for tile in written]:
                start, width = _address(tile.storage), tile.dtype.storage.itemsize
                if tile.dynamic is not None:
                    first, end = start, start + tile.storage.nbytes
                else:
                    reach = sum((extent - 1) * stride for extent, stride in zip(tile.shape, tile.strides))
                    first = start + tile.offset * width
                    end = first + (reach + 1) * width
                found_uses.append(_Use(step, part, tile, writes, first, end))
    return found_uses


def _finding(launch: ReorderedLaunch, text: str, pair: tuple[_Use, _Use] | None) -> Finding:
    if pair is None:
        return found(ORDER, text, None)
    one, other = pair
    streams = launch.streams
    blamed = one if other.writes and not one.writes else other
    return found(
        ORDER,
        text,
        streams[blamed.part.core].event(blamed.part.event).where,
        [
            touch(streams[each.part.core], each.part.event, _access(streams[each.part.core], each))
            for each in pair
        ],
        hint=_hint(launch, one, other),
    )


def _hint(launch: ReorderedLaunch, one: _Use, other: _Use) -> str:
    names = [launch.streams[each.part.core].tensors[each.tile.storage.serial].name for each in (one, other)]
    if one.tile.storage is not other.tile.storage:
        return f"{names[0]} and {names[1]} share memory of the host; pass arrays that share none"
    if one.part.core != other.part.core:
        return barrier_between(names[0])
    return "this is a fault of the simulator, whose dependences miss the pair; please report it"


def _access(stream: Stream, use: _Use) -> Access:
    return next(
        access
        for access in stream.accesses(use.part.event)
        if access.tensor == use.tile.storage.serial and (access.kind != READ) == use.writes
    )


def _line(launch: ReorderedLaunch, use: _Use) -> int:
    return launch.streams[use.part.core].line_ids[use.part.event]


def _address(storage: Storage) -> int:
    address: int = storage.uncounted_array.__array_interface__["data"][0]
    return address
