"""`race`: accesses that nothing orders: two cores on shared HBM, a DMA within one tensor, rows scattered twice.

Rendezvous order the cores of a rank: core_barrier and sendrecv. Both cores take part in each of them. So one
number says when an access happens: how many rendezvous its core had passed. Accesses of two cores with equal
numbers are concurrent. A core_barrier orders only the accesses to the tensor that it names.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from simulate.check.benign_races import Use, reads_what_it_wrote, write_same_values
from simulate.check.evidence import Evidence
from simulate.check.findings import (
    Finding,
    Severity,
    describe_access,
    make_finding,
    register_kind,
    suggest_barrier,
)
from simulate.isa.plan import Synchronization
from simulate.run import Launch
from simulate.run.stream import READ, Access, Stream

RACE = register_kind(
    "NKW-RACE",
    Severity.error,
    "Two cores access the same bytes of shared HBM, at least one writes, and no barrier or sendrecv lies between.",
)
WRONG_BARRIER = register_kind(
    "NKW-RACE-BARRIER",
    Severity.warning,
    "Only barriers that name other tensors lie between two accesses; core_barrier orders accesses to its data.",
)
DMA_OVERLAP = register_kind(
    "NKW-DMA-OVERLAP",
    Severity.error,
    "The source and the destination of a DMA overlap; its descriptors run in any order.",
)
SCATTER_TWICE = register_kind(
    "NKW-SCATTER-TWICE",
    Severity.warning,
    "A scatter writes each element at most once; which of two values stays is undefined.",
)


def detect(launch: Launch, evidence: Evidence) -> list[Finding]:
    """Return findings for races between the two cores of a rank, and for hazards inside a DMA."""
    findings: list[Finding] = []
    by_rank: dict[int, list[Stream]] = defaultdict(list)
    for stream in launch.streams:
        by_rank[stream.rank].append(stream)
        findings += _find_hazards_in_dmas(stream, evidence)
    for streams in by_rank.values():
        if len(streams) == 2:
            findings += _find_races(streams[0], streams[1], evidence)
    return findings


def _find_races(first_stream: Stream, second_stream: Stream, evidence: Evidence) -> list[Finding]:
    both = sorted(set(first_stream.rendezvous.values()) & set(second_stream.rendezvous.values()))
    barriers = _list_barrier_tensors(first_stream, both)
    first_uses, second_uses = (
        _list_shared_uses(stream, evidence, set(both)) for stream in (first_stream, second_stream)
    )
    findings: list[Finding] = []
    seen: set[tuple[object, ...]] = set()
    for tensor in sorted(first_uses.keys() & second_uses.keys()):
        rights = second_uses[tensor]
        boxes = np.array([_get_box(use.access) for use in rights])
        writes = np.array([use.writes for use in rights])
        for left in first_uses[tensor]:
            near = _find_overlaps(_get_box(left.access), boxes) & (writes | left.writes)
            for right in [rights[index] for index in np.flatnonzero(near)]:
                low, high = sorted((left.passed, right.passed))
                between = barriers[low:high]
                if any(named is None or named == tensor for named in between):
                    continue
                key = (
                    first_stream.line_ids[left.event],
                    second_stream.line_ids[right.event],
                    left.writes,
                    right.writes,
                    bool(between),
                    write_same_values(left, right),
                )
                if key in seen or not left.footprint.meets(right.footprint):
                    continue
                if reads_what_it_wrote(left, right, first_uses[tensor], rights):
                    continue
                seen.add(key)
                findings.append(_report_race(first_stream, left, second_stream, right, bool(between)))
    return _keep_one_per_lines(findings)


def _keep_one_per_lines(findings: list[Finding]) -> list[Finding]:
    """Return one finding for each pair of lines and tensor, code and severity, so that one line does not give three.

    A race of two writes is preferred to a race of a write with a read.
    """
    chosen: dict[tuple[object, ...], Finding] = {}
    for finding in findings:
        lines = frozenset(access.where for access in finding.touches)
        key = finding.code, finding.severity, lines, finding.touches[0].tensor
        both_write = all(access.verb != "reads" for access in finding.touches)
        if key not in chosen or (both_write and any(t.verb == "reads" for t in chosen[key].touches)):
            chosen[key] = finding
    return list(chosen.values())


def _report_race(
    first_stream: Stream, left: Use, second_stream: Stream, right: Use, barrier: bool
) -> Finding:
    record = first_stream.tensors[left.access.tensor]
    later = (second_stream, right) if right.writes <= left.writes else (first_stream, left)
    touches = (
        describe_access(first_stream, left.event, left.access),
        describe_access(second_stream, right.event, right.access),
    )
    where = later[0].event(later[1].event).where
    conflict = "both cores write" if left.writes and right.writes else "one core writes and the other reads"
    if barrier:
        return make_finding(
            WRONG_BARRIER,
            f"{conflict} {record.name} {record.shape}, and the barriers between the two accesses name other tensors",
            where,
            touches,
            hint=f"nisa.core_barrier(data={record.name}, cores=(0, 1))",
        )
    if write_same_values(left, right):
        return make_finding(
            RACE,
            f"both cores write the same values to {record.name} {record.shape} in {record.buffer.value}",
            where,
            touches,
            hint="let each core compute and write its own part",
            severity=Severity.warning,
        )
    return make_finding(
        RACE,
        f"{conflict} {record.name} {record.shape} in {record.buffer.value}, and nothing orders the two accesses",
        where,
        touches,
        hint=suggest_barrier(record.name),
    )


def _list_shared_uses(stream: Stream, evidence: Evidence, rendezvous: set[int]) -> dict[int, list[Use]]:
    """Return, by tensor, the accesses of a core to shared HBM, one for each line, box and number of rendezvous passed.

    Args:
        stream: The stream of the core.
        evidence: The evidence of the launch.
        rendezvous: The rendezvous of both cores of the rank; others are not counted.
    """
    uses_by_key: dict[int, dict[tuple[object, ...], Use]] = defaultdict(dict)
    passed = 0
    shared, onto_themselves = (
        evidence.get_core(stream).shared,
        evidence.get_core(stream).transfers.onto_themselves,
    )
    for event in range(len(stream)):
        if stream.rendezvous.get(event) in rendezvous:
            passed += 1
            continue
        for footprint, writes in shared.get(event, ()):
            access = next(
                a
                for a in stream.accesses(event)
                if a.tensor == footprint.tensor and (a.mode != READ) == writes
            )
            itself = footprint if footprint.elements is None else event
            key = (stream.line_ids[event], access, passed, itself, footprint.digest)
            is_fence = event in onto_themselves and stream.effects(event).copies
            uses_by_key[footprint.tensor].setdefault(key, Use(event, access, passed, footprint, is_fence))
    return {tensor: list(uses.values()) for tensor, uses in uses_by_key.items()}


def _list_barrier_tensors(stream: Stream, rendezvous: list[int]) -> list[int | None]:
    """Return, in program order, the tensor that each rendezvous orders; None for a sendrecv: it orders all.

    Args:
        stream: The stream of a core that takes part in all of them.
        rendezvous: Serial numbers of the rendezvous, in any order.
    """
    named: list[int | None] = []
    event_of = {serial: event for event, serial in stream.rendezvous.items()}
    for serial in sorted(rendezvous, key=lambda serial: event_of[serial]):
        event = event_of[serial]
        is_barrier = stream.effects(event).synchronization is Synchronization.barrier
        named.append(stream.accesses(event)[0].tensor if is_barrier else None)
    return named


def _get_box(access: Access) -> tuple[int, int, int, int]:
    return access.first_row, access.end_row, access.first_byte, access.end_byte


def _find_overlaps(box: tuple[int, int, int, int], boxes: np.ndarray) -> np.ndarray:
    """Return a bool array of the boxes that overlap a box.

    Args:
        box: First row, end row, first byte, end byte.
        boxes: The other boxes, int64 [boxes, 4], in the same order.
    """
    return (boxes[:, 0] < box[1]) & (box[0] < boxes[:, 1]) & (boxes[:, 2] < box[3]) & (box[2] < boxes[:, 3])


def _find_hazards_in_dmas(stream: Stream, evidence: Evidence) -> list[Finding]:
    seen = evidence.get_core(stream)
    findings = []
    lines: set[int] = set()
    for event, tensor in seen.transfers.overlapping:
        if stream.line_ids[event] in lines:
            continue
        lines.add(stream.line_ids[event])
        record = stream.tensors[tensor]
        findings.append(
            make_finding(
                DMA_OVERLAP,
                f"{stream.op_names[stream.ops[event]]} reads and writes the same bytes of {record.name} "
                f"{record.shape}; descriptors of a DMA run in any order",
                stream.event(event).where,
                [describe_access(stream, event, a) for a in stream.accesses(event) if a.tensor == tensor],
                hint="copy through a second tensor",
            )
        )
    for note in seen.transfers.repeated_rows:
        if stream.line_ids[note.event] in lines:
            continue
        lines.add(stream.line_ids[note.event])
        record = stream.tensors[note.tensor]
        op = stream.op_names[stream.ops[note.event]]
        promised = stream.effects(note.event).unique_rows
        findings.append(
            make_finding(
                SCATTER_TWICE,
                f"{op} scatters to {record.name} {record.shape}: {note.seen}"
                + (", although unique_indices=True promises that none is" if promised else ""),
                stream.event(note.event).where,
                [
                    describe_access(stream, note.event, a)
                    for a in stream.accesses(note.event)
                    if a.tensor == note.tensor
                ],
                hint="scatter to distinct rows that do not overlap; send surplus rows out of range with oob_mode skip",
                severity=Severity.error if promised else None,
            )
        )
    return findings
