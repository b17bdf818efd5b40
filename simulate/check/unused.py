"""`unused`: results that nothing reads, on chip and in private HBM.

A move is an instruction that only copies a tile. A live event is one whose results reach HBM, a register or
another core.
"""

from __future__ import annotations

from simulate.check.evidence import CoreEvidence, Evidence
from simulate.check.findings import Finding, Severity, describe_access, make_finding, register_kind
from simulate.check.flow import ON_CHIP, Flow, find_live, find_source, has_other_effects, is_move
from simulate.isa.template import Template
from simulate.memory import MemoryRegion
from simulate.run import Launch
from simulate.run.stream import READ, Access, Line, Stream

UNUSED = register_kind(
    "NKW-RESULT-UNUSED",
    Severity.warning,
    "What an instruction computes, loads or stores to private HBM is read by some later instruction.",
)

_SCALAR_BYTES = 4
"""Bytes of a single number: an offset or a count, which a variant of a kernel may compute without using it."""


def detect(launch: Launch, evidence: Evidence) -> list[Finding]:
    """Return one finding for each line whose results, on chip or in private HBM, no event reads on any core."""
    read = _find_read_results(launch, evidence)
    findings: list[Finding] = []
    for stream in launch.streams:
        findings += _find_unused(stream, evidence.get_core(stream), read)
    return [*findings, *_find_unread_scratch(launch, evidence)]


_ResultKey = tuple[Line, str, int]
"""Line, instruction, and operand index of a result; equal on all cores and in all iterations."""


def _find_read_results(launch: Launch, evidence: Evidence) -> set[_ResultKey]:
    """Return the keys of results that any iteration on any core reads, and of those that `lost` follows."""
    read: set[_ResultKey] = set()
    for stream in launch.streams:
        flow = evidence.get_core(stream).flow
        sources = {
            *flow.read_sources,
            *(find_source(stream, w.event, w.operand_index) for w, _, _ in flow.overwritten),
        }
        read |= {(stream.lines[line], op, operand_index) for line, op, operand_index in sources}
    return read


def _find_unused(stream: Stream, seen: CoreEvidence, read: set[_ResultKey]) -> list[Finding]:
    """Return findings for results on chip that nothing reads, in any iteration and on any core.

    Exempt are constants, single numbers, and results that an instruction must write besides a result that is
    read. A move or an in-place update may prepare an iteration that does not come. It counts in three cases
    only: an input reaches no output because of it, its operand of the same shape and dtype is stored instead,
    or it changes a tile that was stored before. A load counts unless another load of the same elements is
    read.

    Args:
        stream: The stream of the core.
        seen: The facts about the stream.
        read: The keys of the results that are read.
    """
    accesses, flow = seen.accesses, seen.flow
    live = find_live(stream, accesses, flow)
    without_effect = _find_ineffective_inputs(stream, accesses, live)
    varying = _find_varying(stream, accesses, flow)
    findings: list[Finding] = []
    reported_lines: set[int] = set()
    for event, operands in enumerate(accesses):
        template = stream.template(event)
        line = stream.line_ids[event]
        if line in reported_lines or not template.plan.reads or not template.writes:
            continue
        line_and_op = stream.lines[line], template.op
        unread = [write for write in template.writes if (*line_and_op, write) not in read]
        writes = [operands[write] for write in template.writes]
        if not unread or any(stream.tensors[access.tensor].buffer not in ON_CHIP for access in writes):
            continue
        result_index = unread[0]
        if len(unread) < len(writes):
            if not _is_optional(template, result_index) or event not in varying:
                continue
        elif has_other_effects(stream, event) or stream.tensors[writes[0].tensor].nbytes <= _SCALAR_BYTES:
            continue
        elif template.plan.effects.copies:
            if _is_loaded_elsewhere(stream, accesses, event, read):
                continue
        elif event not in varying or is_move(template) or _is_in_place(operands):
            needed = _is_dependent(flow, accesses, event, without_effect)
            if not (
                needed
                or _is_replaced(stream, accesses, event)
                or _is_change_of_stored_tile(stream, accesses, event)
            ):
                continue
        reported_lines.add(line)
        record = stream.tensors[operands[result_index].tensor]
        findings.append(
            make_finding(
                UNUSED,
                f"nothing reads {record.name} {record.shape} {record.dtype}, which {stream.event(event).op} writes",
                stream.event(event).where,
                (describe_access(stream, event, operands[result_index]),),
                hint="use the tile where its result was meant to go, or drop the instruction",
            )
        )
    return findings


def _is_optional(template: Template, result_index: int) -> bool:
    """Return whether a result is an optional column, such as reduce_res, in another tensor than the main result.

    Args:
        template: The template of the instruction.
        result_index: The operand index of the result.
    """
    main, *optional = template.writes
    result = template.operands[result_index]
    return (
        optional == [result_index]
        and result.free_size == 1
        and result.storage is not template.operands[main].storage
    )


