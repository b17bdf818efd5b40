"""Dependences as arrows of a trace: flow events from the slice that produces to the slice that waits.

Only arrows between tracks are shown, because the order on a track shows the rest. If an event waits for another event
in several ways, there is one arrow. An arrow leaves the producer in its last nanosecond, because a viewer binds it to
the slice that contains its timestamp.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from simulate.timing.dependences import Dependences, Wait

_WAIT_NAMES = {Wait.result: "result", Wait.read: "read", Wait.issue: "order"}


class SlicePosition(NamedTuple):
    """Position of a slice in a trace: process, thread, start and end in ns."""

    process: int
    thread: int
    start: int
    end: int


class EventSlices:
    """Slices of every event of one launch, by the event's number over all streams; None until they are recorded.

    `first` has the slice that begins when the event's waits are over, where arrows end. `last` has the slice that
    delivers its result, where arrows begin: the data phase of a DMA, else the same slice.
    """

    def __init__(self, events: int) -> None:
        self.first: list[SlicePosition | None] = [None] * events
        self.last: list[SlicePosition | None] = [None] * events

    def instruction(self, event: int, position: SlicePosition) -> None:
        """Record the slice of an instruction, or of the trigger of a DMA, in `first`, and in `last` if that is None."""
        self.first[event] = position
        if self.last[event] is None:
            self.last[event] = position

    def transfer(self, event: int, position: SlicePosition) -> None:
        """Record the slice of the data phase of a DMA in `last`."""
        self.last[event] = position


def make_arrows(waits: Dependences, slices: EventSlices, first_id: int) -> Iterator[dict[str, Any]]:
    """Yield the trace events of the arrows of one launch, two for each arrow, in the order of the waiting events.

    There is no arrow for a dependence inside one track, for an event without a slice, or if the producer's slice
    starts after the consumer's slice.

    Args:
        waits: The dependences.
        slices: The slices of the launch.
        first_id: The id of the first arrow; later arrows count on from it.
    """
    number = first_id
    for event, consumer in enumerate(slices.first):
        seen = set()
        for producer, wait in waits.list_waits(event):
            source = slices.last[producer]
            if consumer is None or source is None or producer in seen:
                continue
            if source[:2] == consumer[:2] or source.start > consumer.start:
                continue
            seen.add(producer)
            yield from make_arrow(_WAIT_NAMES[wait], number, source, consumer)
            number += 1


def make_arrow(
    name: str, number: int, source: SlicePosition, consumer: SlicePosition
) -> Iterator[dict[str, Any]]:
    """Yield the two trace events of one arrow, its start ("ph": "s") and its end ("ph": "f").

    Args:
        name: The name of the arrow, such as "result".
        number: The id that joins both events.
        source: The slice that the arrow leaves; it starts no later than `consumer`.
        consumer: The slice at whose start the arrow ends.
    """
    leaves = max(source.start, min(source.end - 1, consumer.start))
    yield _make_end("s", name, number, source, leaves)
    yield {**_make_end("f", name, number, consumer, consumer.start), "bp": "e"}


def _make_end(phase: str, name: str, number: int, position: SlicePosition, moment: int) -> dict[str, Any]:
    """Return the trace event of one end of an arrow, at `moment` ns on the thread of a slice.

    Args:
        phase: "s" for the end where the arrow starts, "f" for the other.
        name: The name of the arrow.
        number: The id that joins both events.
        position: The slice.
        moment: The time in ns, which is written in us.
    """
    return {
        "name": name,
        "cat": "dependence",
        "ph": phase,
        "id": number,
        "pid": position.process,
        "tid": position.thread,
        "ts": moment / 1000,
    }
