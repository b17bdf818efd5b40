"""Gains from more overlap: a new tile for each iteration, work moved to an idle engine, larger instructions.

An `Edit` holds the changes of a stream, whose events are the instructions of a launch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from simulate.hardware import Hardware
from simulate.isa import costs
from simulate.isa.enums import Engine
from simulate.isa.plan import Phase
from simulate.isa.template import WRITE, Template
from simulate.profile.advice.edits import Edit, collect_uses
from simulate.run.stream import Stream

_WIDE = 512
"""Elements per partition that an instruction should process: a PSUM bank of float32, the widest moving tile of trn2."""

_STREAMING = Engine.tensor, Engine.vector, Engine.scalar, Engine.gpsimd


def deepen_rotation(stream: Stream, hardware: Hardware) -> Iterator[Edit]:
    """Yield an edit that gives every rewrite of a tile that was read a new tile, if there is such a rewrite.

    The schedule limits by memory how many of these tiles are in use at a time.
    """
    edit = Edit(stream)
    for tile, used in collect_uses(stream).items():
        record = stream.tensors[tile]
        if not record.buffer.on_chip:
            continue
        events = _merge_uses(used)
        read, current = False, tile
        for index, (event, reads) in enumerate(events):
            if read and not reads and _begins_anew(stream, tile, events[index:]):
                current, read = len(stream.tensors) + len(edit.tensors), False
                edit.tensors.append(record._replace(serial=current, address=None))
            read = read or reads
            if current != tile:
                edit.rename(event, tile, current)
    if edit.events:
        yield edit


def _merge_uses(used: Sequence[tuple[int, bool]]) -> list[tuple[int, bool]]:
    """Return the (event, whether it reads or accumulates) of a tile, with one entry for each event.

    Args:
        used: (event, whether it writes) of all accesses to the tile.
    """
    reads_by_event: dict[int, bool] = {}
    for event, writes in used:
        reads_by_event[event] = reads_by_event.get(event, False) or not writes
    return list(reads_by_event.items())


def _begins_anew(stream: Stream, tile: int, events: Sequence[tuple[int, bool]]) -> bool:
    """Return whether events read only bytes of a tile that earlier ones of these events have written.

    Args:
        tile: Index of the tile in the stream.
        events: Events that access the tile, in order.
    """
    record = stream.tensors[tile]
    rows = record.shape[0]
    written: list[tuple[int, int]] = []
    for event, _ in events:
        boxes = stream.template(event).boxes
        tile_boxes = [box for box, tensor in zip(boxes, stream.tensors_of(event)) if tensor == tile]
        if not all(_is_covered(box[3:], written) for box in tile_boxes if box[0] != WRITE):
            return False
        written += [box[3:] for box in tile_boxes if box[0] == WRITE and box[1:3] == (0, rows)]
        if _is_covered((0, record.row_bytes), written):
            return True
    return True


def _is_covered(interval: tuple[int, int], written: Sequence[tuple[int, int]]) -> bool:
    """Return whether the union of half-open intervals in `written` covers an interval."""
    covered_to, end = interval
    for first, interval_end in sorted(written):
        if first > covered_to:
            break
        covered_to = max(covered_to, interval_end)
    return covered_to >= end


def move_copies(stream: Stream, hardware: Hardware) -> Iterator[Edit]:
    """Yield edits that move `tensor_copy` between the Vector and the Scalar engine: all, or every second one.

    Nothing is yielded on a chip whose Scalar engine cannot copy, or without copies.
    """
    for source, target in ((Engine.vector, Engine.scalar), (Engine.scalar, Engine.vector)):
        if not hardware.scalar_engine_tensor_copy:
            return
        for step in (1, 2):
            edit, num_copies = Edit(stream), 0
            for event in range(len(stream)):
                template = stream.template(event)
                if template.op != "tensor_copy" or template.plan.engine is not source or not template.direct:
                    continue
                num_copies += 1
                if num_copies % step:
                    continue
                dst, src = template.operands[template.writes[0]], template.operands[template.reads[0]]
                edit.set_cost(event, costs.copied(hardware, target, dst, src), engine=target)
            if edit.events:
                yield edit


def widen_tiles(stream: Stream, hardware: Hardware) -> Iterator[Edit]:
    """Yield an edit that charges equal instructions of a line as if they were merged.

    A merged instruction has up to 512 elements per partition. The number of events stays; each costs its
    share of a merged instruction. Nothing is yielded if no cost falls.
    """
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
        template_numbers = {stream.template_ids[event] for event in events}
        widest = max(stream.templates[number].plan.writes[0].free_size for number in template_numbers)
        num_merged = min(_WIDE // max(widest, 1), len(events))
        for event in events if num_merged > 1 else ():
            interval = _share_interval(stream.template(event), num_merged, hardware)
            if interval < stream.template(event).plan.cost.interval_cycles:
                edit.set_cost(event, replace(stream.template(event).plan.cost, interval_cycles=interval))
    if edit.events:
        yield edit


def _share_interval(template: Template, num_merged: int, hardware: Hardware) -> float:
    """Return the cycles of an event as its share of a merged instruction.

    Cycles that do not grow with size are split.

    Args:
        num_merged: Number of events that are merged.
    """
    plan, cost = template.plan, template.plan.cost
    if plan.engine is not Engine.tensor:
        clock = costs.clock_ghz(hardware, plan.engine)
        growing_cycles = (
            sum(term.ns for term in cost.terms if term.phase is Phase.issue and term.grows) * clock
        )
        return growing_cycles + (cost.interval_cycles - growing_cycles) / num_merged
    if template.op != "nc_matmul" or not cost.flops or cost.cells:
        return cost.interval_cycles
    stationary, moving = plan.reads[:2]
    is_float32 = stationary.dtype == "float32" or moving.dtype == "float32"

    def cycles(num_parts: int) -> float:
        columns, rows = stationary.free_size, moving.free_size * num_parts
        return costs.matmul(hardware, stationary.shape[0], columns, rows, is_float32).interval_cycles

    return cost.interval_cycles * cycles(num_merged) / (num_merged * cycles(1))
