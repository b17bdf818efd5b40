"""State of a launch while a kernel runs: NeuronCores, their rank, and the core of the calling thread."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import numpy as np

from nkw.errors import InvalidArgument, NkwError, RuleViolation, rule
from simulate.hardware import Hardware
from simulate.isa.plan import Plan, State, name_is_text
from simulate.isa.rules import violations
from simulate.level import NEWEST, Level, Rules
from simulate.lines import find_assigned
from simulate.memory import MemoryRegion, NkiTensor, Storage, views
from simulate.memory.registers import VirtualRegister, allocate_cell
from simulate.memory.validity import EMPTY, Validity
from simulate.numerics import DType, as_dtype
from simulate.run.dry_values import DryValues
from simulate.run.location import kernel_line, running_location
from simulate.run.scheduler import CoreScheduler
from simulate.run.stream import Line, TensorTable


class Mode(Enum):
    """Way in which a launch is executed.

    eager: every instruction is checked, executed and recorded. dry: the same without computing values. replay: the
    program of an earlier launch with the same cache key runs on new data; without such a program the launch is eager.
    """

    eager = "eager"
    dry = "dry"
    replay = "replay"


@dataclass
class Rank:
    """State that the cores of one rank share, such as the tensor table, shared HBM and warnings.

    Attributes:
        number: Number of the rank.
        hardware: Record of the chip.
        logical_core_size: Physical cores of the rank.
        tensors: Allocations of the rank.
        shared: Tensors in shared HBM, in the order of allocation; each core takes them in turn.
        constants: Arrays of nl.shared_constant by their index, each with the core that passed it first.
        warnings: Texts of the launch's warnings.
        reorders_loops: Whether the kernel's compiler reorders loops, so that program order does not decide which PSUM
            tiles are live.
        level: Release of NKI that the kernel is written for.
        rules: Rules of the launch.
        config: Compile configuration of the kernel, and whether nested kernels may have another.
        trips: Trip counts of a dry launch.
        loops: Trip counts of the device loops that were reached, by their line.
        values: Values that a dry launch knows.
        tolerated: Errors of broken rules that the launch's rules do not refuse.
        judged: Kernel lines and codes of undocumented arguments that were checked already.
    """

    number: int
    hardware: Hardware
    logical_core_size: int
    tensors: TensorTable = field(default_factory=TensorTable)
    shared: list[NkiTensor] = field(default_factory=list)
    constants: dict[int, tuple[int, np.ndarray]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    reorders_loops: bool = False
    level: Level = NEWEST
    rules: Rules = Rules.chip
    config: tuple[object, bool] = (None, False)
    trips: tuple[int, ...] = ()
    loops: dict[Line, int] = field(default_factory=dict)
    values: DryValues = field(default_factory=DryValues)
    tolerated: list[RuleViolation] = field(default_factory=list)
    judged: set[tuple[Line, tuple[str, ...]]] = field(default_factory=set)

    def trip_count(self, line: Line) -> int | None:
        """Return the assumed trip count of the device loop at a line, None if the launch has no trip counts.

        Each loop takes the next count of the launch when it is reached first, and keeps it. The last count is for all
        further loops.
        """
        if not self.trips:
            return None
        return self.loops.setdefault(line, self.trips[min(len(self.loops), len(self.trips) - 1)])

    def report_violation(self, error: RuleViolation, instruction: str = "") -> None:
        """Raise the error of a broken rule, or append it to `tolerated` if the rules of the launch tolerate it.

        A tolerated error gets the running line if it has none; equal errors are recorded once.

        Args:
            error: The error.
            instruction: The name of the instruction, which a tolerated error gets if it has none.
        """
        if self.rules.refuse(error.code):
            raise error
        error.where = error.where or running_location()
        error.instruction = error.instruction or instruction
        if str(error) not in map(str, self.tolerated):
            self.tolerated.append(error.with_traceback(None))


Tensors = tuple[NkiTensor, ...]


class Issue(NamedTuple):
    """Instruction that takes effect: the plan over stand-ins, and the tensors that this call reads and writes."""

    plan: Plan
    reads: Tensors
    writes: Tensors


class InstructionObserver:
    """Base class of observers of every instruction while it takes effect; its methods do nothing."""

    def issuing(self, core: NeuronCore, issue: Issue, operands: Sequence[Any]) -> None:
        """Handle an instruction before it is computed; it will be event `len(core.stream)`.

        Args:
            core: The core.
            issue: The plan and its tensors.
            operands: The values of the operands, which are those in memory; none in a dry launch.
        """

    def issued(self, core: NeuronCore, issue: Issue, operands: Sequence[Any]) -> None:
        """Handle an instruction whose results are written; it will be event `len(core.stream)`.

        Args:
            core: The core.
            issue: The plan and its tensors.
            operands: The values of the operands; they may share memory with results, and so be overwritten.
        """


class NeuronCore:
    """Physical core during a launch: its stream, its accumulator registers, and its random generators."""

    def __init__(
        self, rank: Rank, number: int, index: int, scheduler: CoreScheduler, mode: Mode, precise: bool
    ) -> None:
        self.rank = rank
        self.number = number
        self.index = index
        self.hardware = rank.hardware
        self.scheduler = scheduler
        self.dry = mode is Mode.dry
        self.precise = precise
        self.stream = rank.tensors.stream(rank.number, number)
        self.has_grid = False
        self.prepared: Any = None
        """Collective that waits for its trigger, None if there is none."""
        self.conditions: dict[Line, Any] = {}
        """Running loops `while register:`, by their line."""
        self.observers: Sequence[InstructionObserver] = ()
        self._state: dict[State, np.ndarray] = {}
        self._defined: dict[State, Validity] = {}
        self._shared_taken = 0
        self._constants_taken = 0

    def state(self, key: State) -> np.ndarray:
        """Return the values of accumulator registers or of a random generator, an array with a row per partition.

        Before the first use it is what the kernel finds at its start (`State.initial`).
        """
        state = self._state.get(key)
        if state is None:
            state = self._state[key] = key.initial(self.hardware.partitions)
        return state

    def set_state(self, key: State, values: np.ndarray) -> None:
        """Replace the values of accumulator registers or of a random generator; only `issue` calls this."""
        self._state[key] = values

    def registers_defined(self, key: State) -> Validity:
        """Return the validity of an accumulator register file, one byte per partition; EMPTY at the kernel's start."""
        validity = self._defined.get(key)
        if validity is None:
            validity = self._defined[key] = Validity(self.hardware.partitions, EMPTY)
        return validity

    def allocate(
        self,
        shape: Sequence[int] | int,
        dtype: Any,
        buffer: MemoryRegion = MemoryRegion.sbuf,
        name: str = "",
        address: tuple[int, int] | None = None,
    ) -> NkiTensor:
        """Return a fresh tensor of undefined bytes.

        With rules `simulator` the bytes are filled as the vendor's simulator does. A tensor in shared HBM is the same
        for both cores of a rank, which must allocate such tensors in the same order.

        Args:
            shape: The shape; an int is a shape with one dim. On chip (1,) becomes (1, 1).
            dtype: The dtype, or its name.
            buffer: The memory.
            name: The name that messages show.
            address: (partition, byte) of a tile on chip, None if the compiler places it.

        Raises:
            RuleViolation: The memory cannot hold the shape or the address, or the cores' allocations in shared HBM
                differ.
            InvalidArgument: The shape is no tuple of positive integers.
        """
        try:
            sizes, element = self._check_allocation(shape, dtype, buffer, address)
            if not isinstance(name, str):
                self._tolerate(name_is_text, name)
                name = "" if name is None else str(name)
        except RuleViolation as error:
            label = name or find_assigned(kernel_line())
            error.instruction = f"allocation of {label}" if label else "allocation"
            raise
        if buffer is MemoryRegion.shared_hbm and self.rank.logical_core_size > 1:
            return self._allocate_shared(sizes, element, name)
        return self._allocate_fresh(sizes, element, buffer, name, address)

    def _check_allocation(
        self, shape: Sequence[int] | int, dtype: Any, buffer: MemoryRegion, address: tuple[int, int] | None
    ) -> tuple[tuple[int, ...], DType]:
        """Return the shape and the stored dtype of a tensor after checking that the memory can hold it.

        Raises what `allocate` raises for shape, dtype, memory and address.
        """
        element = self.stored_dtype(as_dtype(dtype))
        if element == "int64":
            self.rank.level.require("nl.int64")
        sizes = as_shape(shape)
        is_region(buffer)
        if buffer.on_chip:
            # The tile of a register may have shape (1,) as well; on chip a tensor has two dims.
            sizes = (1, 1) if sizes == (1,) else sizes
            on_chip_shape(self.hardware, sizes)
            self.apply(tile_fits, sizes, element, buffer)
            if address is not None:
                self.apply(address_fits, sizes, element, buffer, address)
        elif address is not None:
            self._tolerate(address_is_on_chip, buffer, address)
        return sizes, element

    def apply(self, rule_function: Callable[..., object], *facts: Any) -> None:
        """Apply a rule: call `rule_function(hardware, *facts)`, and record its error if the launch tolerates it.

        Raises:
            RuleViolation: The rule is broken, and the launch's rules refuse it.
        """
        try:
            rule_function(self.hardware, *facts)
        except RuleViolation as error:
            self.rank.report_violation(error)

    def _tolerate(self, rule_function: Callable[..., object], *facts: Any) -> None:
        """Apply a rule about an undocumented argument of an allocation: call `rule_function(*facts)`.

        Its error is recorded if the launch tolerates it, else raised.
        """
        for violation in violations((rule_function, *facts)):
            self.rank.report_violation(violation, "allocation")

    def take_constant(self) -> int:
        """Return the index of the core's next nl.shared_constant, and advance it; the first is 0."""
        index, self._constants_taken = self._constants_taken, self._constants_taken + 1
        return index

    def allocate_register(self, frozen: bool = False, dtype: DType | None = None) -> VirtualRegister:
        """Return a register without a value: 32 bits, or 64 if `dtype` is int64.

        Args:
            frozen: Whether the kernel may not write the register.
            dtype: The dtype of the register; None is that of ordinary registers.
        """
        register = VirtualRegister(allocate_cell(dtype, has_bytes=not self.dry), frozen)
        self.rank.tensors.add(register.cell.storage)
        return register

    def _allocate_fresh(
        self,
        shape: tuple[int, ...],
        dtype: DType,
        buffer: MemoryRegion,
        name: str,
        address: tuple[int, int] | None = None,
    ) -> NkiTensor:
        """Return a tensor of undefined bytes, add it to the rank's table, and note the device loops that run."""
        array = np.empty(0, np.uint8) if self.dry else None
        storage = Storage(
            shape, dtype, buffer, name, array=array, address=address, line=kernel_line(), fresh=True
        )
        if not (self.dry or self.rank.rules.refuse("NKW-UNWRITTEN")):
            storage.fill_fresh()
        self.rank.tensors.add(storage)
        if self.stream.open_loops:
            self.stream.made_in[storage.serial] = tuple(self.stream.open_loops)
        return NkiTensor(shape, dtype, storage)

    def _allocate_shared(self, shape: tuple[int, ...], dtype: DType, name: str) -> NkiTensor:
        """Return the next tensor in shared HBM; the first core that reaches it allocates it.

        Raises RuleViolation if the other core allocated another shape or dtype at this point.
        """
        taken, self._shared_taken = self._shared_taken, self._shared_taken + 1
        if taken == len(self.rank.shared):
            self.rank.shared.append(self._allocate_fresh(shape, dtype, MemoryRegion.shared_hbm, name))
        tensor = self.rank.shared[taken]
        if tensor.shape != shape or tensor.dtype != dtype:
            raise RuleViolation(
                shared_allocations_agree,
                f"core {self.number} allocates {shape} {dtype}, the other core {tensor.describe()}",
                hint="make both cores run the same allocations in the same order",
            )
        return tensor

    def stored_dtype(self, dtype: DType) -> DType:
        """Return the dtype in which this launch stores a dtype: float32 for bf16 and fp8 if NKI_PRECISE_FP=0."""
        if self.precise or not dtype.is_float or dtype.is_packed or dtype.itemsize >= 4 or dtype == "float16":
            return dtype
        return dtype.stored_as_float32()

    def warn(self, message: str) -> None:
        """Append a text with the running line to the launch's warnings, unless it is among them."""
        text = f"{message} at {running_location()}"
        if text not in self.rank.warnings:
            self.rank.warnings.append(text)


