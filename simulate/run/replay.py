"""Replay: a launch that repeats an already checked one runs its recorded plans on new data, without planning.

What an eager launch checked, for a kernel, its surroundings, shapes, dtypes and static arguments, holds for every
launch of the same kind, because an NKI kernel's instructions do not depend on data. So the plans of its
instructions are kept and carried out again: the same numpy calls on the same simulated memory, hence the same bytes.
There is no planning, no validity and no stream; the recorded stream stands for the new launch as well.

A launch is not kept, and says why, if what it does may depend on data: registers that steer a loop, values that the
kernel's Python looked at, bytes whose being written depends on data.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from simulate.errors import Location
from simulate.isa.plan import Domain, Meeting, Plan, State
from simulate.memory import NkiTensor, Storage
from simulate.run.arena import ARENA, Tiles
from simulate.run.carry_out import accumulated, gather, put
from simulate.run.fingerprint import NotFixed, Watch, static_key
from simulate.run.processes import Processes

Arguments = Sequence[tuple[tuple[Any, ...], dict[str, Any]]]
Recorded = list[tuple[Plan, Any]]

_REPLAYED = Location("", 0, "a replayed launch")


@dataclass
class ReplayReport:
    """How often programs were replayed, recorded and dropped, and why launches could not be replayed."""

    hits: int = 0
    recorded: int = 0
    dropped: int = 0
    refusals: dict[str, int] = field(default_factory=dict)

    def refuse(self, reason: str) -> None:
        """Count a launch that cannot be replayed."""
        self.refusals[reason] = self.refusals.get(reason, 0) + 1


class _External:
    """Storage whose bytes are another array's in every launch, with every view that the plans take of it."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.views: list[NkiTensor] = []

    def bind(self, data: np.ndarray) -> None:
        """Let the plans work on `data`; nothing happens if they do already."""
        storage = self.storage
        if storage.host is data:
            return
        storage.host = data
        storage.array = data.reshape(-1).view(np.uint8)
        storage.float_views.clear()
        for view in self.views:
            view.forget_array()


class Program:
    """The recorded plans of every rank of one launch, and how its arguments and results hang on them."""

    def __init__(
        self, plans: Sequence[Recorded], inputs: Sequence[Sequence[Storage]], returned: Sequence[Any]
    ) -> None:
        external: dict[int, _External] = {}
        for storage in (s for rank in (*inputs, *map(_storages, returned)) for s in rank):
            external.setdefault(id(storage), _External(storage))
        for recorded in plans:
            for plan, _ in recorded:
                for tile in (*plan.reads, *plan.writes):
                    if id(tile.storage) in external:
                        external[id(tile.storage)].views.append(tile)
        self._plans = [list(recorded) for recorded in plans]
        self._inputs = [[external[id(storage)] for storage in rank] for rank in inputs]
        self._tiles = Tiles([[plan for plan, _ in recorded] for recorded in plans])
        given = {id(storage) for rank in inputs for storage in rank}
        self._results = [each for key, each in external.items() if key not in given]
        self._returned = list(returned)

    def run(self, arrays: Sequence[Sequence[np.ndarray]], elsewhere: Processes | None = None) -> list[Any]:
        """Carry out the plans on `arrays`, one list per rank in the order of recording; returns each rank's output.

        With `elsewhere`, the only rank here meets those of other processes.
        """
        for inputs, given in zip(self._inputs, arrays):
            for external, array in zip(inputs, given):
                external.bind(array)
        for external in self._results:
            external.bind(np.empty(external.storage.nbytes, np.uint8))
            external.storage.host = None  # no array of the caller's
        self._tiles.bind(ARENA)
        with np.errstate(all="ignore"):
            self._carry_out(elsewhere)
        self._tiles.release()
        return [_given_back(value) for value in self._returned]

    def _carry_out(self, elsewhere: Processes | None) -> None:
        ranks = [_Run(recorded) for recorded in self._plans]
        while True:
            waiting = {number: rank for number, rank in enumerate(ranks) if rank.to_meeting()}
            if not waiting:
                return
            for rank in list(waiting.values()):
                meeting = rank.meeting
                if meeting is None:
                    continue  # held as a member of a meeting before
                if elsewhere is not None and meeting.by_rank and len(meeting.members) > 1:
                    rank.leave(_met_elsewhere(elsewhere, meeting, rank.operands))
                    continue
                members = [waiting[member] for member in meeting.members]
                results = meeting.exchange([member.operands for member in members])
                for member, own in zip(members, results):
                    member.leave(own)


def _met_elsewhere(elsewhere: Processes, meeting: Meeting, operands: list[Any]) -> list[Any]:
    """What the meeting of this process's rank with those of other processes gives it."""
    place = (True, 0, meeting.place)  # as `issue` names it for the only core of a rank
    _, arrived = elsewhere.wait([elsewhere.post(replace(meeting, place=place), operands, _REPLAYED)])
    results = meeting.exchange([given for _, given, _ in arrived])
    return results[meeting.members.index(elsewhere.rank)]


