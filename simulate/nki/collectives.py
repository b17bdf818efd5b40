"""`nki.collectives`: instructions that the ranks of a world carry out together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from simulate.isa.book import COLLECTIVES, Planner, documented_signature
from simulate.isa.collectives import ReplicaGroup
from simulate.isa.collectives.group import is_replica_group
from simulate.memory.registers import VirtualRegister
from simulate.nki import isa
from simulate.nki.missing import not_yet
from simulate.run import NkiInstruction, current_core
from simulate.run.issue import call_collective


def _collective(planner: Planner) -> Callable[..., NkiInstruction]:
    def collective(*args: Any, **kwargs: Any) -> NkiInstruction:
        return call_collective(planner, args, kwargs)

    collective.__name__ = collective.__qualname__ = planner.__name__
    collective.__doc__ = planner.__doc__
    collective.__signature__ = documented_signature(planner, 2)  # type: ignore[attr-defined]
    return collective


globals().update({name: _collective(planner) for name, planner in COLLECTIVES.items()})


def rank_id(name: str | None = None) -> VirtualRegister:
    """A register with the number of the rank that runs this kernel."""
    return isa.register_alloc(current_core().rank.number)


def collective_permute_implicit_current_processing_rank_id(
    iteration_id: int, replica_group: ReplicaGroup, channel_id: int = 0, name: str | None = None
) -> VirtualRegister:
    """A register with the rank whose data a ring processes: in iteration i the one i steps back, in 0 this rank."""
    is_replica_group(replica_group)
    rank = current_core().rank.number
    ring = replica_group.of(rank)
    return isa.register_alloc(ring[(ring.index(rank) - iteration_id) % len(ring)])


def __getattr__(name: str) -> Any:
    return not_yet("nki.collectives", name)


__all__ = [
    "ReplicaGroup",
    "collective_permute_implicit_current_processing_rank_id",
    "rank_id",
    *COLLECTIVES,
]
