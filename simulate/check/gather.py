"""Gathering evidence of the launches that some code makes, and carrying each of them out again on request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from simulate.check import interleavings, orders
from simulate.check.evidence import Evidence, tensors_of
from simulate.check.reorder import Tape
from simulate.errors import InvalidArgument, NkwError
from simulate.isa.plan import Plan
from simulate.memory import Storage
from simulate.run import Launch
from simulate.run.launch import LaunchRequest
from simulate.run.machine import NeuronCore
from simulate.run.observer import observing


class Gatherer:
    """An observer of many launches: one Evidence for each."""

    def __init__(self, orders: int = 0, seeds: int = 0) -> None:
        """`orders` legal orders and `seeds` interleavings are tried for every launch."""
        if orders < 0 or seeds < 0:
            raise InvalidArgument(
                "NKW-CHECK-COUNT", f"orders={orders}, seeds={seeds}; give 0 or more of each"
            )
        self.launches: list[tuple[Launch, Evidence]] = []
        self.errors: list[NkwError] = []
        self._orders, self._seeds = orders, seeds
        self._forget()

    def _forget(self) -> None:
        self._now = Evidence()
        self._tape: Tape | None = None
        self._call: interleavings.Repeatable | None = None

    def began(
        self, call: LaunchRequest, cores: Sequence[NeuronCore], inputs: Sequence[Sequence[Storage]]
    ) -> None:
        """Drop what a launch before has left that did not end, and get ready for this one."""
        self._forget()
        if not call.alone:
            return  # the other processes would have to repeat it as well
        if self._orders:
            self._tape = Tape(cores, inputs)
        if self._seeds and len(cores) > 1:
            self._call = interleavings.Repeatable(call)

    def issuing(self, running: NeuronCore, plan: Plan, operands: Sequence[Any]) -> None:
        """Pass on to the evidence of the running launch."""
        self._now.issuing(running, plan, operands)

    def issued(self, running: NeuronCore, plan: Plan, operands: Sequence[Any]) -> None:
        """Pass on to the evidence of the running launch."""
        self._now.issued(running, plan, operands)
        if self._tape is not None:
            self._tape.issued(running)
        if self._call is not None:
            self._call.trace.issued(running, plan, operands)

    def ended(self, launch: Launch, returned: Sequence[Any]) -> None:
        """Close the evidence of a launch, and carry it out again if that was asked for."""
        evidence, tape, call = self._now, self._tape, self._call
        evidence.ended(launch, returned)
        self.launches.append((launch, evidence))
        self._forget()
        if call is not None:
            evidence.varied += interleavings.vary(call, launch, evidence.returned, self._seeds)
        if tape is not None:
            tape.end([[tensor.storage for tensor in tensors_of(value)] for value in returned])
            evidence.varied += orders.vary(tape, self._orders)

    def refused(self, error: NkwError) -> None:
        """Keep what stopped a launch: a fault is one even if the script that made the launch lives with it."""
        self.errors.append(error)


@contextmanager
def gathered(orders: int = 0, seeds: int = 0) -> Iterator[Gatherer]:
    """Gather evidence of the launches made inside a `with` block.

    orders: that many legal orders of its instructions are tried for each launch; its outputs must not depend on them.
    seeds: each launch of several cores is made anew with that many orders of turns, drawn from the seeds 1, 2, …
    Raises InvalidArgument for a negative count.
    """
    gatherer = Gatherer(orders, seeds)
    with observing(gatherer):
        yield gatherer
