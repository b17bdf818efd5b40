"""`nki.collectives`: the collectives of the instruction book, their prepare and trigger halves (0.7), and rank numbers.

The ranks of a world carry out a collective together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nkw.errors import RuleViolation, rule
from simulate.isa.book import COLLECTIVES, Planner, documented_signature
from simulate.isa.collectives.ring import CHANNELS_MAX
from simulate.isa.immediates import parse_integer
from simulate.isa.plan import name_is_text
from simulate.isa.replica_group import ReplicaGroup, is_replica_group
from simulate.memory.registers import VirtualRegister
from simulate.nki import isa
from simulate.nki.arguments import judge
from simulate.nki.missing import not_yet
from simulate.run import NkiInstruction, current_core
from simulate.run.issue import issue_collective, prepare_collective


def _collective(planner: Planner) -> Callable[..., NkiInstruction]:
    def collective(*args: Any, **kwargs: Any) -> NkiInstruction:
        return issue_collective(planner, args, kwargs)

    collective.__name__ = collective.__qualname__ = planner.__name__
    collective.__doc__ = planner.__doc__
    collective.__signature__ = documented_signature(planner, 2)  # type: ignore[attr-defined]
    return collective


globals().update({name: _collective(planner) for name, planner in COLLECTIVES.items()})


def rank_id(name: str | None = None) -> VirtualRegister:
    """Return a new register that contains the number of the rank that runs this kernel."""
    judge("rank_id", (name_is_text, name))
    return isa.register_alloc(current_core().rank.number)


def collective_permute_implicit_current_processing_rank_id(
    iteration_id: int, replica_group: ReplicaGroup, channel_id: int = 0, name: str | None = None
) -> VirtualRegister:
    """Return a new register that contains the rank whose data this rank holds in a step of the ring.

    In iteration i that is the rank i positions before this one in the group's list, in iteration 0 this rank.

    Args:
        iteration_id: Step of the ring, from 0 on.
        replica_group: The group whose list is the ring.
        channel_id: Channel of the ring, 0 to 3; does not change the result.
        name: Name of the instruction.

    Raises:
        RuleViolation: An argument is of another type or range, or the rank is in no list of the group.
    """
    is_replica_group(replica_group)
    is_iteration(iteration_id)
    judge(
        "collective_permute_implicit_current_processing_rank_id",
        (name_is_text, name),
        (is_channel, channel_id),
    )
    rank = current_core().rank.number
    ring = replica_group.find_group(rank)
    return isa.register_alloc(ring[(ring.index(rank) - iteration_id) % len(ring)])


@rule("NKW-RING-ITERATION", hint="the counter of the kernel's loop over range(len(group))")
def is_iteration(iteration_id: Any) -> None:
    """iteration_id is an integer, the step of the ring from 0 on.

    Raises RuleViolation otherwise.
    """
    if parse_integer(iteration_id, 0, 2**31 - 1) is None:
        raise RuleViolation(is_iteration, f"iteration_id={iteration_id!r:.40}")


@rule("NKW-RING-CHANNEL", limit=f"0 to {CHANNELS_MAX - 1}", hint="channel_id=0")
def is_channel(channel_id: Any) -> None:
    """channel_id is the number of a channel, of which a ring has at most four.

    Raises RuleViolation otherwise.
    """
    if parse_integer(channel_id, 0, CHANNELS_MAX - 1) is None:
        raise RuleViolation(is_channel, f"channel_id={channel_id!r:.40}")


def _prepare(planner: Planner) -> Callable[..., NkiInstruction]:
    def prepare(*args: Any, **kwargs: Any) -> NkiInstruction:
        core = current_core()
        core.rank.level.require(f"ncc.{planner.__name__}_prepare")
        one_prepare(core.prepared)
        instruction = prepare_collective(planner, args, kwargs)
        core.prepared = Prepared(instruction, planner, args, {**kwargs, "name": None})
        return instruction

    prepare.__name__ = prepare.__qualname__ = f"{planner.__name__}_prepare"
    prepare.__doc__ = (
        f"Prepare {planner.__name__} (0.7): read its metadata, which must be there; the data may come later. "
        "One trigger must follow before the next prepare of any kind."
    )
    prepare.__signature__ = documented_signature(planner, 2)  # type: ignore[attr-defined]
    return prepare


def _trigger(planner: Planner) -> Callable[..., NkiInstruction]:
    def trigger(prepare_instr: NkiInstruction, name: str | None = None) -> NkiInstruction:
        core = current_core()
        core.rank.level.require(f"ncc.{planner.__name__}_trigger")
        prepared = core.prepared
        triggers_its_prepare(planner.__name__, prepared, prepare_instr)
        core.prepared = None
        return issue_collective(planner, prepared.args, {**prepared.kwargs, "name": name})

    trigger.__name__ = trigger.__qualname__ = f"{planner.__name__}_trigger"
    trigger.__doc__ = f"Move the data of {planner.__name__} (0.7), with the arguments of its prepare."
    return trigger


@dataclass(frozen=True)
class Prepared:
    """Collective that was prepared, and waits for its trigger with the arguments of the prepare."""

    instruction: NkiInstruction
    planner: Planner
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@rule("NKW-PREPARE-ONE")
def one_prepare(waiting: Any) -> None:
    """Prepares share a single slot: each is followed by its trigger before the next.

    Raises RuleViolation if a prepared collective waits for its trigger.
    """
    if waiting is not None:
        raise RuleViolation(
            one_prepare, f"a prepare after {waiting.planner.__name__}_prepare", hint="trigger the first one"
        )


@rule("NKW-PREPARE-TRIGGER", hint="pass the instruction that the prepare of this collective returned, once")
def triggers_its_prepare(collective: str, waiting: Any, instruction: Any) -> None:
    """A trigger takes the instruction that its own prepare returned, once.

    Raises RuleViolation otherwise.
    """
    if waiting is None or waiting.instruction is not instruction or waiting.planner.__name__ != collective:
        raise RuleViolation(triggers_its_prepare, f"{collective}_trigger of {instruction!r:.60}")


_SPLIT = ("all_gather_v", "all_to_all_v")
globals().update({f"{name}_prepare": _prepare(COLLECTIVES[name]) for name in _SPLIT})
globals().update({f"{name}_trigger": _trigger(COLLECTIVES[name]) for name in _SPLIT})


def __getattr__(name: str) -> Any:
    return not_yet("nki.collectives", name)


__all__ = [
    "ReplicaGroup",
    "collective_permute_implicit_current_processing_rank_id",
    "rank_id",
    *(f"{name}_{half}" for name in _SPLIT for half in ("prepare", "trigger")),
    *COLLECTIVES,
]
