"""Repetition of a launch that has ended, in other orders and from the same arguments.

The streams store every instruction, so the plans are rebuilt from them, over new tensors. Arguments that
overlap in the host's memory overlap here as well. Bytes that no instruction has written yet are 0xFF, a NaN
in every float format.

A step is one instruction, or one rendezvous with all its members. Steps are numbered in the order in which
they took effect, so `range(len(launch))` is the order of the launch itself. `orders` compares the results of
several orders.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from simulate.isa.plan import State
from simulate.memory import NkiTensor, Storage
from simulate.run import Launch
from simulate.run.execute import execute_again, read_operands, write_results
from simulate.run.rebuild import Rebuilt
from simulate.run.run_order import merge_segments
from simulate.run.stream import Stream

_UNWRITTEN = 0xFF


@dataclass(frozen=True, slots=True)
class EventOfCore:
    """Event of a core: an instruction, or the part of one core in a rendezvous.

    `core` is the index of the core's stream in the launch, counted over all ranks.
    """

    core: int
    event: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Argument of a kernel: the host address of its bytes, and a copy of them."""

    start: int
    contents: np.ndarray

    @classmethod
    def take(cls, storage: Storage) -> Snapshot:
        """Copy the bytes of an argument, and its host address, before the kernel runs."""
        return cls(storage.uncounted_array.__array_interface__["data"][0], storage.uncounted_array.copy())


class ReorderedLaunch:
    """Launch that can be run in any order of its steps.

    `steps` has the members of each step; `results` has the tensors that are compared, each with a stream of
    its rank.
    """

    def __init__(self, launch: Launch, arguments: Sequence[Sequence[Snapshot]]) -> None:
        """Rebuild a launch over new tensors.

        Args:
            launch: A launch that has ended.
            arguments: For each rank, a Snapshot of each of the `inputs` of its interface.
        """
        self.streams = launch.streams
        rebuilt = Rebuilt(launch.streams)
        self._plans = rebuilt.plans
        self._partitions = launch.hardware.partitions
        self._logical_core_size = len(launch.streams) // len(launch.interfaces)
        self.steps: list[tuple[EventOfCore, ...]] = []
        for segment in merge_segments(launch.streams):
            members = segment.members
            if segment.is_rendezvous:
                self.steps.append(tuple(EventOfCore(core, event) for core, event, _ in members))
            else:
                ((core, first, end),) = members
                self.steps += [(EventOfCore(core, event),) for event in range(first, end)]
        ranks = [stream.rank for stream in launch.streams[:: self._logical_core_size]]
        argument_storages = [
            (rebuilt.storage(rank, serial), snapshot)
            for rank, interface, snapshots in zip(ranks, launch.interfaces, arguments)
            for serial, snapshot in zip(interface.inputs, snapshots)
        ]
        self.results = self._results(launch, rebuilt, ranks)
        self._initial_contents: list[tuple[Storage, np.ndarray | None]] = [
            (storage, snapshot.contents) for storage, snapshot in argument_storages
        ]
        argument_ids = {id(storage) for storage, _ in argument_storages}
        for storage in rebuilt.storages.values():
            if id(storage) not in argument_ids:
                # A storage with contents from the host is a constant of the kernel.
                self._initial_contents.append(
                    (storage, None if storage.uncounted_host is None else storage.uncounted_array)
                )
                storage.uncounted_array = np.empty(storage.nbytes, np.uint8)
        _allocate_arguments(argument_storages)

    def __len__(self) -> int:
        return len(self.steps)

    def tensors(self, member: EventOfCore) -> tuple[list[NkiTensor], list[NkiTensor]]:
        """Return the tensors that an event reads, run-time indices included, and the tensors that it writes."""
        plan = self._plans[member.core][member.event]
        indices = [tile.dynamic.index for tile in (*plan.reads, *plan.writes) if tile.dynamic is not None]
        return [*plan.reads, *indices], list(plan.writes)

    def run(self, order: Iterable[int]) -> list[bytes]:
        """Execute all steps in an order, from the arguments of the launch; earlier runs leave no contents.

        The order must keep the dependences of `find_predecessors`; this is not checked.

        Returns:
            The bytes of each tensor of `results`.

        Raises:
            NkwError: An index that is read at run time is out of range.
        """
        for storage, contents in self._initial_contents:
            storage.uncounted_array[...] = _UNWRITTEN if contents is None else contents
            storage.float_views.clear()
        states: list[dict[State, np.ndarray]] = [{} for _ in self.streams]
        with np.errstate(all="ignore"):
            for step in order:
                first = self.steps[step][0]
                plan = self._plans[first.core][first.event]
                if plan.rendezvous is None:
                    added = self.streams[first.core].accumulated.get(first.event)
                    execute_again(plan, added, states[first.core], self._partitions)
                else:
                    self._exchange(self.steps[step])
        return [storage.uncounted_array.tobytes() for _, storage in self.results]

    def _exchange(self, members: tuple[EventOfCore, ...]) -> None:
        plans = {}
        for member in members:
            plan, stream = self._plans[member.core][member.event], self.streams[member.core]
            assert plan.rendezvous is not None
            plans[stream.rank if plan.rendezvous.by_rank else stream.core] = plan
        rendezvous = next(iter(plans.values())).rendezvous
        assert rendezvous is not None
        ordered_plans = [plans[key] for key in rendezvous.members]
        for plan, results in zip(
            ordered_plans, rendezvous.exchange([read_operands(plan) for plan in ordered_plans])
        ):
            write_results(plan, results)

    def _results(self, launch: Launch, made: Rebuilt, ranks: Sequence[int]) -> list[tuple[Stream, Storage]]:
        """Return the tensors that each rank returned, and the arguments that it wrote, each with a stream of the rank.

        Args:
            launch: The launch that has ended.
            made: Its new tensors.
            ranks: The number of each rank, in the order of the interfaces of the launch.
        """
        written = {
            (stream.rank, tile.storage.serial)
            for stream, plans in zip(self.streams, self._plans)
            for plan in plans
            for tile in plan.writes
        }
        results: dict[tuple[int, int], tuple[Stream, Storage]] = {}
        for number, (rank, interface) in enumerate(zip(ranks, launch.interfaces)):
            stream = self.streams[number * self._logical_core_size]
            returned = [result.serial for result in interface.results()]
            for serial in [*returned, *(serial for serial in interface.inputs if (rank, serial) in written)]:
                results.setdefault((rank, serial), (stream, made.storage(rank, serial)))
        return list(results.values())


def _allocate_arguments(arguments: Sequence[tuple[Storage, Snapshot]]) -> None:
    """Give the storage of each argument new, uninitialised bytes.

    Arguments that share bytes in the host's memory share the new bytes in the same way.
    """
    groups: list[list[tuple[Storage, Snapshot]]] = []
    end = -1
    for storage, snapshot in sorted(arguments, key=lambda pair: pair[1].start):
        if snapshot.start >= end:
            groups.append([])
        groups[-1].append((storage, snapshot))
        end = max(end, snapshot.start + storage.nbytes)
    for group in groups:
        first = group[0][1].start
        block = np.empty(
            max(snapshot.start + storage.nbytes for storage, snapshot in group) - first, np.uint8
        )
        for storage, snapshot in group:
            storage.uncounted_array = block[snapshot.start - first :][: storage.nbytes]
