"""`reported`: what users report as right in simulation and wrong on the chip, without a document that explains it.

Each finding says that its source is a user report. The reports name no mechanism, so each detector keeps to the form
that a launch decides: see the functions for what is left out.
"""

from __future__ import annotations

from simulate.check.evidence import Evidence
from simulate.check.findings import Finding, Severity, found, kind, touch
from simulate.isa.enums import Engine
from simulate.isa.template import Template
from simulate.run import Launch
from simulate.run.stream import READ, Access, Stream

EXPONENTIAL = kind(
    "NKW-EXPONENTIAL-IDLE",
    Severity.warning,
    "exponential with reduce_cmd idle is not followed by other work of the Vector engine (a user report).",
)
OFFSET = kind(
    "NKW-OFFSET-COMPUTED",
    Severity.warning,
    "A run-time offset inside a device loop is the loop's counter or loaded, not computed there (a user report).",
)
SCALES = kind(
    "NKW-SCALES-CONTRACTED",
    Severity.warning,
    "8-bit data whose scales differ between partitions are not contracted over these (a user report).",
)
_COMPUTES = (Engine.vector, Engine.scalar, Engine.gpsimd)


def detect(launch: Launch, evidence: Evidence) -> list[Finding]:
    """The forms that users report, core by core, one finding per line."""
    findings: list[Finding] = []
    for stream in launch.streams:
        seen = evidence.of(stream)
        findings += _exponentials(stream)
        findings += _offsets(stream, seen.accesses) if stream.loops else []
        findings += _contracted(stream, seen.values.scaled_apart)
    return findings


def _exponentials(stream: Stream) -> list[Finding]:
    """Idle exponentials and the next other instruction of the Vector engine.

    An exponential that reads out the registers as well is an error of its own, NKW-REGISTERS-IDLE.
    """
    idle = [
        template.plan.effects.is_idle_exponential
        and template.plan.registers is not None
        and not template.plan.registers.read_out
        for template in stream.templates
    ]
    if not any(idle):
        return []
    findings: list[Finding] = []
    waiting: dict[int, int] = {}  # by line, the first exponential without later work so far
    said: set[int] = set()
    for event, number in enumerate(stream.template_ids):
        line = stream.line_ids[event]
        if idle[number]:
            if line not in said:
                waiting.setdefault(line, event)
        elif waiting and stream.templates[number].plan.engine is Engine.vector:
            for before in waiting.values():
                here, after = stream.event(before), stream.event(event)
                findings.append(
                    found(
                        EXPONENTIAL,
                        f"{here.op} with reduce_cmd idle, then {after.op} on the Vector engine "
                        "(a user report: wrong on the chip)",
                        here.where,
                        (
                            touch(stream, before, _result(here.accesses)),
                            touch(stream, event, _result(after.accesses)),
                        ),
                        hint="reduce_cmd=nisa.reduce_cmd.reset_reduce, or nisa.activation(op=nl.exp)",
                    )
                )
            said |= waiting.keys()
            waiting.clear()
    return findings


def _result(accesses: tuple[Access, ...]) -> Access:
    return next((each for each in accesses if each.kind != READ), accesses[0])


def _offsets(stream: Stream, accesses: list[tuple[Access, ...]]) -> list[Finding]:
    """Run-time offsets that an engine or scalar arithmetic wrote inside a device loop around the access.

    Copies by the Vector, Scalar and GpSimd engines count as computing. What a DMA or a register load brings counts
    where its source was computed in the loop. Row numbers per partition are not offsets.
    """
    findings: list[Finding] = []
    said: set[int] = set()
    computed: dict[int, tuple[int, frozenset[int]]] = {}  # by tensor: the event that computed it, its loops
    for event, around in stream.loops.items():
        template = stream.template(event)
        loops = frozenset(stream.iterations[iteration] for iteration in around)
        operands = accesses[event]
        for place in _offset_places(template):
            writer = computed.get(operands[place].tensor)
            if writer is None or not writer[1] & loops or stream.line_ids[event] in said:
                continue
            said.add(stream.line_ids[event])
            offset = stream.tensors[operands[place].tensor]
            findings.append(
                found(
                    OFFSET,
                    f"{offset.name} {offset.shape} is computed in a device loop and is the offset of a view in it "
                    "(a user report: taken as absolute inside a larger graph)",
                    stream.event(event).where,
                    (
                        touch(stream, writer[0], _result(accesses[writer[0]])),
                        touch(stream, event, operands[place]),
                    ),
                    hint="the loop's counter as scalar_offset, with indirect_dim for its unit; or load the offset",
                )
            )
        _after(template, event, loops, operands, computed)
    return findings


def _offset_places(template: Template) -> list[int]:
    """Where among the operands the offsets of views stand; each follows its view."""
    if template.direct:
        return []
    found_at = []
    for place in (*template.reads, *template.writes):
        dynamic = template.operands[place].dynamic
        if dynamic is not None and not dynamic.per_partition:
            found_at.append(place + 1)
    return found_at


def _after(
    template: Template,
    event: int,
    loops: frozenset[int],
    operands: tuple[Access, ...],
    computed: dict[int, tuple[int, frozenset[int]]],
) -> None:
    """Note what an event leaves in the tensors that it writes."""
    plan = template.plan
    sources = [
        computed[operands[place].tensor] for place in template.reads if operands[place].tensor in computed
    ]
    for place in template.writes:
        written = operands[place].tensor
        if plan.engine in _COMPUTES or plan.effects.is_scalar_arithmetic:
            computed[written] = event, loops
        elif sources:
            computed[written] = sources[0]
        else:
            computed.pop(written, None)


def _contracted(stream: Stream, uses: list[tuple[int, int, int]]) -> list[Finding]:
    """Matmuls that sum 8-bit data over partitions with different scales.

    Scales are known by their effect: an instruction with a (P, 1) operand whose elements differ, which reads an 8-bit
    tile and keeps zeros zero. Only its result itself counts, not copies or transposes of it. Wider data are left
    out, because a weight per input channel is usual there. Scales of MX formats belong to their instruction.
    """
    findings: list[Finding] = []
    said: set[int] = set()
    for event, operand, writer in uses:
        if stream.line_ids[event] in said:
            continue
        said.add(stream.line_ids[event])
        record = stream.tensors[operand]
        matmul, scaling = stream.event(event), stream.event(writer)
        read = next(each for each in matmul.accesses if each.tensor == operand and each.kind == READ)
        findings.append(
            found(
                SCALES,
                f"{matmul.op} contracts {record.name} {record.shape}, which {scaling.op} scaled by another number in "
                "each partition (a user report: wrong on the chip)",
                matmul.where,
                (touch(stream, writer, _result(scaling.accesses)), touch(stream, event, read)),
                hint="one scale for all partitions of a contraction, or a scale per column, applied to the result",
            )
        )
    return findings
