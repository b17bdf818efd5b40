"""Predicted times of a case: its kernels run dry, are scheduled on the chip, and the measured quantity is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.fidelity.case import Case, NotCovered, Quantity
from simulate.hardware import Confidence, Hardware, guessed
from simulate.isa.plan import Cost
from simulate.run.launch import Launch
from simulate.run.machine import Mode
from simulate.timing import Dependences, Reading, SliceKind, Timeline, dependences, schedule
from simulate.world import launch

_PROBE = 1.1  # guessed constants made slower by this factor, to see how much of a time rests on them
_TIMES = ("_ns", "_cycles", "_cycles_per_element", "_cycles_per_row", "_passes")
_RATES = ("_ghz", "_bytes_per_ns", "_gb_per_s", "_fraction", "_elements_per_cycle")


@dataclass(frozen=True)
class Prediction:
    """Predicted times of one case.

    times_us: time by reading. floor_us: lower bound from the peak rates, 0 unless a whole kernel was timed.
    guessed_share: elasticity of the main time with respect to all guessed constants; its relative growth, divided by
    the common relative growth of all guessed times and inverse rates. events: events of all streams.
    host_overhead_ns: the host's share of each time, 0 if only the device was timed.
    """

    times_us: Mapping[Reading, float]
    floor_us: float
    guessed_share: float
    events: int
    host_overhead_ns: float = 0.0


def predict(
    case: Case,
    readings: Sequence[Reading] = tuple(Reading),
    main: Reading = Reading.program,
    probe: bool = True,
) -> Prediction:
    """Predict a case's time under the main reading and each of `readings`.

    A reading other than `main` that does not show the quantity is left out of the times. `probe` computes the guessed
    share under `main`, else it is 0; for a formula it is always computed.

    Raises:
        NotCovered: if the main reading's timeline does not show the measured quantity.
    """
    if case.quantity is Quantity.formula:
        formula_us = time_us(case, case.chip, (), ())
        share = _guessed_share(case, (), (), main, formula_us)
        return Prediction(dict.fromkeys((main, *readings), formula_us), 0.0, share, 0)
    launches = launch_dry(case)
    waits = [dependences(done.streams) for done in launches]
    times = {}
    for reading in dict.fromkeys((main, *readings)):
        placed = [schedule(done.streams, done.hardware, reading, wait) for done, wait in zip(launches, waits)]
        try:
            times[reading] = time_us(case, case.chip, launches, placed)
        except NotCovered:
            if reading is main:
                raise
            continue  # the dataflow reading, for one, loads no activation tables
    share = _guessed_share(case, launches, waits, main, times[main]) if probe and times[main] else 0.0
    floor = 0.0
    if case.quantity in _WHOLE:
        floor = (
            _sum(max(floor_ns(done.hardware, stream) for stream in done.streams) for done in launches)
            / case.divisor
        )
    events = sum(len(stream) for done in launches for stream in done.streams)
    calls = len(launches) if case.quantity is Quantity.host else 0
    return Prediction(times, floor, share, events, calls * case.chip.host_overhead_ns / case.divisor)


def launch_dry(case: Case) -> list[Launch]:
    """Launch each kernel of a case dry: instructions are recorded, no values computed. Returns the launches."""
    return [
        launch(
            getattr(run.kernel, "func", run.kernel),
            [(arguments, {}) for arguments in run.arguments],
            case.chip,
            run.cores_per_rank,
            Mode.dry,
        )
        for run in case.runs
    ]


def time_us(case: Case, chip: Hardware, launches: Sequence[Launch], timelines: Sequence[Timeline]) -> float:
    """Return the measured quantity of a case in us, summed over its launches and divided by `case.divisor`.

    `launches` and `timelines` belong together by position. A formula is evaluated on `chip`; both are then unused.
    """
    if case.quantity is Quantity.formula:
        return case.formula(chip) / 1000.0
    return _sum(_read(case, chip, *pair) for pair in zip(launches, timelines)) / case.divisor


def _guessed_share(
    case: Case, launches: Sequence[Launch], waits: Sequence[Dependences], reading: Reading, before_us: float
) -> float:
    """Return the elasticity of a time under a reading with respect to the guessed constants of the chip.

    `before_us` is the time with the constants unchanged. Returns 0 if the chip has no guessed times or rates.
    """
    slower = _slower(case.chip)
    if slower is case.chip:
        return 0.0
    probed = [done.on(slower) for done in launches]
    placed = [schedule(done.streams, done.hardware, reading, wait) for done, wait in zip(probed, waits)]
    return (time_us(case, slower, probed, placed) / before_us - 1.0) / (_PROBE - 1.0)


def _sum(nanoseconds: object) -> float:
    """Add up times in ns and return the sum in us."""
    return sum(nanoseconds) / 1000.0  # type: ignore[call-overload, no-any-return]


def _slower(chip: Hardware) -> Hardware:
    """Return the chip with each guessed time multiplied, and each guessed rate divided, by `_PROBE`.

    Returns the same object if no constant is guessed.
    """
    changed = {}
    for name, number in chip.provenance.items():
        if number.confidence is not Confidence.guessed:
            continue
        if name.endswith(_RATES):
            factor = 1.0 / _PROBE
        elif name.endswith(_TIMES):
            factor = _PROBE
        else:
            continue
        if isinstance(number.value, Mapping):
            changed[name] = guessed({key: factor * entry for key, entry in number.value.items()}, "probe", "")
        else:
            changed[name] = guessed(factor * number.value, "probe", "")
    return chip.with_numbers(**changed) if changed else chip


def _read(case: Case, chip: Hardware, done: Launch, timeline: Timeline) -> float:
    """Return the measured quantity of one launch in ns, read from its timeline, with the overheads that it contains."""
    quantity = case.quantity
    if quantity is Quantity.length:
        return timeline.length_ns
    if quantity is Quantity.benchmark:
        return timeline.length_ns + chip.benchmark_overhead_ns
    if quantity is Quantity.profiler:
        return timeline.length_ns + timeline.overhead_ns
    if quantity is Quantity.host:
        return timeline.length_ns + timeline.overhead_ns + chip.host_overhead_ns
    if quantity is Quantity.data_phase:
        moving = timeline.slice_kind == SliceKind.transfer
        return float(timeline.end_ns[moving].max() - timeline.start_ns[moving].min())
    return _instruction_ns(case, done, timeline)


_WHOLE = (Quantity.data_phase, Quantity.length, Quantity.benchmark, Quantity.profiler, Quantity.host)

_KINDS = {
    Quantity.table_load: (SliceKind.table_load,),
    Quantity.trigger: (SliceKind.trigger,),
    Quantity.first_byte: (SliceKind.transfer,),
    Quantity.data: (SliceKind.transfer,),
    Quantity.completion: (SliceKind.transfer,),
}


def _instruction_ns(case: Case, done: Launch, timeline: Timeline) -> float:
    """Return the interval, latency or DMA phase in ns of the last occurrence of `case.operation` on core 0.

    By the last occurrence the pipeline is full. Raises NotCovered if the timeline has no such event, or only one for
    an interval.
    """
    quantity, stream = case.quantity, done.streams[0]
    wanted = np.array([stream.op_names[op] == case.operation for op in stream.ops])
    slice_kinds = _KINDS.get(quantity, (SliceKind.instruction, SliceKind.trigger))
    mine = np.flatnonzero((timeline.stream == 0) & np.isin(timeline.slice_kind, slice_kinds))
    mine = mine[wanted[timeline.event[mine]]]
    if len(mine) == 0:
        raise NotCovered(f"no {case.operation} with a {quantity.value} is in the timeline")
    last = int(mine[-1])
    start, end, ready = timeline.start_ns, timeline.end_ns, timeline.ready_ns
    if quantity in (Quantity.table_load, Quantity.trigger, Quantity.data):
        return float(end[last] - start[last])
    if quantity is Quantity.latency:
        return float(ready[last] - start[last])
    if quantity is Quantity.completion:
        return float(ready[last] - end[last])
    if quantity is Quantity.first_byte:
        issued = (timeline.slice_kind == SliceKind.trigger) & (timeline.event == timeline.event[last])
        return float(start[last] - start[issued][0])
    if len(mine) < 2:
        raise NotCovered(f"a single {case.operation} has no interval")
    return float(start[mine[-1]] - start[mine[-2]])


def floor_ns(chip: Hardware, stream: object) -> float:
    """Return a lower bound of a stream's time in ns.

    It is the longer of two times: all DMA bytes at one core's share of the HBM bandwidth, and all FLOP at the fp8
    peak of the Tensor engine.
    """
    costs: list[Cost] = [stream.costs[number] for number in stream.cost_ids]  # type: ignore[attr-defined]
    moved = sum(cost.dma.bytes for cost in costs if cost.dma is not None)
    flops = sum(cost.flops for cost in costs)
    rate = chip.hbm_gb_per_s_per_core
    array = 2 * chip.contraction_max_double_row * chip.stationary_free_max * chip.tensor_clock_ghz
    return max(moved / rate, flops / array)
