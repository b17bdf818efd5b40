"""Core scheduler: the cores of a world run one at a time and wait for each other in rendezvous.

Each core runs the kernel's Python in a thread of its own, but exactly one runs at a time; it yields at a rendezvous or
at its end. So runs are deterministic, a deadlock is detected at once, and the first error is the error that is raised.

Dry launches of ranks with one core each have no threads (`simulate.run.dry_scheduler`).

With a seed the schedule is random: the seed decides which core runs next, and after which instructions a core is
preempted. A correct kernel computes the same bytes for every seed.
"""

from __future__ import annotations

import ctypes
import random
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nkw.errors import Deadlock, InvalidArgument, Location, RendezvousMismatch
from simulate.isa.plan import Rendezvous
from simulate.run.environment import SETS_LOGICAL_CORE
from simulate.run.processes import Arrival, Processes

_PATIENCE_SECONDS = 0.2
"""Time that a core's thread has to end by itself, before an exception is raised in it."""


class _CoreAborted(BaseException):
    """Exception that ends the thread of a core after another core has failed."""


Entry = tuple[Rendezvous, list[np.ndarray], Location]
"""Rendezvous with the terms that a member states, the member's operands, and its line."""


@dataclass
class PendingRendezvous:
    """Rendezvous that members have entered, until all of them have received their results.

    serial: its number in the launch. arrived: the entry of each member so far. cores: the cores that wait in it.
    results: the results of each member, once all have arrived.
    """

    serial: int
    arrived: dict[int, Entry] = field(default_factory=dict)
    cores: list[int] = field(default_factory=list)
    results: dict[int, list[np.ndarray]] = field(default_factory=dict)


