"""`device`: sums in PSUM that are right in simulation and known to be wrong on the chip.

A sum is built by matmuls that accumulate onto one PSUM tile. An event is the index of an instruction in a
core's stream.
"""

from __future__ import annotations

from simulate.check.evidence import Evidence
from simulate.check.findings import Finding, Severity, describe_access, make_finding, register_kind
from simulate.hardware import Hardware
from simulate.memory import MemoryRegion
from simulate.run import Launch
from simulate.run.stream import ACCUMULATE, READ, WRITE, Access, Stream

PSUM_INIT = register_kind(
    "NKW-PSUM-INIT",
    Severity.warning,
    "Before gen4 a matmul accumulates only onto what a matmul wrote, not onto a memset or a copy.",
)
REOPENED = register_kind(
    "NKW-PSUM-REOPENED",
    Severity.warning,
    "A PSUM tile is reset before its next sum; accumulate=None never resets a tile that was read.",
)
OPEN = register_kind(
    "NKW-PSUM-OPEN",
    Severity.warning,
    "A sum in PSUM is read after the last matmul has added to it, not between its matmuls.",
)


def detect(launch: Launch, evidence: Evidence) -> list[Finding]:
    """Return findings for sums in PSUM that are wrong or undefined on the chip, core by core.

    NKW-PSUM-INIT and NKW-PSUM-REOPENED concern the start of a sum, NKW-PSUM-OPEN a read before its end.
    """
    findings: list[Finding] = []
    for stream in launch.streams:
        automatic = evidence.get_core(stream).automatic
        findings += _find_wrong_starts(stream, evidence.get_core(stream).accesses, launch.hardware, automatic)
        findings += _find_early_reads(stream, evidence.get_core(stream).accesses, automatic)
    return findings


def _find_wrong_starts(
    stream: Stream, accesses: list[tuple[Access, ...]], chip: Hardware, automatic: set[int]
) -> list[Finding]:
    """Return a finding for each line on which a matmul accumulates onto a PSUM tile without a valid start of its sum.

    A start is invalid if another instruction than a matmul wrote it (NKW-PSUM-INIT). With accumulate=None it
    is also invalid if the old sum was read before and is still in the tile (NKW-PSUM-REOPENED).

    Args:
        stream: The stream of the core.
        accesses: The accesses of every event of the stream.
        chip: The chip, some of which accumulate onto what any instruction wrote.
        automatic: Events that are matmuls with accumulate=None.
    """
    findings: list[Finding] = []
    lines: set[int] = set()
    tiles: dict[int, dict[Access, int]] = {}
    for index, operands in enumerate(accesses):
        for access in operands:
            if stream.tensors[access.tensor].buffer is not MemoryRegion.psum:
                continue
            history = tiles.setdefault(access.tensor, {})
            if access.mode == ACCUMULATE:
                if stream.line_ids[index] not in lines:
                    finding = _check_start(stream, history, index, access, chip, index in automatic)
                    if finding is not None:
                        lines.add(stream.line_ids[index])
                        findings.append(finding)
                history.setdefault(access, index)
                continue
            if access.mode == WRITE:
                history = tiles[access.tensor] = {
                    a: i for a, i in history.items() if not _is_covering(access, a)
                }
            history[access] = index
    return findings


