"""One core while its stream is placed: its engines, memory ports, DMA queues and DMA engines."""

from __future__ import annotations

from collections import Counter, defaultdict
from functools import cached_property

import numpy as np

from simulate.hardware import Hardware
from simulate.isa.enums import Engine
from simulate.run.stream import Stream
from simulate.timing.causes import Reason
from simulate.timing.cleared import cleared_accumulators
from simulate.timing.dependences import Wait
from simulate.timing.edges import STRIDE, Edges
from simulate.timing.phases import LANES, OMITTED, Phases, phases_of
from simulate.timing.ports import shared_ports
from simulate.timing.readings import Reading
from simulate.timing.sharing import DmaEngines, Span
from simulate.timing.throttle import Throttle
from simulate.timing.timeline import ENGINES, Placed
from simulate.timing.weights import weights_of

# Plain numbers, as the columns of `Placed` hold them.
_BEGIN, _ENGINE, _SHARED = int(Reason.begin), int(Reason.engine), int(Reason.shared)
_ORDER, _RENDEZVOUS = int(Reason.order), int(Reason.rendezvous)
_WAITED_FOR = [
    int(reason)
    for reason in (Reason.operands, Reason.destination, Reason.order, Reason.room)  # by Wait
    for _ in range(STRIDE // 4)
]
_TENSOR, _SCALAR = LANES[Engine.tensor], LANES[Engine.scalar]


class Facts:
    """What the placing of a stream on a chip needs to know of it, in whatever order."""

    def __init__(self, stream: Stream, hardware: Hardware) -> None:
        self.distinct, numbers = phases_of(stream, hardware)
        self.phases = [self.distinct[number] for number in numbers.tolist()]
        self.lane_column = np.array([each.lane for each in self.distinct], np.int64)[numbers]
        omitted = cleared_accumulators(stream)
        for event in omitted:
            self.phases[event] = OMITTED
        self.lane_column[omitted] = OMITTED.lane
        self.lanes = self.lane_column.tolist()
        self.transfers = np.array([each.transfers for each in self.distinct], bool)[numbers]
        self.throttle = Throttle(hardware, stream)
        self.ports = shared_ports(stream, hardware)
        special = [each.transfers or each.table is not None for each in self.distinct]
        self.special = np.array(special, bool)[numbers].tolist()
        """By event, whether more than the engine and the operands decides when it may start."""
        for event in omitted:
            self.special[event] = True
        if self.ports:
            self.special = [each or bool(ports) for each, ports in zip(self.special, self.ports)]
        self._stream = stream

    @cached_property
    def weights(self) -> dict[int, int]:
        """The weights of every matmul that could find them in the array, see `weights_of`."""
        return weights_of(self._stream)

    @cached_property
    def queues(self) -> set[int]:
        """The engines that trigger DMAs."""
        return {phases.lane for phases in self.distinct if phases.transfers}


class Core:
    """The state of core `number`, whose events are numbered from `base` on over all streams."""

    def __init__(
        self,
        number: int,
        facts: Facts,
        hardware: Hardware,
        reading: Reading,
        edges: Edges,
        placed: Placed,
        base: int,
    ) -> None:
        self.base = base
        self.serial = reading is Reading.serial
        self.ordered = reading is not Reading.dataflow
        self.listed = reading is Reading.scheduled
        self.semaphore_ns = hardware.semaphore_ns
        self.same_engine_ns = hardware.same_engine_wait_ns
        self.table_load_ns = hardware.activation_table_load_ns
        self.slots = hardware.dma_outstanding_per_queue
        self.waits, self.ends, self.results = edges.moments, edges.ends, edges.results
        self.others, self.other_ends = edges.others, edges.other_ends
        self.placed = placed
        self.moments = placed.moments
        self.phases = facts.phases
        self.lanes = facts.lanes
        self.throttle = facts.throttle
        self.ports = facts.ports if self.ordered else []
        self.special = facts.special if self.ordered and not self.serial else [True] * len(facts.phases)
        self.port_free_ns: dict[int, float] = defaultdict(float)
        self.port_last: dict[int, int] = {}
        self.free_ns = [0.0] * len(ENGINES)
        self.last = [-1] * len(ENGINES)
        self.loaded: str | None = None
        # Where a table load would fit, since the loaded table was needed last.
        self.idle_ns: float | None = None
        self.weights = facts.weights if self.listed or not self.ordered else {}
        placed.in_order &= not self.weights
        self.uses_of_weights = Counter(self.weights.values())
        self.held = -1
        self.finished_ns = 0.0
        self.finished_last = -1
        self.finished_lane = -1
        completions = [each.completion_ns for each in facts.distinct if each.transfers and each.busy_ns > 0.0]
        self.dma = DmaEngines(
            len(ENGINES),
            facts.queues,
            min(completions, default=0.0),
            len(facts.phases),
            self.ordered and not self.serial,
        )
        self.shared = self.dma.shared
        self.queues: list[list[int]] = [[] for _ in ENGINES]
        self.issued: list[list[Span]] = [[] for _ in ENGINES]  # dataflow: what each engine has to do

    def run(self, first: int, end: int) -> None:
        """Place the events first ... end in program order; none of them is in a rendezvous."""
        operands, admitted, place = self.operands, self.admitted, self.place
        for event in range(first, end):
            ready_ns, last = operands(event)
            place(event, admitted(event, ready_ns, last))

    def operands(self, event: int) -> tuple[float, int]:
        """When the last moment that an event waits for comes, in ns, and the number of that moment or -1."""
        ends, moments = self.ends, self.moments
        ready, last = 0.0, -1
        for number in self.waits[ends[event] : ends[event + 1]]:
            moment = moments[number]
            if moment > ready:
                ready, last = moment, number
        return ready, last

    def earliest(self, event: int, ready_ns: float) -> float:
        """The first moment at which an event may start whose operands are ready at `ready_ns`, as things stand."""
        at = event - self.base
        start = self._available(event, at)[0] if self.special[at] else self.free_ns[self.lanes[at]]
        return ready_ns if ready_ns > start else start

    def admitted(self, event: int, ready_ns: float, last: int) -> float:
        """The moment at which an event that is next on its engine starts, given what `operands` says."""
        at = event - self.base
        placed, lane = self.placed, self.lanes[at]
        if self.special[at]:
            start, cause, reason = self._available(event, at)
        else:
            start, cause = self.free_ns[lane], self.last[lane]
            reason = _ENGINE if cause >= 0 else _BEGIN
        if ready_ns > start:
            start, cause, reason = ready_ns, last // STRIDE, _WAITED_FOR[last % STRIDE]
        if self.shared:
            ends = self.other_ends
            producers = self.others[ends[event] : ends[event + 1]]
            if self.phases[at].transfers:
                blocker = self._blocker(lane)
                if blocker >= 0:
                    producers.append(blocker - self.base)
            moved = self.dma.moved(lane, at, producers)
            if moved > start:
                moving = placed.moving[2 * event] = self.dma.moving(lane)
                start, cause, reason = moved, moving.last + self.base, _SHARED
        placed.cause[event], placed.reason[event] = cause, reason
        return start

    def _available(self, event: int, at: int) -> tuple[float, int, int]:
        """When the core could start an event whose operands are ready, and why no sooner: (ns, event, Reason)."""
        placed, phases = self.placed, self.phases[at]
        if phases.omitted:
            return self._handed_on(event)
        if not self.ordered:
            return 0.0, -1, _BEGIN
        lane = phases.lane
        if self.serial:
            start, cause, reason = self.finished_ns, self.finished_last, int(Reason.turn)
            if cause >= 0 and lane != self.finished_lane:
                start += self.semaphore_ns
        else:
            start, cause, reason = self.free_ns[lane], self.last[lane], _ENGINE
        if cause < 0:
            reason = _BEGIN
        if phases.transfers:
            blocker = self._blocker(lane)
            if blocker >= 0 and placed.ready[blocker] > start:
                return placed.ready[blocker], blocker, int(Reason.outstanding)
            return start, cause, reason
        if phases.table is not None:
            placed.table_load[event] = -1.0  # a table may have been missing when `earliest` asked
            if phases.table != self.loaded:
                placed.table_load[event] = start if self.idle_ns is None else self.idle_ns
                if self.idle_ns is None:
                    start += self.table_load_ns
                    reason = reason if self.serial and cause >= 0 else int(Reason.table_load)
        if self.ports:
            for port in self.ports[at]:
                if self.port_free_ns[port] > start:
                    start, cause, reason = self.port_free_ns[port], self.port_last[port], _ENGINE
        return start, cause, reason

    def _handed_on(self, event: int) -> tuple[float, int, int]:
        """What an omitted event leaves to the matmuls: results of its own engine, which they must not overtake."""
        start, cause, reason = 0.0, -1, _BEGIN
        for producer in self.results.get(event, ()):
            told = self.moments[producer * STRIDE + 2 * Wait.result]
            if told > start:
                start, cause, reason = told, producer, _WAITED_FOR[2 * Wait.result]
        return start, cause, reason

    def _blocker(self, lane: int) -> int:
        """The DMA whose place in a full queue the next one takes, or -1."""
        queue = self.queues[lane]
        return queue[-self.slots] if len(queue) >= self.slots else -1

    def place(self, event: int, start: float) -> None:
        """Let an event start; its engine, queue and result follow."""
        at, placed = event - self.base, self.placed
        phases = self.phases[at]
        if phases.omitted:
            placed.start[event] = placed.end[event] = start
            self._tell(event, phases, start, start, start)
            return
        lane = phases.lane
        interval_ns, latency_ns = phases.interval_ns, phases.latency_ns
        if lane == _TENSOR and self.weights:
            interval_ns -= self._kept_ns(at, phases)
        if phases.throttled:
            slowed_ns, pipeline_ns = self.throttle.extra(at, start, interval_ns)
            interval_ns += slowed_ns
            latency_ns += slowed_ns + pipeline_ns
        end = free = start + interval_ns
        if 0.0 < phases.side_by_side_ns < interval_ns:
            free = start + phases.side_by_side_ns
        placed.start[event], placed.end[event] = start, end
        if self.ports:
            for port in self.ports[at]:
                if event < self.port_last.get(port, -1):
                    placed.in_order = False
                self.port_free_ns[port], self.port_last[port] = end, event
        if self.ordered:
            if self.listed and lane == _SCALAR:
                self._keep_idle_time(start, phases.table)
            self.free_ns[lane], self.last[lane] = free, event
            if phases.table is not None:
                self.loaded = phases.table
        else:
            self.issued[lane].append((start, free - start, at))
        if phases.transfers:
            read = ready = self._transfer(event, end + phases.first_byte_ns, phases)
        else:
            read, ready = end, start + latency_ns
            for producer in self.results.get(event, ()):
                if placed.ready[producer] > ready:
                    ready = placed.ready[producer]
                    placed.results[event] = producer, _ORDER
            if phases.on_dma:
                placed.data_start[event], placed.data_end[event] = min(end, ready), ready
                read = max(end, ready)
        self._tell(event, phases, start, read, ready)
        if self.serial:
            self.finished_ns = max(self.finished_ns, end, ready)
            self.finished_last, self.finished_lane = event, lane

    def _keep_idle_time(self, start: float, table: str | None) -> None:
        """Remember the first time in which the engine could load the next table; one that is used ends it."""
        if table is not None:
            if self.idle_ns is not None and table != self.loaded:
                self.placed.in_order = False
            self.idle_ns = None
        elif self.idle_ns is None and start - self.free_ns[_SCALAR] >= self.table_load_ns:
            self.idle_ns = self.free_ns[_SCALAR]

    def _kept_ns(self, at: int, phases: Phases) -> float:
        """What a matmul need not wait for, because the array holds its weights."""
        number = self.weights.get(at, -1)
        if self.ordered:
            kept, self.held = number >= 0 and number == self.held, number
        else:
            kept = self.uses_of_weights[number] > 1
        return phases.kept_ns if kept else 0.0

    def _transfer(self, event: int, arrival: float, phases: Phases) -> float:
        """Carry out the data phase of a DMA; returns when it is complete, in ns."""
        placed = self.placed
        begin, served = arrival, arrival + phases.busy_ns
        if self.ordered:
            at = event - self.base
            begin, served, blocker, moving = self.dma.serve(phases.lane, at, arrival, phases.busy_ns)
            placed.data_cause[event] = blocker + self.base if blocker >= 0 else -1
            if moving is not None:
                placed.moving[2 * event + 1] = moving
            self.queues[phases.lane].append(event)
        else:
            self.dma.request(phases.lane, event - self.base, arrival, phases.busy_ns)
        placed.data_start[event], placed.data_end[event] = begin, served + phases.drain_ns
        return served + phases.tail_ns

    def switches_table(self, event: int) -> bool:
        """Whether an event needs another activation table than the one loaded."""
        table = self.phases[event - self.base].table
        return table is not None and table != self.loaded

    def settle(self, event: int, ready: float, last: int) -> None:
        """The end of a rendezvous: all members are ready when the last one is."""
        placed, phases = self.placed, self.phases[event - self.base]
        if placed.ready[event] < ready:
            placed.results[event] = last, _RENDEZVOUS
        read = placed.moments[event * STRIDE + 2 * Wait.read + 1]
        self._tell(event, phases, placed.start[event], max(read, ready), ready)
        if placed.data_end[event] >= 0.0 and not phases.transfers:
            placed.data_end[event] = ready
        self.finished_ns = max(self.finished_ns, ready)

    def _tell(self, event: int, phases: Phases, start: float, read: float, ready: float) -> None:
        """Note from when on other events may start; the completion of a DMA reaches to the engine that waits for it."""
        semaphore_ns, same_ns = self.semaphore_ns, self.same_engine_ns
        if phases.transfers or phases.omitted:
            semaphore_ns = same_ns = 0.0
        placed, first, told = self.placed, event * STRIDE, read + semaphore_ns
        placed.ready[event] = ready
        placed.moments[first : first + STRIDE] = (
            (ready + semaphore_ns, ready + same_ns, told, read, told, read, start, start)
        )  # fmt: skip
