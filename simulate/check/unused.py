"""`unused`: results that an output should contain, and that nothing reads."""

from __future__ import annotations

from simulate.check.evidence import CoreEvidence, Evidence
from simulate.check.findings import Finding, Severity, found, kind, touch
from simulate.check.flow import ON_CHIP, Flow, find_live, has_other_effects, is_move, source_of
from simulate.run import Launch
from simulate.run.stream import READ, Access, Stream

UNUSED = kind(
    "NKW-RESULT-UNUSED",
    Severity.warning,
    "A tile that an instruction computes or loads is read by some later instruction.",
)

_SCALAR_BYTES = 4
"""Single numbers are offsets and counts, which a variant of a kernel may compute for nothing."""


def detect(launch: Launch, evidence: Evidence) -> list[Finding]:
    """Return one finding for each line whose results nothing reads, core by core."""
    findings: list[Finding] = []
    for stream in launch.streams:
        findings += _unused(stream, evidence.of(stream))
    return findings


def _unused(stream: Stream, seen: CoreEvidence) -> list[Finding]:
    """Return findings for computed results that nothing reads and that an output should contain.

    Kernels with variants compute results that one variant does not need. So a result counts only if an input reaches
    no output because of it, if its operand of the same shape and dtype is stored in its place, or if it changes a tile
    that was stored before. A result of a line that computes a used one in another round counts never.
    """
    accesses, flow = seen.accesses, seen.flow
    live = find_live(stream, accesses, flow)
    without_effect = _without_effect(stream, accesses, live)
    findings: list[Finding] = []
    said: set[int] = set()
    known = flow.read_sources | {source_of(stream, write.event) for write, _, _ in flow.overwritten}
    for event, operands in enumerate(accesses):
        template = stream.template(event)
        line = stream.line_ids[event]
        if (
            line in said
            or source_of(stream, event) in known
            or not template.plan.reads
            or not template.writes
        ):
            continue
        writes = [operands[place] for place in template.writes]
        on_chip = all(stream.tensors[access.tensor].buffer in ON_CHIP for access in writes)
        if not on_chip or template.plan.effects.copies or has_other_effects(stream, event):
            continue
        if stream.tensors[writes[0].tensor].nbytes <= _SCALAR_BYTES:
            continue
        needed = _reads_any(flow, accesses, event, without_effect)
        if not (needed or _is_replaced(stream, accesses, event) or _follows_store(stream, accesses, event)):
            continue
        said.add(line)
        record = stream.tensors[writes[0].tensor]
        findings.append(
            found(
                UNUSED,
                f"nothing reads {record.name} {record.shape} {record.dtype}, which {stream.event(event).op} writes",
                stream.event(event).where,
                (touch(stream, event, writes[0]),),
                hint="use the tile where its result was meant to go, or drop the instruction",
            )
        )
    return findings


def _without_effect(stream: Stream, accesses: list[tuple[Access, ...]], live: set[int]) -> set[int]:
    """Return the arguments of the kernel that are read, and by no event whose results leave the chip."""
    read: dict[int, bool] = {}
    for event, operands in enumerate(accesses):
        for access in operands:
            record = stream.tensors[access.tensor]
            if access.kind == READ and record.line is None and not record.buffer.on_chip:
                read[access.tensor] = read.get(access.tensor, False) or event in live
    return {tensor for tensor, has_effect in read.items() if not has_effect}


def _reads_any(flow: Flow, accesses: list[tuple[Access, ...]], event: int, tensors: set[int]) -> bool:
    """Return whether a result depends on one of the given tensors."""
    waiting, seen = [event], {event}
    while tensors and waiting:
        current = waiting.pop()
        if any(access.kind == READ and access.tensor in tensors for access in accesses[current]):
            return True
        waiting += flow.producers.get(current, set()) - seen
        seen |= flow.producers.get(current, set())
    return False


def _is_replaced(stream: Stream, accesses: list[tuple[Access, ...]], event: int) -> bool:
    """Return whether an operand of the result's shape and dtype is stored later, as it is or through a copy."""
    template = stream.template(event)
    result = stream.tensors[accesses[event][template.writes[0]].tensor]
    sources = {
        access.tensor
        for access in accesses[event]
        if access.kind == READ
        and stream.tensors[access.tensor].shape == result.shape
        and stream.tensors[access.tensor].dtype == result.dtype
    }
    for later in range(event + 1, len(accesses)):
        following = stream.template(later)
        if not sources or not is_move(following):
            continue
        written = [accesses[later][place].tensor for place in following.writes]
        if accesses[later][following.reads[0]].tensor in sources:
            if any(stream.tensors[tensor].buffer not in ON_CHIP for tensor in written):
                return True
            sources.update(written)
    return False


def _follows_store(stream: Stream, accesses: list[tuple[Access, ...]], event: int) -> bool:
    """Return whether an instruction changes a tile in place that a DMA has stored to HBM before."""
    changed = {access.tensor for access in accesses[event] if access.kind != READ}
    changed &= {access.tensor for access in accesses[event] if access.kind == READ}
    return any(
        stream.effects(earlier).copies
        and any(access.kind == READ and access.tensor in changed for access in accesses[earlier])
        and any(
            access.kind != READ and stream.tensors[access.tensor].buffer not in ON_CHIP
            for access in accesses[earlier]
        )
        for earlier in range(event)
        if changed
    )
