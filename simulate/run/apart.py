"""Cores that need nothing of each other while they run: those of a dry launch whose ranks have one core each.

A rendezvous of a dry launch exchanges no values. So each core runs its kernel to the end without a thread of its own,
and the schedule is made from the rendezvous that the cores came to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from simulate.run.scheduler import CoreScheduler, PendingRendezvous, Said
from simulate.run.stream import Stream


class ApartCores(CoreScheduler):
    """Runs cores one after the other; streams, order of resumption and errors are those of `CoreScheduler`.

    A core begins when the schedule comes to it, so an error before that keeps it from running. Python behind a
    rendezvous that never completes has run as well when the deadlock is raised.
    """

    def __init__(self, count: int, streams: Sequence[Stream]) -> None:
        """`streams`: those of the `count` cores, known when the cores run."""
        super().__init__(count)
        self._streams = streams
        self._came_to: list[list[tuple[int, int, Said]]] = [
            [] for _ in range(count)
        ]  # event, member, and what it said

    def run(self, bodies: list[Callable[[], None]]) -> None:
        """Run one body per core to its end; raises the error that comes first in the schedule."""
        came_to = [iter(own) for own in self._came_to]
        errors: dict[int, Exception] = {}
        at = [0] * self.count
        ready, turn = [0], 0
        while ready:
            core = ready[0]
            stream = self._streams[core]
            if not stream.resumed:
                try:
                    bodies[core]()
                except Exception as error:
                    errors[core] = error
            stream.resumed.append((turn, at[core]))
            turn += 1
            for event, member, said in came_to[core]:
                at[core] = event
                stream.rendezvous[event] = super()._arrive(core, member, said, dry=True).serial
                if core in self._waiting:
                    break
            else:
                if core in errors:
                    raise errors[core]
                self._done.add(core)
            ready = self._ready_after(core)
        if len(self._done) < self.count:
            raise self._deadlock()

    def _arrive(self, core: int, member: int, said: Said, dry: bool) -> PendingRendezvous:
        """Note the rendezvous; the schedule gives the event its serial number."""
        self._came_to[core].append((len(self._streams[core]), member, said))
        return PendingRendezvous(-1, results={member: []})
