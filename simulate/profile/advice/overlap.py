"""What more overlap would gain: a tile for each turn of a loop, work moved to an idle engine, fewer instructions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from simulate.hardware import Hardware
from simulate.isa import costs
from simulate.isa.enums import Engine
from simulate.isa.plan import Phase
from simulate.isa.template import WRITE, Template
from simulate.profile.advice.edits import Edit, uses
from simulate.run.stream import Stream

_WIDE = 512
"""Elements of a partition that one instruction should take: a PSUM bank of float32, the widest moving tile of trn2."""

_STREAMING = Engine.tensor, Engine.vector, Engine.scalar, Engine.gpsimd


def deeper_rotation(stream: Stream, hardware: Hardware) -> Iterator[Edit]:
    """Tiles that are written anew after they were read get a tile of their own each time; memory limits how many."""
    edit = Edit(stream)
    for tile, used in uses(stream).items():
        record = stream.tensors[tile]
        if not record.buffer.on_chip:
            continue
        events = _by_event(used)
        read, current = False, tile
        for at, (event, reads) in enumerate(events):
            if read and not reads and _begins_anew(stream, tile, events[at:]):
                current, read = len(stream.tensors) + len(edit.tensors), False
                edit.tensors.append(record._replace(serial=current, address=None))
            read = read or reads
            if current != tile:
                edit.rename(event, tile, current)
    if edit.events:
        yield edit


def _by_event(used: Sequence[tuple[int, bool]]) -> list[tuple[int, bool]]:
    """The events that use a tile, each with whether it reads it or adds to it."""
    found: dict[int, bool] = {}
    for event, writes in used:
        found[event] = found.get(event, False) or not writes
    return list(found.items())


def _begins_anew(stream: Stream, tile: int, events: Sequence[tuple[int, bool]]) -> bool:
    """Whether everything that these events read of a tile was written by one of them before."""
    record = stream.tensors[tile]
    rows = record.shape[0]
    written: list[tuple[int, int]] = []
    for event, _ in events:
        boxes = stream.template(event).boxes
        mine = [box for box, tensor in zip(boxes, stream.tensors_of(event)) if tensor == tile]
        if not all(_within(box[3:], written) for box in mine if box[0] != WRITE):
            return False
        written += [box[3:] for box in mine if box[0] == WRITE and box[1:3] == (0, rows)]
        if _within((0, record.row_bytes), written):
            return True
    return True


def _within(wanted: tuple[int, int], written: Sequence[tuple[int, int]]) -> bool:
    """Whether intervals together cover one."""
    reached, end = wanted
    for first, until in sorted(written):
        if first > reached:
            break
        reached = max(reached, until)
    return reached >= end


def other_engines(stream: Stream, hardware: Hardware) -> Iterator[Edit]:
    """Copies on the Vector or the Scalar engine moved to the other one: all of them, or every second one."""
    for source, target in ((Engine.vector, Engine.scalar), (Engine.scalar, Engine.vector)):
        if not hardware.scalar_engine_tensor_copy:
            return
        for step in (1, 2):
            edit, seen = Edit(stream), 0
            for event in range(len(stream)):
                template = stream.template(event)
                if template.op != "tensor_copy" or template.plan.engine is not source or not template.direct:
                    continue
                seen += 1
                if seen % step:
                    continue
                dst, src = template.operands[template.writes[0]], template.operands[template.reads[0]]
                edit.cost(event, costs.copied(hardware, target, dst, src), engine=target)
            if edit.events:
                yield edit


def wider_tiles(stream: Stream, hardware: Hardware) -> Iterator[Edit]:
    """Instructions of one line and kind, each on few elements of a partition, as one on up to 512 of them."""
    edit = Edit(stream)
    lines: dict[tuple[int, int], list[int]] = {}
    for event, key in enumerate(zip(stream.line_ids, stream.ops)):
        plan = stream.template(event).plan
        if (
            plan.engine in _STREAMING
            and plan.writes
            and plan.cost.dma is None
            and event not in stream.rendezvous
        ):
            lines.setdefault(key, []).append(event)
    for events in lines.values():
        numbers = {stream.template_ids[event] for event in events}
        widest = max(stream.templates[number].plan.writes[0].free_size for number in numbers)
        together = min(_WIDE // max(widest, 1), len(events))
        for event in events if together > 1 else ():
            interval = _shared(stream.template(event), together, hardware)
            if interval < stream.template(event).plan.cost.interval_cycles:
                edit.cost(event, replace(stream.template(event).plan.cost, interval_cycles=interval))
    if edit.events:
        yield edit


def _shared(template: Template, together: int, hardware: Hardware) -> float:
    """The cycles of an event that is a part of an instruction with so many: what does not grow is shared."""
    plan, cost = template.plan, template.plan.cost
    if plan.engine is not Engine.tensor:
        clock = costs.clock_ghz(hardware, plan.engine)
        grows = sum(term.ns for term in cost.terms if term.phase is Phase.issue and term.grows) * clock
        return grows + (cost.interval_cycles - grows) / together
    if template.op != "nc_matmul" or not cost.flops or cost.cells:
        return cost.interval_cycles
    stationary, moving = plan.reads[:2]
    wide = stationary.dtype == "float32" or moving.dtype == "float32"

    def cycles(parts: int) -> float:
        columns, rows = stationary.free_size, moving.free_size * parts
        return costs.matmul(hardware, stationary.shape[0], columns, rows, wide).interval_cycles

    return cost.interval_cycles * cycles(together) / (together * cycles(1))
