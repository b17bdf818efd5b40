"""Repeats a launch of several cores under random core schedules, and compares the outputs byte for byte.

Between rendezvous the cores of a launch run in parallel on the chip; the simulator runs one core at a time. A seed
decides which core runs, and after which instruction another one takes over. The outputs are compared, and the arguments
that the kernel wrote to. The first repetition has the usual schedule: bytes that differ there depend on no schedule.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from nkw.errors import InvalidArgument, Location, NkwError
from simulate.check.evidence import Returned
from simulate.check.findings import Finding, Severity, Touch, barrier_between, found, kind, touch
from simulate.check.footprint import Footprint, footprint
from simulate.memory import MemoryRegion
from simulate.run import Launch
from simulate.run.launch import LaunchRequest
from simulate.run.launcher import execute_launch
from simulate.run.machine import Issue, NeuronCore
from simulate.run.observers import Observer
from simulate.run.stream import READ, Stream

SCHEDULE = kind(
    "NKW-CORE-SCHEDULE",
    Severity.error,
    "The outputs of a launch are the same bytes under every schedule of its cores.",
)
REPEATED = kind(
    "NKW-NOT-REPEATABLE",
    Severity.error,
    "The same launch gives the same bytes twice: the kernel's Python keeps no state between launches.",
)


@dataclass(frozen=True, slots=True)
class _Use:
    """One access of shared HBM by one event of one core."""

    core: int
    event: int
    where: Footprint
    writes: bool


class Trace(Observer):
    """An observer that records the order in which cores issue, and their accesses of shared HBM."""

    sees_instructions = True

    def __init__(self) -> None:
        self.order: list[tuple[int, int]] = []
        self.uses: list[_Use] = []

    def issued(self, core: NeuronCore, issue: Issue, operands: Sequence[Any]) -> None:
        """Record the event and its accesses of shared HBM."""
        plan, reads, writes = issue
        event = len(core.stream)
        self.order.append((core.index, event))
        if plan.rendezvous is None and core.rank.logical_core_size > 1:
            self.uses += [
                _Use(core.index, event, footprint(tile, plan.skip_out_of_range), writes)
                for tiles, writes in ((reads, False), (writes, True))
                for tile in tiles
                if tile.buffer is MemoryRegion.shared_hbm
            ]


class Repeatable:
    """A launch that can be repeated: copies of its arguments, and the trace of its first run."""

    def __init__(self, request: LaunchRequest) -> None:
        """Raises InvalidArgument for an argument that cannot be copied."""
        self.trace = Trace()
        self._request = request
        self._kept = _copied(request.arguments)

    @property
    def given(self) -> Sequence[Any]:
        """The arguments of the first launch, as the kernel left them."""
        return self._request.arguments

    def repeat(self, seed: int | None) -> tuple[list[np.ndarray], Trace]:
        """Repeat the launch under the schedule of a seed, None for the usual one.

        Returns the arrays of its outputs and arguments, and the trace.
        """
        arguments, trace = _copied(self._kept), Trace()
        request = replace(self._request, arguments=arguments, seed=seed, observers=(trace,))
        outputs = execute_launch(request).outputs
        return _arrays(outputs, arguments), trace


@dataclass(frozen=True, slots=True)
class _Difference:
    """How a repeated launch differs; `array` and `byte` locate the first byte that differs."""

    text: str
    where: Location | None = None
    trace: Trace | None = None
    array: int = -1
    byte: int = 0


def vary(call: Repeatable, launch: Launch, returned: Sequence[Returned], count: int) -> list[Finding]:
    """Repeat a launch that has ended under the schedules of seeds 1 … `count`; one finding per pair of lines.

    `returned` names the tensors that were returned, rank by rank.
    """
    expected = _arrays(launch.outputs, call.given)
    repeated = _try(call, None, expected)
    if repeated is not None:
        blamed = _last_write(launch, returned, repeated)
        return [
            found(
                REPEATED,
                f"the same launch, repeated, {repeated.text}",
                repeated.where or (blamed.where if blamed else None),
                [blamed] if blamed else [],
                hint="let the kernel depend on its arguments alone, not on Python variables that it changes",
            )
        ]
    findings: dict[object, Finding] = {}
    for seed in range(1, count + 1):
        other = _try(call, seed, expected)
        if other is not None:
            finding = _finding(call, launch, returned, seed, other)
            findings.setdefault((finding.where, *(each.where for each in finding.touches)), finding)
    return list(findings.values())


def _try(call: Repeatable, seed: int | None, expected: list[np.ndarray]) -> _Difference | None:
    """Repeat the launch; returns how it differs, or None."""
    try:
        seen, trace = call.repeat(seed)
    except NkwError as error:
        return _Difference(f"is refused: {error.message}", error.where)
    except Exception as error:
        return _Difference(f"raises {type(error).__name__}: {error}")
    if len(seen) != len(expected):
        return _Difference(
            f"has {len(seen)} arrays as outputs and arguments instead of {len(expected)}", None, trace
        )
    for number, (one, other) in enumerate(zip(seen, expected)):
        if one.shape != other.shape or one.dtype != other.dtype:
            text = (
                f"gives array {number} of its outputs and arguments as {one.shape} {one.dtype} instead of "
                f"{other.shape} {other.dtype}"
            )
            return _Difference(text, None, trace)
        places = np.flatnonzero(_bytes(one) != _bytes(other))
        if len(places):
            text = (
                f"changes {len(places)} bytes of array {number} of its outputs and arguments, {one.shape} "
                f"{one.dtype}, the first at byte {places[0]}"
            )
            return _Difference(text, None, trace, number, int(places[0]))
    return None


def _last_write(launch: Launch, returned: Sequence[Returned], seen: _Difference) -> Touch | None:
    """The last write of the first differing byte, if a returned tensor holds that byte."""
    if not 0 <= seen.array < len(returned):
        return None
    tensor = returned[seen.array]
    for stream in reversed([each for each in launch.streams if each.rank == tensor.rank]):
        row, byte = divmod(seen.byte, stream.tensors[tensor.tensor].row_bytes)
        for event in reversed(range(len(stream))):
            for access in stream.accesses(event):
                if (
                    access.tensor == tensor.tensor
                    and access.kind != READ
                    and access.first_row <= row < access.end_row
                    and access.first_byte <= byte < access.end_byte
                ):
                    return touch(stream, event, access)
    return None


def _swapped(usual: Trace, drawn: Trace) -> tuple[_Use, _Use] | None:
    """The first pair of conflicting accesses of two cores that the drawn schedule swapped, in the usual order."""
    place = {issued: at for at, issued in enumerate(drawn.order)}
    uses = [use for use in usual.uses if (use.core, use.event) in place]
    early = sorted(range(len(uses)), key=lambda at: place[uses[at].core, uses[at].event])
    for at in early:
        late = uses[at]
        for one in uses[:at]:
            if (
                one.core != late.core
                and one.where.tensor == late.where.tensor
                and (one.writes or late.writes)
                and place[one.core, one.event] > place[late.core, late.event]
                and one.where.meets(late.where)
            ):
                return one, late
    return None


def _finding(
    call: Repeatable, launch: Launch, returned: Sequence[Returned], seed: int, seen: _Difference
) -> Finding:
    text = f"under the core schedule of seed {seed} the launch {seen.text}"
    pair = None if seen.trace is None else _swapped(call.trace, seen.trace)
    if pair is not None:
        one, other = pair
        touches = [_touch(launch.streams[use.core], use) for use in pair]
        blamed = touches[0] if other.writes and not one.writes else touches[1]
        name = launch.streams[one.core].tensors[one.where.tensor].name
        return found(SCHEDULE, text, blamed.where, touches, barrier_between(name))
    if seen.where is not None:
        hint = "order the accesses of the two cores with nisa.core_barrier, or give each core its own part"
        return found(SCHEDULE, text, seen.where, hint=hint)
    writer = _last_write(launch, returned, seen)
    hint = "let no core depend on Python variables that another core changes"
    return found(SCHEDULE, text, writer.where if writer else None, [writer] if writer else [], hint)


def _touch(stream: Stream, use: _Use) -> Touch:
    access = next(
        access
        for access in stream.accesses(use.event)
        if access.tensor == use.where.tensor and (access.kind != READ) == use.writes
    )
    return touch(stream, use.event, access)


def _copied(arguments: Any) -> Any:
    try:
        return copy.deepcopy(arguments)
    except TypeError as error:
        raise InvalidArgument(
            "NKW-CHECK-ARGUMENTS",
            f"a launch cannot be repeated under other schedules, because an argument cannot be copied: {error}; pass "
            "arrays and plain values, or 0 seeds",
        ) from None


def _arrays(*values: Any) -> list[np.ndarray]:
    return [array for value in values for array in _each(value)]


def _each(value: Any) -> Iterator[np.ndarray]:
    if isinstance(value, np.ndarray):
        yield value
    elif hasattr(value, "detach") and hasattr(value, "numpy"):
        yield _torch_bytes(value)
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _each(part)
    elif isinstance(value, dict):
        yield from _each(list(value.values()))


def _torch_bytes(tensor: Any) -> np.ndarray:
    import torch

    held: np.ndarray = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return held


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
