"""`unused`: results that nothing reads, on chip and in private HBM."""

from __future__ import annotations

from simulate.check.evidence import CoreEvidence, Evidence
from simulate.check.findings import Finding, Severity, found, kind, touch
from simulate.check.flow import ON_CHIP, Flow, find_live, has_other_effects, is_move, source_of
from simulate.isa.template import Template
from simulate.memory import MemoryRegion
from simulate.run import Launch
from simulate.run.stream import READ, Access, Line, Stream

UNUSED = kind(
    "NKW-RESULT-UNUSED",
    Severity.warning,
    "What an instruction computes, loads or stores to private HBM is read by some later instruction.",
)

_SCALAR_BYTES = 4
"""Single numbers are offsets and counts, which a variant of a kernel may compute for nothing."""


def detect(launch: Launch, evidence: Evidence) -> list[Finding]:
    """Return one finding for each line whose results nothing reads, core by core."""
    read = _read_on_any_core(launch, evidence)
    findings: list[Finding] = []
    for stream in launch.streams:
        findings += _unused(stream, evidence.of(stream), read)
    return [*findings, *_unread_scratch(launch, evidence)]


_Place = tuple[Line, str, int]
"""A line of a kernel, an instruction, and the place of a result among its operands, on all cores."""


def _read_on_any_core(launch: Launch, evidence: Evidence) -> set[_Place]:
    """Return the places of results of which some round on some core is read, or that `lost` judges."""
    read: set[_Place] = set()
    for stream in launch.streams:
        flow = evidence.of(stream).flow
        sources = {*flow.read_sources, *(source_of(stream, w.event, w.place) for w, _, _ in flow.overwritten)}
        read |= {(stream.lines[line], op, place) for line, op, place in sources}
    return read


def _unused(stream: Stream, seen: CoreEvidence, read: set[_Place]) -> list[Finding]:
    """Return findings for results on chip that nothing reads, in any round and on any core.

    Exempt are constants, single numbers, and results that an instruction has to write beside one that is read. A move
    or an update in place may prepare a round that does not come: it counts only if an input reaches no output because
    of it, if its operand of the same shape and dtype is stored in its place, or if it changes a tile that was stored
    before. A load counts unless another load of the same elements is read.
    """
    accesses, flow = seen.accesses, seen.flow
    live = find_live(stream, accesses, flow)
    without_effect = _without_effect(stream, accesses, live)
    varying = _depend_on_hbm(stream, accesses, flow)
    findings: list[Finding] = []
    said: set[int] = set()
    for event, operands in enumerate(accesses):
        template = stream.template(event)
        line = stream.line_ids[event]
        if line in said or not template.plan.reads or not template.writes:
            continue
        line_and_op = stream.lines[line], template.op
        unread = [place for place in template.writes if (*line_and_op, place) not in read]
        writes = [operands[place] for place in template.writes]
        if not unread or any(stream.tensors[access.tensor].buffer not in ON_CHIP for access in writes):
            continue
        place = unread[0]
        if len(unread) < len(writes):
            if not _is_optional(template, place) or event not in varying:
                continue
        elif has_other_effects(stream, event) or stream.tensors[writes[0].tensor].nbytes <= _SCALAR_BYTES:
            continue
        elif template.plan.effects.copies:
            if _is_loaded_elsewhere(stream, accesses, event, read):
                continue
        elif event not in varying or is_move(template) or _is_in_place(operands):
            needed = _reads_any(flow, accesses, event, without_effect)
            if not (
                needed or _is_replaced(stream, accesses, event) or _follows_store(stream, accesses, event)
            ):
                continue
        said.add(line)
        record = stream.tensors[operands[place].tensor]
        findings.append(
            found(
                UNUSED,
                f"nothing reads {record.name} {record.shape} {record.dtype}, which {stream.event(event).op} writes",
                stream.event(event).where,
                (touch(stream, event, operands[place]),),
                hint="use the tile where its result was meant to go, or drop the instruction",
            )
        )
    return findings


def _is_optional(template: Template, place: int) -> bool:
    """Return whether a result is a column beside the main result: the caller asks for it, as for reduce_res."""
    main, *others = template.writes
    result = template.operands[place]
    return (
        others == [place] and result.free_size == 1 and result.storage is not template.operands[main].storage
    )


def _is_in_place(operands: tuple[Access, ...]) -> bool:
    """Return whether an instruction reads a tensor that it writes."""
    written = {access.tensor for access in operands if access.kind != READ}
    return any(access.kind == READ and access.tensor in written for access in operands)


def _depend_on_hbm(stream: Stream, accesses: list[tuple[Access, ...]], flow: Flow) -> set[int]:
    """Return the events whose results depend on something in HBM; the others compute constants."""
    varying: set[int] = set()
    for event, operands in enumerate(accesses):
        if not varying.isdisjoint(flow.producers.get(event, ())) or any(
            access.kind == READ and not stream.tensors[access.tensor].buffer.on_chip for access in operands
        ):
            varying.add(event)
    return varying


def _is_loaded_elsewhere(
    stream: Stream, accesses: list[tuple[Access, ...]], event: int, read: set[_Place]
) -> bool:
    """Return whether a copy that something reads has the same source as a copy that nothing reads."""
    template = stream.template(event)
    source, view = accesses[event][template.reads[0]].tensor, template.operands[template.reads[0]]
    for other, operands in enumerate(accesses):
        copy = stream.template(other)
        if not copy.plan.effects.copies or operands[copy.reads[0]].tensor != source:
            continue
        if copy.operands[copy.reads[0]].layout is not view.layout:
            continue
        on_chip = stream.tensors[operands[copy.writes[0]].tensor].buffer in ON_CHIP
        if not on_chip or (stream.lines[stream.line_ids[other]], copy.op, copy.writes[0]) in read:
            return True
    return False


def _unread_scratch(launch: Launch, evidence: Evidence) -> list[Finding]:
    """Return a finding for each line whose writes to private HBM nothing reads, on any rank."""
    read: set[Line] = set()
    waiting: list[tuple[Stream, int, Access]] = []
    for stream in launch.streams:
        unread: dict[int, list[tuple[int, Access]]] = {}
        for event, operands in enumerate(evidence.of(stream).accesses):
            for access in operands:
                if access.kind == READ:
                    for earlier, _ in unread.pop(access.tensor, ()):
                        read.add(stream.lines[stream.line_ids[earlier]])
            for access in operands:
                record = stream.tensors[access.tensor]
                is_scratch = record.buffer is MemoryRegion.private_hbm and record.line is not None
                if access.kind != READ and is_scratch and stream.template(event).plan.rendezvous is None:
                    unread.setdefault(access.tensor, []).append((event, access))
        returned = {each.tensor for each in evidence.returned if each.rank == stream.rank}
        waiting += [
            (stream, event, access)
            for tensor, writes in unread.items()
            if tensor not in returned
            for event, access in writes
        ]
    findings: dict[Line, Finding] = {}
    for stream, event, access in waiting:
        line, record = stream.lines[stream.line_ids[event]], stream.tensors[access.tensor]
        if line not in read and line not in findings:
            findings[line] = found(
                UNUSED,
                f"nothing reads {record.name} {record.shape} {record.dtype} in private HBM after "
                f"{stream.event(event).op} writes it",
                stream.event(event).where,
                (touch(stream, event, access),),
                hint="write it before the instruction that should read it, or drop the write",
            )
    return list(findings.values())


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