class CoreScheduler:
    """Scheduler that runs the cores of a world, numbered 0 … count-1, one at a time.

    Without a seed a core runs until it has to wait; the next ready core follows, from core 0 on. With a seed, core
    `seed % count` begins, and preemptions are random; equal seeds give equal schedules. `is_random` tells whether it
    is so, in which case `issue` calls `preempt` before every instruction. With `peers`, all cores belong to one rank,
    and the other ranks are other processes.
    """

    def __init__(
        self,
        count: int,
        peers: Processes | None = None,
        seed: int | None = None,
        on_resume: Callable[[int], None] = lambda core: None,
        cores_per_rank: int = 1,
    ) -> None:
        """Create a scheduler whose cores do not run yet.

        Args:
            count: The number of cores.
            peers: The processes of the other ranks, None if all ranks are in this process.
            seed: Seed of a random schedule, None for the usual schedule.
            on_resume: Called with each core that starts or resumes, while no other core runs; not called for a single
                core.
            cores_per_rank: Physical cores of a rank.
        """
        self.count = count
        self._cores_per_rank = cores_per_rank
        self._on_resume = on_resume
        self._peers = peers
        self._arrivals: list[tuple[PendingRendezvous, Arrival]] = []
        self.is_random = seed is not None and count > 1
        self._first = (seed or 0) % count
        self._random = random.Random(
            f"turns {seed}"
        )  # a string, because small integers begin with equal draws
        self._pending: dict[Hashable, PendingRendezvous] = {}
        self._completed = 0
        self._waiting: dict[int, tuple[PendingRendezvous, Rendezvous, Location]] = {}
        self._done: set[int] = set()
        self._error: BaseException | None = None
        self._go = [threading.Lock() for _ in range(count)]  # locked while the core may not run
        for lock in self._go:
            lock.acquire()
        self._finished = threading.Event()

    def run(self, bodies: list[Callable[[], None]]) -> None:
        """Run the body of each core until all have ended; a single core runs in the calling thread.

        Args:
            bodies: The kernel of each core, as a function without arguments.

        Raises:
            BaseException: The first error of any body, or an interrupt of the main thread.
            Deadlock: The cores that have not ended wait for each other.
        """
        if self.count == 1:
            bodies[0]()
            return
        threads = [
            threading.Thread(target=self._run_thread, args=(core, body), name=f"core-{core}")
            for core, body in enumerate(bodies)
        ]
        try:
            for thread in threads:
                thread.start()
            self._wake(self._first)
            while not self._finished.wait(_PATIENCE_SECONDS):
                pass  # Python handles a signal that arrived just before a wait, or in another thread, after it
        except BaseException as interrupt:
            # A keyboard interrupt reaches the main thread only: let the cores unwind before passing it on.
            self._error = interrupt
            self._wake_all()
            for thread in threads:
                _unwind(thread)
        for thread in threads:
            if thread.ident is not None:
                thread.join()
        if self._error is not None:
            raise self._error

    def _run_thread(self, core: int, body: Callable[[], None]) -> None:
        """Run a core's body in its thread once the core is resumed, then let another core run; errors are stored."""
        self._go[core].acquire()
        try:
            if self._error is None:
                self._on_resume(core)
                body()
        except _CoreAborted:
            pass
        except BaseException as error:
            if self._error is None:
                self._error = error
        self._done.add(core)
        self._yield_to_next(core)

    def _yield_to_next(self, core: int) -> None:
        """Resume the next core, or end the run if all cores have ended; does not wait for this core's next turn.

        If no core is ready, waits for other processes. After an error, all cores are resumed so that they unwind.
        """
        if self._error is not None:
            self._wake_all()
            if len(self._done) == self.count:
                self._finished.set()
            return
        ready = self._ready_after(core)
        if ready:
            self._wake(self._choose(ready))
            return
        if len(self._done) == self.count:
            self._finished.set()
            return
        try:
            self._wait_for_peers()
        except BaseException as error:
            self._error = error
        self._yield_to_next(core)

    def _wait_for_peers(self) -> None:
        """Wait until a rendezvous with other processes is complete, and let its cores continue.

        Raises Deadlock if no core waits in such a rendezvous.
        """
        if self._peers is None or not self._arrivals:
            raise self._deadlock()
        index, arrived = self._peers.wait([arrival for _, arrival in self._arrivals])
        pending, arrival = self._arrivals.pop(index)
        pending.arrived = dict(zip(arrival.rendezvous.members, arrived))
        self._complete(pending, arrival.rendezvous, arrival.dry)

    def _ready_after(self, core: int) -> list[int]:
        """Return the cores that neither wait nor have ended, in round-robin order from `core + 1` to `core` itself."""
        return [
            candidate
            for step in range(1, self.count + 1)
            if (candidate := (core + step) % self.count) not in self._done and candidate not in self._waiting
        ]

    def _choose(self, ready: Sequence[int]) -> int:
        """Return the core that runs next: a random one with a seed, else the first of `ready`."""
        return self._random.choice(ready) if self.is_random else ready[0]

    def preempt(self, core: int) -> None:
        """Let a random ready core run instead of `core`, and return when `core` is resumed.

        Returns at once if the random core is `core` itself. Raises _CoreAborted if another core has failed meanwhile.
        """
        chosen = self._choose(self._ready_after(core))
        if chosen == core:
            return
        self._wake(chosen)
        self._go[core].acquire()
        if self._error is not None:
            raise _CoreAborted
        self._on_resume(core)

    def _wake_all(self) -> None:
        """Resume all cores that have not ended, so that they unwind after an error."""
        for core in range(self.count):
            if core not in self._done:
                self._wake(core)

    def _wake(self, core: int) -> None:
        """Resume a core; does nothing if it may run already. A lock takes a third of the time of a semaphore."""
        if self._go[core].locked():
            self._go[core].release()

    def _deadlock(self) -> Deadlock:
        """Return the error that no core can continue, with what each core waits for and where."""
        lines: list[str] = []
        for core, (pending, rendezvous, where) in sorted(self._waiting.items()):
            missing = [str(member) for member in rendezvous.members if member not in pending.arrived]
            lines.append(
                f"core {core} waits in {rendezvous.terms.get('operation', 'a rendezvous')} at {where} for "
                f"member{'s' * (len(missing) > 1)} {', '.join(missing)}"
            )
            lines += [line for line in self._describe_absent(rendezvous) if line not in lines]
        lines += [f"core {core} has ended" for core in sorted(self._done)]
        return Deadlock(
            "NKW-DEADLOCK",
            "every core that has not ended waits for another one\n  " + "\n  ".join(lines),
        )

    def _describe_absent(self, rendezvous: Rendezvous) -> list[str]:
        """Return a text about the members of a rendezvous that this launch cannot have, such as core 1 of one core.

        The list is empty if it has all members, or if other processes take part.
        """
        available = self.count // self._cores_per_rank if rendezvous.by_rank else self._cores_per_rank
        absent = [str(member) for member in rendezvous.members if member >= available]
        if self._peers is not None or not absent:
            return []
        member_name = "rank" if rendezvous.by_rank else "core"
        has = f"this launch has {available} {member_name}{'s' * (available > 1)}"
        cure = "" if rendezvous.by_rank else f": two cores are set by {SETS_LOGICAL_CORE}"
        return [f"there is no {member_name} {', '.join(absent)}; {has}{cure}"]

    def join(
        self,
        core: int,
        member: int,
        rendezvous: Rendezvous,
        operands: list[np.ndarray],
        where: Location,
        dry: bool = False,
    ) -> tuple[list[np.ndarray], int]:
        """Enter a rendezvous, wait until every member has arrived, and return this member's results.

        Args:
            core: The core that enters.
            member: Its number among the members: its rank or its core number.
            rendezvous: The rendezvous, with the terms that this member states.
            operands: The operands of this member.
            where: The kernel line, for messages.
            dry: Whether no operands are exchanged.

        Returns:
            The results of this member, none in a dry launch; and the serial number of the rendezvous.

        Raises:
            RendezvousMismatch: Members disagree in a term.
            Deadlock: A member can never arrive.
        """
        pending = self._arrive(core, member, (rendezvous, operands, where), dry)
        if core in self._waiting:
            if self._peers is not None and rendezvous.by_rank:
                self._arrivals.append((pending, self._peers.post(rendezvous, operands, where, dry)))
            if self.count == 1:
                self._wait_for_peers()
                return pending.results[member], pending.serial
            self._yield_to_next(core)
            self._go[core].acquire()
            if self._error is not None:
                raise _CoreAborted
            self._on_resume(core)
        return pending.results[member], pending.serial

    def _arrive(self, core: int, member: int, entry: Entry, dry: bool) -> PendingRendezvous:
        """Record a core's entry into a rendezvous and return the rendezvous; does not wait.

        The last member completes it: operands are exchanged, and waiting members become ready. Any other core is
        marked as waiting.
        """
        rendezvous, _, where = entry
        pending = self._pending.get(rendezvous.key)
        if pending is None:
            pending = self._pending[rendezvous.key] = PendingRendezvous(self._completed)
            self._completed += 1
        pending.arrived[member] = entry
        if len(pending.arrived) == len(rendezvous.members):
            self._complete(pending, rendezvous, dry)
        else:
            self._waiting[core] = pending, rendezvous, where
            pending.cores.append(core)
        return pending

    def _complete(self, pending: PendingRendezvous, rendezvous: Rendezvous, dry: bool) -> None:
        """Exchange the operands of a rendezvous that all members have entered, and let its waiting cores continue.

        Raises RendezvousMismatch if members disagree in a term.
        """
        del self._pending[rendezvous.key]
        arrived = [pending.arrived[member] for member in rendezvous.members]
        check_agreement(rendezvous.members, arrived)
        if dry:
            pending.results = {member: [] for member in rendezvous.members}
        else:
            results = rendezvous.exchange([operands for _, operands, _ in arrived])
            pending.results = dict(zip(rendezvous.members, results))
        for waiting in pending.cores:
            del self._waiting[waiting]


