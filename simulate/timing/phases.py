"""Phases of an event: the time in ns that a cost takes of its engine and of the DMA engines."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simulate.hardware import Hardware
from simulate.isa.costs import clock_ghz
from simulate.isa.enums import Engine
from simulate.isa.plan import Cost
from simulate.numerics import ACTIVATION_FUNCTIONS
from simulate.run.stream import Stream
from simulate.timing.timeline import ENGINES

LANES = {engine: lane for lane, engine in enumerate(ENGINES)}
"""Index of every engine that has an instruction stream."""

_RESIDENT_TABLE = ACTIVATION_FUNCTIONS["copy"].table


@dataclass(frozen=True, slots=True, eq=False)
class Phases:
    """Cost on an engine, with times in ns; those of the data phase are 0 unless it is a DMA."""

    lane: int  # the engine that issues it, see LANES
    on_dma: bool  # runs on the DMA engines, after its trigger
    transfers: bool  # has the phases of a DMA
    interval_ns: float
    kept_ns: float = 0.0  # saved if the array contains the weights already
    latency_ns: float = 0.0
    table: str | None = None  # the activation table that has to be loaded
    throttled: bool = False  # streams through the array, whose clock may be throttled
    first_byte_ns: float = 0.0
    busy_ns: float = 0.0
    drain_ns: float = 0.0
    tail_ns: float = 0.0  # from the last byte of the DMA engines to the end of the completion
    completion_ns: float = 0.0
    side_by_side_ns: float = 0.0  # for tiles of the array: time until the engine issues the next matmul
    omitted: bool = False  # takes no time and no engine, see `simulate.timing.cleared`


OMITTED = Phases(LANES[Engine.tensor], on_dma=False, transfers=False, interval_ns=0.0, omitted=True)
"""Phases of an event that the compiler omits: no event waits longer for it than it waits itself."""


def phases_of(stream: Stream, hardware: Hardware) -> tuple[list[Phases], NDArray[np.int64]]:
    """Return the distinct phases of a stream, and the index among them of every event."""
    costs = np.frombuffer(stream.cost_ids, np.uint32).astype(np.int64)
    engines = np.frombuffer(stream.engines, np.uint8).astype(np.int64)
    keys = costs * 256 + engines * 16 + np.frombuffer(stream.triggers, np.uint8)
    distinct_keys, numbers = np.unique(keys, return_inverse=True)
    distinct = [
        _convert_cost(hardware, Engine(key // 16 % 16), Engine(key % 16), stream.costs[key // 256])
        for key in distinct_keys.tolist()
    ]
    return distinct, numbers


def _convert_cost(hardware: Hardware, engine: Engine, trigger: Engine, cost: Cost) -> Phases:
    """Return the phases of a cost.

    A collective or a DMA on an engine without an instruction stream is triggered on the stream of the Sync engine.
    """
    issuer = trigger if trigger in LANES else Engine.sync
    lane, on_dma = LANES[issuer], engine is Engine.dma
    dma = cost.dma
    if dma is not None:
        drain_ns = max(dma.transfer_ns - dma.busy_ns, 0.0)
        return Phases(
            lane,
            on_dma,
            True,
            dma.trigger_ns + dma.gpsimd_ns,
            first_byte_ns=dma.first_byte_ns,
            busy_ns=dma.busy_ns,
            drain_ns=drain_ns,
            tail_ns=drain_ns + dma.completion_ns,
            completion_ns=dma.completion_ns,
        )
    clock = clock_ghz(hardware, issuer)
    return Phases(
        lane,
        on_dma,
        False,
        cost.interval_cycles / clock,
        kept_ns=min(cost.kept_cycles, cost.interval_cycles) / clock,
        latency_ns=cost.latency_cycles / clock,
        table=cost.table if cost.table != _RESIDENT_TABLE else None,
        throttled=hardware.activity_throttle and cost.streamed_cycles > 0.0,
        side_by_side_ns=hardware.matmul_min_interval_cycles / clock if cost.cells else 0.0,
    )
