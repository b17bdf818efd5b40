"""Gains from another program order: loads in order of their use, independent chains interleaved.

Each change permutes the events of the recorded stream. A permutation is kept only if every event still
follows the events that it depends on, and if the tiles in use still fit into SBUF and PSUM.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from simulate.hardware import Hardware
from simulate.isa.enums import Engine
from simulate.memory import MemoryRegion
from simulate.profile.advice.edits import (
    Edit,
    Uses,
    collect_uses,
    count_resident_bytes,
    find_trigger_engine,
    is_permutable,
)
from simulate.profile.advice.transfers import find_load
from simulate.run.stream import Stream
from simulate.timing.dependences import Dependences, dependences

_WIDTHS = (2, 4, 8)
"""Numbers of chains to interleave at a time, in addition to all of them."""


def order_loads_by_first_use(stream: Stream, hardware: Hardware) -> Iterator[Edit]:
    """Yield an edit that orders the loads of every queue by the first read of their tiles, if that changes the order.

    Loads keep the positions of loads of their queue. Loads of a tile that an earlier event uses stay where
    they are. Nothing is yielded if the new order is not legal.
    """
    if not is_permutable(stream):
        return
    used = collect_uses(stream)
    queues: dict[Engine, list[int]] = {}
    first_read: dict[int, int] = {}
    for event in range(len(stream)):
        loaded = find_load(stream, event)
        if loaded is None:
            continue
        source, tile = loaded
        read = next((reader for reader, writes in used[tile] if not writes), None)
        if read is None or used[tile][0][0] != event or any(writes for _, writes in used[source]):
            continue
        first_read[event] = read
        queues.setdefault(find_trigger_engine(stream, event), []).append(event)
    order = list(range(len(stream)))
    for loads in queues.values():
        for position, event in zip(loads, sorted(loads, key=first_read.__getitem__)):
            order[position] = event
    yield from _yield_if_legal(stream, hardware, order)


def interleave_chains(stream: Stream, hardware: Hardware) -> Iterator[Edit]:
    """Yield edits that interleave independent chains of the same steps, for several numbers of chains at a time.

    A chain is a set of events that tiles connect, such as an iteration of a loop. Only legal orders that
    change something are yielded.
    """
    if not is_permutable(stream):
        return
    used = collect_uses(stream)
    known = set[tuple[int, ...]]()
    waits = dependences(stream, every_read=True)
    for keeps_computed in (False, True):
        groups = _find_consecutive_chains(stream, used, keeps_computed)
        longest = max(map(len, groups), default=0)
        for width in (*(width for width in _WIDTHS if width < longest), longest):
            order = list(range(len(stream)))
            for chains in groups:
                for first in range(0, len(chains), width):
                    _interleave(order, chains[first : first + width])
            if longest > 1 and tuple(order) not in known:
                known.add(tuple(order))
                yield from _yield_if_legal(stream, hardware, order, f"{width} at a time", waits)


def _interleave(order: list[int], chains: Sequence[Sequence[int]]) -> None:
    """Permute chains of equal length in `order`, in place: step 1 of every chain, then step 2, and so on.

    Args:
        order: Events in program order; changed in place, at the positions of these chains.
        chains: Events of each chain, in order of its steps.
    """
    positions = sorted(event for chain in chains for event in chain)
    for position, event in zip(positions, (event for step in zip(*chains) for event in step)):
        order[position] = event


def _find_consecutive_chains(stream: Stream, used: Uses, keeps_computed: bool) -> list[list[list[int]]]:
    """Return groups of chains that execute the same lines one after another, each chain as a list of events.

    A chain is a set of events that tiles connect. A tile that one line reads several times is an operand that
    chains share, and connects nothing.

    Args:
        used: Accesses to every tensor.
        keeps_computed: Whether only loaded and constant tiles can be shared, so that computed tiles always
            connect.
    """
    parent = list(range(len(stream)))

    def root(event: int) -> int:
        while parent[event] != event:
            parent[event] = parent[parent[event]]
            event = parent[event]
        return event

    for tile, events in used.items():
        if not stream.tensors[tile].buffer.on_chip:
            continue
        writers = [event for event, writes in events if writes]
        readers = list(dict.fromkeys(event for event, writes in events if not writes))
        steps = [(stream.line_ids[event], stream.template_ids[event]) for event in readers]
        computed = any(_reads_tiles(stream, event) for event in writers)
        is_shared = len(set(steps)) < len(steps) and not (keeps_computed and computed)
        for event in writers if is_shared else [*writers, *readers]:
            parent[root(event)] = root(writers[0] if writers else readers[0])
    members: dict[int, list[int]] = {}
    for event in range(len(stream)):
        members.setdefault(root(event), []).append(event)
    groups: dict[tuple[tuple[int, int], ...], list[list[int]]] = {}
    for chain in members.values():
        steps = [(stream.line_ids[event], stream.ops[event]) for event in chain]
        groups.setdefault(tuple(steps), []).append(chain)
    return [
        chains
        for steps, chains in groups.items()
        if len(steps) > 1
        and len(chains) > 1
        and all(chain[-1] < next_chain[0] for chain, next_chain in pairwise(chains))
    ]


def _reads_tiles(stream: Stream, event: int) -> bool:
    """Return whether an event reads a tile in SBUF or PSUM."""
    template = stream.template(event)
    tensors = stream.tensors_of(event)
    return any(stream.tensors[tensors[read]].buffer.on_chip for read in template.reads)


def _yield_if_legal(
    stream: Stream, hardware: Hardware, order: list[int], detail: str = "", waits: Dependences | None = None
) -> Iterator[Edit]:
    """Yield the edit for a program order if it differs, keeps all dependences and fits into SBUF and PSUM.

    Yields nothing for any other order.

    Args:
        order: All events in the new order.
        detail: What the report says about the change.
        waits: Dependences of the stream, derived if None.
    """
    position = np.empty(len(order), np.int64)
    position[order] = np.arange(len(order))
    moved = np.flatnonzero(position != np.arange(len(order)))
    if not len(moved):
        return
    waits = waits or dependences(stream, every_read=True)
    if np.any(position[waits.packed >> 2] > position[waits.owners]):
        return
    edit = Edit(stream, detail=detail, order=order, moved=moved.tolist())
    changed = edit.apply()
    room = {
        MemoryRegion.sbuf: hardware.sbuf_usable_bytes_per_partition,
        MemoryRegion.psum: hardware.psum_bytes_per_partition,
    }
    if all(count_resident_bytes(changed, region) <= limit for region, limit in room.items()):
        yield edit
