"""Replica groups: which ranks carry out a collective with each other, and in which order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nkw.errors import RuleViolation, rule
from simulate.memory import NKIObject


@dataclass(frozen=True)
class ReplicaGroup(NKIObject):
    """Disjoint lists of ranks, such as [[0, 1], [2, 3]]: each list carries out a collective of its own, in its order.

    Raises RuleViolation if `groups` is no list of disjoint, non-empty lists of ranks.
    """

    groups: Any

    def __post_init__(self) -> None:
        well_formed_group(self.groups)
        object.__setattr__(self, "groups", tuple(tuple(int(rank) for rank in group) for group in self.groups))

    def find_group(self, rank: int) -> tuple[int, ...]:
        """Return the list of ranks that contains `rank`; raise RuleViolation if no list does."""
        for group in self.groups:
            if rank in group:
                return group
        from_one = rank == 0 and min(member for group in self.groups for member in group) == 1
        raise RuleViolation(
            rank_in_group,
            f"rank {rank}, which calls it, lies outside every group: {[list(g) for g in self.groups]}",
            hint="count the ranks from 0"
            if from_one
            else f"list rank {rank}, or let only ranks of a group call it",
        )


@rule("NKW-GROUP-FORM")
def well_formed_group(groups: Any) -> None:
    """A replica group is a list of disjoint, non-empty lists of ranks.

    Raises RuleViolation otherwise.
    """
    try:
        ranks = [int(rank) for group in groups for rank in group]
        sizes = [len(group) for group in groups]
    except (TypeError, ValueError):
        raise RuleViolation(
            well_formed_group, f"{groups!r:.80}", hint="nki.collectives.ReplicaGroup([[0, 1, 2, 3]])"
        ) from None
    if not sizes or 0 in sizes or len(set(ranks)) != len(ranks) or min(ranks) < 0:
        raise RuleViolation(well_formed_group, f"{groups!r:.80}", hint="every rank once, no empty list")


@rule("NKW-GROUP-TYPE", hint="nki.collectives.ReplicaGroup([[0, 1]])")
def is_replica_group(group: Any) -> None:
    """replica_group is a ReplicaGroup.

    Raises RuleViolation otherwise.
    """
    if not isinstance(group, ReplicaGroup):
        raise RuleViolation(is_replica_group, f"{group!r:.60}")


@rule("NKW-GROUP-MEMBER")
def rank_in_group() -> None:
    """A rank that calls a collective is in one of the replica group's lists.

    Carries the rule's sentence and does nothing when called; callers raise RuleViolation with it.
    """