class _Running(threading.local):
    """Core that each thread runs."""

    core: NeuronCore | None = None


_running = _Running()


def current_core() -> NeuronCore:
    """Return the core that the calling thread runs. Raises NkwError outside of a kernel."""
    core = _running.core
    if core is None:
        raise NkwError(
            "NKW-NO-KERNEL",
            "an nki call outside of a kernel: nothing is running on a NeuronCore; call a function decorated with "
            "@nki.jit, or nki.simulate(function)(...)",
        )
    return core


def running_core() -> NeuronCore | None:
    """Return the core that the calling thread runs, or None outside of a kernel."""
    return _running.core


def running_level() -> Level:
    """Return the level of the running launch; outside of a kernel, that of the environment."""
    core = _running.core
    return Level.resolve() if core is None else core.rank.level


def set_running_core(core: NeuronCore | None) -> NeuronCore | None:
    """Set the core that the calling thread runs, None for none; returns the former one."""
    previous, _running.core = _running.core, core
    return previous


def as_shape(shape: Sequence[int] | int) -> tuple[int, ...]:
    """Return a shape as a tuple of integers of 1 or more; an integer n becomes (n,).

    Raises:
        InvalidArgument: The shape is no integer, tuple or list of integers of 1 or more.
    """
    try:
        sizes = tuple(
            operator.index(size) for size in (shape if isinstance(shape, (tuple, list)) else (shape,))
        )
    except TypeError:
        raise InvalidArgument("NKW-SHAPE", f"shape {shape!r:.80} is not a tuple of integers") from None
    if not sizes or min(sizes) < 1:
        raise InvalidArgument("NKW-SHAPE", f"shape {sizes} has an empty dim; every size is 1 or more")
    return sizes


