"""Likely cause of a deadlock, or of a rendezvous whose members disagree.

A rendezvous is a collective, a sendrecv or a core_barrier: each of its members waits for the others. Both
errors end a launch before its streams are complete. So the finding is made from the error's text, which has a
line for each core.
"""

from __future__ import annotations

import re

from nkw.errors import RULES, Deadlock, Location, RendezvousMismatch
from simulate.check.findings import Finding, Severity, make_finding, register_kind

_WAITING_LINE = re.compile(r" at (?P<file>.+):(?P<line>\d+) in (?P<function>\S+) for ")

DEADLOCK = register_kind(
    "NKW-DEADLOCK", Severity.error, "Every core that has not ended waits for another one."
)
MISMATCH = register_kind(
    "NKW-RENDEZVOUS",
    Severity.error,
    "The members of a collective, a sendrecv or a barrier agree on operation, shapes, dtypes and groups.",
)
assert not {DEADLOCK.code, MISMATCH.code} & RULES.keys()


def explain_deadlock(error: Deadlock | RendezvousMismatch) -> Finding:
    """Convert a deadlock, or a rendezvous whose members disagree, into a finding with a hint.

    The hint for a deadlock depends on the cores: whether a named member does not exist, a core has ended, or
    the cores wait in different instructions. The finding is at the line of the error, else at the line of the
    first waiting core.
    """
    if isinstance(error, RendezvousMismatch):
        return make_finding(
            MISMATCH,
            error.message,
            error.where,
            hint="give every member the same operation, shapes, dtypes and groups",
            callers=error.callers,
        )
    lines = error.message.split("\n")[1:]
    ended = [line for line in lines if line.endswith("has ended")]
    waits = [line for line in lines if " waits in " in line]
    absent = [line for line in lines if line.strip().startswith("there is no ")]
    if absent:
        hint = "name only members that the launch has, or launch it on more of them"
    elif ended and waits:
        hint = "let every core make the call: move it out of the branch or loop that only some cores run"
    elif len({line.split(" waits in ")[1].split(" ")[0] for line in waits}) > 1:
        hint = "let all cores make the same calls in the same order"
    else:
        hint = "give the calls that wait for each other the same members and the same pipe_id"
    return make_finding(
        DEADLOCK, error.message, error.where or _find_waiting_line(waits), hint=hint, callers=error.callers
    )


def _find_waiting_line(waits: list[str]) -> Location | None:
    """Return the line of the kernel at which the first waiting core stopped, None if no text names a line."""
    for line in waits:
        match = _WAITING_LINE.search(line)
        if match is not None:
            return Location(match["file"], int(match["line"]), match["function"])
    return None
