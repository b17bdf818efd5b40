"""Notes: observed facts about the values of operands, and the findings that report them.

The observers (`observed_…`) make notes while a launch runs; detectors turn them into findings afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from simulate.check.findings import Finding, FindingKind, describe_access, make_finding
from simulate.run.stream import READ, Stream


@dataclass(frozen=True, slots=True)
class Note:
    """Observed fact about the values of one operand: its event, its tensor, and the fact as a clause of a message."""

    event: int
    tensor: int
    seen: str


def report_notes(
    stream: Stream,
    finding_kind: FindingKind,
    notes: Sequence[Note],
    hint: str | Callable[[str], str],
    shows_writes: bool = False,
) -> list[Finding]:
    """Return one finding for each line that has a note; of several notes of a line the first one is reported.

    Args:
        stream: The stream of the notes' events.
        finding_kind: The kind of the findings.
        notes: The notes, in the order of their events.
        hint: What to do, or a function that returns it for the text of a note.
        shows_writes: Whether the finding shows the tensor as a written operand, not as a read operand.
    """
    findings = []
    lines: set[int] = set()
    for note in notes:
        if stream.line_ids[note.event] in lines:
            continue
        lines.add(stream.line_ids[note.event])
        record = stream.tensors[note.tensor]
        candidates = [access for access in stream.accesses(note.event) if access.tensor == note.tensor]
        access = next((a for a in candidates if (a.mode != READ) is shows_writes), candidates[0])
        findings.append(
            make_finding(
                finding_kind,
                f"{record.name} {record.shape} {record.dtype}: {note.seen}",
                stream.event(note.event).where,
                (describe_access(stream, note.event, access),),
                hint=hint(note.seen) if callable(hint) else hint,
            )
        )
    return findings
