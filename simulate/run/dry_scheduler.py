"""Core scheduler of dry launches whose ranks have one core each, without threads.

A rendezvous of a dry launch exchanges no values, so its cores need nothing of each other while they run. Each core runs
its kernel to the end, and the schedule is made afterwards from the rendezvous that the cores entered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from simulate.run.scheduler import CoreScheduler, Entry, PendingRendezvous
from simulate.run.stream import Stream


class DryScheduler(CoreScheduler):
    """Scheduler that runs cores one after another; streams, order and errors are those of `CoreScheduler`.

    A core begins when its turn in the schedule comes, so an error before that keeps it from running. When a deadlock is
    raised, the Python code after the rendezvous that never completes has run as well.
    """

    def __init__(self, count: int, streams: Sequence[Stream]) -> None:
        """Create a scheduler whose cores do not run yet.

        Args:
            count: The number of cores.
            streams: The list of the cores' streams, which the caller completes before `run`.
        """
        super().__init__(count)
        self._streams = streams
        # Event, member and entry of each rendezvous, by core.
        self._entries: list[list[tuple[int, int, Entry]]] = [[] for _ in range(count)]

    def run(self, bodies: list[Callable[[], None]]) -> None:
        """Run the body of each core to its end, in this thread; fills in the streams' resumptions and rendezvous.

        Args:
            bodies: The kernel of each core, as a function without arguments.

        Raises:
            Exception: The error of a body that comes first in the schedule.
            Deadlock: A rendezvous never completes.
        """
        entries = [iter(core_entries) for core_entries in self._entries]
        errors: dict[int, Exception] = {}
        positions = [0] * self.count
        ready, number = [0], 0
        while ready:
            core = ready[0]
            stream = self._streams[core]
            if not stream.resumed:
                try:
                    bodies[core]()
                except Exception as error:
                    errors[core] = error
            stream.resumed.append((number, positions[core]))
            number += 1
            for event, member, entry in entries[core]:
                positions[core] = event
                stream.rendezvous[event] = super()._arrive(core, member, entry, dry=True).serial
                if core in self._waiting:
                    break
            else:
                if core in errors:
                    raise errors[core]
                self._done.add(core)
            ready = self._ready_after(core)
        if len(self._done) < self.count:
            raise self._deadlock()

    def _arrive(self, core: int, member: int, entry: Entry, dry: bool) -> PendingRendezvous:
        """Record that a core enters a rendezvous at its next event, and return a stand-in with empty results.

        The stand-in has serial number -1; `run` writes the final one to the stream.
        """
        self._entries[core].append((len(self._streams[core]), member, entry))
        return PendingRendezvous(-1, results={member: []})
