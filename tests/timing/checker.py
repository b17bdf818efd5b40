"""An independent judge of timelines: compares every pair of events, by the letter of the rules.

It reads the stream and the slices of a timeline, and shares no code with what made it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise

import numpy as np

from simulate.hardware import Hardware
from simulate.isa.enums import Engine
from simulate.memory import MemoryRegion
from simulate.run.stream import READ, Stream
from simulate.timing import Reading, Slice, SliceKind, Timeline

_CLOCK = {
    Engine.tensor: "tensor_clock_ghz",
    Engine.vector: "vector_clock_ghz",
    Engine.scalar: "scalar_clock_ghz",
    Engine.gpsimd: "gpsimd_clock_ghz",
    Engine.sync: "sync_clock_ghz",
}


def violations(
    streams: Sequence[Stream], hardware: Hardware, timeline: Timeline, slack_ns: float = 0.0
) -> list[str]:
    """Return every rule that a timeline breaks by more than `slack_ns`; empty for a legal schedule."""
    broken: list[str] = []
    pieces = list(timeline.slices())
    moved: list[float] = []
    for number, stream in enumerate(streams):
        core_slices = [piece for piece in pieces if piece.stream == number]
        core = _Core(stream, hardware, timeline.reading, core_slices, slack_ns)
        broken += [f"stream {number}: {text}" for text in core.violations()]
        if timeline.reading is not Reading.serial:
            moved.append(core.moved_ns())
        if timeline.reading is Reading.dataflow:
            moved += core.carried_out_ns()
    broken += _rendezvous(streams, pieces, slack_ns)
    last = max([0.0, *moved, *(max(piece.end_ns, piece.ready_ns) for piece in pieces)])
    if abs(timeline.length_ns - last) > slack_ns:
        broken.append(f"length {timeline.length_ns}, everything has ended at {last}")
    return broken


class _Core:
    def __init__(
        self, stream: Stream, hardware: Hardware, reading: Reading, pieces: list[Slice], slack: float
    ) -> None:
        self.hardware, self.reading, self.slack = hardware, reading, slack
        self.requested = stream.requested
        self.records = stream.tensors
        self.buffers = [record.buffer for record in stream.tensors]
        self.events = list(stream)
        self.issue = {
            p.event: p for p in pieces if p.slice_kind in (SliceKind.instruction, SliceKind.trigger)
        }
        self.data = {p.event: p for p in pieces if p.slice_kind is SliceKind.transfer}
        self.loads = {p.event: p for p in pieces if p.slice_kind is SliceKind.table_load}
        # Memsets that take no time; whether they may is checked on its own.
        self.omitted = {
            event.index
            for event in self.events
            if event.cost.clears
            and event.index in self.issue
            and self.issue[event.index].end_ns == self.issue[event.index].start_ns
        }
        steps = sorted(stream.iterations)
        self.step_of = {
            event: step
            for step, end in zip(steps, [*steps[1:], len(self.events)])
            for event in range(step + 1, end)
        }

    def violations(self) -> list[str]:
        if sorted(self.issue) != list(range(len(self.events))):
            return ["an event is missing or placed twice"]
        broken = [*self._durations(), *self._conflicts(), *self._requested()]
        broken += [*self._omissions(), *self._iterations()]
        if self.reading is not Reading.dataflow:
            broken += [*self._engines(), *self._cells(), *self._queues(), *self._sharing()]
            broken += [*self._tables(), *self._capacity()]
        if self.reading is Reading.serial:
            broken += self._one_by_one()
        return broken

    def _turn(self, event: int):
        """Return the turn of an event: its place in program order, or, scheduled, the time at which it starts."""
        if self.reading is Reading.scheduled:
            return self.issue[event].start_ns, self.issue[event].end_ns, event
        return event

    def _trigger(self, event) -> Engine:
        """Return the engine that carries an event out; for an omitted event, that of the matmuls after it."""
        return Engine.tensor if event.index in self.omitted else event.trigger

    def _omissions(self):
        """Check an omitted memset: matmuls write what is read of it, byte by byte."""
        for index in self.omitted:
            event, piece = self.events[index], self.issue[index]
            (cleared,) = event.accesses
            taken = np.zeros(
                (cleared.end_row - cleared.first_row, cleared.end_byte - cleared.first_byte), bool
            )
            gone = taken.copy()  # written again by something else
            wrong = self.buffers[cleared.tensor] is not MemoryRegion.psum or piece.ready_ns != piece.start_ns
            for later in self.events[index + 1 :]:
                for access in sorted(later.accesses, key=lambda access: access.mode != READ):
                    if access.tensor != cleared.tensor:
                        continue
                    box = (
                        slice(
                            max(access.first_row - cleared.first_row, 0),
                            max(access.end_row - cleared.first_row, 0),
                        ),
                        slice(
                            max(access.first_byte - cleared.first_byte, 0),
                            max(access.end_byte - cleared.first_byte, 0),
                        ),
                    )
                    if access.mode == READ:
                        wrong |= bool((~taken & ~gone)[box].any())
                    elif later.engine is Engine.tensor:
                        taken[box] |= ~gone[box]
                    else:
                        gone[box] |= ~taken[box]
            if wrong or not taken.any():
                yield f"#{index} is omitted, but something needs its zeros"

    def _iterations(self):
        """Check that what follows the step of an iteration waits for its result."""
        for event, step in self.step_of.items():
            same = self._trigger(self.events[event]) is self.events[step].trigger
            hand_over = self.hardware.same_engine_wait_ns if same else self.hardware.semaphore_ns
            needed = self.issue[step].ready_ns + hand_over
            if self.issue[event].start_ns < needed - self.slack:
                yield f"#{event} starts before {needed}, when its iteration does"

    def _cells(self):
        """Check that no two matmuls are on one cell of the array at one time; one without a tile takes all cells."""
        matmuls = [event for event in self.events if event.engine is Engine.tensor]
        for one, other in combinations(matmuls, 2):
            if one.cost.cells and other.cost.cells and not set(one.cost.cells) & set(other.cost.cells):
                continue
            first, second = self.issue[one.index], self.issue[other.index]
            if first.start_ns < second.end_ns - self.slack and second.start_ns < first.end_ns - self.slack:
                yield f"#{one.index} and #{other.index} are on one cell of the array"

    def _durations(self):
        for event in self.events:
            if event.index in self.omitted:
                continue
            piece, dma = self.issue[event.index], event.cost.dma
            clock = getattr(self.hardware, _CLOCK[event.trigger])
            interval = event.cost.interval_cycles / clock if dma is None else dma.trigger_ns + dma.gpsimd_ns
            slower = self._slowed(event.index, piece.start_ns)
            if event.cost.kept_cycles and self._weights_held(event):
                shorter = max(interval - event.cost.kept_cycles / clock, 0.0)
                if abs(piece.end_ns - piece.start_ns - shorter * (1.0 + slower)) <= self.slack:
                    interval = shorter
            interval += slower * interval
            if abs(piece.end_ns - piece.start_ns - interval) > self.slack:
                yield f"#{event.index} holds its engine for {piece.end_ns - piece.start_ns}, not {interval}"
            if dma is None:
                pipeline = (slower > 0.0) * (
                    self.hardware.matmul_throttled_latency_ns - self.hardware.matmul_latency_ns
                )
                latency = event.cost.latency_cycles / clock + interval - interval / (1.0 + slower) + pipeline
                if piece.ready_ns < piece.start_ns + latency - self.slack:
                    yield f"#{event.index} is ready before its latency is over"
                continue
            data = self.data[event.index]
            if data.start_ns < piece.end_ns + dma.first_byte_ns - self.slack:
                yield f"#{event.index} moves data before its first byte can come"
            if data.end_ns < data.start_ns + dma.transfer_ns - self.slack:
                yield f"#{event.index} moves its data too fast"
            if abs(data.ready_ns - data.end_ns - dma.completion_ns) > self.slack:
                yield f"#{event.index} completes {data.ready_ns - data.end_ns} after its data"

    def _weights_held(self, event) -> bool:
        """Return whether the array may hold the weights: of the matmul before, scheduled; without engines, of any."""
        if self.reading in (Reading.program, Reading.serial):
            return False
        matmuls = [other for other in self.events if other.engine is Engine.tensor and other is not event]
        if self.reading is Reading.scheduled:
            turn = self._turn(event.index)
            earlier = [other for other in matmuls if self._turn(other.index) < turn]
            matmuls = [max(earlier, key=lambda other: self._turn(other.index))] if earlier else []
        return any(self._same_weights(event, other) for other in matmuls)

    def _same_weights(self, event, other) -> bool:
        if event.cost.stationary is None or event.cost.stationary != other.cost.stationary:
            return False
        mine, theirs = event.accesses[0], other.accesses[0]
        if mine != theirs or mine.mode != READ:
            return False
        first, last = sorted((event.index, other.index))
        return not any(
            a.mode != READ
            and a.tensor == mine.tensor
            and a.first_row < mine.end_row
            and mine.first_row < a.end_row
            and a.first_byte < mine.end_byte
            and mine.first_byte < a.end_byte
            for between in self.events[first:last]
            for a in between.accesses
        )

    def _slowed(self, event: int, start: float) -> float:
        """Return the share by which the activity throttle lengthens an event: 0, a half or all of half rate's cost."""
        chip, stream = self.hardware, self.events
        if not chip.activity_throttle or not stream[event].cost.streamed_cycles:
            return 0.0
        ratio = chip.tensor_clock_ghz / chip.tensor_throttled_clock_ghz
        done = sum(other.cost.streamed_cycles for other in stream[:event]) / chip.tensor_clock_ghz
        loads = [other for other in stream[:event] if other.cost.dma and self._writes_on_chip(other)]
        passed = start - sum(other.cost.dma.bytes for other in loads) / chip.hbm_gb_per_s_per_core
        share = chip.activity_throttle_busy_fraction
        if done < chip.activity_throttle_window_ns / ratio or done < share / ratio * passed:
            return ratio - 1.0
        return (ratio - 1.0) / 2.0 if done < share * passed else 0.0

    def _writes_on_chip(self, event) -> bool:
        return any(a.mode != READ and self.buffers[a.tensor].on_chip for a in event.accesses)

    def _conflicts(self):
        for first, second in combinations(self.events, 2):
            for a in first.accesses:
                for b in second.accesses:
                    meet = (
                        a.tensor == b.tensor
                        and a.first_row < b.end_row
                        and b.first_row < a.end_row
                        and a.first_byte < b.end_byte
                        and b.first_byte < a.end_byte
                    )
                    if not meet or (a.mode == READ and b.mode == READ):
                        continue
                    if (
                        a.mode == READ
                        and self.reading is Reading.dataflow
                        and self._reads_later(first, second, a)
                    ):
                        continue
                    needed = self._released(first, second, a.mode == READ, b.mode == READ)
                    if self.issue[second.index].start_ns < needed - self.slack:
                        yield f"#{second.index} starts before {needed}, when #{first.index} lets it"

    def _reads_later(self, first, second, access) -> bool:
        """Return whether an engine reads again later: without engine order only its last read is waited for."""
        between = self.events[first.index + 1 : second.index]
        return first.engine is not Engine.dma and any(
            event.engine is first.engine
            and any(a.tensor == access.tensor and a.mode == READ for a in event.accesses)
            for event in between
        )

    def _released(self, first, second, reads: bool, read: bool) -> float:
        piece = self.issue[first.index]
        same_engine = first.engine is not Engine.dma and (
            first.engine is (Engine.tensor if second.index in self.omitted else second.engine)
        )
        semaphore = 0.0
        issued_by, awaited_by = self._trigger(first), self._trigger(second)
        if first.index in self.omitted:
            return piece.start_ns
        if first.cost.dma is None and issued_by is not awaited_by:
            semaphore = self.hardware.semaphore_ns
        if reads:
            done = max(piece.end_ns, piece.ready_ns) if first.engine is Engine.dma else piece.end_ns
        elif same_engine and not read:
            done = min(piece.end_ns, piece.ready_ns)
            if self.issue[second.index].ready_ns < piece.ready_ns - self.slack:
                return float("inf")
        else:
            done = piece.ready_ns
            if first.cost.dma is None and issued_by is awaited_by:
                done += self.hardware.same_engine_wait_ns
        return done + semaphore

    def _requested(self):
        for before, after in self.requested:
            if self.issue[after].start_ns < self.issue[before].ready_ns - self.slack:
                yield f"#{after} does not wait for #{before}, as asked"

    def _engines(self):
        for engine in _CLOCK:
            engine_slices = [
                p
                for p in self.issue.values()
                if self.events[p.event].trigger is engine and p.event not in self.omitted
            ]
            if engine is Engine.scalar:
                engine_slices += self.loads.values()
            if self.reading is Reading.scheduled:
                engine_slices.sort(key=lambda p: (p.start_ns, p.end_ns, p.event))
            else:
                engine_slices.sort(
                    key=lambda p: (self._turn(p.event), p.slice_kind is not SliceKind.table_load)
                )
            for before, after in pairwise(engine_slices):
                if after.start_ns < self._issued_ns(before) - self.slack:
                    yield f"#{after.event} starts on {engine} before #{before.event} has left it"

    def _issued_ns(self, piece: Slice) -> float:
        """Return when an engine can issue its next event: after a matmul in a tile, past the minimum interval."""
        if piece.slice_kind is SliceKind.table_load or not self.events[piece.event].cost.cells:
            return piece.end_ns
        least = self.hardware.matmul_min_interval_cycles / self.hardware.tensor_clock_ghz
        return min(piece.end_ns, piece.start_ns + least)

    def _queues(self):
        limit = self.hardware.dma_outstanding_per_queue
        for engine in _CLOCK:
            queue = [e.index for e in self.events if e.cost.dma is not None and e.trigger is engine]
            queue.sort(key=self._turn)
            for before, after in pairwise(queue):
                if self.data[after].start_ns < self.data[before].start_ns - self.slack:
                    yield f"#{after} overtakes #{before} in the queue of {engine}"
            for position, event in enumerate(queue):
                start = self.issue[event].start_ns
                under_way = sum(self.issue[other].ready_ns > start + self.slack for other in queue[:position])
                if under_way >= limit:
                    yield f"#{event} is triggered while {under_way} DMAs of its queue are under way"

    def _sharing(self):
        """Check that DMA engines move what must be complete before an event one DMA after the other, at any moment."""
        engine_done: dict[Engine, set[int]] = {}
        queue_done: dict[Engine, set[int]] = {}
        queues: dict[Engine, list[int]] = {}
        done: dict[int, set[int]] = {}  # by event, the DMAs moved before its result is usable
        for event in sorted(self.events, key=lambda event: self._turn(event.index)):
            index, dma = event.index, event.cost.dma
            needed = set[int]()
            if index not in self.omitted:
                needed = engine_done.setdefault(event.trigger, set())
            if index in self.step_of:
                needed |= done.get(self.step_of[index], set())
            for other in self.events[:index]:
                if _conflict(other, event) or (other.index, index) in self.requested:
                    needed |= done[other.index]
            queue = queues.setdefault(event.trigger, [])
            if dma is not None and len(queue) >= self.hardware.dma_outstanding_per_queue:
                needed |= done[queue[-self.hardware.dma_outstanding_per_queue]]
            complete = self._moved_ns(needed) + self._completion_ns()
            if self.issue[index].start_ns < complete - self.slack:
                yield f"#{index} starts before {complete}, when all it needs can be complete"
            done[index] = set(needed)
            if dma is not None:
                queue.append(index)
                mine = queue_done.setdefault(event.trigger, set())
                mine |= needed
                if self.data[index].start_ns < self._moved_ns(mine) - self.slack:
                    yield f"#{index} moves data before {self._moved_ns(mine)}, when all before it can be moved"
                mine.add(index)
                done[index] = set(mine)

    def moved_ns(self) -> float:
        """Return when the DMA engines can have moved everything, and its completion is told."""
        return self._moved_ns(set(self.data)) + self._completion_ns()

    def _moved_ns(self, events: set[int]) -> float:
        spans = [(self.data[event].start_ns, self.events[event].cost.dma) for event in events]
        return _one_by_one(
            [(start, dma.busy_ns) for start, dma in spans if dma is not None and dma.busy_ns > 0.0]
        )

    def carried_out_ns(self) -> list[float]:
        """Return when each engine can have carried out its events, one after the other from when each may start."""
        return [
            _one_by_one(
                [
                    (piece.start_ns, self._issued_ns(piece) - piece.start_ns)
                    for event, piece in self.issue.items()
                    if self.events[event].trigger is engine
                ]
            )
            for engine in _CLOCK
        ]

    def _completion_ns(self) -> float:
        dmas = [event.cost.dma for event in self.events if event.cost.dma is not None]
        return min((dma.completion_ns for dma in dmas if dma.busy_ns > 0.0), default=0.0)

    def _tables(self):
        loaded, needed = None, 0.0
        for event in sorted(self.events, key=lambda event: self._turn(event.index)):
            table = event.cost.table
            if event.engine is not Engine.scalar or table in (None, "copy"):
                continue
            load = self.loads.get(event.index)
            if table != loaded:
                if load is None:
                    yield f"#{event.index} runs without table {table}"
                elif abs(load.end_ns - load.start_ns - self.hardware.activation_table_load_ns) > self.slack:
                    yield f"#{event.index} loads its table in {load.end_ns - load.start_ns}"
                elif load.start_ns < needed - self.slack:
                    yield f"#{event.index} loads its table while another is needed"
                elif load.end_ns > self.issue[event.index].start_ns + self.slack:
                    yield f"#{event.index} starts before its table is loaded"
            elif load is not None:
                yield f"#{event.index} loads table {table} again"
            loaded, needed = table, self.issue[event.index].end_ns

    def _capacity(self):
        """Check that tiles in use never take more than a memory has, from their first use to the end of the last."""
        limits = {
            MemoryRegion.sbuf: self.hardware.sbuf_usable_bytes_per_partition,
            MemoryRegion.psum: self.hardware.psum_bytes_per_partition,
        }
        spans: dict[int, tuple[float, float]] = {}
        for event in self.events:
            piece = self.issue[event.index]
            for access in event.accesses:
                ends = piece.end_ns
                if access.mode != READ or event.engine is Engine.dma:
                    ends = max(ends, piece.ready_ns)
                begin, end = spans.get(access.tensor, (piece.start_ns, ends))
                spans[access.tensor] = min(begin, piece.start_ns), max(end, ends)
        for buffer, limit in limits.items():
            mine = {tile: span for tile, span in spans.items() if self.buffers[tile] is buffer}
            for moment in {begin for begin, _ in mine.values()}:
                # Quadrants of 32 partitions: tiles on few partitions may lie side by side.
                used = sum(
                    self.records[tile].row_bytes * -(-self.records[tile].shape[0] // 32) / 4
                    for tile, (begin, end) in mine.items()
                    if begin <= moment + self.slack < end
                )
                if used > limit:
                    yield f"{used} bytes of {buffer.value} are in use at {moment}"

    def _one_by_one(self):
        done = 0.0
        for event in self.events:
            if event.index in self.omitted:
                continue
            piece = self.loads.get(event.index) or self.issue[event.index]
            if piece.start_ns < done - self.slack:
                yield f"#{event.index} starts at {piece.start_ns}, before {done}"
            piece = self.issue[event.index]
            done = max(done, piece.end_ns, piece.ready_ns)


def _one_by_one(spans: list[tuple[float, float]]) -> float:
    """Return when spans of (begin, length) can be over, taken one after the other, each from its begin."""
    return max(
        (begin + sum(length for start, length in spans if start >= begin) for begin, _ in spans),
        default=float("-inf"),
    )


def _conflict(first, second) -> bool:
    return any(
        a.tensor == b.tensor
        and not a.mode == b.mode == READ
        and a.first_row < b.end_row
        and b.first_row < a.end_row
        and a.first_byte < b.end_byte
        and b.first_byte < a.end_byte
        for a in first.accesses
        for b in second.accesses
    )


def _rendezvous(streams: Sequence[Stream], pieces: list[Slice], slack: float):
    starts: dict[int, list[tuple[float, float]]] = {}
    for piece in pieces:
        serial = streams[piece.stream].rendezvous.get(piece.event)
        if serial is not None and piece.slice_kind in (SliceKind.instruction, SliceKind.trigger):
            starts.setdefault(serial, []).append((piece.start_ns, piece.ready_ns))
    for serial, times in starts.items():
        if any(abs(a - b) > slack for time in times for a, b in zip(time, times[0])):
            yield f"the members of rendezvous {serial} start and end at {times}"
