"""Replay: a launch that repeats an already checked one runs its recorded plans on new data, without planning.

What an eager launch checked, for a kernel, its surroundings, shapes, dtypes and static arguments, holds for every
launch of the same kind, because an NKI kernel's instructions do not depend on data. So the plans of its
instructions are kept and carried out again, rewritten into fewer numpy calls (`simulate.replay.fusion`), or one by one:
the same numpy calls on the same simulated memory, hence the same bytes. There is no planning, no validity and no
stream; the recorded stream stands for the new launch as well.

A launch is not kept, and says why, if what it does may depend on data: registers that steer a loop, values that the
kernel's Python looked at, bytes whose being written depends on data.
"""

from __future__ import annotations

import threading
import time
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from simulate.replay.guards import Watch
from simulate.replay.key import NotFixed, Signature
from simulate.replay.program import Program
from simulate.run.processes import Processes

Arguments = Sequence[tuple[tuple[Any, ...], dict[str, Any]]]


@dataclass
class ReplayReport:
    """What became of the launches in replay mode, and where their time went, in seconds.

    `eager` seconds are of launches that were checked and recorded, or could not be replayed; `rewriting` is once for
    each program that is replayed.
    """

    hits: int = 0
    recorded: int = 0
    dropped: int = 0
    verified: int = 0
    refusals: dict[str, int] = field(default_factory=dict)
    rewritten: int = 0
    instructions: int = 0
    calls: int = 0
    products_joined: int = 0
    as_recorded: int = 0
    not_rewritten: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def refuse(self, reason: str) -> None:
        """Count a launch that cannot be replayed."""
        self.refusals[reason] = self.refusals.get(reason, 0) + 1

    def add_rewriting(self, program: Program) -> None:
        """Count what became of a program's instructions."""
        if program.fused is None:
            reason = program.not_fused or ""
            self.not_rewritten[reason] = self.not_rewritten.get(reason, 0) + 1
            return
        self.rewritten += 1
        for rank in program.fused.reports:
            self.instructions += rank.instructions
            self.calls += rank.calls
            self.products_joined += rank.products_joined
            self.as_recorded += rank.as_recorded

    def timed(self, phase: str) -> _Timed:
        """Add the time of a `with` block to a phase."""
        return _Timed(self.seconds, phase)

    def text(self) -> str:
        """The report in some lines, for a command line."""
        lines = [
            f"replay: {self.hits} launches replayed, {self.recorded} recorded, {sum(self.refusals.values())} refused, "
            f"{self.dropped} dropped, {self.verified} verified"
        ]
        if self.rewritten:
            lines.append(
                f"  {self.rewritten} programs rewritten: {self.instructions} instructions into {self.calls} calls, "
                f"{self.products_joined} matmuls joined to others, {self.as_recorded} carried out as recorded"
            )
        lines += [f"  not rewritten: {reason} ({count})" for reason, count in self.not_rewritten.items()]
        lines += [f"  refused: {reason} ({count})" for reason, count in self.refusals.items()]
        if self.seconds:
            spent = ", ".join(f"{phase} {seconds:.3f} s" for phase, seconds in self.seconds.items())
            lines.append(f"  time: {spent}")
        return "\n".join(lines)


class _Timed:
    __slots__ = ("_phase", "_seconds", "_start")

    def __init__(self, seconds: dict[str, float], phase: str) -> None:
        self._seconds = seconds
        self._phase = phase

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        seconds = time.perf_counter() - self._start
        self._seconds[self._phase] = self._seconds.get(self._phase, 0.0) + seconds


@dataclass(frozen=True, eq=False)
class ReplayKey:
    """What launches have in common that may share a program, and the arrays of one of them, in order.

    `classes` say what the objects among the arguments do.
    """

    key: tuple[Any, tuple[Any, ...], Any]
    arrays: list[list[np.ndarray]]
    classes: list[Any]

    @classmethod
    def of(cls, kernel: Callable[..., Any], arguments: Arguments, options: tuple[Any, ...]) -> ReplayKey:
        """The kind of a launch. Raises NotFixed if it cannot be told from others."""
        taken = [Signature() for _ in arguments]
        if not _is_itself(kernel):
            raise NotFixed(f"the kernel is a {type(kernel).__name__}, which may change unseen")
        parts = tuple((own.key(args), own.key(kwargs)) for own, (args, kwargs) in zip(taken, arguments))
        classes = [each for own in taken for each in own.classes]
        return cls((kernel, options, parts), [own.arrays for own in taken], classes)

    def is_of(self, arguments: Arguments) -> bool:
        """Whether arguments are still of this kind."""
        kernel, options, _ = self.key
        try:
            return ReplayKey.of(kernel, arguments, options).key == self.key
        except NotFixed:
            return False


