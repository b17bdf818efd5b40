"""Cache of programs by cache key, and a report on the launches in replay mode.

The instructions of an NKI kernel do not depend on data. So the checks of an eager launch hold for every launch with
the same key and unchanged guards, which record what the kernel reads besides its arguments. The cache keeps the
streams of the eager launch. Its instructions run again on new arrays, rewritten into few numpy calls
(`simulate.replay.fusion`) or one by one. A replay plans nothing, tracks no validity and records no stream; it shares
the streams of the eager launch.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from simulate.replay.guards import Guards
from simulate.replay.program import Program, ProgramMemory
from simulate.run.launch import Launch
from simulate.run.processes import Processes


@dataclass
class ReplayReport:
    """Counts of launches in replay mode and of programs, and seconds by phase.

    hits: launches replayed. recorded: eager launches kept. dropped: entries removed from the cache. verified: replays
    that were compared with an eager launch. refusals: launches that could not be replayed, by reason. rewritten:
    programs rewritten; of these, `instructions` were turned into `calls` of numpy, `matmuls_fused` are matmuls that
    became part of another, and `unlowered` are instructions executed as recorded. not_rewritten: other programs, by
    reason. seconds: time by phase. `eager` is eager launches, also those that verify a replay, `replay` is replays,
    and `rewriting` happens once per program.
    """

    hits: int = 0
    recorded: int = 0
    dropped: int = 0
    verified: int = 0
    refusals: Counter[str] = field(default_factory=Counter)
    rewritten: int = 0
    instructions: int = 0
    calls: int = 0
    matmuls_fused: int = 0
    unlowered: int = 0
    not_rewritten: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def add_rewriting(self, program: Program) -> None:
        """Add the counts of a program after `Program.rewrite`, or the reason why the program was not rewritten."""
        if program.fused is None:
            self.not_rewritten[program.why_not_fused or ""] += 1
            return
        self.rewritten += 1
        for rank in program.fused.reports:
            self.instructions += rank.instructions
            self.calls += rank.calls
            self.matmuls_fused += rank.matmuls_fused
            self.unlowered += rank.unlowered

    @contextmanager
    def time_phase(self, phase: str) -> Iterator[None]:
        """Add the wall-clock seconds of a `with` block to `seconds[phase]`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] += time.perf_counter() - start

    def text(self) -> str:
        """Return the report as lines of text for a command line."""
        lines = [
            f"replay: {self.hits} launches replayed, {self.recorded} recorded, {sum(self.refusals.values())} refused, "
            f"{self.dropped} dropped, {self.verified} verified"
        ]
        if self.rewritten:
            lines.append(
                f"  {self.rewritten} programs rewritten: {self.instructions} instructions into {self.calls} calls, "
                f"{self.matmuls_fused} matmuls fused into others, {self.unlowered} executed as recorded"
            )
        lines += [f"  not rewritten: {reason} ({count})" for reason, count in self.not_rewritten.items()]
        lines += [f"  refused: {reason} ({count})" for reason, count in self.refusals.items()]
        if self.seconds:
            spent = ", ".join(f"{phase} {seconds:.3f} s" for phase, seconds in self.seconds.items())
            lines.append(f"  time: {spent}")
        return "\n".join(lines)


@dataclass
class _Entry:
    """Entry of the cache: an eager launch with the guards of its replays; `program` is None until the first replay."""

    guards: Guards
    launch: Launch
    narrow_matmuls: bool
    program: Program | None = None


class ReplayCache:
    """Cache of at most `capacity` programs by key; the least recently used one is dropped first.

    Programs share memory, so one program runs at a time: call `find` and `run` inside one `session`. `report` counts
    launches and programs.
    """

    def __init__(self, capacity: int = 256) -> None:
        self.capacity = capacity
        self.report = ReplayReport()
        self._memory = ProgramMemory()
        self._lock = threading.RLock()
        self._sessions = 0
        self._checked: set[Guards] = set()
        self._release_is_due = False
        self._entries: OrderedDict[Any, _Entry] = OrderedDict()

    @property
    def programs(self) -> list[Program]:
        """Programs in the cache that were replayed at least once."""
        return [entry.program for entry in self._entries.values() if entry.program is not None]

    @contextmanager
    def session(self) -> Iterator[None]:
        """Hold the cache's lock during a `with` block that finds programs and runs them.

        Sessions nest. An entry's guards are checked once until the outermost session ends or `forget_checks` is
        called, because replays change nothing that a kernel depends on.
        """
        with self._lock:
            self._sessions += 1
            try:
                yield
            finally:
                self._sessions -= 1
                if not self._sessions:
                    self._checked.clear()
                    if self._release_is_due:
                        self.release()

    def forget_checks(self) -> None:
        """Let `find` check all guards again in this session; call it after code other than replays has run."""
        self._checked.clear()

    def release(self) -> None:
        """Drop the arrays of arguments and results that each program keeps from its last replay.

        A call during a session, from a finalizer for instance, takes effect when the outermost session ends.
        """
        self._release_is_due = True
        if not self._sessions and self._lock.acquire(blocking=False):
            try:
                self._release_is_due = False
                for program in self.programs:
                    program.release()
            finally:
                self._lock.release()

    def find(self, key: Any) -> tuple[Launch, Program] | None:
        """Return the eager launch kept under a key and its program; None without an entry whose guards hold.

        An entry is dropped if its guards do not hold, or if its program was interrupted, since its memory may be half
        bound. Call it inside a `session`.
        """
        entry = self._entries.get(key)
        if entry is None:
            return None
        unchanged = entry.guards in self._checked or entry.guards.unchanged()
        if not unchanged or (entry.program is not None and entry.program.was_interrupted):
            del self._entries[key]
            self.report.dropped += 1
            return None
        self._checked.add(entry.guards)
        self._entries.move_to_end(key)
        if entry.program is None:
            entry.program = Program(entry.launch, entry.narrow_matmuls, self._memory)
        return entry.launch, entry.program

    def keep(self, key: Any, guards: Guards, launch: Launch, narrow_matmuls: bool = False) -> None:
        """Keep an eager launch, so that requests with its key replay it; may drop the least recently used entry.

        Args:
            key: The `key` of the request's ReplayKey.
            guards: The guards of the kernel, recorded before the launch.
            launch: The eager launch.
            narrow_matmuls: Whether its program multiplies bfloat16 matrices without widening them.
        """
        with self._lock:
            self._entries[key] = _Entry(guards, launch, narrow_matmuls)
            self.report.recorded += 1
            while len(self._entries) > self.capacity:
                self._entries.popitem(last=False)
                self.report.dropped += 1

    def run(
        self,
        program: Program,
        arrays: Sequence[Sequence[np.ndarray]],
        exact: bool,
        peers: Processes | None = None,
    ) -> list[Any]:
        """Replay a program on new arrays and return each rank's output; arrays that the kernel writes are updated.

        Args:
            program: A program that `find` returned in this session.
            arrays: The array arguments of each rank, in the order of recording.
            exact: Whether to run the plans as recorded; otherwise the first replay rewrites the program.
            peers: The processes of the other ranks, or None if this process has all ranks.

        Raises:
            InvalidArgument: The arrays do not have the recorded shapes, dtypes and layouts.
            NkwError: A run-time index is out of bounds.
        """
        self.report.hits += 1
        if not exact and not program.was_rewritten:
            with self.report.time_phase("rewriting"):
                program.rewrite()
            self.report.add_rewriting(program)
        with self.report.time_phase("replay"):
            return program.run(arrays, exact, peers)

    def clear(self) -> None:
        """Drop every entry; the report stays."""
        self._entries.clear()
