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
    """The results, by rank, of every rendezvous that is complete; `waiting` has the rendezvous and operands by rank."""
    given: dict[int, list[Any]] = {}
    for number, (rendezvous, operands) in waiting.items():
        if number in given:
            continue
        if peers is not None and rendezvous.by_rank and len(rendezvous.members) > 1:
            given[number] = _complete_with_peers(peers, rendezvous, operands)
            continue
        if len(rendezvous.members) == 1:
            given[number] = rendezvous.exchange([operands])[0]
            continue
        here = [waiting.get(member) for member in rendezvous.members]
        members = [each for each in here if each is not None and each[0].key == rendezvous.key]
        if len(members) == len(here):
            results = rendezvous.exchange([own for _, own in members])
            given.update(zip(rendezvous.members, results))
    assert given, "recorded ranks wait for each other"
    return given


def _complete_with_peers(peers: Processes, rendezvous: Rendezvous, operands: list[Any]) -> list[Any]:
    """The results of this process's rank in a rendezvous with ranks of other processes. Raises RendezvousMismatch."""
    key = (True, 0, rendezvous.key)  # as `issue` names it for the only core of a rank
    _, arrived = peers.wait([peers.post(replace(rendezvous, key=key), operands, _REPLAYED)])
    check_agreement(rendezvous.members, arrived)  # another rank may replay another program
    results = rendezvous.exchange([given for _, given, _ in arrived])
    return results[rendezvous.members.index(peers.rank)]
