"""Meetings of replayed ranks, which are here or in other processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from simulate.errors import Location
from simulate.isa.plan import Meeting
from simulate.run.processes import Processes
from simulate.run.turns import check_agreement

_REPLAYED = Location("", 0, "a replayed launch")


def hold(
    waiting: Mapping[int, tuple[Meeting, list[Any]]], elsewhere: Processes | None
) -> dict[int, list[Any]]:
    """What the meetings of ranks that wait, with their operands, give each member; some may wait for others yet."""
    given: dict[int, list[Any]] = {}
    for number, (meeting, operands) in waiting.items():
        if number in given:
            continue
        if elsewhere is not None and meeting.by_rank and len(meeting.members) > 1:
            given[number] = _met_elsewhere(elsewhere, meeting, operands)
            continue
        if len(meeting.members) == 1:
            given[number] = meeting.exchange([operands])[0]
            continue
        here = [waiting.get(member) for member in meeting.members]
        members = [each for each in here if each is not None and each[0].place == meeting.place]
        if len(members) == len(here):
            results = meeting.exchange([own for _, own in members])
            given.update(zip(meeting.members, results))
    assert given, "recorded ranks wait for each other"
    return given


def _met_elsewhere(elsewhere: Processes, meeting: Meeting, operands: list[Any]) -> list[Any]:
    """What the meeting of this process's rank with those of other processes gives it. Raises MeetingMismatch."""
    place = (True, 0, meeting.place)  # as `issue` names it for the only core of a rank
    _, arrived = elsewhere.wait([elsewhere.post(replace(meeting, place=place), operands, _REPLAYED)])
    check_agreement(meeting.members, arrived)  # another rank may not be replaying what this one does
    results = meeting.exchange([given for _, given, _ in arrived])
    return results[meeting.members.index(elsewhere.rank)]
