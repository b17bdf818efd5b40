"""Observer that gathers the evidence of launches, and repeats each launch on request."""

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
    """Observer of many launches.

    `launches` has each launch that ended, with its Evidence; `errors` has the errors that stopped launches.
    """

    sees_instructions = True
    keeps_calls = True

    def __init__(self, orders: int = 0, seeds: int = 0) -> None:
        """Set how often each launch is executed again after it has ended.

        Args:
            orders: Number of legal orders of the instructions to try for each launch.
            seeds: Number of random core schedules to try for each launch of several cores.

        Raises:
            InvalidArgument: orders or seeds is negative.
        """
        if orders < 0 or seeds < 0:
            raise InvalidArgument(
                "NKW-CHECK-COUNT",
                f"orders={orders}, seeds={seeds}: a count is negative; give 0 or more of each",
            )
        self.launches: list[tuple[Launch, Evidence]] = []
        self.errors: list[NkwError] = []
        self._orders, self._seeds = orders, seeds
        self._start_evidence()

    def _start_evidence(self) -> None:
        self._evidence = Evidence()
        self._arguments: list[list[Snapshot]] | None = None
        self._repeatable: interleavings.Repeatable | None = None

    def began(
        self, request: LaunchRequest, cores: Sequence[NeuronCore], inputs: Sequence[Sequence[Storage]]
    ) -> None:
        """Start the evidence of a launch; evidence of an earlier launch that did not end is discarded.

        Copies of the arguments are kept if the launch is to be repeated. A launch whose other ranks run in
        other processes is never repeated.
        """
        self._start_evidence()
        if request.peers is not None:
            return  # the processes of the other ranks would have to repeat the launch as well
        if self._orders:
            self._arguments = [[Snapshot.take(storage) for storage in rank] for rank in inputs]
        if self._seeds and len(cores) > 1:
            self._repeatable = interleavings.Repeatable(request)

    def issuing(self, core: NeuronCore, issue: Issue, operands: Sequence[Any]) -> None:
        """Pass the instruction on to the evidence of the running launch."""
        self._evidence.issuing(core, issue, operands)

    def issued(self, core: NeuronCore, issue: Issue, operands: Sequence[Any]) -> None:
        """Pass the instruction on to the evidence of the running launch.

        A launch that is to be repeated under other core schedules gets the instruction in its trace as well.
        """
        self._evidence.issued(core, issue, operands)
        if self._repeatable is not None:
            self._repeatable.trace.issued(core, issue, operands)

    def ended(self, launch: Launch, returned: Sequence[Any]) -> None:
        """Complete the evidence, append it to `launches`, and repeat the launch if orders or seeds were requested."""
        evidence, arguments, repeatable = self._evidence, self._arguments, self._repeatable
        evidence.ended(launch, returned)
        self.launches.append((launch, evidence))
        self._start_evidence()
        if repeatable is not None:
            evidence.varied += interleavings.find_schedule_dependence(
                repeatable, launch, evidence.returned, self._seeds
            )
        if arguments is not None:
            evidence.varied += orders.find_order_dependence(ReorderedLaunch(launch, arguments), self._orders)

    def refused(self, error: NkwError) -> None:
        """Append to `errors` an error that stopped a launch, even if the script catches it and continues."""
        self.errors.append(error)


@contextmanager
def gathered(orders: int = 0, seeds: int = 0) -> Iterator[Gatherer]:
    """Gather evidence of the launches made inside a `with` block.

    Args:
        orders: Number of legal orders to execute each launch in; its outputs must not depend on the order.
        seeds: Number of random core schedules, with the seeds 1, 2, …, to repeat each launch of several cores
            under.

    Yields:
        The observer, whose `launches` and `errors` grow while the block runs.

    Raises:
        InvalidArgument: orders or seeds is negative.
    """
    gatherer = Gatherer(orders, seeds)
    with observing(gatherer):
        yield gatherer
