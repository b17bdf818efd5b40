"""The flow of results through the tiles of one core: which event reads what another one wrote, and what is lost."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from simulate.isa.enums import ReduceCmd
from simulate.isa.shapes import unchanged
from simulate.isa.template import Template
from simulate.memory import MemoryRegion
from simulate.memory.extents import Box, contains, meets
from simulate.run.stream import ACCUMULATE, READ, Access, Stream

ON_CHIP = (MemoryRegion.sbuf, MemoryRegion.psum)

Source = tuple[int, str, int]
"""A line, an instruction, and the place of a result among its operands: equal for all rounds of a loop."""


@dataclass(slots=True)
class Write:
    """A write that nothing has read so far: its event and operand, and the box that no later write covers."""

    event: int
    place: int  # of the result among the operands of the template
    access: Access
    left: Box
    is_read: bool = False


@dataclass
class Flow:
    """Which event reads the results of which, in one core, and which results were overwritten unread."""

    producers: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    overwritten: list[tuple[Write, int, Access]] = field(default_factory=list)
    unread_writes: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    """By event, the number of its writes that nothing reads: overwritten before, or there to the end."""
    read_sources: set[Source] = field(default_factory=set)
    """The sources of results of which some event writes what another event reads."""


def follow(stream: Stream, accesses: list[tuple[Access, ...]]) -> Flow:
    """Return the flow of results of one core, in program order."""
    flow = Flow()
    current: dict[int, list[Write]] = defaultdict(
        list
    )  # by tensor, the writes of which a part is still there
    on_chip = [record.buffer in ON_CHIP for record in stream.tensors]
    for event, operands in enumerate(accesses):
        template = stream.template(event)
        adds = stream.accumulated.get(event, True) is not False
        boxes = _boxes(template)
        for access, box in zip(operands, boxes):
            if access.kind == READ or (access.kind == ACCUMULATE and adds):
                for write in current.get(access.tensor, ()):
                    if box is None or meets(box, write.left):
                        write.is_read = True
                        flow.producers[event].add(write.event)
                        flow.read_sources.add(source_of(stream, write.event, write.place))
        covers = template.direct and event not in stream.masked
        for place in template.writes:
            access, box = operands[place], boxes[place]
            if not on_chip[access.tensor]:
                continue
            if access.kind == ACCUMULATE and adds:
                covers = False
            exact = template.operands[place].layout.boxes[0] if covers else None
            if exact is not None:
                current[access.tensor] = _remaining(flow, current[access.tensor], exact, event, access)
            if box is not None:
                current[access.tensor].append(Write(event, place, access, box))
    for writes in current.values():
        for write in writes:
            flow.unread_writes[write.event] += not write.is_read
    return flow


def _boxes(template: Template) -> list[Box | None]:
    """Return the box that encloses each operand, in the dims of its tensor; all of it for a run-time address.

    None for a view that reaches outside.
    """
    return [
        operand.layout.boxes[1]
        if operand.dynamic is None
        else tuple([(0, extent) for extent in operand.layout.form.stored_shape])
        for operand in template.operands
    ]


def _remaining(flow: Flow, writes: list[Write], exact: Box, event: int, access: Access) -> list[Write]:
    """Return the earlier writes that a write of the box `exact` leaves in part."""
    kept = []
    for write in writes:
        if contains(exact, write.left):
            if not write.is_read:
                flow.overwritten.append((write, event, access))
                flow.unread_writes[write.event] += 1
            continue
        write.left = _cut(write.left, exact)
        kept.append(write)
    return kept


def _cut(box: Box, exact: Box) -> Box:
    """Return what is left of a box without another one, where that is a box; else the whole box."""
    apart = [
        axis for axis, (one, other) in enumerate(zip(box, exact)) if one[0] < other[0] or other[1] < one[1]
    ]
    if len(apart) != 1 or not meets(box, exact):
        return box
    axis = apart[0]
    (first, end), (start, stop) = box[axis], exact[axis]
    if start <= first:
        shorter = (stop, end)
    elif stop >= end:
        shorter = (first, start)
    else:
        return box
    return (*box[:axis], shorter, *box[axis + 1 :])


def has_other_effects(stream: Stream, event: int) -> bool:
    """Return whether an event changes more than tiles: registers, generators, other cores, HBM."""
    plan = stream.template(event).plan
    registers = plan.registers
    if registers is not None and registers.command is ReduceCmd.reset_reduce and registers.read_out:
        return False  # what it leaves in the registers is in its result as well
    return plan.state is not None or plan.rendezvous is not None


def find_live(stream: Stream, accesses: list[tuple[Access, ...]], flow: Flow) -> set[int]:
    """Return the events whose results reach HBM, a register or another core."""
    live: set[int] = set()
    for event in range(len(accesses) - 1, -1, -1):
        leaves = any(
            access.kind != READ and stream.tensors[access.tensor].buffer not in ON_CHIP
            for access in accesses[event]
        )
        if event in live or leaves or has_other_effects(stream, event):
            live.add(event)
            live |= flow.producers.get(event, set())
    return live


def source_of(stream: Stream, event: int, place: int) -> Source:
    """Return the source of a result of an event."""
    return stream.line_ids[event], stream.template(event).op, place


def is_move(template: Template) -> bool:
    """Return whether an instruction only copies one tile, which still contains the values."""
    plan = template.plan
    return plan.compute is unchanged or plan.effects.copies