@rule("NKW-REGION")
def is_region(buffer: Any) -> None:
    """buffer is nl.sbuf, nl.psum, nl.hbm, nl.private_hbm or nl.shared_hbm.

    Raises RuleViolation for anything but a MemoryRegion.
    """
    if not isinstance(buffer, MemoryRegion):
        raise RuleViolation(is_region, f"buffer={buffer!r:.40}", hint="buffer=nl.sbuf")


@rule("NKW-TILE-SHAPE")
def on_chip_shape(hardware: Hardware, shape: tuple[int, ...]) -> None:
    """A tile on chip has two to five dims and at most 128 partitions.

    Raises RuleViolation for another shape. The limits are those of the chip's record.
    """
    if not 2 <= len(shape) <= hardware.dims_max or shape[0] > hardware.partitions:
        raise RuleViolation(
            on_chip_shape,
            f"shape {shape}",
            limit=f"2 to {hardware.dims_max} dims, {hardware.partitions} partitions on {hardware.name}",
            hint="make dim 0 the partition dim, (128, free)",
        )


@rule("NKW-TILE-SIZE")
def tile_fits(hardware: Hardware, shape: tuple[int, ...], dtype: DType, buffer: MemoryRegion) -> None:
    """A single tile fits into the usable bytes of a partition.

    Raises RuleViolation if a tile of this shape and dtype needs more bytes per partition than the memory has.
    """
    needed = views.count(shape[1:]) * dtype.itemsize
    limit = capacity_bytes(hardware, buffer)
    if needed > limit:
        raise RuleViolation(
            tile_fits,
            f"shape {shape} {dtype} needs {needed} bytes per partition of {buffer.value}",
            limit=f"{limit} usable bytes per partition on {hardware.name}",
            hint=f"at most {limit // dtype.itemsize} {dtype} elements per partition fit"
            + (
                f"; one matmul writes one bank, {hardware.psum_bank_bytes // dtype.itemsize}"
                if buffer is MemoryRegion.psum
                else ""
            ),
        )


