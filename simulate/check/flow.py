"""Data flow through the tiles of one core: which event reads what which event wrote, and what is lost.

An event is the index of an instruction in the core's stream. Only tiles in SBUF and PSUM are followed. The
detectors `lost` and `unused` read the result.
"""

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
"""Line id, instruction, and index of a written operand in the template: equal for all iterations of a loop."""


@dataclass(slots=True)
class Write:
    """Write to a tile on chip: its event and operand, and the box of its elements that no later write covers."""

    event: int
    operand_index: int
    """Index in the operands of the template."""
    access: Access
    uncovered: Box
    is_read: bool = False


@dataclass
class Flow:
    """Data flow of one core through its tiles in SBUF and PSUM, as `trace_flow` returns it."""

    producers: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    """By event, the events whose results it reads."""
    overwritten: list[tuple[Write, int, Access]] = field(default_factory=list)
    """Writes that were overwritten unread, with the overwriting event and its access."""
    unread_writes: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    """By event, the number of its writes that no event reads before they are overwritten or the launch ends."""
    read_sources: set[Source] = field(default_factory=set)
    """Sources of which at least one event was read."""


def trace_flow(stream: Stream, accesses: list[tuple[Access, ...]]) -> Flow:
    """Return the data flow of one core, following its events in program order.

    Args:
        stream: The stream of the core.
        accesses: The accesses of every event of the stream.
    """
    flow = Flow()
    current: dict[int, list[Write]] = defaultdict(list)  # by tensor, the writes that are not covered entirely
    on_chip = [record.buffer in ON_CHIP for record in stream.tensors]
    for event, operands in enumerate(accesses):
        template = stream.template(event)
        adds = stream.accumulated.get(event, True) is not False
        boxes = _get_enclosing_boxes(template)
        for access, box in zip(operands, boxes):
            if access.mode == READ or (access.mode == ACCUMULATE and adds):
                for write in current.get(access.tensor, ()):
                    if box is None or meets(box, write.uncovered):
                        write.is_read = True
                        flow.producers[event].add(write.event)
                        flow.read_sources.add(find_source(stream, write.event, write.operand_index))
        covers = template.direct and event not in stream.masked
        for operand_index in template.writes:
            access, box = operands[operand_index], boxes[operand_index]
            if not on_chip[access.tensor]:
                continue
            if access.mode == ACCUMULATE and adds:
                covers = False
            exact = template.operands[operand_index].layout.boxes[0] if covers else None
            if exact is not None:
                current[access.tensor] = _drop_covered(flow, current[access.tensor], exact, event, access)
            if box is not None:
                current[access.tensor].append(Write(event, operand_index, access, box))
    for writes in current.values():
        for write in writes:
            flow.unread_writes[write.event] += not write.is_read
    return flow


def _get_enclosing_boxes(template: Template) -> list[Box | None]:
    """Return, for each operand of a template, the smallest box of its tensor that contains the operand's elements.

    An operand with a run-time address gets the box of the whole tensor. None for a view that reaches outside
    of its tensor.
    """
    return [
        operand.layout.boxes[1]
        if operand.dynamic is None
        else tuple([(0, extent) for extent in operand.layout.form.stored_shape])
        for operand in template.operands
    ]


def _drop_covered(flow: Flow, writes: list[Write], exact: Box, event: int, access: Access) -> list[Write]:
    """Return the writes that a later write does not cover, with their uncovered boxes shortened where possible.

    Writes that are covered unread are appended to `flow.overwritten` and counted in `flow.unread_writes`.

    Args:
        flow: The data flow, which this function updates.
        writes: The earlier writes to the tensor.
        exact: The box of the later write, all of whose elements are written.
        event: The event of the later write.
        access: The access of the later write.
    """
    remaining = []
    for write in writes:
        if contains(exact, write.uncovered):
            if not write.is_read:
                flow.overwritten.append((write, event, access))
                flow.unread_writes[write.event] += 1
            continue
        write.uncovered = _subtract_box(write.uncovered, exact)
        remaining.append(write)
    return remaining


def _subtract_box(box: Box, exact: Box) -> Box:
    """Return a box without the elements of another box.

    The box is returned unchanged if the two do not overlap, if the other box covers it, or if the difference
    is not a box.
    """
    uncovered_axes = [
        axis for axis, (one, other) in enumerate(zip(box, exact)) if one[0] < other[0] or other[1] < one[1]
    ]
    if len(uncovered_axes) != 1 or not meets(box, exact):
        return box
    axis = uncovered_axes[0]
    (first, end), (start, stop) = box[axis], exact[axis]
    if start <= first:
        shorter = (stop, end)
    elif stop >= end:
        shorter = (first, start)
    else:
        return box
    return (*box[:axis], shorter, *box[axis + 1 :])


def has_other_effects(stream: Stream, event: int) -> bool:
    """Return whether an event changes a register or a random generator, or takes part in a rendezvous.

    An instruction that resets and reads out its accumulator registers has no other effect: the sum is in its
    result.
    """
    plan = stream.template(event).plan
    registers = plan.registers
    if registers is not None and registers.command is ReduceCmd.reset_reduce and registers.read_out:
        return False  # its result contains the sum as well
    return plan.state is not None or plan.rendezvous is not None


def find_live(stream: Stream, accesses: list[tuple[Access, ...]], flow: Flow) -> set[int]:
    """Return the events whose results reach HBM, a register or another core, directly or through later events.

    Args:
        stream: The stream of the core.
        accesses: The accesses of every event.
        flow: Its data flow.
    """
    live: set[int] = set()
    for event in range(len(accesses) - 1, -1, -1):
        leaves = any(
            access.mode != READ and stream.tensors[access.tensor].buffer not in ON_CHIP
            for access in accesses[event]
        )
        if event in live or leaves or has_other_effects(stream, event):
            live.add(event)
            live |= flow.producers.get(event, set())
    return live


def find_source(stream: Stream, event: int, operand_index: int) -> Source:
    """Return (line id, instruction, operand index) of a written operand, equal for all iterations of a loop."""
    return stream.line_ids[event], stream.template(event).op, operand_index


def is_move(template: Template) -> bool:
    """Return whether an instruction only copies a tile without changing values; its operand still contains them."""
    plan = template.plan
    return plan.compute is unchanged or plan.effects.copies
