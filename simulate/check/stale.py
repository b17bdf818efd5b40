"""`stale`: results that are overwritten before anything reads them, and leftovers of earlier loads in a tile.

Leftovers are elements of an earlier, larger fill of a tile beyond the end of a later, smaller fill.
"""

from __future__ import annotations

from simulate.check.evidence import Evidence
from simulate.check.findings import Finding, Severity, describe_access, make_finding, register_kind
from simulate.check.footprint import Footprint
from simulate.check.observed_leftovers import Leftover, StaleRead
from simulate.memory import MemoryRegion
from simulate.run import Launch
from simulate.run.stream import ACCUMULATE, READ, WRITE, Access, Stream

UNREAD = register_kind(
    "NKW-UNREAD",
    Severity.warning,
    "Data that a DMA writes is read before a DMA overwrites it with other data.",
)
PSUM_UNREAD = register_kind(
    "NKW-PSUM-UNREAD",
    Severity.warning,
    "The result of a matmul is read before another one overwrites it, and after the last one has added to it.",
)
STALE = register_kind(
    "NKW-STALE",
    Severity.warning,
    "An instruction that combines elements of a tile reads only what the last load has filled.",
)


def detect(launch: Launch, evidence: Evidence) -> list[Finding]:
    """Return findings for lost results and for leftovers of earlier loads, core by core."""
    shared = (MemoryRegion.shared_hbm,) if any(s.core for s in launch.streams) else ()
    findings: list[Finding] = []
    for stream in launch.streams:
        accesses, written = evidence.get_core(stream).accesses, evidence.get_core(stream).written
        findings += _find_overwritten(stream, accesses, written, shared)
        findings += _find_dropped(stream, accesses, evidence.get_core(stream).automatic)
        findings += _find_stale_reads(stream, evidence.get_core(stream).leftovers.reads)
    return findings


def _find_overwritten(
    stream: Stream,
    accesses: list[tuple[Access, ...]],
    written: dict[int, Footprint],
    skipped: tuple[MemoryRegion, ...],
) -> list[Finding]:
    """Return findings for writes by DMAs or matmuls to one view, with different bytes and no read between.

    Args:
        stream: The stream of the core.
        accesses: The accesses of every event.
        written: Footprints with digests of the writes of DMAs and matmuls, by event.
        skipped: Memories that another core may read.
    """
    findings = []
    pending: dict[int, dict[Footprint, tuple[int, Access]]] = {}  # by tensor
    lines: set[int] = set()
    for event, operands in enumerate(accesses):
        for access in operands:
            if access.mode == READ and access.tensor in pending:
                kept = pending[access.tensor]
                pending[access.tensor] = {f: w for f, w in kept.items() if not _has_overlap(w[1], access)}
        view = written.get(event)
        if view is None or stream.tensors[view.tensor].buffer in skipped:
            continue
        access = next(a for a in operands if a.tensor == view.tensor and a.mode != READ)
        waiting = pending.setdefault(view.tensor, {})
        before = waiting.get(view)
        line = stream.line_ids[event]
        if access.mode == ACCUMULATE:
            if before is not None:
                waiting[view] = event, access
            continue
        lost = before is not None and written[before[0]].digest != view.digest and line not in lines
        if lost and before is not None:
            lines.add(line)
            findings.append(_report_lost(stream, before, (event, access)))
        waiting.pop(view, None)  # a key that is equal would be kept, with the digest of the earlier write
        waiting[view] = event, access
    return findings


def _report_lost(stream: Stream, before: tuple[int, Access], after: tuple[int, Access]) -> Finding:
    record = stream.tensors[after[1].tensor]
    in_psum = record.buffer is MemoryRegion.psum
    subject = "the result that a matmul wrote" if in_psum else "the data that a DMA wrote"
    is_same_line = stream.line_ids[before[0]] == stream.line_ids[after[0]]
    when = "when the line runs again" if is_same_line else "by a later one"
    return make_finding(
        PSUM_UNREAD if in_psum else UNREAD,
        f"{subject} to {record.name} {record.shape} is overwritten {when}, and nothing read it",
        stream.event(after[0]).where,
        (describe_access(stream, *before), describe_access(stream, *after)),
        hint=_LOST_HINTS[in_psum, is_same_line],
    )


