"""The instruction stream: what one core did, in program order, in columns of plain numbers.

An event takes some 140 bytes: operator, engine, cost, line, and one row per operand. A row names a tensor and a
box in it: rows (partitions on chip; in HBM all dims but the last) by bytes within a row. Everything else about
a run, dependences, time, placement, hazards, is worked out from the stream afterwards.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import NamedTuple

from simulate.errors import Location, RuleViolation, rule
from simulate.isa.enums import Engine
from simulate.isa.plan import Accumulate, Cost, Effects, Plan, State
from simulate.memory import MemoryRegion, NKIObject, NkiTensor, Storage
from simulate.run.location import kernel_line, location

READ, WRITE, ACCUMULATE = 0, 1, 2
Line = tuple[CodeType, int]
"""A line of a kernel: its code object and its number."""

_ROW = 5  # tensor * 4 + kind, first row, end row, first byte, end byte


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """What reports need to know of an allocation after its bytes are gone."""

    serial: int
    name: str
    shape: tuple[int, ...]
    dtype: str
    buffer: MemoryRegion
    row_bytes: int  # bytes per partition on chip, bytes of the last dim in HBM
    nbytes: int
    address: tuple[int, int] | None
    line: Line | None
    callers: tuple[Line, ...] = ()  # outermost first; kept on request only, see `simulate.run.call_stacks`

    @property
    def where(self) -> Location | None:
        """The line that allocated it; None for a kernel argument."""
        return None if self.line is None else location(self.line)


class TensorTable:
    """The allocations of one rank, in order; shared by the rank's cores."""

    def __init__(self) -> None:
        self.records: list[TensorRecord] = []

    def add(self, storage: Storage) -> None:
        """Give a storage its serial number and keep its record."""
        storage.serial = len(self.records)
        width = storage.dtype.itemsize
        row = storage.free_size if storage.buffer.on_chip else storage.shape[-1]
        self.records.append(
            TensorRecord(
                storage.serial,
                storage.name or f"t{storage.serial}",
                storage.shape,
                str(storage.dtype),
                storage.buffer,
                row * width,
                storage.size * width,
                storage.address,
                storage.line,
            )
        )

    def stream(self, rank: int, core: int) -> Stream:
        """An empty stream of a core that uses these tensors."""
        return Stream(rank, core, self)


class Access(NamedTuple):
    """One operand of an event: a box of rows by bytes in a tensor, and whether it is read, written or added to."""

    tensor: int
    kind: int
    first_row: int
    end_row: int
    first_byte: int
    end_byte: int


@dataclass(frozen=True, slots=True)
class Event:
    """One instruction of a stream."""

    index: int
    op: str
    name: str | None
    engine: Engine
    trigger: Engine
    cost: Cost
    where: Location
    accesses: tuple[Access, ...]
    rendezvous: int | None


class NkiInstruction(NKIObject):
    """The handle an instruction returns to the kernel; opaque but for ordering requests."""

    __slots__ = ("_stream", "index")

    def __init__(self, handle: Stream, index: int = -1) -> None:
        self._stream = handle
        self.index = index

    def depends_on(self, *producers: NkiInstruction) -> NkiInstruction:
        """Ask that this instruction runs after `producers`; values never change by it, only time does.

        Raises RuleViolation for what is no instruction of this core and launch.
        """
        for producer in producers:
            if not isinstance(producer, NkiInstruction):
                raise RuleViolation(
                    producer_is_instruction,
                    f"depends_on of {type(producer).__name__} {producer!r:.60}",
                    hint="keep what the instruction returned, and pass that",
                )
            if producer._stream is not self._stream:
                raise RuleViolation(
                    producer_of_this_core,
                    f"{self!r} of rank {self._stream.rank} core {self._stream.core} depends on {producer!r} of rank "
                    f"{producer._stream.rank} core {producer._stream.core}, or of another launch",
                    hint="nisa.core_barrier or nisa.sendrecv orders cores",
                )
            self._stream.requested.append((producer.index, self.index))
            self._stream.request_lines[producer.index, self.index] = kernel_line()
        return self

    def __repr__(self) -> str:
        return f"<{self._stream.op_names[self._stream.ops[self.index]]} #{self.index}>"


