"""An observer looks on while kernels run: it sees what is launched, every instruction and its operands, and the end.

Nothing is kept, and an instruction costs one comparison, while no observer is present. Values, exact access patterns
and run-time indices are gone after a launch; a detector that needs them is an observer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from simulate.errors import NkwError
from simulate.isa.plan import Plan
from simulate.memory import Storage

if TYPE_CHECKING:
    from simulate.run.launch import Launch, LaunchRequest
    from simulate.run.machine import NeuronCore


class Observer(Protocol):
    """What is told about a launch while it runs."""

    def began(
        self, call: LaunchRequest, cores: Sequence[NeuronCore], inputs: Sequence[Sequence[Storage]]
    ) -> None:
        """The cores of a launch are about to run; `inputs` has the storage of every array given to each rank."""

    def issuing(self, core: NeuronCore, plan: Plan, operands: Sequence[Any]) -> None:
        """An instruction is about to take effect as event `len(core.stream)`; its operands are still unchanged."""

    def issued(self, core: NeuronCore, plan: Plan, operands: Sequence[Any]) -> None:
        """It has taken effect and is about to be recorded; operands may share memory with what it wrote."""

    def ended(self, launch: Launch, returned: Sequence[Any]) -> None:
        """A launch is over; `returned` has what the kernel returned on each rank, as tensors of the simulator."""

    def refused(self, error: NkwError) -> None:
        """A launch did not come to its end, whether or not the caller goes on without it."""


_present: list[Observer] = []


def present() -> Observer | None:
    """The observer of the launches that are made now, if any."""
    return _present[-1] if _present else None


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Let `observer` look on at every launch made inside a `with` block; such launches are never replayed."""
    _present.append(observer)
    try:
        yield
    finally:
        _present.remove(observer)
