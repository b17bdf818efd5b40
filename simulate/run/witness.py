"""A witness looks on while kernels run: it sees every instruction with its operands, and what a launch returns.

Nothing is kept, and an instruction costs one comparison, while no witness is present. Values, exact access patterns
and run-time indices are gone after a launch; a detector that needs them is a witness.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from simulate.isa.plan import Plan

if TYPE_CHECKING:
    from simulate.run.launch import Launch
    from simulate.run.machine import NeuronCore


class Witness(Protocol):
    """What is told about a launch while it runs."""

    def issued(self, core: NeuronCore, plan: Plan, operands: Sequence[Any]) -> None:
        """An instruction has taken effect and is about to be recorded as event `len(core.stream)`."""

    def ended(self, launch: Launch, returned: Sequence[Any]) -> None:
        """A launch is over; `returned` has what the kernel returned on each rank, as tensors of the simulator."""


_present: list[Witness] = []


def present() -> Witness | None:
    """The witness of the launches that are made now, if any."""
    return _present[-1] if _present else None


@contextmanager
def witnessed(witness: Witness) -> Iterator[None]:
    """Let `witness` look on at every launch made inside a `with` block; such launches are never replayed."""
    _present.append(witness)
    try:
        yield
    finally:
        _present.remove(witness)
