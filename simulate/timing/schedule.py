"""Placing a stream in time: when each event starts, leaves its engine, and has its result ready.

    start        = max(engine free, operands ready, destination free, DMA queue slot free, rendezvous complete)
    engine free  = start + issue interval
    result ready = start + latency

as `Cost` states them, in the clock of the engine. Decisions where the documentation leaves room:

- A wait for another engine costs a semaphore (`semaphore_ns`). A wait for a DMA costs none on top, because
  its completion time already reaches to the restart of the waiting engine.
- A destination is free when its readers have taken in their operands, at the end of their issue interval
  (`Wait`).
- The trigger of a DMA is an instruction of its stream and waits there for the operands; so does the
  descriptor generation of GpSimd. Then: first-byte time, data phase on the DMA engines (`DmaEngines`), completion. The
  engines move the DMAs of one queue in order, and those of several queues that an event or the end of the launch waits
  for in the time that they take together. At most `dma_outstanding_per_queue` DMAs of a queue are under way; slots
  are freed in order, and the stream stalls at the trigger until one is free.
- Members of a rendezvous start together and are ready together.
- An activation whose function is in another table than the one loaded is preceded by a table load, which
  waits for nothing but the engine. The table of `copy` forces none: published traces show loads on changes to
  the other sets only. The first table is loaded in the kernel as well. In the scheduled reading the load may lie
  in an earlier idle time of the engine, since the last activation that needed the table before.
- The serial reading keeps all of these rules and adds one: an event of a core starts when everything before
  it on that core is finished, and a semaphore later where the engine changes. So no modelled delay (shared
  DMA engines, full queues) can make the program reading longer than the serial one.
- The scheduled reading places by the same rules in another order (`scheduled`), and keeps program order where that
  is no longer. So it is never longer than the program reading, nor shorter than the dataflow one. A matmul whose
  weights the array still holds from the one before it (`weights`) does not load them again: its interval is shorter
  by what the load would have exposed. The dataflow reading takes that for granted wherever weights occur twice.
- A tile that takes the bytes of earlier ones waits until those are free (`rotation`), in all readings but dataflow.

- An instruction that needs a result of its own engine starts `same_engine_wait_ns` after that is ready.
- The activity throttle (gen3, gen4) lets the array run at its full clock only while it is busy enough. Here an
  instruction is slowed down by what the array has done since the kernel began (`Throttle`): the limiter's windows are
  replaced by one that grows, so that a lower cost never lengthens a schedule by the throttle.

- Memory ports that engines share (`ports`) are granted in program order, for the issue interval.

So a lower cost or a dependence less never makes the serial, program or dataflow reading longer.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from simulate.errors import InvalidArgument
from simulate.hardware import Hardware
from simulate.isa.costs import clock_ghz
from simulate.isa.enums import Engine
from simulate.isa.plan import Cost
from simulate.numerics import ACTIVATION_FUNCTIONS
from simulate.run.run_order import as_streams
from simulate.run.stream import Stream
from simulate.timing.dependences import Dependences, dependences
from simulate.timing.ports import shared_ports
from simulate.timing.readings import Reading
from simulate.timing.rotation import with_room
from simulate.timing.scheduled import place_oldest_ready
from simulate.timing.sharing import DmaEngines
from simulate.timing.throttle import Throttle
from simulate.timing.timeline import ENGINES, Placed, Reason, Timeline, build
from simulate.timing.weights import weights_of

# Plain numbers, as the columns of `Placed` hold them.
_BEGIN, _ENGINE, _SHARED = int(Reason.begin), int(Reason.engine), int(Reason.shared)
_WAITED_FOR = tuple(
    map(int, (Reason.operands, Reason.destination, Reason.order, Reason.destination))
)  # by Wait
_NO_OPERANDS = (0.0, -1, _BEGIN, 0.0)
_RESIDENT_TABLE = ACTIVATION_FUNCTIONS["copy"].table
_LANES = {engine: lane for lane, engine in enumerate(ENGINES)}
_TENSOR, _SCALAR = _LANES[Engine.tensor], _LANES[Engine.scalar]


@dataclass(frozen=True, slots=True)
class Bracket:
    """The lengths of the readings of one launch: dataflow <= scheduled <= program <= serial."""

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

    `streams` are those of one launch; `waits` are their dependences, if already known. Raises InvalidArgument
    for rendezvous or requested orders that contradict the streams, and for what is neither stream nor reading.
    """
    if not isinstance(reading, Reading):
        raise InvalidArgument(
            "NKW-TIMING-READING", f"{reading!r:.60} is no reading; there are {', '.join(map(str, Reading))}"
        )
    streams = as_streams(streams)
    if reading is not Reading.scheduled:
        waits = waits or dependences(streams)
        if reading is not Reading.dataflow:
            waits = with_room(streams, hardware, waits)
        return build(streams, hardware, reading, waits.bases, _placed(streams, hardware, reading, waits))
    if waits is None or not waits.every_read:
        waits = dependences(streams, every_read=True)
    waits = with_room(streams, hardware, waits)
    facts = [_Facts(stream, hardware) for stream in streams]
    in_order = _placed(streams, hardware, Reading.program, waits, facts)
    listed = _placed(streams, hardware, reading, waits, facts)
    placed = listed if listed.length_ns < in_order.length_ns else in_order
    return build(streams, hardware, reading, waits.bases, placed)


