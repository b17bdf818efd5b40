"""Gains from changing the DMAs: each load once, fewer and larger DMAs.

An `Edit` holds the changes of a stream, whose events are the instructions of a launch. A plain load is a DMA
with one source in HBM and one tile in SBUF.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice, pairwise

from simulate.hardware import Hardware
from simulate.isa import dma_costs
from simulate.isa.enums import DgeMode
from simulate.isa.plan import Cost, DmaCost
from simulate.isa.shapes import count_contiguous_bytes
from simulate.isa.template import READ
from simulate.memory import MemoryRegion
from simulate.profile.advice.edits import (
    Edit,
    Uses,
    collect_uses,
    count_resident_bytes,
    find_trigger_engine,
    join_dma_costs,
)
from simulate.run.stream import Stream

_SIZES = tuple(1 << power for power in (16, 18, 20, 22))
"""Most bytes of a merged DMA, tried in turn: 64 KiB to 4 MiB."""

_MOST = 64
"""Most DMAs that are merged into a single DMA, so that the search takes time in proportion to the stream."""

_MOST_TENSORS = 4
"""Most tensors that are tried separately."""


def load_once(stream: Stream, hardware: Hardware) -> Iterator[Edit]:
    """Yield edits without loads of elements that a tile already contains, if the kept tiles fit into SBUF.

    There is an edit for all tensors, and one for each of the tensors with the most bytes loaded again.
    """
    used = collect_uses(stream)
    repeated_loads: dict[
        int, list[tuple[int, int, int]]
    ] = {}  # by tensor in HBM: (event, its tile, first tile with the same elements)
    first: dict[tuple[object, ...], int] = {}
    for event in range(len(stream)):
        loaded = find_load(stream, event)
        if loaded is None:
            continue
        source, tile = loaded
        if any(writes for _, writes in used[source]) or sum(writes for _, writes in used[tile]) != 1:
            continue
        key = (source, stream.template_ids[event])
        kept = first.setdefault(key, tile)
        if kept != tile:
            repeated_loads.setdefault(source, []).append((event, tile, kept))
    saved_bytes = {
        source: sum(_get_dma_cost(stream, load[0]).bytes for load in loads)
        for source, loads in repeated_loads.items()
    }
    order = sorted(repeated_loads, key=lambda source: -saved_bytes[source])
    for sources in [*([order] if len(order) > 1 else []), *([source] for source in order[:_MOST_TENSORS])]:
        edit = Edit(stream, tuple(stream.tensors[source].name for source in sources))
        for source in sources:
            for event, tile, kept in repeated_loads[source]:
                edit.leave_out(event)
                for reader, writes in used[tile]:
                    if not writes:
                        edit.rename(reader, tile, kept)
        if fits_sbuf(edit, hardware):
            yield edit


def enlarge_dmas(stream: Stream, hardware: Hardware) -> Iterator[Edit]:
    """Yield edits that merge DMAs of a line to or from a tensor in HBM, an edit for each size of merged DMAs.

    Sizes that merge nothing new or do not fit into SBUF are left out.
    """
    used = collect_uses(stream)
    groups = _group_mergeable(stream, used)
    known = None
    for size in _SIZES:
        edit = Edit(stream)
        for group in groups:
            _merge_group(edit, group, size, used, hardware)
        if edit.events and edit.events != known:
            known = edit.events
            if fits_sbuf(edit, hardware):
                yield edit


def fits_sbuf(edit: Edit, hardware: Hardware) -> bool:
    """Return whether the tiles in use at one time fit into SBUF after the changes of an edit."""
    return count_resident_bytes(edit.apply(), MemoryRegion.sbuf) <= hardware.sbuf_usable_bytes_per_partition


def _merge_group(edit: Edit, group: Sequence[int], size: int, used: Uses, hardware: Hardware) -> None:
    """Merge neighbours of a group into DMAs of at most `size` bytes in `edit`, if no event between them conflicts.

    Loads are merged at the first of them, stores at the last.

    Args:
        group: DMAs that could be merged, as `_group_mergeable` returns them.
    """
    stream, first = edit.stream, 0
    loads = find_load(stream, group[0]) is not None
    while first < len(group):
        end, num_bytes = first, 0
        while end < len(group):
            num_bytes += _get_dma_cost(stream, group[end]).bytes
            if end - first == _MOST or (
                end > first and (num_bytes > size or _is_in_use(stream, used, group[first : end + 1], loads))
            ):
                break
            end += 1
        members, first = group[first:end], end
        if len(members) > 1:
            edit.merge(
                members,
                members[0] if loads else members[-1],
                _compute_merged_cost(stream, hardware, members, loads),
            )


def _compute_merged_cost(stream: Stream, hardware: Hardware, members: Sequence[int], loads: bool) -> Cost:
    """Return the cost of a DMA that replaces several.

    Boxes that continue the same rows of HBM give longer contiguous pieces; other boxes keep the length of
    their pieces.

    Args:
        members: The replaced DMAs.
        loads: Whether they load from HBM; else they store to it.
    """
    template, hbm_operand = stream.template(members[0]), 0 if loads else 1
    cost, piece_bytes = template.plan.cost, [min(map(count_contiguous_bytes, template.operands))]
    boxes = [stream.template(event).boxes[hbm_operand] for event in members]
    if not _is_static(hardware, cost):
        return replace(cost, dma=join_dma_costs([_get_dma_cost(stream, event) for event in members]))
    if all(box[1:3] == next_box[1:3] and box[4] == next_box[3] for box, next_box in pairwise(boxes)):
        piece_bytes = [min(map(count_contiguous_bytes, stream.template(event).operands)) for event in members]
    row_bytes = stream.tensors[stream.tensors_of(members[0])[hbm_operand]].row_bytes
    num_bytes = sum(_get_dma_cost(stream, event).bytes for event in members)
    trigger = find_trigger_engine(stream, members[0])
    return dma_costs.dma(
        hardware,
        trigger,
        DgeMode.none,
        num_bytes,
        sum(piece_bytes),
        loads,
        num_bytes,
        apart=sum(piece_bytes) < row_bytes,
    )


def _is_static(hardware: Hardware, cost: Cost) -> bool:
    """Return whether the descriptors of a DMA are written before the launch; False for other instructions."""
    return cost.dma is not None and cost.dma.trigger_ns == hardware.dma_static_trigger_ns


def _get_dma_cost(stream: Stream, event: int) -> DmaCost:
    """Return the DMA cost of an event that is a DMA."""
    dma = stream.template(event).plan.cost.dma
    assert dma is not None
    return dma


def _is_in_use(stream: Stream, used: Uses, members: Sequence[int], loads: bool) -> bool:
    """Return whether the last member cannot join the DMA of the others.

    That is so if an event between them uses the tile of a load, or writes the tile of a store.

    Args:
        loads: Whether the members load from HBM; else they store to it.
    """
    begin_event, end_event = (members[0], members[-1]) if loads else (members[-2], members[-1])
    tiles = {
        tensor
        for event in (members[-1:] if loads else members[:-1])
        for tensor in stream.tensors_of(event)
        if stream.tensors[tensor].buffer.on_chip
    }
    member_set = set(members)
    for tile in tiles:
        events = used[tile]
        first, last = bisect_right(events, (begin_event, True)), bisect_left(events, (end_event, False))
        if any(
            (loads or writes) and event not in member_set for event, writes in islice(events, first, last)
        ):
            return True
    return False


def _group_mergeable(stream: Stream, used: Uses) -> list[list[int]]:
    """Return groups of two or more DMAs that could be merged, each a list of events in program order.

    DMAs of a group have the same line, queue and tensor in HBM. The launch only reads or only writes this
    tensor.
    """
    groups: dict[tuple[object, ...], list[int]] = {}
    for event in range(len(stream)):
        template, tensors = stream.template(event), stream.tensors_of(event)
        in_hbm = [tensor for tensor in tensors if not stream.tensors[tensor].buffer.on_chip]
        if (
            template.plan.cost.dma is None
            or event in stream.rendezvous
            or len(in_hbm) != 1
            or len(tensors) != 2
        ):
            continue
        loads = find_load(stream, event) is not None
        if all(writes != loads for _, writes in used[in_hbm[0]]):
            key = (in_hbm[0], stream.line_ids[event], find_trigger_engine(stream, event), loads)
            groups.setdefault(key, []).append(event)
    return [group for group in groups.values() if len(group) > 1]


def find_load(stream: Stream, event: int) -> tuple[int, int] | None:
    """Return (tensor in HBM, tile in SBUF) of a plain load, as indices in the stream; None for other events."""
    template = stream.template(event)
    if template.plan.cost.dma is None or not template.direct or len(template.boxes) != 2:
        return None
    source, tile = stream.tensors_of(event)
    if template.boxes[0][0] != READ or stream.tensors[source].buffer.on_chip:
        return None
    return (source, tile) if stream.tensors[tile].buffer is MemoryRegion.sbuf else None
