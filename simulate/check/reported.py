"""`reported`: patterns that users report as right in simulation and wrong on the chip, and that no document explains.

Each finding says that its source is a user report. The reports name no mechanism, so each detector matches only the
reported pattern. The docstrings of the functions say which similar patterns are not reported.
"""

from __future__ import annotations

from simulate.check.evidence import Evidence
from simulate.check.findings import Finding, Severity, describe_access, make_finding, register_kind
from simulate.isa.enums import Engine
from simulate.isa.template import Template
from simulate.run import Launch
from simulate.run.stream import READ, Access, Stream

EXPONENTIAL = register_kind(
    "NKW-EXPONENTIAL-IDLE",
    Severity.warning,
    "exponential with reduce_cmd idle is not followed by other work of the Vector engine (a user report).",
)
OFFSET = register_kind(
    "NKW-OFFSET-COMPUTED",
    Severity.warning,
    "A run-time offset inside a device loop is the loop's counter or loaded, not computed there (a user report).",
)
SCALES = register_kind(
    "NKW-SCALES-CONTRACTED",
    Severity.warning,
    "A matmul does not sum 8-bit data over partitions that have different scales (a user report).",
)
_COMPUTES = (Engine.vector, Engine.scalar, Engine.gpsimd)


def detect(launch: Launch, evidence: Evidence) -> list[Finding]:
    """Return a finding for each line that has a pattern of a user report, core by core."""
    findings: list[Finding] = []
    for stream in launch.streams:
        seen = evidence.get_core(stream)
        findings += _find_idle_exponentials(stream)
        findings += _find_computed_offsets(stream, seen.accesses) if stream.loops else []
        findings += _find_contracted_scales(stream, seen.values.scaled_apart)
    return findings


def _find_idle_exponentials(stream: Stream) -> list[Finding]:
    """Return findings for exponentials with reduce_cmd idle that another instruction of the Vector engine follows.

    An exponential that reads out the registers as well is a different error, NKW-REGISTERS-IDLE.
    """
    is_idle = [
        template.plan.effects.is_idle_exponential
        and template.plan.registers is not None
        and not template.plan.registers.read_out
        for template in stream.templates
    ]
    if not any(is_idle):
        return []
    findings: list[Finding] = []
    pending: dict[int, int] = {}  # by line, the first exponential that no other instruction has followed yet
    reported_lines: set[int] = set()
    for event, number in enumerate(stream.template_ids):
        line = stream.line_ids[event]
        if is_idle[number]:
            if line not in reported_lines:
                pending.setdefault(line, event)
        elif pending and stream.templates[number].plan.engine is Engine.vector:
            for earlier in pending.values():
                exponential, follower = stream.event(earlier), stream.event(event)
                findings.append(
                    make_finding(
                        EXPONENTIAL,
                        f"{exponential.op} with reduce_cmd idle, then {follower.op} on the Vector engine "
                        "(a user report: wrong on the chip)",
                        exponential.where,
                        (
                            describe_access(stream, earlier, _get_first_write(exponential.accesses)),
                            describe_access(stream, event, _get_first_write(follower.accesses)),
                        ),
                        hint="reduce_cmd=nisa.reduce_cmd.reset_reduce, or nisa.activation(op=nl.exp)",
                    )
                )
            reported_lines |= pending.keys()
            pending.clear()
    return findings


def _get_first_write(accesses: tuple[Access, ...]) -> Access:
    return next((access for access in accesses if access.mode != READ), accesses[0])


