"""Repetition of a launch in other orders that its dependences allow, whose outputs must be the same bytes.

The engines of a core run in parallel. The compiler orders instructions that touch the same bytes of one
tensor or the same state of an engine. The cores of a rank wait for each other only where the kernel says so.
Every order that keeps these dependences is legal on the chip, and a correct kernel computes the same bytes in
all of them. A step is one instruction, or a rendezvous with all its members. Orders are drawn with the seeds
0, 1, …; seed 0 always takes the ready step that was issued last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nkw.errors import NkwError
from simulate.check.findings import (
    Finding,
    Severity,
    describe_access,
    make_finding,
    register_kind,
    suggest_barrier,
)
from simulate.check.precedence import find_predecessors, order_randomly
from simulate.check.reorder import EventOfCore, ReorderedLaunch
from simulate.memory import NkiTensor, Storage
from simulate.run.stream import READ, Access, Stream

ORDER = register_kind(
    "NKW-ORDER",
    Severity.error,
    "The outputs are the same bytes in every order of the instructions that their dependences allow.",
)


def find_order_dependence(launch: ReorderedLaunch, count: int) -> list[Finding]:
    """Execute a launch that has ended in `count` legal orders of its steps, and compare the bytes of its results.

    Returns:
        One finding for each pair of accesses that nothing orders and whose order changes the outputs, or
        makes an order be refused. Empty if all orders agree.
    """
    predecessor_steps = find_predecessors(launch)
    expected = launch.run(range(len(launch)))
    findings: dict[tuple[object, ...], Finding] = {}
    for number in range(count):
        order = order_randomly(predecessor_steps, number)
        try:
            seen = launch.run(order)
        except NkwError as error:
            text = f"is refused: {error.message}"
        else:
            if seen == expected:
                continue
            text = f"changes {describe_difference(launch, seen, expected)}"
        pair = _find_swapped(launch, order)
        finding = _report_swap(launch, f"legal order {number + 1} of {count} {text}", pair)
        lines = tuple((use.member.core, _get_line(launch, use), use.writes) for use in pair or ())
        findings.setdefault(lines, finding)
    return list(findings.values())


def describe_difference(launch: ReorderedLaunch, seen: list[bytes], expected: list[bytes]) -> str:
    """Return a clause for a message: how many bytes of the first differing output differ, and where the first one is.

    Args:
        launch: The launch, which names the outputs.
        seen: The bytes of each output in one order; at least one output must differ.
        expected: The bytes of each output in the launch's own order.
    """
    index = next(i for i, pair in enumerate(zip(seen, expected)) if pair[0] != pair[1])
    stream, storage = launch.results[index]
    record = stream.tensors[storage.serial]
    seen_bytes, expected_bytes = (np.frombuffer(data, np.uint8) for data in (seen[index], expected[index]))
    offsets = np.flatnonzero(seen_bytes != expected_bytes)
    row, byte = divmod(int(offsets[0]), record.row_bytes)
    return (
        f"{len(offsets)} bytes of {record.name} {record.shape} {record.dtype} of rank {stream.rank}, "
        f"the first in row {row} at byte {byte}"
    )


@dataclass(frozen=True)
class _Use:
    """Access of a tensor by one core in a step, inside the host addresses from `first` to `end`."""

    step: int
    member: EventOfCore
    tile: NkiTensor
    writes: bool
    first: int
    end: int

    def bytes(self) -> np.ndarray:
        """Return the distinct host addresses that are touched, int64; of the whole tensor for a run-time index."""
        if self.tile.dynamic is not None:
            return np.arange(self.first, self.end)
        width = self.tile.dtype.storage.itemsize
        addresses = np.array([_get_address(self.tile.storage) + self.tile.offset * width])
        for extent, stride in zip(self.tile.shape, self.tile.strides):
            addresses = np.add.outer(addresses, np.arange(extent) * stride * width).reshape(-1)
        return np.unique(np.add.outer(addresses, np.arange(width)))


def _find_swapped(launch: ReorderedLaunch, order: Sequence[int]) -> tuple[_Use, _Use] | None:
    """Return the first pair of conflicting accesses that the order swapped, the earlier issued access first.

    Accesses conflict if they share a byte and one of them writes. None if the order swapped no such pair.
    """
    uses = _find_uses(launch)
    steps = np.array([use.step for use in uses])
    writes = np.array([use.writes for use in uses])
    first = np.array([use.first for use in uses])
    end = np.array([use.end for use in uses])
    position = np.empty(len(order), np.int64)
    position[list(order)] = np.arange(len(order))
    now = position[steps]
    for use in np.argsort(now, kind="stable").tolist():
        overtaken = (steps < steps[use]) & (now > now[use]) & (first < end[use]) & (first[use] < end)
        overtaken &= writes | writes[use]
        for earlier in np.flatnonzero(overtaken).tolist():
            if np.intersect1d(uses[use].bytes(), uses[earlier].bytes(), assume_unique=True).size:
                return uses[earlier], uses[use]
    return None


def _find_uses(launch: ReorderedLaunch) -> list[_Use]:
    uses = []
    for step, members in enumerate(launch.steps):
        for member in members:
            reads, written = launch.tensors(member)
            for tile, writes in [(tile, False) for tile in reads] + [(tile, True) for tile in written]:
                start, width = _get_address(tile.storage), tile.dtype.storage.itemsize
                if tile.dynamic is not None:
                    first, end = start, start + tile.storage.nbytes
                else:
                    reach = sum((extent - 1) * stride for extent, stride in zip(tile.shape, tile.strides))
                    first = start + tile.offset * width
                    end = first + (reach + 1) * width
                uses.append(_Use(step, member, tile, writes, first, end))
    return uses


def _report_swap(launch: ReorderedLaunch, text: str, pair: tuple[_Use, _Use] | None) -> Finding:
    if pair is None:
        return make_finding(ORDER, text, None)
    early, late = pair
    streams = launch.streams
    blamed = early if late.writes and not early.writes else late
    return make_finding(
        ORDER,
        text,
        streams[blamed.member.core].event(blamed.member.event).where,
        [
            describe_access(
                streams[use.member.core], use.member.event, _find_access(streams[use.member.core], use)
            )
            for use in pair
        ],
        hint=_choose_hint(launch, early, late),
    )


def _choose_hint(launch: ReorderedLaunch, early: _Use, late: _Use) -> str:
    names = [launch.streams[use.member.core].tensors[use.tile.storage.serial].name for use in (early, late)]
    if early.tile.storage is not late.tile.storage:
        return f"{names[0]} and {names[1]} share memory of the host; pass arrays that share none"
    if early.member.core != late.member.core:
        return suggest_barrier(names[0])
    return "this is a fault of the simulator, whose dependences miss the pair; please report it"


def _find_access(stream: Stream, use: _Use) -> Access:
    return next(
        access
        for access in stream.accesses(use.member.event)
        if access.tensor == use.tile.storage.serial and (access.mode != READ) == use.writes
    )


def _get_line(launch: ReorderedLaunch, use: _Use) -> int:
    return launch.streams[use.member.core].line_ids[use.member.event]


def _get_address(storage: Storage) -> int:
    address: int = storage.uncounted_array.__array_interface__["data"][0]
    return address