_LOST_HINTS = {
    (True, True): "accumulate=(k > 0), where k is the loop over the contraction",
    (True, False): "accumulate=True to add to it, or read it before",
    (False, True): "index the destination by the loop variable, or read the buffer that was loaded",
    (False, False): "drop the first DMA, or give each its own destination",
}
"""Hints by memory (whether PSUM) and by whether the same line wrote twice."""


def _find_dropped(stream: Stream, accesses: list[tuple[Access, ...]], automatic: set[int]) -> list[Finding]:
    """Return findings for sums in PSUM to which a matmul adds after their last read, so that the added part is lost.

    With accumulate=None the detector `device` reports the sum as reopened.

    Args:
        stream: The stream of the core.
        accesses: The accesses of every event.
        automatic: Events that are matmuls with accumulate=None.
    """
    read: dict[int, tuple[int, Access]] = {}
    added: dict[int, tuple[int, Access]] = {}
    for event, operands in enumerate(accesses):
        for access in operands:
            if stream.tensors[access.tensor].buffer is not MemoryRegion.psum:
                continue
            if access.mode == READ:
                read[access.tensor] = event, access
                added.pop(access.tensor, None)
            elif access.mode == WRITE:
                read.pop(access.tensor, None)
                added.pop(access.tensor, None)
            elif (
                event not in automatic
                and access.tensor in read
                and _has_overlap(read[access.tensor][1], access)
            ):
                added[access.tensor] = event, access
    return [
        make_finding(
            PSUM_UNREAD,
            f"a matmul adds to {stream.tensors[tensor].name} {stream.tensors[tensor].shape} after the last "
            "read of it, so the added part is lost",
            stream.event(read[tensor][0]).where,
            (describe_access(stream, *read[tensor]), describe_access(stream, *last)),
            hint="read the sum after the last accumulation",
        )
        for tensor, last in added.items()
    ]


def _find_stale_reads(stream: Stream, reads: list[StaleRead]) -> list[Finding]:
    """Return a finding for each line that combines or stores leftovers; the slots of a ring buffer are exempt."""
    findings = []
    lines: set[int] = set()
    for stale in reads:
        if stream.line_ids[stale.event] in lines or _is_ring(stream, stale.leftover):
            continue
        lines.add(stream.line_ids[stale.event])
        reading, record = stream.event(stale.event), stream.tensors[stale.tensor]
        access = next(a for a in reading.accesses if a.tensor == stale.tensor and a.mode == READ)
        fills = [
            describe_access(stream, event, _find_write(stream, event, tensor))
            for event, tensor in (stale.leftover.old, stale.leftover.new)
        ]
        filled = stale.leftover.new[1] == stale.tensor
        fill_text = "its last load" if filled else "the last load that it was computed from"
        findings.append(
            make_finding(
                STALE,
                f"{reading.op} reads more of {record.name} {record.shape} than {fill_text} filled; the rest is "
                "stale data of the load before",
                reading.where,
                (*fills, describe_access(stream, stale.event, access)),
                hint="slice the operands to the rows and columns that the last load filled, or memset the rest",
            )
        )
    return findings


def _is_ring(stream: Stream, leftover: Leftover) -> bool:
    """Return whether the line of the later fill writes next where that fill ended, as in a ring buffer."""
    event, tensor = leftover.new
    new = _find_write(stream, event, tensor)
    for later in range(event + 1, len(stream)):
        if stream.line_ids[later] != stream.line_ids[event]:
            continue
        access = next((a for a in stream.accesses(later) if a.tensor == tensor and a.mode != READ), None)
        if access is not None and (
            access.first_row == new.end_row if leftover.axis == 0 else access.first_byte == new.end_byte
        ):
            return True
    return False


def _find_write(stream: Stream, event: int, tensor: int) -> Access:
    return next(a for a in stream.accesses(event) if a.tensor == tensor and a.mode != READ)


def _has_overlap(one: Access, other: Access) -> bool:
    return (
        one.first_row < other.end_row
        and other.first_row < one.end_row
        and one.first_byte < other.end_byte
        and other.first_byte < one.end_byte
    )
