"""The predicted time of a case: dry runs, placed in time, and read as the measurement was."""

from __future__ import annotations

import numpy as np

from benchmarks.fidelity.case import Case, NotCovered, Quantity, Run
from simulate.hardware import Hardware
from simulate.isa.enums import Engine
from simulate.run.launch import Launch, launch
from simulate.run.machine import Mode
from simulate.timing import Kind, Reading, Timeline, schedule


def predicted_us(case: Case, reading: Reading = Reading.program) -> float:
    """The time that the simulator predicts for what was measured."""
    return sum(_run_ns(case, run, reading) for run in case.runs) / case.divisor / 1000.0


def _run_ns(case: Case, run: Run, reading: Reading) -> float:
    arguments = [(own, {}) for own in run.arguments]
    function = getattr(run.kernel, "func", run.kernel)
    done = launch(function, arguments, case.chip, run.cores_per_rank, Mode.dry)
    timeline = schedule(done.streams, case.chip, reading)
    return _read(case, done, timeline)


def _read(case: Case, done: Launch, timeline: Timeline) -> float:
    chip, quantity = case.chip, case.quantity
    if quantity is Quantity.length:
        return timeline.length_ns
    if quantity is Quantity.benchmark:
        return timeline.length_ns + chip.benchmark_overhead_ns
    if quantity is Quantity.profiler:
        return timeline.length_ns + timeline.overhead_ns
    if quantity is Quantity.host:
        return timeline.length_ns + timeline.overhead_ns + chip.host_overhead_ns
    if quantity in (Quantity.data_phase, Quantity.data):
        moving = timeline.kind == Kind.transfer
        return float(timeline.end_ns[moving].max() - timeline.start_ns[moving].min())
    return _instruction_ns(case, done, timeline)


def _instruction_ns(case: Case, done: Launch, timeline: Timeline) -> float:
    """A quantity of the last occurrence of an instruction, whose pipeline is full by then."""
    quantity = case.quantity
    stream = done.streams[0]
    wanted = np.array([stream.op_names[op] == case.of for op in stream.ops])
    if not wanted.any():
        raise NotCovered(f"the kernel has no {case.of}")
    kind = {
        Quantity.table_load: Kind.table_load,
        Quantity.trigger: Kind.trigger,
        Quantity.first_byte: Kind.transfer,
        Quantity.completion: Kind.transfer,
    }.get(quantity)
    kinds = (Kind.instruction, Kind.trigger) if kind is None else (kind,)
    mine = np.flatnonzero((timeline.stream == 0) & np.isin(timeline.kind, kinds) & wanted[timeline.event])
    if len(mine) == 0:
        raise NotCovered(f"{case.of} has no {quantity.value} in the timeline")
    last = int(mine[-1])
    start, end, ready = timeline.start_ns, timeline.end_ns, timeline.ready_ns
    if quantity in (Quantity.table_load, Quantity.trigger):
        return float(end[last] - start[last])
    if quantity is Quantity.latency:
        return float(ready[last] - start[last])
    if quantity is Quantity.completion:
        return float(ready[last] - end[last])
    if quantity is Quantity.first_byte:
        issued = (timeline.kind == Kind.trigger) & (timeline.event == timeline.event[last])
        return float(start[last] - start[issued][0])
    if len(mine) < 2:
        raise NotCovered(f"one {case.of} has no interval")
    return float(start[mine[-1]] - start[mine[-2]])


def floor_us(case: Case) -> float:
    """What physics allows at least: bytes that cross the DMA engines or HBM at peak, FLOP at the array's peak."""
    total = 0.0
    for run in case.runs:
        done = launch(
            getattr(run.kernel, "func", run.kernel),
            [(own, {}) for own in run.arguments],
            case.chip,
            run.cores_per_rank,
            Mode.dry,
        )
        total += max(_floor_ns(case.chip, stream) for stream in done.streams)
    return total / case.divisor / 1000.0


def _floor_ns(chip: Hardware, stream: object) -> float:
    moved = flops = 0.0
    for cost_id in stream.cost_ids:  # type: ignore[attr-defined]
        cost = stream.costs[cost_id]  # type: ignore[attr-defined]
        flops += cost.flops
        moved += cost.dma.bytes if cost.dma is not None else 0
    array = 2 * chip.contraction_max * chip.stationary_free_max * chip.tensor_clock_ghz
    return max(moved / (chip.dma_engines * chip.dma_engine_bytes_per_ns), flops / array)


__all__ = ["Engine", "floor_us", "predicted_us"]
