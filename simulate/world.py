"""Launching a kernel on the ranks of a world: all in this process, or each in one of its own."""

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
    """Run `kernel`, a plain function of the NKI language, once per rank with that rank's (args, kwargs).

    `logical_core_size` is the number of physical cores of each rank (LNC). With `peers`, this process has one rank;
    `peers` are the processes of the other ranks, which launch the same kernel. Values exist when the call returns;
    arrays that a kernel writes to are updated in place. `replay` has the options of mode replay (default: those of the
    environment), `replays` the cache of its programs (default: that of the process). `level` and `rules` decide what is
    accepted (default: NKI_LEVEL and NKI_RULES, else the newest level and the rules of the chip). `config` is that of a
    jitted kernel: what nested kernels are held against, and whether they may differ. `trips` are the trip counts of
    device loops over registers in mode dry: one per loop in the order they are reached first, the last for all others.
    Without trip counts, a dry launch follows registers whose values it knows: constants, and integers in arguments that
    are given as arrays.

    Raises what the kernel raises, RuleViolation for a broken rule (also where live tiles exceed SBUF or PSUM),
    Deadlock, RendezvousMismatch, and ReplayMismatch where replays are verified.
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
        trips=_checked_trips(trips),
    )
    with peers.launch() if peers is not None else nullcontext():
        observed = any(observer.sees_instructions or observer.keeps_calls for observer in request.observers)
        if mode is Mode.replay and not observed:
            return _replayed(request, replay, replays)
        try:
            return execute_launch(request)
        except NkwError as error:
            # The line that launches is at fault for a bad argument, not one of the kernel.
            if isinstance(error, InvalidArgument):
                error.where = error.where or running_location()
            for observer in request.observers:
                observer.refused(error)
            raise


def _replayed(request: LaunchRequest, options: ReplayOptions | None, replays: ReplayCache | None) -> Launch:
    from simulate.replay import ReplayOptions, replay_or_record  # most processes replay nothing

    return replay_or_record(
        request, options or ReplayOptions.from_environment(), replays or process_replays()
    )


def _checked_trips(trips: int | Sequence[int]) -> tuple[int, ...]:
    counts = tuple(trips) if isinstance(trips, Sequence) else (trips,)
    if any(type(count) is not int or count < 0 for count in counts):
        raise InvalidArgument("NKW-TRIPS", f"trips={counts}; a trip count is a Python int of 0 or more")
    return counts


def expect_kernel(who: str, kernel: Any) -> None:
    """Raise InvalidArgument where `who` was given something else than a kernel, such as the streams of a launch."""
    if not callable(kernel):
        raise InvalidArgument(
            "NKW-KERNEL",
            f"{who} got {type(kernel).__name__} as its first argument; it takes a kernel, then the kernel's arguments",
        )


def process_replays() -> ReplayCache:
    """Return the replay cache of launches outside a World, such as plain calls of kernels."""
    from simulate.replay import ReplayCache

    if not _replays:
        _replays.append(ReplayCache())
    return _replays[-1]


@contextmanager
def replaying(replays: ReplayCache) -> Iterator[None]:
    """Let launches outside a World use `replays` inside a `with` block."""
    process_replays()
    _replays.append(replays)
    try:
        yield
    finally:
        _replays.remove(replays)


class World:
    """Ranks that run the same kernels together, each with its own arguments, and the programs of their replays."""

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
        """Create a world of `ranks` ranks of the chip `target`.

        `replay` has the options of mode replay; the default is those of the environment. `replays` is a cache that
        several worlds share; by default a world has its own. `level` and `rules` are those of its launches, as for
        `launch`.

        Raises:
            InvalidArgument: The chip is unknown, or a number is out of range.
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
        """The cache of this world's launches in mode replay, with its report."""
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
        to make or `skip` the same launches in the same order. Raises InvalidArgument outside of torchrun, Unsupported
        without torch.
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
        """The first rank of this process: 0 unless every rank has a process of its own."""
        return 0 if self._peers is None else self._peers.rank

    @property
    def size(self) -> int:
        """The number of ranks in all processes."""
        return self.ranks if self._peers is None else self._peers.ranks

    def skip(self) -> None:
        """Take no part in a launch of other processes' ranks; launches are counted alike in all of them."""
        if self._peers is not None:
            with self._peers.launch():
                pass

    def gather(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return the arrays of all ranks, in order; `arrays` has one for each rank of this process."""
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
        """Launch a kernel (jitted or plain) on every rank; `arguments` has one (args, kwargs) per rank.

        `trips` are the trip counts of device loops in mode dry, as for `launch`.
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
