"""Rendezvous of replayed ranks, in this process or with ranks in other processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nkw.errors import Location
from simulate.isa.plan import Rendezvous
from simulate.run.processes import Processes
from simulate.run.scheduler import check_agreement

_REPLAYED = Location("", 0, "a replayed launch")


def complete_rendezvous(
    waiting: Mapping[int, tuple[Rendezvous, list[Any]]], peers: Processes | None
) -> dict[int, list[Any]]:
    """Exchange the operands of every rendezvous at which all members wait, and return the results by rank.

    Args:
        waiting: The rendezvous and the operands of each rank of this process that waits.
        peers: The processes of the other ranks, or None if this process has all ranks.

    Returns:
        The results of each rank whose rendezvous is complete; at least one rank.

    Raises:
        RendezvousMismatch: A rank of another process waits at another rendezvous.
    """
    rank_results: dict[int, list[Any]] = {}
    for rank, (rendezvous, operands) in waiting.items():
        if rank in rank_results:
            continue
        if peers is not None and rendezvous.by_rank and len(rendezvous.members) > 1:
            rank_results[rank] = _complete_with_peers(peers, rendezvous, operands)
            continue
        if len(rendezvous.members) == 1:
            rank_results[rank] = rendezvous.exchange([operands])[0]
            continue
        arrivals = [waiting.get(member) for member in rendezvous.members]
        members = [
            arrival for arrival in arrivals if arrival is not None and arrival[0].key == rendezvous.key
        ]
        if len(members) == len(arrivals):
            results = rendezvous.exchange([member_operands for _, member_operands in members])
            rank_results.update(zip(rendezvous.members, results))
    assert rank_results, "recorded ranks wait for each other"
    return rank_results


def _complete_with_peers(peers: Processes, rendezvous: Rendezvous, operands: list[Any]) -> list[Any]:
    """Return the results of this process's rank in a rendezvous with ranks of other processes; waits for them.

    Raises:
        RendezvousMismatch: A rank of another process waits at another rendezvous.
    """
    key = (True, 0, rendezvous.key)  # as `issue` names it for the only core of a rank
    _, arrived = peers.wait([peers.post(replace(rendezvous, key=key), operands, _REPLAYED)])
    check_agreement(rendezvous.members, arrived)  # another rank may replay another program
    results = rendezvous.exchange([member_operands for _, member_operands, _ in arrived])
    return results[rendezvous.members.index(peers.rank)]
