"""Instruction stream: all events of one core in program order; the single record of a launch.

An event is a template, the tensors of its operands and a kernel line. The template has all that was planned; equal
calls share it, so an event takes 8 bytes and 4 for each operand, about 20 bytes. A tensor is named by the serial
number of its allocation in the rank's table. Columns derived from templates (engines, costs, boxes of operands) are
computed on first use. Dependences, time, placement, hazards and replays of a launch are derived from its streams.
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
from simulate.lines import find_assigned_or_empty, location
from simulate.memory import MemoryRegion, NKIObject, NkiTensor, Storage
from simulate.memory.layout import Form
from simulate.run.columns import Columns
from simulate.run.location import kernel_line

Line = tuple[CodeType, int]
"""Line of a kernel: its code object and its number."""

T = TypeVar("T")


class TensorRecord(NamedTuple):
    """Record of an allocation in a stream, which outlives the allocation's bytes."""

    serial: int
    explicit_name: str  # the text of `name=`, or the kernel's parameter; else empty
    shape: tuple[int, ...]
    dtype: str
    buffer: MemoryRegion
    row_bytes: int  # bytes per partition on chip, bytes of the last dim in HBM
    nbytes: int
    address: tuple[int, int] | None
    line: Line | None
    form: Form
    callers: tuple[
        Line, ...
    ] = ()  # outermost first; recorded on request only, see `simulate.run.call_stacks`

    @property
    def name(self) -> str:
        """Name in reports: the explicit name, else the variable that the line assigns, else "tile" or "tensor"."""
        return (
            self.explicit_name
            or find_assigned_or_empty(self.line)
            or ("tile" if self.buffer.on_chip else "tensor")
        )

    @property
    def where(self) -> Location | None:
        """Location of the line that allocated the tensor, None for a kernel argument."""
        return None if self.line is None else location(self.line)

    @property
    def called_at(self) -> tuple[Location, ...]:
        """Locations of the callers of the allocating line, innermost first; empty unless callers were recorded."""
        return tuple(location(line) for line in reversed(self.callers))

    @property
    def is_named(self) -> bool:
        """Whether the kernel named the tensor with name=."""
        return bool(self.explicit_name)


@dataclass(frozen=True, slots=True)
class Constant:
    """Initial contents of a constant tensor of the kernel, and whether they were read from a file."""

    contents: np.ndarray
    from_file: bool


class TensorTable:
    """Allocations of one rank, shared by its cores; an allocation's index is its serial number."""

    def __init__(self) -> None:
        self.records: list[TensorRecord] = []
        self.constants: dict[int, Constant] = {}

    def add(self, storage: Storage) -> None:
        """Set a storage's serial number to the next one and append its record."""
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
        """Return an empty stream of a core, which uses this table."""
        return Stream(rank, core, self)


class Access(NamedTuple):
    """Operand of an event: a box in a tensor, and how it is used.

    tensor: serial number. mode: READ, WRITE or ACCUMULATE, a matmul's write that may add to PSUM. Rows are partitions
    on chip, and in HBM all dims but the last; bytes count within a row. Ends are exclusive.
    """

    tensor: int
    mode: int
    first_row: int
    end_row: int
    first_byte: int
    end_byte: int


