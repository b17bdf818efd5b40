"""Launches of kernels on the ranks of a world: all ranks in this process, or each in a process of its own.

A rank is one logical core with its own arguments; it has one or two physical cores. Mode replay runs the recorded
program of an earlier launch on new arrays (`simulate.replay`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np

from nkw.errors import InvalidArgument, NkwError
from simulate.hardware import Hardware
from simulate.level import Level, Rules
from simulate.run.environment import check_logical_core, started_by_torchrun, target_hardware
from simulate.run.launch import ArgumentsOfRanks, Launch, LaunchRequest, unwrap_kernel
from simulate.run.launcher import execute_launch
from simulate.run.location import running_location
from simulate.run.machine import Mode
from simulate.run.observers import observers
from simulate.run.processes import Processes
from simulate.run.scheduler import check_world

if TYPE_CHECKING:
    from simulate.replay import ReplayCache, ReplayOptions

_replays: list[ReplayCache] = []
"""The caches of launches outside a World: the cache of the process, made on first use, then those of `replaying`."""


def launch(
    kernel: Callable[..., Any],
    arguments: ArgumentsOfRanks,
    chip: Hardware | None = None,
    logical_core_size: int = 1,
    mode: Mode = Mode.eager,
    has_grid: bool = False,
    peers: Processes | None = None,
    replay: ReplayOptions | None = None,
    replays: ReplayCache | None = None,
    level: Level | str | None = None,
    rules: Rules | str | None = None,
    config: tuple[object, bool] = (None, False),
    trips: int | Sequence[int] = (),
) -> Launch:
    """Run a kernel once per rank, each with its own arguments, and return the record of the launch.

    Values exist when the call returns; arrays that the kernel writes to are updated in place.

    Args:
        kernel: A plain function of the NKI language.
        arguments: (args, kwargs) of each rank of this process.
        chip: The record of the chip; None is the environment's.
        logical_core_size: Physical cores of each rank (LNC), 1 or 2.
        mode: How the kernel is executed. Mode replay is eager if an observer watches instructions.
        has_grid: Whether the kernel was called with a grid.
        peers: The processes of the other ranks, which launch the same kernel; this process then has one rank. None if
            all ranks are in this process.
        replay: Options of mode replay; None is the environment's.
        replays: The cache of programs for mode replay; None is the process's.
        level: The release of NKI; None is that of NKI_LEVEL, else the newest.
        rules: The rules that refuse a launch; None is those of NKI_RULES, else the chip's.
        config: The compile configuration, and whether nested kernels may have another one.
        trips: Trip counts of device loops over registers in mode dry, in the order in which loops are reached first;
            the last count is for all further loops. Without counts, a dry launch follows registers with known values:
            constants, and integers in array arguments.

    Raises:
        RuleViolation: A rule is broken, or live tiles exceed SBUF or PSUM.
        Deadlock: Cores wait for each other.
        RendezvousMismatch: The members of a rendezvous disagree.
        ReplayMismatch: A verified replay differs from the eager launch.
        InvalidArgument: An argument, the number of ranks or an option is out of range.
        Exception: Any error of the kernel.
    """
    check_world(len(arguments))
    chip = chip or target_hardware()
    ranks = len(arguments) if peers is None else peers.ranks
    request = LaunchRequest(
        kernel,
        arguments,
        chip.working(ranks * logical_core_size),
        logical_core_size,
        Mode.dry if mode is Mode.dry else Mode.eager,
        has_grid,
        peers,
        observers=observers(),
        level=Level.resolve(level),
        rules=Rules.resolve(rules),
        config=config,
        trips=_check_trips(trips),
    )
    with peers.launch() if peers is not None else nullcontext():
        observed = any(observer.sees_instructions or observer.keeps_calls for observer in request.observers)
        if mode is Mode.replay and not observed:
            return _replay_or_record(request, replay, replays)
        try:
            return execute_launch(request)
        except NkwError as error:
            # The line that launches is at fault for a bad argument, not one of the kernel.
            if isinstance(error, InvalidArgument):
                error.where = error.where or running_location()
            for observer in request.observers:
                observer.refused(error)
            raise


def _replay_or_record(
    request: LaunchRequest, options: ReplayOptions | None, replays: ReplayCache | None
) -> Launch:
    """Run a request in mode replay; None is the environment's options, and the process's cache."""
    from simulate.replay import ReplayOptions, replay_or_record  # most processes replay nothing

    return replay_or_record(
        request, options or ReplayOptions.from_environment(), replays or process_replays()
    )


def _check_trips(trips: int | Sequence[int]) -> tuple[int, ...]:
    """Return one or several trip counts as a tuple. Raises InvalidArgument unless all are ints of 0 or more."""
    counts = tuple(trips) if isinstance(trips, Sequence) else (trips,)
    if any(type(count) is not int or count < 0 for count in counts):
        raise InvalidArgument("NKW-TRIPS", f"trips={counts}; a trip count is a Python int of 0 or more")
    return counts


def expect_kernel(who: str, kernel: Any) -> None:
    """Raise InvalidArgument if `kernel` is not callable, such as the streams of a launch.

    Args:
        who: The name of the function that got it, for the message.
        kernel: Its first argument.
    """
    if not callable(kernel):
        raise InvalidArgument(
            "NKW-KERNEL",
            f"{who} got {type(kernel).__name__} as its first argument; it takes a kernel, then the kernel's arguments",
        )


def process_replays() -> ReplayCache:
    """Return the replay cache that launches outside of any World use now, such as plain calls of kernels.

    It is the one of the innermost `replaying` block, else that of the process, which is created on first use.
    """
    from simulate.replay import ReplayCache

    if not _replays:
        _replays.append(ReplayCache())
    return _replays[-1]


@contextmanager
def replaying(replays: ReplayCache) -> Iterator[None]:
    """Let launches in mode replay outside of any World use the cache `replays` inside a `with` block."""
    process_replays()
    _replays.append(replays)
    try:
        yield
    finally:
        _replays.remove(replays)


class World:
    """Ranks of one chip that run the same kernels together, each rank with its own arguments.

    A world has its own cache of programs for mode replay.
    """

    def __init__(
        self,
        target: str | None = None,
        ranks: int = 1,
        logical_core_size: int = 1,
        replay: ReplayOptions | None = None,
        replays: ReplayCache | None = None,
        level: Level | str | None = None,
        rules: Rules | str | None = None,
    ) -> None:
        """Create a world whose ranks are all in this process.

        Args:
            target: The chip, such as "trn2"; None is the environment's.
            ranks: The number of ranks.
            logical_core_size: Physical cores of each rank, 1 or 2.
            replay: Options of mode replay; None is the environment's.
            replays: A cache of programs that several worlds share; None is a new one.
            level: The release of NKI for its launches; None is the environment's at each launch.
            rules: The rules of its launches; None is the environment's at each launch.

        Raises:
            InvalidArgument: Chip, level or rules are unknown, or a number is out of range.
        """
        check_world(ranks)
        self.hardware = target_hardware(target, logical_core_size)
        check_logical_core(self.hardware, logical_core_size)
        self.ranks = ranks
        self.logical_core_size = logical_core_size
        self.replay = replay
        self.level = None if level is None else Level.resolve(level)
        self.rules = None if rules is None else Rules.resolve(rules)
        self._peers: Processes | None = None
        self._replays = replays

    @property
    def replays(self) -> ReplayCache:
        """Cache of this world's programs for mode replay, with its report; created on first use."""
        if self._replays is None:
            from simulate.replay import ReplayCache

            self._replays = ReplayCache()
        return self._replays

    @classmethod
    def from_torchrun(
        cls, target: str | None = None, logical_core_size: int = 1, replay: ReplayOptions | None = None
    ) -> World:
        """Return the world whose ranks are the processes that torchrun started; this process has one of them.

        `launch` then takes the arguments of this process's rank only, and returns its outputs only. Every process has
        to make or `skip` the same launches in the same order.

        Raises:
            InvalidArgument: The process was not started by torchrun, or the chip is unknown.
            Unsupported: torch is not installed.
        """
        world = cls(target, 1, logical_core_size, replay)
        world._peers = Processes.join()
        return world

    @staticmethod
    def has_processes() -> bool:
        """Return whether torchrun started this process as one of several."""
        return started_by_torchrun()

    @property
    def rank(self) -> int:
        """First rank of this process: 0 unless every rank has a process of its own."""
        return 0 if self._peers is None else self._peers.rank

    @property
    def size(self) -> int:
        """Number of ranks in all processes."""
        return self.ranks if self._peers is None else self._peers.ranks

    def skip(self) -> None:
        """Take no part in the next launch, which other processes make, but count it, so that launches stay paired.

        Does nothing if all ranks are in this process.
        """
        if self._peers is not None:
            with self._peers.launch():
                pass

    def gather(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return the arrays of all ranks, in order of rank; with several processes, they are exchanged between them.

        Args:
            arrays: One array for each rank of this process.

        Raises:
            InvalidArgument: The number of arrays is not the number of ranks.
        """
        if len(arrays) != self.ranks:
            raise InvalidArgument(
                "NKW-WORLD",
                f"gather got {len(arrays)} arrays for {self.ranks} ranks; give one array per rank",
            )
        return list(arrays) if self._peers is None else self._peers.gather(arrays[0])

    def launch(
        self,
        kernel: Any,
        arguments: ArgumentsOfRanks,
        mode: Mode = Mode.eager,
        trips: int | Sequence[int] = (),
    ) -> Launch:
        """Launch a kernel, jitted or plain, on every rank of this world and return the record of the launch.

        Args:
            kernel: The kernel.
            arguments: One (args, kwargs) for each rank of this process; arrays are updated in place.
            mode: How the kernel is executed.
            trips: Trip counts of device loops in mode dry, see `simulate.launch`.

        Raises:
            InvalidArgument: The number of arguments is not the number of ranks.
            NkwError: As for `simulate.launch`.
        """
        if len(arguments) != self.ranks:
            raise InvalidArgument(
                "NKW-WORLD",
                f"launch got arguments for {len(arguments)} ranks in a world of {self.ranks}; give one (args, kwargs) "
                "per rank",
            )
        return launch(
            unwrap_kernel(kernel),
            arguments,
            self.hardware,
            self.logical_core_size,
            mode,
            peers=self._peers,
            replay=self.replay,
            replays=self.replays if mode is Mode.replay else None,
            level=self.level,
            rules=self.rules,
            config=getattr(kernel, "config", (None, False)),
            trips=trips,
        )
