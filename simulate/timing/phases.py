"""Phases of an event: the time in ns that its cost takes of an engine and of the DMA engines.

A cost (`simulate.isa.plan.Cost`) counts cycles; here they become ns in the clock of the engine that issues the event.
A lane is the index of that engine, see `LANES`.
"""

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
    """Cost of an event on an engine, with times in ns.

    `interval_ns` is the issue interval, in which the engine takes no other instruction; `latency_ns` lasts from the
    start to the result. A DMA has an issue interval for its trigger and no `latency_ns`. After the trigger follow
    `first_byte_ns`, `busy_ns` on the DMA engines, `drain_ns` until the last byte arrives, and `completion_ns`. These
    are 0 for other events.
    """

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
"""Phases of an event that the compiler omits: it takes no time, but other events may still depend on it."""


def convert_costs(stream: Stream, hardware: Hardware) -> tuple[list[Phases], NDArray[np.int64]]:
    """Return the distinct phases of a stream's events, and for every event the index of its phases in that list."""
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
    """Return the phases of a cost, converted to ns.

    Args:
        hardware: The record of the chip.
        engine: The engine that carries out the event; the DMA engines for DMAs and collectives.
        trigger: The engine whose stream issues the event. If it has no stream of its own, the Sync engine does.
        cost: The cost, in cycles and for a DMA in ns.
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
