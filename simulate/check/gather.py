"""Gathers the evidence of launches, and executes each launch again on request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from nkw.errors import InvalidArgument, NkwError
from simulate.check import interleavings, orders
from simulate.check.evidence import Evidence
from simulate.check.reorder import ReorderedLaunch, Snapshot
from simulate.memory import Storage
from simulate.run import Launch
from simulate.run.launch import LaunchRequest
from simulate.run.machine import Issue, NeuronCore
from simulate.run.observers import Observer, observing


class Gatherer(Observer):
    """An observer of many launches: one Evidence for each."""

    sees_instructions = True
    keeps_calls = True

    def __init__(self, orders: int = 0, seeds: int = 0) -> None:
        """Every launch is tried in `orders` legal orders and under `seeds` random core schedules."""
        if orders < 0 or seeds < 0:
            raise InvalidArgument(
                "NKW-CHECK-COUNT",
                f"orders={orders}, seeds={seeds}: a count is negative; give 0 or more of each",
            )
        self.launches: list[tuple[Launch, Evidence]] = []
        self.errors: list[NkwError] = []
        self._orders, self._seeds = orders, seeds
        self._forget()

    def _forget(self) -> None:
        self._now = Evidence()
        self._arguments: list[list[Snapshot]] | None = None
        self._repeatable: interleavings.Repeatable | None = None

    def began(
        self, request: LaunchRequest, cores: Sequence[NeuronCore], inputs: Sequence[Sequence[Storage]]
    ) -> None:
        """Drop the evidence of an earlier launch that did not end, and begin that of this one."""
        self._forget()
        if request.peers is not None:
            return  # the processes of the other ranks would have to repeat the launch as well
        if self._orders:
            self._arguments = [[Snapshot.of(storage) for storage in rank] for rank in inputs]
        if self._seeds and len(cores) > 1:
            self._repeatable = interleavings.Repeatable(request)

    def issuing(self, core: NeuronCore, issue: Issue, operands: Sequence[Any]) -> None:
        """Pass on to the evidence of the running launch."""
        self._now.issuing(core, issue, operands)

    def issued(self, core: NeuronCore, issue: Issue, operands: Sequence[Any]) -> None:
        """Pass on to the evidence of the running launch."""
        self._now.issued(core, issue, operands)
        if self._repeatable is not None:
            self._repeatable.trace.issued(core, issue, operands)

    def ended(self, launch: Launch, returned: Sequence[Any]) -> None:
        """Close the evidence of a launch, and execute the launch again if orders or seeds were asked for."""
        evidence, arguments, repeatable = self._now, self._arguments, self._repeatable
        evidence.ended(launch, returned)
        self.launches.append((launch, evidence))
        self._forget()
        if repeatable is not None:
            evidence.varied += interleavings.vary(repeatable, launch, evidence.returned, self._seeds)
        if arguments is not None:
            evidence.varied += orders.vary(ReorderedLaunch(launch, arguments), self._orders)

    def refused(self, error: NkwError) -> None:
        """Keep the error that stopped a launch, also where the script catches it and continues."""
        self.errors.append(error)


@contextmanager
def gathered(orders: int = 0, seeds: int = 0) -> Iterator[Gatherer]:
    """Gather evidence of the launches made inside a `with` block.

    orders: that many legal orders of its instructions are tried for each launch; its outputs must not depend on them.
    seeds: each launch of several cores is repeated under that many random core schedules, of the seeds 1, 2, …
    Raises InvalidArgument for a negative count.
    """
    gatherer = Gatherer(orders, seeds)
    with observing(gatherer):
        yield gatherer
