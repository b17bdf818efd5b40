"""Launching a kernel on the ranks of a world, and what a launch leaves behind."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from simulate.errors import InvalidArgument, NkwError, RuleViolation
from simulate.hardware import DEFAULT_TARGET, Hardware, hardware
from simulate.isa.book import CallError
from simulate.memory import MemoryRegion
from simulate.memory.objects import LOOKS
from simulate.memory.placement import Placement, Tile, live_tiles_fit, place, to_blame
from simulate.run.arguments import Arguments
from simulate.run.calls import Calls, TracedTable
from simulate.run.location import here, raised_at
from simulate.run.machine import (
    Mode,
    NeuronCore,
    Rank,
    Recorder,
    SparingRecorder,
    capacity_bytes,
    enter,
)
from simulate.run.options import ReplayOptions
from simulate.run.processes import Processes, started_by_torchrun
from simulate.run.program import Program
from simulate.run.replay import REPLAYS
from simulate.run.stream import Stream, TensorTable
from simulate.run.turns import Turns, check_world
from simulate.run.verify import (
    Outcome,
    compare_exactly,
    compare_within_bound,
    copied,
    disturbance,
    in_place_of,
)
from simulate.run.witness import present

TARGET_VARIABLE = "NEURON_PLATFORM_TARGET_OVERRIDE"
PRECISE_VARIABLE = "NKI_PRECISE_FP"
_LARGE_BYTES = 32 * 2**20
"""Arguments above this are recorded sparingly: planning a launch twice then costs little beside computing it."""


@dataclass(frozen=True, eq=False)
class _Observer:
    """Who collects launches, and what else it asks for; see `recorded`."""

    launches: list[Launch]
    calls: bool
    refused: bool


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

    @cached_property
    def placements(self) -> tuple[dict[MemoryRegion, Placement], ...]:
        """SBUF and PSUM placement of every stream."""
        return tuple(_placements(stream, self.hardware) for stream in self.streams)

    def high_water_bytes(self, buffer: MemoryRegion) -> int:
        """The highest byte per partition in use on any core."""
        return max(placements[buffer].high_water_bytes for placements in self.placements)


@dataclass(frozen=True)
class Call:
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
        """Launch it eagerly once more; the turns of its cores are drawn from `seed`. `recorded` does not see it."""
        return _launch(
            self.kernel,
            self.arguments,
            self.chip,
            self.logical_core_size,
            Mode.eager,
            self.has_grid,
            seed=seed,
            observed=False,
        )[0]


def target_hardware(target: str | None = None) -> Hardware:
    """The chip to simulate: `target`, else NEURON_PLATFORM_TARGET_OVERRIDE, else trn2."""
    return hardware(target or os.environ.get(TARGET_VARIABLE) or DEFAULT_TARGET)


def launch(
    kernel: Callable[..., Any],
    arguments: Sequence[tuple[tuple[Any, ...], dict[str, Any]]],
    chip: Hardware | None = None,
    logical_core_size: int = 1,
    mode: Mode = Mode.eager,
    has_grid: bool = False,
    elsewhere: Processes | None = None,
    replay: ReplayOptions | None = None,
) -> Launch:
    """Run `kernel`, a plain function of the NKI language, once per rank with that rank's (args, kwargs).

    `logical_core_size` is the number of physical cores of each rank (LNC). With `elsewhere`, this process holds one
    rank and meets the others, which launch the same kernel in processes of their own. Values exist when the call
    returns; arrays that a kernel writes to are updated in place. `replay` says how launches are replayed in mode
    replay (default: as the environment says). Raises what the kernel raises, RuleViolation for a broken rule (also
    where live tiles exceed SBUF or PSUM), Deadlock and MeetingMismatch, and ReplayMismatch where replays are verified.
    """
    chip = chip or target_hardware()
    check_world(len(arguments))
    witness = present()
    with elsewhere.launch() if elsewhere is not None else nullcontext():
        if mode is Mode.replay and witness is None:
            options = replay or ReplayOptions.from_environment()
            return _replayed(kernel, arguments, chip, logical_core_size, options, elsewhere)
        mode = Mode.eager if mode is Mode.replay else mode
        try:
            return _launch(kernel, arguments, chip, logical_core_size, mode, has_grid, elsewhere=elsewhere)[0]
        except NkwError as error:
            if isinstance(error, InvalidArgument):  # no kernel line is at fault, but the one that launches
                error.where = error.where or here()
            if witness is not None:
                witness.refused(error)
            raise


def _replayed(
    kernel: Callable[..., Any],
    arguments: Sequence[tuple[tuple[Any, ...], dict[str, Any]]],
    chip: Hardware,
    logical_core_size: int,
    options: ReplayOptions,
    elsewhere: Processes | None = None,
) -> Launch:
    """Replay a launch that was recorded before; else launch eagerly, and keep it if it can be replayed."""
    found = None
    if logical_core_size == 1:
        precise = os.environ.get(PRECISE_VARIABLE, "1") != "0"
        world = (0, len(arguments)) if elsewhere is None else (elsewhere.rank, elsewhere.ranks)
        found = REPLAYS.key(kernel, arguments, (chip, *world, precise, options.speed))
    else:
        REPLAYS.report.refuse("a logical core of several physical cores")
    if found is None:
        with REPLAYS.report.timed("eager"):
            return _launch(kernel, arguments, chip, logical_core_size, Mode.eager, elsewhere=elsewhere)[0]
    key, arrays = found
    known = REPLAYS.find(key)
    if known is None:
        with REPLAYS.report.timed("eager"):
            return _recorded(kernel, arguments, chip, key, options, elsewhere)
    launched, program = known
    if not isinstance(program, Program):
        planned = _planned_again(kernel, arguments, launched, program, options)
        if planned is None:
            REPLAYS.forget(key, "the kernel's instructions differ from launch to launch")
            with REPLAYS.report.timed("eager"):
                return _launch(kernel, arguments, chip, logical_core_size, Mode.eager)[0]
        program = planned
        REPLAYS.complete(key, program)
    if options.verify:
        outputs = _verified(kernel, arguments, arrays, launched, program, options, elsewhere)
    else:
        outputs = REPLAYS.run(program, arrays, options.exact, elsewhere)
    done = replace(launched, mode=Mode.replay, outputs=outputs)
    for observer in _observers:
        observer.launches.append(done)
    return done


def _recorded(
    kernel: Callable[..., Any],
    arguments: Sequence[tuple[tuple[Any, ...], dict[str, Any]]],
    chip: Hardware,
    key: Any,
    options: ReplayOptions,
    elsewhere: Processes | None,
) -> Launch:
    """Launch eagerly, and keep the program if nothing in it may depend on data.

    The plans of a launch with large arguments are not kept, because they would hold the bytes of all its tiles at
    once; they are made again, without bytes, when the launch is replayed for the first time.
    """
    looked_before = LOOKS.count
    large = elsewhere is None and _argument_bytes(arguments) > _LARGE_BYTES
    recorders = [SparingRecorder() if large else Recorder() for _ in arguments]
    done, held, returned = _launch(
        kernel, arguments, chip, 1, Mode.eager, recorders=recorders, elsewhere=elsewhere
    )
    reasons = [recorder.refusal for recorder in recorders if recorder.refusal]
    if LOOKS.count != looked_before:
        reasons.append("the kernel looks at values")
    if done.warnings:
        reasons.append("the launch has warnings")
    if any(taker.converts for taker in held):
        reasons.append("an argument is held in another dtype")
    if reasons:
        REPLAYS.report.refuse(reasons[0])
    elif large:
        REPLAYS.keep(key, kernel, replace(done, outputs=[]), recorders)
    else:
        inputs = [taker.storages() for taker in held]
        program = Program([recorder.plans for recorder in recorders], inputs, returned, options.speed)
        REPLAYS.keep(key, kernel, replace(done, outputs=[]), program)
    return done


def _planned_again(
    kernel: Callable[..., Any],
    arguments: Sequence[tuple[tuple[Any, ...], dict[str, Any]]],
    launched: Launch,
    seen: Sequence[Recorder],
    options: ReplayOptions,
) -> Program | None:
    """The program of a launch of which only what was seen is kept; None if its instructions are others this time."""
    recorders = [Recorder() for _ in arguments]
    with REPLAYS.report.timed("planning again"):
        _, held, returned = _launch(
            kernel, arguments, launched.hardware, 1, Mode.dry, recorders=recorders, observed=False
        )
    plans = [
        before.with_plans(again)
        for before, again in zip(seen, recorders)
        if isinstance(before, SparingRecorder)
    ]
    whole = [rank for rank in plans if rank is not None]
    if len(whole) < len(arguments):
        return None
    return Program(whole, [taker.storages() for taker in held], returned, options.speed)


def _argument_bytes(arguments: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]) -> int:
    """The bytes of the arrays that are arguments themselves."""
    values = (value for args, kwargs in arguments for value in (*args, *kwargs.values()))
    return sum(value.nbytes for value in values if isinstance(value, np.ndarray))


def _verified(
    kernel: Callable[..., Any],
    arguments: Sequence[tuple[tuple[Any, ...], dict[str, Any]]],
    arrays: list[list[np.ndarray]],
    launched: Launch,
    program: Program,
    options: ReplayOptions,
    elsewhere: Processes | None,
) -> list[Any]:
    """Replay, launch eagerly on copies as well, and raise ReplayMismatch where the two differ."""
    before, held = copied(arrays), copied(arrays)
    given = [(in_place_of(arrays, held, args), in_place_of(arrays, held, kw)) for args, kw in arguments]
    eager = _launch(kernel, given, launched.hardware, 1, Mode.eager, elsewhere=elsewhere, observed=False)[0]
    outputs = REPLAYS.run(program, arrays, options.exact, elsewhere)
    wanted, got = Outcome(eager.outputs, held), Outcome(outputs, arrays)
    if options.exact:
        compare_exactly(launched.kernel, got, wanted)
    else:

        def disturbed(seed: int) -> Outcome:
            own = copied(before)
            return Outcome(program.run(own, elsewhere=elsewhere, disturbance=disturbance(seed)), own)

        compare_within_bound(launched.kernel, got, wanted, disturbed, alone=elsewhere is None)
    REPLAYS.report.verified += 1
    return outputs


def _launch(
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
    _check_logical_core(chip, logical_core_size)
    precise = os.environ.get(PRECISE_VARIABLE, "1") != "0"
    turns = Turns(len(arguments) * logical_core_size, elsewhere, seed)
    first = 0 if elsewhere is None else elsewhere.rank
    observers = list(_observers) if observed else []
    traced = any(observer.calls for observer in observers)
    ranks = [
        Rank(first + index, chip, logical_core_size, TracedTable(Calls()) if traced else TensorTable())
        for index in range(len(arguments))
    ]
    cores: list[NeuronCore] = []
    for rank in ranks:
        for number in range(logical_core_size):
            core = NeuronCore(rank, number, len(cores), turns, mode, precise)
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

    if cores[0].witness is not None:
        call = Call(kernel, arguments, chip, logical_core_size, has_grid, elsewhere is None)
        cores[0].witness.began(call, cores, [taker.storages() for taker in held])
    turns.run([lambda core=core: body(core) for core in cores])  # type: ignore[misc]
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
            observer.launches.append(done)
    checks_capacity = observed or mode is not Mode.dry  # planned again, it was checked before
    for stream, placements in zip(done.streams, done.placements if checks_capacity else ()):
        for buffer, placement in placements.items():
            try:
                limit = capacity_bytes(chip, buffer)
                live_tiles_fit(placement, buffer, limit, chip.name, stream.label, stream.elements)
            except RuleViolation as error:
                error.where = stream.tensors[to_blame(placement).serial].where
                raise
    if cores[0].witness is not None:
        cores[0].witness.ended(done, returned)
    for observer in observers:
        if not observer.refused:
            observer.launches.append(done)
    return done, held, returned


@contextmanager
def recorded(calls: bool = False, refused: bool = False) -> Iterator[list[Launch]]:
    """Collect the launches made inside a `with` block, for instance to time a kernel that was called plainly.

    calls: keep the lines of the callers of every instruction and allocation, which costs some time
    (`Stream.chains`). refused: collect also the launches that ran to their end and are then refused because their
    tiles do not fit into SBUF or PSUM.
    """
    observer = _Observer([], calls, refused)
    _observers.append(observer)
    try:
        yield observer.launches
    finally:
        _observers.remove(observer)


class World:
    """Ranks that carry out the same kernels together, each with its own arguments."""

    def __init__(
        self,
        target: str | None = None,
        ranks: int = 1,
        logical_core_size: int = 1,
        replay: ReplayOptions | None = None,
    ) -> None:
        """A world of `ranks` ranks of the chip `target`. Raises InvalidArgument for values it cannot have.

        `replay` says how it replays launches; without it the environment does.
        """
        check_world(ranks)
        self.hardware = target_hardware(target)
        _check_logical_core(self.hardware, logical_core_size)
        self.ranks = ranks
        self.logical_core_size = logical_core_size
        self.replay = replay
        self._elsewhere: Processes | None = None

    @classmethod
    def of_processes(
        cls, target: str | None = None, logical_core_size: int = 1, replay: ReplayOptions | None = None
    ) -> World:
        """The world whose ranks are the processes that torchrun started, this one among them.

        `launch` then takes the arguments of this process's rank alone, and returns its outputs alone. Every process
        has to make the same launches in the same order. Raises InvalidArgument outside of torchrun, Unsupported
        without torch.
        """
        world = cls(target, 1, logical_core_size, replay)
        world._elsewhere = Processes.join()
        return world

    @staticmethod
    def has_processes() -> bool:
        """Whether torchrun started this process as one of several."""
        return started_by_torchrun()

    @property
    def rank(self) -> int:
        """The first rank that this process holds: 0 unless the other ranks are processes of their own."""
        return 0 if self._elsewhere is None else self._elsewhere.rank

    @property
    def size(self) -> int:
        """How many ranks there are in all processes together."""
        return self.ranks if self._elsewhere is None else self._elsewhere.ranks

    def gather(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """An array of every rank, in their order, of those that this process's ranks give."""
        if len(arrays) != self.ranks:
            raise InvalidArgument("NKW-WORLD", f"{len(arrays)} arrays for a world of {self.ranks} ranks")
        return list(arrays) if self._elsewhere is None else self._elsewhere.gather(arrays[0])

    def launch(
        self,
        kernel: Any,
        arguments: Sequence[tuple[tuple[Any, ...], dict[str, Any]]],
        mode: Mode = Mode.eager,
    ) -> Launch:
        """Launch a kernel (jitted or plain) on every rank; `arguments` has one (args, kwargs) per rank."""
        if len(arguments) != self.ranks:
            raise InvalidArgument(
                "NKW-WORLD", f"{len(arguments)} sets of arguments for a world of {self.ranks} ranks"
            )
        function = getattr(kernel, "func", kernel)
        return launch(
            function,
            arguments,
            self.hardware,
            self.logical_core_size,
            mode,
            elsewhere=self._elsewhere,
            replay=self.replay,
        )


def _check_logical_core(chip: Hardware, size: int) -> None:
    if size not in chip.logical_core_sizes:
        raise InvalidArgument(
            "NKW-LNC",
            f"a logical core of {size} physical cores; {chip.name} has "
            + " or ".join(map(str, chip.logical_core_sizes)),
        )


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


__all__ = ["Launch", "NkwError", "World", "launch", "recorded", "target_hardware"]