def _placed(
    streams: tuple[Stream, ...],
    hardware: Hardware,
    reading: Reading,
    waits: Dependences,
    facts: Sequence[_Facts] | None = None,
) -> Placed:
    placed = Placed.of(waits.bases[-1])
    facts = facts or [_Facts(stream, hardware) for stream in streams]
    cores = [
        _Core(number, known, hardware, reading, waits, placed, base)
        for number, (known, base) in enumerate(zip(facts, waits.bases))
    ]
    for step in waits.order:
        if not step.rendezvous:
            for core, first, end in step.members:
                cores[core].run(first, end)
            continue
        events = [waits.bases[core] + first for core, first, _ in step.members]
        starts = [cores[core].admitted(event) for (core, _, _), event in zip(step.members, events)]
        together = max(starts)
        last = events[starts.index(together)]
        for (core, _, _), event, start in zip(step.members, events, starts):
            if start < together:
                placed.cause[event], placed.reason[event] = last, Reason.rendezvous
            cores[core].place(event, together)
        ready = max(placed.ready[event] for event in events)
        for (core, _, _), event in zip(step.members, events):
            cores[core].settle(event, ready)
    for each in cores:
        moved, last = each.dma.finished()
        if moved > placed.moved_ns:
            placed.moved_ns, placed.moved_last = moved, last
    return placed


def bracket(
    streams: Stream | Sequence[Stream], hardware: Hardware, waits: Dependences | None = None
) -> Bracket:
    """How long a launch takes at best and at worst, and in program order."""
    streams = as_streams(streams)
    waits = waits or dependences(streams)
    return Bracket(
        *(
            schedule(streams, hardware, reading, waits).length_ns
            for reading in (Reading.dataflow, Reading.scheduled, Reading.program, Reading.serial)
        )
    )


class _Phases(NamedTuple):
    """One cost on one engine, in nanoseconds."""

    lane: int
    on_dma: bool  # runs on the DMA engines, after its trigger
    transfers: bool  # has the phases of a DMA
    interval_ns: float
    kept_ns: float  # shorter by this where the array holds the weights
    latency_ns: float
    table: str | None
    first_byte_ns: float
    busy_ns: float
    drain_ns: float
    tail_ns: float  # from the last byte of the DMA engines to the end of the completion
    completion_ns: float
    streams: bool  # through the array, whose clock may be throttled
    plain: bool  # neither a DMA nor an activation that needs a table