class _Run:
    """One rank on its way through its plans."""

    def __init__(self, recorded: Recorded) -> None:
        self._recorded = recorded
        self._next = 0
        self._state: dict[State, np.ndarray] = {}
        self.operands: list[Any] = []
        self.meeting: Any = None

    def to_meeting(self) -> bool:
        """Run up to the next meeting, or to the end; tells whether there is one."""
        recorded = self._recorded
        for position in range(self._next, len(recorded)):
            plan, keeps = recorded[position]
            as_float = plan.domain is Domain.float32
            operands = [
                gather(tile, as_float, plan.skip_out_of_range)
                if tile.dynamic is not None
                else tile.float32()
                if as_float
                else tile.array
                for tile in plan.reads
            ]
            if plan.meeting is not None:
                self._next, self.operands, self.meeting = position, operands, plan.meeting
                return True
            if keeps is not None:
                tile = plan.writes[0]
                product = plan.compute(*operands)[0]
                put(tile, accumulated(tile, product, keeps), as_float, False)
                continue
            if plan.state is not None:
                state = self._state.get(plan.state)
                if state is None:
                    state = plan.state.initial(128)
                *results, self._state[plan.state] = plan.compute(state, *operands)
            else:
                results = plan.compute(*operands)
            for tile, result in zip(plan.writes, results):
                put(tile, result, as_float, plan.skip_out_of_range)
        self._next = len(recorded)
        return False

    def leave(self, results: Sequence[Any]) -> None:
        """Write what the meeting gave this rank, and go on after it."""
        plan, _ = self._recorded[self._next]
        for tile, result in zip(plan.writes, results):
            put(tile, result, plan.domain is Domain.float32, plan.skip_out_of_range)
        self._next += 1
        self.meeting = None


class ReplayCache:
    """Programs by what decides them; the one unused longest makes room for a new one."""

    def __init__(self, capacity: int = 256) -> None:
        self.capacity = capacity
        self.report = ReplayReport()
        self._programs: OrderedDict[Any, tuple[Watch, Any, Program]] = OrderedDict()

    def key(
        self, kernel: Callable[..., Any], arguments: Arguments, options: tuple[Any, ...]
    ) -> tuple[Any, list[list[np.ndarray]]] | None:
        """The key of a launch and its arrays in order; None, with the reason counted, if it cannot have one."""
        arrays: list[list[np.ndarray]] = []
        parts: list[Any] = []
        try:
            for args, kwargs in arguments:
                own: dict[int, np.ndarray] = {}
                parts.append((static_key(args, own), static_key(kwargs, own)))
                arrays.append(list(own.values()))
            return (kernel, options, tuple(parts)), arrays
        except NotFixed as reason:
            self.report.refuse(str(reason))
            return None

    def find(self, key: Any) -> tuple[Any, Program] | None:
        """The launch and program recorded under a key, if the kernel's surroundings are still the same."""
        entry = self._programs.get(key)
        if entry is None:
            return None
        watch, launch, program = entry
        if not watch.unchanged():
            del self._programs[key]
            self.report.dropped += 1
            return None
        self._programs.move_to_end(key)
        self.report.hits += 1
        return launch, program

    def keep(self, key: Any, kernel: Callable[..., Any], launch: Any, program: Program) -> None:
        """Keep a program; the reason is counted if the kernel's surroundings cannot be watched."""
        try:
            watch = Watch(kernel)
        except NotFixed as reason:
            self.report.refuse(str(reason))
            return
        self._programs[key] = (watch, launch, program)
        self.report.recorded += 1
        while len(self._programs) > self.capacity:
            self._programs.popitem(last=False)
            self.report.dropped += 1

    def clear(self) -> None:
        """Forget every program."""
        self._programs.clear()


REPLAYS = ReplayCache()
"""The programs of this process."""


def _storages(value: Any) -> list[Storage]:
    """The storages behind the tensors that a kernel returned."""
    if isinstance(value, NkiTensor):
        return [value.storage]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        return [storage for part in value for storage in _storages(part)]
    return []


def _given_back(value: Any) -> Any:
    """What the caller gets for what the kernel returned."""
    if isinstance(value, NkiTensor):
        host = value.storage.host
        if value.whole and host is not None and host.shape == value.shape:
            return host
        value.forget_array()
        array = value.array
        return array.view(bool) if value.dtype == "bool_" else array
    if isinstance(value, (tuple, list)):
        return type(value)(_given_back(part) for part in value)
    if isinstance(value, dict):
        return {key: _given_back(part) for key, part in value.items()}
    return value