def _is_in_place(operands: tuple[Access, ...]) -> bool:
    """Return whether an instruction reads a tensor that it writes."""
    written = {access.tensor for access in operands if access.mode != READ}
    return any(access.mode == READ and access.tensor in written for access in operands)


def _find_varying(stream: Stream, accesses: list[tuple[Access, ...]], flow: Flow) -> set[int]:
    """Return the events whose results depend on a tensor in HBM, directly or through other results on chip.

    All other events compute constants.
    """
    varying: set[int] = set()
    for event, operands in enumerate(accesses):
        if not varying.isdisjoint(flow.producers.get(event, ())) or any(
            access.mode == READ and not stream.tensors[access.tensor].buffer.on_chip for access in operands
        ):
            varying.add(event)
    return varying


def _is_loaded_elsewhere(
    stream: Stream, accesses: list[tuple[Access, ...]], event: int, read: set[_ResultKey]
) -> bool:
    """Return whether another copy of the same elements is read, or goes to HBM, so that an unread copy is harmless.

    Args:
        stream: The stream of the core.
        accesses: The accesses of every event.
        event: The event of the unread copy.
        read: The keys of the results that are read.
    """
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


def _find_unread_scratch(launch: Launch, evidence: Evidence) -> list[Finding]:
    """Return a finding for each line whose writes to private HBM nothing reads, on any rank."""
    read: set[Line] = set()
    waiting: list[tuple[Stream, int, Access]] = []
    for stream in launch.streams:
        unread: dict[int, list[tuple[int, Access]]] = {}
        for event, operands in enumerate(evidence.get_core(stream).accesses):
            for access in operands:
                if access.mode == READ:
                    for earlier, _ in unread.pop(access.tensor, ()):
                        read.add(stream.lines[stream.line_ids[earlier]])
            for access in operands:
                record = stream.tensors[access.tensor]
                is_scratch = record.buffer is MemoryRegion.private_hbm and record.line is not None
                if access.mode != READ and is_scratch and stream.template(event).plan.rendezvous is None:
                    unread.setdefault(access.tensor, []).append((event, access))
        returned = {output.tensor for output in evidence.returned if output.rank == stream.rank}
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
            findings[line] = make_finding(
                UNUSED,
                f"nothing reads {record.name} {record.shape} {record.dtype} in private HBM after "
                f"{stream.event(event).op} writes it",
                stream.event(event).where,
                (describe_access(stream, event, access),),
                hint="write it before the instruction that should read it, or drop the write",
            )
    return list(findings.values())


def _find_ineffective_inputs(stream: Stream, accesses: list[tuple[Access, ...]], live: set[int]) -> set[int]:
    """Return the arguments of the kernel that are read, but by no event whose results leave the chip."""
    read: dict[int, bool] = {}
    for event, operands in enumerate(accesses):
        for access in operands:
            record = stream.tensors[access.tensor]
            if access.mode == READ and record.line is None and not record.buffer.on_chip:
                read[access.tensor] = read.get(access.tensor, False) or event in live
    return {tensor for tensor, has_effect in read.items() if not has_effect}


def _is_dependent(flow: Flow, accesses: list[tuple[Access, ...]], event: int, tensors: set[int]) -> bool:
    """Return whether a result of an event depends, through tiles on chip, on any of the tensors."""
    waiting, seen = [event], {event}
    while tensors and waiting:
        current = waiting.pop()
        if any(access.mode == READ and access.tensor in tensors for access in accesses[current]):
            return True
        waiting += flow.producers.get(current, set()) - seen
        seen |= flow.producers.get(current, set())
    return False


def _is_replaced(stream: Stream, accesses: list[tuple[Access, ...]], event: int) -> bool:
    """Return whether an operand of the result's shape and dtype is stored to HBM later, instead of the result.

    A copy of that operand counts as well.
    """
    template = stream.template(event)
    result = stream.tensors[accesses[event][template.writes[0]].tensor]
    sources = {
        access.tensor
        for access in accesses[event]
        if access.mode == READ
        and stream.tensors[access.tensor].shape == result.shape
        and stream.tensors[access.tensor].dtype == result.dtype
    }
    for later in range(event + 1, len(accesses)):
        following = stream.template(later)
        if not sources or not is_move(following):
            continue
        written = [accesses[later][write].tensor for write in following.writes]
        if accesses[later][following.reads[0]].tensor in sources:
            if any(stream.tensors[tensor].buffer not in ON_CHIP for tensor in written):
                return True
            sources.update(written)
    return False


def _is_change_of_stored_tile(stream: Stream, accesses: list[tuple[Access, ...]], event: int) -> bool:
    """Return whether an instruction changes a tile in place that a DMA has stored to HBM before."""
    changed = {access.tensor for access in accesses[event] if access.mode != READ}
    changed &= {access.tensor for access in accesses[event] if access.mode == READ}
    return any(
        stream.effects(earlier).copies
        and any(access.mode == READ and access.tensor in changed for access in accesses[earlier])
        and any(
            access.mode != READ and stream.tensors[access.tensor].buffer not in ON_CHIP
            for access in accesses[earlier]
        )
        for earlier in range(event)
        if changed
    )
