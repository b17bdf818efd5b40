"""`nki.collectives`: instructions that the ranks of a world carry out together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from simulate.isa.book import COLLECTIVES, Planner, documented_signature
from simulate.isa.collectives import ReplicaGroup
from simulate.nki.missing import not_yet
from simulate.run import NkiInstruction
from simulate.run.issue import call_collective


def _collective(planner: Planner) -> Callable[..., NkiInstruction]:
    def collective(*args: Any, **kwargs: Any) -> NkiInstruction:
        return call_collective(planner, args, kwargs)

    collective.__name__ = collective.__qualname__ = planner.__name__
    collective.__doc__ = planner.__doc__
    collective.__signature__ = documented_signature(planner, 2)  # type: ignore[attr-defined]
    return collective


globals().update({name: _collective(planner) for name, planner in COLLECTIVES.items()})


def __getattr__(name: str) -> Any:
    return not_yet("nki.collectives", name)


__all__ = ["ReplicaGroup", *COLLECTIVES]
