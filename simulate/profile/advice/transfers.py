"""What a change of the DMAs would gain: each load once, fewer and larger DMAs."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice, pairwise

from simulate.hardware import Hardware
from simulate.isa import dma_costs
from simulate.isa.enums import DgeMode
from simulate.isa.plan import Cost, DmaCost
from simulate.isa.shapes import contiguous_bytes
from simulate.isa.template import READ
from simulate.memory import MemoryRegion
from simulate.profile.advice.edits import Edit, Uses, joined, resident_bytes, triggered_on, uses
from simulate.run.stream import Stream

_SIZES = tuple(1 << power for power in (16, 18, 20, 22))
"""Bytes of one DMA after merging that are tried: 64 KiB to 4 MiB."""

_MOST = 64
"""DMAs that are merged into one at most, so that the time of the search stays in proportion to the stream."""

_MOST_TENSORS = 4
"""Tensors that are tried one by one."""


def loads_once(stream: Stream, hardware: Hardware) -> Iterator[Edit]:
    """Loads that bring the same elements into an equal tile: the first one stays, as far as SBUF has room.

    One edit for each tensor of which most is loaded again, and one for all tensors.
    """
    used = uses(stream)
    again: dict[
        int, list[tuple[int, int, int]]
    ] = {}  # by tensor in HBM: event, its tile, the tile that has the same
    first: dict[tuple[object, ...], int] = {}
    for event in range(len(stream)):
        loaded = load_of(stream, event)
        if loaded is None:
            continue
        source, tile = loaded
        if any(writes for _, writes in used[source]) or sum(writes for _, writes in used[tile]) != 1:
            continue
        key = (source, stream.template_ids[event])
        kept = first.setdefault(key, tile)
        if kept != tile:
            again.setdefault(source, []).append((event, tile, kept))
    saved = {source: sum(_dma(stream, each[0]).bytes for each in loads) for source, loads in again.items()}
    order = sorted(again, key=lambda source: -saved[source])
    for sources in [*([order] if len(order) > 1 else []), *([source] for source in order[:_MOST_TENSORS])]:
        edit = Edit(stream, tuple(stream.tensors[source].name for source in sources))
        for source in sources:
            for event, tile, kept in again[source]:
                edit.leave_out(event)
                for other, writes in used[tile]:
                    if not writes:
                        edit.rename(other, tile, kept)
        if fits(edit, hardware):
            yield edit


def larger_dmas(stream: Stream, hardware: Hardware) -> Iterator[Edit]:
    """DMAs of one line to or from one tensor in HBM, merged up to a size; one edit for each size."""
    used = uses(stream)
    groups = _alike(stream, used)
    known = None
    for size in _SIZES:
        edit = Edit(stream)
        for group in groups:
            _merge(edit, group, size, used, hardware)
        if edit.events and edit.events != known:
            known = edit.events
            if fits(edit, hardware):
                yield edit


def fits(edit: Edit, hardware: Hardware) -> bool:
    """Return whether the tiles that are alive at the same time fit into SBUF."""
    return resident_bytes(edit.done(), MemoryRegion.sbuf) <= hardware.sbuf_usable_bytes_per_partition


def _merge(edit: Edit, group: Sequence[int], size: int, used: Uses, hardware: Hardware) -> None:
    """Neighbours of a group joined while they are no larger than `size` together and nothing comes between them."""
    stream, begin = edit.stream, 0
    loads = load_of(stream, group[0]) is not None
    while begin < len(group):
        end, total = begin, 0
        while end < len(group):
            total += _dma(stream, group[end]).bytes
            if end - begin == _MOST or (
                end > begin and (total > size or _in_use(stream, used, group[begin : end + 1], loads))
            ):
                break
            end += 1
        members, begin = group[begin:end], end
        if len(members) > 1:
            edit.merge(
                members, members[0] if loads else members[-1], _whole(stream, hardware, members, loads)
            )


def _whole(stream: Stream, hardware: Hardware, members: Sequence[int], loads: bool) -> Cost:
    """The cost of one DMA for several. Parts of the same rows of HBM make longer pieces, other parts as long ones."""
    template, place = stream.template(members[0]), 0 if loads else 1
    cost, pieces = template.plan.cost, [min(map(contiguous_bytes, template.operands))]
    boxes = [stream.template(event).boxes[place] for event in members]
    if not _is_static(hardware, cost):
        return replace(cost, dma=joined([_dma(stream, event) for event in members]))
    if all(one[1:3] == two[1:3] and one[4] == two[3] for one, two in pairwise(boxes)):
        pieces = [min(map(contiguous_bytes, stream.template(event).operands)) for event in members]
    row = stream.tensors[stream.tensors_of(members[0])[place]].row_bytes
    total = sum(_dma(stream, event).bytes for event in members)
    trigger = triggered_on(stream, members[0])
    return dma_costs.dma(
        hardware, trigger, DgeMode.none, total, sum(pieces), loads, total, apart=sum(pieces) < row
    )


def _is_static(hardware: Hardware, cost: Cost) -> bool:
    """Whether the descriptors of a DMA were written ahead."""
    return cost.dma is not None and cost.dma.trigger_ns == hardware.dma_static_trigger_ns


def _dma(stream: Stream, event: int) -> DmaCost:
    dma = stream.template(event).plan.cost.dma
    assert dma is not None
    return dma


def _in_use(stream: Stream, used: Uses, members: Sequence[int], loads: bool) -> bool:
    """Whether the last of these members cannot join the others.

    It cannot where the tile of a load is used before it, or that of a store written after it, by an event between.
    """
    begin, end = (members[0], members[-1]) if loads else (members[-2], members[-1])
    tiles = {
        tensor
        for event in (members[-1:] if loads else members[:-1])
        for tensor in stream.tensors_of(event)
        if stream.tensors[tensor].buffer.on_chip
    }
    own = set(members)
    for tile in tiles:
        events = used[tile]
        first, last = bisect_right(events, (begin, True)), bisect_left(events, (end, False))
        if any((loads or writes) and event not in own for event, writes in islice(events, first, last)):
            return True
    return False


def _alike(stream: Stream, used: Uses) -> list[list[int]]:
    """DMAs that one could be: of one line and queue, of one tensor in HBM that is only read or only written."""
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
        loads = load_of(stream, event) is not None
        if all(writes != loads for _, writes in used[in_hbm[0]]):
            key = (in_hbm[0], stream.line_ids[event], triggered_on(stream, event), loads)
            groups.setdefault(key, []).append(event)
    return [group for group in groups.values() if len(group) > 1]


def load_of(stream: Stream, event: int) -> tuple[int, int] | None:
    """The tensor in HBM and the tile of a plain load; None for other events."""
    template = stream.template(event)
    if template.plan.cost.dma is None or not template.direct or len(template.boxes) != 2:
        return None
    source, tile = stream.tensors_of(event)
    if template.boxes[0][0] != READ or stream.tensors[source].buffer.on_chip:
        return None
    return (source, tile) if stream.tensors[tile].buffer is MemoryRegion.sbuf else None
