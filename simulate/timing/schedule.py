"""Schedule of a stream: when each event starts, leaves its engine, and has its result ready.

    start        = max(engine free, operands ready, destination free, DMA queue slot free, rendezvous complete)
    engine free  = start + issue interval
    result ready = start + latency

with the cycles of `Cost`, in the clock of the engine. In the program reading, engines and DMA queues run concurrently,
each in program order. Policies where the documentation is silent:

- A wait for another engine costs a semaphore (`semaphore_ns`). A wait for a DMA costs no semaphore, because the
  completion time of a DMA already includes the restart of the waiting engine.
- An instruction that needs a result of its own engine starts `same_engine_wait_ns` after that result is ready.
- A destination is free when its readers have read their operands, at the end of their issue interval (`Wait`).
- The trigger of a DMA is an instruction of its stream and waits there for the operands; so does the descriptor
  generation of GpSimd. After it come the first-byte time, the data phase on the DMA engines (`DmaEngines`) and the
  completion. At most `dma_outstanding_per_queue` DMAs of a queue are under way. Slots are freed in order, and the
  stream stalls at the trigger until one is free.
- A load that casts is triggered on the Sync stream although GpSimd writes its descriptors; then GpSimd's time for the
  descriptors is part of the trigger.
- The DMA engines move the DMAs of one queue in order. The DMAs of several queues that an event or the end of the launch
  waits for take as long as all of them together (`sharing`).
- Members of a rendezvous start together and are ready together.
- A table load precedes an activation whose function is in another table than the loaded one. The load waits for the
  engine alone. The table of `copy` forces none: published traces show loads on changes to the other sets only. The
  first table is loaded in the kernel as well. In the scheduled reading the load may fill an earlier idle time of the
  engine, after the last activation that needed the previous table.
- The dataflow reading delays no event by an engine. But a launch ends no sooner than each engine, and the DMA engines
  together, could have done all their work in sequence, each event from when its dependences let it begin.
- A tile that takes the bytes of earlier tiles waits until those are free (`rotation`), in all readings but dataflow.
- The activity throttle (gen3, gen4) lets the array run at its full clock only while the array is busy enough. What the
  array has done since the kernel began decides (`Throttle`): a window that grows replaces the limiter's windows, so
  that a lower cost never lengthens a schedule by the throttle.
- A memset of zero in PSUM that matmuls take over is omitted (`cleared`): it takes no time and no engine.
- Matmuls in tiles of the array that share no cell run side by side. The Tensor engine issues the next matmul after the
  minimum interval; a matmul waits for the cells that it takes.
- Events after the step that begins an iteration of a device loop wait for that step, on every engine of the core.
- Memory ports that engines share (`ports`) are granted in program order, for the issue interval.
- The serial reading adds one rule: an event of a core starts when all earlier events of that core are finished, and a
  semaphore later if the engine changes. So no modelled delay (shared DMA engines, full queues) makes the program
  reading longer than the serial reading.
- The scheduled reading applies the same rules in the order of a list scheduler (`scheduled`), or in program order if
  that is no longer. So the scheduled reading is never longer than the program reading, nor shorter than dataflow.
- In the scheduled reading, a matmul whose weights are still in the array does not load them again (`weights`). Its
  interval is shorter by the exposed part of the load. The dataflow reading assumes this wherever weights occur twice.

So a lower cost, or one dependence fewer, never makes the serial, program or dataflow reading longer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from simulate.hardware import Hardware
from simulate.isa.plan import Phase
from simulate.run.run_order import as_streams
from simulate.run.stream import Stream
from simulate.timing.causes import Reason
from simulate.timing.core import Core, Facts
from simulate.timing.dependences import Dependences, dependences
from simulate.timing.edges import STRIDE, Edges
from simulate.timing.readings import Reading, check_reading
from simulate.timing.rotation import add_room_waits
from simulate.timing.scheduled import ListScheduler
from simulate.timing.sharing import Service, find_last_busy_period
from simulate.timing.timeline import Placed, Timeline, build_timeline


@dataclass(frozen=True, slots=True)
class Bracket:
    """Predicted lengths of one launch in all readings: dataflow <= scheduled <= program <= serial."""

    dataflow_ns: float
    scheduled_ns: float
    program_ns: float
    serial_ns: float


def schedule(
    streams: Stream | Sequence[Stream],
    hardware: Hardware,
    reading: Reading = Reading.program,
    waits: Dependences | None = None,
) -> Timeline:
    """Place the events of one or several cores in time.

    Args:
        streams: The streams of one launch, or the only one.
        hardware: The record of the chip.
        reading: What may overlap.
        waits: The dependences of the streams, if already known, to save time. The scheduled reading uses them only if
            they were made with `every_read`.

    Raises:
        InvalidArgument: The cores enter rendezvous in different orders, a call of `depends_on` names an event that is
            issued later, or an argument is no stream or no `Reading`.
    """
    check_reading(reading)
    streams = as_streams(streams)
    if reading is not Reading.scheduled:
        waits = waits or dependences(streams)
        if reading is not Reading.dataflow:
            waits = add_room_waits(streams, hardware, waits)
        return build_timeline(
            streams, hardware, reading, waits.bases, _Launch(streams, hardware, waits).place_events(reading)
        )
    if waits is None or not waits.every_read:
        waits = dependences(streams, every_read=True)
    waits = add_room_waits(streams, hardware, waits)
    launch = _Launch(streams, hardware, waits)
    placed = launch.place_events(reading)
    if not placed.in_order:  # otherwise program order gives the same
        in_order = launch.place_events(Reading.program)
        placed = placed if placed.length_ns < in_order.length_ns else in_order
    return build_timeline(streams, hardware, reading, waits.bases, placed)


_ALWAYS = (
    "semaphore_ns",
    "same_engine_wait_ns",
    "tensor_clock_ghz",
    "vector_clock_ghz",
    "scalar_clock_ghz",
    "gpsimd_clock_ghz",
    "sync_clock_ghz",
)
_THROTTLED = (
    "activity_throttle_window_ns",
    "activity_throttle_busy_fraction",
    "tensor_throttled_clock_ghz",
    "matmul_throttled_latency_ns",
    "matmul_latency_ns",
    "hbm_gb_per_s_per_core",
)


def list_deciding_numbers(streams: Sequence[Stream], hardware: Hardware) -> tuple[Any, ...]:
    """Return all numbers that decide the schedule of a launch, as a key for comparing two records of one chip.

    These are costs, clocks, waits, the throttle and shared ports. If the keys of two records that differ in times only
    are equal, `schedule` gives the same times for both. Kernel overheads are not among the numbers.
    """
    costs = [cost for stream in streams for cost in stream.costs]
    names = list(_ALWAYS)
    if any(cost.table is not None for cost in costs):
        names.append("activation_table_load_ns")
    if any(cost.cells for cost in costs):
        names.append("matmul_min_interval_cycles")
    if hardware.activity_throttle and any(cost.streamed_cycles for cost in costs):
        names += _THROTTLED
    numbers = [getattr(hardware, name) for name in names]
    return (*costs, *numbers, hardware.psum_same_bank_slowdown_factor > 1.0)


class _Launch:
    """Streams of a launch with the facts and dependences that placing them in any reading needs."""

    def __init__(self, streams: tuple[Stream, ...], hardware: Hardware, waits: Dependences) -> None:
        self._hardware = hardware
        self._waits = waits
        self._facts = [Facts(stream, hardware) for stream in streams]
        lanes = [facts.lane_column for facts in self._facts]
        shared = any(len(facts.queues) > 1 for facts in self._facts)
        self._edges = Edges(waits, lanes, [facts.transfers for facts in self._facts], shared)

    def place_events(self, reading: Reading) -> Placed:
        """Place every event in time by a reading, from scratch, and return the times."""
        waits, edges = self._waits, self._edges
        placed = Placed.allocate(waits.bases[-1], STRIDE)
        cores = [
            Core(number, facts, self._hardware, reading, edges, placed, base)
            for number, (facts, base) in enumerate(zip(self._facts, waits.bases))
        ]
        run: Callable[[Core, int, int], None] = Core.run
        if reading is Reading.scheduled:
            run = ListScheduler(edges).run
        for step in waits.order:
            events = [waits.bases[core] + first for core, first, _ in step.members]
            members = [cores[core] for core, _, _ in step.members]
            if step.is_rendezvous:
                _place_rendezvous(members, events, placed)
                continue
            for core, event, (_, first, end) in zip(members, events, step.members):
                run(core, event, event + end - first)
        placed.queues = [core.dma.queues for core in cores]
        for core in cores:
            for done_ns, services, until in _list_final_work(core):
                if done_ns > placed.done_ns:
                    placed.done_ns, placed.services_until = done_ns, until
                    placed.services = services
        return placed


def _list_final_work(core: Core) -> Iterator[tuple[float, list[Service], Phase]]:
    """Yield (end in ns, last services, their last phase) for work of a core that only the end of the launch waits for.

    This is the work of the DMA engines if several queues share them or in the dataflow reading; there also the work of
    each engine. The services are those of the last busy period.
    """
    if core.shared or not core.ordered:
        yield *core.dma.find_end(core.base), Phase.completion
    for spans in core.issued:
        services = find_last_busy_period(spans, core.base)
        if services:
            yield services[-1].end_ns, services, Phase.issue


def _place_rendezvous(cores: Sequence[Core], events: Sequence[int], placed: Placed) -> None:
    """Place the members of one rendezvous: they start when the last can start, and are ready when the last is ready.

    Args:
        cores: The cores that take part.
        events: The event of each of these cores.
        placed: The times, to which start, cause and result of the events are written.
    """
    starts = [core.find_start(event, *core.find_ready_moment(event)) for core, event in zip(cores, events)]
    start_ns = max(starts)
    last = events[starts.index(start_ns)]
    for core, event, start in zip(cores, events, starts):
        if start < start_ns:
            placed.cause[event], placed.reason[event] = last, int(Reason.rendezvous)
        core.start_event(event, start_ns)
    slowest = max(events, key=lambda event: placed.ready[event])
    ready = placed.ready[slowest]
    for core, event in zip(cores, events):
        core.end_rendezvous(event, ready, slowest)


def bracket(
    streams: Stream | Sequence[Stream], hardware: Hardware, waits: Dependences | None = None
) -> Bracket:
    """Return the predicted length of a launch in every reading, in ns, without the overhead of starting a kernel.

    Args:
        streams: The streams of one launch, or the only one.
        hardware: The record of the chip.
        waits: The dependences of the streams, if already known.

    Raises:
        InvalidArgument: As `schedule`.
    """
    streams = as_streams(streams)
    waits = waits or dependences(streams)
    return Bracket(
        *(
            schedule(streams, hardware, reading, waits).length_ns
            for reading in (Reading.dataflow, Reading.scheduled, Reading.program, Reading.serial)
        )
    )
