"""What a launch would gain if one thing took half the time: the schedule is made again with that cost halved."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from simulate.hardware import Hardware, guessed
from simulate.isa.enums import Engine
from simulate.isa.plan import Cost
from simulate.profile.lines import LineTime
from simulate.profile.moments import named
from simulate.run.stream import Stream
from simulate.timing import Dependences, Reading, schedule

LINES = 8
"""Lines that are tried: those that hold most of the critical path. A line that holds none of it gains nothing."""

Change = Callable[[Stream, int, Cost], "Cost | None"]


@dataclass(frozen=True, slots=True)
class WhatIf:
    """One thing at half its time, and the length that a launch has then."""

    what: str
    line: str
    length_ns: float
    before_ns: float

    @property
    def gain(self) -> float:
        """The part of the length that is saved; negative where the schedule gets longer."""
        return 1.0 - self.length_ns / self.before_ns if self.before_ns else 0.0


def what_if(
    streams: Sequence[Stream],
    hardware: Hardware,
    reading: Reading,
    waits: Dependences | None,
    before_ns: float,
    by_line: Sequence[LineTime],
) -> tuple[WhatIf, ...]:
    """Everything tried, the largest gain first: lines of the critical path, engines, DMA, semaphores, table loads."""
    found = []

    def tried(what: str, line: str, changed: Sequence[Stream], chip: Hardware) -> None:
        length = schedule(changed, chip, reading, waits).length_ns
        found.append(WhatIf(what, line, length, before_ns))

    for each in [line for line in by_line if line.path_ns > 0.0][:LINES]:
        ops: dict[str, None] = {}

        def of_line(stream: Stream, event: int, cost: Cost, each: LineTime = each) -> Cost | None:
            if stream.lines[stream.line_ids[event]] != each.line:
                return None
            ops[stream.op_names[stream.ops[event]]] = None  # noqa: B023
            return halved(cost)

        changed = _changed(streams, of_line)
        tried(" and ".join(ops), named(each.line), changed, hardware)
    for engine, name in _ENGINES.items():

        def of_engine(stream: Stream, event: int, cost: Cost, engine: Engine = engine) -> Cost | None:
            return halved(cost) if stream.engines[event] == engine.value else None

        tried(f"all of {name}", "", _changed(streams, of_engine), hardware)
    tried("data phase of all DMAs", "", _changed(streams, _faster_data), hardware)
    tried("start and end of all DMAs", "", _changed(streams, _faster_ends), hardware)
    for field, name in _NUMBERS.items():
        value = getattr(hardware, field) / 2
        tried(name, "", streams, hardware.with_numbers(**{field: guessed(value, "what if", "halved")}))
    return tuple(sorted(found, key=lambda each: (each.length_ns, each.what, each.line)))


_ENGINES = {
    Engine.tensor: "Tensor",
    Engine.vector: "Vector",
    Engine.scalar: "Scalar",
    Engine.gpsimd: "GpSimd",
    Engine.sync: "Sync",
}
_NUMBERS = {"semaphore_ns": "semaphores", "activation_table_load_ns": "activation table loads"}


def halved(cost: Cost) -> Cost:
    """A cost whose times are all half as long."""
    dma = cost.dma
    if dma is not None:
        dma = replace(
            dma,
            trigger_ns=dma.trigger_ns / 2,
            first_byte_ns=dma.first_byte_ns / 2,
            busy_ns=dma.busy_ns / 2,
            transfer_ns=dma.transfer_ns / 2,
            completion_ns=dma.completion_ns / 2,
            gpsimd_ns=dma.gpsimd_ns / 2,
        )
    return replace(
        cost,
        interval_cycles=cost.interval_cycles / 2,
        latency_cycles=cost.latency_cycles / 2,
        kept_cycles=cost.kept_cycles / 2,
        rendezvous_ns=cost.rendezvous_ns / 2,
        dma=dma,
    )


def _faster_data(stream: Stream, event: int, cost: Cost) -> Cost | None:
    dma = cost.dma
    if dma is None:
        return None
    return replace(cost, dma=replace(dma, busy_ns=dma.busy_ns / 2, transfer_ns=dma.transfer_ns / 2))


def _faster_ends(stream: Stream, event: int, cost: Cost) -> Cost | None:
    whole = halved(cost).dma
    if whole is None:
        return None
    assert cost.dma is not None
    return replace(cost, dma=replace(whole, busy_ns=cost.dma.busy_ns, transfer_ns=cost.dma.transfer_ns))


def _changed(streams: Sequence[Stream], change: Change) -> list[Stream]:
    """The streams with the costs that `change` gives; it must not depend on anything but cost, line and engine."""
    out = []
    for stream in streams:
        costs = list(stream.costs)
        known: dict[tuple[int, int, int], int] = {}
        ids = []
        for event, key in enumerate(zip(stream.cost_ids, stream.line_ids, stream.engines)):
            number = known.get(key)
            if number is None:
                cost = change(stream, event, stream.costs[key[0]])
                number = key[0]
                if cost is not None:
                    number = len(costs)
                    costs.append(cost)
                known[key] = number
            ids.append(number)
        out.append(stream.with_costs(costs, array("I", ids)))
    return out
