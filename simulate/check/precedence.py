"""The order that the chip keeps between the steps of a launch, and random orders of the steps that keep it."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from random import Random

from simulate.check.reorder import ReorderedLaunch
from simulate.isa.plan import Synchronization
from simulate.memory import MemoryRegion
from simulate.run.boxes import Boxes
from simulate.run.stream import READ, Stream


def draw(before: Sequence[set[int]], seed: int) -> list[int]:
    """An order of the steps in which each follows its predecessors; for seed 0 the latest possible step comes first."""
    random = Random(seed)
    missing = [len(steps) for steps in before]
    after: list[list[int]] = [[] for _ in before]
    for step, steps in enumerate(before):
        for earlier in steps:
            after[earlier].append(step)
    rank = [-step if seed == 0 else random.random() for step in range(len(before))]
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
    assert len(order) == len(before)
    return order


def predecessors(launch: ReorderedLaunch) -> list[set[int]]:
    """For every step, the earlier steps that it has to follow on the chip.

    Within a core these are conflicting boxes of one tensor, the state of an engine, and requested orders. Between cores
    only rendezvous count. A core_barrier is a write of its tensor on both cores, so it orders the accesses to that
    tensor; a sendrecv orders all accesses to shared HBM.
    """
    streams = launch.streams
    boxes = Boxes(streams, apart=True)
    writer = [-1] * len(boxes.near)
    readers: list[list[int]] = [[] for _ in boxes.near]
    states: dict[tuple[int, object], int] = {}
    requested = [_requested(stream) for stream in streams]
    step_of: list[dict[int, int]] = [{} for _ in streams]
    fences = [-1] * len(streams)
    shared: list[list[int]] = [[] for _ in streams]
    before: list[set[int]] = []
    for step, parts in enumerate(launch.steps):
        waits: set[int] = set()
        for part in parts:
            stream, ends = streams[part.core], boxes.ends[part.core]
            step_of[part.core][part.event] = step
            waits.update(step_of[part.core][event] for event in requested[part.core].get(part.event, ()))
            state = stream.states.get(part.event)
            if state is not None:
                waits.add(states.get((part.core, state), -1))
                states[part.core, state] = step
            if _is_fence(stream, part.event):
                waits.update(shared[part.core])
                shared[part.core], fences[part.core] = [], step
            elif _touches_shared(stream, part.event):
                waits.add(fences[part.core])
                shared[part.core].append(step)
            operands = range(ends[part.event - 1] if part.event else 0, ends[part.event])
            _conflicts(boxes, part.core, operands, writer, readers, waits)
        for part in parts:
            ends = boxes.ends[part.core]
            operands = range(ends[part.event - 1] if part.event else 0, ends[part.event])
            _remember(boxes, part.core, operands, writer, readers, step)
        waits -= {-1, step}
        before.append(waits)
    return before


def _conflicts(
    boxes: Boxes, core: int, operands: range, writer: list[int], readers: list[list[int]], waits: set[int]
) -> None:
    cells, kinds = boxes.cells[core], boxes.kinds[core]
    for at in operands:
        if cells[at] < 0:
            continue
        for cell in (cells[at], *(near for near, _ in boxes.near[cells[at]])):
            waits.add(writer[cell])
            if kinds[at] != READ:
                waits.update(readers[cell])


def _remember(
    boxes: Boxes, core: int, operands: range, writer: list[int], readers: list[list[int]], step: int
) -> None:
    cells, kinds = boxes.cells[core], boxes.kinds[core]
    for at in operands:
        if cells[at] < 0 or kinds[at] == READ:
            continue
        writer[cells[at]], readers[cells[at]] = step, []
        for near, covered in boxes.near[cells[at]]:
            if covered:
                writer[near], readers[near] = -1, []
    for at in operands:
        if cells[at] >= 0 and kinds[at] == READ:
            readers[cells[at]].append(step)


def _requested(stream: Stream) -> dict[int, list[int]]:
    """For every event, the earlier events that `depends_on` names."""
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
