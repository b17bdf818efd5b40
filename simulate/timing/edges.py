"""Dependences of a launch, prepared for placing: one index for the moment that each of them waits for.

A producer has `STRIDE` moments, of which a dependence names one: how it waits (`Wait`) and whether the waiting event
is issued by the same engine. So an event's operands are ready at the latest of the moments that it names.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from simulate.timing.dependences import Dependences, Wait
from simulate.timing.timeline import IntColumn

BoolColumn = NDArray[np.bool_]

STRIDE = 8
"""Number of moments of an event: two for each `Wait`, for events of another engine and of the same engine."""


class Edges:
    """Dependences of all events, in columns; those of event e are at `ends[e] : ends[e + 1]`.

    `moments`: producer * STRIDE + Wait * 2 + whether both run on one engine. `results[e]`: the producers whose results
    the result of e must not overtake (`Wait.issue`); absent if there are none. If some core has several DMA queues,
    `producers[producer_ends[e] : producer_ends[e + 1]]` are the events of the same core that e waits for, except
    instructions of its own engine, numbered within the core. Otherwise both lists are empty.
    """

    def __init__(
        self, waits: Dependences, lanes: Sequence[IntColumn], transfers: Sequence[BoolColumn], shared: bool
    ) -> None:
        """Prepare the dependences of a launch.

        Args:
            waits: The dependences.
            lanes: For each core, the index in `LANES` of the engine that issues every event.
            transfers: For each core, whether every event is a DMA.
            shared: Whether some core has several DMA queues.
        """
        self._waits = waits
        self._packed, self._owners = waits.packed, waits.owners
        self._producers, wait_kinds = self._packed >> 2, self._packed & 3
        engines = np.concatenate([lane + core * 8 for core, lane in enumerate(lanes)] or [self._packed])
        moves = np.concatenate([*transfers, np.zeros(0, bool)])
        issued_by, awaited_by = engines[self._producers], engines[self._owners]
        alike = (issued_by == awaited_by) & ~moves[self._producers]
        self.moments: list[int] = (self._packed * 2 + alike).tolist()
        self.ends: list[int] = waits.ends.tolist()
        ordered = np.flatnonzero(wait_kinds == Wait.issue)
        events, first = self._owners[ordered], self._producers[ordered].tolist()
        self.results: dict[int, tuple[int, ...]] = dict(zip(events.tolist(), zip(first)))
        for index in np.flatnonzero(events[1:] == events[:-1]).tolist():  # events with several such producers
            self.results[int(events[index])] += (first[index],)
        self.producers: list[int] = []
        self.producer_ends: list[int] = []
        if shared:
            cores = issued_by >> 3
            kept = (cores == awaited_by >> 3) & ~alike & (wait_kinds != Wait.start)
            self.producers = (self._producers - np.array(waits.bases)[cores])[kept].tolist()
            kept_ends = [0, *np.cumsum(kept).tolist()]
            self.producer_ends = [kept_ends[end] for end in self.ends]

    def list_followers(self) -> tuple[list[int], list[int], list[int]]:
        """Return the events that wait for each event, for list scheduling between two rendezvous.

        Dependences across a rendezvous are left out, because their producers are placed already.

        Returns:
            The waiting events, sorted by producer; the bounds, so that the events that wait for e are at
            [e] : [e + 1]; and for each event the number of its dependences that count here.
        """
        producers, owners, events = self._producers, self._owners, len(self.ends) - 1
        if len(self._waits.order) > 1:
            segments = np.zeros(events, np.int64)
            for number, step in enumerate(self._waits.order):
                for stream, first, end in step.members:
                    base = self._waits.bases[stream]
                    segments[base + first : base + end] = number
            near = segments[producers] == segments[owners]
            producers, owners = producers[near], owners[near]
        order = np.argsort(producers, kind="stable")
        ends = np.cumsum(np.bincount(producers, minlength=events))
        return owners[order].tolist(), [0, *ends.tolist()], np.bincount(owners, minlength=events).tolist()
