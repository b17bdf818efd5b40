"""Gains from halving a single cost: the launch is scheduled again with that cost halved."""

from __future__ import annotations

import warnings
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from simulate.hardware import Hardware, guessed
from simulate.isa.enums import Engine
from simulate.isa.plan import Cost
from simulate.profile.lines import LineTime
from simulate.profile.moments import format_line
from simulate.run.stream import Stream
from simulate.timing import Dependences, Reading, schedule

LINES = 8
"""Number of lines to halve: those with most of the critical path. A line without a share of the path gains nothing."""

Change = Callable[[Stream, int, Cost], "Cost | None"]


@dataclass(frozen=True, slots=True)
class WhatIf:
    """A halved cost, and the length that the launch then has.

    `cost_name` names the cost: an instruction, an engine, DMAs, semaphores or table loads. `line` is its
    kernel line, or empty if the cost belongs to no line. `length_ns` is the length with the cost halved,
    `before_ns` without.
    """

    cost_name: str
    line: str
    length_ns: float
    before_ns: float

    def __getattr__(self, name: str) -> str:
        if name != "what":
            raise AttributeError(f"WhatIf has no attribute {name!r}")
        warnings.warn("WhatIf.what is deprecated; use WhatIf.cost_name", DeprecationWarning, stacklevel=2)
        return self.cost_name

    @property
    def gain(self) -> float:
        """Saved share of the length, such as 0.1.

        Negative if the launch gets longer, 0 for a launch of length 0.
        """
        return 1.0 - self.length_ns / self.before_ns if self.before_ns else 0.0


def try_halved_costs(
    streams: Sequence[Stream],
    hardware: Hardware,
    reading: Reading,
    waits: Dependences | None,
    before_ns: float,
    by_line: Sequence[LineTime],
) -> tuple[WhatIf, ...]:
    """Schedule a launch again for each of some costs, with that cost halved and all others unchanged.

    The costs are those of LINES lines, of each engine, of the data phase and of the ends of DMAs, of
    semaphores and of table loads.

    Args:
        waits: Dependences of the streams, or None to derive them.
        before_ns: Length of the unchanged launch.
        by_line: Times of lines, in descending order of their part of the critical path. Lines without a part
            are left out.

    Returns:
        A record for each cost, in ascending order of the resulting length.
    """
    changes = []

    def measure(cost_name: str, line: str, changed: Sequence[Stream], chip: Hardware) -> None:
        length = schedule(changed, chip, reading, waits).length_ns
        changes.append(WhatIf(cost_name, line, length, before_ns))

    for line_time in [line for line in by_line if line.path_ns > 0.0][:LINES]:
        ops: dict[str, None] = {}

        def halve_line(
            stream: Stream, event: int, cost: Cost, line_time: LineTime = line_time
        ) -> Cost | None:
            if stream.lines[stream.line_ids[event]] != line_time.line:
                return None
            ops[stream.op_names[stream.ops[event]]] = None  # noqa: B023
            return halve_cost(cost)

        changed = _replace_costs(streams, halve_line)
        measure(" and ".join(ops), format_line(line_time.line), changed, hardware)
    for engine, name in _ENGINES.items():

        def halve_engine(stream: Stream, event: int, cost: Cost, engine: Engine = engine) -> Cost | None:
            return halve_cost(cost) if stream.engines[event] == engine.value else None

        measure(f"all of {name}", "", _replace_costs(streams, halve_engine), hardware)
    measure("data phase of all DMAs", "", _replace_costs(streams, _halve_data_phase), hardware)
    measure("start and end of all DMAs", "", _replace_costs(streams, _halve_dma_ends), hardware)
    for number, name in _NUMBERS.items():
        value = getattr(hardware, number) / 2
        measure(name, "", streams, hardware.with_numbers(**{number: guessed(value, "what if", "halved")}))
    return tuple(sorted(changes, key=lambda change: (change.length_ns, change.cost_name, change.line)))


_ENGINES = {
    Engine.tensor: "Tensor",
    Engine.vector: "Vector",
    Engine.scalar: "Scalar",
    Engine.gpsimd: "GpSimd",
    Engine.sync: "Sync",
}
_NUMBERS = {"semaphore_ns": "semaphores", "activation_table_load_ns": "activation table loads"}


def halve_cost(cost: Cost) -> Cost:
    """Return a cost with all of its times halved, those of its DMA too."""
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


def _halve_data_phase(stream: Stream, event: int, cost: Cost) -> Cost | None:
    """Return the cost of a DMA with its data phase halved; None for other instructions."""
    dma = cost.dma
    if dma is None:
        return None
    return replace(cost, dma=replace(dma, busy_ns=dma.busy_ns / 2, transfer_ns=dma.transfer_ns / 2))


def _halve_dma_ends(stream: Stream, event: int, cost: Cost) -> Cost | None:
    """Return the cost of a DMA with all but its data phase halved; None for other instructions."""
    halved_dma = halve_cost(cost).dma
    if halved_dma is None:
        return None
    assert cost.dma is not None
    return replace(cost, dma=replace(halved_dma, busy_ns=cost.dma.busy_ns, transfer_ns=cost.dma.transfer_ns))


def _replace_costs(streams: Sequence[Stream], change: Change) -> list[Stream]:
    """Return copies of the streams in which `change` replaces costs.

    Args:
        change: Returns the new cost of an event, or None to keep it. It may depend on cost, line and engine
            only: it is called once for each combination.
    """
    changed_streams = []
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
        changed_streams.append(stream.with_costs(costs, array("I", ids)))
    return changed_streams