def _phases(hardware: Hardware, engine: Engine, trigger: Engine, cost: Cost) -> _Phases:
    """A collective or a DMA without a stream of its own is triggered on the Sync stream."""
    issuer = trigger if trigger in _LANES else Engine.sync
    table = cost.table if cost.table != _RESIDENT_TABLE else None
    on_dma = engine is Engine.dma
    dma = cost.dma
    if dma is not None:
        issue_ns = dma.trigger_ns + dma.gpsimd_ns
        drain_ns = max(dma.transfer_ns - dma.busy_ns, 0.0)
        data = (
            dma.first_byte_ns,
            dma.busy_ns,
            drain_ns,
            drain_ns + dma.completion_ns,
            dma.completion_ns,
            False,
            False,
        )
        return _Phases(_LANES[issuer], on_dma, True, issue_ns, 0.0, 0.0, None, *data)
    clock = clock_ghz(hardware, issuer)
    interval_ns, latency_ns = cost.interval_cycles / clock, cost.latency_cycles / clock
    streams = hardware.activity_throttle and cost.streamed_cycles > 0.0
    kept_ns = min(cost.kept_cycles, cost.interval_cycles) / clock
    data = 0.0, 0.0, 0.0, 0.0, 0.0, streams, table is None
    return _Phases(_LANES[issuer], on_dma, False, interval_ns, kept_ns, latency_ns, table, *data)


class _Facts:
    """What placing needs to know of a stream, in whatever order."""

    def __init__(self, stream: Stream, hardware: Hardware) -> None:
        self.phases = _phases_of(stream, hardware)
        self.lanes = [phases.lane for phases in self.phases]
        self.throttle = Throttle(hardware, stream)
        self.ports = shared_ports(stream, hardware)
        self.weights = weights_of(stream)


