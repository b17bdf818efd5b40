"""Repetition of a launch of several cores under random core schedules, whose outputs must be the same bytes.

Between rendezvous the cores of a launch run in parallel on the chip; the simulator runs one core at a time. A
core schedule says which core runs, and after which instruction another core continues; a seed draws one. The
outputs are compared, and the arguments that the kernel wrote to. The first repetition has the usual schedule,
that of a plain launch. Bytes that differ there depend on Python state, not on a schedule.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from nkw.errors import InvalidArgument, Location, NkwError
from simulate.check.evidence import Returned
from simulate.check.findings import (
    Finding,
    Severity,
    Touch,
    describe_access,
    make_finding,
    register_kind,
    suggest_barrier,
)
from simulate.check.footprint import Footprint, resolve_footprint
from simulate.memory import MemoryRegion
from simulate.run import Launch
from simulate.run.launch import LaunchRequest
from simulate.run.launcher import execute_launch
from simulate.run.machine import Issue, NeuronCore
from simulate.run.observers import Observer
from simulate.run.stream import READ, Stream

SCHEDULE = register_kind(
    "NKW-CORE-SCHEDULE",
    Severity.error,
    "The outputs of a launch are the same bytes under every schedule of its cores.",
)
REPEATED = register_kind(
    "NKW-NOT-REPEATABLE",
    Severity.error,
    "The same launch gives the same bytes twice: the kernel's Python keeps no state between launches.",
)


@dataclass(frozen=True, slots=True)
class _Use:
    """Access of shared HBM by an event of a core."""

    core: int
    event: int
    footprint: Footprint
    writes: bool


class Trace(Observer):
    """Observer that records the order in which cores issue (`order`), and their accesses of shared HBM (`uses`)."""

    sees_instructions = True

    def __init__(self) -> None:
        self.order: list[tuple[int, int]] = []
        self.uses: list[_Use] = []

    def issued(self, core: NeuronCore, issue: Issue, operands: Sequence[Any]) -> None:
        """Append (core, event) to `order`, and the accesses of shared HBM to `uses` if several cores share it."""
        plan, reads, writes = issue
        event = len(core.stream)
        self.order.append((core.index, event))
        if plan.rendezvous is None and core.rank.logical_core_size > 1:
            self.uses += [
                _Use(core.index, event, resolve_footprint(tile, plan.skip_out_of_range), writes)
                for tiles, writes in ((reads, False), (writes, True))
                for tile in tiles
                if tile.buffer is MemoryRegion.shared_hbm
            ]


class Repeatable:
    """Launch that can be repeated: copies of its arguments, and the trace of its first run."""

    def __init__(self, request: LaunchRequest) -> None:
        """Keep deep copies of the arguments of a launch that is about to begin; its observer has to fill `trace`.

        Raises:
            InvalidArgument: NKW-CHECK-ARGUMENTS. An argument cannot be copied.
        """
        self.trace = Trace()
        self._request = request
        self._copies = _copy_arguments(request.arguments)

    @property
    def arguments(self) -> Sequence[Any]:
        """Arguments of the first launch; after it, arrays contain what the kernel wrote to them."""
        return self._request.arguments

    def repeat(self, seed: int | None) -> tuple[list[np.ndarray], Trace]:
        """Launch the kernel again on copies of the arguments, under one core schedule.

        Args:
            seed: The seed of the schedule, None for the usual schedule.

        Returns:
            The arrays of its outputs, then those of its arguments; and the trace of this repetition.

        Raises:
            NkwError: The launch is refused.
        """
        arguments, trace = _copy_arguments(self._copies), Trace()
        request = replace(self._request, arguments=arguments, seed=seed, observers=(trace,))
        outputs = execute_launch(request).outputs
        return _list_arrays(outputs, arguments), trace


@dataclass(frozen=True, slots=True)
class _Difference:
    """How a repeated launch differs: `text` says it, `array` and `byte` locate the first byte that differs.

    `array` is the index among the arrays of outputs and arguments, -1 if no byte was compared. `where` is the
    line at which the repetition was refused.
    """

    text: str
    where: Location | None = None
    trace: Trace | None = None
    array: int = -1
    byte: int = 0


def find_schedule_dependence(
    call: Repeatable, launch: Launch, returned: Sequence[Returned], count: int
) -> list[Finding]:
    """Repeat a launch that has ended under random core schedules, and report outputs that depend on the schedule.

    Args:
        call: The launch with the copies of its arguments.
        launch: The launch as it ran first.
        returned: The returned tensors, rank by rank.
        count: The number of schedules, of the seeds 1 … count.

    Returns:
        One finding for each pair of lines whose order changes the outputs. If the usual schedule does not
        repeat the bytes, that finding alone. Empty if all repetitions agree.
    """
    expected = _list_arrays(launch.outputs, call.arguments)
    repeated = _compare_repetition(call, None, expected)
    if repeated is not None:
        blamed = _find_last_write(launch, returned, repeated)
        return [
            make_finding(
                REPEATED,
                f"the same launch, repeated, {repeated.text}",
                repeated.where or (blamed.where if blamed else None),
                [blamed] if blamed else [],
                hint="let the kernel depend on its arguments alone, not on Python variables that it changes",
            )
        ]
    findings: dict[object, Finding] = {}
    for seed in range(1, count + 1):
        difference = _compare_repetition(call, seed, expected)
        if difference is not None:
            finding = _report_difference(call, launch, returned, seed, difference)
            findings.setdefault((finding.where, *(access.where for access in finding.touches)), finding)
    return list(findings.values())


def _compare_repetition(call: Repeatable, seed: int | None, expected: list[np.ndarray]) -> _Difference | None:
    """Repeat the launch; return how its outputs and arguments differ from the expected arrays, None if they are equal.

    An error of the repetition counts as a difference and is not raised.
    """
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
    for number, (array, original) in enumerate(zip(seen, expected)):
        if array.shape != original.shape or array.dtype != original.dtype:
            text = (
                f"gives array {number} of its outputs and arguments as {array.shape} {array.dtype} instead of "
                f"{original.shape} {original.dtype}"
            )
            return _Difference(text, None, trace)
        offsets = np.flatnonzero(_view_bytes(array) != _view_bytes(original))
        if len(offsets):
            text = (
                f"changes {len(offsets)} bytes of array {number} of its outputs and arguments, {array.shape} "
                f"{array.dtype}, the first at byte {offsets[0]}"
            )
            return _Difference(text, None, trace, number, int(offsets[0]))
    return None


def _find_last_write(launch: Launch, returned: Sequence[Returned], seen: _Difference) -> Touch | None:
    """Return the last write to the first differing byte, None if no write of a returned tensor covers it."""
    if not 0 <= seen.array < len(returned):
        return None
    tensor = returned[seen.array]
    for stream in reversed([stream for stream in launch.streams if stream.rank == tensor.rank]):
        row, byte = divmod(seen.byte, stream.tensors[tensor.tensor].row_bytes)
        for event in reversed(range(len(stream))):
            for access in stream.accesses(event):
                if (
                    access.tensor == tensor.tensor
                    and access.mode != READ
                    and access.first_row <= row < access.end_row
                    and access.first_byte <= byte < access.end_byte
                ):
                    return describe_access(stream, event, access)
    return None


def _find_swapped(usual: Trace, random: Trace) -> tuple[_Use, _Use] | None:
    """Return two conflicting accesses of different cores that the random schedule swapped, in the usual order.

    Of several pairs it is the one that the random schedule shows first. None if it swapped no pair.
    """
    position = {issued: index for index, issued in enumerate(random.order)}
    uses = [use for use in usual.uses if (use.core, use.event) in position]
    early = sorted(range(len(uses)), key=lambda index: position[uses[index].core, uses[index].event])
    for index in early:
        late = uses[index]
        for earlier in uses[:index]:
            if (
                earlier.core != late.core
                and earlier.footprint.tensor == late.footprint.tensor
                and (earlier.writes or late.writes)
                and position[earlier.core, earlier.event] > position[late.core, late.event]
                and earlier.footprint.meets(late.footprint)
            ):
                return earlier, late
    return None


def _report_difference(
    call: Repeatable, launch: Launch, returned: Sequence[Returned], seed: int, seen: _Difference
) -> Finding:
    text = f"under the core schedule of seed {seed} the launch {seen.text}"
    pair = None if seen.trace is None else _find_swapped(call.trace, seen.trace)
    if pair is not None:
        first, second = pair
        touches = [_describe_use(launch.streams[use.core], use) for use in pair]
        blamed = touches[0] if second.writes and not first.writes else touches[1]
        name = launch.streams[first.core].tensors[first.footprint.tensor].name
        return make_finding(SCHEDULE, text, blamed.where, touches, suggest_barrier(name))
    if seen.where is not None:
        hint = "order the accesses of the two cores with nisa.core_barrier, or give each core its own part"
        return make_finding(SCHEDULE, text, seen.where, hint=hint)
    writer = _find_last_write(launch, returned, seen)
    hint = "let no core depend on Python variables that another core changes"
    return make_finding(SCHEDULE, text, writer.where if writer else None, [writer] if writer else [], hint)


def _describe_use(stream: Stream, use: _Use) -> Touch:
    access = next(
        access
        for access in stream.accesses(use.event)
        if access.tensor == use.footprint.tensor and (access.mode != READ) == use.writes
    )
    return describe_access(stream, use.event, access)


def _copy_arguments(arguments: Any) -> Any:
    try:
        return copy.deepcopy(arguments)
    except TypeError as error:
        raise InvalidArgument(
            "NKW-CHECK-ARGUMENTS",
            f"a launch cannot be repeated under other schedules, because an argument cannot be copied: {error}; pass "
            "arrays and plain values, or 0 seeds",
        ) from None


def _list_arrays(*values: Any) -> list[np.ndarray]:
    return [array for value in values for array in _iter_arrays(value)]


def _iter_arrays(value: Any) -> Iterator[np.ndarray]:
    if isinstance(value, np.ndarray):
        yield value
    elif hasattr(value, "detach") and hasattr(value, "numpy"):
        yield _copy_torch_bytes(value)
    elif isinstance(value, (tuple, list)):
        for element in value:
            yield from _iter_arrays(element)
    elif isinstance(value, dict):
        yield from _iter_arrays(list(value.values()))


def _copy_torch_bytes(tensor: Any) -> np.ndarray:
    import torch

    array: np.ndarray = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return array


def _view_bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
