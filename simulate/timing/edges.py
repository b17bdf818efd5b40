"""The dependences of a launch, prepared for placing: one number for the moment that each of them waits for.

A producer has `STRIDE` moments, of which a dependence names one: how it waits (`Wait`) and whether the event that waits
is issued by the same engine. So an event's operands are ready at the largest of the moments it names.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from simulate.timing.dependences import Dependences, Wait
from simulate.timing.timeline import IntColumn

BoolColumn = NDArray[np.bool_]

STRIDE = 8
"""Moments of one event: two for each `Wait`, for an event of another engine and for one of its own."""


class Edges:
    """The dependences of all events, in columns; those of event e are at `ends[e] : ends[e + 1]`.

    `moments`: producer * STRIDE + Wait * 2 + whether both run on one engine. `results[e]`: the producers whose results
    the result of e must not overtake. `others` at `other_ends`, if DMA queues are shared: the producers of the same
    core that must be complete, except for those that run on the same engine, numbered within the core.
    """

    def __init__(
        self, waits: Dependences, lanes: Sequence[IntColumn], transfers: Sequence[BoolColumn], shared: bool
    ) -> None:
        """`lanes` and `transfers`, of every core: the engines of its events, and which events are DMAs.

        `shared`: some core has several DMA queues.
        """
        self._waits = waits
        self._packed, self._owners = waits.packed, waits.owners
        self._producers, kinds = self._packed >> 2, self._packed & 3
        engines = np.concatenate([own + core * 8 for core, own in enumerate(lanes)] or [self._packed])
        moves = np.concatenate([*transfers, np.zeros(0, bool)])
        issued_by, awaited_by = engines[self._producers], engines[self._owners]
        alike = (issued_by == awaited_by) & ~moves[self._producers]
        self.moments: list[int] = (self._packed * 2 + alike).tolist()
        self.ends: list[int] = waits.ends.tolist()
        ordered = np.flatnonzero(kinds == Wait.issue)
        events, first = self._owners[ordered], self._producers[ordered].tolist()
        self.results: dict[int, tuple[int, ...]] = dict(zip(events.tolist(), zip(first)))
        for at in np.flatnonzero(events[1:] == events[:-1]).tolist():  # an event with several of them
            self.results[int(events[at])] += (first[at],)
        self.others: list[int] = []
        self.other_ends: list[int] = []
        if shared:
            cores = issued_by >> 3
            kept = (cores == awaited_by >> 3) & ~alike & (kinds != Wait.start)
            self.others = (self._producers - np.array(waits.bases)[cores])[kept].tolist()
            self.other_ends = [0, *np.cumsum(kept).tolist()]
            self.other_ends = [self.other_ends[end] for end in self.ends]

    def followers(self) -> tuple[list[int], list[int], list[int]]:
        """For list scheduling between two rendezvous: the events that wait for each event, and their bounds.

        Those of event e are at [e] : [e + 1] of the second list. The third one counts the events that e waits for.
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
