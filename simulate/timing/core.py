"""State of one core while its stream is placed in time: its engines, memory ports, DMA queues and DMA engines.

`simulate.timing.schedule` makes one `Core` for each stream, which writes the times of its events into `Placed`. Events
are numbered over all streams; the number within a core is the event minus `base`. A lane is the index of an engine
(`LANES`). A moment is a time from which on waiting events may start; every event has `STRIDE` of them
(`simulate.timing.edges`). Causes and reasons are those of `simulate.timing.causes`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from functools import cached_property

import numpy as np

from simulate.hardware import Hardware
from simulate.isa.enums import Engine
from simulate.run.stream import Stream
from simulate.timing.causes import Reason
from simulate.timing.cleared import find_omitted_memsets
from simulate.timing.dependences import Wait
from simulate.timing.edges import STRIDE, Edges
from simulate.timing.phases import LANES, OMITTED, Phases, convert_costs
from simulate.timing.ports import find_shared_ports
from simulate.timing.readings import Reading
from simulate.timing.sharing import DmaEngines, Span
from simulate.timing.throttle import Throttle
from simulate.timing.timeline import ENGINES, Placed
from simulate.timing.weights import number_weights

# Plain integers, which the columns of `Placed` store.
_BEGIN, _ENGINE, _SHARED = int(Reason.begin), int(Reason.engine), int(Reason.shared)
_ORDER, _RENDEZVOUS = int(Reason.order), int(Reason.rendezvous)
_WAITED_FOR = [
    int(reason)
    for reason in (Reason.operands, Reason.destination, Reason.order, Reason.room)  # by Wait
    for _ in range(STRIDE // 4)
]
_TENSOR, _SCALAR = LANES[Engine.tensor], LANES[Engine.scalar]


class Facts:
    """Facts about a stream on a chip that placing it in any order needs; lists have one entry for each event.

    `distinct` has the distinct `Phases`, `phases` those of each event. `lanes` has the lane of each event, as has
    `lane_column` as an array. `transfers` tells which events are DMAs. `ports` has the ports of each event, or is empty
    if no event takes one.
    """

    def __init__(self, stream: Stream, hardware: Hardware) -> None:
        self.distinct, numbers = convert_costs(stream, hardware)
        self.phases = [self.distinct[number] for number in numbers.tolist()]
        self.lane_column = np.array([phases.lane for phases in self.distinct], np.int64)[numbers]
        omitted = find_omitted_memsets(stream)
        for event in omitted:
            self.phases[event] = OMITTED
        self.lane_column[omitted] = OMITTED.lane
        self.lanes = self.lane_column.tolist()
        self.transfers = np.array([phases.transfers for phases in self.distinct], bool)[numbers]
        self.throttle = Throttle(hardware, stream)
        self.ports = find_shared_ports(stream, hardware)
        special = [phases.transfers or phases.table is not None for phases in self.distinct]
        self.special = np.array(special, bool)[numbers].tolist()
        """Whether the start of an event depends on more than its engine and its dependences, for every event."""
        for event in omitted:
            self.special[event] = True
        if self.ports:
            self.special = [is_special or bool(ports) for is_special, ports in zip(self.special, self.ports)]
        self._stream = stream

    @cached_property
    def weights(self) -> dict[int, int]:
        """Number of the stationary operand of each matmul, by event within the core, as `number_weights` returns it."""
        return number_weights(self._stream)

    @cached_property
    def queues(self) -> set[int]:
        """Lanes of the engines that trigger DMAs; each of them has one DMA queue."""
        return {phases.lane for phases in self.distinct if phases.transfers}


class Core:
    """State of one core while its events are placed; events are numbered from `base` on over all streams.

    Its methods write into `placed`, which all cores share. `free_ns` and `last` are, by lane, the time at which an
    engine is free and its last event (-1 if it had none). The waits of event e are the entries `ends[e] : ends[e + 1]`
    of `waits`, each an index into `moments`.
    """

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
        self.producers, self.producer_ends = edges.producers, edges.producer_ends
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
        # Begin of an idle time that fits a table load, since the loaded table was needed last.
        self.idle_ns: float | None = None
        self.weights = facts.weights if self.listed or not self.ordered else {}
        placed.in_order &= not self.weights
        self.uses_of_weights = Counter(self.weights.values())
        self.array_weights = -1
        self.finished_ns = 0.0
        self.finished_last = -1
        self.finished_lane = -1
        completions = [p.completion_ns for p in facts.distinct if p.transfers and p.busy_ns > 0.0]
        self.dma = DmaEngines(
            len(ENGINES),
            facts.queues,
            min(completions, default=0.0),
            len(facts.phases),
            self.ordered and not self.serial,
        )
        self.shared = self.dma.shared
        self.queues: list[list[int]] = [[] for _ in ENGINES]
        self.issued: list[list[Span]] = [[] for _ in ENGINES]  # work of each engine, in the dataflow reading

    def run(self, first: int, end: int) -> None:
        """Place the events from `first` up to, but not including, `end` in program order.

        None of them may be a member of a rendezvous.
        """
        find_ready_moment, find_start, start_event = self.find_ready_moment, self.find_start, self.start_event
        for event in range(first, end):
            ready_ns, last = find_ready_moment(event)
            start_event(event, find_start(event, ready_ns, last))

    def find_ready_moment(self, event: int) -> tuple[float, int]:
        """Return the latest moment that an event waits for: its time in ns, and its index in `moments`.

        All producers of the event must be placed. Returns (0.0, -1) if the event waits for nothing.
        """
        ends, moments = self.ends, self.moments
        ready, last = 0.0, -1
        for number in self.waits[ends[event] : ends[event + 1]]:
            moment = moments[number]
            if moment > ready:
                ready, last = moment, number
        return ready, last

    def estimate_start(self, event: int, ready_ns: float) -> float:
        """Return the earliest time in ns at which an event could start if its engine took it next.

        A list scheduler compares these times. Delays by shared DMA queues are left out.

        Args:
            event: The event.
            ready_ns: The time of the latest moment that it waits for, from `find_ready_moment`.
        """
        number = event - self.base
        start = (
            self._find_core_start(event, number)[0]
            if self.special[number]
            else self.free_ns[self.lanes[number]]
        )
        return ready_ns if ready_ns > start else start

    def find_start(self, event: int, ready_ns: float, last: int) -> float:
        """Return the start in ns of an event that is next on its engine, and record why it starts no earlier.

        Writes `cause` and `reason` of `placed`, and `table_load` if a table must be loaded. `start_event` must follow.

        Args:
            event: The event.
            ready_ns: The time of the latest moment that it waits for, from `find_ready_moment`.
            last: The index of that moment in `moments`, -1 if there is none.
        """
        number = event - self.base
        placed, lane = self.placed, self.lanes[number]
        if self.special[number]:
            start, cause, reason = self._find_core_start(event, number)
        else:
            start, cause = self.free_ns[lane], self.last[lane]
            reason = _ENGINE if cause >= 0 else _BEGIN
        if ready_ns > start:
            start, cause, reason = ready_ns, last // STRIDE, _WAITED_FOR[last % STRIDE]
        if self.shared:
            ends = self.producer_ends
            producers = self.producers[ends[event] : ends[event + 1]]
            if self.phases[number].transfers:
                blocker = self._find_blocker(lane)
                if blocker >= 0:
                    producers.append(blocker - self.base)
            moved = self.dma.find_moved_ns(lane, number, producers)
            if moved > start:
                moving = placed.moving[2 * event] = self.dma.find_needed_period(lane)
                start, cause, reason = moved, moving.last + self.base, _SHARED
        placed.cause[event], placed.reason[event] = cause, reason
        return start

    def _find_core_start(self, event: int, number: int) -> tuple[float, int, int]:
        """Return the earliest start in ns that the core itself allows, the event it waits for, and the `Reason`.

        Dependences are left out. The event is -1 if it waits for none. Writes `placed.table_load` of an event that
        needs an activation table: the begin of the load, or -1 if the table is loaded.

        Args:
            event: The event, by its number over all streams.
            number: The event, by its number within the core.
        """
        placed, phases = self.placed, self.phases[number]
        if phases.omitted:
            return self._find_omitted_start(event)
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
            blocker = self._find_blocker(lane)
            if blocker >= 0 and placed.ready[blocker] > start:
                return placed.ready[blocker], blocker, int(Reason.outstanding)
            return start, cause, reason
        if phases.table is not None:
            placed.table_load[event] = -1.0  # a table may have been missing at `estimate_start`
            if phases.table != self.loaded:
                placed.table_load[event] = start if self.idle_ns is None else self.idle_ns
                if self.idle_ns is None:
                    start += self.table_load_ns
                    reason = reason if self.serial and cause >= 0 else int(Reason.table_load)
        if self.ports:
            for port in self.ports[number]:
                if self.port_free_ns[port] > start:
                    start, cause, reason = self.port_free_ns[port], self.port_last[port], _ENGINE
        return start, cause, reason

    def _find_omitted_start(self, event: int) -> tuple[float, int, int]:
        """Return start in ns, awaited event and `Reason` of an omitted event, which takes no engine.

        It starts when the results of earlier writes of its engine to the same bytes are ready, since the matmuls that
        accumulate onto it must not overtake them; at 0 if there are none.
        """
        start, cause, reason = 0.0, -1, _BEGIN
        for producer in self.results.get(event, ()):
            moment = self.moments[producer * STRIDE + 2 * Wait.result]
            if moment > start:
                start, cause, reason = moment, producer, _WAITED_FOR[2 * Wait.result]
        return start, cause, reason

    def _find_blocker(self, lane: int) -> int:
        """Return the DMA that must be complete before another DMA enters a lane's queue, -1 if the queue has a slot."""
        queue = self.queues[lane]
        return queue[-self.slots] if len(queue) >= self.slots else -1

    def start_event(self, event: int, start: float) -> None:
        """Start an event at `start` ns: record its times in `placed`, and update its engine, ports and DMA queue."""
        number, placed = event - self.base, self.placed
        phases = self.phases[number]
        if phases.omitted:
            placed.start[event] = placed.end[event] = start
            self._set_moments(event, phases, start, start, start)
            return
        lane = phases.lane
        interval_ns, latency_ns = phases.interval_ns, phases.latency_ns
        if lane == _TENSOR and self.weights:
            interval_ns -= self._count_saved_ns(number, phases)
        if phases.throttled:
            slowed_ns, pipeline_ns = self.throttle.compute_delays(number, start, interval_ns)
            interval_ns += slowed_ns
            latency_ns += slowed_ns + pipeline_ns
        end = free = start + interval_ns
        if 0.0 < phases.side_by_side_ns < interval_ns:
            free = start + phases.side_by_side_ns
        placed.start[event], placed.end[event] = start, end
        if self.ports:
            for port in self.ports[number]:
                if event < self.port_last.get(port, -1):
                    placed.in_order = False
                self.port_free_ns[port], self.port_last[port] = end, event
        if self.ordered:
            if self.listed and lane == _SCALAR:
                self._update_idle_time(start, phases.table)
            self.free_ns[lane], self.last[lane] = free, event
            if phases.table is not None:
                self.loaded = phases.table
        else:
            self.issued[lane].append((start, free - start, number))
        if phases.transfers:
            read = ready = self._move_data(event, end + phases.first_byte_ns, phases)
        else:
            read, ready = end, start + latency_ns
            for producer in self.results.get(event, ()):
                if placed.ready[producer] > ready:
                    ready = placed.ready[producer]
                    placed.results[event] = producer, _ORDER
            if phases.on_dma:
                placed.data_start[event], placed.data_end[event] = min(end, ready), ready
                read = max(end, ready)
        self._set_moments(event, phases, start, read, ready)
        if self.serial:
            self.finished_ns = max(self.finished_ns, end, ready)
            self.finished_last, self.finished_lane = event, lane

    def _update_idle_time(self, start: float, table: str | None) -> None:
        """Update the idle time of the Scalar engine in which the next activation table could be loaded.

        `idle_ns` is the begin of the first gap since the last use of a table that is long enough for a load, else None.

        Args:
            start: The start in ns of the engine's next event.
            table: The activation table that this event needs, or None.
        """
        if table is not None:
            if self.idle_ns is not None and table != self.loaded:
                self.placed.in_order = False
            self.idle_ns = None
        elif self.idle_ns is None and start - self.free_ns[_SCALAR] >= self.table_load_ns:
            self.idle_ns = self.free_ns[_SCALAR]

    def _count_saved_ns(self, index: int, phases: Phases) -> float:
        """Return the ns that a matmul saves if the array contains its stationary operand already, else 0.

        In the scheduled reading, this also records the operand as the array's content. The dataflow reading assumes an
        operand loaded if it occurs at least twice.

        Args:
            index: The event, numbered within the core.
            phases: Its phases.
        """
        number = self.weights.get(index, -1)
        if self.ordered:
            is_loaded, self.array_weights = number >= 0 and number == self.array_weights, number
        else:
            is_loaded = self.uses_of_weights[number] > 1
        return phases.kept_ns if is_loaded else 0.0

    def _move_data(self, event: int, arrival: float, phases: Phases) -> float:
        """Carry out the data phase of a DMA, record its begin and end, and return the time of its completion in ns.

        Args:
            event: The DMA.
            arrival: The time in ns at which its first byte could move.
            phases: Its phases.
        """
        placed = self.placed
        begin, served = arrival, arrival + phases.busy_ns
        if self.ordered:
            number = event - self.base
            begin, served, blocker, moving = self.dma.serve(phases.lane, number, arrival, phases.busy_ns)
            placed.data_cause[event] = blocker + self.base if blocker >= 0 else -1
            if moving is not None:
                placed.moving[2 * event + 1] = moving
            self.queues[phases.lane].append(event)
        else:
            self.dma.request(phases.lane, event - self.base, arrival, phases.busy_ns)
        placed.data_start[event], placed.data_end[event] = begin, served + phases.drain_ns
        return served + phases.tail_ns

    def switches_table(self, event: int) -> bool:
        """Return whether an event needs an activation table that is not the loaded one; False if it needs none."""
        table = self.phases[event - self.base].table
        return table is not None and table != self.loaded

    def end_rendezvous(self, event: int, ready: float, last: int) -> None:
        """End a rendezvous for this core's member: its result is ready when the last member's result is.

        Changes the times that `start_event` recorded for the member: its result, the moment at which its operands are
        read, and the end of its data phase.

        Args:
            event: The event of this core's member.
            ready: The time in ns at which the last member's result is ready.
            last: The event of that last member, recorded as the cause of a delay.
        """
        placed, phases = self.placed, self.phases[event - self.base]
        if placed.ready[event] < ready:
            placed.results[event] = last, _RENDEZVOUS
        read = placed.moments[event * STRIDE + 2 * Wait.read + 1]
        self._set_moments(event, phases, placed.start[event], max(read, ready), ready)
        if placed.data_end[event] >= 0.0 and not phases.transfers:
            placed.data_end[event] = ready
        self.finished_ns = max(self.finished_ns, ready)

    def _set_moments(self, event: int, phases: Phases, start: float, read: float, ready: float) -> None:
        """Record the eight moments of an event: the times in ns from which on events that wait for it may start.

        The completion of a DMA includes the time until the waiting engine restarts, so it costs no semaphore.

        Args:
            event: The event.
            phases: Its phases.
            start: The start of the event in ns.
            read: The time in ns at which it has read its operands.
            ready: The time in ns at which its result is usable.
        """
        semaphore_ns, same_ns = self.semaphore_ns, self.same_engine_ns
        if phases.transfers or phases.omitted:
            semaphore_ns = same_ns = 0.0
        placed, first, read_elsewhere = self.placed, event * STRIDE, read + semaphore_ns
        placed.ready[event] = ready
        placed.moments[first : first + STRIDE] = (
            (ready + semaphore_ns, ready + same_ns, read_elsewhere, read, read_elsewhere, read, start, start)
        )  # fmt: skip
