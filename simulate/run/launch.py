"""A launch of a kernel: its request, its record, and the interface of its observers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from nkw.errors import NkwError, RuleViolation
from nkw.terminal import Displayed
from simulate.hardware import Hardware
from simulate.level import NEWEST, Level, Rules
from simulate.memory import MemoryRegion, Storage
from simulate.memory.layout import Layout
from simulate.memory.placement import Placement, Tile, place
from simulate.run.arguments import leaves
from simulate.run.machine import InstructionObserver, Mode, NeuronCore
from simulate.run.processes import Processes
from simulate.run.stream import Stream

ArgumentsOfRanks = Sequence[tuple[tuple[Any, ...], dict[str, Any]]]
"""One (args, kwargs) per rank of this process."""


@dataclass(frozen=True, slots=True)
class Result:
    """A tensor that a kernel returned: the serial number of its allocation, and the layout of the view."""

    serial: int
    layout: Layout


@dataclass(frozen=True, slots=True)
class Interface:
    """The arguments and results of one rank, as tensors of its stream.

    `inputs` has the serial numbers of the arrays in the arguments, in order. `returned` is the kernel's return value
    with a Result for every tensor. `converts` tells that an array is stored with other bytes than it has.
    """

    inputs: tuple[int, ...]
    returned: Any
    converts: bool

    def results(self) -> list[Result]:
        """The tensors that the kernel returned, in order."""
        return [value for value in leaves(self.returned) if isinstance(value, Result)]


@dataclass(frozen=True, repr=False)
class Launch(Displayed):
    """One launch: its outputs, the stream of every core, and its warnings. `print` and notebooks show a short report.

    `outputs` has one entry per rank; `streams` one per core, rank by rank; `interfaces` one per rank.
    `reads_values` tells whether the kernel's Python read a value. `rules` are those that held; `tolerated` are the
    broken rules that they do not refuse, whose texts `warnings` has too.
    """

    kernel: str
    hardware: Hardware
    mode: Mode
    outputs: list[Any]
    streams: tuple[Stream, ...]
    warnings: tuple[str, ...]
    interfaces: tuple[Interface, ...]
    reads_values: bool
    rules: Rules = Rules.chip
    tolerated: tuple[RuleViolation, ...] = ()

    def repeated(self, outputs: list[Any]) -> Launch:
        """The launch of a replay: this one with other outputs."""
        again = object.__new__(Launch)  # dataclasses.replace takes longer than the replay of a small kernel
        again.__dict__.update(self.__dict__, mode=Mode.replay, outputs=outputs)
        return again

    def on(self, chip: Hardware) -> Launch:
        """This launch by another record of its chip: costs are worked out again, and the kernel does not run.

        The records differ in numbers of times alone, as an overlay's do; all ranks are of this process.
        """
        record = chip.working(len(self.streams))
        return replace(self, hardware=record, streams=tuple(stream.on(record) for stream in self.streams))

    @cached_property
    def placements(self) -> tuple[dict[MemoryRegion, Placement], ...]:
        """SBUF and PSUM placement of every stream."""
        return tuple(_placements(stream, self.hardware) for stream in self.streams)

    def high_water_bytes(self, buffer: MemoryRegion) -> int:
        """The highest byte per partition in use on any core."""
        return max(placements[buffer].high_water_bytes for placements in self.placements)

    @property
    def title(self) -> str:
        """Kernel, chip, mode, ranks, physical cores of all ranks, instructions of all cores."""
        ranks, cores = len({stream.rank for stream in self.streams}), len(self.streams)
        counts = ((ranks, "rank"), (cores, "core"), (sum(map(len, self.streams)), "instruction"))
        counted = ", ".join(f"{count:,} {what}{'' if count == 1 else 's'}" for count, what in counts)
        return f"{self.kernel} on {self.hardware.label}: {self.mode.value}, {counted}"

    def __repr__(self) -> str:
        return f"<launch of {self.title}>"


class Observer(InstructionObserver):
    """An object that is told of launches, instructions and operands while kernels run; by default it does nothing.

    Values and run-time indices are gone after a launch; a detector that needs them sets `sees_instructions`. With
    `keeps_calls` the stream records the callers' lines of instructions and allocations. Launches with either are never
    replayed. Without an observer an instruction costs two loops over nothing.
    """

    sees_instructions = False
    keeps_calls = False

    def began(
        self, request: LaunchRequest, cores: Sequence[NeuronCore], inputs: Sequence[Sequence[Storage]]
    ) -> None:
        """The cores of a launch are about to run; `inputs` has the storages of each rank's array arguments."""

    def ran(self, launch: Launch) -> None:
        """The kernel has run to its end; the launch may still be refused because its tiles do not fit."""

    def ended(self, launch: Launch, returned: Sequence[Any]) -> None:
        """A launch is over. `returned` has each rank's return value, with tensors; a replay has none."""

    def refused(self, error: NkwError) -> None:
        """A launch was ended by an error, which the caller may catch."""

    def stopped(self, launch: Launch) -> None:
        """The streams of a launch up to the instruction that was refused; it has no outputs."""


@dataclass(frozen=True)
class LaunchRequest:
    """A kernel with its arguments and options: enough to launch it again, unless other processes take part.

    kernel: a plain function of the NKI language. arguments: one (args, kwargs) per rank of this process.
    logical_core_size: physical cores per rank (LNC). mode: eager or dry. has_grid: whether the kernel was called with
    a grid. peers: the processes that hold the other ranks. seed: draws the schedule of the cores at random. level: the
    release of NKI that the kernel is written for. rules: which broken rules end the launch. config: the kernel's
    compile configuration, and whether nested kernels may have another one. trips: in mode dry, how often device loops
    over registers run: one count per loop in the order they are reached first, the last one for all further loops.
    """

    kernel: Callable[..., Any]
    arguments: ArgumentsOfRanks
    chip: Hardware
    logical_core_size: int = 1
    mode: Mode = Mode.eager
    has_grid: bool = False
    peers: Processes | None = None
    seed: int | None = None
    observers: tuple[Observer, ...] = ()
    level: Level = NEWEST
    rules: Rules = Rules.chip
    config: tuple[object, bool] = (None, False)
    trips: tuple[int, ...] = ()


def plain(kernel: Any) -> Callable[..., Any]:
    """The function under `nki.jit`; a kernel that is not jitted, unchanged."""
    jitted = hasattr(kernel, "func") and not isinstance(kernel, partial)
    return kernel.func if jitted else kernel  # type: ignore[no-any-return]


def _placements(stream: Stream, chip: Hardware) -> dict[MemoryRegion, Placement]:
    tiles: dict[MemoryRegion, list[Tile]] = {MemoryRegion.sbuf: [], MemoryRegion.psum: []}
    for serial, first in stream.first_use.items():
        record = stream.tensors[serial]
        if record.buffer.on_chip:
            first_partition, address = record.address if record.address is not None else (0, None)
            tiles[record.buffer].append(
                Tile(
                    serial,
                    record.row_bytes,
                    first,
                    stream.last_use[serial],
                    address,
                    stream.source_of(serial),
                    record.shape[0],
                    first_partition,
                )
            )
    return {
        MemoryRegion.sbuf: place(tiles[MemoryRegion.sbuf]),
        MemoryRegion.psum: place(tiles[MemoryRegion.psum], chip.psum_bank_bytes),
    }