@rule("NKW-ADDRESS")
def address_fits(
    hardware: Hardware, shape: tuple[int, ...], dtype: DType, buffer: MemoryRegion, address: tuple[int, int]
) -> None:
    """address=(partition, byte) lies inside the memory with the whole tile; in PSUM it starts on a bank.

    Raises RuleViolation for an address of another form, or at which the tile does not fit. One paragraph of the
    reference calls the second number elements, its examples use bytes; bytes are meant here.
    """
    needed = views.count(shape[1:]) * dtype.itemsize
    limit = capacity_bytes(hardware, buffer)
    well_formed = isinstance(address, (tuple, list)) and len(address) == 2
    inside = (
        well_formed
        and 0 <= address[0] <= hardware.partitions - shape[0]
        and 0 <= address[1] <= limit - needed
    )
    on_bank = well_formed and (buffer is not MemoryRegion.psum or address[1] % hardware.psum_bank_bytes == 0)
    if not (inside and on_bank):
        raise RuleViolation(
            address_fits,
            f"address={address} for shape {shape} {dtype} in {buffer.value}",
            limit=f"{hardware.partitions} partitions, {limit} bytes; PSUM banks of {hardware.psum_bank_bytes} bytes",
            hint=_nearest_address(
                hardware, shape[0], needed, limit, buffer, address if well_formed else (0, 0)
            ),
        )


