"""`mem`: tiles with overlapping explicit addresses, and placements beyond the end of a memory.

Every simulated tile has bytes of its own. On the chip, tiles with overlapping addresses share bytes: writing to a tile
destroys elements of another tile, which are intact in the simulator.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from simulate.check.evidence import Evidence
from simulate.check.findings import Finding, Severity, describe_access, make_finding, register_kind
from simulate.hardware import Hardware
from simulate.memory import MemoryRegion
from simulate.run import Launch
from simulate.run.machine import capacity_bytes
from simulate.run.stream import READ, WRITE, Access, Stream, TensorRecord

CLOBBERED = register_kind(
    "NKW-MEM-CLOBBER",
    Severity.error,
    "A tile is read before another tile overwrites its bytes; address= places both tiles there.",
)
PLACEMENT = register_kind(
    "NKW-MEM-PLACEMENT",
    Severity.warning,
    "Tiles fit into their memory when those without address= are placed by first fit around those with address=.",
)


@dataclass(frozen=True, slots=True)
class _Box:
    """Box of a memory: ranges (first, end) of partitions and of bytes in each partition, the ends excluded."""

    rows: tuple[int, int]
    bytes: tuple[int, int]

    def common(self, other: _Box) -> _Box | None:
        rows = max(self.rows[0], other.rows[0]), min(self.rows[1], other.rows[1])
        span = max(self.bytes[0], other.bytes[0]), min(self.bytes[1], other.bytes[1])
        return _Box(rows, span) if rows[0] < rows[1] and span[0] < span[1] else None

    def covers(self, other: _Box) -> bool:
        return (
            self.rows[0] <= other.rows[0]
            and self.rows[1] >= other.rows[1]
            and self.bytes[0] <= other.bytes[0]
            and self.bytes[1] >= other.bytes[1]
        )


def detect(launch: Launch, evidence: Evidence) -> list[Finding]:
    """Return findings for reads of bytes that another tile overwrote, and for tiles that end beyond SBUF or PSUM."""
    findings: list[Finding] = []
    for stream in launch.streams:
        findings += _find_clobbered(launch.hardware, stream, evidence.get_core(stream).accesses)
    findings += _find_overflows(launch)
    return findings


def _find_clobbered(chip: Hardware, stream: Stream, accesses: list[tuple[Access, ...]]) -> list[Finding]:
    addressed = [
        record
        for serial in stream.first_use
        if (record := stream.tensors[serial]).address is not None and record.buffer.on_chip
    ]
    pairs = _find_overlapping(stream, addressed)
    if not pairs:
        return []
    wanted = {record.serial for pair in pairs for record in pair}
    uses: dict[int, list[tuple[int, Access]]] = defaultdict(list)
    for index, operands in enumerate(accesses):
        for access in operands:
            if access.tensor in wanted:
                uses[access.tensor].append((index, access))
    findings = []
    for one, other in pairs:
        for victim, intruder in ((one, other), (other, one)):
            hint = _suggest_address(chip, stream, victim, intruder, addressed)
            findings += _find_lost_reads(stream, victim, intruder, uses, hint)
    return findings


def _find_lost_reads(
    stream: Stream,
    victim: TensorRecord,
    intruder: TensorRecord,
    uses: dict[int, list[tuple[int, Access]]],
    hint: str,
) -> list[Finding]:
    """Return a finding for the first access of `victim` whose bytes `intruder` overwrote; empty if there is none.

    An accumulation counts as a read, because it reads what it adds to. Bytes that `victim` rewrote since are
    not lost.

    Args:
        stream: The stream of the core.
        victim: The tile that is read.
        intruder: The tile with overlapping addresses.
        uses: The (event, access) pairs of each tile, by tensor.
        hint: The start of the hint, empty or with a trailing "or".
    """
    victim_writes = [
        (i, a.mode, _get_access_box(victim, a)) for i, a in uses[victim.serial] if a.mode != READ
    ]
    foreign = [(i, a, _get_access_box(intruder, a)) for i, a in uses[intruder.serial] if a.mode != READ]
    for index, access in uses[victim.serial]:
        if access.mode == WRITE:
            continue
        accessed = _get_access_box(victim, access)
        for event, write, box in reversed(foreign):
            lost = box.common(accessed)
            if lost is None:
                continue
            before = [b for i, _, b in victim_writes if i < event and b.common(lost)]
            renewed = [b for i, k, b in victim_writes if event < i < index and k == WRITE and b.covers(lost)]
            if event < index and before and not renewed:
                return [_report_lost(stream, victim, intruder, (index, access), (event, write), lost, hint)]
    return []


def _report_lost(
    stream: Stream,
    victim: TensorRecord,
    intruder: TensorRecord,
    read: tuple[int, Access],
    write: tuple[int, Access],
    lost: _Box,
    hint: str,
) -> Finding:
    memory = victim.buffer.value
    used = "read" if read[1].mode == READ else "added to"
    return make_finding(
        CLOBBERED,
        f"{victim.name} {victim.shape} at address {victim.address} is {used} after {intruder.name} "
        f"{intruder.shape} at address {intruder.address} overwrote partitions {lost.rows[0]}:{lost.rows[1]}, "
        f"bytes {lost.bytes[0]}:{lost.bytes[1]} of {memory}",
        stream.event(read[0]).where,
        (describe_access(stream, *write), describe_access(stream, *read)),
        hint=f"{hint}read {victim.name} before that write",
    )


def _suggest_address(
    chip: Hardware,
    stream: Stream,
    victim: TensorRecord,
    intruder: TensorRecord,
    addressed: list[TensorRecord],
) -> str:
    """Return the start of a hint with free bytes for the intruder while it is live; empty if there are none.

    In PSUM the bytes start at a bank. Bytes beyond the end of the victim are preferred.
    """
    step = chip.psum_bank_bytes if intruder.buffer is MemoryRegion.psum else 4
    first, last = stream.first_use[intruder.serial], stream.last_use[intruder.serial]
    taken = [
        _get_tile_box(other)
        for other in addressed
        if other is not intruder
        and other.buffer is intruder.buffer
        and stream.first_use[other.serial] <= last
        and stream.last_use[other.serial] >= first
    ]
    rows, end = _get_tile_box(intruder).rows, _get_tile_box(victim).bytes[1]
    starts = {-(-box.bytes[1] // step) * step for box in taken} | {0}
    for start in sorted(starts, key=lambda start: (start < end, start)):
        target = _Box(rows, (start, start + intruder.row_bytes))
        if target.bytes[1] <= capacity_bytes(chip, intruder.buffer) and not any(map(target.common, taken)):
            bank = f" (bank {start // step})" if intruder.buffer is MemoryRegion.psum else ""
            return f"put {intruder.name} at byte {start}{bank}, which is free, or "
    return ""


def _get_tile_box(record: TensorRecord) -> _Box:
    assert record.address is not None
    first, start = record.address
    return _Box((first, first + record.shape[0]), (start, start + record.row_bytes))


def _get_access_box(record: TensorRecord, access: Access) -> _Box:
    assert record.address is not None
    first, start = record.address
    return _Box(
        (first + access.first_row, first + access.end_row),
        (start + access.first_byte, start + access.end_byte),
    )


def _find_overlapping(stream: Stream, records: list[TensorRecord]) -> list[tuple[TensorRecord, TensorRecord]]:
    """Return the pairs of tiles in one memory that are live at the same time and whose boxes overlap.

    Args:
        stream: The stream of the core.
        records: Tiles with explicit addresses, in the order of their first use.
    """
    pairs: list[tuple[int, int]] = []
    alive: list[int] = []
    for index, record in enumerate(records):
        first, last, box = (
            stream.first_use[record.serial],
            stream.last_use[record.serial],
            _get_tile_box(record),
        )
        alive = [other for other in alive if stream.last_use[records[other].serial] > first]
        pairs += [
            (other, index)
            for other in alive
            if records[other].buffer is record.buffer
            and stream.first_use[records[other].serial] < last
            and _get_tile_box(records[other]).common(box)
        ]
        alive.append(index)
    return [(records[first_tile], records[other]) for first_tile, other in sorted(pairs)]


def _find_overflows(launch: Launch) -> list[Finding]:
    findings = []
    for stream, placements in zip(launch.streams, launch.placements):
        for buffer in (MemoryRegion.sbuf, MemoryRegion.psum):
            placement, limit = placements[buffer], capacity_bytes(launch.hardware, buffer)
            if not placement.live_bytes <= limit < placement.high_water_bytes:
                continue
            records = [stream.tensors[serial] for serial in placement.offsets]
            if all(record.address is None for record in records):
                continue  # without explicit addresses the compiler may pack better than first fit
            last = max(records, key=lambda record: placement.offsets[record.serial] + record.row_bytes)
            findings.append(
                make_finding(
                    PLACEMENT,
                    f"rank {stream.rank} core {stream.core}: {last.name} {last.shape} ends at byte "
                    f"{placement.high_water_bytes} of {buffer.value}, {placement.high_water_bytes - limit} beyond "
                    f"the usable {limit} on {launch.hardware.name}, because of the gaps between explicit addresses",
                    last.where,
                    hint="close the gaps between the explicit addresses, or give every tile an address",
                    callers=last.called_at,
                )
            )
    return findings