def _find_computed_offsets(stream: Stream, accesses: list[tuple[Access, ...]]) -> list[Finding]:
    """Return findings for run-time offsets of views that were computed inside a device loop around the access.

    A copy by the Vector, Scalar or GpSimd engine counts as a computation. A DMA or a register load passes on
    whether its source was computed in the loop. Row indices of each partition are not offsets.
    """
    findings: list[Finding] = []
    reported_lines: set[int] = set()
    computed: dict[int, tuple[int, frozenset[int]]] = {}  # by tensor: the event that computed it, its loops
    for event, iterations in stream.loops.items():
        template = stream.template(event)
        loops = frozenset(stream.iterations[iteration] for iteration in iterations)
        operands = accesses[event]
        for operand_index in _list_offset_operands(template):
            writer = computed.get(operands[operand_index].tensor)
            if writer is None or not writer[1] & loops or stream.line_ids[event] in reported_lines:
                continue
            reported_lines.add(stream.line_ids[event])
            offset = stream.tensors[operands[operand_index].tensor]
            findings.append(
                make_finding(
                    OFFSET,
                    f"{offset.name} {offset.shape} is computed in a device loop and is the offset of a view in it "
                    "(a user report: taken as absolute inside a larger graph)",
                    stream.event(event).where,
                    (
                        describe_access(stream, writer[0], _get_first_write(accesses[writer[0]])),
                        describe_access(stream, event, operands[operand_index]),
                    ),
                    hint="the loop's counter as scalar_offset, with indirect_dim for its unit; or load the offset",
                )
            )
        _trace_computed(template, event, loops, operands, computed)
    return findings


def _list_offset_operands(template: Template) -> list[int]:
    """Return the operand indices of the scalar offsets of a template's views; each follows its view."""
    if template.direct:
        return []
    offsets = []
    for view_index in (*template.reads, *template.writes):
        dynamic = template.operands[view_index].dynamic
        if dynamic is not None and not dynamic.per_partition:
            offsets.append(view_index + 1)
    return offsets


def _trace_computed(
    template: Template,
    event: int,
    loops: frozenset[int],
    operands: tuple[Access, ...],
    computed: dict[int, tuple[int, frozenset[int]]],
) -> None:
    """Update `computed`, in place, with the tensors that an event writes.

    Args:
        template: The template of the event.
        event: The event.
        loops: The device loops around the event.
        operands: The accesses of the event.
        computed: By tensor, the event that computed it and the loops around that event.
    """
    plan = template.plan
    sources = [
        computed[operands[read].tensor] for read in template.reads if operands[read].tensor in computed
    ]
    for write in template.writes:
        written = operands[write].tensor
        if plan.engine in _COMPUTES or plan.effects.is_scalar_arithmetic:
            computed[written] = event, loops
        elif sources:
            computed[written] = sources[0]
        else:
            computed.pop(written, None)


def _find_contracted_scales(stream: Stream, uses: list[tuple[int, int, int]]) -> list[Finding]:
    """Return findings for matmuls that sum 8-bit data over partitions with different scales.

    Scales are recognised by their effect: an instruction with a (P, 1) operand whose elements differ, which
    reads an 8-bit tile and keeps zeros zero. Only the tile that it writes counts, not copies or transposes of
    it. Wider dtypes do not count, because a weight for each input channel is usual there. Scales of MX
    formats belong to their instruction.

    Args:
        stream: The stream of the core.
        uses: The event of a matmul, its operand's tensor, and the event that scaled the tensor.
    """
    findings: list[Finding] = []
    reported_lines: set[int] = set()
    for event, operand, writer in uses:
        if stream.line_ids[event] in reported_lines:
            continue
        reported_lines.add(stream.line_ids[event])
        record = stream.tensors[operand]
        matmul, scaling = stream.event(event), stream.event(writer)
        read = next(access for access in matmul.accesses if access.tensor == operand and access.mode == READ)
        findings.append(
            make_finding(
                SCALES,
                f"{matmul.op} contracts {record.name} {record.shape}, which {scaling.op} scaled by another number in "
                "each partition (a user report: wrong on the chip)",
                matmul.where,
                (
                    describe_access(stream, writer, _get_first_write(scaling.accesses)),
                    describe_access(stream, event, read),
                ),
                hint="one scale for all partitions of a contraction, or a scale per column, applied to the result",
            )
        )
    return findings
