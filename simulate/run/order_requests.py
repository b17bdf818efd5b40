"""Ordering requests between instructions by name, from `kernel.with_schedule`.

An edge is (consumer, producer or producers), names that instructions have by `name=`. It requests that the consumer
starts after its producers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from nkw.errors import InvalidArgument
from simulate.run.machine import current_core
from simulate.run.stream import Stream

Edges = Sequence[tuple[str, "str | Sequence[str]"]]


class Scheduled:
    """Kernel function with edges; after a call, the running core's stream has the ordering requests of the edges.

    An edge orders every instruction of the consumer's name after every earlier instruction of the producer's name. If
    all producers were issued later, the request is added unchanged, and scheduling refuses it.
    """

    def __init__(self, func: Callable[..., Any], edges: Edges) -> None:
        functools.update_wrapper(self, func)
        self.func = func
        self.__code__ = getattr(func, "__code__", None)  # has the names of the arguments, for reports
        self._edges = [(consumer, producer) for pair in edges for consumer, producer in _split_edge(pair)]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function, append the requests to the stream of the running core, and return the function's result.

        Raises:
            InvalidArgument: No instruction of the core has a name that an edge has.
        """
        result = self.func(*args, **kwargs)
        stream = current_core().stream
        numbers: dict[str, list[int]] = {}
        for index, name in stream.names.items():
            numbers.setdefault(name, []).append(index)
        for consumer, producer in self._edges:
            for after in _find_events(numbers, consumer, stream):
                before = _find_events(numbers, producer, stream)
                stream.requested.extend(
                    (index, after) for index in [i for i in before if i < after] or before
                )
        return result


def _split_edge(pair: Any) -> list[tuple[str, str]]:
    """Return (consumer, producer) for each producer of an edge. Raises InvalidArgument for an edge of another form."""
    well_formed = isinstance(pair, (tuple, list)) and len(pair) == 2 and isinstance(pair[0], str)
    producers = [pair[1]] if well_formed and isinstance(pair[1], str) else pair[1] if well_formed else None
    if not isinstance(producers, (tuple, list)) or not all(isinstance(name, str) for name in producers):
        raise InvalidArgument(
            "NKW-SCHEDULE",
            f"with_schedule got {pair!r:.80}; give pairs of names, (consumer, producer or list of producers)",
        )
    return [(pair[0], name) for name in producers]


def _find_events(numbers: dict[str, list[int]], name: str, stream: Stream) -> list[int]:
    """Return the events with a name in a core's stream. Raises InvalidArgument if there are none.

    Args:
        numbers: The events by name.
        name: The name.
        stream: The stream, for the message.
    """
    if name not in numbers:
        known = ", ".join(sorted(numbers)) or "none"
        raise InvalidArgument(
            "NKW-SCHEDULE",
            f"with_schedule names {name!r}, which no instruction of core {stream.core} has; its names are {known}",
        )
    return numbers[name]
