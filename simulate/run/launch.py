"""One launch of a kernel on all its ranks, eager or dry, and what it leaves behind."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from simulate.errors import NkwError, RuleViolation
from simulate.hardware import Hardware
from simulate.isa.book import CallError
from simulate.memory import MemoryRegion
from simulate.memory.placement import Placement, Tile, live_tiles_fit, place, to_blame
from simulate.run.arguments import Arguments
from simulate.run.call_stacks import Calls, TracedTable
from simulate.run.location import raised_at
from simulate.run.machine import (
    Mode,
    NeuronCore,
    Rank,
    Recorder,
    capacity_bytes,
    enter,
)
from simulate.run.processes import Processes
from simulate.run.scheduler import CoreScheduler
from simulate.run.stream import Stream, TensorTable
from simulate.run.target import PRECISE_VARIABLE, check_logical_core


@dataclass(frozen=True, eq=False)
class _Observer:
    """Who collects launches, and what else it asks for; see `recorded`."""

    launches: list[Launch]
    calls: bool
    refused: bool
    outputs: bool

    def see(self, done: Launch) -> None:
        """Keep a launch."""
        self.launches.append(done if self.outputs else replace(done, outputs=[]))


_observers: list[_Observer] = []


@dataclass(frozen=True)
class Launch:
    """One launch: what it returned, the stream of every core, and its warnings.

    `outputs` has one entry per rank; `streams` one per core, rank by rank.
    """

    kernel: str
    hardware: Hardware
    mode: Mode
    outputs: list[Any]
    streams: tuple[Stream, ...]
    warnings: tuple[str, ...]

    def repeated(self, outputs: list[Any]) -> Launch:
        """The launch that a replay stands for: this one with other outputs."""
        again = object.__new__(Launch)  # dataclasses.replace takes longer than many a replayed kernel
        again.__dict__.update(self.__dict__, mode=Mode.replay, outputs=outputs)
        return again

    @cached_property
    def placements(self) -> tuple[dict[MemoryRegion, Placement], ...]:
        """SBUF and PSUM placement of every stream."""
        return tuple(_placements(stream, self.hardware) for stream in self.streams)

    def high_water_bytes(self, buffer: MemoryRegion) -> int:
        """The highest byte per partition in use on any core."""
        return max(placements[buffer].high_water_bytes for placements in self.placements)


@dataclass(frozen=True)
class LaunchRequest:
    """What is launched: enough to launch it again, unless other processes take part.

    `arguments` has one (args, kwargs) per rank of this process.
    """

    kernel: Callable[..., Any]
    arguments: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]
    chip: Hardware
    logical_core_size: int
    has_grid: bool
    alone: bool  # no other process takes part

    def again(self, seed: int | None = None) -> Launch:
        """Launch it eagerly once more; its cores are scheduled at random from `seed`. `recorded` does not see it."""
        return run_once(
            self.kernel,
            self.arguments,
            self.chip,
            self.logical_core_size,
            Mode.eager,
            self.has_grid,
            seed=seed,
            observed=False,
        )[0]


def run_once(
    kernel: Callable[..., Any],
    arguments: Sequence[tuple[tuple[Any, ...], dict[str, Any]]],
    chip: Hardware,
    logical_core_size: int,
    mode: Mode,
    has_grid: bool = False,
    recorders: Sequence[Recorder | None] = (),
    elsewhere: Processes | None = None,
    seed: int | None = None,
    observed: bool = True,
) -> tuple[Launch, list[Arguments], list[Any]]:
    """Run the kernel's Python; returns the launch, the arguments it took, and what each rank returned."""
    check_logical_core(chip, logical_core_size)
    precise = os.environ.get(PRECISE_VARIABLE, "1") != "0"
    scheduler = CoreScheduler(len(arguments) * logical_core_size, elsewhere, seed)
    first = 0 if elsewhere is None else elsewhere.rank
    observers = list(_observers) if observed else []
    traced = observed and calls_are_collected()
    ranks = [
        Rank(first + index, chip, logical_core_size, TracedTable(Calls()) if traced else TensorTable())
        for index in range(len(arguments))
    ]
    cores: list[NeuronCore] = []
    for rank in ranks:
        for number in range(logical_core_size):
            core = NeuronCore(rank, number, len(cores), scheduler, mode, precise)
            core.has_grid = has_grid
            core.recorder = recorders[rank.number - first] if recorders else None
            cores.append(core)
    held: list[Arguments] = []
    given: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    names = _parameter_names(kernel)
    for rank, (args, kwargs) in zip(ranks, arguments):
        taker = Arguments(rank, cores[0].stored, mode is Mode.dry)
        taken = tuple(taker.take(a, names[i] if i < len(names) else f"arg{i}") for i, a in enumerate(args))
        given.append((taken, {key: taker.take(a, key) for key, a in kwargs.items()}))
        held.append(taker)
    returned: list[Any] = [None] * len(ranks)

    def body(core: NeuronCore) -> None:
        args, kwargs = given[core.rank.number - first]
        before = enter(core)
        try:
            with np.errstate(all="ignore"):
                result = kernel(*args, **kwargs)
        except NkwError as error:
            error.where = error.where or raised_at(error)
            raise
        except TypeError as error:
            if error.__traceback__ is not None and error.__traceback__.tb_next is None:
                raise CallError("NKW-KERNEL-CALL", str(error)) from None  # the kernel was not entered
            raise
        finally:
            enter(before)
        if core.number == 0:
            returned[core.rank.number - first] = result

    if cores[0].observer is not None:
        call = LaunchRequest(kernel, arguments, chip, logical_core_size, has_grid, elsewhere is None)
        cores[0].observer.began(call, cores, [taker.storages() for taker in held])
    scheduler.run([lambda core=core: body(core) for core in cores])  # type: ignore[misc]
    outputs = [taker.give(value) for taker, value in zip(held, returned)]
    for taker in held:
        taker.finish()
    done = Launch(
        getattr(kernel, "__name__", "kernel"),
        chip,
        mode,
        outputs,
        tuple(core.stream for core in cores),
        tuple(warning for rank in ranks for warning in rank.warnings),
    )
    for observer in observers:
        if observer.refused:
            observer.see(done)
    checks_capacity = observed or mode is not Mode.dry  # planned again, it was checked before
    for stream, placements in zip(done.streams, done.placements if checks_capacity else ()):
        for buffer, placement in placements.items():
            try:
                limit = capacity_bytes(chip, buffer)
                live_tiles_fit(placement, buffer, limit, chip.name, stream.label, stream.elements)
            except RuleViolation as error:
                error.where = stream.tensors[to_blame(placement).serial].where
                raise
    if cores[0].observer is not None:
        cores[0].observer.ended(done, returned)
    for observer in observers:
        if not observer.refused:
            observer.see(done)
    return done, held, returned


