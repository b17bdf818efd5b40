"""A note: what an observer saw of the values of one operand or result; and the findings of notes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from simulate.check.findings import Finding, FindingKind, found, touch
from simulate.run.stream import READ, Stream


@dataclass(frozen=True, slots=True)
class Note:
    """An observation about the values of one operand: its event, its tensor and the observed fact as text."""

    event: int
    tensor: int
    seen: str


def note_findings(
    stream: Stream,
    what: FindingKind,
    notes: Sequence[Note],
    hint: str | Callable[[str], str],
    of_results: bool = False,
) -> list[Finding]:
    """Return one finding for each line that a note names.

    Args:
        stream: The stream of the notes' events.
        what: The kind of the findings.
        notes: The notes, in the order of their events.
        hint: The remedy, or a function that gives it for the text of a note.
        of_results: Whether the finding shows the tensor as it is written, and not as it is read.
    """
    findings = []
    lines: set[int] = set()
    for note in notes:
        if stream.line_ids[note.event] in lines:
            continue
        lines.add(stream.line_ids[note.event])
        record = stream.tensors[note.tensor]
        candidates = [access for access in stream.accesses(note.event) if access.tensor == note.tensor]
        access = next((each for each in candidates if (each.kind != READ) is of_results), candidates[0])
        findings.append(
            found(
                what,
                f"{record.name} {record.shape} {record.dtype}: {note.seen}",
                stream.event(note.event).where,
                (touch(stream, note.event, access),),
                hint=hint(note.seen) if callable(hint) else hint,
            )
        )
    return findings