class _Core:
    """The engines, DMA queues and DMA engines of one core while its stream is placed."""

    def __init__(
        self,
        number: int,
        facts: _Facts,
        hardware: Hardware,
        reading: Reading,
        waits: Dependences,
        placed: Placed,
        base: int,
    ) -> None:
        self.base = base
        self.stream_lane = number * 8
        self.ordered = reading is not Reading.dataflow
        self.serial = reading is Reading.serial
        self.listed = reading is Reading.scheduled
        self.semaphore_ns = hardware.semaphore_ns
        self.same_engine_ns = hardware.same_engine_wait_ns
        self.table_load_ns = hardware.activation_table_load_ns
        self.slots = hardware.dma_outstanding_per_queue
        self.before = waits.before
        self.placed = placed
        self.phases = facts.phases
        self.lanes = facts.lanes
        self.throttle = facts.throttle
        self.ports = facts.ports if self.ordered else []
        self.port_free_ns: dict[int, float] = defaultdict(float)
        self.port_last: dict[int, int] = {}
        self.free_ns = [0.0] * len(ENGINES)
        self.last = [-1] * len(ENGINES)
        self.loaded: str | None = None
        self.idle_ns: float | None = (
            None  # where a table load would fit, since the loaded one was needed last
        )
        self.weights = facts.weights if self.listed or not self.ordered else {}
        self.shared = Counter(self.weights.values())
        self.held = -1
        self.finished_ns = 0.0
        self.finished_last = -1
        self.finished_lane = -1
        self.result_floor_ns = 0.0
        moving = [each for each in set(facts.phases) if each.transfers]
        completion_ns = min((each.completion_ns for each in moving if each.busy_ns > 0.0), default=0.0)
        shared = self.ordered and not self.serial
        self.dma = DmaEngines(
            len(ENGINES), (each.lane for each in moving), completion_ns, base, len(facts.phases), shared
        )
        self.queues: list[list[int]] = [[] for _ in ENGINES]
        # Of an event whose producers are placed: its last operand's moment, producer, reason, and its result's floor.
        self.operands: list[tuple[float, int, int, float] | None] = []
        if self.listed:
            self.operands = [None] * len(self.phases)

    def run(self, first: int, end: int) -> None:
        """Place events that meet nobody."""
        if self.listed:
            place_oldest_ready(self, self.base + first, self.base + end, self.before)
            return
        for event in range(self.base + first, self.base + end):
            self.place(event, self.admitted(event))

    def admitted(self, event: int) -> float:
        """The moment at which an event that is next on its engine starts."""
        at, operands = event - self.base, None
        if self.listed:
            operands, self.operands[at] = self.operands[at], None
        start = self._start(event, operands or self._operands(event))
        if not self.dma.shared:
            return start
        lane, blocker = self.lanes[at], -1
        if self.phases[at].transfers and len(self.queues[lane]) >= self.slots:
            blocker = self.queues[lane][-self.slots]
        moved = self.dma.moved(lane, event, self.before[event], blocker)
        if moved > start:
            start = moved
            self.placed.cause[event] = self.dma.moved_last(lane)
            self.placed.reason[event] = _SHARED
        return start

    def earliest(self, event: int) -> float:
        """The first moment at which an event whose producers are placed may start, as things stand."""
        at = event - self.base
        operands = self.operands[at] = self._operands(event)
        if self.phases[at].plain and not (self.ports and self.ports[at]):
            free_ns = self.free_ns[self.lanes[at]]
            return operands[0] if operands[0] > free_ns else free_ns
        return self._start(event, operands)

    def _start(self, event: int, operands: tuple[float, int, int, float]) -> float:
        """The first moment at which an event may start, and why no sooner."""
        at, placed = event - self.base, self.placed
        phases = self.phases[at]
        lane = phases.lane
        start, cause, reason = 0.0, -1, _BEGIN
        if self.serial:
            start, cause = self.finished_ns, self.finished_last
            if cause >= 0:
                reason = int(Reason.turn)
                if lane != self.finished_lane:
                    start += self.semaphore_ns
        elif self.ordered:
            start, cause = self.free_ns[lane], self.last[lane]
            if cause >= 0:
                reason = _ENGINE
        if self.ordered and not phases.plain:
            placed.table_load[event] = -1.0  # asked before, it may have needed one then
            if phases.table is not None and phases.table != self.loaded:
                if self.idle_ns is None:
                    placed.table_load[event] = start
                    start += self.table_load_ns
                    reason = int(Reason.table_load)
                else:
                    placed.table_load[event] = self.idle_ns
            queue = self.queues[lane]
            if phases.transfers and len(queue) >= self.slots:
                blocker = queue[-self.slots]
                if placed.ready[blocker] > start:
                    start, cause, reason = placed.ready[blocker], blocker, int(Reason.outstanding)
        if self.ports:
            for port in self.ports[at]:
                if self.port_free_ns[port] > start:
                    start, cause, reason = self.port_free_ns[port], self.port_last[port], _ENGINE
        ready, producer, waited, self.result_floor_ns = operands
        if ready > start:
            start, cause, reason = ready, producer, waited
        placed.cause[event], placed.reason[event] = cause, reason
        return start

    def _operands(self, event: int) -> tuple[float, int, int, float]:
        """When what an event waits for lets it start, which is the last of them and why, and its result's floor."""
        waits = self.before[event]
        if not waits:
            return _NO_OPERANDS
        mine = self.stream_lane + self.lanes[event - self.base]
        start = floor = 0.0
        cause, reason = -1, _BEGIN
        placed = self.placed
        ready, read, origin, begun = placed.ready, placed.read, placed.origin, placed.start
        for packed in waits:
            producer, wait = packed >> 2, packed & 3
            if wait == 0:
                moment = ready[producer]
            elif wait == 3:
                if begun[producer] > start:
                    start, cause, reason = begun[producer], producer, _WAITED_FOR[wait]
                continue
            else:
                moment = read[producer]
                if wait == 2 and ready[producer] > floor:
                    floor = ready[producer]
            source = origin[producer]
            if source == mine:
                if wait == 0:
                    moment += self.same_engine_ns
            elif source >= 0:
                moment += self.semaphore_ns
            if moment > start:
                start, cause, reason = moment, producer, _WAITED_FOR[wait]
        return start, cause, reason, floor

    def place(self, event: int, start: float) -> None:
        """Let an event start; its engine, queue and result follow."""
        at, placed = event - self.base, self.placed
        phases = self.phases[at]
        lane = phases.lane
        interval_ns, latency_ns = phases.interval_ns, phases.latency_ns
        if lane == _TENSOR and self.weights:
            interval_ns -= self._kept_ns(at, phases)
        if phases.streams:
            slowed_ns, pipeline_ns = self.throttle.extra(at, start, interval_ns)
            interval_ns += slowed_ns
            latency_ns += slowed_ns + pipeline_ns
        end = start + interval_ns
        if self.ports:
            for port in self.ports[at]:
                self.port_free_ns[port], self.port_last[port] = end, event
        placed.start[event], placed.end[event] = start, end
        if self.ordered:
            if lane == _SCALAR and self.listed:
                self._keep_idle_time(start, phases.table)
            self.free_ns[lane], self.last[lane] = end, event
            if phases.table is not None:
                self.loaded = phases.table
        if phases.transfers:
            self._transfer(event, end + phases.first_byte_ns, phases)
        else:
            placed.origin[event] = self.stream_lane + lane
            ready = start + latency_ns
            if ready < self.result_floor_ns:
                ready = self.result_floor_ns
            placed.ready[event] = ready
            placed.read[event] = end
            if phases.on_dma:
                placed.data_start[event], placed.data_end[event] = min(end, ready), ready
                placed.read[event] = max(end, ready)
        if self.serial:
            self.finished_ns = max(self.finished_ns, end, placed.ready[event])
            self.finished_last, self.finished_lane = event, lane

    def _keep_idle_time(self, start: float, table: str | None) -> None:
        """Remember the first time in which the engine could load the next table; one that is used ends it."""
        if table is not None:
            self.idle_ns = None
        elif self.idle_ns is None and start - self.free_ns[_SCALAR] >= self.table_load_ns:
            self.idle_ns = self.free_ns[_SCALAR]

    def _kept_ns(self, event: int, phases: _Phases) -> float:
        """What a matmul need not wait for, because the array holds its weights."""
        number = self.weights.get(event, -1)
        if self.ordered:
            kept, self.held = number >= 0 and number == self.held, number
        else:
            kept = self.shared[number] > 1
        return phases.kept_ns if kept else 0.0

    def _transfer(self, event: int, arrival: float, phases: _Phases) -> None:
        placed, lane = self.placed, phases.lane
        if self.ordered:
            begin, served, placed.data_cause[event] = self.dma.serve(lane, event, arrival, phases.busy_ns)
        else:
            begin, served = arrival, arrival + phases.busy_ns
        ready = served + phases.tail_ns
        placed.data_start[event], placed.data_end[event] = begin, served + phases.drain_ns
        placed.ready[event] = placed.read[event] = ready
        if self.ordered:
            self.queues[lane].append(event)

    def switches_table(self, event: int) -> bool:
        """An activation that needs another table than the one loaded."""
        table = self.phases[event - self.base].table
        return table is not None and table != self.loaded

    def settle(self, event: int, ready: float) -> None:
        """The end of a rendezvous: all members are ready when the last one is."""
        placed = self.placed
        placed.ready[event] = ready
        placed.read[event] = max(placed.read[event], ready)
        if placed.data_end[event] >= 0.0 and not self.phases[event - self.base].transfers:
            placed.data_end[event] = ready
        self.finished_ns = max(self.finished_ns, ready)


def _phases_of(stream: Stream, hardware: Hardware) -> list[_Phases]:
    costs = np.frombuffer(stream.cost_ids, np.uint32).astype(np.int64)
    engines = np.frombuffer(stream.engines, np.uint8).astype(np.int64)
    keys = costs * 256 + engines * 16 + np.frombuffer(stream.triggers, np.uint8)
    distinct, numbers = np.unique(keys, return_inverse=True)
    known = [
        _phases(hardware, Engine(key // 16 % 16), Engine(key % 16), stream.costs[key // 256])
        for key in distinct.tolist()
    ]
    return [known[number] for number in numbers.tolist()]
