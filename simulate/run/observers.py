"""Observers of launches: what detectors, profiles and memory maps see of the kernels that run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from simulate.errors import NkwError
from simulate.memory import Storage
from simulate.run.machine import InstructionObserver, Mode, NeuronCore

if TYPE_CHECKING:
    from simulate.run.launch import Launch, LaunchRequest


class Observer(InstructionObserver):
    """An object that is told of launches, instructions and operands while kernels run; by default it does nothing.

    Values and run-time indices are gone after a launch; a detector that needs them sets `sees_instructions`. With
    `keeps_calls` the stream records the callers' lines of instructions and allocations. Launches with either are never
    replayed. Without an observer an instruction costs two loops over nothing.
    """

    sees_instructions = False
    keeps_calls = False

    def began(
        self, request: LaunchRequest, cores: Sequence[NeuronCore], inputs: Sequence[Sequence[Storage]]
    ) -> None:
        """The cores of a launch are about to run; `inputs` has the storages of each rank's array arguments."""

    def ran(self, launch: Launch) -> None:
        """The kernel has run to its end; the launch may still be refused because its tiles do not fit."""

    def ended(self, launch: Launch, returned: Sequence[Any]) -> None:
        """A launch is over. `returned` has each rank's return value, with tensors; a replay has none."""

    def refused(self, error: NkwError) -> None:
        """A launch was ended by an error, which the caller may catch."""

    def stopped(self, launch: Launch) -> None:
        """The streams of a launch up to the instruction that was refused; it has no outputs."""


_observers: list[Observer] = []


def observers() -> tuple[Observer, ...]:
    """The observers of a launch that begins now."""
    return tuple(_observers)


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Let `observer` see every launch made inside a `with` block."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


class _Collector(Observer):
    """Collects launches; see `recorded`."""

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
    """Collect the launches made inside a `with` block, for instance to time a kernel that was called plainly.

    calls: record the callers' lines of every instruction and allocation (`Stream.chains`), which costs some time; such
    launches are never replayed. refused: collect also launches that ran to their end and are refused because their
    tiles do not fit into SBUF or PSUM. outputs: keep the outputs of launches, which take most of the memory. stopped:
    collect also launches that a refused instruction ended, with their streams up to there.
    """
    collector = _Collector(calls, refused, outputs, stopped)
    with observing(collector):
        yield collector.launches
