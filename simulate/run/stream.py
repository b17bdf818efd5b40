"""The instruction stream: all events of one core in program order; the one record of a launch.

An event is a template, the tensors of its operands and a kernel line. The template has all that was planned; equal
calls share it, so an event takes 8 bytes and 4 for each operand, some 20 bytes. Columns derived from templates
(engines, costs, boxes of operands) are computed on first use. Dependences, time, placement, hazards and replays of a
launch are derived from its streams.
"""

from __future__ import annotations

import copy
import math
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from nkw.errors import Location, RuleViolation, rule
from simulate.hardware import Hardware
from simulate.isa.enums import Engine
from simulate.isa.plan import Cost, Effects
from simulate.isa.template import ACCUMULATE, READ, WRITE, Template
from simulate.lines import location, named
from simulate.memory import MemoryRegion, NKIObject, NkiTensor, Storage
from simulate.memory.layout import Form
from simulate.run.columns import Columns
from simulate.run.location import kernel_line

Line = tuple[CodeType, int]
"""A line of a kernel: its code object and its number."""

T = TypeVar("T")


class TensorRecord(NamedTuple):
    """The record of an allocation, which outlives its bytes. Made often: a frozen dataclass takes longer."""

    serial: int
    given: str  # what `name=` says, or the kernel's parameter; else empty
    shape: tuple[int, ...]
    dtype: str
    buffer: MemoryRegion
    row_bytes: int  # bytes per partition on chip, bytes of the last dim in HBM
    nbytes: int
    address: tuple[int, int] | None
    line: Line | None
    form: Form
    callers: tuple[Line, ...] = ()  # outermost first; kept on request only, see `simulate.run.call_stacks`

    @property
    def name(self) -> str:
        """What was given, else the variable that its line assigns, else what it is; one name in every report."""
        return self.given or named(self.line) or ("tile" if self.buffer.on_chip else "tensor")

    @property
    def where(self) -> Location | None:
        """The line that allocated it; None for a kernel argument."""
        return None if self.line is None else location(self.line)

    @property
    def called_at(self) -> tuple[Location, ...]:
        """The lines that called the allocating one, innermost first, where they were kept."""
        return tuple(location(line) for line in reversed(self.callers))

    @property
    def is_named(self) -> bool:
        """Whether the kernel named it with name=."""
        return bool(self.given)


@dataclass(frozen=True, slots=True)
class Constant:
    """The initial contents of a tensor of the kernel, from a file or an array."""

    contents: np.ndarray
    from_file: bool