def _find_early_reads(
    stream: Stream, accesses: list[tuple[Access, ...]], automatic: set[int]
) -> list[Finding]:
    """Return a finding for each line that reads a sum which a matmul adds to afterwards and something reads again.

    A sum that nothing reads again is left to NKW-PSUM-UNREAD, and one with accumulate=None to
    NKW-PSUM-REOPENED.

    Args:
        stream: The stream of the core.
        accesses: The accesses of every event of the stream.
        automatic: Events that are matmuls with accumulate=None.
    """
    findings: list[Finding] = []
    reported_lines: set[int] = set()
    reads: dict[int, list[tuple[int, Access]]] = {}  # by tensor, since its last overwriting
    reopened: dict[
        int, list[tuple[tuple[int, Access], tuple[int, Access]]]
    ] = {}  # by tensor: a read, an addition
    for event, operands in enumerate(accesses):
        for access in operands:
            tensor = access.tensor
            if stream.tensors[tensor].buffer is not MemoryRegion.psum:
                continue
            if access.mode == WRITE:
                reads[tensor] = [read for read in reads.get(tensor, ()) if not _has_overlap(read[1], access)]
                reopened[tensor] = [
                    pair for pair in reopened.get(tensor, ()) if not _has_overlap(pair[1][1], access)
                ]
            elif access.mode == ACCUMULATE and event not in automatic:
                earlier = [read for read in reads.get(tensor, ()) if _has_overlap(read[1], access)]
                reopened.setdefault(tensor, []).extend((read, (event, access)) for read in earlier[-1:])
            elif access.mode == READ:
                for read, addition in reopened.pop(tensor, ()):
                    line = stream.line_ids[read[0]]
                    if line not in reported_lines and _has_overlap(addition[1], access):
                        reported_lines.add(line)
                        findings.append(_report_open_sum(stream, read, addition))
                reads[tensor] = [read for read in reads.get(tensor, ()) if read[1] != access]
                reads[tensor].append((event, access))
    return findings


def _report_open_sum(stream: Stream, read: tuple[int, Access], addition: tuple[int, Access]) -> Finding:
    reading, record = stream.event(read[0]), stream.tensors[read[1].tensor]
    return make_finding(
        OPEN,
        f"{reading.op} reads {record.name} {record.shape} of PSUM before {stream.event(addition[0]).op} adds to it, "
        "so it reads a part of the sum",
        reading.where,
        (describe_access(stream, *read), describe_access(stream, *addition)),
        hint="read the sum after its last matmul, or give every sum a tile of its own",
    )


def _check_start(
    stream: Stream, history: dict[Access, int], index: int, access: Access, chip: Hardware, automatic: bool
) -> Finding | None:
    record = stream.tensors[access.tensor]
    before = sorted(((i, a) for a, i in history.items() if _has_overlap(access, a)), key=lambda use: use[0])
    writes = [(i, a) for i, a in before if a.mode == WRITE]
    # Writes before the last one that covers the access are not part of the sum.
    restart = max((i for i, a in writes if _is_covering(a, access)), default=0)
    foreign = [(i, a) for i, a in writes if i >= restart and not stream.effects(i).sums_products]
    if foreign and not chip.psum_accumulate_after_other_write:
        writer = stream.event(foreign[-1][0]).op
        return make_finding(
            PSUM_INIT,
            f"a matmul accumulates onto {record.name} {record.shape} of PSUM, which {writer} wrote: the sum is "
            f"undefined on {chip.name}",
            stream.event(index).where,
            (describe_access(stream, *foreign[-1]), describe_access(stream, index, access)),
            hint="accumulate=False for the first matmul; add the initial value afterwards",
        )
    started = [(i, a) for i, a in before if a.mode == ACCUMULATE]
    reads = [(i, a) for i, a in before if a.mode == READ and started and i > started[0][0]]
    if automatic and reads:
        return make_finding(
            REOPENED,
            f"a matmul with accumulate=None adds to {record.name} {record.shape} of PSUM after "
            f"{stream.event(reads[-1][0]).op} read it: the old sum is still in the tile",
            stream.event(index).where,
            (describe_access(stream, *reads[-1]), describe_access(stream, index, access)),
            hint="accumulate=(k > 0), or allocate the tile inside the outer loop",
        )
    return None


def _has_overlap(one: Access, other: Access) -> bool:
    return (
        one.first_row < other.end_row
        and other.first_row < one.end_row
        and one.first_byte < other.end_byte
        and other.first_byte < one.end_byte
    )


def _is_covering(one: Access, other: Access) -> bool:
    return (
        one.first_row <= other.first_row
        and one.end_row >= other.end_row
        and one.first_byte <= other.first_byte
        and one.end_byte >= other.end_byte
    )
