"""Ordering requests by instruction names, as `kernel.with_schedule` makes them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from simulate.errors import InvalidArgument
from simulate.run.machine import current_core
from simulate.run.stream import Stream

Edges = Sequence[tuple[str, "str | Sequence[str]"]]


class Scheduled:
    """A kernel function that, once it has run, asks for the order its edges state.

    An edge binds every instruction of the consumer's name to every one of the producer's name that was issued before
    it; where all of them were issued later, the request stands as it is and scheduling refuses it.
    """

    def __init__(self, func: Callable[..., Any], edges: Edges) -> None:
        functools.update_wrapper(self, func)
        self.func = func
        self.__code__ = getattr(func, "__code__", None)  # the names of the arguments, for reports
        self._edges = [(consumer, producer) for pair in edges for consumer, producer in _pairs(pair)]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function, then enter the requests into the stream of the core that ran it."""
        result = self.func(*args, **kwargs)
        stream = current_core().stream
        numbers: dict[str, list[int]] = {}
        for index, name in stream.names.items():
            numbers.setdefault(name, []).append(index)
        for consumer, producer in self._edges:
            for after in _of(numbers, consumer, stream):
                before = _of(numbers, producer, stream)
                stream.requested.extend(
                    (index, after) for index in [i for i in before if i < after] or before
                )
        return result


def _pairs(pair: Any) -> list[tuple[str, str]]:
    well_formed = isinstance(pair, (tuple, list)) and len(pair) == 2 and isinstance(pair[0], str)
    producers = [pair[1]] if well_formed and isinstance(pair[1], str) else pair[1] if well_formed else None
    if not isinstance(producers, (tuple, list)) or not all(isinstance(name, str) for name in producers):
        raise InvalidArgument(
            "NKW-SCHEDULE",
            f"with_schedule takes pairs (consumer, producer or list of producers) of names, not {pair!r:.80}",
        )
    return [(pair[0], name) for name in producers]


def _of(numbers: dict[str, list[int]], name: str, stream: Stream) -> list[int]:
    if name not in numbers:
        known = ", ".join(sorted(numbers)) or "none"
        raise InvalidArgument(
            "NKW-SCHEDULE",
            f"with_schedule names {name!r}; the named instructions of core {stream.core} are {known}",
        )
    return numbers[name]