class ReplayCache:
    """Programs by what decides them; the one unused longest makes room for a new one.

    Programs share memory, so one runs at a time: whoever looks for one does so in its `turn`, until it has run.
    """

    def __init__(self, capacity: int = 256) -> None:
        self.capacity = capacity
        self.report = ReplayReport()
        self._lock = threading.RLock()
        self._in_turn = False
        self._lets_go = False
        self._programs: OrderedDict[Any, tuple[Watch, Any, Program | Sequence[Any]]] = OrderedDict()

    def kind(
        self, kernel: Callable[..., Any], arguments: Arguments, options: tuple[Any, ...]
    ) -> ReplayKey | None:
        """The kind of a launch; None, with the reason counted, if it cannot be told from others."""
        try:
            return ReplayKey.of(kernel, arguments, options)
        except NotFixed as reason:
            self.report.refuse(str(reason))
            return None

    def watch(self, kernel: Callable[..., Any], kind: ReplayKey) -> Watch | None:
        """The surroundings of a kernel before a launch; None, with the reason counted, if they may change unseen."""
        try:
            return Watch(kernel, kind.classes)
        except NotFixed as reason:
            self.report.refuse(str(reason))
            return None

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Find a program and run it in a `with` block, while no other thread does."""
        with self._lock:
            self._in_turn = True
            try:
                yield
            finally:
                self._in_turn = False
                if self._lets_go:
                    self.let_go()

    def let_go(self) -> None:
        """Hold no array of earlier launches any more; without this a program keeps those of its last one.

        Called in the middle of a replay, as a finalizer may be, it waits for its end.
        """
        self._lets_go = True
        if not self._in_turn and self._lock.acquire(blocking=False):
            try:
                self._lets_go = False
                for _, _, program in self._programs.values():
                    if isinstance(program, Program):
                        program.let_go()
            finally:
                self._lock.release()

    def find(self, key: Any) -> tuple[Any, Program | Sequence[Any]] | None:
        """The launch and program recorded under a key, if the kernel's surroundings are still the same.

        A program that was interrupted while it ran is dropped as well: its memory may be bound in part. Instead of the
        program it may be what `keep` was given to make one of.
        """
        entry = self._programs.get(key)
        if entry is None:
            return None
        watch, launch, program = entry
        if not watch.unchanged() or (isinstance(program, Program) and program.was_interrupted):
            del self._programs[key]
            self.report.dropped += 1
            return None
        self._programs.move_to_end(key)
        self.report.hits += 1
        return launch, program

    def complete(self, key: Any, program: Program) -> None:
        """Keep a program in place of what it was made of."""
        watch, launch, _ = self._programs[key]
        self._programs[key] = watch, launch, program

    def forget(self, key: Any, reason: str) -> None:
        """Drop a program that cannot be replayed after all."""
        del self._programs[key]
        self.report.dropped += 1
        self.pass_by(reason)

    def pass_by(self, reason: str) -> None:
        """Count a launch that does not make use of the program that was found."""
        self.report.hits -= 1
        self.report.refuse(reason)

    def keep(self, key: Any, watch: Watch, launch: Any, program: Program | Sequence[Any]) -> None:
        """Keep a program, or what to make one of."""
        with self._lock:
            self._programs[key] = (watch, launch, program)
            self.report.recorded += 1
            while len(self._programs) > self.capacity:
                self._programs.popitem(last=False)
                self.report.dropped += 1

    def run(
        self,
        program: Program,
        arrays: Sequence[Sequence[np.ndarray]],
        exact: bool,
        elsewhere: Processes | None = None,
    ) -> list[Any]:
        """Replay a program, rewritten (at its first replay) unless `exact`."""
        if not exact and not program.was_rewritten:
            with self.report.timed("rewriting"):
                program.rewrite()
            self.report.add_rewriting(program)
        with self.report.timed("replay"):
            return program.run(arrays, exact, elsewhere)

    def clear(self) -> None:
        """Forget every program."""
        self._programs.clear()


def _is_itself(kernel: Any) -> bool:
    """Whether a kernel is the same one next time if it is equal; methods and objects may be equal and do otherwise."""
    return isinstance(kernel, (types.FunctionType, partial)) or type(kernel).__module__.startswith(
        "simulate."
    )


REPLAYS = ReplayCache()
"""The programs of this process."""