@dataclass(frozen=True, slots=True)
class Event:
    """Instruction of a stream with all its fields.

    index: position in the stream. op: name of the instruction. name: the text of `name=`, or None. trigger: the
    engine whose stream triggers a DMA, else `engine`. where: kernel line. rendezvous: serial number, or None.
    """

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
    """Handle that an instruction returns to the kernel, for ordering requests."""

    __slots__ = ("_stream", "index")

    def __init__(self, handle: Stream, index: int = -1) -> None:
        self._stream = handle
        self.index = index

    def depends_on(self, *producers: NkiInstruction) -> NkiInstruction:
        """Request that this instruction starts after `producers`; the request changes the predicted time and no value.

        Returns:
            This instruction.

        Raises:
            RuleViolation: A producer is no handle of an instruction of this core and launch.
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
    """depends_on takes what instructions return, not the tiles they write.

    Does nothing when called: errors that break the rule are raised elsewhere and name it.
    """


@rule("NKW-ORDER-CORE")
def producer_of_this_core() -> None:
    """An ordering request joins two instructions of one core in one launch.

    Does nothing when called: errors that break the rule are raised elsewhere and name it.
    """


@dataclass(frozen=True, slots=True)
class Iteration:
    """Iteration of an `nl.affine_range`: the loop's index in `Stream.affine_loops`, and the iteration's number from 0.

    `tensors_before` is the number of tensors that the rank had allocated before the loop.
    """

    loop: int
    number: int
    tensors_before: int


@dataclass(slots=True)
class Block:
    """Use of `nl.no_reorder()`: its line, and whether a `with` statement entered it."""

    line: Line
    entered: bool = False


class Column(Generic[T]):
    """Descriptor that makes a column of `Columns` an attribute of a stream, under the same name."""

    def __init__(self, column: Callable[[Columns], T]) -> None:
        self.__doc__ = column.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, stream: Stream, owner: Any = None) -> T:
        values: T = getattr(stream.columns(), self._name)
        return values


class Stream:
    """Events of one core, in program order; `len`, iteration and `event(index)` give them as `Event`."""

    def __init__(self, rank: int, core: int, tensors: TensorTable) -> None:
        self.rank = rank
        self.core = core
        self.tensors = tensors.records
        self.constants = tensors.constants
        self.templates: list[Template] = []
        self.template_ids = array("I")
        self.operands = array("I")  # serial numbers of tensors, in the order of the template's operands
        self.line_ids = array("I")
        self.lines: list[Line] = []
        self.resumed: list[tuple[int, int]] = []
        """Resumptions by the core scheduler: the number among all cores of the launch, and the next event."""
        self.names: dict[int, str] = {}
        self.rendezvous: dict[int, int] = {}
        self.accumulated: dict[int, Any] = {}
        """PSUM elements to which a matmul was added, by event: all (True), none (False), or a mask."""
        self.masked: set[int] = set()
        """Events that left elements of a result unchanged."""
        self.depends_on_data: str | None = None
        """Reason why other data may give other instructions or written bytes, None if there is none."""
        self.requested: list[tuple[int, int]] = []
        """Ordering requests: producer and consumer events."""
        self.request_lines: dict[tuple[int, int], Line] = {}
        """Lines of the requests that depends_on made."""
        self.remarks: list[tuple[str, Line, str]] = []
        """Code, line and text of observations that no event shows."""
        self.affine_loops: list[int] = []
        """First event of each nl.affine_range."""
        self.open_affine: list[Iteration] = []
        self.affine: dict[int, tuple[Iteration, ...]] = {}
        """Iterations of nl.affine_range that contain an event."""
        self.blocks: list[Block] = []
        self.open_blocks = 0
        self.open_loops: list[int] = []
        """Running device loops: the number of the iteration of each."""
        self.loops: dict[int, tuple[int, ...]] = {}
        """Iterations of device loops that contain an event."""
        self.iterations: dict[int, int] = {}
        """Number of the loop of an iteration."""
        self.made_in: dict[int, tuple[int, ...]] = {}
        """Iterations of device loops in which a tensor was allocated."""
        self._template_numbers: dict[int, int] = {}
        self._line_ids: dict[tuple[int, int], int] = {}
        self._columns: Columns | None = None

    def __len__(self) -> int:
        return len(self.template_ids)

    def chains(self) -> tuple[Sequence[int], Sequence[tuple[Line, ...]]]:
        """Return the index of every event's call stack, and the call stacks: kernel lines, outermost caller first.

        Callers are recorded on request only (`simulate.run.call_stacks`); otherwise a call stack is the event's line
        alone.
        """
        return self.line_ids, [(line,) for line in self.lines]

    def called_at(self, index: int) -> tuple[Location, ...]:
        """Return the locations of an event's callers, innermost first; empty unless callers were recorded."""
        numbers, chains = self.chains()
        return tuple(location(line) for line in reversed(chains[numbers[index]][:-1]))

    @property
    def nbytes(self) -> int:
        """Bytes of the columns of events and operands, without the columns derived from templates."""
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
        """Record one instruction as the next event and return its handle; only `issue` calls this.

        Args:
            template: The planned instruction.
            reads: The tensors that it reads.
            writes: The tensors that it writes.
            line: The kernel line.
            rendezvous: The serial number of its rendezvous, if any.
        """
        index = len(self.template_ids)
        number = self._template_numbers.get(id(template))
        if number is None:  # the lists keep templates and lines alive, so that no other object gets their ids
            number = self._template_numbers[id(template)] = len(self.templates)
            self.templates.append(template)
        line_key = id(line[0]), line[1]
        line_id = self._line_ids.get(line_key)
        if line_id is None:
            line_id = self._line_ids[line_key] = len(self.lines)
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
        """Return the columns of the events so far; they are cached until an event is appended."""
        columns = self._columns
        if columns is None or columns.events != len(self):
            columns = self._columns = Columns(self.templates, self.template_ids, self.operands)
        return columns

    def with_costs(self, costs: list[Cost], cost_ids: array[int] | None = None) -> Stream:
        """Return a shallow copy of this stream with other costs, to predict the time of a changed kernel.

        Args:
            costs: The distinct costs.
            cost_ids: The index in `costs` of every event; None for the indices of this stream.
        """
        changed = copy.copy(self)
        columns = copy.copy(self.columns())
        columns.cost_ids = columns.cost_ids if cost_ids is None else cost_ids
        columns.costs = costs
        changed._columns = columns
        return changed

    def on(self, hardware: Hardware) -> Stream:
        """Return a shallow copy of this stream with the costs of another record of its chip.

        The record may differ from the stream's only in numbers of times.
        """
        return self.with_costs([cost.on(hardware) for cost in self.costs])

    def template(self, index: int) -> Template:
        """Return the template of an event."""
        return self.templates[self.template_ids[index]]

    def tensors_of(self, index: int) -> array[int]:
        """Return the serial numbers of an event's operands, reads first; a run-time index follows its operand."""
        ends = self.operand_ends
        return self.operands[ends[index - 1] if index else 0 : ends[index]]

    def label(self, serial: int) -> str:
        """Return name, shape, dtype and line of an allocation as text, for error messages."""
        record = self.tensors[serial]
        line = f" at {record.where}" if record.where else ""
        return f"{record.name} {record.shape} {record.dtype}{line}"

    def source_of(self, serial: int) -> tuple[object, ...]:
        """Return a key that allocations of the same source line share: callers, line, shape and dtype."""
        record = self.tensors[serial]
        return record.callers, record.line, record.shape, record.dtype

    def elements(self, serial: int, size_bytes: int) -> str:
        """Return a text with the number of an allocation's elements that take `size_bytes`, such as `512 float32`."""
        record = self.tensors[serial]
        width = max(1, record.nbytes // math.prod(record.shape))
        return f"{size_bytes // width} {record.dtype}"

    def effects(self, index: int) -> Effects:
        """Return facts about an event's instruction for detectors, such as whether it draws random numbers."""
        return self.templates[self.template_ids[index]].plan.effects

    def accesses(self, index: int) -> tuple[Access, ...]:
        """Return the operands of one event with their boxes, reads first."""
        boxes = self.templates[self.template_ids[index]].boxes
        return tuple([Access(tensor, *box) for tensor, box in zip(self.tensors_of(index), boxes)])

    def event(self, index: int) -> Event:
        """Return one event with all its fields."""
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
        """Return the stream as text, one event a line: index, engine, instruction, cycles, operands and line number.

        The same kernel and shapes give the same bytes.
        """
        marks = {READ: "", WRITE: "=", ACCUMULATE: "+="}
        lines = []
        for event in self:
            operands = " ".join(
                f"{marks[a.mode]}{self.tensors[a.tensor].name}#{a.tensor}"
                f"[{a.first_row}:{a.end_row},{a.first_byte}:{a.end_byte}]"
                for a in event.accesses
            )
            cost = event.cost
            lines.append(
                f"{event.index:6d} {event.engine.name:7s} {event.op:20s} "
                f"{cost.interval_cycles:10.1f} {cost.latency_cycles:10.1f}  {operands}  @{event.where.line}"
            )
        return "\n".join(lines) + "\n"