class TensorTable:
    """The allocations of one rank, in order; shared by the rank's cores."""

    def __init__(self) -> None:
        self.records: list[TensorRecord] = []
        self.constants: dict[int, Constant] = {}

    def add(self, storage: Storage) -> None:
        """Give a storage its serial number and keep its record."""
        storage.serial = len(self.records)
        width = storage.dtype.itemsize
        row = storage.free_size if storage.buffer.on_chip else storage.shape[-1]
        self.records.append(
            TensorRecord(
                storage.serial,
                storage.name,
                storage.shape,
                str(storage.dtype),
                storage.buffer,
                row * width,
                storage.size * width,
                storage.address,
                storage.line,
                storage.form,
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
        """Ask that this instruction runs after `producers`; it changes the predicted time and no value.

        Raises RuleViolation for anything but an instruction of this core and launch.
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
        return f"<{self._stream.template(self.index).op} #{self.index}>"


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
    """One `nl.no_reorder()`: its line, and whether a `with` entered it."""

    line: Line
    entered: bool = False


class Column(Generic[T]):
    """A column of `Columns` as an attribute of a stream, under the same name."""

    def __init__(self, column: Callable[[Columns], T]) -> None:
        self.__doc__ = column.__doc__

    def __set_name__(self, kind: type, name: str) -> None:
        self._name = name

    def __get__(self, stream: Stream, kind: Any = None) -> T:
        values: T = getattr(stream.columns(), self._name)
        return values


class Stream:
    """The events of one core."""

    def __init__(self, rank: int, core: int, tensors: TensorTable) -> None:
        self.rank = rank
        self.core = core
        self.tensors = tensors.records
        self.constants = tensors.constants
        self.templates: list[Template] = []
        self.template_ids = array("I")
        self.operands = array("I")  # serial numbers of tensors, as the template orders them
        self.line_ids = array("I")
        self.lines: list[Line] = []
        self.resumed: list[tuple[int, int]] = []
        """Each resumption by the core scheduler: its number among all cores of the launch, and the next event."""
        self.names: dict[int, str] = {}
        self.rendezvous: dict[int, int] = {}
        self.accumulated: dict[int, Any] = {}
        """Where in PSUM a matmul was added, by event: all elements (True), none (False), or a mask."""
        self.masked: set[int] = set()  # events that left elements of a result alone
        self.depends_on_data: str | None = None
        """The reason why other data may give other instructions or written bytes; None if there is none."""
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
        self._template_numbers: dict[int, int] = {}
        self._line_ids: dict[tuple[int, int], int] = {}
        self._columns: Columns | None = None

    def __len__(self) -> int:
        return len(self.template_ids)

    def chains(self) -> tuple[Sequence[int], Sequence[tuple[Line, ...]]]:
        """For every event the number of its chain of kernel lines, outermost caller first, and the chains.

        The callers are kept on request only (`simulate.run.call_stacks`); without them a chain is the event's own line.
        """
        return self.line_ids, [(line,) for line in self.lines]

    def called_at(self, index: int) -> tuple[Location, ...]:
        """The lines that called an event's own line, innermost first, where they were kept."""
        numbers, chains = self.chains()
        return tuple(location(line) for line in reversed(chains[numbers[index]][:-1]))

    @property
    def nbytes(self) -> int:
        """Bytes of the columns of events and operands; columns derived from templates do not count."""
        columns = self.template_ids, self.operands, self.line_ids
        return sum(len(column) * column.itemsize for column in columns)

    def append(
        self,
        template: Template,
        reads: Sequence[NkiTensor],
        writes: Sequence[NkiTensor],
        line: Line,
        rendezvous: int | None = None,
    ) -> NkiInstruction:
        """Record one instruction: its template, the tensors it reads and writes, its line; only `issue` calls this."""
        index = len(self.template_ids)
        number = self._template_numbers.get(id(template))
        if number is None:  # both are kept alive in their lists, so that their ids stay their own
            number = self._template_numbers[id(template)] = len(self.templates)
            self.templates.append(template)
        place = id(line[0]), line[1]
        line_id = self._line_ids.get(place)
        if line_id is None:
            line_id = self._line_ids[place] = len(self.lines)
            self.lines.append(line)
        self.template_ids.append(number)
        self.line_ids.append(line_id)
        if template.direct:
            self.operands.extend([tensor.storage.serial for tensor in (*reads, *writes)])
        else:
            for tensor in (*reads, *writes):
                self.operands.append(tensor.storage.serial)
                if tensor.dynamic is not None:
                    self.operands.append(tensor.dynamic.index.storage.serial)
        if template.plan.name is not None:
            self.names[index] = template.plan.name
        if self.open_affine:
            self.affine[index] = tuple(self.open_affine)
        if self.open_loops:
            self.loops[index] = tuple(self.open_loops)
        if rendezvous is not None:
            self.rendezvous[index] = rendezvous
        return NkiInstruction(self, index)

    # -- columns of templates -----------------------------------------------------------------------------------

    op_names = Column(Columns.op_names)
    ops = Column(Columns.ops)
    engines = Column(Columns.engines)
    triggers = Column(Columns.triggers)
    costs = Column(Columns.costs)
    cost_ids = Column(Columns.cost_ids)
    states = Column(Columns.states)
    operand_ends = Column(Columns.operand_ends)
    rows = Column(Columns.rows)
    row_ends = Column(Columns.row_ends)
    first_use = Column(Columns.first_use)
    last_use = Column(Columns.last_use)

    def columns(self) -> Columns:
        """The columns of the events so far."""
        known = self._columns
        if known is None or known.events != len(self):
            known = self._columns = Columns(self.templates, self.template_ids, self.operands)
        return known

    def with_costs(self, costs: list[Cost], cost_ids: array[int] | None = None) -> Stream:
        """The same events at other costs, for what-if; `cost_ids` has a number in `costs` per event, if it differs."""
        other = copy.copy(self)
        columns = copy.copy(self.columns())
        columns.cost_ids = columns.cost_ids if cost_ids is None else cost_ids
        columns.costs = costs
        other._columns = columns
        return other

    def on(self, hardware: Hardware) -> Stream:
        """The same events at their costs by another record of the chip, whose numbers of times differ."""
        return self.with_costs([cost.on(hardware) for cost in self.costs])

    def template(self, index: int) -> Template:
        """The template of an event."""
        return self.templates[self.template_ids[index]]

    def tensors_of(self, index: int) -> array[int]:
        """The serial numbers of an event's operands, as its template orders them."""
        ends = self.operand_ends
        return self.operands[ends[index - 1] if index else 0 : ends[index]]

    def label(self, serial: int) -> str:
        """An allocation as error messages name it."""
        record = self.tensors[serial]
        place = f" at {record.where}" if record.where else ""
        return f"{record.name} {record.shape} {record.dtype}{place}"

    def source_of(self, serial: int) -> tuple[object, ...]:
        """The key of an allocation in the source: its callers and line, shape and dtype."""
        record = self.tensors[serial]
        return record.callers, record.line, record.shape, record.dtype

    def elements(self, serial: int, size_bytes: int) -> str:
        """A number of bytes as elements of an allocation, with their dtype."""
        record = self.tensors[serial]
        width = max(1, record.nbytes // math.prod(record.shape))
        return f"{size_bytes // width} {record.dtype}"

    def effects(self, index: int) -> Effects:
        """What an event's instruction does beyond its operands, its cost and its engine's state."""
        return self.templates[self.template_ids[index]].plan.effects

    def accesses(self, index: int) -> tuple[Access, ...]:
        """The operands of one event."""
        boxes = self.templates[self.template_ids[index]].boxes
        return tuple([Access(tensor, *box) for tensor, box in zip(self.tensors_of(index), boxes)])

    def event(self, index: int) -> Event:
        """One event with its numbers spelled out."""
        template = self.template(index)
        plan = template.plan
        return Event(
            index,
            template.op,
            self.names.get(index),
            plan.engine,
            plan.trigger or plan.engine,
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
                f"{marks[a.kind]}{self.tensors[a.tensor].name}#{a.tensor}"
                f"[{a.first_row}:{a.end_row},{a.first_byte}:{a.end_byte}]"
                for a in event.accesses
            )
            cost = event.cost
            lines.append(
                f"{event.index:6d} {event.engine.name:7s} {event.op:20s} "
                f"{cost.interval_cycles:10.1f} {cost.latency_cycles:10.1f}  {operands}  @{event.where.line}"
            )
        return "\n".join(lines) + "\n"
