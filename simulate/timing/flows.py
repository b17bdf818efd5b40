"""Dependences as arrows of a trace: flow events from the slice that produces to the slice that waits.

Only arrows between tracks are drawn: on one track, order says it already. Where an event waits for another one in
several ways, one arrow stands for all. An arrow leaves the producer in its last nanosecond, because a viewer binds it
to the slice that holds its timestamp.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from simulate.timing.dependences import Dependences, Wait

_CALLED = {Wait.result: "result", Wait.read: "read", Wait.issue: "order"}


class Place(NamedTuple):
    """Where a slice is drawn: process, thread, start and end in ns."""

    process: int
    thread: int
    start: int
    end: int


class Drawn:
    """The slices of every event of one launch: the one it waits in, and the one its result comes from."""

    def __init__(self, events: int) -> None:
        self.first: list[Place | None] = [None] * events
        self.last: list[Place | None] = [None] * events

    def instruction(self, event: int, place: Place) -> None:
        """An instruction, or the trigger of a DMA."""
        self.first[event] = place
        if self.last[event] is None:
            self.last[event] = place

    def transfer(self, event: int, place: Place) -> None:
        """The data phase of a DMA."""
        self.last[event] = place


def flows(waits: Dependences, drawn: Drawn, first_id: int) -> Iterator[dict[str, Any]]:
    """The arrows of one launch, numbered from `first_id`, in order of the events that wait."""
    number = first_id
    for event, consumer in enumerate(drawn.first):
        seen = set()
        for producer, wait in waits.of(event):
            source = drawn.last[producer]
            if consumer is None or source is None or producer in seen:
                continue
            if source[:2] == consumer[:2] or source.start > consumer.start:
                continue
            seen.add(producer)
            yield from arrow(_CALLED[wait], number, source, consumer)
            number += 1


def arrow(name: str, number: int, source: Place, consumer: Place) -> Iterator[dict[str, Any]]:
    """Both ends of one arrow between slices, of which the source starts first."""
    leaves = max(source.start, min(source.end - 1, consumer.start))
    yield _end("s", name, number, source, leaves)
    yield {**_end("f", name, number, consumer, consumer.start), "bp": "e"}


def _end(phase: str, name: str, number: int, place: Place, moment: int) -> dict[str, Any]:
    return {
        "name": name,
        "cat": "dependence",
        "ph": phase,
        "id": number,
        "pid": place.process,
        "tid": place.thread,
        "ts": moment / 1000,
    }
