"""Launches of kernels: the request, the record, and the interface of observers."""

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
from simulate.memory.placement import Placement, Tile, place_tiles
from simulate.run.arguments import list_leaves
from simulate.run.machine import InstructionObserver, Mode, NeuronCore
from simulate.run.processes import Processes
from simulate.run.stream import Stream

ArgumentsOfRanks = Sequence[tuple[tuple[Any, ...], dict[str, Any]]]
"""(args, kwargs) of each rank of this process."""


@dataclass(frozen=True, slots=True)
class Result:
    """Tensor that a kernel returned: the serial number of its allocation in the stream, and the layout of the view."""

    serial: int
    layout: Layout


@dataclass(frozen=True, slots=True)
class Interface:
    """Arguments and return value of one rank's kernel, as tensors of its stream.

    inputs: serial numbers of the array arguments, in order. returned: the kernel's return value, with a Result in the
    place of every tensor. converts: whether a replay could not bind other arrays, because an argument is stored with
    another element size or float8 dtype.
    """

    inputs: tuple[int, ...]
    returned: Any
    converts: bool

    def results(self) -> list[Result]:
        """Return the Results in the return value, in order."""
        return [value for value in list_leaves(self.returned) if isinstance(value, Result)]


@dataclass(frozen=True, repr=False)
class Launch(Displayed):
    """Record of one launch: its outputs, the stream of every core, and its warnings; `print` shows a short report.

    `outputs` and `interfaces` have an entry for each rank of this process; `streams` one for each core, rank by rank.
    `reads_values` tells whether the kernel's Python read elements of a tensor. `rules` are the rules that applied.
    `tolerated` are the errors of broken rules that `rules` do not refuse; `warnings` has their texts too.
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
        """Return a copy of this launch in mode replay with other outputs; it shares the streams."""
        launch = object.__new__(Launch)  # dataclasses.replace takes longer than the replay of a small kernel
        launch.__dict__.update(self.__dict__, mode=Mode.replay, outputs=outputs)
        return launch

    def on(self, chip: Hardware) -> Launch:
        """Return this launch with the costs of another record of its chip; the kernel does not run again.

        Args:
            chip: A record that differs from this launch's only in numbers of times, as with an overlay. All ranks
                must be of this process.
        """
        record = chip.working(len(self.streams))
        return replace(self, hardware=record, streams=tuple(stream.on(record) for stream in self.streams))

    @cached_property
    def placements(self) -> tuple[dict[MemoryRegion, Placement], ...]:
        """Placement of every stream's tiles in SBUF and PSUM, by memory."""
        return tuple(_place_stream(stream, self.hardware) for stream in self.streams)

    def high_water_bytes(self, buffer: MemoryRegion) -> int:
        """Return the highest number of bytes per partition that live tiles take in SBUF or PSUM, over all cores."""
        return max(placements[buffer].high_water_bytes for placements in self.placements)

    @property
    def title(self) -> str:
        """Text with kernel, chip, mode, and the numbers of ranks, physical cores and instructions."""
        ranks, cores = len({stream.rank for stream in self.streams}), len(self.streams)
        counts = ((ranks, "rank"), (cores, "core"), (sum(map(len, self.streams)), "instruction"))
        counted = ", ".join(f"{count:,} {unit}{'' if count == 1 else 's'}" for count, unit in counts)
        return f"{self.kernel} on {self.hardware.label}: {self.mode.value}, {counted}"

    def __repr__(self) -> str:
        return f"<launch of {self.title}>"


class Observer(InstructionObserver):
    """Base class of objects that are told of launches and instructions while kernels run; its methods do nothing.

    Register one with `simulate.run.observers.observing`. Element values and run-time indices are lost after a launch;
    an observer that needs them sets `sees_instructions`. With `keeps_calls` the stream records the callers' lines of
    instructions and allocations. Launches with either flag are never replayed.
    """

    sees_instructions = False
    keeps_calls = False

    def began(
        self, request: LaunchRequest, cores: Sequence[NeuronCore], inputs: Sequence[Sequence[Storage]]
    ) -> None:
        """Handle a launch whose cores are about to run; not called for a replay.

        Args:
            request: The launch.
            cores: The cores of all ranks of this process.
            inputs: The storages of each rank's array arguments.
        """

    def ran(self, launch: Launch) -> None:
        """Handle a launch whose kernel has run to its end; it may still be refused because its tiles do not fit.

        Not called for a replay.
        """

    def ended(self, launch: Launch, returned: Sequence[Any]) -> None:
        """Handle a launch that is over and was not refused.

        Args:
            launch: The launch.
            returned: The return value of each rank, with tensors instead of arrays; empty for a replay.
        """

    def refused(self, error: NkwError) -> None:
        """Handle the NkwError that ended a launch, before it is raised; the caller may catch it."""

    def stopped(self, launch: Launch) -> None:
        """Handle a launch that an error ended in an instruction; its streams end before that instruction.

        It has no outputs. `refused` is called after it.
        """


@dataclass(frozen=True)
class LaunchRequest:
    """Kernel with its arguments and options: enough to repeat it, unless further processes take part.

    Attributes:
        kernel: A plain function of the NKI language.
        arguments: (args, kwargs) of each rank of this process.
        chip: The record of the chip.
        logical_core_size: Physical cores of a rank (LNC).
        mode: eager or dry.
        has_grid: Whether the kernel was called with a grid.
        peers: The processes of the other ranks, None if all ranks are in this process.
        seed: Seed of a random core schedule, None for the usual schedule.
        observers: Objects that are told of the launch.
        level: The release of NKI that the kernel is written for.
        rules: The rules that decide which broken rules end the launch.
        config: The kernel's compile configuration, and whether nested kernels may have another.
        trips: In mode dry, the trip counts of device loops over registers, in the order they are reached first; the
            last
            count applies to all further loops.
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


def unwrap_kernel(kernel: Any) -> Callable[..., Any]:
    """Return the function under `nki.jit`; any other callable unchanged."""
    jitted = hasattr(kernel, "func") and not isinstance(kernel, partial)
    return kernel.func if jitted else kernel  # type: ignore[no-any-return]


def _place_stream(stream: Stream, chip: Hardware) -> dict[MemoryRegion, Placement]:
    """Return the placement of a stream's tiles in SBUF and in PSUM, by first and last use."""
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
        MemoryRegion.sbuf: place_tiles(tiles[MemoryRegion.sbuf]),
        MemoryRegion.psum: place_tiles(tiles[MemoryRegion.psum], chip.psum_bank_bytes),
    }
