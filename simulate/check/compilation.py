"""`compilation`: operands that simulator and reference accept, and that users report as refused by the compiler.

The reports name no document, so each detector matches only the reported pattern. Views with run-time
addresses are not reported. A detector here is a function of a template, the form that all calls of one
instruction with equal operand layouts share; it yields (index of the refused operand, what is wrong with it,
what to do).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from simulate.check.evidence import Evidence
from simulate.check.findings import (
    Finding,
    FindingKind,
    Severity,
    describe_access,
    make_finding,
    register_kind,
)
from simulate.isa.template import Template
from simulate.memory import MemoryRegion
from simulate.run import Launch
from simulate.run.stream import Stream

PARTITIONS = register_kind(
    "NKW-DMA-PARTITIONS",
    Severity.warning,
    "A DMA between two tiles in SBUF reads as many partitions as it writes (public reports).",
    is_expected=True,
)
HALF_START = register_kind(
    "NKW-PSUM-HALF-START",
    Severity.warning,
    "A result of a 16-bit dtype in PSUM starts at a multiple of 4 bytes in its partition (public reports).",
    is_expected=True,
)
ROW_STRIDE = register_kind(
    "NKW-DMA-TRANSPOSE-STRIDE",
    Severity.warning,
    "The rows of a DMA transpose's destination are a multiple of 32 bytes apart (public reports).",
    is_expected=True,
)
STEP_ZERO = register_kind(
    "NKW-PARTITION-STEP-ZERO",
    Severity.warning,
    "The partition step of a view on chip is the row's size, also where the view has one row (public reports).",
)

_PSUM_START_BYTES, _TRANSPOSE_STRIDE_BYTES = 4, 32

_RefusedOperand = tuple[int, str, str]
"""The index of an operand, what is wrong with it, and what to do."""


def detect(launch: Launch, evidence: Evidence) -> list[Finding]:
    """Return one finding for each line and each of the four rules of this module that it breaks, core by core."""
    findings: list[Finding] = []
    for stream in launch.streams:
        for rule, find_operands in _RULES:
            findings += _find_broken_lines(stream, rule, find_operands)
    return findings


def _find_broken_lines(
    stream: Stream, rule: FindingKind, find_operands: Callable[[Template], Iterator[_RefusedOperand]]
) -> Iterator[Finding]:
    """Yield a finding for the first event of each line whose template breaks a rule.

    Args:
        stream: The stream of the core.
        rule: The kind of the findings.
        find_operands: Yields the refused operands of a template; the first one is reported.
    """
    operands = [next(find_operands(template), None) for template in stream.templates]
    if not any(operands):
        return
    reported_lines: set[int] = set()
    for event, template in enumerate(stream.template_ids):
        refused, line = operands[template], stream.line_ids[event]
        if refused is None or line in reported_lines:
            continue
        reported_lines.add(line)
        operand, problem, hint = refused
        instruction = stream.event(event)
        access = stream.accesses(event)[operand]
        name = stream.tensors[access.tensor].name
        yield make_finding(
            rule,
            f"{instruction.op} {problem.format(name=name)} (public reports: the compiler refuses it)",
            instruction.where,
            (describe_access(stream, event, access),),
            hint=hint,
        )


def _find_different_partitions(template: Template) -> Iterator[_RefusedOperand]:
    """Yield the destination of a DMA copy between tiles in SBUF that differ in their number of partitions."""
    if not template.plan.effects.copies:
        return
    source, target = (template.operands[operands[0]] for operands in (template.reads, template.writes))
    if source.buffer is target.buffer is MemoryRegion.sbuf and source.shape[0] != target.shape[0]:
        yield (
            template.writes[0],
            f"spreads {source.shape[0]} partitions of SBUF over {target.shape[0]} of {{name}}",
            "one DMA for each partition, or copy by way of a tensor in nl.private_hbm",
        )


def _find_odd_starts(template: Template) -> Iterator[_RefusedOperand]:
    """Yield each result of a 2-byte dtype in PSUM whose first byte in its partition is not a multiple of 4."""
    for index in template.writes:
        target = template.operands[index]
        if target.buffer is MemoryRegion.psum and target.dtype.itemsize == 2 and target.dynamic is None:
            first = target.layout.rows[2]
            if first % _PSUM_START_BYTES:
                yield (
                    index,
                    f"writes {target.dtype} to {{name}} from byte {first} of its partitions on",
                    "start every slot at an even element, for example with one padding column",
                )


def _find_odd_row_strides(template: Template) -> Iterator[_RefusedOperand]:
    """Yield the destination of a DMA transpose if its rows are not a multiple of 32 bytes apart.

    A transpose with one row, or with one element in each row, is not reported: it only spreads a row of HBM
    over partitions, as the vendor's kernels do.
    """
    if not template.plan.effects.transposes:
        return
    target = template.operands[template.writes[0]]
    stride = target.strides[0] * target.dtype.itemsize
    if min(target.shape[0], target.size // target.shape[0]) > 1 and stride % _TRANSPOSE_STRIDE_BYTES:
        yield (
            template.writes[0],
            f"writes rows to {{name}} that are {stride} bytes apart",
            f"pad the tile's free size to a multiple of {_TRANSPOSE_STRIDE_BYTES} bytes, and slice it",
        )


def _find_zero_steps(template: Template) -> Iterator[_RefusedOperand]:
    """Yield each operand in SBUF or PSUM that has a single row and a partition step of 0."""
    for index in (*template.reads, *template.writes):
        view = template.operands[index]
        if view.buffer.on_chip and view.dynamic is None and view.shape[0] == 1 and view.strides[0] == 0:
            yield (
                index,
                "takes a view of {name} whose partition step is 0",
                "slice the tile, or make the first step of .ap the size of a row",
            )


_RULES: tuple[tuple[FindingKind, Callable[[Template], Iterator[_RefusedOperand]]], ...] = (
    (PARTITIONS, _find_different_partitions),
    (HALF_START, _find_odd_starts),
    (ROW_STRIDE, _find_odd_row_strides),
    (STEP_ZERO, _find_zero_steps),
)
