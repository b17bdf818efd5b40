"""Observers of the launches in a `with` block, and the collector of their records."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from simulate.run.launch import Launch, Observer
from simulate.run.machine import Mode

_observers: list[Observer] = []


def observers() -> tuple[Observer, ...]:
    """Return the observers that `observing` blocks of this process have registered, for a launch that begins now."""
    return tuple(_observers)


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Let `observer` be told of every launch made inside a `with` block, in any thread of this process."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


class _Collector(Observer):
    """Observer that collects launches; `recorded` describes the arguments."""

    def __init__(self, calls: bool, refused: bool, outputs: bool, stopped: bool) -> None:
        self.launches: list[Launch] = []
        self.keeps_calls = calls
        self._refused = refused
        self._outputs = outputs
        self._stopped = stopped

    def ran(self, launch: Launch) -> None:
        if self._refused:
            self._keep(launch)

    def ended(self, launch: Launch, returned: Sequence[Any]) -> None:
        if not self._refused or launch.mode is Mode.replay:
            self._keep(launch)

    def stopped(self, launch: Launch) -> None:
        if self._stopped:
            self._keep(launch)

    def _keep(self, launch: Launch) -> None:
        self.launches.append(launch if self._outputs else replace(launch, outputs=[]))


@contextmanager
def recorded(
    calls: bool = False, refused: bool = False, outputs: bool = True, stopped: bool = False
) -> Iterator[list[Launch]]:
    """Collect the launches made inside a `with` block, for instance to time a kernel that is called like a function.

    Args:
        calls: Record the callers' lines of every instruction and allocation (`Stream.chains`), which costs some time;
            such launches are never replayed.
        refused: Collect also launches that ran to their end and are refused because their tiles do not fit into SBUF
            or PSUM.
        outputs: Keep the outputs of launches, which take most of the memory; otherwise `outputs` is empty.
        stopped: Collect also launches that an error ended in an instruction, with their streams before it.

    Yields:
        The list of launches, which grows while the block runs.
    """
    collector = _Collector(calls, refused, outputs, stopped)
    with observing(collector):
        yield collector.launches