@rule("NKW-ORDER-HANDLE")
def producer_is_instruction() -> None:
    """depends_on takes what instructions return, not the tiles they write."""


@rule("NKW-ORDER-CORE")
def producer_of_this_core() -> None:
    """An ordering request joins two instructions of one core in one launch."""


@dataclass(frozen=True, slots=True)
class Iteration:
    """One iteration of an `nl.affine_range`: its loop, its number, and how many tensors were there before the loop."""

    loop: int
    number: int
    tensors_before: int


@dataclass(slots=True)
class Block:
    """One `nl.no_reorder()`: where it stands, and whether a `with` entered it."""

    line: Line
    entered: bool = False


class Stream:
    """The events of one core."""

    def __init__(self, rank: int, core: int, tensors: TensorTable) -> None:
        self.rank = rank
        self.core = core
        self.tensors = tensors.records
        self.ops = array("H")
        self.engines = array("B")
        self.triggers = array("B")
        self.cost_ids = array("I")
        self.line_ids = array("I")
        self.effect_ids = array("B")
        self.row_ends = array("Q")
        self.rows = array("q")
        self.op_names: list[str] = []
        self.costs: list[Cost] = []
        self._effects: list[Effects] = []
        self.lines: list[Line] = []
        self.names: dict[int, str] = {}
        self.rendezvous: dict[int, int] = {}
        self.states: dict[int, State] = {}
        self.requested: list[tuple[int, int]] = []
        self.request_lines: dict[tuple[int, int], Line] = {}  # of those that depends_on made
        self.remarks: list[tuple[str, Line, str]] = []  # code, line and what was seen, of what no event shows
        self.affine_loops: list[int] = []  # the event at which each nl.affine_range began
        self.open_affine: list[Iteration] = []
        self.affine: dict[int, tuple[Iteration, ...]] = {}  # the iterations of nl.affine_range an event is in
        self.blocks: list[Block] = []
        self.open_blocks = 0
        self.open_loops: list[int] = []  # the device loops that are running: a number for each iteration
        self.loops: dict[int, tuple[int, ...]] = {}  # those of an event, if any
        self.iterations: dict[int, int] = {}  # the loop that an iteration is of, by their numbers
        self.made_in: dict[int, tuple[int, ...]] = {}  # the open loops where a tensor was allocated, if any
        self.first_use: dict[int, int] = {}
        self.last_use: dict[int, int] = {}
        self._op_ids: dict[str, int] = {}
        self._cost_ids: dict[int, int] = {}
        self._effect_ids: dict[int, int] = {}
        self._line_ids: dict[tuple[int, int], int] = {}

    def __len__(self) -> int:
        return len(self.ops)

    def chains(self) -> tuple[Sequence[int], Sequence[tuple[Line, ...]]]:
        """For every event the number of its chain of kernel lines, outermost caller first, and the chains.

        The callers are kept on request only (`simulate.run.call_stacks`); without them a chain is the event's own line.
        """
        return self.line_ids, [(line,) for line in self.lines]

    @property
    def nbytes(self) -> int:
        """Bytes held by the columns."""
        columns = (
            self.ops,
            self.engines,
            self.triggers,
            self.cost_ids,
            self.line_ids,
            self.effect_ids,
            self.row_ends,
            self.rows,
        )
        return sum(len(column) * column.itemsize for column in columns)

    def append(self, op: str, plan: Plan, line: Line, rendezvous: int | None) -> NkiInstruction:
        """Record one instruction; only `issue` calls this."""
        index = len(self.ops)
        op_id = self._op_ids.get(op)
        if op_id is None:
            op_id = self._op_ids[op] = len(self.op_names)
            self.op_names.append(op)
        cost_id = self._cost_ids.get(id(plan.cost))
        if cost_id is None:
            cost_id = self._cost_ids[id(plan.cost)] = len(self.costs)
            self.costs.append(plan.cost)  # kept alive here, so that its id stays its own
        effect_id = self._effect_ids.get(id(plan.effects))
        if effect_id is None:
            effect_id = self._effect_ids[id(plan.effects)] = len(self._effects)
            self._effects.append(plan.effects)
        place = id(line[0]), line[1]
        line_id = self._line_ids.get(place)
        if line_id is None:
            line_id = self._line_ids[place] = len(self.lines)
            self.lines.append(line)  # and with it the code, so that its id stays its own
        self.ops.append(op_id)
        self.engines.append(plan.engine.number)
        self.triggers.append((plan.trigger or plan.engine).number)
        self.cost_ids.append(cost_id)
        self.line_ids.append(line_id)
        self.effect_ids.append(effect_id)
        for tile in plan.reads:
            self._enter(tile, READ, index)
        adds = plan.accumulate is not None and plan.accumulate is not Accumulate.overwrite
        for tile in plan.writes:
            self._enter(tile, ACCUMULATE if adds else WRITE, index)
        self.row_ends.append(len(self.rows))
        if plan.name is not None:
            self.names[index] = plan.name
        if self.open_affine:
            self.affine[index] = tuple(self.open_affine)
        if self.open_loops:
            self.loops[index] = tuple(self.open_loops)
        if plan.state is not None:
            self.states[index] = plan.state
        if rendezvous is not None:
            self.rendezvous[index] = rendezvous
        return NkiInstruction(self, index)

    def _enter(self, tile: NkiTensor, kind: int, index: int) -> None:
        serial = tile.storage.serial
        self.last_use[serial] = index
        if serial not in self.first_use:
            self.first_use[serial] = index
        if tile.dynamic is None:
            self.rows.extend((serial * 4 + kind, *tile.layout.rows))
            return
        # Where a run-time index leads is not known before the run: the whole tensor is the footprint.
        record = self.tensors[serial]
        self.rows.extend((serial * 4 + kind, 0, record.nbytes // record.row_bytes, 0, record.row_bytes))
        self._enter(tile.dynamic.index, READ, index)

    def label(self, serial: int) -> str:
        """An allocation as error messages name it."""
        record = self.tensors[serial]
        place = f" at {record.where}" if record.where else ""
        return f"{record.name} {record.shape} {record.dtype}{place}"

    def source_of(self, serial: int) -> tuple[object, ...]:
        """What the tiles of one allocation in the source have in common: its line and callers, shape and dtype."""
        record = self.tensors[serial]
        return record.callers, record.line, record.shape, record.dtype

    def elements(self, serial: int, size_bytes: int) -> str:
        """A number of bytes as elements of an allocation, with their dtype."""
        record = self.tensors[serial]
        width = max(1, record.nbytes // math.prod(record.shape))
        return f"{size_bytes // width} {record.dtype}"

    def effects(self, index: int) -> Effects:
        """The facts of an event's instruction beyond its operands, its cost and its engine's state."""
        return self._effects[self.effect_ids[index]]

    def accesses(self, index: int) -> tuple[Access, ...]:
        """The operands of one event."""
        rows = self.rows
        start = self.row_ends[index - 1] if index else 0
        return tuple(
            Access(rows[at] >> 2, rows[at] & 3, rows[at + 1], rows[at + 2], rows[at + 3], rows[at + 4])
            for at in range(start, self.row_ends[index], _ROW)
        )

    def event(self, index: int) -> Event:
        """One event with its numbers spelled out."""
        return Event(
            index,
            self.op_names[self.ops[index]],
            self.names.get(index),
            Engine(self.engines[index]),
            Engine(self.triggers[index]),
            self.costs[self.cost_ids[index]],
            location(self.lines[self.line_ids[index]]),
            self.accesses(index),
            self.rendezvous.get(index),
        )

    def __iter__(self) -> Iterator[Event]:
        return (self.event(index) for index in range(len(self)))

    def text(self) -> str:
        """The stream as text, one event a line; the same kernel and shapes give the same bytes."""
        marks = {READ: "", WRITE: "=", ACCUMULATE: "+="}
        lines = []
        for event in self:
            operands = " ".join(
                f"{marks[a.kind]}{self.tensors[a.tensor].name}"
                f"[{a.first_row}:{a.end_row},{a.first_byte}:{a.end_byte}]"
                for a in event.accesses
            )
            cost = event.cost
            lines.append(
                f"{event.index:6d} {event.engine.name:7s} {event.op:20s} "
                f"{cost.interval_cycles:10.1f} {cost.latency_cycles:10.1f}  {operands}  @{event.where.line}"
            )
        return "\n".join(lines) + "\n"