def _unwind(thread: threading.Thread) -> None:
    """Wait until a core's thread has ended; after 0.2 s raise an exception in it, also in a loop of plain Python."""
    while thread.is_alive():
        thread.join(_PATIENCE_SECONDS)
        if thread.is_alive() and thread.ident is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(thread.ident), ctypes.py_object(_CoreAborted)
            )


def check_agreement(
    members: tuple[int, ...], arrived: Sequence[tuple[Rendezvous, list[Any], Location]]
) -> None:
    """Raise RendezvousMismatch, with every member's value and line, if members state different values of a term.

    Args:
        members: The numbers of the members.
        arrived: Rendezvous, operands and line of each member.
    """
    lines = []
    keys = list(dict.fromkeys(key for rendezvous, _, _ in arrived for key in rendezvous.terms))
    for key in keys:
        terms = [rendezvous.terms.get(key) for rendezvous, _, _ in arrived]
        if any(value != terms[0] for value in terms):
            lines += [
                f"  {key}: member {member} says {value} ({where})"
                for member, value, (_, _, where) in zip(members, terms, arrived)
            ]
    if lines:
        message = "\n".join(["the members of a rendezvous disagree", *lines])
        raise RendezvousMismatch("NKW-RENDEZVOUS", message, arrived[0][2])


def check_world(ranks: int) -> None:
    """Raise InvalidArgument if `ranks`, the number of ranks of a world, is below 1."""
    if ranks < 1:
        raise InvalidArgument("NKW-WORLD", f"a world of {ranks} ranks; give 1 or more")
