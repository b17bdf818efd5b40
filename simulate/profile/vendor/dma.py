"""The tables DmaPacket and DmaPacketAggregated: when DMAs move how many bytes, by queue and by tensor."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from simulate.profile.vendor.engines import CORE, SPAN, by_core, span
from simulate.profile.vendor.intervals import Covered, Extent
from simulate.profile.vendor.records import Dma, Queue
from simulate.profile.vendor.tables import Kind, Names, Tables

_ENGINE_QUEUE = re.compile(r"q(Tensor|Vector|Scalar|GpSimd|Sync)(?![a-z])")
_SMALLEST_BYTES = 4
"""Transfers up to this size update semaphores; the vendor's bounds leave them out."""


@dataclass
class Packets:
    """What the two tables add up to; None where a table is missing."""

    covered: Covered = field(default_factory=Covered)
    packets: int | None = None
    packet_bytes: int | None = None
    transfers: int | None = None
    transfer_bytes: int | None = None
    queues: tuple[Queue, ...] = ()
    by_variable: Mapping[str, int] = field(default_factory=dict)
    extent: Extent = field(default_factory=Extent)


def queue_label(written: str) -> str:
    """The queue as our timelines name it, by the engine that triggers it: `qScalarSpillReload0` is `DMA q Scalar`."""
    match = _ENGINE_QUEUE.match(written)
    return f"DMA q {match[1]}" if match else written or "DMA queue without a name"


def packets(tables: Tables) -> Packets:
    """Both tables, added up."""
    found = Packets()
    _add_transfers(found, tables)
    _add_packets(found, tables)
    return found


def dma(found: Packets, fields: Mapping[str, float]) -> Dma:
    """All DMA of a profile: what Summary says, else what the rows add up to."""

    def whole(name: str, other: int | None = None) -> int | None:
        return int(fields[name]) if name in fields else other

    counted = found.packets is not None or found.transfers is not None
    covered = found.covered.ns if counted else None
    return Dma(
        active_ns=fields["dma_active_time"] * 1e9 if "dma_active_time" in fields else covered,
        bytes=whole(
            "dma_transfer_total_bytes",
            found.packet_bytes if found.transfer_bytes is None else found.transfer_bytes,
        ),
        transfers=whole("dma_transfer_count", found.transfers),
        packets=found.packets,
        hbm_read_bytes=whole("hbm_read_bytes"),
        hbm_written_bytes=whole("hbm_write_bytes"),
        queues=found.queues,
    )


def _add_transfers(found: Packets, tables: Tables) -> None:
    names = Names()
    queues: dict[tuple[int, str], tuple[Covered, list[int]]] = {}
    variables: dict[str, int] = {}
    needed = {**SPAN, "transfer_bytes": Kind.whole, "queue_name": Kind.text}
    optional = {**CORE, "variable": Kind.text, "queue_type": Kind.text}
    for batch in tables.batches("DmaPacketAggregated", needed, optional, names):
        starts, ends = span(batch, "DmaPacketAggregated")
        found.extent.add(starts, ends)
        if "DmaPacket" not in tables:
            found.covered.add(starts, ends)
        sizes = np.maximum(batch["transfer_bytes"], 0)
        data = batch["queue_type"] != names.number("instruction")
        found.transfers = (found.transfers or 0) + int(data.sum())
        found.transfer_bytes = (found.transfer_bytes or 0) + int(sizes[data].sum(dtype=np.float64))
        for core, number, rows in by_core(batch, batch["queue_name"], queues, "DmaPacketAggregated"):
            covered, sums = queues.setdefault((core, queue_label(names.of(number))), (Covered(), [0, 0]))
            covered.add(starts[rows], ends[rows])
            sums[0] += len(rows)
            sums[1] += int(sizes[rows].sum(dtype=np.float64))
        numbers, places = np.unique(batch["variable"], return_inverse=True)
        for number, size in zip(numbers.tolist(), np.bincount(places, weights=sizes).tolist()):
            if number >= 0:
                variables[names.of(number)] = variables.get(names.of(number), 0) + int(size)
    found.by_variable = variables
    ordered = sorted(queues.items(), key=lambda item: item[0])
    found.queues = tuple(Queue(*key, sums[0], sums[1], covered.ns) for key, (covered, sums) in ordered)


def _add_packets(found: Packets, tables: Tables) -> None:
    names = Names()
    needed = {**SPAN, "transfer_bytes": Kind.whole}
    for batch in tables.batches("DmaPacket", needed, {"queue_type": Kind.text}, names):
        starts, ends = span(batch, "DmaPacket")
        found.extent.add(starts, ends)
        found.covered.add(starts, ends)
        sizes = batch["transfer_bytes"]
        data = (batch["queue_type"] != names.number("instruction")) & (sizes > _SMALLEST_BYTES)
        found.packets = (found.packets or 0) + len(starts)
        found.packet_bytes = (found.packet_bytes or 0) + int(sizes[data].sum(dtype=np.float64))
