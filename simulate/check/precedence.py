"""Order that the chip keeps between the steps of a launch, and random orders of the steps that keep it.

A step is one instruction, or a rendezvous with all its members; steps are numbered in the order of the
launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from random import Random

from simulate.check.reorder import ReorderedLaunch
from simulate.isa.plan import Synchronization
from simulate.memory import MemoryRegion
from simulate.run.boxes import Boxes
from simulate.run.stream import READ, Stream


def order_randomly(predecessors: Sequence[set[int]], seed: int) -> list[int]:
    """Return a random order of all steps in which each step comes after its predecessors.

    Args:
        predecessors: For each step, the steps that it has to follow.
        seed: Seed of the random order; 0 always takes the ready step with the largest index.
    """
    random = Random(seed)
    missing = [len(steps) for steps in predecessors]
    after: list[list[int]] = [[] for _ in predecessors]
    for step, steps in enumerate(predecessors):
        for earlier in steps:
            after[earlier].append(step)
    rank = [-step if seed == 0 else random.random() for step in range(len(predecessors))]
    ready = [(rank[step], step) for step, count in enumerate(missing) if not count]
    heapify(ready)
    order = []
    while ready:
        _, step = heappop(ready)
        order.append(step)
        for later in sorted(after[step]):
            missing[later] -= 1
            if not missing[later]:
                heappush(ready, (rank[later], later))
    assert len(order) == len(predecessors)
    return order


def find_predecessors(launch: ReorderedLaunch) -> list[set[int]]:
    """Return, for every step, the earlier steps that it has to follow on the chip.

    Within a core these are steps that access overlapping bytes of one tensor, one of them writing; steps that
    use one state of an engine; and orders that the kernel requests. Between cores only rendezvous count. A
    core_barrier is a write of its tensor on both cores, so it orders the accesses to that tensor; a sendrecv
    orders all accesses to shared HBM.
    """
    streams = launch.streams
    boxes = Boxes(streams, apart=True)
    writer = [-1] * len(boxes.near)
    readers: list[list[int]] = [[] for _ in boxes.near]
    states: dict[tuple[int, object], int] = {}
    requested = [_list_requested(stream) for stream in streams]
    step_of: list[dict[int, int]] = [{} for _ in streams]
    fences = [-1] * len(streams)
    shared: list[list[int]] = [[] for _ in streams]
    before: list[set[int]] = []
    for step, members in enumerate(launch.steps):
        waits: set[int] = set()
        for member in members:
            stream, ends = streams[member.core], boxes.ends[member.core]
            step_of[member.core][member.event] = step
            waits.update(
                step_of[member.core][event] for event in requested[member.core].get(member.event, ())
            )
            state = stream.states.get(member.event)
            if state is not None:
                waits.add(states.get((member.core, state), -1))
                states[member.core, state] = step
            if _is_fence(stream, member.event):
                waits.update(shared[member.core])
                shared[member.core], fences[member.core] = [], step
            elif _touches_shared(stream, member.event):
                waits.add(fences[member.core])
                shared[member.core].append(step)
            operands = range(ends[member.event - 1] if member.event else 0, ends[member.event])
            _add_conflicts(boxes, member.core, operands, writer, readers, waits)
        for member in members:
            ends = boxes.ends[member.core]
            operands = range(ends[member.event - 1] if member.event else 0, ends[member.event])
            _record_accesses(boxes, member.core, operands, writer, readers, step)
        waits -= {-1, step}
        before.append(waits)
    return before


def _add_conflicts(
    boxes: Boxes, core: int, operands: range, writer: list[int], readers: list[list[int]], waits: set[int]
) -> None:
    cells, access_kinds = boxes.cells[core], boxes.access_kinds[core]
    for operand in operands:
        if cells[operand] < 0:
            continue
        for cell in (cells[operand], *(near for near, _ in boxes.near[cells[operand]])):
            waits.add(writer[cell])
            if access_kinds[operand] != READ:
                waits.update(readers[cell])


def _record_accesses(
    boxes: Boxes, core: int, operands: range, writer: list[int], readers: list[list[int]], step: int
) -> None:
    cells, access_kinds = boxes.cells[core], boxes.access_kinds[core]
    for operand in operands:
        if cells[operand] < 0 or access_kinds[operand] == READ:
            continue
        writer[cells[operand]], readers[cells[operand]] = step, []
        for near, covered in boxes.near[cells[operand]]:
            if covered:
                writer[near], readers[near] = -1, []
    for operand in operands:
        if cells[operand] >= 0 and access_kinds[operand] == READ:
            readers[cells[operand]].append(step)


def _list_requested(stream: Stream) -> dict[int, list[int]]:
    """Return, for every event with a request, the earlier events that depends_on or with_schedule names for it."""
    named: dict[int, list[int]] = {}
    for producer, consumer in stream.requested:
        if producer < consumer:
            named.setdefault(consumer, []).append(producer)
    return named


def _is_fence(stream: Stream, event: int) -> bool:
    return event in stream.rendezvous and stream.effects(event).synchronization is Synchronization.exchange


def _touches_shared(stream: Stream, event: int) -> bool:
    return any(
        stream.tensors[access.tensor].buffer is MemoryRegion.shared_hbm for access in stream.accesses(event)
    )
