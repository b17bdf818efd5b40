"""Reading of a device profile's tables DmaPacket and DmaPacketAggregated: transfers and bytes, by queue and tensor.

A row of DmaPacketAggregated is a transfer, which moves one or more packets, the rows of DmaPacket.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from simulate.profile.vendor.engines import CORE, SPAN, get_span, split_by_core
from simulate.profile.vendor.intervals import Covered, Extent
from simulate.profile.vendor.records import Dma, Queue
from simulate.profile.vendor.tables import ColumnType, Names, Tables

_ENGINE_QUEUE = re.compile(r"q(Tensor|Vector|Scalar|GpSimd|Sync)(?![a-z])")
_SMALLEST_BYTES = 4
"""Largest size of a transfer that only updates a semaphore; the vendor's bounds leave such transfers out."""


@dataclass
class Packets:
    """Sums over the two tables; None if a table is missing.

    `covered` is the time in which DMAs move bytes. `packets` and `packet_bytes` are from DmaPacket,
    `transfers` and `transfer_bytes` from DmaPacketAggregated; both `bytes` exclude instruction fetches.
    `by_variable` has the bytes moved of each variable. `extent` runs from the first start to the last end.
    """

    covered: Covered = field(default_factory=Covered)
    packets: int | None = None
    packet_bytes: int | None = None
    transfers: int | None = None
    transfer_bytes: int | None = None
    queues: tuple[Queue, ...] = ()
    by_variable: Mapping[str, int] = field(default_factory=dict)
    extent: Extent = field(default_factory=Extent)


def normalise_queue(name: str) -> str:
    """Return a queue's name as timelines write it, after the engine that triggers it.

    `qScalarSpillReload0` becomes `DMA q Scalar`; a name without an engine is returned unchanged.
    """
    match = _ENGINE_QUEUE.match(name)
    return f"DMA q {match[1]}" if match else name or "DMA queue without a name"


def sum_packets(tables: Tables) -> Packets:
    """Return the sums over DmaPacket and DmaPacketAggregated."""
    totals = Packets()
    _add_transfers(totals, tables)
    _add_packets(totals, tables)
    return totals


def make_dma(totals: Packets, fields: Mapping[str, float]) -> Dma:
    """Return the figures of all DMA of a profile, from the fields of Summary if present, else from the sums.

    Args:
        totals: Sums over the tables.
        fields: Fields of Summary by name.
    """

    def read_count(name: str, default: int | None = None) -> int | None:
        return int(fields[name]) if name in fields else default

    counted = totals.packets is not None or totals.transfers is not None
    covered_ns = totals.covered.ns if counted else None
    return Dma(
        active_ns=fields["dma_active_time"] * 1e9 if "dma_active_time" in fields else covered_ns,
        bytes=read_count(
            "dma_transfer_total_bytes",
            totals.packet_bytes if totals.transfer_bytes is None else totals.transfer_bytes,
        ),
        transfers=read_count("dma_transfer_count", totals.transfers),
        packets=totals.packets,
        hbm_read_bytes=read_count("hbm_read_bytes"),
        hbm_written_bytes=read_count("hbm_write_bytes"),
        queues=totals.queues,
    )


def _add_transfers(totals: Packets, tables: Tables) -> None:
    """Add the rows of DmaPacketAggregated to `totals`: transfers and bytes, by queue and by variable.

    Rows of instruction fetches count for queues and variables only.
    """
    names = Names()
    queues: dict[tuple[int, str], tuple[Covered, list[int]]] = {}
    variables: dict[str, int] = {}
    needed = {**SPAN, "transfer_bytes": ColumnType.integer, "queue_name": ColumnType.text}
    optional = {**CORE, "variable": ColumnType.text, "queue_type": ColumnType.text}
    for batch in tables.read_batches("DmaPacketAggregated", needed, optional, names):
        starts, ends = get_span(batch, "DmaPacketAggregated")
        totals.extent.add(starts, ends)
        if "DmaPacket" not in tables:
            totals.covered.add(starts, ends)
        sizes = np.maximum(batch["transfer_bytes"], 0)
        is_payload = batch["queue_type"] != names.number("instruction")
        totals.transfers = (totals.transfers or 0) + int(is_payload.sum())
        totals.transfer_bytes = (totals.transfer_bytes or 0) + int(sizes[is_payload].sum(dtype=np.float64))
        for core, number, rows in split_by_core(batch, batch["queue_name"], queues, "DmaPacketAggregated"):
            covered, sums = queues.setdefault(
                (core, normalise_queue(names.get_text(number))), (Covered(), [0, 0])
            )
            covered.add(starts[rows], ends[rows])
            sums[0] += len(rows)
            sums[1] += int(sizes[rows].sum(dtype=np.float64))
        numbers, name_indices = np.unique(batch["variable"], return_inverse=True)
        for number, size in zip(numbers.tolist(), np.bincount(name_indices, weights=sizes).tolist()):
            if number >= 0:
                variables[names.get_text(number)] = variables.get(names.get_text(number), 0) + int(size)
    totals.by_variable = variables
    ordered = sorted(queues.items(), key=lambda entry: entry[0])
    totals.queues = tuple(Queue(*key, sums[0], sums[1], covered.ns) for key, (covered, sums) in ordered)


def _add_packets(totals: Packets, tables: Tables) -> None:
    """Add the rows of DmaPacket to `totals`: their number, and bytes without fetches and semaphore updates."""
    names = Names()
    needed = {**SPAN, "transfer_bytes": ColumnType.integer}
    for batch in tables.read_batches("DmaPacket", needed, {"queue_type": ColumnType.text}, names):
        starts, ends = get_span(batch, "DmaPacket")
        totals.extent.add(starts, ends)
        totals.covered.add(starts, ends)
        sizes = batch["transfer_bytes"]
        is_payload = (batch["queue_type"] != names.number("instruction")) & (sizes > _SMALLEST_BYTES)
        totals.packets = (totals.packets or 0) + len(starts)
        totals.packet_bytes = (totals.packet_bytes or 0) + int(sizes[is_payload].sum(dtype=np.float64))