def plain(kernel: Any) -> Callable[..., Any]:
    """What `nki.jit` was given; a kernel that is not jitted as it is."""
    jitted = hasattr(kernel, "func") and not isinstance(kernel, partial)
    return kernel.func if jitted else kernel  # type: ignore[no-any-return]


def calls_are_collected() -> bool:
    """Whether someone who collects launches asks for the callers of every instruction; a replay has none."""
    return any(observer.calls for observer in _observers)


def announce(done: Launch) -> None:
    """Show a launch to everyone who collects them."""
    for observer in _observers:
        observer.see(done)


@contextmanager
def recorded(calls: bool = False, refused: bool = False, outputs: bool = True) -> Iterator[list[Launch]]:
    """Collect the launches made inside a `with` block, for instance to time a kernel that was called plainly.

    calls: keep the lines of the callers as well, of every instruction and allocation, which costs some time
    (`Stream.chains`); such launches are never replayed. refused: collect also the launches that ran to their end and
    are then refused because their tiles do not fit into SBUF or PSUM. outputs: keep what the launches returned, which
    is most of what a long run keeps.
    """
    observer = _Observer([], calls, refused, outputs)
    _observers.append(observer)
    try:
        yield observer.launches
    finally:
        _observers.remove(observer)


def _parameter_names(kernel: Callable[..., Any]) -> tuple[str, ...]:
    code = getattr(kernel, "__code__", None)
    return code.co_varnames[: code.co_argcount] if code is not None else ()


def _placements(stream: Stream, chip: Hardware) -> dict[MemoryRegion, Placement]:
    tiles: dict[MemoryRegion, list[Tile]] = {MemoryRegion.sbuf: [], MemoryRegion.psum: []}
    for serial, first in stream.first_use.items():
        record = stream.tensors[serial]
        if record.buffer.on_chip:
            address = record.address[1] if record.address is not None else None
            tiles[record.buffer].append(
                Tile(
                    serial,
                    record.row_bytes,
                    first,
                    stream.last_use[serial],
                    address,
                    stream.source_of(serial),
                )
            )
    return {
        MemoryRegion.sbuf: place(tiles[MemoryRegion.sbuf]),
        MemoryRegion.psum: place(tiles[MemoryRegion.psum], chip.psum_bank_bytes),
    }