def _nearest_address(
    hardware: Hardware, rows: int, needed: int, limit: int, buffer: MemoryRegion, requested: tuple[int, int]
) -> str:
    """Return a text with the address nearest to a requested address at which a tile fits.

    Args:
        hardware: The record of the chip.
        rows: The partitions of the tile.
        needed: Its bytes per partition.
        limit: The usable bytes per partition.
        buffer: The memory; in PSUM the address is the start of a bank.
        requested: (partition, byte).
    """
    step = hardware.psum_bank_bytes if buffer is MemoryRegion.psum else 1
    partition = min(max(requested[0], 0), hardware.partitions - rows)
    byte = min(max(requested[1], 0), limit - needed) // step * step
    banks = f"; bank b starts at byte {step} * b, for b below {limit // step}" if step > 1 else ""
    return f"address=({partition}, {byte}){banks}"


@rule("NKW-ADDRESS-HBM", hint="leave address out, or allocate in nl.sbuf or nl.psum")
def address_is_on_chip(buffer: MemoryRegion, address: Any) -> None:
    """address= is a partition and an offset inside it, so it places tiles in SBUF and PSUM only.

    Always raises RuleViolation; called for an address of a tensor in HBM.
    """
    raise RuleViolation(address_is_on_chip, f"address={address!r:.40} in {buffer.value}")


@rule("NKW-SHARED-ALLOCATION")
def shared_allocations_agree() -> None:
    """Both cores of a logical core allocate the same shared HBM tensors in the same order.

    Does nothing when called: errors that break the rule are raised elsewhere and name it.
    """


def capacity_bytes(hardware: Hardware, buffer: MemoryRegion) -> int:
    """Return the usable bytes of a partition of SBUF or PSUM."""
    if buffer is MemoryRegion.psum:
        return hardware.psum_bytes_per_partition
    return hardware.sbuf_usable_bytes_per_partition
