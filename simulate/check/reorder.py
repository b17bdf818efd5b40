"""A tape: everything that one launch carried out, to be carried out again in another order.

The plans of a launch hold its tensors, so the same instructions can run again on the same data. The memory of the
launch is not touched: its tensors move to bytes of the tape's own, arguments that lie over each other in the host's
memory do so here as well. Bytes that no instruction has written yet are 0xFF, a NaN in every float format.

A step is one instruction, or one rendezvous with all its members. Steps are numbered in the order in which they took
effect, so that order itself is `range(len(tape))`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from simulate.isa.plan import State
from simulate.memory import NkiTensor, Storage
from simulate.run.execute import operands_of, put_all, repeat
from simulate.run.machine import NeuronCore, Recorder
from simulate.run.stream import Stream

_UNWRITTEN = 0xFF


@dataclass(frozen=True, slots=True)
class Part:
    """One event of one core: the instruction, or its part in a rendezvous."""

    core: int
    event: int


class Tape:
    """Records one launch; afterwards plays it in any order."""

    def __init__(self, cores: Sequence[NeuronCore], inputs: Sequence[Sequence[Storage]]) -> None:
        """Begin to record; the cores have not run yet."""
        self._cores = list(cores)
        self._recorders = [Recorder() for _ in cores]
        for core, recorder in zip(cores, self._recorders):
            core.recorder = recorder
        self._inputs = {id(storage): storage.array.copy() for rank in inputs for storage in rank}
        self._given = [list(rank) for rank in inputs]
        self._held = [storage for rank in inputs for storage in rank]
        self._issued: list[Part] = []
        self.steps: list[tuple[Part, ...]] = []
        self.results: list[tuple[Stream, Storage]] = []

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def streams(self) -> tuple[Stream, ...]:
        """The streams of the cores."""
        return tuple(core.stream for core in self._cores)

    def issued(self, core: NeuronCore) -> None:
        """An instruction of `core` has taken effect and is about to be recorded in its stream."""
        self._issued.append(Part(core.index, len(core.stream)))

    def end(self, returned: Sequence[Sequence[Storage]]) -> None:
        """The launch is over: number the steps, and move its tensors to bytes of the tape's own.

        `returned` has the storages that each rank's kernel returned; `results` are those and the arguments that were
        written to.
        """
        streams = self.streams
        rendezvous: dict[int, tuple[int, list[Part]]] = {}
        for part in self._issued:
            serial = streams[part.core].rendezvous.get(part.event)
            if serial is None:
                self.steps.append((part,))
            elif serial in rendezvous:
                rendezvous[serial][1].append(part)
            else:
                # The member that came last is the first to go on: the rendezvous takes effect there.
                rendezvous[serial] = len(self.steps), [part]
                self.steps.append(())
        for step, members in rendezvous.values():
            self.steps[step] = tuple(sorted(members, key=lambda part: part.core))
        self._own_bytes()
        self._find_results(returned)

    def tensors(self, part: Part) -> tuple[list[NkiTensor], list[NkiTensor]]:
        """What an event reads, run-time indices too, and what it writes."""
        plan = self._recorders[part.core].plans[part.event][0]
        indices = [tile.dynamic.index for tile in (*plan.reads, *plan.writes) if tile.dynamic is not None]
        return [*plan.reads, *indices], list(plan.writes)

    def play(self, order: Iterable[int]) -> list[bytes]:
        """Carry out the steps in an order, from the launch's inputs on; returns the bytes of the results.

        Raises NkwError where an index that is read at run time leads out of its tensor.
        """
        for storage in self._held:
            given = self._inputs.get(id(storage))
            storage.array[...] = _UNWRITTEN if given is None else given
            storage.float_views.clear()
        states: list[dict[State, np.ndarray]] = [{} for _ in self._cores]
        with np.errstate(all="ignore"):
            for step in order:
                parts = self.steps[step]
                first = parts[0]
                plan, keeps, _ = self._recorders[first.core].plans[first.event]
                if plan.rendezvous is None:
                    partitions = self._cores[first.core].hardware.partitions
                    repeat(plan, keeps, states[first.core], partitions)
                else:
                    self._meet(parts)
        return [storage.array.tobytes() for _, storage in self.results]

    def _meet(self, parts: tuple[Part, ...]) -> None:
        plans = {}
        for part in parts:
            core = self._cores[part.core]
            plan = self._recorders[part.core].plans[part.event][0]
            assert plan.rendezvous is not None
            plans[core.rank.number if plan.rendezvous.by_rank else core.number] = plan
        rendezvous = next(iter(plans.values())).rendezvous
        assert rendezvous is not None
        members = [plans[member] for member in rendezvous.members]
        for plan, results in zip(members, rendezvous.exchange([operands_of(plan) for plan in members])):
            put_all(plan, results)

    def _find_results(self, returned: Sequence[Sequence[Storage]]) -> None:
        first_cores = {core.rank.number: core.stream for core in reversed(self._cores)}
        written = {id(tile.storage) for part in self._issued for tile in self.tensors(part)[1]}
        seen: set[int] = set()
        for rank, storages in enumerate(returned):
            given = [storage for storage in self._given[rank] if id(storage) in written]
            for storage in [*storages, *given]:
                if id(storage) not in seen:
                    seen.add(id(storage))
                    self.results.append((first_cores[rank], storage))

    def _own_bytes(self) -> None:
        views: dict[int, list[NkiTensor]] = {}
        known = {id(storage) for storage in self._held}
        for part in self._issued:
            for tile in chain(*self.tensors(part)):
                storage = tile.storage
                views.setdefault(id(storage), []).append(tile)
                if id(storage) not in known:
                    known.add(id(storage))
                    self._held.append(storage)
                    if storage.host is not None:  # a constant of the kernel
                        self._inputs[id(storage)] = storage.array.copy()
        for group in _overlapping(self._held):
            first, end = _span(group[0])[0], max(_span(storage)[1] for storage in group)
            block = np.full(end - first, _UNWRITTEN, np.uint8)
            for storage in group:
                start = _span(storage)[0] - first
                storage.array = block[start : start + storage.nbytes]
                for view in views.get(id(storage), ()):
                    view.forget_array()


def _span(storage: Storage) -> tuple[int, int]:
    """Where the bytes of a storage lie in the host's memory."""
    first = storage.array.__array_interface__["data"][0]
    return first, first + storage.nbytes


def _overlapping(storages: Sequence[Storage]) -> list[list[Storage]]:
    """Storages in groups, such that those of different groups have no byte of the host in common."""
    groups: list[list[Storage]] = []
    end = -1
    for storage in sorted(storages, key=_span):
        first, last = _span(storage)
        if first >= end:
            groups.append([])
        groups[-1].append(storage)
        end = max(end, last)
    return groups
